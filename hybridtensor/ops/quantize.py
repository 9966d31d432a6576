"""Quantize a matrix into one or both faces: one operator for every format and every pair.

Shape letters: ``M`` rows, ``K`` columns, ``S`` delayed scales of a layer.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.ops.library import define
from hybridtensor.ops.references import float8, mx, nvfp4


class Cast(NamedTuple):
    """How a face is made.

    Attributes:
        name: Name of its format.
        pow2_scale: Whether current scaling rounds fp32 scales to powers of two, where the format does not say so.
        slot: Which delayed scale to cast with; -1 measures the tensor instead.
        stream: Random numbers to round with; -1 rounds to nearest.
    """

    name: str
    pow2_scale: bool = False
    slot: int = -1
    stream: int = -1

    @property
    def format(self) -> Format:
        """The record of the format."""
        return get_format(self.name)

    def for_columnwise(self) -> Cast:
        """Return the cast of the columnwise face, which never shares random numbers with the rowwise one."""
        return self if self.stream < 0 else self._replace(stream=self.stream + 1)

    def __str__(self) -> str:
        return f"{self.name};{int(self.pow2_scale)};{self.slot};{self.stream}"


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Cast | None:
    """Undo ``str(cast)``; the empty text is None."""
    if not text:
        return None
    name, pow2_scale, slot, stream = text.split(";")
    return Cast(name, pow2_scale == "1", int(slot), int(stream))


class _State(NamedTuple):
    """What casts need besides the tensor."""

    factors: Tensor | None
    amaxes: Tensor | None
    rounding: Tensor | None
    first_row: int


def quantize_reference(
    x: Tensor,
    row: str,
    column: str,
    source: str,
    dtype: torch.dtype,
    factors: Tensor | None,
    amaxes: Tensor | None,
    rounding: Tensor | None,
    first_row: int,
) -> list[Tensor]:
    """Define ``quantize``."""
    state = _State(factors, amaxes, rounding, first_row)
    row_cast, column_cast, source_cast = parse(row), parse(column), parse(source)
    made = [] if row_cast is None else _encode(x, row_cast, state, transposed=False)
    if column_cast is None:
        return made
    if source_cast is not None:
        seen = made if source_cast == row_cast else _encode(x, source_cast, state, transposed=False)
        tensor_scale = seen[2] if len(seen) == 3 else None
        values = dequantize_reference(seen[0], seen[1], tensor_scale, source_cast.name, dtype)
        return made + _encode(values.t(), column_cast, state, transposed=True)
    if row_cast == column_cast and is_transpose(row_cast):
        return made + [t.t().clone(memory_format=torch.contiguous_format) for t in made]
    return made + _encode(x.t(), column_cast, state, transposed=True)


def is_transpose(cast: Cast | None) -> bool:
    """Whether one face of this cast is the transpose of the other: bytes are transposed, not values quantized."""
    return cast is not None and cast.format.is_square and cast.format.elements_per_byte == 1


def _encode(matrix: Tensor, cast: Cast, state: _State, *, transposed: bool) -> list[Tensor]:
    """Quantize an ``[other, contraction]`` matrix along its last dimension."""
    return _laid_out(_defined(matrix, cast, state, transposed=transposed), cast)


def _defined(matrix: Tensor, cast: Cast, state: _State, *, transposed: bool) -> list[Tensor]:
    """Ask the definition of the format."""
    fmt = cast.format
    if fmt.tensor_block is not None:
        rounding = state.rounding if cast.stream >= 0 else None
        return list(nvfp4.quantize(matrix, fmt, rounding, cast.stream, state.first_row, transposed))
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return list(mx.quantize(matrix, fmt))
    if cast.slot < 0:
        return list(float8.quantize(matrix, fmt, cast.pow2_scale))
    if state.factors is None:
        raise ValueError(f"quantize: {cast} needs delayed scales, got none")
    return list(float8.cast(matrix, fmt, state.factors, state.amaxes, cast.slot))


def _laid_out(tensors: list[Tensor], cast: Cast) -> list[Tensor]:
    """Return a face with its scales where ``empty_face`` puts them."""
    if cast.format.block[0] == 1 and cast.format.block[1] is not None:
        tensors[1] = tensors[1].t().contiguous().t()
    return tensors


def _fake(
    x: Tensor,
    row: str,
    column: str,
    source: str,
    dtype: torch.dtype,
    factors: Tensor | None,
    amaxes: Tensor | None,
    rounding: Tensor | None,
    first_row: int,
) -> list[Tensor]:
    rows, columns = x.shape
    return [*empty_face(x, parse(row), rows, columns), *empty_face(x, parse(column), columns, rows)]


def empty_face(x: Tensor, cast: Cast | None, other: int, contraction: int) -> list[Tensor]:
    """Return the tensors of an ``[other, contraction]`` face on the device of ``x``, not filled.

    Scales of blocks along the contraction lie block by block, not row by row: so hardware reads them, and so one block
    of neighbouring rows is written at once.
    """
    if cast is None:
        return []
    fmt = cast.format
    rows, blocks = fmt.scale_shape(other, contraction)
    made = [
        x.new_empty((other, contraction // fmt.elements_per_byte), dtype=fmt.storage),
        x.new_empty((blocks, rows), dtype=fmt.scale_dtype).t()
        if fmt.block[0] == 1 and fmt.block[1] is not None
        else x.new_empty((rows, blocks), dtype=fmt.scale_dtype),
    ]
    tensor_scale = fmt.tensor_scale_shape(other, contraction)
    return made if tensor_scale is None else [*made, x.new_empty(tensor_scale, dtype=torch.float32)]


# The schema is silent about the write to ``amaxes``: a maximum that is noted twice, or in any order, is the same, and
# nothing reads it before the step ends. Declared, compiling would turn it into a copy of the parameter that carries it.
_OP = define(
    "quantize(Tensor x, str row, str column, str source, ScalarType dtype, Tensor? factors, Tensor? amaxes, "
    "Tensor? rounding, SymInt first_row) -> Tensor[]",
    reference=quantize_reference,
    fake=_fake,
)


def quantize(
    x: Tensor,
    *,
    row: Cast | None = None,
    column: Cast | None = None,
    source: Cast | None = None,
    dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
    amaxes: Tensor | None = None,
    rounding: Tensor | None = None,
    first_row: int = 0,
) -> list[Tensor]:
    """Return the faces of ``x``, made in one pass where the device has a kernel.

    A face is ``[elements, scales]``, in two-level formats ``[elements, scales, tensor scales]``: contiguous elements
    ``[M, K / elements_per_byte]`` of the rowwise face, ``[K, M / elements_per_byte]`` of the columnwise one. What they
    are is said by ``float8_quantize``, ``float8_cast``, ``mx_quantize`` and ``nvfp4_quantize``.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides, may be empty; whole blocks of formats that need them.
        row: How to make the rowwise face; None leaves it out.
        column: The same for the columnwise one.
        source: Make the columnwise face from what this cast would make rowwise, dequantized to ``dtype``.
        dtype: By default that of ``x``.
        factors: For delayed scaling, what to multiply with, fp32 ``[S]``.
        amaxes: Largest magnitudes so far, fp32 ``[S]``, raised in place at the slots that are used; None for no note.
        rounding: For stochastic rounding, int64 ``[2]``, a key and a step.
        first_row: Index of the first row of this shard in the whole tensor, for the draws.

    Returns:
        The tensors of the rowwise face, then those of the columnwise one.
    """
    made: list[Tensor] = _OP(
        x, str(row or ""), str(column or ""), str(source or ""), dtype or x.dtype, factors, amaxes, rounding, first_row
    )
    return made

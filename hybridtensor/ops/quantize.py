"""Quantize a matrix into one or both faces: one operator for every format and every pair.

Shape letters: ``M`` rows, ``K`` columns, ``S`` delayed scales of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.cast import Cast, Hint, State, can_hold, empty_face, parse
from hybridtensor.ops.library import define, implement, runs_directly
from hybridtensor.ops.quantize_cuda import measure_cuda, measurer_cuda, quantize_cuda, writer_cuda
from hybridtensor.ops.references.blocks import block_amax
from hybridtensor.ops.references.faces import define_faces


def _reference(x: Tensor, row: str, column: str, source: str, dtype: torch.dtype, *state: Any) -> list[Tensor]:
    return define_faces(x, parse(row), parse(column), parse(source), dtype, State(*state))


def _on_a_gpu(x: Tensor, row: str, column: str, source: str, dtype: torch.dtype, *state: Any) -> list[Tensor]:
    return quantize_cuda(x, parse(row), parse(column), parse(source), dtype, State(*state))


def _fake(x: Tensor, row: str, column: str, *_: Any) -> list[Tensor]:
    rows, columns = x.shape
    return [*empty_face(x, parse(row), rows, columns), *empty_face(x, parse(column), columns, rows)]


# The schema is silent about the write to ``amaxes``: a maximum that is noted twice, or in any order, is the same, and
# nothing reads it before the step ends. Declared, compiling would turn it into a copy of the parameter that carries it.
_OP = define(
    "quantize(Tensor x, str row, str column, str source, ScalarType dtype, Tensor? factors, Tensor? amaxes, "
    "Tensor? rounding, SymInt first_row, Tensor? row_amax=None, Tensor? column_amax=None) -> Tensor[]",
    reference=_reference,
    fake=_fake,
)


implement("quantize", _on_a_gpu)


def _reference_into(x: Tensor, out: list[Tensor], *arguments: Any) -> None:
    for target, made in zip(out, _reference(x, *arguments), strict=True):
        target.copy_(made)
    increment_version(out)  # where a mode watches, autograd does not see the copies


def _into_on_a_gpu(
    x: Tensor, out: list[Tensor], row: str, column: str, source: str, dtype: torch.dtype, *state: Any
) -> None:
    quantize_cuda(x, parse(row), parse(column), parse(source), dtype, State(*state), out)
    increment_version(out)  # kernels write where autograd does not look


_INTO = define(
    "quantize_into(Tensor x, Tensor(a!)[] out, str row, str column, str source, ScalarType dtype, Tensor? factors, "
    "Tensor? amaxes, Tensor? rounding, SymInt first_row, Tensor? row_amax=None, Tensor? column_amax=None) -> ()",
    reference=_reference_into,
    fake=lambda *_: None,
)


implement("quantize_into", _into_on_a_gpu)


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
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
    hint: Hint | None = None,
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
        row_amax: Largest magnitudes that the rowwise face (or ``source``) is scaled by, instead of its own, where this
            is a part of a tensor: fp32 ``[1]``, or ``[M]`` for a scale per row. For formats with such scales.
        column_amax: The same of the columnwise face, ``[1]`` or ``[K]``.
        hint: Of what is quantized alike again and again, for one scale per tensor that is a power of two: the result is
            the same, and takes one pass over ``x`` instead of two where the scale is that of the last time.

    Returns:
        The tensors of the rowwise face, then those of the columnwise one.

    Raises:
        ValueError: If amaxes are given for a format that does not measure, or of another shape.
    """
    state = _state(x, row or source, column, State(factors, amaxes, rounding, first_row, row_amax, column_amax))
    if runs_directly(x):
        return quantize_cuda(x, row, column, source, dtype or x.dtype, state, hint=hint)
    casts = (str(cast or "") for cast in (row, column, source))
    made: list[Tensor] = _OP(x, *casts, dtype or x.dtype, *state)
    return made


def measure(x: Tensor, *, row: Cast | None = None, column: Cast | None = None) -> tuple[Tensor, Tensor]:
    """Return the largest magnitudes that ``quantize`` would scale the faces of ``x`` by, fp32 ``[1]`` or one per row.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32, any strides.
        row: How to make the rowwise face: a cast that measures, without a rotation; or None.
        column: The same of the columnwise one.

    Returns:
        For the rowwise face, and for the columnwise one; what is there for a face that was not asked for means nothing.
    """
    if runs_directly(x) and x.numel():
        return measure_cuda(x, row, column)
    blocks = [(None if cast is None or not cast.measures else 1, None) for cast in (row, column)]
    return block_amax(x, blocks[0]).view(-1), block_amax(x.t(), blocks[1]).view(-1)


def measurer(
    x: Tensor, out: Tensor, *, row: Cast | None = None, column: Cast | None = None
) -> Callable[[Tensor], object]:
    """Return what writes into ``out`` what ``measure`` returns for the one face that is asked for.

    It can be called again and again with ``x``, or what lies just as ``x`` does, and keeps neither alive.

    Args:
        x: As in ``measure``.
        out: fp32, of the result's shape, at an address that is a multiple of 16; zeros when the call comes.
        row: As in ``measure``.
        column: As in ``measure``; either this or ``row``.
    """
    run = measurer_cuda(x, out, row, column) if runs_directly(x) and x.numel() and out.is_cuda else None
    which = 0 if column is None else 1
    return run or (lambda x: out.copy_(measure(x, row=row, column=column)[which]))


def quantize_into(
    x: Tensor,
    out: list[Tensor],
    *,
    row: Cast | None = None,
    column: Cast | None = None,
    source: Cast | None = None,
    dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
    amaxes: Tensor | None = None,
    rounding: Tensor | None = None,
    first_row: int = 0,
    row_amax: Tensor | None = None,
    column_amax: Tensor | None = None,
) -> None:
    """Write the faces of ``x`` into existing tensors, those that ``quantize`` returns; arguments as there.

    Raises:
        ValueError: If a tensor of ``out`` is not as ``quantize`` makes it: of other shape, strides, dtype or device, at
            an address that is no multiple of 16, or in memory that another one or ``x`` has, too. Nothing is written.
    """
    if not torch.compiler.is_compiling() and not can_hold(out, x, row, column):
        got = ", ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()} on {t.device}" for t in out)
        raise ValueError(
            f"quantize_into: plain tensors of their own memory, as quantize makes them of {tuple(x.shape)} on "
            f"{x.device} with row={row}, column={column}, are required, got {got}; copy what quantize returns"
        )
    writer(
        x, out, row=row, column=column, source=source, dtype=dtype, factors=factors, amaxes=amaxes, rounding=rounding,
        first_row=first_row, row_amax=row_amax, column_amax=column_amax,
    )(x)  # fmt: skip


def writer(
    x: Tensor, out: list[Tensor], *, row: Cast | None, column: Cast | None, source: Cast | None,
    dtype: torch.dtype | None, **others: Any,
) -> Callable[[Tensor], None]:  # fmt: skip
    """Return what does ``quantize_into``, with tensors of which ``can_hold`` is true.

    It can be called again and again with ``x``, or what lies just as ``x`` does, while all other tensors stay where
    they are; ``x`` is not kept alive.
    """
    state = _state(x, row or source, column, State(**others))
    if not runs_directly(x):
        arguments = (out, *(str(cast or "") for cast in (row, column, source)), dtype or x.dtype, *state)
        return lambda x: _INTO(x, *arguments)
    cast = writer_cuda(x, row, column, source, dtype or x.dtype, state, out)

    def write(x: Tensor) -> None:
        cast(x)
        increment_version(out)

    return write


def _state(x: Tensor, row: Cast | None, column: Cast | None, state: State) -> State:
    """Return what casts need besides the tensor, after a look at it."""
    _check_amax(row, state.row_amax, x.shape[0], "row_amax")
    _check_amax(column, state.column_amax, x.shape[1], "column_amax")
    return state


def _check_amax(cast: Cast | None, amax: Tensor | None, rows: int, name: str) -> None:
    """Raise unless a cast can be scaled by ``amax``."""
    if amax is None:
        return
    per_row = None if cast is None else cast.measures
    shape = None if per_row is None else (rows if per_row else 1,)
    if tuple(amax.shape) != shape:
        raise ValueError(f"quantize: {name} of shape {shape} is required for {cast}, got {tuple(amax.shape)}")

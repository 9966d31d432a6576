"""The definition of ``ops.quantize``: single faces put together.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops.cast import Cast, parse
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.ops.references import float8, mx, nvfp4


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
        tensors[1] = tensors[1].t().clone(memory_format=torch.contiguous_format).t()
    return tensors

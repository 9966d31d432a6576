"""The definition of ``ops.quantize``: single faces put together.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.ops.cast import Cast, State
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.ops.references import float8, mx, nvfp4


def define_faces(
    x: Tensor, row: Cast | None, column: Cast | None, source: Cast | None, dtype: torch.dtype, state: State
) -> list[Tensor]:
    """Define ``quantize``."""
    made = [] if row is None else _encode(x, row, state, state.row_amax, transposed=False)
    if column is None:
        return made
    if source is not None:
        seen = made if source == row else _encode(x, source, state, state.row_amax, transposed=False)
        tensor_scale = seen[2] if len(seen) == 3 else None
        values = dequantize_reference(seen[0], seen[1], tensor_scale, source.name, dtype)
        return made + _encode(values.t(), column, state, state.column_amax, transposed=True)
    if row == column and is_transpose(row) and state.row_amax is state.column_amax:
        return made + [t.t().clone(memory_format=torch.contiguous_format) for t in made]
    return made + _encode(x.t(), column, state, state.column_amax, transposed=True)


def is_transpose(cast: Cast | None) -> bool:
    """Whether one face of this cast is the transpose of the other: bytes are transposed, not values quantized."""
    return cast is not None and cast.format.is_square and cast.format.elements_per_byte == 1


def _encode(matrix: Tensor, cast: Cast, state: State, amax: Tensor | None, *, transposed: bool) -> list[Tensor]:
    """Quantize an ``[other, contraction]`` matrix along its last dimension."""
    return _laid_out(_defined(matrix, cast, state, amax, transposed=transposed), cast)


def _defined(matrix: Tensor, cast: Cast, state: State, amax: Tensor | None, *, transposed: bool) -> list[Tensor]:
    """Ask the definition of the format."""
    fmt, amax = cast.format, None if amax is None else amax[:, None]
    if fmt.tensor_block is not None:
        rounding = state.rounding if cast.stream >= 0 else None
        return list(nvfp4.quantize(matrix, fmt, rounding, cast.stream, state.first_row, transposed, amax))
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return list(mx.quantize(matrix, fmt))
    if cast.slot < 0:
        return list(float8.quantize(matrix, fmt, cast.pow2_scale, amax))
    if state.factors is None:
        raise ValueError(f"quantize: {cast} needs delayed scales, got none")
    return list(float8.cast(matrix, fmt, state.factors, state.amaxes, cast.slot))


def _laid_out(tensors: list[Tensor], cast: Cast) -> list[Tensor]:
    """Return a face with its scales where ``empty_face`` puts them."""
    if cast.format.block[0] == 1 and cast.format.block[1] is not None:
        tensors[1] = tensors[1].t().clone(memory_format=torch.contiguous_format).t()
    return tensors

"""The definition of ``ops.quantize``: single faces put together.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest
from hybridtensor.ops.dequantize import dequantize_reference
from hybridtensor.ops.face import Face
from hybridtensor.ops.references import float8, mx, nvfp4


def define_faces(
    x: Tensor, request: CastRequest, inputs: CastInputs
) -> tuple[Face | None, Face | None]:
    """Return the rowwise and the columnwise face of ``x``: what ``quantize`` is."""
    row, column, source, dtype = request
    made = None if row is None else _face(x, row, inputs, transposed=False)
    if column is None:
        return made, None
    if source is not None:
        held = made if made is not None else _face(x, source, inputs, transposed=False)
        if held.scale is None:
            raise ValueError(
                f"quantize: a quantized rowwise face is required as source, got {source}"
            )
        values = dequantize_reference(
            held.qdata, held.scale, held.tensor_scale, source.format.name, dtype or x.dtype
        )
        return made, _face(values.t(), column, inputs, transposed=True)
    fmt, one_amax = column.format, inputs.row_amax is inputs.column_amax
    if (
        made is not None
        and row == column
        and fmt.is_square
        and fmt.elements_per_byte == 1
        and one_amax
    ):
        # one face is the transpose of the other: bytes are transposed, not values quantized
        tensors = [t.t().clone(memory_format=torch.contiguous_format) for t in made.tensors()]
        return made, Face(tensors[0], tensors[1], None, fmt)
    return made, _face(x.t(), column, inputs, transposed=True)


def _face(matrix: Tensor, cast: Cast, inputs: CastInputs, *, transposed: bool) -> Face:
    """Return an ``[other, contraction]`` face, with its scales where ``face_layouts`` puts them."""
    fmt, tensor_scale = cast.format, None
    given = inputs.column_amax if transposed else inputs.row_amax
    amax = None if given is None else given[:, None]
    if fmt.tensor_block is not None:
        rounding = inputs.rounding if cast.stream >= 0 else None
        draws = nvfp4.Draws(rounding, cast.stream, inputs.first_row, transposed)
        qdata, scale, tensor_scale = nvfp4.quantize(matrix, fmt, draws, amax)
    elif fmt.scale_dtype == torch.float8_e8m0fnu:
        qdata, scale = mx.quantize(matrix, fmt)
    elif cast.slot < 0:
        qdata, scale = float8.quantize(matrix, fmt, cast.pow2_scale, amax)
    elif inputs.encode_scale is not None:
        qdata, scale = float8.cast(matrix, fmt, inputs.encode_scale, inputs.noted_amax, cast.slot)
    else:
        raise ValueError(
            f"quantize: delayed scales are required for {cast}, got none; pass encode_scale"
        )
    if fmt.block[0] == 1 and fmt.block[1] is not None:
        scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return Face(qdata, scale, tensor_scale, fmt)

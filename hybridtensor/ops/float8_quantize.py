"""Quantize a matrix to FP8 with current scaling: the scales come from the values themselves.

Shape letters: ``M`` other axis, ``K`` contraction axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cast import Cast
from hybridtensor.ops.library import require_float
from hybridtensor.ops.quantize import quantize


def float8_quantize(x: Tensor, format: Format, *, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to FP8 with one fp32 scale per tensor, row or block, as ``format`` says.

    The element is ``round(x * s)`` with ``s = max / amax``, in fp32, to nearest even, saturating. Quantize
    ``x.t()`` for the columnwise face.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32; any strides; may be empty; the last block of an axis may be partial.
        format: One of the ``FP8_*`` records.
        pow2_scale: Round ``s`` down to a power of two. Formats whose scales are powers of two do it anyway.

    Returns:
        Contiguous elements ``[M, K]`` and the fp32 scales ``1 / s``, ``format.scale_shape(M, K)``: an element times
        its scale approximates ``x``. An all-zero block and one with an Inf have scale 1; an Inf saturates; a NaN stays
        NaN and does not count in ``amax``.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor of the dtypes above.
        ValueError: If ``x`` is not a matrix, or ``format`` is not an FP8 format with fp32 scales.

    Source: TransformerEngine's current-scaling and block-scaling kernels (common/recipe/recipe_common.cuh,
    common/transpose/quantize_transpose_vector_blockwise.cu and ..._square_blockwise.cu); per row is the same rule.
    """
    require_float("float8_quantize", x, rank=2)
    if format.scale_dtype != torch.float32:
        raise ValueError(f"float8_quantize: an FP8 format with fp32 scales is required, got {format}")
    codes, scale = quantize(x, row=Cast(format.name, pow2_scale=pow2_scale))
    return codes, scale

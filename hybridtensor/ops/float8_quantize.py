"""Quantize a matrix to FP8 with current scaling: the scales come from the values themselves.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.blocks import block_amax, spread
from hybridtensor.ops.library import define, require_float

FP32_MAX = torch.finfo(torch.float32).max
_CLEAR_MANTISSA = -0x00800000  # 0xFF800000 as an int32: keeps sign and exponent


def encode_scale(amax: Tensor, largest: float, pow2_scale: bool, *, overflow: float = FP32_MAX) -> Tensor:
    """Return the factor that maps ``amax`` to ``largest``: 1 where amax is 0 or Inf, ``overflow`` where it overflows.

    With ``pow2_scale`` the mantissa is cleared, which rounds the factor down to a power of two.

    Source: TransformerEngine, common/recipe/recipe_common.cuh, ``compute_scale_from_amax``.
    """
    scale = torch.full_like(amax, largest) / amax  # a tensor numerator: a Python one would multiply by 1/amax
    scale = torch.where(scale.isinf(), overflow, scale)
    if pow2_scale:
        scale = (scale.view(torch.int32) & _CLEAR_MANTISSA).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)


def cast_saturating(x: Tensor, fmt: Format) -> Tensor:
    """Round fp32 ``x`` to the nearest FP8 element, ties to even; beyond the range it is +-max, NaN the positive NaN."""
    if fmt.element not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"cast_saturating: a format with FP8 elements is required, got {fmt}")
    one_nan = x.nan_to_num(nan=float("nan"))  # a negative NaN would keep its sign
    return one_nan.clamp_(-fmt.max, fmt.max).to(fmt.element, memory_format=torch.contiguous_format)


def float8_quantize_reference(x: Tensor, format: str, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """Define ``float8_quantize``."""
    fmt = get_format(format)
    blocked = fmt.block[1] is not None
    overflow = torch.finfo(x.dtype).max if blocked else FP32_MAX
    scale = encode_scale(block_amax(x, fmt.block), fmt.max, pow2_scale, overflow=overflow)  # [A, B]
    factor = spread(scale, fmt.block, x.shape)
    factor = factor.reshape(()) if fmt.block == (None, None) else factor  # a 0-d factor is torch's fast path on a CPU
    return cast_saturating(x.float() * factor, fmt), scale.reciprocal()


def _fake(x: Tensor, format: str, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    scale_shape = fmt.scale_shape(x.shape[0], x.shape[1])
    return x.new_empty(x.shape, dtype=fmt.element), x.new_empty(scale_shape, dtype=torch.float32)


_OP = define(
    "float8_quantize(Tensor x, str format, bool pow2_scale) -> (Tensor, Tensor)",
    reference=float8_quantize_reference,
    fake=_fake,
)


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
    codes, scale = _OP(x, format.name, pow2_scale or format.pow2_scale)
    return codes, scale

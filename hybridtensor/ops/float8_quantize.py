"""Quantize a matrix to FP8 with current scaling: the scale comes from the values themselves.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``G`` scale groups (1, or M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.library import define, require_float

_FP32_MAX = torch.finfo(torch.float32).max
_CLEAR_MANTISSA = -0x00800000  # 0xFF800000 as an int32: keeps sign and exponent


def group_amax(x: Tensor, fmt: Format) -> Tensor:
    """Return the largest magnitude of each scale group, fp32 ``[G, 1]``; NaN elements do not count."""
    groups = x if fmt.block[0] == 1 else x.reshape(1, -1)
    if groups.numel() == 0:
        return torch.zeros(groups.shape[0], 1, dtype=torch.float32, device=x.device)
    magnitude = groups.abs().nan_to_num(nan=0.0, posinf=float("inf"))
    return magnitude.amax(dim=1, keepdim=True).float()


def encode_scale(amax: Tensor, largest: float, pow2_scale: bool) -> Tensor:
    """Return the factor that maps ``amax`` to ``largest``: 1 where amax is 0 or Inf, clamped where it overflows.

    With ``pow2_scale`` the mantissa is cleared, which rounds the factor down to a power of two.

    Source: TransformerEngine, common/recipe/recipe_common.cuh, ``compute_scale_from_amax``.
    """
    scale = torch.full_like(amax, largest) / amax  # a tensor numerator: a Python one would multiply by 1/amax
    scale = scale.clamp(max=_FP32_MAX)
    if pow2_scale:
        scale = (scale.view(torch.int32) & _CLEAR_MANTISSA).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)


def cast_saturating(x: Tensor, fmt: Format) -> Tensor:
    """Round fp32 ``x`` to the nearest element, ties to even; beyond the range becomes +-max, NaN the positive NaN."""
    if fmt.element is None:
        raise ValueError(f"cast_saturating: a format with elements is required, got {fmt}")
    one_nan = x.nan_to_num(nan=float("nan"))  # a negative NaN would keep its sign
    return one_nan.clamp_(-fmt.max, fmt.max).to(fmt.element, memory_format=torch.contiguous_format)


def float8_quantize_reference(x: Tensor, format: str, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    """Define ``float8_quantize``."""
    fmt = get_format(format)
    scale = encode_scale(group_amax(x, fmt), fmt.max, pow2_scale)  # [G, 1]
    factor = scale if fmt.block[0] == 1 else scale.reshape(())  # a 0-d factor takes torch's fast path on the CPU
    return cast_saturating(x.float() * factor, fmt), scale.reciprocal()


def _fake(x: Tensor, format: str, pow2_scale: bool) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    rows = x.shape[0] if fmt.block[0] == 1 else 1
    return x.new_empty(x.shape, dtype=fmt.element), x.new_empty((rows, 1), dtype=torch.float32)


_OP = define(
    "float8_quantize(Tensor x, str format, bool pow2_scale) -> (Tensor, Tensor)",
    reference=float8_quantize_reference,
    fake=_fake,
)


def float8_quantize(x: Tensor, format: Format, *, pow2_scale: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to FP8 with one scale per tensor or per row, as ``format`` says.

    The element is ``round(x * s)`` with ``s = max / amax``, in fp32, to nearest even, saturating. Quantize
    ``x.t()`` for the columnwise face.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32; any strides; may be empty.
        format: One of the ``FP8_*_TENSOR`` and ``FP8_*_ROW`` records.
        pow2_scale: Round ``s`` down to a power of two.

    Returns:
        Contiguous elements ``[M, K]`` and the fp32 scales ``1 / s``, ``[1, 1]`` or ``[M, 1]``: an element times its
        scale approximates ``x``. An all-zero group and one with an Inf have scale 1; an Inf saturates; a NaN stays
        NaN and does not count in ``amax``.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor of the dtypes above.
        ValueError: If ``x`` is not a matrix, or ``format`` is not an FP8 format of those.

    Source: TransformerEngine's current-scaling kernels; per row is the same rule, row by row.
    """
    require_float("float8_quantize", x, rank=2)
    if format.element not in (torch.float8_e4m3fn, torch.float8_e5m2) or format.block not in ((None, None), (1, None)):
        raise ValueError(f"float8_quantize: an FP8 format per tensor or per row is required, got {format}")
    codes, scale = _OP(x, format.name, pow2_scale)
    return codes, scale

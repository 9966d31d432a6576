"""FP8 with one fp32 scale per tensor, row or block: current scaling, and delayed scaling with a given factor.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks, ``S`` scales of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version

from hybridtensor.formats import Format
from hybridtensor.ops.amaxes import record_at
from hybridtensor.ops.references.blocks import block_amax, spread

FP32_MAX = torch.finfo(torch.float32).max
_CLEAR_MANTISSA = -0x00800000  # 0xFF800000 as an int32: keeps sign and exponent


def encode_scale(
    amax: Tensor, largest: float, pow2_scale: bool, *, overflow: float = FP32_MAX
) -> Tensor:
    """Return the factor that maps ``amax`` to ``largest``: 1 where amax is 0 or Inf, ``overflow`` where it overflows.

    With ``pow2_scale`` the mantissa is cleared, which rounds the factor down to a power of two.

    Source: TransformerEngine, common/recipe/recipe_common.cuh, ``compute_scale_from_amax``.
    """
    # A tensor numerator: a Python one would multiply by 1/amax
    scale = torch.full_like(amax, largest) / amax
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


def quantize(
    x: Tensor, fmt: Format, pow2_scale: bool, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return elements ``[M, K]`` and scales ``[A, B]`` of ``x`` with current scaling.

    Scales follow from ``amax``, ``[A, B]``, where it is known.
    """
    blocked = fmt.block[1] is not None
    overflow = torch.finfo(x.dtype).max if blocked else FP32_MAX
    amax = block_amax(x, fmt.block) if amax is None else amax
    scale = encode_scale(amax, fmt.max, pow2_scale or fmt.pow2_scale, overflow=overflow)
    # A 0-d factor is torch's fast path on a CPU
    one = fmt.block == (None, None)
    factor = scale.reshape(()) if one else spread(scale, fmt.block, x.shape)
    return cast_saturating(x.float() * factor, fmt), scale.reciprocal()


def cast(
    x: Tensor, fmt: Format, factors: Tensor, amaxes: Tensor | None, index: int
) -> tuple[Tensor, Tensor]:
    """Return elements ``[M, K]`` and the scale ``[1, 1]`` of ``x`` with a given factor, and record its amax."""
    factor = factors[index]
    record = record_at(amaxes)
    if record is not None:
        slot = record.detach()[index]
        with preserve_version(slot):  # as kernels do, which autograd does not see
            slot.copy_(torch.maximum(slot, block_amax(x, (None, None)).reshape(())))
    return cast_saturating(x.float() * factor, fmt), factor.reciprocal().reshape(1, 1)

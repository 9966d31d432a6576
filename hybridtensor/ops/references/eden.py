"""MS-EDEN: unbiased NVFP4 by a random rotation, elements rounded to nearest, and block scales rounded at random.

Shape letters: ``M`` other axis, ``K`` contraction axis.

Source: "Quartet II: Accurate LLM Pre-Training in NVFP4 by Improved Unbiased Gradient Estimation", arXiv 2601.22813.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.format_record import ROTATED_WITH_SIGNS as SIZE
from hybridtensor.formats import E2M1_MAX, E4M3_MAX, Format
from hybridtensor.ops.references.blocks import block_amax
from hybridtensor.ops.references.float8 import FP32_MAX
from hybridtensor.ops.references.hadamard import hadamard_transform
from hybridtensor.ops.references.nvfp4 import Draws, e2m1_decode, e2m1_encode, pack
from hybridtensor.ops.references.philox import sign_halves

_LENGTH = 16  # of a block
_BLOCKS = SIZE // _LENGTH
VALUE_MAX = E2M1_MAX / (17 / 16 * 0.93)
"""What the largest value of a block becomes: more than 6, which errs less than if nothing was clipped."""
_SCALE_MAX = 255.99  # of the block with the largest value: room for corrections and rounding up
_ROOT = 128**0.5
_SMALLEST = 2.0**-126  # fp32 that is normal


def quantize(
    x: Tensor, fmt: Format, draws: Draws, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes ``[M, K/2]``, block scales ``[M, K/16]``, and the tensor scale with the signs behind it
    ``[9, 1]`` of ``x``.

    Every 128 values are rotated under random signs. With ``t = amax / 255.99 / VALUE_MAX`` a block's scale is
    ``s = E4M3(block amax / VALUE_MAX / t)``, 1 in place of 0, and an element ``E2M1(y)`` to nearest of
    ``y = x / (s * t)``.
    The scales of 128 values are multiplied by ``sum(y * y) / sum(y * element)``, and rounded at random to one of their
    E4M3 neighbours so that the mean is kept: the mean of ``element * scale * t``, rotated back, is ``x``.

    A NaN or an Inf makes the scales of its 128 values NaN, and does not count in an amax. What is finite stays so.

    Args:
        x: ``[M, K]``, ``K % 128 == 0``.
        fmt: The format.
        draws: Of the signs, and of the scales: each takes the number of its block's first element.
        amax: ``[1, 1]``, used where it is known: of the whole tensor, rotated.

    Raises:
        ValueError: If nothing is drawn.
    """
    if draws.rounding is None:
        raise ValueError(
            f"quantize: random numbers are required for {fmt}, whose signs and scales are drawn, got a cast without "
            "a stream, or no key; use NVFP4Quantizer(rounding='eden')"
        )
    halves = sign_halves(draws.rounding, draws.stream)
    wrong = _groups(~x.isfinite()).any(-1)  # [M, K / 128]
    values = rotate(x.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0), halves)
    if amax is None:
        amax = block_amax(values, (None, None))
    # tensors, because a GPU multiplies by the reciprocal of a number
    most = torch.full_like(amax, VALUE_MAX)
    second_level = (amax / torch.full_like(amax, _SCALE_MAX) / most).clamp(min=_SMALLEST)
    second_level = torch.where(amax == 0, 1.0, second_level)
    base = block_amax(values, (1, _LENGTH)) / most / second_level
    base = base.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    base = torch.where(base == 0, 1.0, base)  # [M, K / 16]
    scaled = values / (base * second_level).repeat_interleave(_LENGTH, 1)
    codes = e2m1_encode(scaled)
    wanted = base * _correction(scaled, e2m1_decode(codes)).repeat_interleave(_BLOCKS, 1)
    uniform = draws.uniform(x.shape)
    if uniform is not None:
        wanted = _rounded_at_random(wanted, uniform[:, ::_LENGTH])
    scale = torch.where(wrong.repeat_interleave(_BLOCKS, 1), float("nan"), wanted)
    tensor_scale = torch.cat((second_level.view(1), halves.float())).view(-1, 1)
    return pack(codes), scale.to(torch.float8_e4m3fn), tensor_scale


def rotate(x: Tensor, halves: Tensor) -> Tensor:
    """Return fp32 values with every 128 of their last dimension multiplied by ``diag(signs) @ H128 / sqrt(128)``.

    Sums run in the order of the fast transform. Saturates.

    Args:
        x: fp32 ``[M, K]``, ``K % 128 == 0``, finite.
        halves: The signs, ``[8]``: bit ``i % 16`` of ``i // 16`` is set where that of value ``i`` is minus.
    """
    groups = hadamard_transform(_groups(x) * (_signs(halves) / SIZE))  # no sum overflows
    return (groups * _ROOT).clamp(-FP32_MAX, FP32_MAX).flatten(1)


def rotate_back(x: Tensor, halves: Tensor) -> Tensor:
    """Undo ``rotate``, in fp32 or float64: ``H128 / sqrt(128) @ diag(signs)``."""
    groups = hadamard_transform(_groups(x) / SIZE)
    return (groups * (_signs(halves).to(x.dtype) * _ROOT)).flatten(1)


def _groups(x: Tensor) -> Tensor:
    """Return the values that are rotated together, ``[M, K / 128, 128]``."""
    groups: Tensor = x.unflatten(1, (-1, SIZE))
    return groups


def _signs(halves: Tensor) -> Tensor:
    """Return the signs in fp32, ``[128]``."""
    bits = halves.to(torch.int64)[:, None] >> torch.arange(16, device=halves.device)
    return (1 - 2 * (bits & 1)).float().flatten()


def _correction(scaled: Tensor, elements: Tensor) -> Tensor:
    """Return factors of the scales of every 128 values, fp32 ``[M, K / 128]``: with them the inner product of values
    and dequantized values is the squared norm of the values."""
    over, under = _sums(scaled * scaled), _sums(scaled * elements)
    return torch.where(under == 0, 1.0, over / under)


def _sums(x: Tensor) -> Tensor:
    """Return the sums of every 128 values: halves are added, until one is left."""
    sums = _groups(x)
    while sums.shape[-1] > 1:
        low, high = sums.chunk(2, -1)
        sums = low + high
    return sums[..., 0]


def _rounded_at_random(x: Tensor, uniform: Tensor) -> Tensor:
    """Return positive values as one of their two E4M3 neighbours, the upper with the probability that keeps the
    mean; at most 448.
    """
    exponent = (x.view(torch.int32) >> 23).clamp(min=127 - 6)  # of fp32, which begins at -127
    step = ((exponent - 3) << 23).view(torch.float32)
    return ((x / step + uniform).floor() * step).clamp(max=E4M3_MAX)

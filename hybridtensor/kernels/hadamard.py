"""The rotation of 16 inside kernels; equal, bit for bit, to ``ops.references.hadamard``."""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import BF16_MAX, max_of_groups, round_to_bf16, saturate

_NEGATIVE = tl.constexpr(0xD7E8)  # bit i is set where sign i is negative


@triton.jit
def _butterfly(groups, P: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr):
    """Return sums and differences of the values ``STRIDE`` apart in every group of 16."""
    OUTER: tl.constexpr = 8 // STRIDE
    pairs = tl.permute(tl.reshape(groups, [P, N, OUTER, 2, STRIDE]), [0, 1, 2, 4, 3])
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 1, 2, 4, 3]), [P, N, 16])


@triton.jit
def rotate(values, P: tl.constexpr, Q: tl.constexpr, FINITE: tl.constexpr, HW: tl.constexpr):
    """Rotate every 16 values of the last axis of ``[P, Q]``; round to bfloat16, saturating.

    ``FINITE`` leaves out what only matters for values that are, or round to, Inf or NaN: the result then has such, too.
    """
    N: tl.constexpr = Q // 16
    negative = (_NEGATIVE >> tl.arange(0, 16)) & 1
    signs = tl.where(negative == 1, -0.0625, 0.0625)
    groups = tl.reshape(values, [P, N, 16]) * signs[None, None, :]
    rotated = _butterfly(groups, P, N, 1)
    rotated = _butterfly(rotated, P, N, 2)
    rotated = _butterfly(rotated, P, N, 4)
    rotated = _butterfly(rotated, P, N, 8) * 4.0
    if not FINITE:
        nan = max_of_groups((values != values).to(tl.int32), P, Q, 16) > 0
        infinite = (max_of_groups(tl.abs(values), P, Q, 16) == float("inf")) & ~nan
        rotated = _bounded(rotated, infinite)
    return round_to_bf16(tl.reshape(rotated, [P, Q]), P, Q, HW)


@triton.jit
def _bounded(rotated, infinite):
    """Saturate ``[P, N, 16]``, but for groups ``[P, N]`` with an Inf."""
    clamped = saturate(rotated, BF16_MAX)
    unbounded = tl.where(rotated != rotated, float("inf"), rotated)
    return tl.where(infinite[:, :, None], unbounded, clamped)


@triton.jit
def rotate_back(values, P: tl.constexpr, Q: tl.constexpr):
    """Undo ``rotate`` in fp32."""
    N: tl.constexpr = Q // 16
    groups = tl.reshape(values, [P, N, 16]) * 0.0625
    groups = _butterfly(groups, P, N, 1)
    groups = _butterfly(groups, P, N, 2)
    groups = _butterfly(groups, P, N, 4)
    groups = _butterfly(groups, P, N, 8)
    negative = (_NEGATIVE >> tl.arange(0, 16)) & 1
    return tl.reshape(groups * tl.where(negative == 1, -4.0, 4.0)[None, None, :], [P, Q])

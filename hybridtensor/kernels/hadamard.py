"""Rotations inside kernels; equal, bit for bit, to ``ops.references.hadamard``, of 16, and ``ops.references.eden``, of
128 under drawn signs.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.groups import DRAWN as SIZE
from hybridtensor.kernels.numbers import BF16_MAX, FP32_MAX, max_of_groups, round_to_bf16, saturate

DRAWN = tl.constexpr(SIZE)
_ROOT = tl.constexpr(SIZE**0.5)
_NEGATIVE = tl.constexpr(0xD7E8)  # bit i is set where sign i is negative


@triton.jit
def _butterfly(groups, P: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Return sums and differences of the values ``STRIDE`` apart in every group of ``LENGTH``."""
    OUTER: tl.constexpr = LENGTH // 2 // STRIDE
    # ``split`` takes apart, and ``join`` makes, a last axis of extent 2 only.
    pairs = tl.permute(tl.reshape(groups, [P, N, OUTER, 2, STRIDE]), [0, 1, 2, 4, 3])
    low, high = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(low + high, low - high), [0, 1, 2, 4, 3]), [P, N, LENGTH])


@triton.jit
def rotate(values, P: tl.constexpr, Q: tl.constexpr, FINITE: tl.constexpr, HW: tl.constexpr):
    """Rotate every 16 values of the last axis of ``[P, Q]``; round to bfloat16, saturating.

    ``FINITE`` leaves out what only matters for values that are, or round to, Inf or NaN: the result then has such, too.
    """
    N: tl.constexpr = Q // 16
    negative = (_NEGATIVE >> tl.arange(0, 16)) & 1
    # The factor 1/4 of the rotation comes in two exact parts, 1/16 before and 4 behind, so that sums do not overflow.
    signs = tl.where(negative == 1, -0.0625, 0.0625)
    groups = tl.reshape(values, [P, N, 16]) * signs[None, None, :]
    # In registers: 7.5 instructions per element, and 170 by shuffles between threads.
    rotated = _butterfly(groups, P, N, 1, 16)
    rotated = _butterfly(rotated, P, N, 2, 16)
    rotated = _butterfly(rotated, P, N, 4, 16)
    rotated = _butterfly(rotated, P, N, 8, 16) * 4.0
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
    groups = _butterfly(groups, P, N, 1, 16)
    groups = _butterfly(groups, P, N, 2, 16)
    groups = _butterfly(groups, P, N, 4, 16)
    groups = _butterfly(groups, P, N, 8, 16)
    negative = (_NEGATIVE >> tl.arange(0, 16)) & 1
    return tl.reshape(groups * tl.where(negative == 1, -4.0, 4.0)[None, None, :], [P, Q])


@triton.jit
def _transform(values, P: tl.constexpr, Q: tl.constexpr):
    """Multiply every 128 values of the last axis of ``[P, Q]`` by the Hadamard matrix."""
    # Each where it is: taking pairs apart, as ``_butterfly`` does, would move them between threads, and have Triton
    # compute them several times.
    minus = (tl.arange(0, 2) << 31)[None, None, :, None]
    for i in tl.static_range(7):
        bits = tl.reshape(values.to(tl.int32, bitcast=True), [P, Q // (2 << i), 2, 1 << i])
        # The sum of two words may wrap around, which the difference undoes. At place 0 follows other + own, at place
        # 1, whose own sign is flipped, other - own.
        other = tl.sum(bits, 2, keep_dims=True) - bits  # of two numbers: the other one
        values = other.to(tl.float32, bitcast=True) + (bits ^ minus).to(tl.float32, bitcast=True)
    return tl.reshape(values, [P, Q])


@triton.jit
def _times_signs(values, negative, FACTOR: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Multiply every 128 values by their signs, minus where ``negative`` is 1, and ``FACTOR``."""
    factors = tl.where(negative == 1, -FACTOR, FACTOR)
    return tl.reshape(tl.reshape(values, [P, Q // DRAWN, DRAWN]) * factors[None, None, :], [P, Q])


@triton.jit
def rotate_drawn(values, negative, P: tl.constexpr, Q: tl.constexpr):
    """Rotate every 128 finite values of the last axis of ``[P, Q]`` under signs, ``[128]``, in fp32, saturating."""
    rotated = _transform(_times_signs(values, negative, 1.0 / DRAWN, P, Q), P, Q)
    return saturate(rotated * _ROOT, FP32_MAX)


@triton.jit
def rotate_drawn_back(values, negative, P: tl.constexpr, Q: tl.constexpr):
    """Undo ``rotate_drawn``."""
    return _times_signs(_transform(values * (1.0 / DRAWN), P, Q), negative, _ROOT, P, Q)

"""Four over six in NVFP4: of two scales of each block the one with the smaller error; see ``ops.references.nvfp4``.

Errors are compared to the last bit, which depends on the order of sums. All blocks get estimates of both, by fewer
operations and in whichever order; where those are so close that rounding may decide, errors are worked out as they are
defined, one block after the other. Launches forbid that a product and a sum are rounded once (``fuses`` in
``ops.cast.tiles``).

Legend: a tile is ``[P, Q]`` of a face; blocks are ``[SIDE, 16]``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels import groups
from hybridtensor.kernels.numbers import (
    FP32_MAX,
    e2m1_nearest,
    e2m1_rounded,
    fp8_codes,
    fp8_values,
    reciprocal,
    reciprocal_estimate,
)
from hybridtensor.kernels.tiles import block_max, spread

LEAST_SQUARED = tl.constexpr(groups.LEAST_SQUARED)
NVFP4_ROW = tl.constexpr(groups.NVFP4_ROW)
FEW = tl.constexpr(2)  # blocks, which one by one take less time than a look at all for ties


@triton.jit
def _four(pairs):
    """Return the four parts of ``[..., 2, 2]``, in order."""
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum_in_order(v, P: tl.constexpr):
    """Return the sums of the 16 values of each row, added one after the other, ``[P]``."""
    of_0, of_1, of_2, of_3 = _four(tl.reshape(v, [P, 2, 2, 2, 2]))  # values 0, 4, 8, 12; 1, 5, 9, 13; ...
    v0, v4, v8, v12 = _four(of_0)
    v1, v5, v9, v13 = _four(of_1)
    v2, v6, v10, v14 = _four(of_2)
    v3, v7, v11, v15 = _four(of_3)
    return v0 + v1 + v2 + v3 + v4 + v5 + v6 + v7 + v8 + v9 + v10 + v11 + v12 + v13 + v14 + v15


@triton.jit
def _add_halves(v, HALF: tl.constexpr):
    """Add the second half of ``[2 * HALF]`` to the first."""
    first, second = tl.split(tl.trans(tl.reshape(v, [2, HALF])))
    return first + second


@triton.jit
def _sum_square(v):
    """Return the sum of a block of 16x16, ``[1]``: of each row in order, and of rows in a tree."""
    rows = _add_halves(_add_halves(_sum_in_order(v, 16), 8), 4)
    return _add_halves(_add_halves(rows, 2), 1)


@triton.jit
def _errors(v, code, tensor_scale, decode, FACE: tl.constexpr, COLUMNWISE: tl.constexpr, HW: tl.constexpr):
    """Return the error of a block ``[SIDE, 16]`` whose scale has this code, ``[1]``."""
    scale = fp8_values(code.to(tl.uint8), False, HW)
    factor = tl.minimum(reciprocal(scale * decode, HW), FP32_MAX)
    dequantized = e2m1_rounded(v * factor, v, False) * scale
    difference = tl.div_rn(dequantized * tensor_scale, FACE.tensor_scale_max) - v
    if FACE.rule == LEAST_SQUARED:
        error = difference * difference
    else:
        error = tl.abs(difference)
    if FACE.side == 1:
        return _sum_in_order(error, 1)
    elif COLUMNWISE:  # by the rows of the matrix: both faces have one choice
        return _sum_square(tl.trans(error))
    else:
        return _sum_square(error)


@triton.jit
def _sum_blocks(v, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr):
    """Return the sums of blocks, ``[P / SIDE, Q / 16]``, in whichever order takes the least time."""
    sums = tl.sum(tl.reshape(v, [P, Q // 16, 16]), 2)
    if SIDE > 1:
        sums = tl.trans(tl.sum(tl.reshape(tl.trans(sums), [Q // 16, P // SIDE, SIDE]), 2))
    return sums


@triton.jit
def _estimates(v, codes, unit, encode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, HW: tl.constexpr):
    """Return ``_errors`` of blocks but for rounding, ``[P / SIDE, Q / 16]``; see ``_reach``."""
    scale = fp8_values(codes.to(tl.uint8), False, HW)
    y = v * spread(encode * reciprocal_estimate(scale, HW), P, Q, FACE.side, 16)
    difference = e2m1_nearest(tl.abs(y)) - tl.abs(y)
    unit = scale * unit
    if FACE.rule == LEAST_SQUARED:
        return _sum_blocks(difference * difference, P, Q, FACE.side) * unit * unit
    else:
        return _sum_blocks(tl.abs(difference), P, Q, FACE.side) * unit


@triton.jit
def _reach(total, amax, FACE: tl.constexpr):
    """Return how far apart the estimates of two errors, ``total`` together, must be to have the order of the errors."""
    # In units of e = 2^-24, what rounding once changes, of n elements x that are d off: an estimate multiplies x by a
    # number that is 4 off, 2 of them from the reciprocal, and rounds, 5, as the definition does; so they are 10 apart,
    # and an element that they round to either side is off by at most 20 |x| more in one than in the other. With the 5
    # again and the two roundings of |x| + |d|, the largest value, |d| is off by 27 |x| + 2 |d|, and by roundings of
    # differences and scales 5 |d|. Then d * d is off by 54 |x d| + 16 d * d and the square of 27 |x|.
    # A sum of n terms is off by n - 1 of itself in any order, and by 15 or 19 in that of the definition. |x| sums up to
    # n * amax at most, and |x d| to amax * sqrt(n * sum(d * d)). There are two errors, and
    # sqrt(a) + sqrt(b) <= sqrt(2 * (a + b)). What is proportional to e * e otherwise is less than a thousandth of this.
    N: tl.constexpr = 16 * FACE.side
    E: tl.constexpr = 1.001 * 2.0**-24
    if FACE.rule == LEAST_SQUARED:
        slope = amax * (27 * 2**0.5 * N**0.5 * E)
        return slope * (2 * tl.sqrt(total) + slope) + total * ((2 * N + 16) * E)
    else:
        return amax * (54 * N * E) + total * ((2 * N + 8) * E)


@triton.jit
def _dequantized(v, codes, decode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, HW: tl.constexpr):
    """Return elements times scales of these codes."""
    scale = fp8_values(codes.to(tl.uint8), False, HW)
    factor = tl.minimum(reciprocal(scale * decode, HW), FP32_MAX)
    return e2m1_rounded(v * spread(factor, P, Q, FACE.side, 16), v, False) * spread(scale, P, Q, FACE.side, 16)


@triton.jit
def _ties(v, six, four, decode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, HW: tl.constexpr):
    """Return whether blocks become the same with both scales: then errors are the same numbers."""
    apart = _dequantized(v, six, decode, FACE, P, Q, HW) != _dequantized(v, four, decode, FACE, P, Q, HW)
    return block_max(apart.to(tl.int32), P, Q, FACE.side, 16) == 0


@triton.jit
def _only(v, picked):
    """Return the one value of ``[A, N]`` that is picked."""
    return tl.sum(tl.where(picked, v, 0))


@triton.jit
def _chosen_of(picked, v, six, four, tensor_scale, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
               COLUMNWISE: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Return the code that the one block chooses that is picked, ``[1, 1]``."""
    split = tl.reshape(v, [P // FACE.side, FACE.side, Q // 16, 16])
    block = tl.sum(tl.sum(tl.where(picked[:, None, :, None], split, 0.0), 0), 1)
    # Both codes in one number, for one reduction.
    codes = _only(six | four << 8, picked)
    if FACE.kind == NVFP4_ROW:
        tensor_scale = _only(tensor_scale, picked)
    decode = tl.div_rn(1.0, tl.minimum(tl.div_rn(FACE.tensor_scale_max, tensor_scale), FP32_MAX))
    error_of_six = _errors(block, codes & 255, tensor_scale, decode, FACE, COLUMNWISE, HW)
    error_of_four = _errors(block, codes >> 8, tensor_scale, decode, FACE, COLUMNWISE, HW)
    return tl.where(error_of_four < error_of_six, codes >> 8, codes & 255)[None, :]


@triton.jit
def chosen_scale_codes(v, amax, tensor_scale, encode, decode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
                       COLUMNWISE: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Return the codes of E4M3 scales that map the amax of a block to 6, or to 4 where that has less error.

    Args:
        v: A tile ``[P, Q]``, without NaN.
        amax: Amaxes of blocks, ``[P / SIDE, Q / 16]``.
        tensor_scale: Tensor scales, one or ``[P, 1]``.
        encode: What amaxes are multiplied with, as many.
        decode: Its reciprocal.
        COLUMNWISE: Whether the rows of the matrix are the columns of the tile.
    """
    base = tl.div_rn(amax, 6.0) * encode
    six = fp8_codes(tl.minimum(base, 448.0), False, HW)
    four = fp8_codes(tl.minimum(base * 1.5, 448.0), False, HW)
    unit = tl.div_rn(tensor_scale, FACE.tensor_scale_max)
    of_six = _estimates(v, six, unit, encode, FACE, P, Q, HW)
    of_four = _estimates(v, four, unit, encode, FACE, P, Q, HW)
    chosen = tl.where(of_four < of_six, four, six)
    reach = _reach(of_four + of_six, amax, FACE)
    squares_fit = (tensor_scale > 2.0**-30) & (tensor_scale < 2.0**30)  # into fp32
    reach = tl.where(squares_fit, reach, float("inf"))
    close = (six != four) & ~(tl.abs(of_four - of_six) > reach)  # also NaN, the estimate with a scale of zero
    count = _only(1, close)
    if count > 0:
        if count > FEW:
            tied = _ties(v, six, four, decode, FACE, P, Q, HW)
            chosen = tl.where(close & tied, six, chosen)
            close &= ~tied
            count = _only(1, close)
        A: tl.constexpr = P // FACE.side
        N: tl.constexpr = Q // 16
        number = tl.arange(0, A)[:, None] * N + tl.arange(0, N)[None, :]
        for _ in range(count):
            picked = number == tl.max(tl.where(close, number, -1))
            code = _chosen_of(picked, v, six, four, tensor_scale, FACE, P, Q, COLUMNWISE, HW)
            chosen = tl.where(picked, code, chosen)
            close &= ~picked
    return chosen

"""Four over six in NVFP4: of two scales of each block the one with the smaller error; see ``ops.references.nvfp4``.

Errors are compared to the last bit: sums run in the order of the definition, by elementwise additions, whatever the
layout of a tile, and launches forbid that a product and a sum are rounded once (``fuses`` in ``ops.cast.tiles``).

Legend: a tile is ``[P, Q]`` of a face; blocks are ``[SIDE, 16]``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels import groups
from hybridtensor.kernels.numbers import FP32_MAX, e2m1_rounded, fp8_codes, fp8_values, reciprocal
from hybridtensor.kernels.tiles import spread

LEAST_SQUARED = tl.constexpr(groups.LEAST_SQUARED)


@triton.jit
def _four(pairs):
    """Return the four parts of ``[..., 2, 2]``, in order."""
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _sum_in_order(v, P: tl.constexpr, N: tl.constexpr):
    """Return the sums of every 16 values of a row of ``[P, 16 * N]``, added one after the other, ``[P, N]``."""
    of_0, of_1, of_2, of_3 = _four(tl.reshape(v, [P, N, 2, 2, 2, 2]))  # values 0, 4, 8, 12; 1, 5, 9, 13; ...
    v0, v4, v8, v12 = _four(of_0)
    v1, v5, v9, v13 = _four(of_1)
    v2, v6, v10, v14 = _four(of_2)
    v3, v7, v11, v15 = _four(of_3)
    return v0 + v1 + v2 + v3 + v4 + v5 + v6 + v7 + v8 + v9 + v10 + v11 + v12 + v13 + v14 + v15


@triton.jit
def _add_halves(v, A: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr):
    """Add the second half of the middle axis of ``[A, 2 * HALF, N]`` to the first, ``[A, HALF, N]``."""
    first, second = tl.split(tl.permute(tl.reshape(v, [A, 2, HALF, N]), [0, 2, 3, 1]))
    return first + second


@triton.jit
def _sum_squares(v, P: tl.constexpr, Q: tl.constexpr):
    """Return the sums of blocks of 16x16, ``[P / 16, Q / 16]``: of each row in order, and of rows in a tree."""
    A: tl.constexpr = P // 16
    N: tl.constexpr = Q // 16
    rows = tl.reshape(_sum_in_order(v, P, N), [A, 16, N])
    rows = _add_halves(_add_halves(rows, A, 8, N), A, 4, N)
    return tl.reshape(_add_halves(_add_halves(rows, A, 2, N), A, 1, N), [A, N])


@triton.jit
def _errors(v, codes, level, decode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, COLUMNWISE: tl.constexpr,
            HW: tl.constexpr):  # fmt: skip
    """Return the errors of blocks whose scales have these codes, ``[P / SIDE, Q / 16]``."""
    SIDE: tl.constexpr = FACE.side
    scale = fp8_values(codes.to(tl.uint8), False, HW)
    factor = tl.minimum(reciprocal(scale * decode, HW), FP32_MAX)
    held = e2m1_rounded(v * spread(factor, P, Q, SIDE, 16), v, False) * spread(scale, P, Q, SIDE, 16)
    difference = tl.div_rn(held * level, FACE.level_max) - v
    if FACE.rule == LEAST_SQUARED:
        error = difference * difference
    else:
        error = tl.abs(difference)
    if SIDE == 1:
        return _sum_in_order(error, P, Q // 16)
    elif COLUMNWISE:  # by the rows of the matrix: both faces have one choice
        return tl.trans(_sum_squares(tl.trans(error), Q, P))
    else:
        return _sum_squares(error, P, Q)


@triton.jit
def chosen_scale_codes(v, amax, level, encode, decode, FACE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
                       COLUMNWISE: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Return the codes of E4M3 scales that map the amax of a block to 6, or to 4 where that has less error.

    Args:
        v: A tile ``[P, Q]``, without NaN.
        amax: Amaxes of blocks, ``[P / SIDE, Q / 16]``.
        level: Tensor scales, one or ``[P, 1]``.
        encode: What amaxes are multiplied with, as many.
        decode: Its reciprocal.
        COLUMNWISE: Whether the rows of the matrix are the columns of the tile.
    """
    base = tl.div_rn(amax, 6.0) * encode
    six = fp8_codes(tl.minimum(base, 448.0), False, HW)
    four = fp8_codes(tl.minimum(base * 1.5, 448.0), False, HW)
    error_of_six = _errors(v, six, level, decode, FACE, P, Q, COLUMNWISE, HW)
    error_of_four = _errors(v, four, level, decode, FACE, P, Q, COLUMNWISE, HW)
    return tl.where(error_of_four < error_of_six, four, six)

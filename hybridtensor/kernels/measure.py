"""The kernels that measure a matrix before ``ops.quantize`` casts it: amaxes of the tensor, or of rows of its faces.

Legend: as in ``tiles`` and ``quantize``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from hybridtensor.kernels.hadamard import DRAWN, rotate, rotate_drawn
from hybridtensor.kernels.numbers import INF_BITS
from hybridtensor.kernels.random import negative_signs
from hybridtensor.kernels.tiles import as_columns, as_rows, finite, largest, load_tile, raise_to


@triton.jit
def amax_of_rows(v, rounding, stream, ROTATED: tl.constexpr, HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):
    """Return the amax of every row of a tile ``[P, Q]`` of a face, ``[P]``, ignoring NaN, and Inf under drawn signs."""
    if ROTATED == DRAWN:
        amax = tl.max(tl.abs(rotate_drawn(finite(v), negative_signs(rounding, stream), P, Q)), 1)
    elif ROTATED:
        bits = largest(rotate(v, P, Q, True, HW), 1, HW)
        # The rotation without care first. An Inf or NaN in the result says that care is needed.
        if tl.max(bits, 0) < INF_BITS:
            amax = bits.to(tl.float32, bitcast=True)
        else:
            amax = tl.max(tl.abs(rotate(v, P, Q, False, HW)), 1)
    else:
        amax = tl.max(tl.abs(v), 1)
    return tl.where(amax != amax, 0.0, amax)


@triton.jit
def raise_face(target, amax, other, OTHER, PER_ROW: tl.constexpr, P: tl.constexpr):
    """Raise the amax of the tensor, or those of rows of the face, ``[P]``."""
    if PER_ROW:
        i = other + tl.arange(0, P)
        raise_to(target + i, amax, i < OTHER)
    else:
        raise_to(target, tl.max(amax, 0), P > 0)


@triton.jit
def measure_tile(tile, matrix, top, left, row_target, column_target, rounding, row_stream, column_stream,
                 ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Raise the amaxes of one loaded tile; signs that are drawn follow from ``rounding``, key and step, and streams."""
    BM: tl.constexpr = TILE.BM
    BK: tl.constexpr = TILE.BK
    if ROW.wanted:
        amax = amax_of_rows(as_rows(tile, BM, BK), rounding, row_stream, ROW.rotated, HW, BM, BK)
        raise_face(row_target, amax, top, matrix.M, ROW.per_row, BM)
    if COLUMN.wanted:
        amax = amax_of_rows(as_columns(tile, BM, BK), rounding, column_stream, COLUMN.rotated, HW, BK, BM)
        raise_face(column_target, amax, left, matrix.K, COLUMN.per_row, BK)


@triton.jit(do_not_specialize=["row_stream", "column_stream"])
def measure_kernel(matrix, row_target, column_target, rounding, row_stream, column_stream, ROW: tl.constexpr,
                   COLUMN: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr, FOLLOWED: tl.constexpr):  # fmt: skip
    """Raise the amaxes that the casts of either face need, which begin at zero.

    Args:
        FOLLOWED: Let the kernel after this one start while this one ends; it waits before it uses the amaxes.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    # One tile per program. Four to sixteen in a loop were slower per row and per column (0.53 of copy speed, not 0.54
    # to 0.56).
    tiles = tl.cdiv(matrix.K, TILE.BK)
    top = pid // tiles * TILE.BM
    left = pid % tiles * TILE.BK
    tile = load_tile(matrix, top, left, TILE)
    measure_tile(
        tile, matrix, top, left, row_target, column_target, rounding, row_stream, column_stream, ROW, COLUMN, TILE, HW
    )


@triton.jit
def measure_flat_kernel(
    x, target, size, BLOCK: tl.constexpr, STEPS: tl.constexpr, ALONE: tl.constexpr, FOLLOWED: tl.constexpr
):  # fmt: skip
    """Raise the amax of a contiguous tensor, which begins at zero; write it, if this program is ``ALONE``."""
    if FOLLOWED:
        gdc_launch_dependents()
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    amax = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        i = start + step * BLOCK + tl.arange(0, BLOCK)
        amax = tl.maximum(amax, tl.abs(tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)))
    largest = tl.max(amax, 0)
    # No other program raises it: no atomic is needed.
    if ALONE:
        tl.store(target, tl.where(largest != largest, 0.0, largest))
    else:
        raise_to(target, largest, largest >= 0)

"""Tiles of a matrix: loading them, orienting them for either face, reducing their blocks, and amaxes.

Legend: a tile is ``[BM, BK]`` of the matrix ``[M, K]``, held as ``[R, BM / R, BK]``: row ``r + R * b`` at ``[r, b]``,
so that each thread has ``R`` neighbouring rows, whose columnwise elements it reduces and packs on its own.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.numbers import max_of_groups
from hybridtensor.kernels.prologue import GATED, NORMED, gated, normed


@triton.jit
def rows_of_tile(BM: tl.constexpr, R: tl.constexpr):
    """Return which row each place of a tile holds, ``[R, BM / R]``."""
    return tl.arange(0, R)[:, None] + R * tl.arange(0, BM // R)[None, :]


@triton.jit
def as_rows(tile, BM: tl.constexpr, BK: tl.constexpr):
    """Return a tile as ``[BM, BK]``."""
    return tl.reshape(tl.permute(tile, [1, 0, 2]), [BM, BK])


@triton.jit
def as_columns(tile, BM: tl.constexpr, BK: tl.constexpr):
    """Return a tile as ``[BK, BM]``."""
    # Rows below each other lie in one thread, so that only whole words cross shared memory. Transposing bytes through
    # it kept the L1 data pipe busy for 77 to 92 % of the time, with bank conflicts.
    return tl.reshape(tl.permute(tile, [2, 1, 0]), [BK, BM])


@triton.jit
def _load(x, start, offsets, mask, EVEN: tl.constexpr):
    """Load a tile as fp32, with zeros beyond the matrix."""
    # No eviction hint: with loads that are evicted first, current scaling fell from 0.60 of copy speed to 0.57.
    if EVEN:
        tile = tl.load(x + start + offsets)
    else:
        tile = tl.load(x + start + offsets, mask=mask, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def _offsets(rows, columns, stride_m, stride_k, TILE: tl.constexpr):
    """Return where the elements of a tile are, from its first."""
    V: tl.constexpr = TILE.V
    if TILE.wide:
        offsets = rows.to(tl.int64) * stride_m + columns.to(tl.int64) * stride_k
    else:
        offsets = rows * stride_m + columns * stride_k
    # The 2 is not true. It makes Triton hand out threads along columns, then groups of rows, so that the first axis,
    # neighbouring rows, is left to each thread.
    return tl.max_contiguous(offsets, [1, 2, V])


@triton.jit
def load_tile(matrix, top, left, TILE: tl.constexpr):
    """Load, or compute by the prologue, the tile ``[R, BM / R, BK]`` at row ``top`` and column ``left``, as fp32."""
    KIND: tl.constexpr = matrix.x.dtype.element_ty
    rows = rows_of_tile(TILE.BM, TILE.R)[:, :, None]
    columns = tl.arange(0, TILE.BK)[None, None, :]
    mask = (rows < matrix.M - top) & (columns < matrix.K - left)
    # 64 bits for the first element only: offsets inside of a tile take them where TILE.wide says so.
    start = top.to(tl.int64) * matrix.stride_m + left.to(tl.int64) * matrix.stride_k
    offsets = _offsets(rows, columns, matrix.stride_m, matrix.stride_k, TILE)
    tile = _load(matrix.x, start, offsets, mask, TILE.even)
    if TILE.prologue == GATED:
        start = top.to(tl.int64) * matrix.up_stride_m + left.to(tl.int64) * matrix.stride_k
        offsets = _offsets(rows, columns, matrix.up_stride_m, matrix.stride_k, TILE)
        tile = gated(tile, _load(matrix.up, start, offsets, mask, TILE.even), KIND, TILE.gpu)
    elif TILE.prologue == NORMED:
        factor = tl.load(matrix.factors + top + rows, mask=rows < matrix.M - top, other=0.0)
        weight = tl.load(matrix.weight + left + columns, mask=columns < matrix.K - left, other=0.0)
        tile = normed(tile, factor, weight.to(tl.float32), KIND)
        if not TILE.even:
            tile = tl.where(mask, tile, 0.0)  # not -0
    return tile


@triton.jit
def block_max(v, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Return the maximum of every block ``[SIDE, LENGTH]``, ``[P / SIDE, Q / LENGTH]``."""
    N: tl.constexpr = Q // LENGTH
    largest = max_of_groups(v, P, Q, LENGTH)
    if SIDE > 1:
        largest = tl.trans(max_of_groups(tl.trans(largest), N, P, SIDE))
    return largest


@triton.jit
def blocks(v, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Return the amaxes of blocks ``[SIDE, LENGTH]``, without NaN elements, ``[P / SIDE, Q / LENGTH]``."""
    amax = block_max(tl.abs(v), P, Q, SIDE, LENGTH)
    return tl.where(amax != amax, 0.0, amax)


@triton.jit
def spread(blocks, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Repeat per-block numbers for every element, ``[P, Q]``."""
    if SIDE > 1:
        shape: tl.constexpr = [P // SIDE, SIDE, Q // LENGTH]
        blocks = tl.reshape(tl.broadcast_to(blocks[:, None, :], shape), [P, Q // LENGTH])
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], [P, Q // LENGTH, LENGTH]), [P, Q])


@triton.jit
def finite(v):
    """Return ``v`` with zeros in place of NaN and Inf."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def raise_to(target, amax, mask):
    """Raise nonnegative fp32 maxima in place by an integer atomic: bits of such numbers have their order."""
    amax = tl.where(amax != amax, 0.0, amax)
    # Most do not raise anything, which a look tells: atomics on one address take turns. From the L2, where atomics take
    # effect: a line of the L1 may be older.
    before = tl.load(target, mask=mask, other=0.0, cache_modifier=".cg")
    raised = mask & (amax > before)
    # Relaxed: no program of this launch uses the maximum, and the next launch sees all of them.
    tl.atomic_max(target.to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True), mask=raised, sem="relaxed")


@triton.jit
def record_amax(record, slot, amax, mask):
    """Raise the recorded amax of scale ``slot`` in fp32 ``[S]``, or at an int64 address; 0 records nothing."""
    if record.dtype.element_ty == tl.int64:
        at = tl.load(record)
        raise_to(at.to(tl.pointer_type(tl.float32)) + slot, amax, mask & (at != 0))
    else:
        raise_to(record + slot, amax, mask)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(v, AXIS: tl.constexpr, HW: tl.constexpr):
    """Return the amax along an axis as bits, which have the order of the numbers, with NaN above Inf."""
    if HW:
        return tl.reduce(tl.abs(v), AXIS, _larger).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)

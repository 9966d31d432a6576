"""The kernels of ``ops.quantize``: measure a matrix, and cast it into one or both faces in one read.

Legend: a tile is ``[BM, BK]`` of the matrix ``[M, K]``. The rowwise face is cast from the tile as it is, the columnwise
one from its transpose, by one function: there a tile is ``[P, Q]`` of a face ``[OTHER, ALONG]``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.hadamard import rotate
from hybridtensor.kernels.numbers import (
    FP32_MAX,
    e2m1_codes,
    e8m0_reciprocal,
    e8m0_round_up,
    encode_scale,
    fp8_codes,
    fp8_values,
    max_of_groups,
)
from hybridtensor.kernels.random import uniform16

# How a face is scaled.
NONE = tl.constexpr(0)
GIVEN = tl.constexpr(1)  # per tensor, by a factor that is known
TENSOR = tl.constexpr(2)  # per tensor, by its amax
ROW = tl.constexpr(3)  # per row of the face, by its amax
BLOCK = tl.constexpr(4)  # fp32 per SIDE x 128
MX = tl.constexpr(5)  # E8M0 per SIDE x 32
NVFP4 = tl.constexpr(6)  # E4M3 per SIDE x 16, under an fp32 scale per tensor
NVFP4_ROW = tl.constexpr(7)  # the same under an fp32 scale per row of the face


@triton.jit
def _load_tile(x, stride_m, stride_k, pm, pk, M, K, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
               EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Load a tile as fp32; each thread gets R neighbouring rows, which its columnwise bytes are packed from."""
    rows = R * tl.arange(0, BM // R)[:, None, None] + tl.arange(0, R)[None, :, None]
    columns = tl.arange(0, BK)[None, None, :]
    start = pm.to(tl.int64) * BM * stride_m + pk.to(tl.int64) * BK * stride_k
    if WIDE:
        offsets = rows.to(tl.int64) * stride_m + columns.to(tl.int64) * stride_k
    else:
        offsets = rows * stride_m + columns * stride_k
    if EVEN:
        tile = tl.load(x + start + offsets)
    else:
        mask = (rows < M - pm * BM) & (columns < K - pk * BK)
        tile = tl.load(x + start + offsets, mask=mask, other=0.0)
    return tl.reshape(tile.to(tl.float32), [BM, BK])


@triton.jit
def _block_max(v, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Return the maximum of every block ``[SIDE, LENGTH]``, ``[P / SIDE, Q / LENGTH]``."""
    N: tl.constexpr = Q // LENGTH
    largest = max_of_groups(v, P, Q, LENGTH)
    if SIDE > 1:
        largest = tl.trans(max_of_groups(tl.trans(largest), N, P, SIDE))
    return largest


@triton.jit
def _blocks(v, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Return the amaxes of blocks ``[SIDE, LENGTH]``, without NaN elements, ``[P / SIDE, Q / LENGTH]``."""
    amax = _block_max(tl.abs(v), P, Q, SIDE, LENGTH)
    return tl.where(amax != amax, 0.0, amax)


@triton.jit
def _spread(blocks, P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):
    """Repeat what there is per block for every element, ``[P, Q]``."""
    if SIDE > 1:
        shape: tl.constexpr = [P // SIDE, SIDE, Q // LENGTH]
        blocks = tl.reshape(tl.broadcast_to(blocks[:, None, :], shape), [P, Q // LENGTH])
    if LENGTH == Q:
        return tl.broadcast_to(blocks, [P, Q])
    else:
        return tl.reshape(tl.broadcast_to(blocks[:, :, None], [P, Q // LENGTH, LENGTH]), [P, Q])


@triton.jit
def _store_scales(scales, values, other, along, OTHER, ALONG, stride_other, stride_along,
                  P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):  # fmt: skip
    """Store the scales of a tile that starts at ``(other, along)`` of the face."""
    i = other // SIDE + tl.arange(0, P // SIDE)[:, None]
    j = along // LENGTH + tl.arange(0, Q // LENGTH)[None, :]
    mask = (i < tl.cdiv(OTHER, SIDE)) & (j < tl.cdiv(ALONG, LENGTH))
    tl.store(scales + i.to(tl.int64) * stride_other + j.to(tl.int64) * stride_along, values, mask=mask)


@triton.jit
def _quarters(codes, P: tl.constexpr, Q: tl.constexpr):
    """Return every first, second, third and fourth of the last axis."""
    even, odd = tl.split(tl.reshape(codes, [P, Q // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _store_codes(target, codes, other, along, OTHER, ALONG, P: tl.constexpr, Q: tl.constexpr, BITS: tl.constexpr,
                 PACK: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Store codes, one per byte here, as elements of 8 or 4 bits; four bytes at once with ``PACK``."""
    if BITS == 4:
        low, high = tl.split(tl.reshape(codes, [P, Q // 2, 2]))
        codes = low | (high << 4)
    BYTES: tl.constexpr = Q * BITS // 8
    if PACK:
        first, second, third, fourth = _quarters(codes, P, BYTES)
        codes = (first.to(tl.uint32) | (second.to(tl.uint32) << 8)) | (
            (third.to(tl.uint32) << 16) | (fourth.to(tl.uint32) << 24)
        )
        target = target.to(tl.pointer_type(tl.uint32))
    PER: tl.constexpr = (4 if PACK else 1) * 8 // BITS  # elements per store
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, Q // PER)[None, :]
    width = ALONG // PER
    start = other.to(tl.int64) * width + along // PER
    offsets = (i.to(tl.int64) * width if WIDE else i * width) + j
    if EVEN:
        tl.store(target + start + offsets, codes)
    else:
        tl.store(target + start + offsets, codes, mask=(i < OTHER - other) & (j < width - along // PER))


@triton.jit
def _note(v, amaxes, slot):
    """Raise the amax of a delayed scale to that of a tile; bits of non-negative numbers are ordered as they are."""
    amax = tl.max(tl.max(tl.abs(v), 1), 0)
    amax = tl.where(amax != amax, 0.0, amax)
    tl.atomic_max((amaxes + slot).to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _cast_face(
    v, codes, scales, stride_other, stride_along, levels, measured, factors, amaxes, slot, uniform,
    other, along, OTHER, ALONG,
    KIND: tl.constexpr, SIDE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr,
    ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr, NOTE: tl.constexpr, PACK: tl.constexpr,
    HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Cast a tile ``[P, Q]`` of a face and store it."""
    if ROTATED:
        v = rotate(v, P, Q)
    i = other + tl.arange(0, P)
    if KIND == GIVEN or KIND == TENSOR or KIND == ROW:
        if KIND == GIVEN:
            factor = tl.load(factors + slot)
            scale = tl.div_rn(1.0, factor)
            if NOTE:
                _note(v, amaxes, slot)
            y = v * factor
        elif KIND == TENSOR:
            factor, scale = encode_scale(tl.load(measured), E5M2, POW2, OVERFLOW)
            y = v * factor
        else:
            factor, scale = encode_scale(tl.load(measured + i, mask=i < OTHER, other=0.0), E5M2, POW2, OVERFLOW)
            y = v * factor[:, None]
        if KIND == ROW:
            if along == 0:
                tl.store(scales + i, scale, mask=i < OTHER)
        elif (along == 0) & (other == 0):
            tl.store(scales, scale)
        bytes_ = fp8_codes(y, E5M2, HW)
    elif KIND == BLOCK:
        factor, scale = encode_scale(_blocks(v, P, Q, SIDE, 128), E5M2, POW2, OVERFLOW)
        _store_scales(scales, scale, other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 128)
        bytes_ = fp8_codes(v * _spread(factor, P, Q, SIDE, 128), E5M2, HW)
    elif KIND == MX:
        INVERSE: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
        exponent = e8m0_round_up(_blocks(v, P, Q, SIDE, 32) * INVERSE)
        _store_scales(
            scales, exponent.to(tl.uint8), other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 32
        )
        bytes_ = fp8_codes(v * _spread(e8m0_reciprocal(exponent), P, Q, SIDE, 32), E5M2, HW)
    else:
        if KIND == NVFP4_ROW:
            level = tl.load(measured + i, mask=i < OTHER, other=0.0)
        else:
            level = tl.load(measured + tl.zeros([P], tl.int32))
        level = tl.where((level == 0) | (level == float("inf")), 2688.0, level)
        if KIND == NVFP4_ROW:
            if along == 0:
                tl.store(levels + i, level, mask=i < OTHER)
        elif (along == 0) & (other == 0):
            tl.store(levels + tl.arange(0, P), level, mask=tl.arange(0, P) == 0)
        if SIDE > 1:  # every row of a block has the tensor's level
            level_of_block = tl.max(tl.reshape(level, [P // SIDE, SIDE]), 1)
        else:
            level_of_block = level
        encode = tl.minimum(tl.div_rn(tl.zeros_like(level_of_block) + 2688.0, level_of_block), FP32_MAX)
        amax = _blocks(v, P, Q, SIDE, 16)
        scale_codes = fp8_codes(tl.minimum(amax * (encode * (1.0 / 6.0))[:, None], 448.0), False, HW)
        scale = fp8_values(scale_codes, False, HW)
        factor = tl.div_rn(1.0, scale * tl.div_rn(1.0, encode)[:, None])
        factor = tl.minimum(factor, FP32_MAX)
        nan = _block_max((v != v).to(tl.int32), P, Q, SIDE, 16)
        scale_codes = tl.where(nan > 0, 0x7F, scale_codes).to(tl.uint8)
        _store_scales(scales, scale_codes, other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 16)
        y = tl.where(v != v, 0.0, v) * _spread(factor, P, Q, SIDE, 16)
        bytes_ = e2m1_codes(y, uniform, STOCHASTIC)
    BITS: tl.constexpr = 4 if KIND == NVFP4 or KIND == NVFP4_ROW else 8
    _store_codes(codes, bytes_, other, along, OTHER, ALONG, P, Q, BITS, PACK, EVEN, WIDE)


@triton.jit(do_not_specialize=["row_slot", "row_stream", "column_slot", "column_stream", "first_row"])
def cast_kernel(
    x, stride_m, stride_k, M, K,
    row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, row_slot, row_stream,
    column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured, column_slot,
    column_stream,
    factors, amaxes, rounding, first_row,
    ROW_KIND: tl.constexpr, ROW_SIDE: tl.constexpr, ROW_E5M2: tl.constexpr, ROW_POW2: tl.constexpr,
    ROW_ROTATED: tl.constexpr, ROW_STOCHASTIC: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_SIDE: tl.constexpr, COLUMN_E5M2: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_ROTATED: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, COLUMN_PACK: tl.constexpr,
    ROW_OVERFLOW: tl.constexpr, COLUMN_OVERFLOW: tl.constexpr, NOTE: tl.constexpr,
    REVERSED: tl.constexpr, ALIGNED: tl.constexpr,
    HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Cast one tile into the faces that are asked for.

    Args:
        x: ``[M, K]`` with its strides.
        row_codes: Elements of the rowwise face; ``row_scales`` with strides by row and block, ``row_levels`` its fp32
            tensor scales, ``row_measured`` its amaxes (per tensor or row), ``row_slot`` its delayed scale,
            ``row_stream`` its random numbers. The same for the columnwise face, transposed.
        factors: Delayed factors; ``amaxes`` their notes.
        rounding: Key and step; ``first_row`` counts this matrix's rows.
        REVERSED: Begin at the end, where a pass before this one ended and the cache is warm.
    """
    pid = tl.program_id(0)
    if REVERSED:
        pid = tl.num_programs(0) - 1 - pid
    tiles = tl.cdiv(K, BK)
    pm = pid // tiles
    pk = pid % tiles
    v = _load_tile(x, stride_m, stride_k, pm, pk, M, K, BM, BK, R, EVEN, WIDE)
    rows = first_row + (pm * BM).to(tl.int64) + tl.arange(0, BM)
    if ROW_KIND != NONE:
        uniform = v
        if ROW_STOCHASTIC:
            uniform = uniform16(rows, pk * BK, K, rounding, row_stream, BM, BK, ALIGNED)
        _cast_face(
            v, row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, factors, amaxes, row_slot,
            uniform, pm * BM, pk * BK, M, K,
            ROW_KIND, ROW_SIDE, ROW_E5M2, ROW_POW2, ROW_OVERFLOW, ROW_ROTATED, ROW_STOCHASTIC, NOTE,
            False, HW, EVEN, WIDE, BM, BK,
        )  # fmt: skip
    if COLUMN_KIND != NONE:
        uniform = tl.trans(v)
        if COLUMN_STOCHASTIC:
            uniform = tl.trans(uniform16(rows, pk * BK, K, rounding, column_stream, BM, BK, ALIGNED))
        _cast_face(
            tl.trans(v), column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured,
            factors, amaxes, column_slot, uniform, pk * BK, pm * BM, K, M,
            COLUMN_KIND, COLUMN_SIDE, COLUMN_E5M2, COLUMN_POW2, COLUMN_OVERFLOW, COLUMN_ROTATED, COLUMN_STOCHASTIC,
            NOTE, COLUMN_PACK, HW, EVEN, WIDE, BK, BM,
        )  # fmt: skip


@triton.jit
def _raise_to(target, amax, mask):
    """Raise fp32 maxima, which are not negative, in place."""
    amax = tl.where(amax != amax, 0.0, amax)
    tl.atomic_max(target.to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _measure_face(v, of_tensor, of_rows, other, OTHER, PER_ROW: tl.constexpr, P: tl.constexpr):
    """Raise the amax of the tensor, or of every row of the face, to that of a tile."""
    amax = tl.max(tl.abs(v), 1)
    if PER_ROW:
        i = other + tl.arange(0, P)
        _raise_to(of_rows + i, amax, i < OTHER)
    else:
        amax = tl.max(tl.where(amax != amax, 0.0, amax), 0)
        _raise_to(of_tensor, amax, None)


@triton.jit
def measure_kernel(
    x, stride_m, stride_k, M, K, row_target, column_target,
    ROW: tl.constexpr, ROW_PER_ROW: tl.constexpr, ROW_ROTATED: tl.constexpr,
    COLUMN: tl.constexpr, COLUMN_PER_ROW: tl.constexpr, COLUMN_ROTATED: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes that the casts of either face need, which begin at zero."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(K, BK)
    pm = pid // tiles
    pk = pid % tiles
    v = _load_tile(x, stride_m, stride_k, pm, pk, M, K, BM, BK, R, EVEN, WIDE)
    if ROW:
        rotated = v
        if ROW_ROTATED:
            rotated = rotate(v, BM, BK)
        _measure_face(rotated, row_target, row_target, pm * BM, M, ROW_PER_ROW, BM)
    if COLUMN:
        rotated = tl.trans(v)
        if COLUMN_ROTATED:
            rotated = rotate(tl.trans(v), BK, BM)
        _measure_face(rotated, column_target, column_target, pk * BK, K, COLUMN_PER_ROW, BK)


@triton.jit
def measure_flat_kernel(x, target, size, BLOCK: tl.constexpr, STEPS: tl.constexpr, ALONE: tl.constexpr):
    """Raise the amax of a contiguous tensor, which begins at zero; write it, if this program is ``ALONE``."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    amax = tl.zeros([BLOCK], tl.float32)
    for step in tl.static_range(STEPS):
        i = start + step * BLOCK + tl.arange(0, BLOCK)
        amax = tl.maximum(amax, tl.abs(tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)))
    largest = tl.max(amax, 0)
    if ALONE:
        tl.store(target, tl.where(largest != largest, 0.0, largest))
    else:
        _raise_to(target, largest, None)

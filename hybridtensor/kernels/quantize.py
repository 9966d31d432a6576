"""The kernel of ``ops.quantize``: cast a matrix into one or both faces in one read.

Legend: a tile is ``[BM, BK]`` of the matrix ``[M, K]``, held as ``[R, BM / R, BK]``: row ``r + R * b`` at ``[r, b]``,
so that each thread has ``R`` neighbouring rows, whose columnwise elements it reduces and packs on its own. The rowwise
face is cast from the tile as it is, the columnwise one from its transpose, by one function: there a tile is ``[P, Q]``
of a face ``[OTHER, ALONG]``. With ``HELD`` the columnwise one is cast from what the rowwise one holds, as
``kernels.dequantize`` would return it, which never leaves the registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hybridtensor.kernels.hadamard import rotate, rotate_back
from hybridtensor.kernels.measure import amax_of_rows, raise_face
from hybridtensor.kernels.numbers import (
    FP32_MAX,
    INF_BITS,
    e2m1_codes,
    e2m1_rounded,
    e2m1_words,
    e8m0_reciprocal,
    e8m0_round_up,
    e8m0_value,
    encode_scale,
    fp8_codes,
    fp8_rounded,
    fp8_values,
    fp8_words,
    max_of_groups,
    pack,
    reciprocal,
    round_to,
    two_level_scale,
)
from hybridtensor.kernels.random import uniform16
from hybridtensor.kernels.tiles import (
    as_columns,
    as_rows,
    block_max,
    blocks,
    largest,
    load_tile,
    raise_to,
    rows_of_tile,
    spread,
)

# How a face is scaled.
NONE = tl.constexpr(0)
GIVEN = tl.constexpr(1)  # per tensor, by a factor that is known
TENSOR = tl.constexpr(2)  # per tensor, by its amax
ROW = tl.constexpr(3)  # per row of the face, by its amax
BLOCK = tl.constexpr(4)  # fp32 per SIDE x 128
MX = tl.constexpr(5)  # E8M0 per SIDE x 32
NVFP4 = tl.constexpr(6)  # E4M3 per SIDE x 16, under an fp32 scale per tensor
NVFP4_ROW = tl.constexpr(7)  # the same under an fp32 scale per row of the face
AMAX = tl.constexpr(8)  # not at all: the amax of the tensor is raised instead
AMAX_ROW = tl.constexpr(9)  # the same per row of the face


@triton.jit
def _store_scales(scales, values, other, along, OTHER, ALONG, stride_other, stride_along,
                  P: tl.constexpr, Q: tl.constexpr, SIDE: tl.constexpr, LENGTH: tl.constexpr):  # fmt: skip
    """Store the scales of a tile that starts at ``(other, along)`` of the face."""
    i = other // SIDE + tl.arange(0, P // SIDE)[:, None]
    j = along // LENGTH + tl.arange(0, Q // LENGTH)[None, :]
    mask = (i < tl.cdiv(OTHER, SIDE)) & (j < tl.cdiv(ALONG, LENGTH))
    tl.store(scales + i.to(tl.int64) * stride_other + j.to(tl.int64) * stride_along, values, mask=mask)


@triton.jit
def _store(target, codes, other, along, OTHER, ALONG, PER: tl.constexpr,
           P: tl.constexpr, Q: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Store numbers with ``PER`` elements each, of a tile that starts at ``(other, along)``."""
    i = tl.arange(0, P)[:, None]
    j = tl.arange(0, Q // PER)[None, :]
    width = ALONG // PER
    start = other.to(tl.int64) * width + along // PER
    offsets = (i.to(tl.int64) * width if WIDE else i * width) + j
    if EVEN:
        tl.store(target + start + offsets, codes.to(target.dtype.element_ty))
    else:
        mask = (i < OTHER - other) & (j < width - along // PER)
        tl.store(target + start + offsets, codes.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_fp8(target, y, other, along, OTHER, ALONG, E5M2: tl.constexpr, PACK: tl.constexpr, HW: tl.constexpr,
               P: tl.constexpr, Q: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Round a tile to FP8 and store it, four elements at once with ``PACK``."""
    if PACK:
        words = target.to(tl.pointer_type(tl.int32))
        _store(words, fp8_words(y, P, Q, E5M2, HW), other, along, OTHER, ALONG, 4, P, Q, EVEN, WIDE)
    else:
        _store(target, fp8_codes(y, E5M2, HW), other, along, OTHER, ALONG, 1, P, Q, EVEN, WIDE)


@triton.jit
def _store_fp4(target, y, uniform, other, along, OTHER, ALONG, STOCHASTIC: tl.constexpr, PACK: tl.constexpr,
               HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Round a tile to E2M1 and store it, eight elements at once with ``PACK``."""
    words = target.to(tl.pointer_type(tl.int32))
    if PACK and not STOCHASTIC:
        _store(words, e2m1_words(y, P, Q, HW), other, along, OTHER, ALONG, 8, P, Q, EVEN, WIDE)
    elif PACK:
        codes = e2m1_codes(y, uniform, True)
        _store(words, pack(codes, P, Q, 4, 32), other, along, OTHER, ALONG, 8, P, Q, EVEN, WIDE)
    else:
        codes = e2m1_codes(y, uniform, STOCHASTIC)
        _store(target, pack(codes, P, Q, 4, 8), other, along, OTHER, ALONG, 2, P, Q, EVEN, WIDE)


@triton.jit
def _cast_fp8(
    v, codes, scales, stride_other, stride_along, measured, factors, amaxes, slot, also, other, along, OTHER, ALONG,
    KIND: tl.constexpr, SIDE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr,
    NOTE: tl.constexpr, STORE: tl.constexpr, HELD: tl.constexpr, PACK: tl.constexpr, HW: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Cast a tile ``[P, Q]`` of a face to FP8, ``STORE`` it, and return what it holds if that is ``HELD``."""
    i = other + tl.arange(0, P)
    if KIND == GIVEN:
        factor = tl.load(factors + slot)
        scale = tl.div_rn(1.0, factor)
        if NOTE:
            amax = tl.max(tl.max(tl.abs(v), 1), 0)
            raise_to(amaxes + slot, amax, slot >= 0)
            raise_to(amaxes + also, amax, (also >= 0) & (also != slot))
        y = v * factor
        unit = scale
    elif KIND == TENSOR:
        factor, scale = encode_scale(tl.load(measured), E5M2, POW2, OVERFLOW)
        if NOTE:
            amax = tl.max(tl.max(tl.abs(v), 1), 0)
            raise_to(amaxes, amax, amax >= 0)
        y = v * factor
        unit = scale
    elif KIND == ROW:
        factor, scale = encode_scale(tl.load(measured + i, mask=i < OTHER, other=0.0), E5M2, POW2, OVERFLOW)
        y = v * factor[:, None]
        unit = scale[:, None]
    elif KIND == BLOCK:
        factor, scale = encode_scale(blocks(v, P, Q, SIDE, 128), E5M2, POW2, OVERFLOW)
        y = v * spread(factor, P, Q, SIDE, 128)
        unit = spread(scale, P, Q, SIDE, 128)
        if STORE:
            _store_scales(scales, scale, other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 128)
    else:
        INVERSE: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
        exponent = e8m0_round_up(blocks(v, P, Q, SIDE, 32) * INVERSE)
        y = v * spread(e8m0_reciprocal(exponent), P, Q, SIDE, 32)
        unit = spread(e8m0_value(exponent), P, Q, SIDE, 32)
        if STORE:
            _store_scales(
                scales, exponent.to(tl.uint8), other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 32
            )
    if STORE:
        if KIND == ROW and along == 0:
            tl.store(scales + i, scale, mask=i < OTHER)
        if (KIND == GIVEN or KIND == TENSOR) and (along == 0) & (other == 0):
            tl.store(scales, scale)
        _store_fp8(codes, y, other, along, OTHER, ALONG, E5M2, PACK, HW, P, Q, EVEN, WIDE)
    if HELD:
        v = fp8_rounded(y, E5M2, HW) * unit
    return v


@triton.jit
def _load_level(measured, levels, other, along, OTHER, PER_ROW: tl.constexpr, STORE: tl.constexpr, P: tl.constexpr):
    """Return the fp32 scales of a two-level format, one or ``[P, 1]``, after storing them."""
    if PER_ROW:
        i = other + tl.arange(0, P)
        level = tl.load(measured + i, mask=i < OTHER, other=0.0)
        level = tl.where((level == 0) | (level == float("inf")), 2688.0, level)
        if STORE and along == 0:
            tl.store(levels + i, level, mask=i < OTHER)
        return level[:, None]
    else:
        level = tl.load(measured)
        level = tl.where((level == 0) | (level == float("inf")), 2688.0, level)
        if STORE and (along == 0) & (other == 0):
            tl.store(levels, level)
        return level


@triton.jit
def _cast_nvfp4(v, amax, level, codes, scales, stride_other, stride_along, uniform, other, along, OTHER, ALONG,
                SIDE: tl.constexpr, STOCHASTIC: tl.constexpr, STORE: tl.constexpr, HELD: tl.constexpr,
                FINITE: tl.constexpr, PACK: tl.constexpr, HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
                P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """Cast a tile to NVFP4 as ``_cast_fp8`` does, without a thought of NaN if it is ``FINITE``."""
    encode = tl.minimum(tl.div_rn(2688.0, level), FP32_MAX)  # what block amaxes are multiplied with
    scale_codes = fp8_codes(tl.minimum(amax * (encode * (1.0 / 6.0)), 448.0), False, HW)
    scale = fp8_values(scale_codes.to(tl.uint8), False, HW)
    factor = tl.minimum(reciprocal(scale * tl.div_rn(1.0, encode), HW), FP32_MAX)
    if not FINITE:
        nan = block_max((v != v).to(tl.int32), P, Q, SIDE, 16)
        scale_codes = tl.where(nan > 0, 0x7F, scale_codes)
        scale = tl.where(nan > 0, float("nan"), scale)
        v = tl.where(v != v, 0.0, v)
    y = v * spread(factor, P, Q, SIDE, 16)
    if STORE:
        _store_scales(
            scales, scale_codes.to(tl.uint8), other, along, OTHER, ALONG, stride_other, stride_along, P, Q, SIDE, 16
        )
        _store_fp4(codes, y, uniform, other, along, OTHER, ALONG, STOCHASTIC, PACK, HW, P, Q, EVEN, WIDE)
    if HELD:
        combined, back = two_level_scale(scale, level, 1.0 / 2688.0)
        v = (e2m1_rounded(y, uniform, STOCHASTIC) * spread(combined, P, Q, SIDE, 16)) * back
    return v


@triton.jit
def _cast_face(
    v, codes, scales, stride_other, stride_along, levels, measured, factors, amaxes, slot, also, uniform,
    other, along, OTHER, ALONG,
    KIND: tl.constexpr, SIDE: tl.constexpr, E5M2: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr,
    ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr, NOTE: tl.constexpr, STORE: tl.constexpr, HELD: tl.constexpr,
    FINITE: tl.constexpr, PACK: tl.constexpr, HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
    P: tl.constexpr, Q: tl.constexpr,
):  # fmt: skip
    """Cast a tile ``[P, Q]`` of a face, and ``STORE`` it.

    Returns:
        Whether ``FINITE`` was wrong: do it again. What the face holds as values of a dtype, if that is ``HELD``.
    """
    nonfinite = other < 0
    if KIND >= AMAX:
        raise_face(measured, amax_of_rows(v, ROTATED, HW, P, Q), other, OTHER, KIND == AMAX_ROW, P)
    elif KIND < NVFP4:
        v = _cast_fp8(
            v, codes, scales, stride_other, stride_along, measured, factors, amaxes, slot, also, other, along, OTHER,
            ALONG, KIND, SIDE, E5M2, POW2, OVERFLOW, NOTE, STORE, HELD, PACK, HW, EVEN, WIDE, P, Q,
        )  # fmt: skip
    else:
        if ROTATED:
            v = rotate(v, P, Q, FINITE, HW)
        if FINITE:
            bits = largest(tl.reshape(v, [P, Q // 16, 16]), 2, HW)
            if SIDE > 1:
                bits = tl.trans(max_of_groups(tl.trans(bits), Q // 16, P, SIDE))
            nonfinite = tl.max(tl.max(bits, 1), 0) >= INF_BITS
            amax = bits.to(tl.float32, bitcast=True)
        else:
            amax = blocks(v, P, Q, SIDE, 16)
        v = _cast_nvfp4(
            v, amax, _load_level(measured, levels, other, along, OTHER, KIND == NVFP4_ROW, STORE, P), codes, scales,
            stride_other, stride_along, uniform, other, along, OTHER, ALONG,
            SIDE, STOCHASTIC, STORE, HELD, FINITE, PACK, HW, EVEN, WIDE, P, Q,
        )  # fmt: skip
    if HELD:
        if ROTATED:
            v = rotate_back(v, P, Q)
        v = round_to(v, HELD, HW)
    return nonfinite, v


@triton.jit
def _cast_tile(
    pid,
    x, stride_m, stride_k, M, K,
    row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, row_slot, row_stream,
    column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured, column_slot,
    column_stream,
    factors, amaxes, rounding, first_row,
    ROW_KIND: tl.constexpr, ROW_SIDE: tl.constexpr, ROW_E5M2: tl.constexpr, ROW_POW2: tl.constexpr,
    ROW_ROTATED: tl.constexpr, ROW_STOCHASTIC: tl.constexpr, ROW_PACK: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_SIDE: tl.constexpr, COLUMN_E5M2: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_ROTATED: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, COLUMN_PACK: tl.constexpr,
    ROW_OVERFLOW: tl.constexpr, COLUMN_OVERFLOW: tl.constexpr, ROW_NOTE: tl.constexpr, COLUMN_NOTE: tl.constexpr,
    ROW_STORE: tl.constexpr, HELD: tl.constexpr, ALIGNED: tl.constexpr,
    HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, FOLLOWING: tl.constexpr,
):  # fmt: skip
    """Cast tile ``pid``; see ``cast_kernel``."""
    tiles = tl.cdiv(K, BK)
    pm = pid // tiles
    pk = pid % tiles
    rows = first_row + (pm * BM).to(tl.int64) + rows_of_tile(BM, R)
    nonfinite = pid >= 0
    # First without a thought of NaN and Inf, where that saves something, then with care if there were any
    TWICE: tl.constexpr = ROW_KIND >= NVFP4 or COLUMN_KIND == NVFP4 or COLUMN_KIND == NVFP4_ROW
    for attempt in tl.static_range(2 if TWICE else 1):
        if nonfinite:
            tl.debug_barrier()
            tile = load_tile(x, stride_m, stride_k, pm, pk, M, K, BM, BK, R, V, EVEN, WIDE)
            if FOLLOWING:
                gdc_wait()
            columns = as_columns(tile, BM, BK)
            nonfinite = pid < 0
            if ROW_KIND != NONE:
                uniform = tile
                if ROW_STOCHASTIC:
                    uniform = uniform16(rows, pk * BK, K, rounding, row_stream, BM, BK, R, ALIGNED)
                again, held = _cast_face(
                    as_rows(tile, BM, BK), row_codes, row_scales, row_stride_m, row_stride_k, row_levels,
                    row_measured, factors, amaxes, row_slot, row_slot if HELD else column_slot,
                    as_rows(uniform, BM, BK), pm * BM, pk * BK, M, K,
                    ROW_KIND, ROW_SIDE, ROW_E5M2, ROW_POW2, ROW_OVERFLOW, ROW_ROTATED, ROW_STOCHASTIC, ROW_NOTE,
                    ROW_STORE, HELD, attempt == 0, ROW_PACK, HW, EVEN, WIDE, BM, BK,
                )  # fmt: skip
                nonfinite |= again
                if HELD:
                    if ROW_KIND >= NVFP4 and (COLUMN_KIND == GIVEN or COLUMN_KIND >= AMAX):
                        held = tl.where(nonfinite, 0.0, held)  # what is raised stays
                    columns = tl.trans(held)
            if COLUMN_KIND != NONE:
                uniform = columns
                if COLUMN_STOCHASTIC:
                    uniform = as_columns(
                        uniform16(rows, pk * BK, K, rounding, column_stream, BM, BK, R, ALIGNED), BM, BK
                    )
                again, _ = _cast_face(
                    columns, column_codes, column_scales, column_stride_k, column_stride_m,
                    column_levels, column_measured, factors, amaxes, column_slot, column_slot, uniform,
                    pk * BK, pm * BM, K, M,
                    COLUMN_KIND, COLUMN_SIDE, COLUMN_E5M2, COLUMN_POW2, COLUMN_OVERFLOW, COLUMN_ROTATED,
                    COLUMN_STOCHASTIC, COLUMN_NOTE, True, 0, attempt == 0, COLUMN_PACK, HW, EVEN, WIDE, BK, BM,
                )  # fmt: skip
                nonfinite |= again


@triton.jit(do_not_specialize=["row_slot", "row_stream", "column_slot", "column_stream", "first_row"])
def cast_kernel(
    x, stride_m, stride_k, M, K,
    row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, row_slot, row_stream,
    column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured, column_slot,
    column_stream,
    factors, amaxes, rounding, first_row,
    ROW_KIND: tl.constexpr, ROW_SIDE: tl.constexpr, ROW_E5M2: tl.constexpr, ROW_POW2: tl.constexpr,
    ROW_ROTATED: tl.constexpr, ROW_STOCHASTIC: tl.constexpr, ROW_PACK: tl.constexpr,
    COLUMN_KIND: tl.constexpr, COLUMN_SIDE: tl.constexpr, COLUMN_E5M2: tl.constexpr, COLUMN_POW2: tl.constexpr,
    COLUMN_ROTATED: tl.constexpr, COLUMN_STOCHASTIC: tl.constexpr, COLUMN_PACK: tl.constexpr,
    ROW_OVERFLOW: tl.constexpr, COLUMN_OVERFLOW: tl.constexpr, ROW_NOTE: tl.constexpr, COLUMN_NOTE: tl.constexpr,
    ROW_STORE: tl.constexpr, HELD: tl.constexpr, REVERSED: tl.constexpr, CHECKED: tl.constexpr, ALIGNED: tl.constexpr,
    HW: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
    V: tl.constexpr, FOLLOWING: tl.constexpr,
):  # fmt: skip
    """Cast one tile into the faces that are asked for.

    Args:
        x: ``[M, K]`` with its strides.
        row_codes: Elements of the rowwise face; ``row_scales`` with strides by row and block, ``row_levels`` its fp32
            tensor scales, ``row_measured`` its amaxes (per tensor or row), ``row_slot`` its delayed scale,
            ``row_stream`` its random numbers. The same for the columnwise face, transposed.
        factors: Delayed factors; ``amaxes`` their notes.
        rounding: Key and step; ``first_row`` counts this matrix's rows.
        ROW_STORE: Whether the rowwise face is wanted, not only what it holds.
        HELD: Make the columnwise face from what the rowwise one holds, as values of this dtype (see ``round_to``).
        REVERSED: Begin at the end, where a pass before this one ended and the cache is warm.
        CHECKED: The faces are there, scaled per tensor by the amax at ``factors``: cast all tiles again, several to a
            program, if the scale of ``row_measured`` is another one; else do nothing.
        FOLLOWING: Started while the kernel that measures is ending: wait for it once the tile is read.
    """
    pid = tl.program_id(0)
    if CHECKED:
        E5M2: tl.constexpr = ROW_E5M2 if ROW_KIND != NONE else COLUMN_E5M2
        POW2: tl.constexpr = ROW_POW2 if ROW_KIND != NONE else COLUMN_POW2
        now, _ = encode_scale(tl.load(row_measured), E5M2, POW2, ROW_OVERFLOW)
        before, _ = encode_scale(tl.load(factors), E5M2, POW2, ROW_OVERFLOW)
        if now != before:
            for tile in range(pid, tl.cdiv(M, BM) * tl.cdiv(K, BK), tl.num_programs(0)):
                _cast_tile(
                    tile,
                    x, stride_m, stride_k, M, K,
                    row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, row_slot, row_stream,
                    column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured,
                    column_slot, column_stream, factors, amaxes, rounding, first_row,
                    ROW_KIND, ROW_SIDE, ROW_E5M2, ROW_POW2, ROW_ROTATED, ROW_STOCHASTIC, ROW_PACK,
                    COLUMN_KIND, COLUMN_SIDE, COLUMN_E5M2, COLUMN_POW2, COLUMN_ROTATED, COLUMN_STOCHASTIC, COLUMN_PACK,
                    ROW_OVERFLOW, COLUMN_OVERFLOW, ROW_NOTE, COLUMN_NOTE, ROW_STORE, HELD, ALIGNED, HW, EVEN, WIDE,
                    BM, BK, R, V, False,
                )  # fmt: skip
    else:
        if REVERSED:
            pid = tl.num_programs(0) - 1 - pid
        _cast_tile(
            pid,
            x, stride_m, stride_k, M, K,
            row_codes, row_scales, row_stride_m, row_stride_k, row_levels, row_measured, row_slot, row_stream,
            column_codes, column_scales, column_stride_k, column_stride_m, column_levels, column_measured, column_slot,
            column_stream, factors, amaxes, rounding, first_row,
            ROW_KIND, ROW_SIDE, ROW_E5M2, ROW_POW2, ROW_ROTATED, ROW_STOCHASTIC, ROW_PACK,
            COLUMN_KIND, COLUMN_SIDE, COLUMN_E5M2, COLUMN_POW2, COLUMN_ROTATED, COLUMN_STOCHASTIC, COLUMN_PACK,
            ROW_OVERFLOW, COLUMN_OVERFLOW, ROW_NOTE, COLUMN_NOTE, ROW_STORE, HELD, ALIGNED, HW, EVEN, WIDE,
            BM, BK, R, V, FOLLOWING,
        )  # fmt: skip

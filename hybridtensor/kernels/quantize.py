"""The kernel of ``ops.quantize``: cast a matrix into one or both faces in one read.

Legend: a tile is ``[BM, BK]`` of the matrix ``[M, K]``, held as ``[R, BM / R, BK]``: row ``r + R * b`` at ``[r, b]``,
so that each thread has ``R`` neighbouring rows, whose columnwise elements it reduces and packs on its own. The rowwise
face is cast from the tile as it is, the columnwise one from its transpose, by one function: there a tile is ``[P, Q]``
of a face ``[OTHER, ALONG]``, at a ``place``. With ``REQUANTIZED`` the columnwise one is cast from the rowwise one as
``kernels.dequantize`` would return it, which never leaves the registers. ``groups`` has the named arguments.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from hybridtensor.kernels import groups
from hybridtensor.kernels.eden import cast_eden
from hybridtensor.kernels.four_over_six import chosen_scale_codes
from hybridtensor.kernels.groups import Output, Place, State
from hybridtensor.kernels.hadamard import rotate, rotate_back
from hybridtensor.kernels.measure import amax_of_rows, raise_face
from hybridtensor.kernels.numbers import (
    BF16,
    FP32_MAX,
    INF_BITS,
    OWN_RULE,
    e2m1_rounded,
    e8m0_reciprocal,
    e8m0_round_up,
    e8m0_value,
    encode_scale,
    fp8_codes,
    fp8_rounded,
    fp8_values,
    max_of_groups,
    mxfp4_exponent,
    reciprocal,
    round_to,
    two_level_scale,
)
from hybridtensor.kernels.random import uniform16
from hybridtensor.kernels.storing import store_fp4, store_fp8, store_scales, store_tile, stored
from hybridtensor.kernels.tiles import (
    as_columns,
    as_rows,
    block_max,
    blocks,
    largest,
    load_tile,
    raise_to,
    record_amax,
    rows_of_tile,
    spread,
)

# How a face is scaled; see ``groups``.
NONE = tl.constexpr(groups.NONE)
GIVEN = tl.constexpr(groups.GIVEN)
TENSOR = tl.constexpr(groups.TENSOR)
ROW = tl.constexpr(groups.ROW)
BLOCK = tl.constexpr(groups.BLOCK)
MX = tl.constexpr(groups.MX)
MXFP4 = tl.constexpr(groups.MXFP4)
EDEN = tl.constexpr(groups.EDEN)
NVFP4 = tl.constexpr(groups.NVFP4)
NVFP4_ROW = tl.constexpr(groups.NVFP4_ROW)
AMAX = tl.constexpr(groups.AMAX)
AMAX_ROW = tl.constexpr(groups.AMAX_ROW)


@triton.jit
def _with_amax(out, M, FACE: tl.constexpr):
    """Replace the address of the amaxes of ``M`` rows by the largest of them, where those of rows are given."""
    if FACE.of_rows:
        amax = 0.0
        for first in range(0, M, 2048):
            i = first + tl.arange(0, 2048)
            of_rows = tl.load(out.measured + i, mask=i < M, other=0.0)
            amax = tl.maximum(amax, tl.max(of_rows.to(tl.float32), 0))
        return Output(out.qdata, out.scales, out.stride_other, out.stride_along, out.tensor_scale, amax)
    else:
        return out


@triton.jit
def _amax_of_tensor(out, FACE: tl.constexpr):
    """Return the tensor's amax, which ``_with_amax`` worked out, or which is in memory."""
    if FACE.of_rows:
        return out.measured
    else:
        return tl.load(out.measured)


@triton.jit
def _cast_fp8(v, out, state, slot, also, place, FACE: tl.constexpr, TILE: tl.constexpr, REQUANTIZED: tl.constexpr,
              HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """Cast a tile ``[P, Q]`` of a face to FP8; store it if wanted, and return it dequantized if ``REQUANTIZED``."""
    i = place.other + tl.arange(0, P)
    SIDE: tl.constexpr = FACE.side
    if FACE.kind == GIVEN:
        factor = tl.load(state.factors + slot)
        scale = tl.div_rn(1.0, factor)
        if FACE.record:
            amax = tl.max(tl.max(tl.abs(v), 1), 0)
            record_amax(state.amaxes, slot, amax, slot >= 0)
            # The slot of the other face, where that has a scale of its own for the same values.
            record_amax(state.amaxes, also, amax, (also >= 0) & (also != slot))
        y = v * factor
        unit = scale
    elif FACE.kind == TENSOR:
        factor, scale = encode_scale(_amax_of_tensor(out, FACE), FACE.e5m2, FACE.pow2, FACE.overflow)
        if FACE.record:
            amax = tl.max(tl.max(tl.abs(v), 1), 0)
            raise_to(state.amaxes, amax, amax >= 0)
        y = v * factor
        unit = scale
    elif FACE.kind == ROW:
        measured = tl.load(out.measured + i, mask=i < place.OTHER, other=0.0).to(tl.float32)
        factor, scale = encode_scale(measured, FACE.e5m2, FACE.pow2, FACE.overflow)
        y = v * factor[:, None]
        unit = scale[:, None]
    elif FACE.kind == BLOCK:
        factor, scale = encode_scale(blocks(v, P, Q, SIDE, 128), FACE.e5m2, FACE.pow2, FACE.overflow)
        y = v * spread(factor, P, Q, SIDE, 128)
        unit = spread(scale, P, Q, SIDE, 128)
        if FACE.store:
            store_scales(out, scale, place, P, Q, SIDE, 128)
    else:
        INVERSE: tl.constexpr = 1.0 / 57344.0 if FACE.e5m2 else 1.0 / 448.0
        exponent = e8m0_round_up(blocks(v, P, Q, SIDE, 32) * INVERSE)
        y = v * spread(e8m0_reciprocal(exponent), P, Q, SIDE, 32)
        unit = spread(e8m0_value(exponent), P, Q, SIDE, 32)
        if FACE.store and not FACE.values:
            store_scales(out, exponent.to(tl.uint8), place, P, Q, SIDE, 32)
    if FACE.store and FACE.values:
        dequantized = round_to(fp8_rounded(y, FACE.e5m2, HW) * unit, BF16, HW)
        store_tile(out.qdata, dequantized, place, 1, TILE, P, Q)
    elif FACE.store:
        # Only the first tile of each row of tiles writes the scales of its rows, and only the first of all that of the
        # tensor.
        if FACE.kind == ROW and place.along == 0:
            tl.store(out.scales + i, scale, mask=i < place.OTHER)
        if (FACE.kind == GIVEN or FACE.kind == TENSOR) and (place.along == 0) & (place.other == 0):
            tl.store(out.scales, scale)
        store_fp8(out.qdata, y, place, FACE, TILE, HW, P, Q)
    if REQUANTIZED:
        v = fp8_rounded(y, FACE.e5m2, HW) * unit
    return v


@triton.jit
def _cast_mxfp4(v, out, uniform, place, FACE: tl.constexpr, TILE: tl.constexpr, REQUANTIZED: tl.constexpr,
                HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr):  # fmt: skip
    """Cast a tile to MXFP4 as ``_cast_fp8`` does."""
    SIDE: tl.constexpr = FACE.side
    if FACE.rotated:
        v = rotate(v, P, Q, False, HW)
    bits = largest(tl.reshape(v, [P, Q // 32, 32]), 2, HW)
    if SIDE > 1:
        bits = tl.trans(max_of_groups(tl.trans(bits), Q // 32, P, SIDE))
    # E2M1 has no NaN: elements become 0, and the scale of the block is NaN.
    nan = bits > INF_BITS
    exponent = mxfp4_exponent(tl.where(nan, 0, bits).to(tl.float32, bitcast=True), FACE.rule)
    y = v * spread(e8m0_reciprocal(exponent), P, Q, SIDE, 32)
    y = tl.where(spread(nan.to(tl.int32), P, Q, SIDE, 32) > 0, 0.0, y)
    unit = spread(tl.where(nan, float("nan"), e8m0_value(exponent)), P, Q, SIDE, 32)
    if FACE.store and FACE.values:
        dequantized = round_to(e2m1_rounded(y, uniform, FACE.stochastic) * unit, BF16, HW)
        store_tile(out.qdata, dequantized, place, 1, TILE, P, Q)
    elif FACE.store:
        store_scales(out, tl.where(nan, 0xFF, exponent).to(tl.uint8), place, P, Q, SIDE, 32)
        store_fp4(out.qdata, y, uniform, place, FACE, TILE, HW, P, Q)
    if REQUANTIZED:
        v = e2m1_rounded(y, uniform, FACE.stochastic) * unit
    return v


@triton.jit
def _load_tensor_scale(out, place, FACE: tl.constexpr, P: tl.constexpr):
    """Store and return the fp32 scales of a two-level format, one or ``[P, 1]``, or the factors of whole sums."""
    if FACE.kind == NVFP4_ROW:
        i = place.other + tl.arange(0, P)
        tensor_scale = tl.load(out.measured + i, mask=i < place.OTHER, other=0.0).to(tl.float32)
        # Nothing, or an Inf, has an encode scale of 1.
        tensor_scale = tl.where(
            (tensor_scale == 0) | (tensor_scale == float("inf")), FACE.tensor_scale_max, tensor_scale
        )
        if FACE.store and place.along == 0:
            if FACE.values:
                # Values hold their block scales: this factor is left for the sum of a row.
                tl.store(out.scales + i, tensor_scale * (1.0 / FACE.tensor_scale_max), mask=i < place.OTHER)
            else:
                tl.store(out.tensor_scale + i, tensor_scale, mask=i < place.OTHER)
        return tensor_scale[:, None]
    else:
        tensor_scale = _amax_of_tensor(out, FACE)
        tensor_scale = tl.where(
            (tensor_scale == 0) | (tensor_scale == float("inf")), FACE.tensor_scale_max, tensor_scale
        )
        if FACE.store and (place.along == 0) & (place.other == 0):
            if FACE.values:
                tl.store(out.scales, tensor_scale * (1.0 / FACE.tensor_scale_max))
            else:
                tl.store(out.tensor_scale, tensor_scale)
        return tensor_scale


@triton.jit
def _cast_nvfp4(v, amax, out, uniform, place, FACE: tl.constexpr, TILE: tl.constexpr, REQUANTIZED: tl.constexpr,
                FINITE: tl.constexpr, HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
                COLUMNWISE: tl.constexpr):  # fmt: skip
    """Cast a tile to NVFP4 as ``_cast_fp8`` does, without a thought of NaN if it is ``FINITE``."""
    SIDE: tl.constexpr = FACE.side
    tensor_scale = _load_tensor_scale(out, place, FACE, P)
    encode = tl.minimum(
        tl.div_rn(FACE.tensor_scale_max, tensor_scale), FP32_MAX
    )  # what block amaxes are multiplied with
    decode = tl.div_rn(1.0, encode)
    if not FINITE:
        nan = block_max((v != v).to(tl.int32), P, Q, SIDE, 16)
        v = tl.where(v != v, 0.0, v)
    if FACE.rule == OWN_RULE:
        # In the order of the definition, in which every product is rounded: (amax * encode) / 6 now and then gives
        # another code.
        scale_codes = fp8_codes(tl.minimum(amax * (encode * (1.0 / 6.0)), 448.0), False, HW)
    else:
        scale_codes = chosen_scale_codes(v, amax, tensor_scale, encode, decode, FACE, P, Q, COLUMNWISE, HW)
    scale = fp8_values(scale_codes.to(tl.uint8), False, HW)
    # A block of zeros has a scale of 0: Inf times 0 would be NaN.
    factor = tl.minimum(reciprocal(scale * decode, HW), FP32_MAX)
    if not FINITE:
        # 0x7F is NaN in E4M3.
        scale_codes = tl.where(nan > 0, 0x7F, scale_codes)
        scale = tl.where(nan > 0, float("nan"), scale)
    y = v * spread(factor, P, Q, SIDE, 16)
    if FACE.store and FACE.values:
        dequantized = e2m1_rounded(y, uniform, FACE.stochastic) * spread(scale, P, Q, SIDE, 16)
        store_tile(out.qdata, dequantized, place, 1, TILE, P, Q)
    elif FACE.store:
        store_scales(out, scale_codes.to(tl.uint8), place, P, Q, SIDE, 16)
        store_fp4(out.qdata, y, uniform, place, FACE, TILE, HW, P, Q)
    if REQUANTIZED:
        combined, back = two_level_scale(scale, tensor_scale, 1.0 / FACE.tensor_scale_max)
        v = (e2m1_rounded(y, uniform, FACE.stochastic) * spread(combined, P, Q, SIDE, 16)) * back
    return v


@triton.jit
def _cast_face(v, out, state, slot, also, stream, uniform, first_row, place, FACE: tl.constexpr, TILE: tl.constexpr,
               REQUANTIZED: tl.constexpr, FINITE: tl.constexpr, HW: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
               COLUMNWISE: tl.constexpr):  # fmt: skip
    """Cast a tile ``[P, Q]`` of a face; return whether ``FINITE`` was wrong (cast again), and the values if
    ``REQUANTIZED``."""
    # False, but as a tensor, which branches may assign.
    nonfinite = place.other < 0
    if FACE.kind >= AMAX:
        amax = amax_of_rows(v, state.rounding, stream, FACE.rotated, HW, P, Q)
        raise_face(out.measured, amax, place.other, place.OTHER, FACE.kind == AMAX_ROW, P)
    elif FACE.kind < MXFP4:
        v = _cast_fp8(v, out, state, slot, also, place, FACE, TILE, REQUANTIZED, HW, P, Q)
    elif FACE.kind == MXFP4:
        v = _cast_mxfp4(v, out, uniform, place, FACE, TILE, REQUANTIZED, HW, P, Q)
    elif FACE.kind == EDEN:
        cast_eden(v, out, state.rounding, stream, first_row, place, FACE, TILE, HW, P, Q, COLUMNWISE)
    else:
        if FACE.rotated:
            v = rotate(v, P, Q, FINITE, HW)
        if FINITE:
            bits = largest(tl.reshape(v, [P, Q // 16, 16]), 2, HW)
            if FACE.side > 1:
                bits = tl.trans(max_of_groups(tl.trans(bits), Q // 16, P, FACE.side))
            nonfinite = tl.max(tl.max(bits, 1), 0) >= INF_BITS
            amax = bits.to(tl.float32, bitcast=True)
        else:
            amax = blocks(v, P, Q, FACE.side, 16)
        v = _cast_nvfp4(v, amax, out, uniform, place, FACE, TILE, REQUANTIZED, FINITE, HW, P, Q, COLUMNWISE)
    if REQUANTIZED:
        if FACE.rotated:
            v = rotate_back(v, P, Q)
        v = round_to(v, REQUANTIZED, HW)
    return nonfinite, v


@triton.jit
def cast_tile(tile, matrix, row, column, state, row_place, column_place, first_row, row_slot, row_stream, column_slot,
               column_stream, ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
               REQUANTIZED: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Cast the tile that lies at both places, and was loaded; see ``cast_kernel``."""
    BM: tl.constexpr = TILE.BM
    BK: tl.constexpr = TILE.BK
    top = row_place.other
    left = row_place.along
    rows = first_row + top.to(tl.int64) + rows_of_tile(BM, TILE.R)
    # True, but as a tensor, as above.
    nonfinite = left >= 0
    # First without a thought of NaN and Inf, where that saves something, then with care if there were any
    COLUMN_KIND: tl.constexpr = COLUMN_FACE.kind
    TWICE: tl.constexpr = ROW_FACE.kind >= NVFP4 or COLUMN_KIND == NVFP4 or COLUMN_KIND == NVFP4_ROW
    for attempt in tl.static_range(2 if TWICE else 1):
        if nonfinite:
            tl.debug_barrier()
            if attempt == 1:
                tile = load_tile(matrix, top, left, TILE)
            columns = as_columns(tile, BM, BK)
            nonfinite = left < 0
            if ROW_FACE.kind != NONE:
                # An argument of the right shape, which is read only where rounding is stochastic.
                uniform = tile
                if ROW_FACE.stochastic:
                    uniform = uniform16(rows, left, matrix.K, state.rounding, row_stream, TILE)
                again, dequantized = _cast_face(
                    as_rows(tile, BM, BK), row, state, row_slot, row_slot if REQUANTIZED else column_slot, row_stream,
                    as_rows(uniform, BM, BK), first_row, row_place, ROW_FACE,
                    TILE, REQUANTIZED, attempt == 0, HW, BM, BK, False,
                )  # fmt: skip
                nonfinite |= again
                if REQUANTIZED:
                    if ROW_FACE.kind >= NVFP4 and (COLUMN_KIND == GIVEN or COLUMN_KIND >= AMAX):
                        dequantized = tl.where(nonfinite, 0.0, dequantized)  # what is raised stays
                    columns = tl.trans(dequantized)
            if COLUMN_KIND != NONE and (COLUMN_KIND != EDEN or attempt == 0 or REQUANTIZED):  # EDEN always takes care
                uniform = columns
                if COLUMN_FACE.stochastic:
                    drawn = uniform16(rows, left, matrix.K, state.rounding, column_stream, TILE)
                    uniform = as_columns(drawn, BM, BK)
                again, _ = _cast_face(
                    columns, column, state, column_slot, column_slot, column_stream, uniform, first_row, column_place,
                    COLUMN_FACE, TILE, 0, attempt == 0, HW, BK, BM, True,
                )  # fmt: skip
                nonfinite |= again


@triton.jit
def _cast_tile_of_matrix(pid, matrix, row, column, state, first_row, row_slot, row_stream, column_slot, column_stream,
                         ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
                         REQUANTIZED: tl.constexpr, HW: tl.constexpr, FOLLOWING: tl.constexpr):  # fmt: skip
    """Cast tile ``pid`` of a matrix; see ``cast_kernel``."""
    tiles = tl.cdiv(matrix.K, TILE.BK)
    top = pid // tiles * TILE.BM
    left = pid % tiles * TILE.BK
    along = stored(matrix.M, COLUMN_FACE.step)
    tile = load_tile(matrix, top, left, TILE)
    if FOLLOWING:
        # The tile does not depend on the amaxes, so that it is read while the kernel that measures ends (0.61 of copy
        # speed instead of 0.60).
        gdc_wait()
    row = _with_amax(row, matrix.M, ROW_FACE)
    column = _with_amax(column, matrix.M, COLUMN_FACE)
    cast_tile(
        tile, matrix, row, column, state, Place(top, left, matrix.M, matrix.K, matrix.K),
        Place(left, top, matrix.K, along, along), first_row, row_slot, row_stream, column_slot, column_stream,
        ROW_FACE, COLUMN_FACE, TILE, REQUANTIZED, HW,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_row", "row_slot", "row_stream", "column_slot", "column_stream"])
def cast_kernel(matrix, row, column, state, first_row, row_slot, row_stream, column_slot, column_stream,
                ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr, REQUANTIZED: tl.constexpr,
                HW: tl.constexpr, REVERSED: tl.constexpr, FOLLOWING: tl.constexpr):  # fmt: skip
    """Cast one tile into the faces that are asked for.

    Args:
        matrix: What is cast.
        row: The rowwise face; ``row_slot`` is its delayed scale, ``row_stream`` its random numbers, ``ROW_FACE`` how
            it is cast. The same for the columnwise face, transposed.
        state: What the layer remembers.
        first_row: Counts this matrix's rows in the random numbers.
        REQUANTIZED: Cast the columnwise face from the rowwise one, dequantized to this dtype (see ``round_to``).
        REVERSED: Begin at the end, where a pass before this one ended and the cache is warm.
        FOLLOWING: Started while the kernel that measures is ending: wait for it once the tile is read.
    """
    pid = tl.program_id(0)
    if REVERSED:
        # What was read last is still in the L2. Other orders of tiles were not faster.
        pid = tl.num_programs(0) - 1 - pid
    _cast_tile_of_matrix(
        pid, matrix, row, column, state, first_row, row_slot, row_stream, column_slot, column_stream,
        ROW_FACE, COLUMN_FACE, TILE, REQUANTIZED, HW, FOLLOWING,
    )  # fmt: skip


@triton.jit
def recast_kernel(matrix, row, column, guess, ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
                  REQUANTIZED: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Recast several tiles per program if the measured amax gives another scale than the one at ``guess``; else do
    nothing."""
    FACE: tl.constexpr = ROW_FACE if ROW_FACE.kind != NONE else COLUMN_FACE
    now, _ = encode_scale(tl.load(row.measured), FACE.e5m2, FACE.pow2, FACE.overflow)
    before, _ = encode_scale(tl.load(guess), FACE.e5m2, FACE.pow2, FACE.overflow)
    # Scales are compared, not amaxes: a power of two follows from many amaxes.
    if now != before:
        tiles = tl.cdiv(matrix.M, TILE.BM) * tl.cdiv(matrix.K, TILE.BK)
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _cast_tile_of_matrix(
                tile, matrix, row, column, State(guess, guess, guess), 0, -1, -1, -1, -1,
                ROW_FACE, COLUMN_FACE, TILE, REQUANTIZED, HW, False,
            )  # fmt: skip

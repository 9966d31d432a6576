"""The kernels of ``ops.quantize_groups``: measure and cast several matrices in one launch, each as if it were alone.

The matrices are a stack's, or the groups of rows of one matrix, sorted, which end where the device knows. Groups begin
at rows of their own in columnwise faces, padded with zeros to whole steps. A row of tiles never crosses groups; which
one it is of, ``plan_kernel`` works out. Behind the last group come the rows of none: they are cast as zeros.

Legend: as in ``tiles`` and ``quantize``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybridtensor.kernels.groups import Matrix, Output, Part, Place
from hybridtensor.kernels.measure import measure_tile
from hybridtensor.kernels.quantize import AMAX_ROW, BLOCK, MX, MXFP4, NVFP4_ROW, ROW, cast_tile, stored
from hybridtensor.kernels.tiles import load_tile


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _ends_of(ends, g, rows, E):
    """Return where group ``g`` ends (with ``g - 1``: begins), clamped to the rows and never decreasing."""
    given = tl.load(ends + g, mask=(g >= 0) & (g < E), other=0)
    # So that wrong offsets never lead beyond the matrix.
    return tl.associative_scan(tl.minimum(tl.maximum(given, 0), rows), 0, _larger)


@triton.jit
def _take(values, chosen):
    """Return one chosen value per row."""
    return tl.sum(tl.where(chosen, values[None, :], 0), 1)


@triton.jit(do_not_specialize=["rows", "pitch", "tiles"])
def plan_kernel(ends, plan, rows, pitch, E, tiles, STEP: tl.constexpr, BM: tl.constexpr,
                GROUPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Write which rows each row of tiles has: group, tiles of the group before it, first row of the group, rows that
    are read, rows that are stored, first padded row, padded rows.

    Args:
        ends: Where groups end, int32 ``[E]``.
        plan: int32 ``[tiles, 8]``.
        rows: Of the matrix.
        pitch: Padded rows of all groups.
        E: Groups; the rows behind the last one count as one more, of which nothing is read.
        tiles: How many rows of tiles there are room for.
    """
    g = tl.arange(0, GROUPS)
    start = _ends_of(ends, g - 1, rows, E)
    size = tl.where(g < E, _ends_of(ends, g, rows, E) - start, 0)
    # A group without rows has one step, too, of zeros.
    steps = tl.maximum(tl.cdiv(size, STEP), 1) * STEP
    end = tl.cumsum(tl.where(g < E, steps, 0), 0)
    padded = tl.where(g < E, end - steps, end)
    steps = tl.where(g < E, steps, pitch - end)
    stored = tl.where(g < E, size, rows - start)
    last = tl.cumsum(tl.where(g < E, tl.cdiv(steps, BM), 0), 0)
    first = last - tl.where(g < E, tl.cdiv(steps, BM), 0)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # How many groups end before this row of tiles, which is the number of its own.
    group = tl.sum(((tile[:, None] >= last[None, :]) & (g < E)[None, :]).to(tl.int32), 1)
    chosen = group[:, None] == g[None, :]
    entry = plan + tile * 8
    # The rows of no group take the scales of the last group, so that no address lies beyond those of E groups.
    tl.store(entry, tl.minimum(group, E - 1), mask=tile < tiles)
    tl.store(entry + 1, tile - _take(first, chosen), mask=tile < tiles)
    tl.store(entry + 2, _take(start, chosen), mask=tile < tiles)
    tl.store(entry + 3, _take(size, chosen), mask=tile < tiles)
    tl.store(entry + 4, _take(stored, chosen), mask=tile < tiles)
    tl.store(entry + 5, _take(padded, chosen), mask=tile < tiles)
    tl.store(entry + 6, _take(steps, chosen), mask=tile < tiles)


@triton.jit
def _part_of(pid, matrix, parts, STEP: tl.constexpr, TILE: tl.constexpr, TOKENS: tl.constexpr):
    """Return tile ``pid`` of all matrices."""
    tiles = tl.cdiv(matrix.K, TILE.BK)
    row = pid // tiles
    left = pid % tiles * TILE.BK
    if TOKENS:
        entry = parts.plan + row * 8
        group = tl.load(entry)
        top = tl.load(entry + 1) * TILE.BM
        start = tl.load(entry + 2).to(tl.int64)
        rows = tl.load(entry + 3)
        to_store = tl.load(entry + 4)
        # True as groups are padded to whole steps. Triton then loads and stores vectors.
        padded = tl.multiple_of(tl.load(entry + 5), 16)
        size = tl.multiple_of(tl.load(entry + 6), 16)
        x = matrix.x + start * matrix.stride_m
        return Part(
            Matrix(x, matrix.stride_m, matrix.stride_k, rows, matrix.K),
            group, start, padded, top, left, to_store, size,
        )  # fmt: skip
    else:
        row_tiles = tl.cdiv(matrix.M, TILE.BM)
        group = row // row_tiles
        top = row % row_tiles * TILE.BM
        start = group.to(tl.int64) * matrix.M
        x = matrix.x + group.to(tl.int64) * parts.stride
        return Part(
            Matrix(x, matrix.stride_m, matrix.stride_k, matrix.M, matrix.K),
            group, start, group * 0, top, left, matrix.M, stored(matrix.M, STEP),
        )  # fmt: skip


@triton.jit
def _face_of(out, sizes, part, FACE: tl.constexpr, COLUMNWISE: tl.constexpr, TOKENS: tl.constexpr):
    """Return the offset of one matrix's part of a face."""
    group = part.group.to(tl.int64)
    qdata = out.qdata + group * sizes.qdata
    scales = out.scales + group * sizes.scales
    tensor_scale = out.tensor_scale + group * sizes.tensor_scale
    measured = out.measured + group * sizes.measured
    KIND: tl.constexpr = FACE.kind
    IN_BLOCKS: tl.constexpr = KIND >= BLOCK and KIND <= NVFP4_ROW
    PER: tl.constexpr = 2 if KIND >= MXFP4 and KIND <= NVFP4_ROW else 1
    LENGTH: tl.constexpr = 128 if KIND == BLOCK else (32 if KIND == MX or KIND == MXFP4 else 16)
    if TOKENS and COLUMNWISE:
        qdata += part.padded // PER
        if IN_BLOCKS:
            scales += (part.padded // LENGTH).to(tl.int64) * out.stride_along
    elif TOKENS:
        qdata += part.start * (part.matrix.K // PER)
        if IN_BLOCKS and FACE.side > 1:
            scales += (part.padded // FACE.side).to(tl.int64) * out.stride_other
        elif IN_BLOCKS:
            scales += part.start * out.stride_other
        if KIND == ROW:
            scales += part.start
        if KIND == NVFP4_ROW:
            tensor_scale += part.start
        if KIND == ROW or KIND == NVFP4_ROW or KIND == AMAX_ROW:
            measured += part.start
    return Output(qdata, scales, out.stride_other, out.stride_along, tensor_scale, measured)


@triton.jit
def _slot_of(slot, group):
    """Return the delayed scale of a group; -1 is none."""
    return tl.where(slot < 0, slot, slot + group)


@triton.jit(do_not_specialize=["first_row", "row_slot", "row_stream", "column_slot", "column_stream"])
def grouped_cast_kernel(matrix, row, column, state, first_row, row_slot, row_stream, column_slot, column_stream,
                        parts, row_sizes, column_sizes,
                        ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
                        REQUANTIZED: tl.constexpr, HW: tl.constexpr, REVERSED: tl.constexpr, FOLLOWING: tl.constexpr,
                        TOKENS: tl.constexpr):  # fmt: skip
    """Cast one tile into the faces that are asked for; see ``quantize.cast_kernel``.

    Args:
        matrix: All rows, or the first matrix of a stack.
        row: The rowwise face of all, ``row_sizes`` from matrix to matrix. The same for the columnwise one.
        row_slot: The first one's delayed scale; the others' follow. The same for the columnwise face.
        parts: How the matrices lie.
        TOKENS: Whether they are groups of rows.
    """
    pid = tl.program_id(0)
    if REVERSED:
        pid = tl.num_programs(0) - 1 - pid
    part = _part_of(pid, matrix, parts, COLUMN_FACE.step, TILE, TOKENS)
    # More tiles are launched than groups may need, as how many they need is known on the device only.
    if part.top < part.size:
        of_row = _face_of(row, row_sizes, part, ROW_FACE, False, TOKENS)
        of_column = _face_of(column, column_sizes, part, COLUMN_FACE, True, TOKENS)
        pitch = part.size
        if TOKENS:
            pitch = parts.pitch
        tile = load_tile(part.matrix, part.top, part.left, TILE)
        if FOLLOWING:
            gdc_wait()
        cast_tile(
            tile, part.matrix, of_row, of_column, state,
            Place(part.top, part.left, part.stored, matrix.K, matrix.K),
            Place(part.left, part.top, matrix.K, part.size, pitch),
            first_row + part.start, _slot_of(row_slot, part.group), row_stream,
            _slot_of(column_slot, part.group), column_stream,
            ROW_FACE, COLUMN_FACE, TILE, REQUANTIZED, HW,
        )  # fmt: skip


@triton.jit(do_not_specialize=["row_stream", "column_stream"])
def grouped_measure_kernel(matrix, row_target, column_target, parts, row_size, column_size,
                           rounding, row_stream, column_stream,
                           ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr,
                           FOLLOWED: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Raise the amaxes that the casts of either face need, which begin at zero; see ``measure.measure_kernel``.

    Args:
        parts: How the matrices lie.
        row_size: Amaxes of the rowwise face from matrix to matrix, 0 where they are those of rows of all.
        column_size: Those of the columnwise face.
        rounding: Key and step, from which with a stream of the face the signs follow that are drawn.
        TOKENS: Whether the matrices are groups of rows.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    part = _part_of(tl.program_id(0), matrix, parts, 1, TILE, TOKENS)
    if part.top < part.matrix.M:
        of_row = row_target + part.group * row_size
        if TOKENS and ROW.per_row:
            of_row += part.start
        of_column = column_target + part.group * column_size
        tile = load_tile(part.matrix, part.top, part.left, TILE)
        measure_tile(
            tile, part.matrix, part.top, part.left, of_row, of_column, rounding, row_stream, column_stream,
            ROW, COLUMN, TILE, HW,
        )  # fmt: skip

"""The kernel of ``ops.transpose``: transpose the elements of a matrix that came in parts, and copy them, in one read.

Legend: a part is ``[ROWS, WIDTH]`` bytes; parts below each other are the matrix. Elements have ``BITS``, and ``PER`` of
them are a word of 32 bits, the first one lowest. A tile is ``[BM, BK]`` bytes of a part, held as words
``[R, BM / R, BK / 4]``: row ``r + R * b`` at ``[r, b]``, so that each thread has ``R`` neighbouring rows, which it
transposes in its registers: only whole words go through shared memory.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.tiles import rows_of_tile


@triton.jit
def _offsets(i, j, pitch, UNIT: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr):
    """Return where word ``j`` of row ``i`` is in a matrix of ``pitch`` bytes a row, in UNIT bytes."""
    step = tl.multiple_of(pitch // UNIT, V // UNIT)
    rows = i.to(tl.int64) if WIDE else i
    offsets = rows * step + j * (4 // UNIT)
    if len(offsets.shape) == 3:
        # The 2 is not true, see ``tiles.load_tile``: it leaves the first axis to each thread
        offsets = tl.max_contiguous(offsets, [1, 2, 4])
    return offsets


@triton.jit
def _start(row, byte, pitch, UNIT: tl.constexpr, V: tl.constexpr):
    step = tl.multiple_of(pitch // UNIT, V // UNIT)
    return tl.multiple_of(row.to(tl.int64) * step + byte // UNIT, V // UNIT)


@triton.jit
def _inside(i, j, height, width, V: tl.constexpr):
    """Return a mask of the words within ``[height, width]`` bytes."""
    return (i < height) & (j < tl.multiple_of(width // 4, V // 4))


@triton.jit
def _store(target, words, i, j, row, byte, pitch, height, width, V: tl.constexpr, EVEN: tl.constexpr,
           WIDE: tl.constexpr):  # fmt: skip
    """Store words of a tile that begins at this row and byte, of which ``[height, width]`` bytes are there."""
    if V >= 4:
        to = target.to(tl.pointer_type(tl.uint32)) + _start(row, byte, pitch, 4, V) + _offsets(i, j, pitch, 4, V, WIDE)
        if EVEN:
            tl.store(to, words)
        else:
            tl.store(to, words, mask=_inside(i, j, height, width, V))
    else:
        # Words do not begin at multiples of 4 bytes: they are stored byte by byte.
        to = target + _start(row, byte, pitch, 1, 1) + _offsets(i, j, pitch, 1, 1, WIDE)
        for k in tl.static_range(4):
            tl.store(to + k, ((words >> (8 * k)) & 0xFF).to(tl.uint8), mask=(i < height) & (4 * j + k < width))


@triton.jit
def _exchange(words, P: tl.constexpr, PER: tl.constexpr, SHIFT: tl.constexpr):
    """Make of every two words of the last axis one of their SHIFT bits at even places, and one of those at odd places.

    The lowest bit of a word's index becomes the highest one: that of the places.
    """
    # SHIFT bits set, SHIFT bits clear, from the lowest on: 0x0F0F0F0F, 0x00FF00FF, 0x0000FFFF.
    EVEN_PLACES: tl.constexpr = 0xFFFFFFFF // ((1 << SHIFT) + 1)
    first, second = tl.split(tl.reshape(words, [P, PER // 2, 2]))
    even = (first & EVEN_PLACES) | ((second & EVEN_PLACES) << SHIFT)
    odd = ((first >> SHIFT) & EVEN_PLACES) | (second & (EVEN_PLACES << SHIFT))
    return tl.reshape(tl.permute(tl.join(even, odd), [0, 2, 1]), [P, PER])


@triton.jit
def _transpose_squares(words, P: tl.constexpr, BITS: tl.constexpr):
    """Transpose squares of elements in registers: each row of ``[P, 32 / BITS]`` words."""
    for turn in tl.static_range(3 if BITS == 4 else 2):
        words = _exchange(words, P, 32 // BITS, BITS << turn)
    return words


@triton.jit(do_not_specialize=["ROWS", "pitch"])
def transpose_kernel(
    parts, stride_part, stride_row, row, column, pitch, ROWS, WIDTH,
    BITS: tl.constexpr, COPY: tl.constexpr, V: tl.constexpr, COLUMN_V: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Transpose one tile of one part.

    Args:
        parts: Bytes, with strides between parts and between rows.
        row: The matrix, contiguous, written with COPY.
        column: Its transpose, ``pitch`` bytes a row.
        V: 4, 8 or 16 bytes, of which the addresses of ``parts`` and ``row``, strides and ``WIDTH`` are multiples.
        COLUMN_V: The same of where parts begin in rows of ``column``; or 1, to write single bytes.
    """
    tl.static_assert(R * BITS % 32 == 0, "a thread has whole words of a column")
    PER: tl.constexpr = 32 // BITS
    PER_BYTE: tl.constexpr = 8 // BITS
    BW: tl.constexpr = BK // 4
    pid = tl.program_id(0)
    across = tl.cdiv(WIDTH, BK)
    down = tl.cdiv(ROWS, BM)
    byte = pid % across * BK
    first = pid // across % down * BM
    part = pid // across // down
    height, width = ROWS - first, WIDTH - byte
    i = rows_of_tile(BM, R)[:, :, None]
    j = tl.arange(0, BW)[None, None, :]
    start = _start(part, 0, stride_part, 4, V) + _start(first, byte, stride_row, 4, V)
    at = parts.to(tl.pointer_type(tl.uint32)) + start + _offsets(i, j, stride_row, 4, V, WIDE)
    if EVEN:
        words = tl.load(at)
    else:
        words = tl.load(at, mask=_inside(i, j, height, width, V), other=0)

    first += part.to(tl.int64) * ROWS
    # One read for the matrix and its transpose. Under FSDP2 torch's strided copies took 6.2 ms of a step of 79.7, this
    # 0.6.
    if COPY:
        _store(row, words, i, j, first, byte, WIDTH, height, width, V, EVEN, WIDE)

    P: tl.constexpr = BM * BW // PER
    # The R words below each other that a thread has come last, PER of them are a square; nothing moves between
    # threads until the permutation behind.
    words = _transpose_squares(tl.reshape(tl.permute(words, [1, 2, 0]), [P, PER]), P, BITS)
    words = tl.permute(tl.reshape(words, [BM // R, BW, R // PER, PER]), [1, 3, 0, 2])  # [BW, PER, BM / R, R / PER]
    words = tl.reshape(words, [BW * PER, BM // PER])
    i = tl.arange(0, BW * PER)[:, None]
    j = tl.arange(0, BM // PER)[None, :]
    _store(
        column, words, i, j, byte * PER_BYTE, first // PER_BYTE, pitch, width * PER_BYTE, height // PER_BYTE,
        COLUMN_V, EVEN, WIDE,
    )  # fmt: skip

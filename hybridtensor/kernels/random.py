"""Random numbers inside kernels; equal, bit for bit, to ``ops.references.philox``."""

import triton
import triton.language as tl


@triton.jit
def _words(call, key, step, stream):
    """Return the four words of a call (int64)."""
    low = (call & 0xFFFFFFFF).to(tl.uint32)
    high = (call >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    return tl.philox(key, low, high, zero + (step & 0xFFFFFFFF).to(tl.uint32), zero + tl.cast(stream, tl.uint32))


@triton.jit
def _halves(word):
    return (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)


@triton.jit
def sign_word(which, rounding, stream):
    """Return words of the draw of 128 signs, uint32: those that are asked for, of four.

    Bit ``i % 32`` of word ``i // 32`` is the sign of value ``i``. Streams of one seed share it; the last one of these
    rounds nothing.
    """
    call = tl.zeros_like(which).to(tl.int64)
    # A seed has eight streams, of which tensors use 0 to 5, a role and a direction each.
    w0, w1, w2, w3 = _words(call, tl.load(rounding), tl.load(rounding + 1), stream | 7)
    return tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))


@triton.jit
def negative_signs(rounding, stream):
    """Return 1 for each of 128 signs that is minus, else 0."""
    i = tl.arange(0, 128)
    return ((sign_word(i // 32, rounding, stream) >> (i % 32).to(tl.uint32)) & 1).to(tl.int32)


@triton.jit
def uniform16_at(index, key, step, stream):
    """Return a number from (0, 1) for every element with an index, int64, in the whole tensor."""
    w0, w1, w2, w3 = _words(index // 8, key, step, stream)
    which = (index % 8).to(tl.int32)
    pair = which // 2
    word = tl.where(pair == 0, w0, tl.where(pair == 1, w1, tl.where(pair == 2, w2, w3)))
    bits = tl.where(which % 2 == 0, word & 0xFFFF, word >> 16).to(tl.int32)
    return _uniform(bits)


@triton.jit
def _uniform(bits):
    # In the middle of each of 2^16 intervals: never 0 nor 1.
    return (bits.to(tl.float32) + 0.5) * (2.0**-16)


@triton.jit
def uniform16(rows, column, columns, rounding, stream, TILE: tl.constexpr):
    """Return a number from (0, 1) for every element of a tile, fp32 ``[R, BM / R, BK]``.

    Args:
        rows: Indices of the tile's rows in the whole tensor, int64 ``[R, BM / R]``.
        column: First column of the tile.
        columns: Columns of the tensor.
        rounding: Pointer to key and step, int64.
        stream: Which tensor of the layer this is for.
        TILE: The tile; see ``groups``.
    """
    BM: tl.constexpr = TILE.BM
    BK: tl.constexpr = TILE.BK
    R: tl.constexpr = TILE.R
    key = tl.load(rounding)
    step = tl.load(rounding + 1)
    if TILE.aligned:
        # A call gives 128 bits: 16 for each of eight neighbours. Here one call serves all eight; below each element
        # repeats it.
        eighths = column // 8 + tl.arange(0, BK // 8)
        # The call of ``uniform16_at``, index // 8, as K is a multiple of 8.
        call = rows[:, :, None] * (columns // 8) + eighths[None, None, :]
        w0, w1, w2, w3 = _words(call, key, step, stream)
        h0, h1 = _halves(w0)
        h2, h3 = _halves(w1)
        h4, h5 = _halves(w2)
        h6, h7 = _halves(w3)
        # Each join makes a new last axis, which then counts fastest: halves that are 4 apart are joined first, then
        # 2, then 1.
        even = tl.join(tl.join(h0, h4), tl.join(h2, h6))
        odd = tl.join(tl.join(h1, h5), tl.join(h3, h7))
        return _uniform(tl.reshape(tl.join(even, odd), [R, BM // R, BK]))
    else:
        index = rows[:, :, None] * columns + (column + tl.arange(0, BK))[None, None, :]
        return uniform16_at(index, key, step, stream)

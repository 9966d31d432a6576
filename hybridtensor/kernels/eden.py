"""MS-EDEN: elements rounded to nearest under drawn signs, block scales at random; see ``ops.references.eden``.

Sums run in the order of the definition, of two numbers at a time, whatever the layout of a tile, and launches forbid
that a product and a sum are rounded once (``fuses`` in ``ops.cast.tiles``).

Legend: a tile is ``[P, Q]`` of a face, whose rows have ``Q / 128`` groups that are rotated together.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.hadamard import DRAWN, rotate_drawn
from hybridtensor.kernels.numbers import e2m1_rounded, fp8_codes, fp8_values, saturate
from hybridtensor.kernels.random import negative_signs, sign_word, uniform16_at
from hybridtensor.kernels.storing import store_fp4, store_scales
from hybridtensor.kernels.tiles import blocks, finite, spread

_VALUE_MAX = tl.constexpr(6.0 / (17 / 16 * 0.93))
_SCALE_MAX = tl.constexpr(255.99)
_SMALLEST = tl.constexpr(2.0**-126)
_SMALLEST_NORMAL = tl.constexpr(127 - 6)  # exponent field of the smallest normal E4M3 value


@triton.jit
def _tensor_scale_of(amax):
    """Return the tensor scale."""
    tensor_scale = tl.maximum(tl.div_rn(tl.div_rn(amax, _SCALE_MAX), _VALUE_MAX), _SMALLEST)
    return tl.where(amax == 0, 1.0, tensor_scale)


@triton.jit
def _store_tensor_scale(out, tensor_scale, rounding, stream):
    """Store the tensor scale, and the signs behind it in numbers of 16 bits."""
    half = tl.arange(0, DRAWN // 16)
    # fp32 holds integers up to 2^24: half a word fits into a number, a word would not.
    bits = (sign_word(half // 2, rounding, stream) >> (half % 2 * 16).to(tl.uint32)) & 0xFFFF
    tl.store(out.tensor_scale, tensor_scale)
    tl.store(out.tensor_scale + 1 + half, bits.to(tl.float32))


@triton.jit
def _sums(v, P: tl.constexpr, Q: tl.constexpr):
    """Return the sums of every 128 values, ``[P * Q / 128]``: halves are added, until one is left."""
    ROWS: tl.constexpr = P * Q // DRAWN
    sums = tl.reshape(v, [ROWS, DRAWN])
    for i in tl.static_range(7):
        sums = tl.sum(tl.reshape(sums, [ROWS, 2, 64 >> i]), 1)
    return tl.reshape(sums, [ROWS])


@triton.jit
def _uniform(first_row, rounding, stream, place, P: tl.constexpr, N: tl.constexpr, COLUMNWISE: tl.constexpr):
    """Return the numbers of the first elements of blocks, ``[P, N]``, which are counted by the rows of the tensor."""
    other = place.other.to(tl.int64) + tl.arange(0, P)[:, None]
    along = place.along.to(tl.int64) + 16 * tl.arange(0, N)[None, :]
    if COLUMNWISE:
        index = (first_row + along) * place.OTHER + other
    else:
        index = (first_row + other) * place.ALONG + along
    return uniform16_at(index, tl.load(rounding), tl.load(rounding + 1), stream)


@triton.jit
def _rounded_at_random(x, uniform):
    """Return positive values as one of their two E4M3 neighbours, at most 448; NaN stays."""
    # E4M3 has three mantissa bits: neighbours are 2^(exponent - 3) apart, of subnormal values as of the smallest
    # normal one.
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) >> 23, _SMALLEST_NORMAL)
    step = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    # Its reciprocal: the exponent fields of 2^n and 2^-n add up to 254.
    steps = ((257 - exponent) << 23).to(tl.float32, bitcast=True)  # in one
    return saturate(tl.floor(x * steps + uniform) * step, 448.0)


@triton.jit
def cast_eden(v, out, rounding, stream, first_row, place, FACE: tl.constexpr, TILE: tl.constexpr, HW: tl.constexpr,
              P: tl.constexpr, Q: tl.constexpr, COLUMNWISE: tl.constexpr):  # fmt: skip
    """Cast a tile as ``quantize._cast_fp8`` does, whatever its values are, and hold none."""
    G: tl.constexpr = Q // DRAWN
    N: tl.constexpr = Q // 16
    tensor_scale = _tensor_scale_of(tl.load(out.measured))
    # Before the rotation, which would spread a NaN or an Inf over 128 values, and into the amax of all.
    wrong = tl.max(tl.reshape((tl.abs(v) < float("inf")).to(tl.int32) ^ 1, [P, G, DRAWN]), 2)
    v = rotate_drawn(finite(v), negative_signs(rounding, stream), P, Q)
    base = tl.div_rn(tl.div_rn(blocks(v, P, Q, 1, 16), _VALUE_MAX), tensor_scale)
    base = fp8_values(fp8_codes(tl.minimum(base, 448.0), False, HW).to(tl.uint8), False, HW)
    base = tl.where(base == 0, 1.0, base)
    y = tl.div_rn(v, spread(base * tensor_scale, P, Q, 1, 16))
    elements = e2m1_rounded(y, y, False)
    over = _sums(y * y, P, Q)
    under = _sums(y * elements, P, Q)
    correction = tl.reshape(tl.where(under == 0, 1.0, tl.div_rn(over, under)), [P, G])
    uniform = _uniform(first_row, rounding, stream, place, P, N, COLUMNWISE)
    scale = _rounded_at_random(base * spread(correction, P, N, 1, DRAWN // 16), uniform)
    scale = tl.where(spread(wrong, P, N, 1, DRAWN // 16) > 0, float("nan"), scale)
    if (place.along == 0) & (place.other == 0):
        _store_tensor_scale(out, tensor_scale, rounding, stream)
    store_scales(out, fp8_codes(scale, False, HW).to(tl.uint8), place, P, Q, 1, 16)
    store_fp4(out.qdata, y, y, place, FACE, TILE, HW, P, Q)

"""Number formats inside kernels: scales from amaxes, and rounding to FP8, E2M1 and E8M0.

Equal, bit for bit, to ``ops.references``. ``HW`` says whether the device converts to FP8 itself (compute capability
8.9); without it the same rounding is done on bits, which also runs on older devices and in the interpreter.
"""

import triton
import triton.language as tl

from hybridtensor.kernels import groups

_HALF_SUBNORMAL = tl.constexpr(0x00400000)  # 2^-127
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
INF_BITS = tl.constexpr(0x7F800000)
_STEP = tl.constexpr((22 << 23) + (1 << 22) - 254)  # turns the bits of 2^binade into those of 1.5 * 2^(22 + binade)
_SIGN = tl.constexpr(-(1 << 31))
FP32_MAX = tl.constexpr(3.4028234663852886e38)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
FP16_MAX = tl.constexpr(65504.0)

OWN_RULE = tl.constexpr(groups.OWN_RULE)
EXPONENT_EVEN = tl.constexpr(groups.EXPONENT_EVEN)

# Dtypes of values that are dequantized inside a kernel.
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
FP32 = tl.constexpr(3)


def _e2m1_words() -> str:
    """Return PTX for ``e2m1_words``: element ``i`` and ``i + 4`` in the halves of a register."""
    # fp16 keeps 10 of the 23 mantissa bits of fp32. The lowest that it keeps is set if any of the 13 below was (round
    # to odd), so that rounding a second time, to E2M1, decides ties as rounding once.
    keep_tail = "".join(
        f"mov.b32 bits, ${1 + i}; and.b32 tail, bits, 0x1FFF; add.u32 tail, tail, 0x1FFF; "
        f"and.b32 tail, tail, 0x2000; or.b32 y{i}, bits, tail; "
        for i in range(8)
    )
    # The magic number is 1.5 * 2^(9 + binade), whose last bit is worth a step of E2M1, with 2 * binade in its low bits,
    # as _STEP makes it in fp32. For binade 0 it is 0x3C00 + 0x1E + 0x25E2 = 0x6200, which is 768, in fp16 with steps of
    # 0.5. 6 and 1 are 0x4600 and 0x3C00.
    halves = "".join(
        f"mov.b32 low, y{i}; mov.b32 high, y{i + 4}; cvt.rz.f16x2.f32 pair, high, low; "
        "and.b32 magnitude, pair, 0x7FFF7FFF; min.f16x2 magnitude, magnitude, six; "
        "max.f16x2 exponent, magnitude, one; and.b32 exponent, exponent, 0x7C007C00; "
        "shr.u32 twice, exponent, 9; add.u32 magic, exponent, twice; add.u32 magic, magic, 0x25E225E2; "
        "add.rn.f16x2 sum, magnitude, magic; and.b32 sum, sum, 0x00070007; "
        f"shr.u32 sign, pair, 12; and.b32 sign, sign, 0x00080008; or.b32 code{i}, sum, sign; "
        for i in range(4)
    )
    return (
        "{ .reg .b32 bits, tail, y<8>, pair, magnitude, exponent, twice, magic, sum, sign, code<4>, six, one; "
        ".reg .f32 low, high; mov.b32 six, 0x46004600; mov.b32 one, 0x3C003C00; " + keep_tail + halves
        # Codes 0 to 3 become the nibbles of the low half, 4 to 7 those of the high half: the order of eight elements.
        + "mad.lo.u32 code0, code1, 16, code0; mad.lo.u32 code2, code3, 16, code2; "
        "mad.lo.u32 $0, code2, 256, code0; }"
    )  # fmt: skip


# Hopper has no conversion to E2M1. This takes 9 instructions per element; integer arithmetic took 13, one fp32 addition
# 11.
_E2M1_WORDS = tl.constexpr(_e2m1_words())


@triton.jit
def max_of_groups(v, P: tl.constexpr, Q: tl.constexpr, LENGTH: tl.constexpr):
    """Return the maximum of every ``LENGTH`` values of the last axis of ``[P, Q]``, ``[P, Q / LENGTH]``."""
    return tl.max(tl.reshape(v, [P, Q // LENGTH, LENGTH]), 2)


@triton.jit
def pow2_exponent(amax, BIAS: tl.constexpr):
    """Return the exponent field of ``max / amax`` rounded down to a power of two; ``max`` is 1.75 * 2^(BIAS - 254)."""
    bits = amax.to(tl.int32, bitcast=True)
    # Example, E4M3 (448 = 1.75 * 2^8, BIAS 262): an amax of 1.5 gives 262 - 127 = 135, 2^8 = 256; one of 1.9 is above
    # 1.75, and gives 2^7.
    # 0x600000 is the mantissa of 1.75.
    exponent = BIAS - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(exponent, 254)
    return tl.where((bits == 0) | (bits >= INF_BITS), 127, exponent)


@triton.jit
def encode_scale(amax, E5M2: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr):
    """Return the factor that maps ``amax`` to the largest FP8 value, and its reciprocal."""
    if POW2:
        exponent = pow2_exponent(amax, 269 if E5M2 else 262)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        return factor, e8m0_reciprocal(exponent)
    else:
        # Triton's own division of fp32 is not correctly rounded.
        factor = tl.div_rn(57344.0 if E5M2 else 448.0, amax)
        factor = tl.where(factor == float("inf"), OVERFLOW, factor)
        bits = amax.to(tl.int32, bitcast=True)
        # Nothing to scale, or an Inf: values stay as they are.
        factor = tl.where((bits == 0) | (bits >= INF_BITS), 1.0, factor)
        return factor, tl.div_rn(1.0, factor)


@triton.jit
def e8m0_round_up(x):
    """Return the exponent field of the smallest power of two that is not below ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    # 2^127 is the largest scale. The smallest, 2^-127, is a subnormal fp32 number.
    below = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= _HALF_SUBNORMAL))
    return tl.minimum(exponent + below.to(tl.int32), 254)


@triton.jit
def mxfp4_exponent(amax, RULE: tl.constexpr):
    """Return the exponent field of the scale of a block of E2M1 elements, whose largest is 1.5 * 2^2."""
    if RULE == OWN_RULE:
        return e8m0_round_up(amax * (1.0 / 6.0))
    else:
        bits = amax.to(tl.int32, bitcast=True)
        if RULE == EXPONENT_EVEN:  # half of what the one mantissa bit is worth
            bits += 1 << 21
        return tl.maximum((bits >> 23) - 2, 0)


@triton.jit
def e8m0_reciprocal(exponent):
    """Return ``1 / 2^(exponent - 127)``, exactly."""
    bits = tl.where(exponent == 254, _HALF_SUBNORMAL, (254 - exponent) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(exponent):
    """Return ``2^(exponent - 127)``, exactly."""
    bits = tl.where(exponent == 0, _HALF_SUBNORMAL, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_codes(y, E5M2: tl.constexpr, HW: tl.constexpr):
    """Return the codes of ``y`` as int32: to nearest even, saturating, NaN is 0x7F."""
    if HW:
        if E5M2:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
        DROPPED: tl.constexpr = 23 - MANTISSA
        magnitude = tl.minimum(tl.abs(y), LARGEST)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Ties go to even: half a step less one, and one more where the last bit that stays is odd.
        half = (1 << (DROPPED - 1)) - 1
        # Example, E4M3: 17 = 0x41880000 is a tie of 16 and 18. With 0x7FFFF more, shifted by 20, it is 0x418; less
        # 120 << 3 that is 0x58, the even code, 16.
        normal = ((bits + half + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
        # Subnormal results in units of the smallest one, which the addition rounds to an integer.
        # What rounds up to 2^MANTISSA units has the code of the smallest normal number, as it should.
        steps = magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + _MAGIC
        subnormal = steps.to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
        code |= (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(y != y, 0x7F, code)


@triton.jit
def pack(codes, P: tl.constexpr, Q: tl.constexpr, BITS: tl.constexpr, WORD: tl.constexpr):
    """Put neighbours of the last axis, of ``BITS`` each, into numbers of ``WORD`` bits, the first one lowest."""
    if BITS == WORD:
        return codes
    else:
        low, high = tl.split(tl.reshape(codes, [P, Q // 2, 2]))
        return pack(low | (high << BITS), P, Q // 2, 2 * BITS, WORD)


@triton.jit
def round_to_bf16(x, P: tl.constexpr, Q: tl.constexpr, HW: tl.constexpr):
    """Return ``x``, ``[P, Q]``, rounded to bfloat16, as fp32."""
    if HW:  # two at once, which Triton's own conversion does not do
        even, odd = tl.split(tl.reshape(x, [P, Q // 2, 2]))
        pair = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
        even, odd = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
        return tl.reshape(tl.join(even, odd), [P, Q])
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def saturate(x, LARGEST: tl.constexpr):
    """Return ``x`` within the range that ends at ``LARGEST``, Inf too; NaN stays."""
    return tl.where(tl.abs(x) > LARGEST, tl.where(x > 0, LARGEST, -LARGEST), x)


@triton.jit
def round_to(x, DTYPE: tl.constexpr, HW: tl.constexpr):
    """Return ``x`` as a dtype holds it, saturating, as fp32."""
    if DTYPE == FP32:
        return saturate(x, FP32_MAX)
    elif HW:  # two at once, and Inf and NaN cost nothing
        BACK: tl.constexpr = (
            "shl.b32 $0, pair, 16; and.b32 $1, pair, 0xFFFF0000; }"
            if DTYPE == BF16
            else "mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }"
        )
        TYPE: tl.constexpr = "bf16x2" if DTYPE == BF16 else "f16x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.satfinite." + TYPE + ".f32 pair, $3, $2; " + BACK,
            "=r,=r,f,f" if DTYPE == BF16 else "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    elif DTYPE == BF16:
        return saturate(x, BF16_MAX).to(tl.bfloat16).to(tl.float32)
    else:
        return saturate(x, FP16_MAX).to(tl.float16).to(tl.float32)


@triton.jit
def fp8_words(y, P: tl.constexpr, Q: tl.constexpr, E5M2: tl.constexpr, HW: tl.constexpr):
    """Return the codes of ``y``, ``[P, Q]``, four in an int32."""
    if HW:
        even, odd = tl.split(tl.reshape(y, [P, Q // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        TYPE: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite." + TYPE + ".f32 low, $2, $1; "
            "cvt.rn.satfinite." + TYPE + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack(fp8_codes(y, E5M2, HW), P, Q, 8, 32)


@triton.jit
def _signed(magnitude, sign):
    """Copy the sign of a value; Triton's unary minus does not make a negative zero."""
    return (magnitude.to(tl.int32, bitcast=True) | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def fp8_values(codes, E5M2: tl.constexpr, HW: tl.constexpr):
    """Return the fp32 values of uint8 codes."""
    if HW:
        if E5M2:
            return codes.to(tl.float8e5, bitcast=True).to(tl.float32)
        else:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        wide = codes.to(tl.int32)
        magnitude = wide & 0x7F
        normal = ((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        subnormal = magnitude.to(tl.float32) * (2.0 ** (1 - BIAS - MANTISSA))
        value = tl.where(magnitude < (1 << MANTISSA), subnormal, normal)
        if E5M2:
            value = tl.where(magnitude == 0x7C, float("inf"), value)
            value = tl.where(magnitude > 0x7C, float("nan"), value)
        else:
            value = tl.where(magnitude == 0x7F, float("nan"), value)
        return _signed(value, wide >> 7)


@triton.jit
def fp8_rounded(y, E5M2: tl.constexpr, HW: tl.constexpr):
    """Return the values of ``fp8_codes(y)``."""
    if HW:  # two at once, and fp16 holds every FP8 value
        TYPE: tl.constexpr = "e5m2x2" if E5M2 else "e4m3x2"
        return tl.inline_asm_elementwise(
            "{ .reg .b16 codes, low, high; .reg .b32 pair; cvt.rn.satfinite." + TYPE + ".f32 codes, $3, $2; "
            "cvt.rn.f16x2." + TYPE + " pair, codes; mov.b32 {low, high}, pair; "
            "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,f,f", [y], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return fp8_values(fp8_codes(y, E5M2, HW).to(tl.uint8), E5M2, HW)


@triton.jit
def e2m1_codes(y, uniform, STOCHASTIC: tl.constexpr):
    """Return the codes of ``y``, which is no NaN, as int32: to nearest even, or up with the chance that keeps the mean.

    ``uniform`` has one number from (0, 1) per element.
    """
    # With ``binade`` the exponent of ``y``, or 0 where that is less, neighbouring values are 2^(binade - 1) apart, and
    # the code is 2 * binade and the number of such steps.
    magnitude = tl.minimum(tl.abs(y), 6.0)
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & INF_BITS, 127 << 23)
    if STOCHASTIC:
        # In steps: times 2^(1 - binade), whose bits follow from those of 2^binade.
        units = magnitude * (255 * (1 << 23) - exponent).to(tl.float32, bitcast=True)
        # ``exponent >> 22`` is 2 * (127 + binade). Example: 2.7 is 2.7 steps of 1. With a uniform number below 0.3 the
        # code is 2 + 2, that of 2.0, else 3 + 2, that of 3.0.
        code = tl.floor(units + uniform).to(tl.int32) + ((exponent >> 22) - 254)
    else:
        # A number whose last bit is worth a step, and whose low bits already hold 2 * binade
        # Example: 2.7 has binade 1. The number is 1.5 * 2^23 + 2, the sum rounds to 1.5 * 2^23 + 5, and 5 is the code
        # of 3. What is added in the low bits is even, so that a tie goes to the even code.
        magic = (exponent + (exponent >> 22) + _STEP).to(tl.float32, bitcast=True)
        code = (magnitude + magic).to(tl.int32, bitcast=True) & 7
    return code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_nearest(magnitude):
    """Return the E2M1 values nearest to nonnegative numbers, ties to even."""
    magnitude = tl.minimum(magnitude, 6.0)
    binade = tl.maximum(magnitude, 1.0).to(tl.int32, bitcast=True) & INF_BITS
    binade = binade.to(tl.float32, bitcast=True)
    # Adding a number whose last bit is worth half of the binade; products are exact
    # Example: 2.7 has the binade 2. 1.5 * 2^23 + 2.7 rounds to 1.5 * 2^23 + 3, and leaves 3.
    return tl.fma(binade, -_MAGIC / 2, tl.fma(binade, _MAGIC / 2, magnitude))


@triton.jit
def e2m1_rounded(y, uniform, STOCHASTIC: tl.constexpr):
    """Return the values of ``e2m1_codes(y, uniform, STOCHASTIC)``, found in the same way."""
    if STOCHASTIC:
        magnitude = tl.minimum(tl.abs(y), 6.0)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) & INF_BITS, 127 << 23)
        units = magnitude * (255 * (1 << 23) - exponent).to(tl.float32, bitcast=True)
        value = tl.floor(units + uniform) * (exponent - (1 << 23)).to(tl.float32, bitcast=True)
    else:
        value = e2m1_nearest(tl.abs(y))
    return (value.to(tl.int32, bitcast=True) | (y.to(tl.int32, bitcast=True) & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def two_level_scale(scale, tensor_scale, UNIT: tl.constexpr):
    """Return two factors of elements under a block scale and a tensor scale in units, to be applied one by one."""
    # Below, an amax times a scale of at most 448 < 2^9 stays in range; above, 2^-16 takes it back into range, and
    # nothing becomes subnormal.
    large = tensor_scale > 2.0**64  # where an amax times a block scale could overflow
    combined = (scale * (tensor_scale * tl.where(large, 2.0**-16, 1.0))) * UNIT
    return combined, tl.where(large, 2.0**16, 1.0)


@triton.jit
def e2m1_words(y, P: tl.constexpr, Q: tl.constexpr, HW: tl.constexpr):
    """Return the codes of ``y``, ``[P, Q]``, which is no NaN, eight in an int32: to nearest even."""
    if HW:
        # As ``e2m1_codes`` does it, but on pairs of fp16. They are cut off, not rounded: what is cut off only matters
        # in whether it is zero, which the last bit that stays then says.
        # Split takes the last axis apart, which is the lowest bit of an element's index: first 0, 2, 4, 6 from 1, 3,
        # 5, 7.
        even, odd = tl.split(tl.reshape(y, [P, Q // 8, 2, 2, 2]))
        y0y4, y2y6 = tl.split(even)
        y1y5, y3y7 = tl.split(odd)
        y0, y4 = tl.split(y0y4)
        y1, y5 = tl.split(y1y5)
        y2, y6 = tl.split(y2y6)
        y3, y7 = tl.split(y3y7)
        return tl.inline_asm_elementwise(
            _E2M1_WORDS, "=r,f,f,f,f,f,f,f,f", [y0, y1, y2, y3, y4, y5, y6, y7], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return pack(e2m1_codes(y, y, False), P, Q, 4, 32)


@triton.jit
def reciprocal(x, HW: tl.constexpr):
    """Return ``1 / x``, rounded to nearest."""
    if HW:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def reciprocal_estimate(x, HW: tl.constexpr):
    """Return ``1 / x`` of normal numbers, off by a last bit at most."""
    if HW:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def e2m1_values(codes):
    """Return the fp32 values of uint8 codes."""
    wide = codes.to(tl.int32)
    magnitude = wide & 7
    # One mantissa bit, and an exponent bias of 1 instead of 127.
    # Example: code 5, 0b101, has exponent 2 and mantissa 1: 1.5 * 2^(2 + 126 - 127) = 3.
    bits = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, bits)
    return _signed(value, wide >> 3)

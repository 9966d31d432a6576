"""Number formats inside kernels: scales from amaxes, and rounding to FP8, E2M1 and E8M0.

Equal, bit for bit, to ``ops.references``. ``HW`` says whether the device converts to FP8 itself (compute capability
8.9); without it the same rounding is done on bits, which also runs on older devices and in the interpreter.
"""

import triton
import triton.language as tl

_INF_BITS = tl.constexpr(0x7F800000)
_HALF_SUBNORMAL = tl.constexpr(0x00400000)  # 2^-127
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, ties to even
FP32_MAX = tl.constexpr(3.4028234663852886e38)
BF16_MAX = tl.constexpr(3.3895313892515355e38)


@triton.jit
def max_of_groups(v, P: tl.constexpr, Q: tl.constexpr, LENGTH: tl.constexpr):
    """Return the maximum of every ``LENGTH`` values of the last axis of ``[P, Q]``, ``[P, Q / LENGTH]``."""
    return tl.max(tl.reshape(v, [P, Q // LENGTH, LENGTH]), 2)


@triton.jit
def pow2_exponent(amax, BIAS: tl.constexpr):
    """Return the exponent field of ``max / amax`` rounded down to a power of two; ``max`` is 1.75 * 2^(BIAS - 254)."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = BIAS - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(exponent, 254)
    return tl.where((bits == 0) | (bits >= _INF_BITS), 127, exponent)


@triton.jit
def encode_scale(amax, E5M2: tl.constexpr, POW2: tl.constexpr, OVERFLOW: tl.constexpr):
    """Return the factor that maps ``amax`` to the largest FP8 value, and its reciprocal."""
    if POW2:
        exponent = pow2_exponent(amax, 269 if E5M2 else 262)
        factor = (exponent << 23).to(tl.float32, bitcast=True)
        return factor, e8m0_reciprocal(exponent)
    else:
        factor = tl.div_rn(57344.0 if E5M2 else 448.0, amax)
        factor = tl.where(factor == float("inf"), OVERFLOW, factor)
        bits = amax.to(tl.int32, bitcast=True)
        factor = tl.where((bits == 0) | (bits >= _INF_BITS), 1.0, factor)
        return factor, tl.div_rn(1.0, factor)


@triton.jit
def e8m0_round_up(x):
    """Return the exponent field of the smallest power of two that is not below ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    below = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= _HALF_SUBNORMAL))
    return tl.minimum(exponent + below.to(tl.int32), 254)


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
    """Return the codes of ``y`` as uint8: to nearest even, saturating, NaN is 0x7F."""
    if HW:
        if E5M2:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
        DROPPED: tl.constexpr = 23 - MANTISSA
        magnitude = tl.minimum(tl.abs(y), LARGEST)
        bits = magnitude.to(tl.int32, bitcast=True)
        half = (1 << (DROPPED - 1)) - 1
        normal = ((bits + half + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
        steps = magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + _MAGIC
        subnormal = steps.to(tl.int32, bitcast=True) & 0xFF
        code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
        code |= (y.to(tl.int32, bitcast=True) >> 24) & 0x80
        return tl.where(y != y, 0x7F, code).to(tl.uint8)


@triton.jit
def _signed(magnitude, sign):
    """Give a magnitude its sign; Triton's own minus has no negative zero."""
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
def e2m1_codes(y, uniform, STOCHASTIC: tl.constexpr):
    """Return the codes of ``y``, which is no NaN, as uint8: to nearest even, or up with the chance that keeps the mean.

    ``uniform`` has one number from (0, 1) per element.
    """
    magnitude = tl.minimum(tl.abs(y), 6.0)
    units = tl.where(magnitude < 2.0, magnitude * 2.0, tl.where(magnitude < 4.0, magnitude, magnitude * 0.5))
    if STOCHASTIC:
        steps = tl.floor(units + uniform).to(tl.int32)
    else:
        steps = (units + _MAGIC).to(tl.int32, bitcast=True) & 0xF
    code = steps + tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    return (code | ((y.to(tl.int32, bitcast=True) >> 28) & 8)).to(tl.uint8)


@triton.jit
def e2m1_values(codes):
    """Return the fp32 values of uint8 codes."""
    wide = codes.to(tl.int32)
    magnitude = wide & 7
    bits = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, bits)
    return _signed(value, wide >> 3)

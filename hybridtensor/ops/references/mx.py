"""MXFP8 and MXFP4: blocks of 32 that share a power-of-two scale of eight exponent bits.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.references.blocks import block_amax, block_has_nan, spread
from hybridtensor.ops.references.float8 import cast_saturating
from hybridtensor.ops.references.hadamard import rotate
from hybridtensor.ops.references.nvfp4 import NEAREST, Draws, e2m1_encode, pack

_EXPONENT_OF_INF = 0xFE
_NAN = 0xFF
_HALF_SUBNORMAL = 0x00400000  # mantissa of 2^-127


def e8m0_round_up(x: Tensor) -> Tensor:
    """Return the E8M0 byte of the smallest power of two that is not below ``x``, as int32.

    Args:
        x: fp32, not negative, not NaN. Zero gives byte 0 (2^-127), Inf and what rounds up to it 0xFE (2^127).

    Source: TransformerEngine, common/util/ptx.cuh, ``float_to_e8m0`` (cvt.rp.satfinite.ue8m0x2.f32 in hardware).
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x007FFFFF
    below = (
        (mantissa > 0)
        & (exponent != _EXPONENT_OF_INF)
        & ~((exponent == 0) & (mantissa <= _HALF_SUBNORMAL))
    )
    return (exponent + below.int()).clamp(max=_EXPONENT_OF_INF)


def e8m0_reciprocal(exponent: Tensor) -> Tensor:
    """Return ``1 / 2^(byte - 127)`` as fp32, exactly: 2^-127 is subnormal."""
    bits = (254 - exponent) << 23
    return torch.where(exponent == _EXPONENT_OF_INF, _HALF_SUBNORMAL, bits).view(torch.float32)


def exponents(amax: Tensor, fmt: Format, rule: str = "") -> Tensor:
    """Return the E8M0 bytes of blocks, as int32.

    Args:
        amax: Of blocks, fp32, not NaN.
        fmt: The format.
        rule: ``""``: the smallest power of two under which the amax is at most ``fmt.max``. ``"floor"``: the one under
            which the amax has the exponent of ``fmt.max``, so that what exceeds that is clipped. ``"even"``: the
            same of the amax rounded, half up, to as many mantissa bits as an element has.

    Source: TransformerEngine's rule for MXFP8; OCP Microscaling Formats 1.0; compressed-tensors and torchao.
    """
    if not rule:
        return e8m0_round_up(
            amax * (1.0 / torch.tensor(fmt.max, dtype=torch.float32, device="cpu")).item()
        )
    half = 1 << (22 - fmt.mantissa_bits) if rule == "even" else 0
    exponent_of_max = math.frexp(fmt.max)[1] - 1
    return (((amax.view(torch.int32) + half) >> 23) - exponent_of_max).clamp(min=0)


def quantize(
    x: Tensor, fmt: Format, draws: Draws = NEAREST, rule: str = ""
) -> tuple[Tensor, Tensor]:
    """Return elements ``[M, K / elements_per_byte]`` and scale bytes ``[A, B]`` of ``x``.

    An FP8 element that was a NaN is one. E2M1 has none: the scale of the block is NaN, and its elements are zeros.
    """
    values = rotate(x) if fmt.hadamard else x
    exponent = exponents(block_amax(values, fmt.block), fmt, rule)  # [A, B]
    scaled = values.float() * spread(e8m0_reciprocal(exponent), fmt.block, x.shape)
    if fmt.elements_per_byte == 1:
        return cast_saturating(scaled, fmt), _bytes(exponent)
    nan = block_has_nan(values, fmt.block)
    scaled = torch.where(spread(nan, fmt.block, x.shape), 0.0, scaled)
    codes = e2m1_encode(scaled, draws.uniform(x.shape))
    return pack(codes), _bytes(torch.where(nan, _NAN, exponent))


def _bytes(exponent: Tensor) -> Tensor:
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)

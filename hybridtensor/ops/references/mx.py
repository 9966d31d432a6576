"""MXFP8: blocks of 32 that share a power-of-two scale of eight exponent bits.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.references.blocks import block_amax, spread
from hybridtensor.ops.references.float8 import cast_saturating

_EXPONENT_OF_INF = 0xFE
_HALF_SUBNORMAL = 0x00400000  # mantissa of 2^-127


def e8m0_round_up(x: Tensor) -> Tensor:
    """Return the E8M0 byte of the smallest power of two that is not below ``x``, as int32.

    Args:
        x: fp32, not negative, not NaN. Zero gives byte 0 (2^-127), Inf and what rounds up to it
            0xFE (2^127).

    Source: TransformerEngine, common/util/ptx.cuh, ``float_to_e8m0`` (cvt.rp.satfinite.ue8m0x2.f32
    in hardware).
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


def quantize(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return elements ``[M, K]`` and scale bytes ``[A, B]`` of ``x``; see ``ops.mx_quantize``."""
    exponent = e8m0_round_up(
        block_amax(x, fmt.block)
        * (1.0 / torch.tensor(fmt.max, dtype=torch.float32, device="cpu")).item()
    )  # [A, B]
    factor = spread(e8m0_reciprocal(exponent), fmt.block, x.shape)
    scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    return cast_saturating(x.float() * factor, fmt), scale

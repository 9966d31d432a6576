"""Quantize a matrix to MXFP8: blocks of 32 that share a power-of-two scale of eight exponent bits.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``A x B`` scale blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.blocks import block_amax, spread
from hybridtensor.ops.float8_quantize import cast_saturating
from hybridtensor.ops.library import define, require_float

_EXPONENT_OF_INF = 0xFE
_HALF_SUBNORMAL = 0x00400000  # mantissa of 2^-127


def e8m0_round_up(x: Tensor) -> Tensor:
    """Return the E8M0 byte of the smallest power of two that is not below ``x``, as int32.

    Args:
        x: fp32, not negative, not NaN. Zero gives byte 0 (2^-127), Inf and what rounds up to it 0xFE (2^127).

    Source: TransformerEngine, common/util/ptx.cuh, ``float_to_e8m0`` (cvt.rp.satfinite.ue8m0x2.f32 in hardware).
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x007FFFFF
    below = (mantissa > 0) & (exponent != _EXPONENT_OF_INF) & ~((exponent == 0) & (mantissa <= _HALF_SUBNORMAL))
    return (exponent + below.int()).clamp(max=_EXPONENT_OF_INF)


def e8m0_reciprocal(exponent: Tensor) -> Tensor:
    """Return ``1 / 2^(byte - 127)`` as fp32, exactly: 2^-127 is subnormal."""
    bits = (254 - exponent) << 23
    return torch.where(exponent == _EXPONENT_OF_INF, _HALF_SUBNORMAL, bits).view(torch.float32)


def mx_quantize_reference(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Define ``mx_quantize``."""
    fmt = get_format(format)
    exponent = e8m0_round_up(block_amax(x, fmt.block) * (1.0 / torch.tensor(fmt.max)).item())  # [A, B]
    factor = spread(e8m0_reciprocal(exponent), fmt.block, x.shape)
    scale = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    return cast_saturating(x.float() * factor, fmt), scale


def _fake(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    fmt = get_format(format)
    scale_shape = fmt.scale_shape(x.shape[0], x.shape[1])
    return x.new_empty(x.shape, dtype=fmt.element), x.new_empty(scale_shape, dtype=fmt.scale_dtype)


_OP = define("mx_quantize(Tensor x, str format) -> (Tensor, Tensor)", reference=mx_quantize_reference, fake=_fake)


def mx_quantize(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantize ``x`` to MXFP8 blocks along its last dimension (or square blocks, as ``format`` says).

    The scale is ``amax / max`` rounded *up* to a power of two, so that nothing finite saturates; the element is
    ``round(x / scale)``, to nearest even. Quantize ``x.t()`` for the columnwise face.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32; any strides; may be empty; axes are multiples of the block.
        format: One of the ``MXFP8_*`` records.

    Returns:
        Contiguous elements ``[M, K]`` and the scales in ``float8_e8m0fnu``, ``format.scale_shape(M, K)``. An all-zero
        block has scale byte 0. A block with an Inf has the largest scale, 2^127: the Inf saturates, and what is finite
        beside it vanishes. A NaN stays NaN and does not count in the amax.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor of the dtypes above.
        ValueError: If ``x`` is not a matrix of whole blocks, or ``format`` is not an MXFP8 format.

    Source: OCP Microscaling Formats 1.0 for the layout; TransformerEngine's round-up rule for the scale, which is
    torchao's ``ScaleCalculationMode.RCEIL``.
    """
    require_float("mx_quantize", x, rank=2)
    if format.scale_dtype != torch.float8_e8m0fnu:
        raise ValueError(f"mx_quantize: an MXFP8 format is required, got {format}")
    format.check_shape(x.shape[0], x.shape[1])
    codes, scale = _OP(x, format.name)
    return codes, scale

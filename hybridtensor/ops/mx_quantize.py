"""Quantize a matrix to MXFP8: blocks of 32 that share a power-of-two scale of eight exponent bits.

Shape letters: ``M`` other axis, ``K`` contraction axis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cast import Cast
from hybridtensor.ops.library import require_float
from hybridtensor.ops.quantize import quantize


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
    codes, scale = quantize(x, row=Cast(format.name))
    return codes, scale

"""Cast a matrix to FP8 with a scale that is known beforehand, and measure it for the next time: delayed scaling.

Shape letters: ``M`` other axis, ``K`` contraction axis, ``S`` scales of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cast import Cast
from hybridtensor.ops.library import require_device, require_float
from hybridtensor.ops.quantize import quantize


def float8_cast(x: Tensor, factors: Tensor, amaxes: Tensor | None, index: int, format: Format) -> tuple[Tensor, Tensor]:
    """Return ``round(x * factor)`` in FP8, saturating, and its scale; note the largest magnitude of ``x``.

    Args:
        x: ``[M, K]``, bf16, fp16 or fp32; any strides; may be empty.
        factors: What to multiply with, fp32 ``[S]``.
        amaxes: Largest magnitudes so far, fp32 ``[S]``: entry ``index`` is raised in place to that of ``x`` (Inf where
            an element is Inf; NaN elements do not count). None to leave no note.
        index: Which factor.
        format: ``FP8_E4M3_TENSOR`` or ``FP8_E5M2_TENSOR``.

    Returns:
        Contiguous elements ``[M, K]`` and the scale ``1 / factor``, fp32 ``[1, 1]``. An Inf saturates, a NaN stays NaN.

    Raises:
        TypeError: If ``x`` is not a floating-point tensor of the dtypes above.
        ValueError: If ``x`` is not a matrix, ``factors`` not fp32 with such an entry, a tensor is on another
            device, or ``format`` not one of those.

    Source: TransformerEngine's delayed scaling (common/cast/fp8).
    """
    require_float("float8_cast", x, rank=2)
    require_device("float8_cast", x, factors=factors, amaxes=amaxes)
    if format.block != (None, None) or format.scale_dtype != torch.float32:
        raise ValueError(f"float8_cast: an FP8 format per tensor is required, got {format}")
    if factors.dtype != torch.float32 or factors.dim() != 1 or not 0 <= index < factors.shape[0]:
        raise ValueError(
            f"float8_cast: fp32 factors with an entry {index} are required, got {factors.dtype} {tuple(factors.shape)}"
        )
    codes, scale = quantize(x, row=Cast(format.name, slot=index), factors=factors, amaxes=amaxes)
    return codes, scale

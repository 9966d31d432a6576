"""Turn the elements and scales of a face back into high-precision values."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.library import define


def expand_scale(scale: Tensor, fmt: Format, shape: torch.Size) -> Tensor:
    """Repeat block scales so that they broadcast against an ``[other, contraction]`` face of ``shape``."""
    for dim, block in enumerate(fmt.block):
        if block is not None and block > 1:
            scale = scale.repeat_interleave(block, dim=dim).narrow(dim, 0, shape[dim])
    return scale


def dequantize_reference(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    """Define ``dequantize``."""
    values = qdata.float() * expand_scale(scale.float(), get_format(format), qdata.shape)
    if tensor_scale is not None:
        values = values * tensor_scale
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _fake(qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(qdata, dtype=dtype)


_OP = define(
    "dequantize(Tensor qdata, Tensor scale, Tensor? tensor_scale, str format, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    fake=_fake,
)


def dequantize(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, *, format: Format, dtype: torch.dtype
) -> Tensor:
    """Return ``element * scale`` (times ``tensor_scale``) in ``dtype``, each product rounded to fp32.

    Saturates: rounding up to a power-of-two scale's grid can step just beyond the largest value of ``dtype``, and what
    was finite must stay finite. NaN stays NaN.

    Args:
        qdata: Elements, ``[other, contraction]``.
        scale: Block scales, ``format.scale_shape(other, contraction)``.
        tensor_scale: Second-level scale, fp32, broadcastable against ``qdata``; ``None`` for one-level formats.
        format: The face's format.
        dtype: Dtype of the result: a floating-point dtype.

    Source: TransformerEngine, common/cast/fp8/dequantize_fp8.cuh.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dequantize: a floating-point dtype is required, got {dtype}")
    result: Tensor = _OP(qdata, scale, tensor_scale, format.name, dtype)
    return result

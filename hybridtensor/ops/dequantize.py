"""Turn the elements and scales of a face back into high-precision values."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format
from hybridtensor.ops.library import define
from hybridtensor.ops.references.blocks import spread
from hybridtensor.ops.references.hadamard import rotate_back
from hybridtensor.ops.references.nvfp4 import e2m1_decode, unpack

_LARGE, _SMALLER = 2.0**64, 2.0**-16  # beyond the first, amax times a block scale could overflow


def element_values(qdata: Tensor, fmt: Format) -> Tensor:
    """Return the elements as fp32, ``[other, contraction]``."""
    return e2m1_decode(unpack(qdata)) if fmt.elements_per_byte > 1 else qdata.float()


def dequantize_reference(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    """Define ``dequantize``."""
    fmt = get_format(format)
    values = element_values(qdata, fmt)
    if tensor_scale is None:
        values = values * spread(scale.float(), fmt.block, values.shape)
    else:
        values = _two_level(values, scale, tensor_scale, fmt)
    if fmt.hadamard:
        values = rotate_back(values)
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype)


def _two_level(values: Tensor, scale: Tensor, tensor_scale: Tensor, fmt: Format) -> Tensor:
    """Multiply in the order of the kernels: ``element * ((scale * amax) * (1 / 2688))``."""
    shift = torch.where(tensor_scale > _LARGE, _SMALLER, 1.0)  # powers of two, which change no rounding
    unit = (1.0 / torch.tensor(fmt.tensor_scale_max)).item()
    combined = (scale.float() * (tensor_scale * shift)) * unit
    return values * spread(combined, fmt.block, values.shape) / shift


def _fake(qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, format: str, dtype: torch.dtype) -> Tensor:
    rows, columns = qdata.shape
    return qdata.new_empty((rows, columns * get_format(format).elements_per_byte), dtype=dtype)


_OP = define(
    "dequantize(Tensor qdata, Tensor scale, Tensor? tensor_scale, str format, ScalarType dtype) -> Tensor",
    reference=dequantize_reference,
    fake=_fake,
)


def dequantize(
    qdata: Tensor, scale: Tensor, tensor_scale: Tensor | None, *, format: Format, dtype: torch.dtype
) -> Tensor:
    """Return the values of a face in ``dtype``: ``element * scale``, each product rounded to fp32.

    Two-level formats: ``element * ((scale * tensor_scale) / tensor_scale_max)``. Formats with a Hadamard rotation are
    rotated back. Saturates: rounding up to a power-of-two scale's grid can step just beyond the largest value of
    ``dtype``, and what was finite must stay finite. NaN stays NaN.

    Args:
        qdata: Elements, ``[other, contraction / elements_per_byte]``.
        scale: Block scales, ``format.scale_shape(other, contraction)``.
        tensor_scale: Second-level scale, fp32, ``[1 or other, 1]``; ``None`` for one-level formats.
        format: The face's format.
        dtype: Dtype of the result: a floating-point dtype.

    Source: TransformerEngine, common/cast/fp8/dequantize_fp8.cuh and common/cast/nvfp4/dequantize_nvfp4.cuh.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"dequantize: a floating-point dtype is required, got {dtype}")
    result: Tensor = _OP(qdata, scale, tensor_scale, format.name, dtype)
    return result

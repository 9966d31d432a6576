"""What the bytes of a face mean, decoded apart from the library's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.arguments import require_kind
from hybridtensor.ops import Face
from hybridtensor.ops.dequantize import without_signs
from hybridtensor.ops.references.nvfp4 import unpack
from hybridtensor.subclasses import IdentityTensor, QuantizedTensor
from hybridtensor.testing.oracles import decode_oracle

_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float4_e2m1fn_x2: "e2m1"}


def exact_values(face: Face | QuantizedTensor | IdentityTensor) -> Tensor:
    """Return the values that a product multiplies, float64, ``[other, contraction]``.

    ::

        face = ht.Float8Quantizer().quantize(x).rowwise
        values = testing.exact_values(face)

    Elements are decoded by ml_dtypes and scaled in float64. A format with a Hadamard rotation gives its rotated values.
    An identity face, which has no direction, gives its matrix ``[tokens, features]``.
    """
    if isinstance(face, IdentityTensor):
        values = face.dequantize().double()
        return values.reshape(-1, values.shape[-1])
    if isinstance(face, QuantizedTensor):
        face = Face(face.qdata, face.scale, face.tensor_scale, face.format)
    require_kind("exact_values", "a face", face, Face)
    fmt = face.format
    if face.scale is None or fmt.element is None:
        return face.qdata.double()
    codes = unpack(face.qdata) if fmt.elements_per_byte > 1 else face.qdata.view(torch.uint8)
    values = torch.from_numpy(
        decode_oracle(codes.cpu().contiguous().numpy(), _NAMES[fmt.element])
    ).to(codes.device)
    scale = face.scale.double()
    for dim, extent in enumerate(fmt.block):
        index = torch.arange(values.shape[dim], device=codes.device) // (
            extent or max(values.shape[dim], 1)
        )
        scale = scale.index_select(dim, index)
    if face.tensor_scale is not None:
        tensor_scale = without_signs(face.tensor_scale, fmt)
        scale = scale * (tensor_scale.double() / fmt.tensor_scale_max)
    return values * scale

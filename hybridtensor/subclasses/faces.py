"""Conversion between faces as matrices, for operators, and faces as tensors of any shape."""

from __future__ import annotations

import torch

from hybridtensor.ops import Face, columnwise_of, high_precision
from hybridtensor.quantizers import tokens
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor

FaceTensor = QuantizedTensor | IdentityTensor


def rowwise_face(
    face: FaceTensor, dtype: torch.dtype, gemm: str = "output", *, stack: bool = False
) -> Face:
    """Return the rowwise face for operators, in high precision with ``dtype``; three dimensions are tokens or a
    ``stack``."""
    if isinstance(face, QuantizedTensor):
        return _face(face, -1, gemm)
    values = face.dequantize(dtype)
    return high_precision(values if stack else tokens(values))


def columnwise_face(
    face: FaceTensor, dtype: torch.dtype, gemm: str = "grad_input", *, stack: bool = False
) -> Face:
    """Return the columnwise face for operators, whose values may still have to be cast; see ``rowwise_face``."""
    if isinstance(face, QuantizedTensor):
        return _face(face, 0, gemm)
    if isinstance(face.source, QuantizedTensor) and face.source.axis == -1:
        return columnwise_of(_face(face.source, -1, gemm), dtype)
    # The product casts them: FSDP2 gathers what backward reads, and a graph's forward must not.
    plain = not isinstance(face.source, QuantizedTensor)
    values = face.source if plain else face.dequantize(dtype)
    return columnwise_of(high_precision(values if stack else tokens(values)), dtype)


def _face(face: QuantizedTensor, axis: int, gemm: str) -> Face:
    if face.axis != axis:
        needed, side = ("rowwise", "left") if axis == -1 else ("columnwise", "right")
        raise ValueError(
            f"{gemm}: a {needed} face is required as {side} operand, got the other one, {face!r}; quantize both faces"
        )
    return face.face


def turned(face: FaceTensor) -> FaceTensor:
    """Return a face of the transpose (of each matrix): columnwise from rowwise and vice versa, contiguous."""
    if isinstance(face, IdentityTensor):
        if isinstance(face.source, QuantizedTensor):
            return IdentityTensor(_turned(face.source))
        return IdentityTensor(face.source.transpose(-2, -1).contiguous())
    return _turned(face)


def _turned(face: QuantizedTensor) -> QuantizedTensor:
    *stack, rows, columns = face.shape
    return QuantizedTensor(face.face, -1 - face.axis, face.nominal_dtype, (*stack, columns, rows))


def face_tensor(
    face: Face | None, axis: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> FaceTensor | None:
    """Return a face as a tensor of ``shape``; ``axis`` -1 is rowwise, 0 columnwise."""
    if face is None:
        return None
    if face.scale is None:
        return IdentityTensor(face.qdata.view(shape))
    if face.dequantized_rowwise is None:
        # Constructed once more: Dynamo of torch 2.11 passes on a named tuple only if it saw the call that made it, and
        # ``Face.of`` goes past that.
        return QuantizedTensor(Face(*face), axis, dtype, shape)
    rowwise = Face(face.qdata, face.scale, face.tensor_scale, face.format)
    return IdentityTensor(QuantizedTensor(rowwise, -1, face.dequantized_rowwise, shape))

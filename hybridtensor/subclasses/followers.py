"""Columnwise faces that are the dequantized rowwise ones."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.subclasses.faces import FaceTensor
from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.wrapper import WrapperTensor


def followers(weight: HybridTensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of tensors by name to copy after loading ``faces``: a columnwise face copied from the rowwise
    data."""
    # Usually empty: a columnwise face dequantized from the rowwise data shares its memory, unless it was copied.
    faces = _following(weight)
    if faces is None:
        return {}
    first, second = (inner_tensors(face) for face in faces)
    pairs = zip(first, zip(first.values(), second.values(), strict=True), strict=True)
    return {
        f"rowwise.{name}": (a, b)
        for name, (a, b) in pairs
        if a.numel() and a.data_ptr() != b.data_ptr()
    }


def follows_rowwise(weight: HybridTensor) -> bool:
    """Return whether the columnwise face is the dequantized rowwise one."""
    return _following(weight) is not None


def _following(weight: HybridTensor) -> tuple[FaceTensor, FaceTensor] | None:
    """Return the rowwise face and the equal tensor of the columnwise one, or None."""
    row, column = weight.rowwise, weight.columnwise
    if row is None or not isinstance(column, IdentityTensor):
        return None
    source = column.source
    if isinstance(row, IdentityTensor):
        quantized = (isinstance(face.source, QuantizedTensor) for face in (row, column))
        return None if any(quantized) else (row, column)
    if isinstance(source, QuantizedTensor) and (source.format, source.axis) == (
        row.format,
        row.axis,
    ):
        return row, source
    return None


def inner_tensors(face: WrapperTensor) -> dict[str, Tensor]:
    """Return the plain tensors of a face by name."""
    names, _ = face.parts()
    return {name: getattr(face, name) for name in names}

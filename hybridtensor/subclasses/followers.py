"""Columnwise faces that are, by their kind, the values of the rowwise one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor


def followers(weight: HybridTensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return what must be copied after loading ``faces``: by name, a tensor and another one that
    gets its values.

    Usually nothing: a columnwise face that holds the rowwise values shares their memory, unless it
    was copied.
    """
    if not follows_rowwise(weight):
        return {}
    follower: Any = weight.columnwise
    if not isinstance(weight.rowwise, IdentityTensor):
        follower = follower.source
    names = inner_tensors(weight.rowwise)
    pairs = zip(names.values(), inner_tensors(follower).values(), strict=True)
    found = {f"rowwise.{name}": pair for name, pair in zip(names, pairs, strict=True)}
    return {
        name: (a, b) for name, (a, b) in found.items() if a.numel() and a.data_ptr() != b.data_ptr()
    }


def follows_rowwise(weight: HybridTensor) -> bool:
    """Whether the columnwise face is, by its kind, the values of the rowwise one."""
    row, column = weight.rowwise, weight.columnwise
    if row is None or not isinstance(column, IdentityTensor):
        return False
    source = column.source
    if isinstance(row, IdentityTensor):
        return not isinstance(row.source, QuantizedTensor) and not isinstance(
            source, QuantizedTensor
        )
    return isinstance(source, QuantizedTensor) and (source.format, source.axis) == (
        row.format,
        row.axis,
    )


def inner_tensors(face: Any) -> dict[str, Tensor]:
    """Return the inner tensors of a face by name."""
    names, _ = face.parts()
    return {name: getattr(face, name) for name in names}

"""Flattening nested wrappers to plain tensors, and rebuilding them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybridtensor.subclasses.wrapper import Metadata, WrapperTensor


class Structure(NamedTuple):
    """The hashable structure that rebuilds a flattened wrapper."""

    cls: type[WrapperTensor]
    names: tuple[str, ...]
    metadata: Metadata
    size: tuple[int, ...]
    stride: tuple[int, ...]
    children: tuple[Structure | None, ...]


def flatten(tensor: Tensor) -> tuple[list[Tensor], Structure | None]:
    """Return the plain tensors of a nested wrapper and the structure to rebuild it."""
    if not isinstance(tensor, WrapperTensor):
        return [tensor], None
    names, metadata = tensor.parts()
    plain: list[Tensor] = []
    children = []
    for name in names:
        tensors, child = flatten(getattr(tensor, name))
        plain += tensors
        children.append(child)
    shape = tuple(tensor.size()), tuple(tensor.stride())
    return plain, Structure(type(tensor), tuple(names), metadata, *shape, tuple(children))


def unflatten(plain: list[Tensor], structure: Structure | None) -> Tensor:
    """Undo ``flatten``, removing its tensors from the front of ``plain``."""
    if structure is None:
        return plain.pop(0)
    inner = {
        name: unflatten(plain, child)
        for name, child in zip(structure.names, structure.children, strict=True)
    }
    return structure.cls.from_parts(inner, structure.metadata, structure.size, structure.stride)

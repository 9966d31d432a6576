"""This rank's part of a DTensor, and back."""

from __future__ import annotations

from typing import TypeVar, overload

from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T", bound=Tensor)


@overload
def local(tensor: DTensor) -> Tensor:
    """Return this rank's part."""


@overload
def local(tensor: T) -> T:
    """Return the tensor itself."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    # The private ``_local_tensor``: the public ``to_local`` would be recorded by autograd, and
    # returns another object. Without it nothing of a sharded weight is found.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, as this rank's part of a DTensor if ``like`` is one."""
    if not isinstance(like, DTensor):
        return part
    # The private ``_spec`` and constructor: the public ``from_local`` would be recorded by
    # autograd.
    return DTensor(part, like._spec, requires_grad=part.requires_grad)

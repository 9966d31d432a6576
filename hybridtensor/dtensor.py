"""This rank's part of a DTensor, and back."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or the tensor itself.

    ``to_local`` would record it in autograd, and return another object.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """Return ``part``, as this rank's part of a DTensor if ``like`` is one."""
    return (
        DTensor(part, like._spec, requires_grad=part.requires_grad)
        if isinstance(like, DTensor)
        else part
    )

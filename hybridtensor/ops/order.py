"""Keep an operation after another one in a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.ops.library import define

_AFTER = define(
    "after(Tensor x, Tensor other) -> Tensor",
    reference=lambda x, other: x.clone(),
    fake=lambda x, other: torch.empty_like(x),
)


def after(x: Tensor, other: Tensor) -> Tensor:
    """Return a copy of ``x``, which a graph makes after ``other``.

    A compiler that cuts a graph into forward and backward would do in forward what depends on
    nothing of backward, and keep what comes of it.
    """
    if x.itemsize > 1:
        return _AFTER(x, other)  # type: ignore[no-any-return]
    copied: Tensor = _AFTER(x.view(torch.uint8), other)
    return copied.view(x.dtype)

"""What torch leaves out of its types, or keeps private, of autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

if TYPE_CHECKING:

    class Ctx(FunctionCtx):
        """What autograd passes to forward and backward; a subclass adds what forward passes to backward."""

        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]
        next_functions: tuple[tuple[Node | None, int], ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None:
            """Keep tensors, and detect who writes them."""

    class Function(torch.autograd.Function):
        """torch's own, with a type of ``apply``."""

        @classmethod
        def apply(cls, *inputs: object) -> Any:
            """Return the result of ``forward``."""

else:
    Ctx, Function = FunctionCtx, torch.autograd.Function

# The private counter by which autograd notices writes; its getter is faster than the attribute.
read_version = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


def version_of(tensor: Tensor) -> int:
    """Return torch's version counter, -1 for an inference tensor."""
    return -1 if tensor.is_inference() else read_version(tensor)

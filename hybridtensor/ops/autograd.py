"""Types of autograd functions, of which torch leaves some out."""

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

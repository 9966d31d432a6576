"""What a program of ``torch.export`` says in backward: quantized products have no gradients there.

The program holds the operators of a layer's forward and none of its autograd function, so that autograd would take
outputs for constants, and train the rest of the model without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hybridtensor.ops.autograd import Ctx, Function
from hybridtensor.ops.library import define, implement_autograd, is_exporting
from hybridtensor.state import LayerState, layer_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.op_table import Args, Func, Kwargs
from hybridtensor.subclasses.wrapper import WrapperTensor

W = TypeVar("W", bound=WrapperTensor)


def _raise(grad: Tensor, shape: Sequence[int]) -> Tensor:
    raise NotImplementedError(
        "linear: an exported program holds only the forward of a converted layer; train the model that was exported"
    )


_NO_GRADIENT = define(
    "no_gradient(Tensor grad, SymInt[] shape) -> Tensor",
    reference=_raise,
    fake=lambda grad, shape: grad.new_empty(shape),
)
_WITHOUT_GRADIENT = define(
    "without_gradient(Tensor x, Tensor[] of) -> Tensor",
    reference=lambda x, of: x.clone(),
    fake=lambda x, of: torch.empty_like(x),
)


class _Raising(Function):
    """Autograd function whose gradients are an operator, which raises where it runs, not where a compiler traces it."""

    @staticmethod
    def forward(ctx: _Ctx, x: Tensor, *of: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in of]
        return _below_autograd(x, of)

    @staticmethod
    def backward(ctx: _Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(_NO_GRADIENT(grad, shape) for shape in ctx.shapes)


class _Ctx(Ctx):
    """What forward passes to backward."""

    shapes: list[torch.Size]


def _below_autograd(x: Tensor, of: Sequence[Tensor]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():  # private; torch's own autograd kernels enter it
        out: Tensor = _WITHOUT_GRADIENT(x, of)
        return out


@implement_autograd("without_gradient")
def _autograd(x: Tensor, of: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled() and not is_exporting():
        return _Raising.apply(x.detach(), *of)  # type: ignore[no-any-return]
    return _below_autograd(x, of)


@HybridTensor.ops.register(_WITHOUT_GRADIENT)
@MasterWeight.ops.register(_WITHOUT_GRADIENT)
def _of_wrappers(func: Func, args: Args, kwargs: Kwargs) -> object:
    x, of = args
    return func(x, [tensor for tensor in of if not isinstance(tensor, WrapperTensor)])


def without_gradient(out: Tensor, *of: Tensor | None) -> Tensor:
    """Return ``out``, computed of operands, a gradient of any of which raises NotImplementedError as exported."""
    result: Tensor = _WITHOUT_GRADIENT(out, [operand for operand in of if operand is not None])
    return result


def require_own_weight(state: LayerState) -> None:
    """Raise NotImplementedError where a layer is exported while a plain tensor is at its weight."""
    if is_exporting():
        raise NotImplementedError(
            f"torch.export: another tensor is at the weight of {layer_of(state)}, such as what a parametrization "
            "computes; call plain_ on a copy of the model"
        )


def as_exported(weight: W) -> W:
    """Return a weight, such as a view, of inner tensors that ``torch.export`` follows as the weight's."""
    # Private; what a program reads the inner tensors of a parameter by
    inner_of = torch.ops.export.access_subclass_inner_tensor
    names, metadata = weight.__tensor_flatten__()
    inner = {name: inner_of(weight, name) for name in names}
    inner = {n: as_exported(t) if isinstance(t, WrapperTensor) else t for n, t in inner.items()}
    return type(weight).__tensor_unflatten__(inner, metadata, weight.shape, weight.stride())

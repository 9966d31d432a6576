"""A converted layer applies its recipe to whatever tensor stands at ``weight``.

``torch.func.functional_call`` puts another tensor there for one call, ``weight_norm`` and
parametrizations compute it. A hook then marks the layer's input, and the mark brings ``F.linear``
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hybridtensor.dtensor import local
from hybridtensor.linear.function import linear, require_plain_autograd
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.op_table import Args, Func, Kwargs

_RECIPE = "_hybridtensor_recipe"
_WEIGHTS = (MasterWeight, HybridTensor)


class LayerRecipe(NamedTuple):
    """What a converted layer quantizes by, whoever holds its weight.

    Attributes:
        config: The recipe.
        state: What its quantizers remember.
    """

    config: HybridConfig
    state: LayerState


def set_recipe(module: nn.Linear, config: HybridConfig, state: LayerState) -> None:
    """Have a layer apply a recipe to plain tensors at ``weight``, too."""
    if _RECIPE not in module.__dict__:
        module.register_forward_pre_hook(_mark_input, with_kwargs=True)
    module.__dict__[_RECIPE] = LayerRecipe(config, state)


def drop_recipe(module: nn.Linear) -> None:
    """Undo ``set_recipe``."""
    module.__dict__.pop(_RECIPE, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _mark_input:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def recipe_of(module: nn.Module) -> LayerRecipe | None:
    """Return the recipe and state of a converted layer, or None of any other module."""
    found: LayerRecipe | None = module.__dict__.get(_RECIPE)
    return found


def _mark_input(
    module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Mark the input of a layer whose weight is not one of ours."""
    weight = module._parameters.get("weight")
    kind: type = type(weight)
    if kind in _WEIGHTS or (weight is not None and isinstance(local(weight), _WEIGHTS)):
        return None
    if args:
        return (_marked(args[0], module), *args[1:]), kwargs
    return args, {**kwargs, "input": _marked(kwargs.get("input"), module)}


def _marked(x: Any, module: nn.Linear) -> Tensor:
    if type(x) not in (Tensor, nn.Parameter):
        raise NotImplementedError(
            f"linear: a plain input is required where a plain tensor stands at a converted layer's "
            f"weight, got {type(x).__name__}; give the layer its own weight back"
        )
    made: _LayerInput = x.as_subclass(_LayerInput)
    made.layer, made.given = module, x
    return made


class _LayerInput(Tensor):
    """The input of a converted layer at whose ``weight`` stands a plain tensor.

    Attributes:
        layer: The layer.
        given: The input itself.
    """

    layer: nn.Linear
    given: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        # Private; as ``Tensor.__torch_function__`` does, and results are plain tensors.
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                operands = dict(zip(("input", "weight", "bias"), args, strict=False))
                return _linear(**operands, **(kwargs or {}))
            if func in _PRODUCTS:
                _refuse_weight([*args, *(kwargs or {}).values()])
            return func(*args, **(kwargs or {}))


# a graph cannot make a weight's record
@torch.compiler.disable(reason="a plain tensor stands at the weight of a converted layer")  # type: ignore[untyped-decorator]
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(input, _LayerInput):
        return F.linear(input, weight, bias)
    layer = input.layer
    recipe = recipe_of(layer)
    if recipe is None or not _stands_at_weight(weight, layer):
        return F.linear(input.given, weight, bias)
    require_plain_autograd()
    made = _AsWeight.apply(weight, recipe.config)  # type: ignore[no-untyped-call]
    made.record.layer = recipe.state
    return linear(input.given, made, bias)


_PRODUCTS = (
    torch.matmul, torch.mm, torch.addmm, Tensor.matmul, Tensor.mm, Tensor.addmm, Tensor.__matmul__,
    Tensor.__rmatmul__,
)  # fmt: skip


def _refuse_weight(operands: list[Any]) -> None:
    """Raise for a product of a marked input and what has the shape of its layer's weight, or of its
    transpose: nothing tells whether it is the weight.
    """
    for layer in [operand.layer for operand in operands if isinstance(operand, _LayerInput)]:
        shape = [layer.out_features, layer.in_features]
        for operand in operands:
            plain = isinstance(operand, Tensor) and not isinstance(operand, _LayerInput)
            if plain and list(operand.shape) in (shape, shape[::-1]):
                raise NotImplementedError(
                    "linear: F.linear is required where a plain tensor stands at a converted "
                    f"layer's weight, got a product of matrices in {type(layer).__name__}; it "
                    "would not be quantized"
                )


def _stands_at_weight(weight: Tensor, layer: nn.Linear) -> bool:
    """Return whether a tensor is what a layer has at ``weight``; a parametrized one is another at
    each look.
    """
    own: Mapping[str, object] = {**layer.__dict__, **layer._parameters}
    if own.get("weight") is weight:
        return True
    shape = (layer.out_features, layer.in_features)
    return parametrize.is_parametrized(layer, "weight") and tuple(weight.shape) == shape


class _AsWeight(torch.autograd.Function):
    """A plain tensor as a weight with a recipe; gradients pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, config: HybridConfig) -> MasterWeight:
        return MasterWeight(values.detach(), config)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None

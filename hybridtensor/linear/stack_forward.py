"""Forward of a module of experts: its recipes also apply to plain tensors in place of its weights.

``torch.func.functional_call`` sets other tensors for one call, pruning and parametrizations compute one, a new
``Parameter`` stays, and ``FullyShardedDataParallel`` leaves views of its flat parameter. Their products reach no tensor
of this library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from hybridtensor.dtensor import local
from hybridtensor.linear.function import require_plain_autograd
from hybridtensor.linear.interception import intercept_others
from hybridtensor.linear.layer_forward import (
    STACKS,
    LayerForward,
    in_eager_code,
    recipe_of,
    required_layer,
)
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.linear.values import as_master_weight, as_weight
from hybridtensor.ops.library import outside_graphs
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState
from hybridtensor.subclasses.op_table import Args, Kwargs
from hybridtensor.subclasses.owners import LayerRecipe, go_by, set_owner


def set_stack_recipe(
    module: nn.Module, parameter: str, config: HybridConfig, state: LayerState
) -> None:
    """Make a module of experts apply a recipe to a parameter, and to any tensor in its place."""
    if STACKS not in module.__dict__:
        module.forward = StackForward(module, module.__dict__.get("forward")).bound
    recipe = LayerRecipe(config, state)
    recipes = module.__dict__[STACKS] = {
        **module.__dict__.get(STACKS, {}),
        **dict.fromkeys(_names(module, parameter), recipe),
    }
    set_owner(module, recipes)


def _names(module: nn.Module, parameter: str) -> tuple[str, ...]:
    """Return a parameter's name, and that of the tensor which torch's hooks compute from it, if there is one."""
    # prune and the former spectral_norm rename w1 to w1_orig, the former weight_norm to w1_v beside w1_g
    computed = parameter.removesuffix("_orig")
    if f"{parameter.removesuffix('_v')}_g" in module._parameters:
        computed = parameter.removesuffix("_v")
    is_there = computed != parameter and isinstance(module.__dict__.get(computed), Tensor)
    return (parameter, computed) if is_there else (parameter,)


def recipe_at(module: nn.Module, name: str) -> LayerRecipe | None:
    """Return the recipe and state of a converted weight, by its name in its module, or None."""
    known = recipe_of(module) if name == "weight" else None
    found: dict[str, LayerRecipe] = module.__dict__.get(STACKS, {})
    return found.get(name) if known is None else known


class StackForward(LayerForward):
    """The callable that replaces ``forward`` of one module of experts, as its bound method ``bound``."""

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        layer = required_layer(self._layer())
        for name, recipe in layer.__dict__.get(STACKS, {}).items():
            weight = local(_at(layer, name))
            if not isinstance(weight, (*WEIGHTS, type(None))):
                return _with_recipes(self, layer, args, kwargs)
            if weight is None:
                continue
            if torch.compiler.is_dynamo_compiling():
                if weight.is_of_no_layer:
                    return in_eager_code(self, args, kwargs)
                continue
            if weight.is_data and weight.computes_as_values:
                with as_weight(weight):
                    return self(*args, **kwargs)
            if weight.record.layer is not recipe.state or weight.record.is_new:
                go_by(recipe, weight.record, weight.config, layer)
        return self.run(layer, args, kwargs)

    def __setstate__(self, state: tuple[object, ...]) -> None:
        intercept_others()  # quantize_ may have run in another process
        super().__setstate__(state)


def _at(layer: nn.Module, name: str) -> Any:
    """Return the tensor at a weight's name, the parametrization that computes it, or None."""
    # A parameter first: FSDP1 and pruning put attributes in the place of those that they take away
    found = layer._parameters.get(name)
    if found is None and "parametrizations" in layer._modules:
        found = layer._modules["parametrizations"]._modules.get(name)  # type: ignore[union-attr,assignment]
    return _table(layer, name).get(name) if found is None else found


def _table(layer: nn.Module, name: str) -> dict[str, Any]:
    """Return where a module stores what is at a name: a parameter, a buffer or an attribute."""
    if layer._parameters.get(name) is not None:
        return layer._parameters
    return layer._buffers if layer._buffers.get(name) is not None else layer.__dict__


# a graph cannot make a weight's record
@outside_graphs("a weight of converted experts is a plain tensor")
def _with_recipes(forward: StackForward, layer: nn.Module, args: Args, kwargs: Kwargs) -> object:
    """Run a module's forward while tensors of another class are at its weights."""
    require_plain_autograd()
    with parametrize.cached(), _computed_as_weights(layer), _as_weights(layer):
        return forward.run(layer, args, kwargs)


@contextlib.contextmanager
def _computed_as_weights(layer: nn.Module) -> Iterator[None]:
    """Replace what parametrizations compute in place of a module's weights while it runs, with gradients."""
    # Private to torch: where ``parametrize.cached`` stores what was computed, so that a forward finds it
    known, before = parametrize._cache, {}
    try:
        for name, recipe in layer.__dict__[STACKS].items():
            if parametrize.is_parametrized(layer, name):
                value, key = getattr(layer, name), (id(layer), name)
                if not isinstance(local(value), WEIGHTS):
                    before[key], known[key] = known[key], as_master_weight(value, *recipe)
        yield
    finally:
        known.update(before)


@contextlib.contextmanager
def _as_weights(layer: nn.Module) -> Iterator[None]:
    """Replace plain tensors at the names of a module's weights while it runs, with gradients."""
    # The tables: a module's attribute would refuse what is no parameter
    tables = {name: _table(layer, name) for name in layer.__dict__[STACKS]}
    before = {name: table[name] for name, table in tables.items() if table.get(name) is not None}
    try:
        for name, tensor in before.items():
            if isinstance(local(tensor), WEIGHTS):
                continue
            is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
            if not is_plain or not tensor.is_floating_point():
                kind = f"{type(tensor).__name__}{f' of {tensor.dtype}' if is_plain else ''}"
                raise NotImplementedError(
                    f"forward: {type(layer).__name__}.{name} is a {kind} in place of the experts' weight that "
                    "was quantized; call quantize_ on the model that has it, or plain_ before"
                )
            tables[name][name] = as_master_weight(tensor, *layer.__dict__[STACKS][name])
        yield
    finally:
        for name, tensor in before.items():
            tables[name][name] = tensor

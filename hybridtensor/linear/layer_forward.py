"""The forward of a converted layer: its original forward, with the recipe applied to any tensor at ``weight``.

| at ``weight`` | what runs |
|---|---|
| a weight of this library | the layer's forward: ``F.linear`` finds the weight |
| its shards, a DTensor | the layer's forward; ``F.linear`` runs on the local parts, see ``tensor_parallel`` |
| any other tensor, or a property | the layer's forward; ``F.linear`` quantizes by the layer's recipe |

``torch.func.functional_call`` sets other tensors as ``weight`` for one call; ``weight_norm``, parametrizations and
properties compute it. DTensor disables ``__torch_function__`` of what is inside: the layer handles DTensors itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from hybridtensor.dtensor import local
from hybridtensor.linear.exported import require_own_weight
from hybridtensor.linear.function import linear, require_plain_autograd
from hybridtensor.linear.kinds import is_listed
from hybridtensor.linear.operands import WEIGHTS, Weight, is_weight
from hybridtensor.linear.recipe_mode import RecipeMode
from hybridtensor.linear.tensor_parallel import (
    ShardedLinearMode,
    require_shardable,
    sharded_linear,
)
from hybridtensor.linear.uses import Uses, warn_unquantized
from hybridtensor.linear.values import as_master_weight, as_weight, values_of
from hybridtensor.ops.library import outside_graphs
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState
from hybridtensor.state.training import watch_optimizers
from hybridtensor.subclasses.observing import observe_read, observers
from hybridtensor.subclasses.op_table import Args, Kwargs
from hybridtensor.subclasses.owners import LayerRecipe, go_by, set_owner

_RECIPE = "_hybridtensor_recipe"
STACKS = "_hybridtensor_stacks"
"""The recipes of a module of experts, by the names of its weights; see ``linear.stack_forward``."""
_modes_of_functions: Callable[[], bool] = torch._C._is_torch_function_mode_enabled  # private


def set_recipe(module: nn.Module, config: HybridConfig, state: LayerState) -> None:
    """Make a layer apply a recipe to any tensor at ``weight``."""
    if _RECIPE not in module.__dict__:
        module.forward = LayerForward(module, module.__dict__.get("forward")).bound
        # Transformers calls a layer with this attribute with the local parts of weights and inputs.
        module.__dict__["_hf_quantized_needs_local_tp"] = True
    recipe = module.__dict__[_RECIPE] = LayerRecipe(config, state)
    set_owner(module, {"weight": recipe})


def drop_recipe(module: nn.Module) -> None:
    """Remove a layer's recipe; a forward of another library that wraps ours then calls the layer's own."""
    module.__dict__.pop(_RECIPE, None)
    module.__dict__.pop(STACKS, None)
    module.__dict__.pop("_hf_quantized_needs_local_tp", None)
    set_owner(module, {})
    own = _forward_of(module)
    if own is not None:
        del module.__dict__["forward"]
        if own.inner is not None:
            module.__dict__["forward"] = own.inner


def recipe_of(module: nn.Module) -> LayerRecipe | None:
    """Return the recipe and state of a converted layer, or None of any other module."""
    found: LayerRecipe | None = module.__dict__.get(_RECIPE)
    return found


def runs_linear(module: nn.Module) -> bool:
    """Return whether a converted layer's forward is that of ``nn.Linear``, not wrapped by another library."""
    own = _forward_of(module)
    return own is not None and own.inner is None and _is_linear(module)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether the class of a converted linear layer overrides ``forward``."""
    return recipe_of(module) is not None and not _is_linear(module) and not is_listed(type(module))


def _forward_of(module: nn.Module) -> LayerForward | None:
    """Return the ``LayerForward`` of a layer, or None if its forward is its own or another library's."""
    method = module.__dict__.get("forward")
    # Dynamo of torch 2.11 has no ``__self__`` for ``getattr`` with a default
    own = method.__self__ if isinstance(method, types.MethodType) else None
    return own if isinstance(own, LayerForward) else None


def require_own_forward(name: str, module: nn.Module) -> None:
    """Raise ValueError for a shallow copy of a converted layer, which calls the forward of the other one."""
    own = _forward_of(module)
    if own is not None and own._layer() is not module:
        raise ValueError(
            f"layer {name or '<root>'}: a layer with a forward of its own is required, got a shallow copy, which runs "
            "the layer that it was copied from; use copy.deepcopy, or make a layer before quantize_ and tie its weight"
        )


def _computes_weight(module: nn.Module) -> bool:
    """Return whether a property of a layer's class computes its weight, as parametrizations do."""
    return hasattr(type(module), "weight")


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


class LayerForward:
    """The callable that replaces ``forward`` of one converted layer, as its bound method ``bound``.

    Args:
        layer: The layer, of which a weak reference is stored, since the layer references its forward.
        inner: A forward that another library set on the layer before, or None.

    Attributes:
        inner: See above.
    """

    # The first forward of another class than ``nn.Linear`` that ends is observed: see ``Uses``
    _ran = False

    def __init__(self, layer: nn.Module, inner: Callable[..., object] | None = None) -> None:
        self._layer, self.inner = weakref.ref(layer), inner

    @property
    def bound(self) -> types.MethodType:
        """The bound method that replaces ``forward``, with the signature of the original."""
        # Dynamo guards an attribute ``forward`` by identity, but a bound method by its function's code: equal layers
        # share one graph.
        if self.inner is None:
            return types.MethodType(_method(type(required_layer(self._layer())).forward), self)
        method = _method.__wrapped__(self.inner)
        vars(method)["__signature__"] = _with_self(inspect.signature(self.inner))
        del vars(method)["__wrapped__"]  # often a method of the layer: a cycle
        return types.MethodType(method, self)

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Run the layer's forward by what is at ``weight``; see the table of this file."""
        layer = self._layer()
        if layer is None:
            layer = required_layer(layer)  # which raises
        recipe = layer.__dict__.get(_RECIPE)
        if recipe is None:  # a layer that is plain again
            return self.run(layer, args, kwargs)
        weight: Any = layer._parameters.get("weight")
        if type(weight) not in WEIGHTS:
            part = local(weight) if isinstance(weight, DTensor) else None
            if isinstance(part, WEIGHTS) and not _computes_weight(layer):
                return self._run_sharded(layer, weight, part, args, kwargs)
            return _with_recipe(self, layer, args, kwargs)
        if torch.compiler.is_dynamo_compiling():  # Dynamo must not trace the rest
            if weight.is_of_no_layer or _computes_weight(layer):
                return in_eager_code(self, args, kwargs)
            return self.run(layer, args, kwargs)
        if weight.record.layer is not recipe.state or weight.record.is_new:
            go_by(recipe, weight.record, weight.config, layer)
        if self.inner is not None or type(layer).forward is not nn.Linear.forward:
            return self._run_other(layer, weight, args, kwargs)
        # ``nn.Linear`` calls F.linear and nothing else. The weight is read by name: Pyro's layers train what is.
        is_read = layer.weight is weight
        if not is_read:
            return _with_recipe(self, layer, args, kwargs)
        if (
            len(args) == 1
            and not kwargs
            and type(args[0]) is Tensor
            and weight.config is not None
            and not _modes_of_functions()
        ):
            # Nothing else would intercept F.linear. Every attribute of the weight would pass through its function.
            with torch._C.DisableTorchFunctionSubclass():
                return linear(args[0], weight, layer.bias)  # type: ignore[arg-type]
        return self.run(layer, args, kwargs)

    def _run_other(self, layer: nn.Module, weight: Weight, args: Args, kwargs: Kwargs) -> object:
        """Run another forward than that of ``nn.Linear``, and observe the first time what it does with the weight."""
        if weight.is_data and weight.computes_as_values:
            with as_weight(weight):
                return self(*args, **kwargs)
        if self._ran or observers:
            return self.run(layer, args, kwargs)
        recipe: LayerRecipe = layer.__dict__[_RECIPE]
        with Uses(layer, recipe.state):
            out = self.run(layer, args, kwargs)
            self._ran = True
            return out

    def _run_sharded(
        self, layer: nn.Module, weight: DTensor, part: Weight, args: Args, kwargs: Kwargs
    ) -> object:
        """Run the layer's forward with a DTensor of weights at ``weight``, as tensor parallelism puts there."""
        recipe: LayerRecipe = layer.__dict__[_RECIPE]
        if not torch.compiler.is_dynamo_compiling() and part.record.layer is not recipe.state:
            go_by(recipe, part.record, part.config, layer)
        require_shardable(layer, recipe.state)
        if self.inner is None and _is_linear(layer):
            return sharded_linear(_input(*args, **kwargs), weight, layer.bias)  # type: ignore[arg-type]
        with ShardedLinearMode():
            return self.run(layer, args, kwargs)

    def run(self, layer: nn.Module, args: Args, kwargs: Kwargs) -> object:
        if any(map(is_weight, (*args, *kwargs.values()))):  # such as that of a tied embedding
            args, kwargs = tree_map(_as_input, (args, kwargs))
        if self.inner is None:
            return type(layer).forward(layer, *args, **kwargs)
        return self.inner(*args, **kwargs)

    # Copied and pickled with its layer; a bound method of the layer would be unpickled as the method of its class.
    def __deepcopy__(self, memo: dict[int, object]) -> LayerForward:
        layer = required_layer(copy.deepcopy(self._layer(), memo))
        set_owner(layer, copy.deepcopy(self._recipes(), memo))
        return type(self)(layer, copy.deepcopy(self.inner, memo))

    def __reduce__(self) -> tuple[object, ...]:
        inner, recipes = self.inner, self._recipes()
        # pickle stores a bound method by its name, which would look up this forward on the layer
        if isinstance(inner, types.MethodType) and inner.__self__ is self._layer():
            return _unbound, (type(self),), (self._layer(), inner.__func__, True, recipes)
        return _unbound, (type(self),), (self._layer(), inner, False, recipes)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        layer, inner, bound, *recipes = state
        watch_optimizers()  # quantize_ may have run in another process
        LayerForward.__init__(self, layer, types.MethodType(inner, layer) if bound else inner)
        if recipes and isinstance(recipes[0], dict):  # former versions pickled none
            set_owner(layer, recipes[0])

    def _recipes(self) -> dict[str, LayerRecipe]:
        """Return the recipes of the layer's weights, by their names."""
        own = required_layer(self._layer()).__dict__
        return {**own.get(STACKS, {}), **({"weight": own[_RECIPE]} if _RECIPE in own else {})}


# A graph cannot let it go by the layer's state, and its products would stay plain there, as an adapter's.
@outside_graphs(
    "a property, or a factory such as new_zeros of another weight, makes the weight of a converted layer"
)
def in_eager_code(forward: LayerForward, args: Args, kwargs: Kwargs) -> object:
    """Call the forward of a layer outside of graphs."""
    return forward(*args, **kwargs)


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[own, *signature.parameters.values()])


@functools.cache
def _method(forward: Callable[..., object]) -> Callable[..., object]:
    """Return the function of ``LayerForward.bound`` for a class's forward."""

    @functools.wraps(forward, updated=())
    def bound(self: LayerForward, *args: object, **kwargs: object) -> object:
        return self(*args, **kwargs)

    bound.__name__ = "bound"  # pickle and copy find the method of a ``LayerForward`` by this name
    return bound


def required_layer(layer: nn.Module | None) -> nn.Module:
    """Return the layer of a weak reference; raise RuntimeError if it was collected."""
    if layer is None:
        raise RuntimeError("forward: the layer that this is the forward of is gone; call a layer")
    return layer


def _unbound(kind: type[LayerForward] = LayerForward) -> LayerForward:
    return kind.__new__(kind)


def _as_input(argument: object) -> object:
    """Return a weight's values: as the input of a layer it is quantized by that one's recipe."""
    if not is_weight(argument):
        return argument
    observe_read(argument, "embedding")
    return values_of(argument)


def _input(input: Tensor) -> Tensor:
    """Return the one argument of ``nn.Linear.forward``, by position or name."""
    return input


@outside_graphs("the weight of a converted layer is a plain tensor")
def _with_recipe(forward: LayerForward, layer: nn.Module, args: Args, kwargs: Kwargs) -> object:
    """Run a layer's forward while another class's tensor is at its weight: a graph cannot make a weight's record."""
    require_plain_autograd()
    recipe = layer.__dict__[_RECIPE]
    require_own_weight(recipe.state)
    with parametrize.cached():
        weight: Any = layer.weight  # computed now, not while its products are watched
        if is_weight(weight):  # a parametrization handed it on, or it is a buffer
            go_by(recipe, weight.record, weight.config, layer)
            with as_weight(weight):
                return forward.run(layer, args, kwargs)
        if forward.inner is None and _is_linear(layer):  # a property would compute it again
            x, made = _as_input(_input(*args, **kwargs)), as_master_weight(weight, *recipe)
            return linear(x, made, layer.bias)  # type: ignore[arg-type]
        with RecipeMode(layer, weight, recipe) as mode:
            out = forward.run(layer, args, kwargs)
        if not mode.multiplied and _computes_weight(layer):
            warn_unquantized(
                layer,
                recipe.state,
                "multiplies another tensor than was read as its weight, as a property computes it anew",
                stacklevel=8,
            )
        return out

"""Which module has a weight, and whose state the weight goes by: that of the layer which has it.

``torch.utils.swap_tensors`` exchanges weights with everything that they carry, and an assignment puts the weight of one
layer into another one. Layers look in their forward; in a graph, where that is traced once, each flattening of a weight
does. A weight that several layers have goes by the state of one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from hybridtensor.state import LayerState, StateTensors
from hybridtensor.subclasses.record import Place, WeightRecord

if TYPE_CHECKING:
    from hybridtensor.recipes.config import HybridConfig


class LayerRecipe(NamedTuple):
    """The recipe of a converted layer and the state of its quantizers."""

    config: HybridConfig
    state: LayerState


_places: weakref.WeakKeyDictionary[LayerState, list[Place]] = weakref.WeakKeyDictionary()
_recipes: weakref.WeakKeyDictionary[nn.Module, Mapping[str, LayerRecipe]] = (
    weakref.WeakKeyDictionary()
)


def set_owner(module: nn.Module, recipes: Mapping[str, LayerRecipe]) -> None:
    """Record the recipes of all weights of a module, by their names; none of a layer that is plain again."""
    _recipes[module] = recipes
    reference = weakref.ref(module)
    for recipe in recipes.values():
        names = [name for name, other in recipes.items() if other.state is recipe.state]
        _places[recipe.state] = [Place(reference, name) for name in names]


def owner_of(state: LayerState) -> nn.Module | None:
    """Return the module that a state is of, or None if that is unknown."""
    known = _places.get(state)
    return None if not known else known[0].module()


def place_of(state: LayerState, record: WeightRecord) -> Place | None:
    """Return the place of a state's own weight if it has this record, now."""
    return next((place for place in _places.get(state, ()) if place.has(record)), None)


def is_shared(record: WeightRecord, module: nn.Module) -> bool:
    """Return whether a weight of ``module`` goes by the state of another module, which has it, too."""
    state = record.layer
    if not isinstance(state, LayerState) or owner_of(state) is module:
        return False
    return place_of(state, record) is not None


def is_of_another(record: WeightRecord, module: nn.Module) -> bool:
    """Return whether a weight of ``module`` is a copy of that of another module, and has that one's state."""
    state = record.layer
    if not isinstance(state, LayerState) or place_of(state, record) is not None:
        return False
    owner = owner_of(state)
    return record.is_copy if owner is None else owner is not module


def go_by(
    recipe: LayerRecipe, record: WeightRecord, config: HybridConfig | None, module: nn.Module
) -> None:
    """Let a weight of ``module`` that has another state go by that of its layer, unless another module has it, too.

    Args:
        recipe: Recipe and state of the layer.
        record: The weight's.
        config: The weight's; a weight of another recipe keeps that and its state.
        module: The layer.
    """
    record.is_new, record.is_copy = 0, False  # a layer has it: no adapter's
    if config != recipe.config or isinstance(record.layer, StateTensors):  # which a graph has
        return
    if record.layer is recipe.state or is_shared(record, module):
        return
    record.layer = recipe.state
    record.changes += 1  # faces may be of other scales


def settle(record: WeightRecord, config: HybridConfig | None) -> None:
    """Let a weight go by the state of the layer that has it, if it is not where it was found last.

    Args:
        record: The weight's.
        config: The weight's.
    """
    if not isinstance(record.layer, LayerState) or (
        record.place is not None and record.place.has(record)
    ):
        return
    record.place = place_of(record.layer, record)
    if record.place is not None:
        return
    for module, recipes in list(_recipes.items()):
        for name, recipe in recipes.items():
            place = Place(weakref.ref(module), name)
            if place.has(record):
                record.place = place
                go_by(recipe, record, config, module)
                return

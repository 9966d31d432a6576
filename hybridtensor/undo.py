"""Conversions that succeed for all layers of a model, or leave it as it was."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from hybridtensor.distributed.checkpoint.undo import Undo, of_slots, run_all
from hybridtensor.distributed.fsdp.hooks import part_of, sharded_as
from hybridtensor.layers import Layer
from hybridtensor.linear.layer_forward import recipe_of
from hybridtensor.state.training import layer_states
from hybridtensor.subclasses import HybridTensor, is_converted

Container = TypeVar("Container", dict[str, object], set[object])


@contextlib.contextmanager
def all_or_nothing(model: nn.Module, layers: Iterable[Layer]) -> Iterator[list[Undo]]:
    """Restore the model if the block raises; yields a list for functions that undo its swaps.

    The block leaves inference mode, since what it makes is trained later.
    """
    undo = [back for holder in _holders(model, layers) for back in _former(holder)]
    swaps: list[Undo] = []
    try:
        with torch.inference_mode(False):
            yield swaps
    except BaseException as error:
        run_all("quantize_: the model is not as it was", [*undo, *swaps], error)
        raise


def _holders(model: nn.Module, layers: Iterable[Layer]) -> list[object]:
    """Return the objects that a conversion changes: modules, states, common scales, weights."""
    parts = [part_of(layer.weight) for layer in layers]
    recipes = [recipe for layer in layers if (recipe := layer.recipe) is not None]
    scales = [recipe.state.common for recipe in recipes if recipe.state.common is not None]
    siblings = [recipe_of(module) for one in scales for module in one.modules if module is not None]
    states = [recipe.state for recipe in (*recipes, *siblings) if recipe is not None]
    found = [*model.modules(), *layer_states(model), *states, *scales]
    return [
        *dict.fromkeys(found),
        *{id(part): part for part in parts if is_converted(part)}.values(),
    ]


def _former(holder: object) -> Iterator[Undo]:
    """Yield functions that restore an object's attributes, dictionaries and sets."""
    own = vars(holder)
    yield functools.partial(_refill, own, dict(own))
    for value in own.values():
        if type(value) in (dict, OrderedDict, set):  # whose handles of hooks know the object itself
            yield functools.partial(_refill, value, value.copy())
    if isinstance(holder, HybridTensor):
        yield of_slots(holder.high_precision)
        config = holder.config
        shard = None if config is None else sharded_as(holder, config)
        if config is not None and shard is not None:
            yield functools.partial(shard.adopt, config)


def _refill(container: Container, former: Container) -> None:
    container.clear()
    container.update(former)

"""Whose state a weight goes by: that of the layer which has it, also where it came from another layer.

``torch.utils.swap_tensors`` exchanges weights with everything that they carry, and an assignment puts the weight of one
layer into another one. A weight that several layers have goes by the state of one of them.
"""

from __future__ import annotations

import weakref

from torch import nn

from hybridtensor.dtensor import local
from hybridtensor.linear.operands import WEIGHTS, Weight
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.state import LayerState, StateTensors

_owners: weakref.WeakKeyDictionary[LayerState, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""The module that a state is of."""


def set_owner(states: list[LayerState], module: nn.Module) -> None:
    """Record the module that states are of."""
    for state in states:
        _owners[state] = weakref.ref(module)


def go_by(state: LayerState, weight: Weight, config: HybridConfig, module: nn.Module) -> None:
    """Let a weight of ``module`` that has another state go by ``state``, unless it is shared with that one's module.

    Args:
        state: State of the module's weight.
        weight: The weight that is there.
        config: Recipe of the module; a weight of another one keeps its recipe and state.
        module: The module.
    """
    record, before = weight.record, weight.record.layer
    if weight.config != config or isinstance(before, StateTensors):  # which a graph has
        return
    known = None if before is None else _owners.get(before)
    owner = None if known is None else known()
    if owner is not None and owner is not module and _has(owner, weight):
        return
    record.layer = state
    record.changes += 1  # faces may be of other scales


def _has(module: nn.Module, weight: Weight) -> bool:
    """Return whether a weight is among a module's parameters."""
    parts = [local(parameter) for parameter in module.parameters(recurse=False)]
    return any(isinstance(part, WEIGHTS) and part.record is weight.record for part in parts)

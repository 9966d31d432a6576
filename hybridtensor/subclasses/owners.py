"""Which module a layer's state is of."""

from __future__ import annotations

import weakref

from torch import nn

from hybridtensor.dtensor import local
from hybridtensor.state import LayerState
from hybridtensor.subclasses.record import WeightRecord

_owners: weakref.WeakKeyDictionary[LayerState, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def set_owner(states: list[LayerState], module: nn.Module) -> None:
    """Record the module that states are of."""
    for state in states:
        _owners[state] = weakref.ref(module)


def owner_of(state: LayerState) -> nn.Module | None:
    """Return the module that a state is of, or None if that is unknown."""
    known = _owners.get(state)
    return None if known is None else known()


def has(module: nn.Module, record: WeightRecord) -> bool:
    """Return whether the weight of a record is among a module's parameters."""
    parts = [local(parameter) for parameter in module.parameters(recurse=False)]
    return any(getattr(part, "record", None) is record for part in parts)

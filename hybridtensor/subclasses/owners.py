"""Which module a layer's state is of, and by which names its weight is there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from hybridtensor.dtensor import local
from hybridtensor.state import LayerState
from hybridtensor.subclasses.record import WeightRecord

_Owner = tuple[weakref.ref[nn.Module], list[str]]
_owners: weakref.WeakKeyDictionary[LayerState, _Owner] = weakref.WeakKeyDictionary()


def set_owner(states: Mapping[str, LayerState], module: nn.Module) -> None:
    """Record the module that states are of, by the names of its weights."""
    for state in states.values():
        names = [name for name, other in states.items() if other is state]
        _owners[state] = weakref.ref(module), names


def owner_of(state: LayerState) -> nn.Module | None:
    """Return the module that a state is of, or None if that is unknown."""
    known = _owners.get(state)
    return None if known is None else known[0]()


def is_of(state: LayerState, record: WeightRecord) -> bool:
    """Return whether the weight of the module that a state is of has this record, now."""
    module, (_, names) = owner_of(state), _owners.get(state, (None, []))
    found = [] if module is None else [module._parameters.get(name) for name in names]
    parts = [local(parameter) for parameter in found if parameter is not None]
    return any(getattr(part, "record", None) is record for part in parts)

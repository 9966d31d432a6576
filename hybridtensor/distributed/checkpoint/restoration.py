"""From a checkpoint back to modules, optimizers and other objects."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from hybridtensor.distributed.checkpoint.entries import Entries, holds_tensors
from hybridtensor.distributed.checkpoint.plain import StateDict, memory_like
from hybridtensor.distributed.checkpoint.planners import Opaque
from hybridtensor.dtensor import local
from hybridtensor.state import weight_of_state
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.quantizing import refresh_
from hybridtensor.untrusted.manifest import Manifest

KeyPath: TypeAlias = tuple[str | int, ...]
"""Keys and indices that lead to a value in a nested state, the name of an entry first."""


class Restoration:
    """Plan for loading a checkpoint into entries.

    The planner reads into ``target``; then ``finish`` loads modules, optimizers and other objects, and ``fill`` writes
    data.

    Attributes:
        entries: What is loaded into.
        target: What the planner reads into: the memory of the entries, and new tensors for what has none.
        begun: Names of the objects whose ``load_state_dict`` was called, which a failed load calls again.
    """

    def __init__(self, entries: Entries, manifest: Manifest, metadata: Metadata) -> None:
        self.entries = entries
        self._stored = set(metadata.state_dict_metadata)
        named = [flat.partition(".masters.") for flat in self._stored if ".masters." in flat]
        self._masters = {
            name: entry for entry, _, name in named if manifest.entries.get(entry) == "optimizer"
        }
        self._with_faces = {_weight_of_face(flat) for flat in self._stored}
        self._weights = manifest.weights
        # Only then do names of masters begin with that of their module
        self._has_several_modules = list(manifest.entries.values()).count("module") > 1
        self._loaded: dict[str, StateDict] = {}  # by module, what load_state_dict gets
        self.begun: list[str] = []
        # Containers that ``fill`` changed, with their contents before
        self._former: list[tuple[Any, Any]] = []
        # What makes the values and faces of persistent weights fit each other, once all is loaded
        self._settle: list[Callable[[], None]] = []
        self.target: StateDict = {}
        for name, optimizer in entries.optimizers.items():
            self.target[name] = optimizer.target(metadata)
            masters = {
                n: m for n, m in optimizer.masters.items() if f"{name}.masters.{n}" in self._stored
            }
            self.target[name]["masters"] = masters
        for entry, values in entries.values.items():
            self.target[entry], self._loaded[entry] = {}, {}
            for name, value in values.items():
                self._add(entry, name, value)
        for entry, kind in entries.kinds.items():
            if kind in ("stateful", "data"):
                self.target[entry] = self._other(entry, kind, metadata)

    def _other(self, entry: str, kind: str, metadata: Metadata) -> object:
        """Return a load target for data, or for an object with a state dict."""
        value = self.entries.state[entry]
        own = value.state_dict() if kind == "stateful" else value
        # ``planner_data`` is private to torch's planners: the path of each flat name. Without it
        # only the keys that the entry has now would be loaded.
        paths = {
            n: p
            for n, p in (metadata.planner_data or {}).items()
            if p[0] == entry and n in self._stored
        }
        if entry in paths or not paths:
            return _containers(own) if holds_tensors(own) else Opaque(None)
        return _with_room(
            own, entry, {n: (p, metadata.state_dict_metadata[n]) for n, p in paths.items()}
        )

    def _has_same_recipe(self, full: str) -> bool:
        return self._weights.get(full) == self.entries.weights.get(full)

    def _add(self, entry: str, name: str, value: object) -> None:
        weight = weight_of_state(name)
        if weight is not None and not self._has_same_recipe(f"{entry}.{weight}"):
            return  # load_state_dict starts it afresh
        if isinstance(value, Tensor) and isinstance(local(value), HybridTensor):
            self._add_persistent(entry, name, value)
            return
        self._loaded[entry][name] = value
        if isinstance(value, Tensor):
            self._add_values(entry, name, value)
        else:  # the extra state of a module, which may hold on to what it gave
            self.target[entry][name] = _containers(value)

    def _add_values(self, entry: str, name: str, value: Tensor) -> None:
        """Load high-precision values: as they are stored, or from a master."""
        master = self._master_for_values(entry, name)
        if master is None:
            self.target[entry][name] = value
        else:
            optimizer, stepped = master
            self.target.setdefault(optimizer, {}).setdefault("masters", {})[stepped] = value

    def _master_for_values(self, entry: str, name: str) -> tuple[str, str] | None:
        """Return the master that is stored in place of a weight's values; see ``_stored_master``."""
        is_stored = f"{entry}.{name}" in self._stored
        return None if is_stored else self._stored_master(entry, name)

    def _stored_master(self, entry: str, name: str) -> tuple[str, str] | None:
        """Return the optimizer, and the name in it, under which a master of a weight is stored."""
        stepped = self.entries.name_of.get(id(self.entries.parameters[entry].get(name)), name)
        if self._has_several_modules:
            is_full = len(self.entries.modules) > 1
            name, stepped = f"{entry}.{name}", stepped if is_full else f"{entry}.{stepped}"
        return next(((self._masters[n], n) for n in (name, stepped) if n in self._masters), None)

    def _add_persistent(self, entry: str, name: str, value: Tensor) -> None:
        """Load the faces, or rebuild them from masters or other values."""
        full = f"{entry}.{name}"
        parameter = self.entries.parameters[entry][name]
        master = self.entries.master(entry, name)
        if self._has_same_recipe(full) and full in self._with_faces:
            self.target[entry][name] = value
            self._loaded[entry][name] = value
            known, stored = _persistent(parameter).high_precision, self._stored_master(entry, name)
            self._settle.append(known.release_original if stored is None else known.leave_values)
        elif master is not None and any(
            master is m for t in self.target.values() for m in _masters(t)
        ):
            self._settle.append(lambda: refresh_(_persistent(parameter), local(master)))
        else:
            in_fp32 = master is not None or self._master_for_values(entry, name) is not None
            values = memory_like(value, torch.float32 if in_fp32 else value.dtype)
            self._add_values(entry, name, values)
            self._settle.append(lambda: _take_values(parameter, values, master))

    def extra(self, metadata: Metadata, planned: set[str]) -> list[str]:
        """Return the tensors that a checkpoint has of the loaded modules and that these lack."""
        found = []
        for flat in metadata.state_dict_metadata:
            entry, _, name = flat.partition(".")
            if entry not in self._loaded or flat in planned:
                continue
            weight = weight_of_state(name) or _weight_of_face(name) or name
            # Of a weight with another recipe, the values are loaded alone.
            is_here = weight in self.entries.parameters[entry]
            if not is_here or self._has_same_recipe(f"{entry}.{weight}"):
                found.append(flat)
        return found

    def finish(self) -> None:
        """Load what was read into modules, optimizers and other stateful objects."""
        entries = self.entries
        for entry, loaded in self._loaded.items():
            if loaded:
                # tensors were read in place
                taken = {
                    name: value if isinstance(value, Tensor) else self.target[entry][name]
                    for name, value in loaded.items()
                }
                # Not strict: what ``_add`` left out has no entry, and its quantizers start afresh.
                set_model_state_dict(
                    entries.modules[entry], taken, options=StateDictOptions(strict=False)
                )
        for name, optimizer in entries.optimizers.items():
            optimizer.restore(self.target[name])
        # After modules and optimizers: quantizing from a master needs the scales and masters that
        # were loaded.
        with torch.no_grad():
            for settle in self._settle:
                settle()
        for entry, kind in entries.kinds.items():
            if kind == "stateful":
                self.begun.append(entry)
                own = entries.state[entry].state_dict()
                entries.state[entry].load_state_dict(_as_in(own, self.target[entry]))

    def fill(self) -> None:
        """Write data into the state: last, because no object's ``load_state_dict`` can fail after it."""
        state = self.entries.state
        self._former.append((state, dict(state)))
        for entry, kind in self.entries.kinds.items():
            if kind == "data":
                own, found = state[entry], self.target[entry]
                state[entry] = _filled(own, found, self._former) if holds_tensors(own) else found

    def empty(self) -> None:
        """Undo ``fill``."""
        while self._former:
            holder, former = self._former.pop()
            holder.clear()
            if isinstance(holder, dict):
                holder.update(former)
            else:
                holder.extend(former)


def _weight_of_face(name: str) -> str | None:
    """Return the weight of whose face ``name`` is a tensor, or None."""
    # The longest: a module on the way may have such a name, too.
    return (
        max((name.rpartition(f".{face}.")[0] for face in HybridTensor.inner_names), key=len) or None
    )


def _with_room(own: object, entry: str, stored: dict[str, tuple[KeyPath, STORAGE_TYPES]]) -> object:
    """Return an entry in new containers, extended by the keys and items that the checkpoint has beyond them."""
    missing = [
        (path, found) for path, found in stored.values() if not _leads_to_value(own, path[1:])
    ]
    root = {entry: _containers(own)}
    for path, found in missing:
        room: Tensor | Opaque = Opaque(None)
        if isinstance(found, TensorStorageMetadata):
            room = torch.empty(found.size, dtype=found.properties.dtype)
        _place(root, path, room)
    return root[entry]


def _leads_to_value(value: object, path: KeyPath) -> bool:
    """Return whether ``path`` leads to something other than a container."""
    for key in path:
        if isinstance(value, (list, tuple)):
            if not isinstance(key, int) or key >= len(value):
                return False
            value = value[key]
        elif isinstance(value, Mapping) and key in value:
            value = value[key]
        else:
            return False
    return not isinstance(value, (Mapping, list, tuple))


def _containers(value: object) -> object:
    """Return new containers of the same values."""
    if isinstance(value, Mapping):
        return {key: _containers(inner) for key, inner in value.items()}
    return [_containers(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _as_in(own: object, loaded: object) -> object:
    """Return the loaded values in the kinds of containers that ``own`` has."""
    if isinstance(own, Mapping) and isinstance(loaded, dict):
        found = {key: _as_in(own.get(key), value) for key, value in loaded.items()}
        return OrderedDict(found) if isinstance(own, OrderedDict) else found
    if isinstance(own, (list, tuple)) and isinstance(loaded, list):
        items = [_as_in(own[i] if i < len(own) else None, item) for i, item in enumerate(loaded)]
        return tuple(items) if isinstance(own, tuple) else items
    return loaded


def _filled(own: object, loaded: object, former: list[tuple[Any, Any]]) -> object:
    """Load into nested dictionaries and lists in place; ``former`` collects each container with its old contents."""
    if isinstance(own, dict) and isinstance(loaded, dict):
        former.append((own, dict(own)))
        for key, value in loaded.items():
            own[key] = _filled(own.get(key), value, former)
        return own
    if isinstance(own, list) and isinstance(loaded, list):
        former.append((own, list(own)))
        # The caller may hold a reference to this very list or dictionary: it is filled, not
        # replaced.
        known = [own[i] if i < len(own) else None for i in range(len(loaded))]
        own[:] = [_filled(before, item, former) for before, item in zip(known, loaded, strict=True)]
        return own
    return _as_in(own, loaded)


def _place(holder: Any, path: KeyPath, value: object) -> None:
    """Set the value at a path, creating the dictionaries on the way."""
    key, *rest = path
    if isinstance(holder, list) and isinstance(key, int):
        holder.extend([None] * (key + 1 - len(holder)))
    if not rest:
        holder[key] = value
        return
    kind = dict if isinstance(rest[0], str) else list
    inner = holder.get(key) if isinstance(holder, dict) else holder[key]
    if not isinstance(inner, kind):
        inner = holder[key] = kind()
    _place(inner, tuple(rest), value)


def _masters(target: object) -> Iterator[object]:
    """Yield the masters among what is loaded into one entry."""
    if isinstance(target, dict) and isinstance(target.get("masters"), dict):
        yield from target["masters"].values()


def _persistent(parameter: nn.Parameter) -> HybridTensor:
    weight = local(parameter)
    if not isinstance(weight, HybridTensor):
        raise TypeError(
            f"checkpoint.load: a persistent weight became {type(weight).__name__} while it was "
            "loaded"
        )
    return weight


def _take_values(parameter: nn.Parameter, values: Tensor, master: Tensor | None) -> None:
    """Quantize a persistent weight from high-precision values, and write them to its master."""
    weight, own = _persistent(parameter), local(values)
    if master is not None:
        local(master).copy_(own)
    refresh_(weight, own)

"""From modules, optimizers and other objects to what is stored, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from hybridtensor.distributed.checkpoint.manifest import Manifest, Weight
from hybridtensor.distributed.checkpoint.optimizers import NamedOptimizer
from hybridtensor.distributed.checkpoint.plain import as_part_of, named_parameters
from hybridtensor.distributed.checkpoint.planners import Opaque
from hybridtensor.dtensor import local
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.quantizing import refresh_

_STATE = "quantization_state"


class Training:
    """Everything that a checkpoint holds, sorted by what it is.

    Args:
        state: Names to modules, optimizers of their parameters, objects with ``state_dict`` and
            ``load_state_dict``, and data.

    Attributes:
        kinds: What each entry is.
        weights: Converted weights by ``entry.name``, tied ones by each of their names.
        recipes: Fingerprint to recipe in words.
        optimizers: Those among the entries.

    Raises:
        TypeError: If ``state`` is not a dictionary with string keys.
        ValueError: If it is empty, a name has a dot, or an optimizer steps parameters of no module
            in it.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError(
                "checkpoint: a dictionary from names to modules, optimizers and data is required, got "
                f"{type(state).__name__}"
            )
        if not state or any("." in name or not name for name in state):
            raise ValueError(f"checkpoint: names without dots are required, got {list(state)}")
        self.state = state
        self.kinds = {name: _kind(value) for name, value in state.items()}
        self._modules = {name: state[name] for name, kind in self.kinds.items() if kind == "module"}
        self._values = {
            name: get_model_state_dict(module) for name, module in self._modules.items()
        }
        self._parameters = {
            name: dict(named_parameters(module)) for name, module in self._modules.items()
        }
        self.weights: dict[str, Weight] = {}
        self.recipes: dict[str, str] = {}
        self._note_weights()
        several = len(self._modules) > 1
        names = {
            id(parameter): f"{entry}.{name}" if several else name
            for entry, parameters in self._parameters.items()
            for name, parameter in reversed(parameters.items())  # the first of several names counts
        }
        self._prefix = {entry: f"{entry}." if several else "" for entry in self._modules}
        self._name_of = names
        self.optimizers = {
            name: NamedOptimizer(name, state[name], names)
            for name, kind in self.kinds.items()
            if kind == "optimizer"
        }

    def _note_weights(self) -> None:
        for entry, parameters in self._parameters.items():
            for name, parameter in parameters.items():
                weight = local(parameter)
                if not isinstance(weight, (MasterWeight, HybridTensor)):
                    continue
                if weight.config is None:
                    raise ValueError(
                        f"checkpoint: a weight with a recipe is required, got {entry}.{name} without one"
                    )
                kind = "master" if isinstance(weight, MasterWeight) else "persistent"
                fingerprint = weight.config.fingerprint()
                self.weights[f"{entry}.{name}"] = Weight(kind, fingerprint)
                self.recipes[fingerprint] = str(weight.config)

    @property
    def groups(self) -> dict[str, list[list[str]]]:
        """Names of parameters in each group of each optimizer."""
        return {name: optimizer.groups for name, optimizer in self.optimizers.items()}

    def _master(self, entry: str, name: str) -> Tensor | None:
        """Return the fp32 master of a persistent weight, if an optimizer here has it."""
        stepped = self._name_of.get(id(self._parameters[entry].get(name)))
        found = (o.masters[stepped] for o in self.optimizers.values() if stepped in o.masters)
        return next(found, None)

    # -- saving
    # -------------------------------------------------------------------------------------------------------

    def collect(self, *, faces: bool) -> dict[str, Any]:
        """Return what is saved; with ``faces=False`` without faces that follow from a master that
        is saved.
        """
        found: dict[str, Any] = {}
        for entry, value in self.state.items():
            kind = self.kinds[entry]
            if kind == "module":
                found[entry] = {
                    name: v
                    for name, v in self._values[entry].items()
                    if faces or not self._rebuilt(entry, name, v)
                }
            elif kind == "optimizer":
                found[entry] = self.optimizers[entry].state()
            else:
                own = value.state_dict() if kind == "stateful" else value
                found[entry] = own if _has_parts(own) else Opaque(own)
        return found

    def _rebuilt(self, entry: str, name: str, value: Any) -> bool:
        """Whether the faces of a weight follow from its master alone."""
        weight = local(value)
        return (
            isinstance(weight, HybridTensor)
            and weight.recipe.weight.repeatable
            and weight.high_precision.follows
            and self._master(entry, name) is not None
        )

    # -- loading
    # ------------------------------------------------------------------------------------------------------

    def differences(self, manifest: Manifest) -> list[str]:
        """Return in which weights a checkpoint has another recipe than the model."""
        entries = tuple(f"{entry}." for entry in self._modules)
        stored = {
            name: weight for name, weight in manifest.weights.items() if name.startswith(entries)
        }

        def told(weight: Weight | None, recipes: dict[str, str]) -> str:
            if weight is None:
                return "not quantized"
            return f"{recipes.get(weight.fingerprint, weight.fingerprint)} ({weight.kind})"

        return [
            f"{name}: {told(stored.get(name), manifest.recipes)} there, "
            f"{told(self.weights.get(name), self.recipes)} here"
            for name in sorted({*stored, *self.weights})
            if stored.get(name) != self.weights.get(name)
        ]

    def check_entries(self, manifest: Manifest) -> None:
        """Raise ValueError if a checkpoint lacks an entry, has one of another kind, or optimizers
        with other groups.
        """
        for name, kind in self.kinds.items():
            if manifest.entries.get(name) != kind:
                raise ValueError(
                    f"checkpoint.load: an entry {name!r} ({kind}) is required, got a checkpoint with {manifest.entries}"
                )
        for name, optimizer in self.optimizers.items():
            optimizer.check_groups(manifest.groups.get(name))


class Restoration:
    """How a checkpoint becomes the state of a training.

    Args:
        training: What is loaded into.
        manifest: Of the checkpoint.
        metadata: Of the checkpoint.

    Attributes:
        target: What the planner loads into, mostly the memory of the state itself.
    """

    def __init__(self, training: Training, manifest: Manifest, metadata: Metadata) -> None:
        self.training = training
        self._stored = set(metadata.state_dict_metadata)
        named = [flat.partition(".masters.") for flat in self._stored if ".masters." in flat]
        self._masters = {
            name: entry for entry, _, name in named if manifest.entries.get(entry) == "optimizer"
        }
        self._with_faces = {
            flat.rpartition(f".{d}.")[0] for flat in self._stored for d in ("rowwise", "columnwise")
        }
        self._weights = manifest.weights
        self._loaded: dict[str, dict[str, Any]] = {}  # by module, what load_state_dict gets
        self._after: list[Callable[[], None]] = []
        self.target: dict[str, Any] = {}
        for name, optimizer in training.optimizers.items():
            self.target[name] = optimizer.target(metadata)
            masters = {
                n: m for n, m in optimizer.masters.items() if f"{name}.masters.{n}" in self._stored
            }
            self.target[name]["masters"] = masters
        for entry, values in training._values.items():
            self.target[entry], self._loaded[entry] = {}, {}
            for name, value in values.items():
                self._add(entry, name, value)
        for entry, kind in training.kinds.items():
            if kind in ("stateful", "data"):
                self.target[entry] = self._other(entry, kind, metadata)

    def _other(self, entry: str, kind: str, metadata: Metadata) -> Any:
        value = self.training.state[entry]
        own = value.state_dict() if kind == "stateful" else value
        paths = {
            n: p
            for n, p in (metadata.planner_data or {}).items()
            if p[0] == entry and n in self._stored
        }
        if entry in paths or not paths:
            return own if _has_parts(own) else Opaque(None)
        return _with_room(
            own, entry, {n: (p, metadata.state_dict_metadata[n]) for n, p in paths.items()}
        )

    def _same(self, full: str) -> bool:
        return self._weights.get(full) == self.training.weights.get(full)

    def _add(self, entry: str, name: str, value: Any) -> None:
        """Plan one tensor of a module."""
        layer, _, rest = name.rpartition(f"{_STATE}.")
        if rest and not self._same(f"{entry}.{layer}weight"):
            return  # load_state_dict starts it afresh
        if isinstance(local(value), HybridTensor):
            self._add_persistent(entry, name, value)
        else:
            self._loaded[entry][name] = value
            if isinstance(value, Tensor):
                self._add_values(entry, name, value)
            else:
                self.target[entry][name] = value

    def _add_values(self, entry: str, name: str, value: Tensor) -> None:
        """Load high-precision values: as they are stored, or from a master."""
        master = self._stored_master(entry, name)
        if f"{entry}.{name}" in self._stored or master is None:
            self.target[entry][name] = value
        else:
            optimizer, stepped = master
            self.target.setdefault(optimizer, {}).setdefault("masters", {})[stepped] = value

    def _stored_master(self, entry: str, name: str) -> tuple[str, str] | None:
        """Return where the checkpoint has a master of a weight: optimizer and name there."""
        candidates: set[Any] = {
            name,
            f"{entry}.{name}",
            self.training._name_of.get(id(self.training._parameters[entry].get(name))),
        }
        return next(
            ((self._masters[n], n) for n in sorted(candidates & self._masters.keys())), None
        )

    def _add_persistent(self, entry: str, name: str, value: Tensor) -> None:
        """Load the faces, or rebuild them from masters or other values."""
        full = f"{entry}.{name}"
        parameter = self.training._parameters[entry][name]
        master = self.training._master(entry, name)
        if self._same(full) and full in self._with_faces:
            self.target[entry][name] = value
            self._loaded[entry][name] = value
            self._after.append(local(parameter).high_precision.let_go)
        elif master is not None and any(
            master is m for t in self.target.values() for m in _masters(t)
        ):
            self._after.append(lambda: _refresh(parameter, master))
        else:
            values = _memory_like(value, torch.float32 if master is not None else value.dtype)
            self._add_values(entry, name, values)
            self._after.append(lambda: _take_values(parameter, values, master))

    def extra(self, metadata: Metadata, planned: set[str]) -> list[str]:
        """Return what a checkpoint has of the modules that are loaded, and the modules have not."""
        found = []
        for flat in metadata.state_dict_metadata:
            entry, _, name = flat.partition(".")
            layer, _, state = name.rpartition(f"{_STATE}.")
            weight = next((name[: -len(d) - 1 - len(tail)] for d, tail in _face_tails(name)), name)
            skipped = (state and not self._same(f"{entry}.{layer}weight")) or not self._same(
                f"{entry}.{weight}"
            )
            if entry in self._loaded and flat not in planned and not skipped:
                found.append(flat)
        return found

    def finish(self) -> None:
        """Have modules, optimizers and other objects take what was loaded."""
        training = self.training
        for entry, loaded in self._loaded.items():
            if loaded:
                set_model_state_dict(
                    training._modules[entry], loaded, options=StateDictOptions(strict=False)
                )
        for name, optimizer in training.optimizers.items():
            optimizer.restore(self.target[name])
        with torch.no_grad():
            for act in self._after:
                act()
        for entry, kind in training.kinds.items():
            if kind == "stateful":
                training.state[entry].load_state_dict(self.target[entry])
            elif kind == "data":
                training.state[entry] = self.target[entry]


def _face_tails(name: str) -> Iterator[tuple[str, str]]:
    """Yield direction and the rest where ``name`` is that of a tensor of a face."""
    for direction in ("rowwise", "columnwise"):
        weight, found, tail = name.rpartition(f".{direction}.")
        if found and weight:
            yield direction, f".{tail}"


def _kind(value: Any) -> str:
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "stateful" if isinstance(value, Stateful) else "data"


def _has_parts(value: Any) -> bool:
    """Whether there is a tensor in it that is loaded in place, or of which ranks hold parts."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and any(map(_has_parts, value.values()))
    return isinstance(value, list) and any(map(_has_parts, value))


def _with_room(own: Any, entry: str, stored: dict[str, tuple[tuple[Any, ...], Any]]) -> Any:
    """Return what an entry has, in place, and places for what else is stored of it: keys and items
    that came later.

    Args:
        own: What the entry has.
        entry: Its name.
        stored: Paths, which begin with the entry, and metadata of what is stored of it.
    """
    missing = [
        (path, found) for path, found in stored.values() if not _leads_to_value(own, path[1:])
    ]
    if not missing:
        return own
    root = {entry: _containers(own)}
    for path, found in missing:
        is_tensor = isinstance(found, TensorStorageMetadata)
        _place(
            root,
            path,
            torch.empty(found.size, dtype=found.properties.dtype) if is_tensor else Opaque(None),
        )
    return root[entry]


def _leads_to_value(value: Any, path: tuple[Any, ...]) -> bool:
    """Whether there is something other than a container where a path leads."""
    for key in path:
        known = isinstance(value, Mapping) and key in value
        known |= isinstance(value, (list, tuple)) and isinstance(key, int) and key < len(value)
        if not known:
            return False
        value = value[key]
    return not isinstance(value, (Mapping, list, tuple))


def _containers(value: Any) -> Any:
    """Return new containers of the same values."""
    if isinstance(value, Mapping):
        return {key: _containers(inner) for key, inner in value.items()}
    return [_containers(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _place(holder: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put a value where a path leads, through containers that are made where there are none."""
    key, *rest = path
    if isinstance(holder, list):
        holder.extend([None] * (key + 1 - len(holder)))
    if not rest:
        holder[key] = value
        return
    kind = dict if isinstance(rest[0], str) else list
    inner = holder.get(key) if isinstance(holder, dict) else holder[key]
    if not isinstance(inner, kind):
        inner = holder[key] = kind()
    _place(inner, tuple(rest), value)


def _masters(target: Any) -> Iterator[Any]:
    """Yield the masters among what is loaded into one entry."""
    if isinstance(target, dict) and isinstance(target.get("masters"), dict):
        yield from target["masters"].values()


def _memory_like(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for the values of a persistent weight."""
    own = local(value)
    mine = torch.zeros(own.shape, dtype=dtype, device=own.device)
    return as_part_of(value, mine, tuple(value.shape)) if isinstance(value, DTensor) else mine


def _refresh(parameter: Any, master: Tensor) -> None:
    """Quantize a persistent weight from its master."""
    refresh_(local(parameter), local(master))


def _take_values(parameter: Any, values: Tensor, master: Tensor | None) -> None:
    """Quantize a persistent weight from values, which its master gets too."""
    weight, own = local(parameter), local(values)
    if master is not None:
        local(master).copy_(own)
    refresh_(weight, own)

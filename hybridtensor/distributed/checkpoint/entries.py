"""Collect the tensors and data that a checkpoint stores of modules, optimizers and other objects."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from hybridtensor.arguments import require_shape
from hybridtensor.distributed.checkpoint.optimizers import NamedOptimizer
from hybridtensor.distributed.checkpoint.plain import (
    StateDict,
    common_to_parts,
    named_parameters,
    named_tensors,
)
from hybridtensor.distributed.checkpoint.planners import Opaque
from hybridtensor.dtensor import local
from hybridtensor.masters import follows_from_master
from hybridtensor.printed import some
from hybridtensor.subclasses import HybridTensor, MasterWeight, is_converted
from hybridtensor.untrusted.manifest import Manifest, Weight

_EXAMPLE = '{"model": model, "optimizer": optimizer}'


class Entries:
    """The entries of the state that a checkpoint holds, sorted by their kind.

    Args:
        state: Names to modules, optimizers of their parameters, objects with ``state_dict`` and
            ``load_state_dict``, and data.

    Attributes:
        state: Names to entries, as given.
        kinds: Kind of each entry: ``"module"``, ``"optimizer"``, ``"stateful"`` or ``"data"``.
        modules: Those among the entries.
        values: State dict of each module.
        parameters: Parameters of each module by name, tied ones under each name.
        weights: Converted weights by ``entry.name``, tied ones by each of their names.
        recipes: Fingerprint to recipe in words.
        name_of: Name of each parameter for optimizers, by ``id``.
        optimizers: Those among the entries.

    Raises:
        TypeError: If ``state`` is not a dictionary with string keys.
        ValueError: If it is empty, a name has a dot, or an optimizer steps parameters of no module in it, or a
            lazy layer never ran.
    """

    def __init__(self, state: StateDict) -> None:
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise TypeError(
                "checkpoint: a dictionary from names to modules, optimizers and data is required, got "
                f"{type(state).__name__}; pass {_EXAMPLE}"
            )
        wrong = [repr(name) for name in state if "." in name or not name]
        if wrong or not state:
            got = f"{some(wrong, between=', ')} (of a state dict?)" if wrong else "none"
            raise ValueError(
                f"checkpoint: names without dots are required, got {got}; pass {_EXAMPLE}"
            )
        self.state = state
        self.kinds = {name: _kind(value) for name, value in state.items()}
        self.modules = {name: state[name] for name, kind in self.kinds.items() if kind == "module"}
        for entry, module in self.modules.items():
            for name, tensor in named_tensors(module):
                require_shape("checkpoint", f"{entry}.{name}", tensor)
        self.values = {name: get_model_state_dict(module) for name, module in self.modules.items()}
        self.parameters = {
            name: dict(named_parameters(module)) for name, module in self.modules.items()
        }
        self.weights: dict[str, Weight] = {}
        self.recipes: dict[str, str] = {}
        self._add_weights()
        several = len(self.modules) > 1
        names = {
            id(parameter): f"{entry}.{name}" if several else name
            for entry, parameters in self.parameters.items()
            for name, parameter in reversed(parameters.items())  # the first of several names counts
        }
        self.name_of = names
        self.optimizers = {
            name: NamedOptimizer(name, state[name], names)
            for name, kind in self.kinds.items()
            if kind == "optimizer"
        }

    def _add_weights(self) -> None:
        for entry, parameters in self.parameters.items():
            for name, parameter in parameters.items():
                weight = local(parameter)
                if not is_converted(weight):
                    continue
                if weight.config is None:
                    raise ValueError(
                        f"checkpoint: the weight {entry}.{name} has no recipe; save the model of "
                        "quantize_"
                    )
                kind = "master" if isinstance(weight, MasterWeight) else "persistent"
                fingerprint = weight.config.fingerprint()
                self.weights[f"{entry}.{name}"] = Weight(kind, fingerprint)
                self.recipes[fingerprint] = str(weight.config)

    @property
    def groups(self) -> dict[str, list[list[str]]]:
        """Return the names of parameters in each group of each optimizer."""
        return {name: optimizer.groups for name, optimizer in self.optimizers.items()}

    def master(self, entry: str, name: str) -> Tensor | None:
        """Return the fp32 master of a persistent weight, if an optimizer here has it."""
        stepped = self.name_of.get(id(self.parameters[entry].get(name)))
        found = (o.masters[stepped] for o in self.optimizers.values() if stepped in o.masters)
        return next(found, None)

    # -- saving

    def collect(self, *, faces: bool) -> StateDict:
        """Return the state dict of every entry; ``faces=False`` omits faces that can be requantized from a saved
        master. Those of tensor-parallel parts with scales of their own, which are no faces of the whole, always
        are."""
        found: StateDict = {}
        for entry, value in self.state.items():
            kind = self.kinds[entry]
            if kind == "module":
                found[entry] = {
                    name: v
                    for name, v in self.values[entry].items()
                    if (faces and not _has_own_scales(v))
                    or not self._is_requantized(entry, name, v)
                }
            elif kind == "optimizer":
                found[entry] = self.optimizers[entry].state()
            else:
                own = value.state_dict() if kind == "stateful" else value
                found[entry] = own if holds_tensors(own) else Opaque(own)
        return found

    def _is_requantized(self, entry: str, name: str, value: object) -> bool:
        """Return whether the faces of a weight can be requantized from its master alone."""
        weight = local(value) if isinstance(value, Tensor) else None
        return (
            isinstance(weight, HybridTensor)
            and follows_from_master(weight)
            and self.master(entry, name) is not None
        )

    # -- loading

    def differences(self, manifest: Manifest, names: Container[str]) -> list[str]:
        """Return a text for each weight of both a checkpoint, which has these names, and the model, whose recipes
        differ."""
        entries = tuple(f"{entry}." for entry in self.modules)
        stored = {
            name: weight for name, weight in manifest.weights.items() if name.startswith(entries)
        }

        own = {f"{entry}.{name}" for entry, values in self.values.items() for name in values}

        def shown(weight: Weight | None, recipes: dict[str, str]) -> str:
            if weight is None:
                return "not quantized"
            return f"{recipes.get(weight.fingerprint, weight.fingerprint)} ({weight.kind})"

        return [
            f"{name}: {shown(stored.get(name), manifest.recipes)} there, "
            f"{shown(self.weights.get(name), self.recipes)} here"
            for name in sorted({*stored, *self.weights})
            if stored.get(name) != self.weights.get(name)
            and (name in stored or name in names)
            and (name in self.weights or name in own)
        ]

    def check_entries(self, manifest: Manifest) -> None:
        """Raise ValueError if a checkpoint lacks an entry, or has another kind of entry or other parameter groups."""
        for name, kind in self.kinds.items():
            if manifest.entries.get(name) != kind:
                raise ValueError(
                    f"checkpoint.load: the checkpoint has no entry {name!r} ({kind}) but "
                    f"{manifest.entries}; give the same names to the same objects"
                )
        for name, optimizer in self.optimizers.items():
            optimizer.check_groups(manifest.groups.get(name))


def _has_own_scales(value: object) -> bool:
    """Return whether a tensor-parallel part of a persistent weight has scales that the other parts may not have."""
    weight = local(value) if isinstance(value, Tensor) else None
    section = weight.record.section if isinstance(weight, HybridTensor) else None
    is_part = section is not None and section.out_count * section.in_count > 1
    return is_part and isinstance(value, Tensor) and bool(common_to_parts(value))


def _kind(value: object) -> str:
    # In this order: ``Stateful`` is a protocol, which modules and optimizers satisfy, too.
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    return "stateful" if isinstance(value, Stateful) else "data"


def holds_tensors(value: object) -> bool:
    """Return whether a value holds tensors that are loaded in place or sharded."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(key, str) for key in value) and any(
            map(holds_tensors, value.values())
        )
    return isinstance(value, list) and any(map(holds_tensors, value))

"""Optimizer state by the names of parameters, so that it can be loaded on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybridtensor.distributed.checkpoint.plain import StateDict, memory_like
from hybridtensor.distributed.checkpoint.planners import Opaque
from hybridtensor.dtensor import local
from hybridtensor.optim import MasterWeights
from hybridtensor.printed import some


class NamedOptimizer:
    """An optimizer whose parameters have names.

    Args:
        entry: Its name in the checkpoint.
        optimizer: Any torch optimizer, or ``optim.MasterWeights``.
        names: Names of parameters, by ``id``.

    Raises:
        ValueError: If it steps a parameter without a name.
    """

    def __init__(self, entry: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self.entry, self.optimizer = entry, optimizer
        self.inner: torch.optim.Optimizer = (
            optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
        )
        self.masters: dict[str, Tensor] = {}
        of_stepped = dict(names)
        if isinstance(optimizer, MasterWeights):
            for parameter, master in optimizer.masters().items():
                if id(parameter) in names:
                    self.masters[names[id(parameter)]] = master.detach()
                    of_stepped[id(master)] = names[id(parameter)]
        groups = [group["params"] for group in self.inner.param_groups]
        unknown = [str(tuple(p.shape)) for g in groups for p in g if id(p) not in of_stepped]
        if unknown:
            raise ValueError(
                f"checkpoint: {entry!r} steps parameters of shapes {some(unknown, between=', ')} that no module of the "
                "state has; add the model to the state"
            )
        self.groups = [[of_stepped[id(p)] for p in group] for group in groups]
        self.parameters: dict[str, nn.Parameter] = {
            of_stepped[id(p)]: p for group in groups for p in group
        }

    def state(self) -> StateDict:
        """Return the state dict that is saved: tensors by name, and the rest whole."""
        packed = self.optimizer.state_dict()
        own = ("master", "follows") if isinstance(self.optimizer, MasterWeights) else ()
        # torch numbers parameters in this order
        names = [name for group in self.groups for name in group]
        tensors: dict[str, dict[str, Tensor]] = {}
        values: dict[str, dict[str, object]] = {}
        for number, state in packed["state"].items():
            for key, value in ((key, value) for key, value in state.items() if key not in own):
                if isinstance(value, Tensor):
                    tensors.setdefault(names[number], {})[key] = value
                else:
                    values.setdefault(names[number], {})[key] = value
        groups = [
            {**group, "params": list(self.groups[i])}
            for i, group in enumerate(packed["param_groups"])
        ]
        return {
            "state": tensors,
            "masters": dict(self.masters),
            "values": Opaque({"state": values, "groups": groups}),
        }

    def check_groups(self, stored: list[list[str]] | None) -> None:
        """Raise ValueError unless a checkpoint has the same parameters in the same groups."""
        if stored is None or sorted(map(sorted, stored)) != sorted(map(sorted, self.groups)):
            here, there = (
                {name for group in groups for name in group}
                for groups in (self.groups, stored or ())
            )
            texts = [f"{name} is not in it" for name in sorted(here - there)]
            texts += [f"{name} is not here" for name in sorted(there - here)]
            sizes = [[len(group) for group in groups] for groups in (self.groups, stored or ())]
            alike = f"the same parameters are in groups of {sizes[0]} here, of {sizes[1]} in it"
            raise ValueError(
                f"checkpoint.load: the parameter groups of {self.entry!r} are not those of the checkpoint: "
                f"{some(texts) or alike}; build the optimizer as it was built"
            )

    def target(self, metadata: Metadata) -> StateDict:
        """Allocate tensors for the stored state of this optimizer, without the masters."""
        tensors: dict[str, dict[str, Tensor]] = {}
        # torch's optimizers number parameters; our names are in the paths that DCP keeps privately
        for flat, path in (metadata.planner_data or {}).items():
            stored = metadata.state_dict_metadata.get(flat)
            if tuple(path[:2]) != (self.entry, "state") or len(path) != 4:
                continue
            if isinstance(stored, TensorStorageMetadata) and path[2] in self.parameters:
                tensors.setdefault(path[2], {})[path[3]] = self._memory(path[2], path[3], stored)
        return {"state": tensors, "values": Opaque(None)}

    def _memory(self, name: str, key: str, stored: TensorStorageMetadata) -> Tensor:
        """Allocate one tensor, sharded like its parameter if it has the same shape."""
        parameter, dtype, size = self.parameters[name], stored.properties.dtype, tuple(stored.size)
        # State that is there says best how it is sharded: its shape may be another than the
        # parameter's, as Adafactor's rows and columns are.
        for known in (self.inner.state.get(parameter, {}).get(key), parameter):
            if isinstance(known, Tensor) and tuple(known.shape) == size:
                return memory_like(known, dtype)
        # A scalar, such as the step of AdamW, is on the host.
        return torch.zeros(size, dtype=dtype, device=local(parameter).device if size else "cpu")

    def restore(self, loaded: StateDict) -> None:
        """Load the state read into ``target``, masters were loaded in place; raise ValueError for another
        optimizer's."""
        values = loaded["values"]
        # By their members: groups may have been built in another order. Several may have none.
        saved: dict[frozenset[str], list[StateDict]] = {}
        for group in values["groups"]:
            # Without it torch keeps the names of the parameters here, whose order may be another one.
            own = {name: value for name, value in group.items() if name != "param_names"}
            saved.setdefault(frozenset(group["params"]), []).append(own)
        numbers = {
            name: i for i, name in enumerate(name for group in self.groups for name in group)
        }
        groups = [
            {**saved[frozenset(names)].pop(0), "params": [numbers[name] for name in names]}
            for names in self.groups
        ]
        state: dict[int, dict[str, object]] = {}
        for found in (loaded["state"], values["state"]):
            for name, of_name in found.items():
                state.setdefault(numbers[name], {}).update(of_name)
        # torch replaces all options of a group by what was saved, and adds one to the defaults that no group has
        options = set(self.inner.defaults).intersection(*self.inner.param_groups)
        self.inner.load_state_dict({"state": state, "param_groups": groups})
        lost = {name for g in self.inner.param_groups for name in options if name not in g}
        if lost:
            raise ValueError(
                f"checkpoint.load: {self.entry!r} is of {type(self.inner).__name__}, got the state of another class, "
                f"without {', '.join(sorted(lost))}; build the optimizer as it was built"
            )
        if isinstance(self.optimizer, MasterWeights):
            self.optimizer._share_groups()

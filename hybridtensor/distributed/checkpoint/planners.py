"""Planners for ``torch.distributed.checkpoint`` that store converted weights as plain tensors.

::

    dcp.save(state, checkpoint_id=path, planner=HybridSavePlanner())
    dcp.load(state, checkpoint_id=path, planner=HybridLoadPlanner())

Master weights need them only where a state holds the weights themselves: ``state_dict()`` of a converted model already
has their plain tensors. Of persistent weights every tensor of every face is stored, and is loaded into its memory.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridtensor.distributed.checkpoint.plain import (
    StateDict,
    common_to_parts,
    plain,
    tensors_of,
)
from hybridtensor.distributed.checkpoint.replicas import Replica, different, replica
from hybridtensor.dtensor import local
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.followers import followers
from hybridtensor.subclasses.wrapper import WrapperTensor
from hybridtensor.untrusted.items import pickled, read_value
from hybridtensor.untrusted.metadata import use_present_names


class Opaque:
    """A value that is not a tensor, stored as one pickle."""

    def __init__(self, value: object) -> None:
        self.value = value


@dataclasses.dataclass(frozen=True)
class _Plan(SavePlan):
    """What a rank writes, and the scales that its parts of weights must have in common with other ranks' parts."""

    rank: int = 0
    common: dict[str, Replica] = dataclasses.field(default_factory=dict)


class HybridSavePlanner(DefaultSavePlanner):
    """Stores converted weights as plain tensors; see the module's docstring.

    ::

        state = {"model": model.state_dict()}
        dcp.save(state, checkpoint_id="runs/plain", planner=checkpoint.HybridSavePlanner())
    """

    def set_up_planner(
        self,
        state_dict: StateDict,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._staged: dict[tuple[str, torch.Size | None], Tensor | io.BytesIO] = {}
        tensors = list(tensors_of(state_dict))
        _require_memory(tensors)
        super().set_up_planner(plain(state_dict), storage_meta, is_coordinator)
        _warn_of_lost_values(tensors)
        self._common = {
            f"{name}.{tail}": found
            for name, value in tensors
            for tail, scale in common_to_parts(value).items()
            for found in replica(scale)
        }

    def create_local_plan(self) -> SavePlan:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return _Plan(**vars(super().create_local_plan()), rank=rank, common=self._common)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """See ``SavePlanner``; raise ValueError for parts whose faces are not those of one whole."""
        plans = [plan for plan in all_plans if isinstance(plan, _Plan)]
        wrong = different([plan.rank for plan in plans], [plan.common for plan in plans])
        if wrong:
            raise ValueError(
                f"checkpoint: parts of weights have scales of their own on some ranks: {wrong}; only faces "
                "that have the scales of the whole can be stored; save masters only "
                "(checkpoint.save, with the optimizer in the state)"
            )
        return super().create_global_plan(all_plans)

    def stage(self, plan: SavePlan) -> None:
        """Copy all that ``plan`` writes to the host, so that training may overwrite it before it is written."""
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, Tensor):
                # ``copy=True``: of a tensor on the host ``to`` returns the same memory, which
                # training goes on writing.
                data = data.detach().to("cpu", copy=True)
            self._staged[item.index.fqn, item.index.offset] = data

    def stage_values(self, plan: SavePlan, who: str) -> None:
        """Pickle and read back all non-tensors of ``plan``; raise ValueError for what cannot be read safely."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                value = self.lookup_object(item.index)
                value = value.value if isinstance(value, Opaque) else value
                # These very bytes are written: ``resolve_data`` of DCP would pickle the value
                # again, as it is by then.
                self._staged[item.index.fqn, item.index.offset] = pickled(
                    value, item.index.fqn, who
                )

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        staged = self._staged.get((write_item.index.fqn, write_item.index.offset))
        return super().resolve_data(write_item) if staged is None else staged

    def transform_object(self, write_item: WriteItem, object: object) -> object:
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, Opaque):
            object = object.value
        return super().transform_object(write_item, object)


class HybridLoadPlanner(DefaultLoadPlanner):
    """Loads what ``HybridSavePlanner`` stored, in place; reads no pickle that could run code.

    ::

        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id="runs/plain", planner=checkpoint.HybridLoadPlanner())

    Raises:
        ValueError: If a tensor that is to be loaded has no memory, or is stored with another shape.
        RuntimeError: If something is not in the checkpoint.
    """

    def set_up_planner(
        self,
        state_dict: StateDict,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        tensors = list(tensors_of(state_dict))
        _require_memory(tensors)
        if metadata is not None:
            use_present_names(metadata)  # the reader takes this same object afterwards
        super().set_up_planner(plain(state_dict), metadata, is_coordinator)
        # After ``super()``, which keeps the plain one here: ``load_bytes`` writes into the caller's.
        self.original_state_dict = state_dict
        parts = [(name, local(value)) for name, value in tensors]
        persistent = [(name, part) for name, part in parts if isinstance(part, HybridTensor)]
        self._followers = {
            f"{name}.{rest}": pair
            for name, weight in persistent
            for rest, pair in followers(weight).items()
        }
        addresses = {part.data_ptr() for _, part in parts if not isinstance(part, WrapperTensor)}
        without = {name: _has_no_master(weight, addresses) for name, weight in persistent}
        self._without_masters = [
            (f"{name}.", weight) for name, weight in persistent if without[name]
        ]
        self._with_masters = [weight for name, weight in persistent if not without[name]]

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise RuntimeError(
                "checkpoint: the planner has no metadata; call set_up_planner with it"
            )
        # Not what the default planner does: for a checkpoint with more keys than the state it tries the names of
        # torch 2.3, made of ``original_state_dict``, whose weights are not plain.
        return create_default_local_load_plan(
            self.state_dict, self.metadata, not self.allow_partial_load
        )

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """See ``LoadPlanner``: the last that is called before anything is written."""
        for weight in self._with_masters:
            weight.high_precision.mark_loaded()
        names = [item.dest_index.fqn for item in new_plan.items if item.type == LoadItemType.TENSOR]
        self._missing = {
            prefix: sum(name.startswith(prefix) for name in names)
            for prefix, _ in self._without_masters
        }
        return super().finish_plan(new_plan)

    def places(self, plan: LoadPlan) -> list[Tensor]:
        """Return the tensors that ``plan`` loads into, on this rank."""
        items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        return [self.lookup_tensor(item.dest_index).detach() for item in items]

    def misfits(self, *, casts: bool) -> list[str]:
        """Return a text for each entry that the checkpoint lacks or stores differently; ``casts`` allows other float
        dtypes."""
        if self.metadata is None:
            return []
        stored = self.metadata.state_dict_metadata
        texts = (
            _misfit(stored.get(name), value, casts=casts, name=name)
            for name, value in self.state_dict.items()
        )
        return [text for text in texts if text is not None]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = read_value(value)
        # ``mappings`` is DCP's: from the flat name to the path in the nested state. DCP would write
        # into its own flat dictionary, of which the caller sees nothing.
        *path, last = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for key in path:
            holder = holder[_own_key(holder, key)]
        holder[_own_key(holder, last)] = loaded

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pair = self._followers.get(read_item.dest_index.fqn)
        if pair is not None:
            pair[1].copy_(pair[0])
        for prefix, weight in self._without_masters:
            if read_item.dest_index.fqn.startswith(prefix):
                self._missing[prefix] -= 1
                if not self._missing[prefix]:  # the last tensor of its faces
                    weight.high_precision.mark_copied(weight.dequantize, weight.taken)


def _require_memory(tensors: list[tuple[str, Tensor]]) -> None:
    """Raise ValueError for a tensor whose elements are not in memory, one for each index, and that is not ours."""
    for name, value in tensors:
        if value.is_meta:
            raise ValueError(
                f"checkpoint: {name} is on the meta device and has no memory; call to_empty first"
            )
        if value.layout != torch.strided or value.is_nested:
            raise ValueError(
                f"checkpoint: dense tensors are required, got {value.layout} in {name}; call "
                f"{'to_padded_tensor' if value.is_nested else 'to_dense'}, or leave it out"
            )
        part = local(value)
        if is_traceable_wrapper_subclass(part) and not isinstance(part, WrapperTensor):
            kind = type(part)
            raise ValueError(
                f"checkpoint: dense tensors are required, got {kind.__module__}.{kind.__name__} in {name}, whose bytes "
                "lie in other tensors; save it by itself with torch.save, and leave it out"
            )


def _warn_of_lost_values(tensors: list[tuple[str, Tensor]]) -> None:
    """Warn if only the faces of a persistent weight are stored, and its values in high precision are lost."""
    parts = [(name, local(value)) for name, value in tensors]
    lost = [
        name
        for name, part in parts
        if isinstance(part, HybridTensor) and part.high_precision.no_optimizer_saves
    ]
    if lost:
        warnings.warn(
            f"checkpoint: of {len(lost)} persistent weights ({lost[0]}, ...) only the faces are saved, without their "
            "values in high precision, and training cannot resume with the same bits; step them by "
            "hybridtensor.optim.MasterWeights, and save it, too",
            UserWarning,
            stacklevel=2,
        )


def _has_no_master(weight: HybridTensor, addresses: set[int]) -> bool:
    """Return whether loaded bytes become the weight's master: not if a master is, or was, loaded at the same
    address."""
    current = weight.high_precision.current
    return current is None or not (weight.high_precision.loaded or current.data_ptr() in addresses)


def _own_key(holder: object, key: str | int) -> object:
    """Return the key of ``holder`` whose text is ``key``: torch stores integer keys of optimizers as text."""
    if not isinstance(holder, dict) or key in holder:
        return key
    return next((own for own in holder if str(own) == key), key)


def _misfit(stored: STORAGE_TYPES | None, value: object, *, casts: bool, name: str) -> str | None:
    """Return how the stored entry differs from ``value``, or None if it fits."""
    if stored is None:
        return f"{name} is not in it"
    if not isinstance(stored, TensorStorageMetadata):
        return f"{name} is no tensor in it" if isinstance(value, Tensor) else None
    if not isinstance(value, Tensor):
        return f"{name} is a tensor in it"
    if tuple(stored.size) != tuple(value.shape):
        return f"{name} is {tuple(stored.size)} in it, {tuple(value.shape)} here"
    if not _fits(stored.properties.dtype, value.dtype, casts):
        return f"{name} is {stored.properties.dtype} in it, {value.dtype} here"
    return None


def _fits(stored: torch.dtype, wanted: torch.dtype, casts: bool) -> bool:
    high = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return stored == wanted or (casts and stored in high and wanted in high)

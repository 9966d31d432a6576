"""Planners for ``torch.distributed.checkpoint`` that store converted weights as plain tensors.

::

    dcp.save(state, checkpoint_id=path, planner=HybridSavePlanner())
    dcp.load(state, checkpoint_id=path, planner=HybridLoadPlanner())

Master weights need them only where a state holds the weights themselves: ``state_dict()`` of a
converted model already has their plain tensors. Of persistent weights every tensor of every face is
stored, and is loaded into its memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)

from hybridtensor.distributed.checkpoint.metadata import use_present_names
from hybridtensor.distributed.checkpoint.plain import plain
from hybridtensor.dtensor import local
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.followers import followers


class Opaque:
    """A value that is stored whole, whatever it is made of.

    Attributes:
        value: The value; of what ``torch.load(weights_only=True)`` admits.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class HybridSavePlanner(DefaultSavePlanner):
    """Stores converted weights as plain tensors; see the module's docstring."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See ``SavePlanner``."""
        self._staged: dict[tuple[str, Any], Any] = {}
        super().set_up_planner(plain(state_dict), storage_meta, is_coordinator)

    def stage(self, plan: SavePlan) -> None:
        """Copy all that ``plan`` writes to the host, so that it may change before it is written."""
        for item in plan.items:
            data = self.resolve_data(item)
            if isinstance(data, Tensor):
                data = data.detach().to("cpu", copy=True)
            self._staged[item.index.fqn, item.index.offset] = data

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """See ``SavePlanner``."""
        staged = self._staged.get((write_item.index.fqn, write_item.index.offset))
        return super().resolve_data(write_item) if staged is None else staged

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """See ``DefaultSavePlanner``."""
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, Opaque):
            object = object.value
        return super().transform_object(write_item, object)


class HybridLoadPlanner(DefaultLoadPlanner):
    """Loads what ``HybridSavePlanner`` stored, in place; reads no pickle that could run code.

    Raises:
        ValueError: If a tensor that is to be loaded has no memory, or is stored with another shape.
        RuntimeError: If something is not in the checkpoint.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """See ``LoadPlanner``."""
        for name, value in _tensors(state_dict, ""):
            if value.is_meta:
                raise ValueError(
                    f"checkpoint: tensors with memory are required, got {name} on meta; call to_empty first"
                )
        if metadata is not None:
            use_present_names(metadata)  # the reader takes this same object afterwards
        super().set_up_planner(plain(state_dict), metadata, is_coordinator)
        self.original_state_dict = state_dict
        persistent = [
            (n, value)
            for n, value in _tensors(state_dict, "")
            if isinstance(local(value), HybridTensor)
        ]
        self._followers = {
            f"{n}.{rest}": pair
            for n, value in persistent
            for rest, pair in followers(local(value)).items()
        }
        addresses = {local(value).data_ptr() for _, value in _tensors(state_dict, "")}
        self._noting = [
            (f"{n}.", local(value)) for n, value in persistent if _is_noted(local(value), addresses)
        ]

    def create_local_plan(self) -> LoadPlan:
        """See ``LoadPlanner``."""
        if self.metadata is None:
            raise RuntimeError(
                "checkpoint: metadata is required, got none; call set_up_planner with it"
            )
        return create_default_local_load_plan(
            self.state_dict, self.metadata, not self.allow_partial_load
        )

    def misfits(self, *, casts: bool) -> list[str]:
        """Return what of the state is not in the checkpoint as it is wanted.

        Args:
            casts: Whether another floating-point dtype will do.
        """
        if self.metadata is None:
            return []
        found = []
        for name, value in self.state_dict.items():
            stored: Any = self.metadata.state_dict_metadata.get(name)
            is_tensor = isinstance(stored, TensorStorageMetadata)
            if stored is None:
                found.append(f"{name} is not in it")
            elif is_tensor != isinstance(value, Tensor):
                found.append(f"{name} is {'a tensor' if is_tensor else 'no tensor'} in it")
            elif is_tensor and tuple(stored.size) != tuple(value.shape):
                found.append(f"{name} is {tuple(stored.size)} in it, {tuple(value.shape)} here")
            elif is_tensor and not _fits(stored.properties.dtype, value.dtype, casts):
                found.append(f"{name} is {stored.properties.dtype} in it, {value.dtype} here")
        return found

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See ``LoadPlanner``."""
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        *path, last = self.mappings[read_item.dest_index.fqn]
        holder: Any = self.original_state_dict
        for key in path:
            holder = holder[_own_key(holder, key)]
        holder[_own_key(holder, last)] = loaded

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """See ``LoadPlanner``."""
        pair = self._followers.get(read_item.dest_index.fqn)
        if pair is not None:
            pair[1].copy_(pair[0])
        for prefix, weight in self._noting:
            if read_item.dest_index.fqn.startswith(prefix):  # what was loaded last makes it whole
                weight.high_precision.note_copied(weight.dequantize, weight.taken)


def _is_noted(weight: HybridTensor, addresses: set[int]) -> bool:
    """Whether what is loaded into a weight is its master from then on: not if that is loaded with
    it, or was before.
    """
    current = weight.high_precision.current
    if current is not None and (weight.high_precision.loaded or current.data_ptr() in addresses):
        weight.high_precision.note_loaded()
        return False
    return True


def _own_key(holder: Any, key: Any) -> Any:
    """Return what ``holder`` calls ``key``: torch makes text of numbers, as an optimizer has."""
    if not isinstance(holder, dict) or key in holder:
        return key
    return next((own for own in holder if str(own) == key), key)


def _fits(stored: torch.dtype, wanted: torch.dtype, casts: bool) -> bool:
    high = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return stored == wanted or (casts and stored in high and wanted in high)


def _tensors(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state under the names that they are stored under."""
    if isinstance(state, Tensor):
        yield name, state
        return
    pairs = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, (list, tuple))
        else ()
    )
    for key, value in pairs:
        yield from _tensors(value, f"{name}.{key}" if name else str(key))

"""Reading tensors and values of ``torch.distributed.checkpoint``: all of them first, then into place."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.futures import Future

from hybridtensor.distributed.checkpoint.untrusted.files import open_file
from hybridtensor.distributed.checkpoint.untrusted.items import read_tensor, read_value
from hybridtensor.distributed.checkpoint.untrusted.metadata import read_metadata


class Staged:
    """What a rank has read and not put into place yet: on the host, as much as it loads.

    Args:
        planner: Knows the places.
        tensors: What to load into each place.
        values: Bytes of what is no tensor.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        tensors: list[tuple[ReadItem, Tensor]],
        values: list[tuple[ReadItem, bytes]],
    ) -> None:
        self._planner, self._tensors, self._values = planner, tensors, values
        self._former: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def put(self) -> None:
        """Write everything; what was there before takes the place of what is written."""
        for item, data in self._values:
            self._planner.load_bytes(item, io.BytesIO(data))
        for at, (item, new) in enumerate(self._tensors):
            place = self._planner.resolve_tensor(item).detach()
            self._former.append((place, place.to("cpu", copy=True)))
            place.copy_(new)
            self._tensors[at] = item, torch.empty(0)
            self._planner.commit_tensor(item, place)

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo ``put``, of as much as was written; what reads values has them still."""
        while self._former:
            place, former = self._former.pop()
            place.copy_(former)


class SafeReader(FileSystemReader):
    """``FileSystemReader`` that runs nothing and writes nothing before everything is read.

    Raises:
        ValueError: If a file is damaged, no regular file of the checkpoint, or holds what cannot be
            read without running code.
    """

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """See ``StorageReader``."""
        # torch's reader unpickles here; ``path`` and ``load_id`` are what it sets up
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        """See ``StorageReader``."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._entries = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See ``StorageReader``."""
        self.stage(plan, planner).put()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stage(self, plan: LoadPlan, planner: LoadPlanner) -> Staged:
        """Read and check all that ``plan`` asks for, into new memory."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            files.setdefault(place.relative_path, []).append(item)
        tensors: list[tuple[ReadItem, Tensor]] = []
        values: list[tuple[ReadItem, bytes]] = []
        for name, items in files.items():
            with open_file(Path(self.path), name) as stream:
                for item in items:
                    where = f"{Path(self.path).name}: {name}: {item.storage_index.fqn}"
                    place = self.storage_data[item.storage_index]
                    stream.seek(place.offset)
                    data = stream.read(place.length)
                    try:
                        if item.type == LoadItemType.BYTE_IO:
                            read_value(io.BytesIO(data))
                            values.append((item, data))
                        else:
                            tensors.append((item, self._part(data, item)))
                    except ValueError as error:
                        raise ValueError(f"{where} cannot be read: {error}") from error
        return Staged(planner, tensors, values)

    def _part(self, data: bytes, item: ReadItem) -> Tensor:
        """Return the part of a stored tensor that is asked for."""
        tensor = read_tensor(io.BytesIO(data))
        entry = self._entries[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata) or tensor.dtype != entry.properties.dtype:
            raise ValueError(f"a tensor of another dtype is required, got {tensor.dtype}")
        offsets = item.storage_index.offset
        sizes = next((c.sizes for c in entry.chunks if c.offsets == offsets), None)
        if tensor.size() != sizes:
            raise ValueError(f"a tensor of {sizes} is required, got {tuple(tensor.shape)}")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        return tensor if whole else tensor.clone()  # not the part that nobody asked for

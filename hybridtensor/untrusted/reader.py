"""Reads tensors and values of ``torch.distributed.checkpoint`` to the host first, and then writes them in place."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hybridtensor.untrusted.files import open_file
from hybridtensor.untrusted.items import read_tensor, read_value
from hybridtensor.untrusted.metadata import read_metadata


class UnreadableError(ValueError):
    """A stored entry cannot be read, even if the digests of its files match."""


class Staged:
    """What a rank has read to the host and not yet written: tensors by place, and bytes of other values."""

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
        """Swap the read tensors with those in place."""
        for item, data in self._values:
            self._planner.load_bytes(item, io.BytesIO(data))
        for at, (item, new) in enumerate(self._tensors):
            place = self._planner.resolve_tensor(item).detach()
            # Before the write, so that ``put_back`` undoes one that was interrupted.
            self._former.append((place, place.to("cpu", copy=True)))
            try:
                place.copy_(new)
            except RuntimeError as error:  # for instance its elements share memory
                self._former.pop()  # ``put_back`` could not write it either
                raise RuntimeError(
                    f"checkpoint.load: {item.dest_index.fqn} cannot be written: {error}"
                ) from error
            # Frees what was read: the host holds the former values or the new ones, not both of everything.
            self._tensors[at] = item, torch.empty(0)
            self._planner.commit_tensor(item, place)

    @torch.no_grad()
    def put_back(self) -> None:
        """Undo ``put``, as far as it got."""
        while self._former:
            place, former = self._former.pop()
            place.copy_(former)


class SafeReader(FileSystemReader):
    """``FileSystemReader`` that runs nothing and writes nothing before everything is read.

    ::

        state = {"model": model.state_dict()}
        reader, planner = checkpoint.SafeReader("runs/plain"), checkpoint.HybridLoadPlanner()
        dcp.load(state, storage_reader=reader, planner=planner)

    Raises:
        ValueError: If a file is damaged or no regular file of the checkpoint.
        UnreadableError: If an entry is not what metadata says, or cannot be read without running code.
    """

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        # torch's reader unpickles here; ``path`` and ``load_id`` are what it sets up
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._entries = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.stage(plan, planner).put()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stage(self, plan: LoadPlan, planner: LoadPlanner) -> Staged:
        """Read and check all that ``plan`` asks for, into new memory."""
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        tensors: list[tuple[ReadItem, Tensor]] = []
        values: list[tuple[ReadItem, bytes]] = []
        for index, found in self._stored(list(wanted)):
            for item in wanted[index]:
                if isinstance(found, Tensor):
                    tensors.append((item, _part(found, item)))
                else:
                    values.append((item, found))
        return Staged(planner, tensors, values)

    def unreadable(self) -> list[str]:
        """Return a text for the first unreadable entry of each file."""
        found = []
        for indices in self._by_file(self.storage_data).values():
            try:
                for _ in self._stored(indices):
                    pass
            except (ValueError, OSError) as error:
                found.append(str(error))
        return found

    def _by_file(self, indices: Iterable[MetadataIndex]) -> dict[str, list[MetadataIndex]]:
        files: dict[str, list[MetadataIndex]] = {}
        for index in indices:
            files.setdefault(self.storage_data[index].relative_path, []).append(index)
        return files

    def _stored(
        self, indices: list[MetadataIndex]
    ) -> Iterator[tuple[MetadataIndex, Tensor | bytes]]:
        """Yield the stored entries: tensors, and the bytes of other values."""
        for name, of_file in self._by_file(indices).items():
            with open_file(Path(self.path), name) as stream:
                for index in of_file:
                    place = self.storage_data[index]
                    stream.seek(place.offset)
                    data = stream.read(place.length)
                    try:
                        yield index, self._read(data, index)
                    except ValueError as error:
                        where = f"{Path(self.path).name}: {name}: {index.fqn}"
                        raise UnreadableError(f"{where} cannot be read: {error}") from error

    def _read(self, data: bytes, index: MetadataIndex) -> Tensor | bytes:
        """Return a stored tensor, or the bytes of another value, if they match the metadata."""
        entry = self._entries[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            read_value(io.BytesIO(data))
            return data
        tensor = read_tensor(io.BytesIO(data))
        if tensor.dtype != entry.properties.dtype:
            raise ValueError(f"a tensor of another dtype is required, got {tensor.dtype}")
        sizes = next((c.sizes for c in entry.chunks if c.offsets == index.offset), None)
        if tensor.size() != sizes:
            raise ValueError(f"a tensor of {sizes} is required, got {tuple(tensor.shape)}")
        return tensor


def _part(tensor: Tensor, item: ReadItem) -> Tensor:
    """Slice the requested part out of a stored tensor."""
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    return tensor if whole else tensor.clone()  # not the part that nobody asked for

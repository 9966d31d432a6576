"""Reading the metadata of ``torch.distributed.checkpoint``, a pickle, without running what it says."""

from __future__ import annotations

import dataclasses
import io
import pathlib
import pickle
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

PathItem = TypeVar("PathItem", str, int)

METADATA = ".metadata"
_FORMER_NAMES = {"quantization_state.scale": "quantization_state.encode_scale"}

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (dcp_metadata, (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    "torch.distributed.checkpoint.filesystem": (dcp_filesystem, ("_StorageInfo",)),
    "torch.serialization": (torch.serialization, ("_get_layout",)),
    "torch": (torch, ("Size",)),
}  # fmt: skip
_PATHS = {"PosixPath": pathlib.PurePosixPath, "WindowsPath": pathlib.PureWindowsPath}


class _Unpickler(pickle.Unpickler):
    """Admits the records that describe tensors, shapes, dtypes and paths; nothing else."""

    def find_class(self, module: str, name: str) -> object:
        """Return the class or function that a pickle names, if it is one of those."""
        holder, names = _CLASSES.get(module, (None, ()))
        if name in names:
            return getattr(holder, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        raise pickle.UnpicklingError(
            f"checkpoint: the metadata is a pickle that asks for {module}.{name}, which no "
            "checkpoint needs; do not use this checkpoint"
        )


def read_metadata(path: Path, files: Collection[str] | None = None) -> Metadata:
    """Read the metadata of the checkpoint in the folder ``path``.

    Args:
        path: The folder.
        files: Names of the files that it may point to; None is any inside the folder.

    Raises:
        ValueError: If it asks for anything that metadata is not made of, is no metadata, or points
            elsewhere.
        OSError: If it cannot be read.
    """
    data = (path / METADATA).read_bytes()
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged pickles raise whatever they like
        raise ValueError(f"{path / METADATA}: {error}") from error
    tables = [getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data")]
    if not isinstance(metadata, Metadata) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path / METADATA}: it holds no metadata but {type(metadata).__name__}")
    use_present_names(metadata)
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or (files is not None and name not in files)
        ):
            raise ValueError(
                f"{path / METADATA}: it points to {name!r}, which is no file of the checkpoint"
            )
    return metadata


def use_present_names(metadata: Metadata) -> None:
    """Give tensors that a former version stored under another name the present one, in place."""
    # ``planner_data`` is private to torch's planners: the path of each flat name. A torch that
    # keeps something else there leaves former names as they are, and loading them says what is
    # missing.
    stored = metadata.state_dict_metadata
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    renamed = {old: _present_name(old) for old in stored if _present_name(old) != old}
    for old, new in renamed.items():
        stored[new] = stored.pop(old)
        if old in paths:
            *holders, last = paths.pop(old)
            paths[new] = (*holders, _present_name(last))
    if not renamed:
        return
    for index in [index for index in metadata.storage_data or {} if index.fqn in renamed]:
        info = metadata.storage_data.pop(index)
        metadata.storage_data[dataclasses.replace(index, fqn=renamed[index.fqn])] = info


def _present_name(name: PathItem) -> PathItem:
    for former, present in _FORMER_NAMES.items():
        if isinstance(name, str) and name.endswith(former):
            return name.removesuffix(former) + present
    return name


class SafeReader(FileSystemReader):
    """``FileSystemReader`` that reads metadata with ``read_metadata``; tensors it reads without
    pickles already.
    """

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """See ``StorageReader``."""
        # torch's reader unpickles here; ``path`` and ``load_id`` are what it sets up
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class Writer(FileSystemWriter):
    """``FileSystemWriter`` whose metadata does not say where it was written: the folder is renamed."""

    def storage_meta(self) -> StorageMeta | None:
        """See ``StorageWriter``."""
        return StorageMeta(save_id=self.save_id)

"""The metadata of ``torch.distributed.checkpoint``, a pickle of records, read without running what it says.

``scan`` first checks the opcodes of the pickle. Python's unpickler then makes records of the same bytes, of classes on
an allow-list only, with any fields; the fields are checked last. This file holds all private names of torch that
reading needs, and raises NotImplementedError for a torch without them. They exist in torch 2.11 to 2.13.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath
from types import NoneType
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp

from hybridtensor.untrusted.files import read_file
from hybridtensor.untrusted.scan import Scan

PathItem = TypeVar("PathItem", str, int)

METADATA = ".metadata"
_LIMIT = 1 << 30  # some hundred bytes per part of a tensor on a rank
_FORMER_NAMES = {"quantization_state.scale": "quantization_state.encode_scale"}
# Where a writer of files has put an item, and what stands for a memory format
_StorageInfo: type = getattr(filesystem, "_StorageInfo", object)
_MemoryFormat: type = getattr(dcp, "_MEM_FORMAT_ENCODING", object)

_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    dcp.Metadata: {
        "state_dict_metadata": (dict,), "planner_data": (dict, NoneType), "storage_data": (dict,),
        "storage_meta": (dcp.StorageMeta, NoneType), "version": (str, NoneType),
    },
    dcp.StorageMeta: {
        "checkpoint_id": (str, PurePosixPath, NoneType), "save_id": (str, NoneType), "load_id": (str, NoneType),
        "modules": (list, NoneType),
    },
    dcp.MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    _StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
    dcp.BytesStorageMetadata: {},
    dcp.TensorStorageMetadata: {"properties": (dcp.TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    dcp.TensorProperties: {
        "dtype": (torch.dtype,), "layout": (torch.layout,), "requires_grad": (bool,),
        "memory_format": (torch.memory_format,), "pin_memory": (bool,),
    },
    dcp.ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
}  # fmt: skip


def read_metadata(path: Path, files: Mapping[str, tuple[int, str]] | None = None) -> dcp.Metadata:
    """Read the metadata of the checkpoint in the folder ``path``."""
    try:
        metadata = _read_records(read_file(path, METADATA, _LIMIT))
        for info in metadata.storage_data.values():
            name = info.relative_path
            if Path(name).name != name or (files is not None and name not in files):
                raise ValueError(f"it points to {name[:100]!r}, which is no file of the checkpoint")
            if files is not None and info.offset + info.length > files[name][0]:
                raise ValueError(f"it points behind the end of {name}")
    except ValueError as error:
        raise ValueError(f"{path / METADATA}: {error}") from error
    use_present_names(metadata)
    return metadata


def use_present_names(metadata: dcp.Metadata) -> None:
    """Rename tensors that a former version stored under another name, in place."""
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


class Writer(filesystem.FileSystemWriter):
    """``FileSystemWriter`` whose metadata does not say where it was written: the folder is renamed."""

    def storage_meta(self) -> dcp.StorageMeta | None:
        return dcp.StorageMeta(save_id=self.save_id)


def _is_count(value: object) -> bool:
    """Return whether a value is a non-negative integer."""
    return type(value) is int and 0 <= value < 2**62


def _require(right: bool, what: str) -> None:
    """Raise ValueError if what metadata has to be made of is something else."""
    if not right:
        raise ValueError(f"damaged metadata: {what} is required, got something else")


# Functions in place of what pickles call, which takes anything, and can be changed by a state
def _size(numbers: object = ()) -> torch.Size:
    _require(type(numbers) is tuple and all(map(_is_count, numbers)), "a shape of counts")
    return torch.Size(numbers)  # type: ignore[arg-type]


def _layout(name: object) -> torch.layout:
    _require(name == "torch.strided", "a strided tensor")
    return torch.strided


def _memory_format(number: object) -> object:
    _require(type(number) is int and 0 <= number <= 2, "a memory format")
    return _MemoryFormat(number)


def _path(*parts: object) -> PurePath:
    _require(all(type(part) is str for part in parts), "a path of names")
    return PurePosixPath(*parts)  # type: ignore[arg-type]


_RECORDS: dict[str, object] = {f"{kind.__module__}.{kind.__name__}": kind for kind in _FIELDS}
_FUNCTIONS: dict[str, object] = {
    "torch.Size": _size,
    "torch.serialization._get_layout": _layout,
    f"{dcp.__name__}._MEM_FORMAT_ENCODING": _memory_format,
    **{f"pathlib{p}.{name}Path": _path for p in ("", "._local") for name in ("Posix", "Windows")},
}
_DTYPES = {f"torch.{n}": dtype for n, dtype in vars(torch).items() if type(dtype) is torch.dtype}
_ALLOWED = {**_RECORDS, **_FUNCTIONS, **_DTYPES}
_USES = {
    **dict.fromkeys(_RECORDS, "NEWOBJ"),
    **dict.fromkeys(_FUNCTIONS, "REDUCE"),
    **dict.fromkeys(_DTYPES, ""),
}


class _Unpickler(pickle.Unpickler):
    """Makes what is on the list, and refuses all other names and persistent ids."""

    # What is done to it, such as a state for a class, it does not refuse: ``Scan`` does.

    def find_class(self, module: str, name: str, /) -> object:
        found = f"{module}.{name}"
        if found not in _ALLOWED:
            raise ValueError(f"{found[:200]} is not on the list of names of a checkpoint")
        return _ALLOWED[found]


def _read_records(data: bytes) -> dcp.Metadata:
    """Read metadata from a pickle of any protocol; raise ValueError if it is anything else, damaged or incomplete."""
    if object in (_StorageInfo, _MemoryFormat):
        raise NotImplementedError(
            f"checkpoint: torch 2.11 to 2.13 is required to read metadata, torch {torch.__version__} "
            "lacks _StorageInfo or _MEM_FORMAT_ENCODING; use one of these, or a later hybridtensor"
        )
    try:
        Scan(_USES, {}).run(data)
        found = _Unpickler(io.BytesIO(data)).load()
    except ValueError:
        raise
    except Exception as error:  # damaged pickles raise whatever they like
        raise ValueError(f"a damaged pickle: {type(error).__name__}: {error}") from error
    if type(found) is not dcp.Metadata:
        raise ValueError(f"it holds no metadata but {type(found).__name__}")
    _check_metadata(found)
    return found


def _check_record(record: object, kind: type, what: str) -> None:
    """Raise ValueError unless a record is of ``kind`` and has its fields with their types."""
    _require(type(record) is kind, f"{kind.__name__} as {what}")
    given = vars(record)
    _require(given.keys() <= _names(kind), f"{kind.__name__} with its own fields")
    _require(bool(given) or not _FIELDS[kind], f"{kind.__name__} with its fields")
    for name, kinds in _FIELDS[kind].items():
        if type(getattr(record, name, None)) not in kinds:
            _require(False, f"the {name} of {what}")


@functools.cache
def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _check_metadata(metadata: dcp.Metadata) -> None:
    """Raise ValueError unless all fields have their types, and every chunk a file that stores it."""
    _check_record(metadata, dcp.Metadata, "the checkpoint")
    if metadata.storage_meta is not None:
        _check_record(metadata.storage_meta, dcp.StorageMeta, "the storage")
        modules = getattr(metadata.storage_meta, "modules", None) or ()
        _require(all(type(name) is str for name in modules), "names of modules")
    places, chunks = metadata.storage_data, set[int]()
    for index, place in places.items():
        _check_record(index, dcp.MetadataIndex, "the key of a place")
        _require(index.index is None or _is_count(index.index), "a number of a chunk")
        _check_record(place, _StorageInfo, f"the place of {index.fqn}")
        _require(_is_count(place.offset) and _is_count(place.length), "a place in a file")
        # torch's readers would unpack what it says, into any amount of memory
        _require(not place.transform_descriptors, "items as they are, not transformed ones")
    for name, path in (metadata.planner_data or {}).items():
        _require(type(name) is str and type(path) is tuple and len(path) > 0, "a path by name")
        _require(all(type(key) is str or _is_count(key) for key in path), "names in a path")
    for name, entry in metadata.state_dict_metadata.items():
        _require(type(name) is str, "entries by name")
        if type(entry) is dcp.BytesStorageMetadata:
            _check_record(entry, dcp.BytesStorageMetadata, name)
            _require(dcp.MetadataIndex(name) in places, f"a place of {name}")
        else:
            _check_tensor(name, entry, places, chunks)


def _check_tensor(
    name: str, entry: Any, places: dict[dcp.MetadataIndex, Any], chunks: set[int]
) -> None:
    """Raise ValueError unless a tensor's chunks cover it and fit in their files, so that files bound what is
    allocated."""
    _check_record(entry, dcp.TensorStorageMetadata, name)
    _check_record(entry.properties, dcp.TensorProperties, name)
    _require(id(entry.chunks) not in chunks, f"chunks of {name} alone")
    chunks.add(id(entry.chunks))
    covered, itemsize, seen = 0, entry.properties.dtype.itemsize, set()
    for chunk in entry.chunks:
        _check_record(chunk, dcp.ChunkStorageMetadata, f"a chunk of {name}")
        sizes, offsets = chunk.sizes, chunk.offsets
        _require(len(sizes) == len(offsets) == len(entry.size), f"chunks in the shape of {name}")
        inside = all(o + n <= s for o, n, s in zip(offsets, sizes, entry.size, strict=True))
        place = places.get(dcp.MetadataIndex(name, offsets))
        _require(inside and place is not None, f"chunks inside of {name}")
        elements = math.prod(sizes)
        _require(place is None or place.length >= elements * itemsize, f"all bytes of {name}")
        covered += elements if offsets not in seen else 0
        seen.add(offsets)
    _require(covered >= math.prod(entry.size), f"chunks of the whole of {name}")

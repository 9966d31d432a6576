"""The records that describe a checkpoint of ``torch.distributed.checkpoint``, read from a pickle and
checked, without looking up, calling or setting anything that the pickle names.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hybridtensor.distributed.checkpoint.untrusted.opcodes import PickleMachine

_DCP = "torch.distributed.checkpoint"
# Private to torch: where a writer of files has put an item, and what stands for a memory format. A
# torch that stores other records is told of here as one that asks for what no checkpoint needs.
_RECORDS: dict[tuple[str, str], type] = {
    (f"{_DCP}.metadata", "BytesStorageMetadata"): BytesStorageMetadata,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): ChunkStorageMetadata,
    (f"{_DCP}.metadata", "Metadata"): Metadata,
    (f"{_DCP}.metadata", "MetadataIndex"): MetadataIndex,
    (f"{_DCP}.metadata", "StorageMeta"): StorageMeta,
    (f"{_DCP}.metadata", "TensorProperties"): TensorProperties,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): TensorStorageMetadata,
    (f"{_DCP}.filesystem", "_StorageInfo"): _StorageInfo,
}
_LARGEST = 2**62


@dataclasses.dataclass(frozen=True)
class _Name:
    """A class or function that a pickle may name: never the thing itself, which it could change."""

    text: str
    record: type | None = None
    function: Callable[..., object] | None = None


def _size(numbers: object = ()) -> torch.Size:
    _require(type(numbers) is tuple and all(_is_count(n) for n in numbers), "a shape of counts")
    return torch.Size(numbers)  # type: ignore[arg-type]


def _layout(name: object) -> torch.layout:
    _require(name == "torch.strided", "a strided tensor")
    return torch.strided


def _memory_format(number: object) -> _MEM_FORMAT_ENCODING:
    _require(type(number) is int and 0 <= number <= 2, "a memory format")
    return _MEM_FORMAT_ENCODING(number)


def _path(*parts: object) -> pathlib.PurePath:
    _require(all(type(part) is str for part in parts), "a path of names")
    return pathlib.PurePosixPath(*parts)  # type: ignore[arg-type]


_FUNCTIONS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _memory_format,
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


def read_records(data: bytes) -> Metadata:
    """Return the metadata that a pickle is of.

    Raises:
        ValueError: If it is of anything else, damaged, or not complete.
    """
    machine = _RecordMachine()
    found = machine.read(data)
    machine.check_built()
    if type(found) is not Metadata:
        raise ValueError(f"it holds no metadata but {type(found).__name__}")
    _check_metadata(found)
    return found


class _RecordMachine(PickleMachine):
    """Makes records; each is built once, from fields that it has."""

    def __init__(self) -> None:
        super().__init__()
        self._unbuilt: dict[int, object] = {}

    def named(self, module: Any, name: Any) -> object:
        """See ``PickleMachine``."""
        if type(module) is str and type(name) is str:
            key, text = (module, name), f"{module}.{name}"
            if key in _RECORDS:
                return _Name(text, record=_RECORDS[key])
            if key in _FUNCTIONS:
                return _Name(text, function=_FUNCTIONS[key])
            if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
                return vars(torch)[name]
            module, name = module[:100], name[:100]
        raise ValueError(
            f"checkpoint: the metadata is a pickle that asks for {module}.{name}, which no "
            "checkpoint needs; do not use this checkpoint"
        )

    def call(self, function: Any, arguments: Any) -> object:
        """See ``PickleMachine``."""
        _require(type(function) is _Name and type(arguments) is tuple, "a call of a function")
        _require(function.function is not None, f"no call of {function.text}")
        return function.function(*arguments)

    def new(self, kind: Any, arguments: Any) -> object:
        """See ``PickleMachine``."""
        _require(type(kind) is _Name and kind.record is not None, "a record")
        _require(arguments == (), "a record without arguments")
        made: object = object.__new__(kind.record)
        self._unbuilt[id(made)] = made
        return made

    def build(self, state: Any, target: Any) -> None:
        """See ``PickleMachine``."""
        _require(self._unbuilt.pop(id(target), None) is target, "a record that is built once")
        if type(target) is TensorProperties:
            _build_properties(target, state)
            return
        _require(type(state) is dict and all(type(key) is str for key in state), "fields by name")
        fields = {field.name: field for field in dataclasses.fields(target)}
        unknown = [key[:100] for key in state if key not in fields]
        _require(not unknown, f"{type(target).__name__} with its own fields, not {unknown[:3]}")
        for name, field in fields.items():
            object.__setattr__(target, name, state[name] if name in state else _default(field))
        if type(target) is MetadataIndex:
            _check_index(target)

    def set_items(self, items: list[tuple[Any, Any]], target: Any) -> None:
        """See ``PickleMachine``."""
        _require(type(target) is dict, "items of a dictionary")
        for key, value in items:  # anything else might take for ever to hash
            complete = type(key) is MetadataIndex and id(key) not in self._unbuilt
            _require(type(key) is str or complete, "keys that are names")
            target[key] = value

    def check_built(self) -> None:
        """Raise ValueError if a record has no fields yet."""
        empty = [made for made in self._unbuilt.values() if dataclasses.fields(made)]  # type: ignore[arg-type]
        _require(not empty, "records with their fields")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is dataclasses.MISSING:
        raise ValueError(f"damaged metadata: the field {field.name} is required, got none")
    return field.default_factory()


def _build_properties(target: TensorProperties, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    fits = type(state) is tuple and [type(value) for value in state] == list(kinds)
    _require(fits, "the properties of a tensor")
    target.__setstate__(state)


def _check_index(index: MetadataIndex) -> None:
    _require(type(index.fqn) is str, "a name")
    _require(index.offset is None or type(index.offset) is torch.Size, "an offset")
    _require(index.index is None or _is_count(index.index), "a number of a chunk")


def _check_metadata(metadata: Metadata) -> None:
    """Raise ValueError unless all of it has its types, and every part of a tensor its place."""
    stored, places, paths = (
        metadata.state_dict_metadata,
        metadata.storage_data,
        metadata.planner_data,
    )
    _require(type(stored) is dict and type(places) is dict, "two tables")
    _require(metadata.version is None or type(metadata.version) is str, "a version")
    meta = metadata.storage_meta
    _require(meta is None or type(meta) is StorageMeta, "a record of the storage")
    for index, place in places.items():
        _require(type(index) is MetadataIndex and type(place) is _StorageInfo, "places by index")
        _check_place(place)
    _require(paths is None or type(paths) is dict, "paths by name")
    for name, path in (paths or {}).items():
        _require(type(name) is str and type(path) is tuple and len(path) > 0, "a path by name")
        _require(all(type(key) is str or _is_count(key) for key in path), "names in a path")
    chunks: set[int] = set()
    for name, entry in stored.items():
        _require(type(name) is str, "entries by name")
        if type(entry) is BytesStorageMetadata:
            _require(MetadataIndex(name) in places, f"a place of {name}")
        else:
            _check_tensor(name, entry, places, chunks)


def _check_place(place: _StorageInfo) -> None:
    _require(type(place.relative_path) is str, "the name of a file")
    _require(_is_count(place.offset) and _is_count(place.length), "a place in a file")
    # torch's readers would unpack what it says, into any amount of memory
    _require(not place.transform_descriptors, "items as they are, not transformed ones")


def _check_tensor(
    name: str, entry: Any, places: dict[MetadataIndex, _StorageInfo], chunks: set[int]
) -> None:
    """Raise ValueError unless a tensor's chunks cover it, and lie where there is room for them: who
    reserves memory for the tensor has read no less than it.
    """
    _require(type(entry) is TensorStorageMetadata, f"a tensor or bytes as {name}")
    _require(type(entry.properties) is TensorProperties, f"the properties of {name}")
    _require(type(entry.size) is torch.Size and type(entry.chunks) is list, f"the size of {name}")
    _require(id(entry.chunks) not in chunks, f"chunks of {name} alone")
    chunks.add(id(entry.chunks))
    covered, itemsize, seen = 0, entry.properties.dtype.itemsize, set()
    for chunk in entry.chunks:
        _require(type(chunk) is ChunkStorageMetadata, f"chunks of {name}")
        sizes, offsets = chunk.sizes, chunk.offsets
        _require(type(sizes) is type(offsets) is torch.Size, f"shapes of chunks of {name}")
        _require(len(sizes) == len(offsets) == len(entry.size), f"chunks in the shape of {name}")
        inside = all(o + n <= s for o, n, s in zip(offsets, sizes, entry.size, strict=True))
        place = places.get(MetadataIndex(name, offsets))
        _require(inside and place is not None, f"chunks inside of {name}")
        elements = math.prod(sizes)
        _require(place is None or place.length >= elements * itemsize, f"all bytes of {name}")
        covered += elements if offsets not in seen else 0
        seen.add(offsets)
    _require(covered >= math.prod(entry.size), f"chunks of the whole of {name}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _require(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"damaged metadata: {what} is required, got something else")

"""What a step stores of one entry: the bytes that ``torch.save`` makes of a tensor or a value, checked
before torch unpacks them, and read without running what they say.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch import Tensor

from hybridtensor.distributed.checkpoint.untrusted.numpy_values import NumpyReader
from hybridtensor.distributed.checkpoint.untrusted.opcodes import PickleMachine

_PICKLE, _DATA = "data.pkl", "data"
_DEEPEST, _LARGEST = 100, 10**7
_ITEMSIZES = {
    "BFloat16Storage": 2, "BoolStorage": 1, "ByteStorage": 1, "CharStorage": 1, "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8, "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "IntStorage": 4,
    "LongStorage": 8, "ShortStorage": 2, "UntypedStorage": 1,
}  # fmt: skip


def read_value(stream: IO[bytes]) -> Any:
    """Return a stored value that is no tensor; its tensors are on the host.

    Raises:
        ValueError: If it is damaged, or holds what cannot be read without running code.
    """
    check_archive(stream)
    stream.seek(0)
    arrays = NumpyReader()
    try:
        with torch.serialization.safe_globals(arrays.stand_ins()):
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
        return arrays.with_arrays(loaded)
    except Exception as error:  # damaged pickles raise whatever they like
        raise ValueError(f"{_first_line(error)}") from error


def pickled(value: object, name: str, who: str) -> io.BytesIO:
    """Return the bytes to store of a value, which ``read_value`` reads back.

    Raises:
        ValueError: If there are none; told as the fault of the part of ``name`` that has it.
    """
    try:
        return _round_trip(value)
    except ValueError as error:
        where, part = _unreadable(value, name)
        kind, dtype = type(part), getattr(part, "dtype", None)
        of = f" of {dtype}" if kind.__module__ == "numpy" and dtype is not None else ""
        raise ValueError(
            f"{who}: numbers, text, tensors, numpy's numbers and arrays, and lists, tuples and "
            f"dictionaries of these are required, got {kind.__module__}.{kind.__qualname__}{of} "
            f"in {where}; convert it, or leave it out ({error})"
        ) from error


def _round_trip(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:  # pickling runs what objects like
        raise ValueError(_first_line(error)) from error
    read_value(io.BytesIO(stream.getvalue()))
    return stream


def _unreadable(value: object, name: str) -> tuple[str, object]:
    """Return the innermost part of a value that cannot be read back, and where it is."""
    for _ in range(_DEEPEST):
        for key, part in _parts(value):
            try:
                _round_trip(part)
            except ValueError:
                value, name = part, f"{name}{key}"
                break
        else:
            break
    return name, value


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield f" (the key {key!r})", key
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield f"[{number}]", part


def read_tensor(stream: IO[bytes]) -> Tensor:
    """Return a tensor that was stored, on the host.

    Raises:
        ValueError: If it is damaged, or no tensor.
    """
    check_archive(stream)
    stream.seek(0)
    try:
        loaded = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{_first_line(error)}") from error
    if type(loaded) is not Tensor or loaded.layout != torch.strided or not loaded.is_cpu:
        raise ValueError(f"a plain tensor is required, got {type(loaded).__name__}")
    return loaded


def _first_line(error: Exception) -> str:
    """Return the reason that torch's reader of pickles gives, without its advice to read them otherwise."""
    text, _, reason = str(error).partition("WeightsUnpickler error: ")
    told = f"Weights only load failed: {reason.partition('. Please')[0]}" if reason else text
    return f"{type(error).__name__}: {told}".partition("\n")[0]


def check_archive(stream: IO[bytes]) -> None:
    """Raise ValueError for bytes that would take more memory than they are, or for ever, to unpack.

    torch reads its archives, and the pickle in them, as they say: it unpacks what is compressed,
    and takes a tensor's memory to be as large as the pickle says.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            records = archive.infolist()
            length = stream.seek(0, io.SEEK_END)
            sizes = {record.filename.partition("/")[2]: record.file_size for record in records}
            plain = all(
                record.compress_type == zipfile.ZIP_STORED and record.file_size <= length
                for record in records
            )
            if not plain or len(sizes) != len(records):
                raise ValueError("an archive of plain files, each once, is required")
            pickled = [record for record in records if record.filename.endswith(f"/{_PICKLE}")]
            if len(pickled) != 1:
                raise ValueError("an archive with one pickle is required")
            _ValueMachine(sizes).check(archive.read(pickled[0]))
    except ValueError:
        raise
    except Exception as error:  # damaged archives raise whatever they like
        raise ValueError(f"a damaged archive: {type(error).__name__}: {error}") from error


class _Node:
    """Stands for anything that a pickle makes."""

    __slots__ = ("parts", "text")

    def __init__(self, parts: list[Any], text: str | None = None) -> None:
        self.parts, self.text = parts, text


class _ValueMachine(PickleMachine):
    """Makes nothing, and finds how large and how deep what a pickle says would be.

    Args:
        sizes: Bytes of each file of the archive.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self._sizes = sizes

    def check(self, data: bytes) -> None:
        """Raise ValueError if it is too large or deep, or a part of itself."""
        limit = _LARGEST + len(data)
        if _extent(self.read(data)) > limit:
            raise ValueError(f"values of {limit} parts at most are read")

    def tuple_of(self, values: list[Any]) -> object:
        """See ``PickleMachine``; so are the others."""
        return _Node(values)

    def new_list(self) -> object:
        """See ``PickleMachine``."""
        return _Node([])

    def new_dict(self) -> object:
        """See ``PickleMachine``."""
        return _Node([])

    def append(self, values: list[Any], target: Any) -> None:
        """See ``PickleMachine``."""
        target.parts.extend(values)

    def set_items(self, items: list[tuple[Any, Any]], target: Any) -> None:
        """See ``PickleMachine``."""
        target.parts.extend(part for item in items for part in item)

    def named(self, module: Any, name: Any) -> object:
        """See ``PickleMachine``; torch's reader decides on the name."""
        return _Node([], f"{module}.{name}")

    def call(self, function: Any, arguments: Any) -> object:
        """See ``PickleMachine``."""
        return _Node([function, arguments])

    def new(self, kind: Any, arguments: Any) -> object:
        """See ``PickleMachine``."""
        return _Node([kind, arguments])

    def build(self, state: Any, target: Any) -> None:
        """See ``PickleMachine``."""
        target.parts.append(state)

    def persistent(self, key: Any) -> object:
        """See ``PickleMachine``: the memory of a tensor, which lies in a file of the archive."""
        kind, storage, name, _, elements = key.parts
        itemsize = _ITEMSIZES[storage.text.rpartition(".")[2]]
        if kind != "storage" or type(elements) is not int or elements < 0:
            raise ValueError("the memory of a tensor is required")
        if elements * itemsize > self._sizes[f"{_DATA}/{name}"]:
            raise ValueError("a tensor in its own memory is required")
        return _Node([])


def _extent(root: Any) -> int:
    """Return how many parts a value has, those that are in it several times counted as often."""
    known: dict[int, tuple[int, int]] = {}  # by id: extent and depth
    above: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        value = waiting[-1]
        parts = value.parts if isinstance(value, _Node) else []
        missing = [part for part in parts if isinstance(part, _Node) and id(part) not in known]
        if missing:
            above.add(id(value))
            if any(id(part) in above for part in missing):
                raise ValueError("a value that is no part of itself is required")
            waiting.extend(missing)
            continue
        inner = [known.get(id(part), (1, 0)) for part in parts]
        extent, depth = 1 + sum(n for n, _ in inner), 1 + max((d for _, d in inner), default=0)
        if depth > _DEEPEST:
            raise ValueError(f"a value of {_DEEPEST} levels at most is required")
        known[id(value)] = extent, depth
        waiting.pop()
    return known[id(root)][0]

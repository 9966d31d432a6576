"""Stored tensors and values as ``torch.save`` writes them, checked before torch unpacks them and read without
running code."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import IO

import torch
from torch import Tensor

from hybridtensor.untrusted.numpy_values import NumpyReader
from hybridtensor.untrusted.scan import Scan

_PICKLE = "data.pkl"
_DEEPEST = 100


def read_value(stream: IO[bytes]) -> object:
    """Return a stored non-tensor with its tensors on the host; raise ValueError if it is damaged or not safe."""
    return _load(stream, NumpyReader())


def read_tensor(stream: IO[bytes]) -> Tensor:
    """Return a stored tensor on the host; raise ValueError if it is damaged or no tensor."""
    loaded = _load(stream)
    if type(loaded) is not Tensor or loaded.layout != torch.strided or not loaded.is_cpu:
        raise ValueError(f"a plain tensor is required, got {type(loaded).__name__}")
    return loaded


def _load(stream: IO[bytes], arrays: NumpyReader | None = None) -> object:
    check_archive(stream)
    stream.seek(0)
    try:
        with torch.serialization.safe_globals(arrays.stand_ins() if arrays else []):
            loaded = torch.load(stream, map_location="cpu", weights_only=True)
        return arrays.with_arrays(loaded) if arrays else loaded
    except Exception as error:  # damaged pickles raise whatever they like
        raise ValueError(_first_line(error)) from error


def pickled(value: object, name: str, who: str) -> io.BytesIO:
    """Pickle a value so that ``read_value`` can read it back; raise ValueError with the part of ``name`` that cannot
    be."""
    try:
        return _round_trip(value)
    except ValueError as error:
        where, part = _unreadable(value, name)
        kind, dtype = type(part), getattr(part, "dtype", None)
        of = f" of {dtype}" if kind.__module__ == "numpy" and dtype is not None else ""
        raise ValueError(
            f"{who}: numbers, text, tensors, numpy's numbers and arrays, and lists, tuples, sets and "
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


def _first_line(error: Exception) -> str:
    """Return the first line of an error from torch's unpickler, without its advice to disable the checks."""
    text, _, reason = str(error).partition("WeightsUnpickler error: ")
    message = f"Weights only load failed: {reason.partition('. Please')[0]}" if reason else text
    return f"{type(error).__name__}: {message}".partition("\n")[0]


def check_archive(stream: IO[bytes]) -> None:
    """Raise ValueError for bytes that would take more memory than they are, or for ever, to unpack."""
    # torch reads its archives, and the pickle in them, as they say: it unpacks what is compressed, and takes a tensor's
    # memory to be as large as the pickle says.
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
            pickles = [record for record in records if record.filename.endswith(f"/{_PICKLE}")]
            if len(pickles) != 1:
                raise ValueError("an archive with one pickle is required")
            Scan(None, sizes).run(archive.read(pickles[0]))
    except ValueError:
        raise
    except Exception as error:  # damaged archives raise whatever they like
        raise ValueError(f"a damaged archive: {type(error).__name__}: {error}") from error

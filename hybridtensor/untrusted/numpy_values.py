"""Numpy's numbers and arrays in the pickles of a checkpoint, read without numpy's own unpickling.

That takes what a pickle says of a dtype, or of objects in an array, as it is. Here a dtype is one of
numbers, and an array the bytes that it should have. Needs numpy where a checkpoint has some.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)")


class _DType:
    """A numeric dtype named by a pickle."""

    def __init__(self, code: object, align: object = False, copy: object = True) -> None:
        if type(code) is not str or not _NUMBERS.fullmatch(code):
            raise ValueError(f"a numpy dtype of numbers is required, got {str(code)[:20]!r}")
        self.code, self.order = code, "="

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise ValueError("the state of a numpy dtype is required")
        self.order = state[1]

    def take(
        self, data: object, shape: tuple[int, ...], order: Literal["C", "F"] = "C"
    ) -> np.ndarray:
        """Return the array of ``shape`` stored in bytes."""
        import numpy as np

        dtype = np.dtype(self.order + self.code)
        if type(data) is not bytes or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the bytes of a numpy array of {shape} are required")
        return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order=order)


class _Array:
    """Placeholder of an array until the whole pickle is read."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.values: np.ndarray | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        counts = type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape)
        if type(dtype) is not _DType or not counts:
            raise ValueError("a numpy array of numbers is required")
        self.values = dtype.take(data, shape, "F" if fortran else "C")


class _ArrayType:
    """Placeholder of numpy's array class, which pickles name but never call."""


def _scalar(dtype: object, data: object = None) -> object:
    if type(dtype) is not _DType:
        raise ValueError("a numpy number is required")
    return dtype.take(data, ())[()]


def _no_bytes(*arguments: object) -> bytes:
    if arguments:
        raise ValueError("bytes of no argument are required")
    return b""


class NumpyReader:
    """Reads numpy's values in one pickle; arrays are complete once all of it is read."""

    def __init__(self) -> None:
        self._made: list[_Array] = []

    def stand_ins(self) -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
        """Return the functions that replace numpy's own, by the name in pickles."""
        return [
            (_DType, "numpy.dtype"),
            (_ArrayType, "numpy.ndarray"),
            (_no_bytes, "builtins.bytes"),  # which pickles call for bytes without any
            (_Array, "hybridtensor.array"),  # states are for registered classes only
            *((_scalar, f"{module}.scalar") for module in _MODULES),
            *((self._reconstruct, f"{module}._reconstruct") for module in _MODULES),
        ]

    def _reconstruct(self, kind: object, shape: object, code: object) -> _Array:
        if kind is not _ArrayType:
            raise ValueError("a numpy array is required")
        self._made.append(_Array())
        return self._made[-1]

    def with_arrays(self, value: object) -> object:
        """Replace placeholders by their arrays in nested containers; raise ValueError for one elsewhere or without
        data."""
        known: dict[int, object] = {}
        found = _replaced(value, known)
        if not all(id(made) in known for made in self._made):
            raise ValueError("numpy arrays in lists, tuples and dictionaries are required")
        return found


def _replaced(value: Any, known: dict[int, object]) -> object:
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("a numpy array with its bytes is required")
        known[id(value)] = value.values
        return value.values
    if type(value) in (_DType, type, FunctionType, MethodType):
        raise ValueError("a value is required, got a name of numpy's")
    if type(value) is tuple:
        if id(value) not in known:
            known[id(value)] = tuple(_replaced(item, known) for item in value)
        return known[id(value)]
    if type(value) in (list, dict, OrderedDict, Counter) and id(value) not in known:
        known[id(value)] = value
        for key in range(len(value)) if type(value) is list else value:
            value[key] = _replaced(value[key], known)
    return value

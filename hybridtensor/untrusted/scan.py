"""A look through a pickle before it is read: nothing in it is made, looked up or called.

Unpicklers have no limits: on how deep values are, how often one is part of others, which takes for
ever to hash, and how much memory a tensor, a memo or a frame says it has.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Iterator, Mapping, Sequence
from pickletools import OpcodeInfo
from typing import Any

_DEEPEST, _LARGEST = 100, 10**7
# Numbers that are equal modulo 2 ** 61 - 1 have one hash: dictionaries of them take for ever
_MOST = 2**60
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LEAVES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_PUTS, _GETS = {"BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"BINGET", "LONG_BINGET"}
# What they take from the stack, None all above the last mark; no opcode here allocates what it says
_MAKING = {
    "EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "EMPTY_LIST": 0, "EMPTY_DICT": 0,
    "REDUCE": 2, "NEWOBJ": 2,
}  # fmt: skip
# And what they add to where there is a list of names: nothing that has methods or fields of its own
_ADDING = {
    "APPEND": (1, "EMPTY_LIST"), "APPENDS": (None, "EMPTY_LIST"), "SETITEM": (2, "EMPTY_DICT"),
    "SETITEMS": (None, "EMPTY_DICT"), "BUILD": (1, "NEWOBJ"),
}  # fmt: skip
_ITEMSIZES = {
    "BFloat16Storage": 2, "BoolStorage": 1, "ByteStorage": 1, "CharStorage": 1, "ComplexDoubleStorage": 16,
    "ComplexFloatStorage": 8, "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "IntStorage": 4,
    "LongStorage": 8, "ShortStorage": 2, "UntypedStorage": 1,
}  # fmt: skip


class _Part:
    """A symbolic value on the scanned stack: the opcode that made it, its parts, their total ``extent`` and
    ``depth``."""

    __slots__ = ("depth", "extent", "held", "made_by", "name", "parts")

    def __init__(self, made_by: str, parts: Sequence[object] = (), limit: int = 1, name: str = ""):
        self.made_by, self.name, self.parts = made_by, name, parts if "TUPLE" in made_by else ()
        self.extent, self.depth, self.held = 1, 1, False
        if parts:
            self.take(parts, limit)

    def take(self, parts: Sequence[object], limit: int) -> None:
        """Add parts; no genuine pickle adds to a value that is already part of another."""
        self.extent += len(parts)
        for part in parts:
            if type(part) is _Part:
                part.held = True
                self.extent += part.extent - 1
                if part.depth >= self.depth:
                    self.depth = part.depth + 1
        if self.held:
            raise ValueError("a value that is no part of itself is required")
        if self.depth > _DEEPEST:
            raise ValueError(f"a value of {_DEEPEST} levels at most is required")
        if self.extent > limit:
            raise ValueError(f"values of {limit} parts at most are read")


class Scan:
    """Looks through one pickle of tuples, lists, dictionaries, numbers, text, and calls.

    Args:
        uses: Names that it may have, each with the opcode that may use it: NEWOBJ, REDUCE or none.
            None allows all, for a reader with a list of its own.
        sizes: Bytes of each file that may be the memory of a tensor.
    """

    def __init__(self, uses: Mapping[str, str] | None, sizes: Mapping[str, int]) -> None:
        self._uses, self._sizes = uses, sizes
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below marks
        self._memo: dict[int, Any] = {}
        self._frame = 0  # where the last one ends

    def run(self, data: bytes) -> None:
        """Scan a pickle; raise ValueError if it is not harmless. A damaged one may raise anything."""
        stream, limit = io.BytesIO(data), _LARGEST + len(data)
        # Nearly all that is in a memo is never fetched: it would be thousands of objects for Python's
        # collector of garbage, which then looks at all of the process
        fetched = {at for code, at, _ in pickletools.genops(data) if code.name in _GETS}
        opcodes: Iterator[tuple[OpcodeInfo, Any, Any]] = pickletools.genops(stream)
        for opcode, argument, start in opcodes:
            name = opcode.name
            if start >= self._frame > 0:
                self._end_frame(start)
            if name in _LEAVES:
                if name == "LONG1" and self._uses is not None and abs(argument) >= _MOST:
                    raise ValueError("numbers below 2 ** 60 are required: larger ones share hashes")
                self._stack.append(argument)
            elif name in _PUTS:
                index = len(self._memo) if argument is None else argument
                if index > start:  # memory is reserved up to it
                    raise ValueError("a damaged pickle: memos in their order are required")
                value = self._stack[-1]
                self._memo[index] = value if index in fetched else None
            elif name in _GETS:
                self._stack.append(self._memo[argument])
            elif name in _CONSTANTS:
                self._stack.append(_CONSTANTS[name])
            elif name in _MAKING:
                parts = self._pop(_MAKING[name])
                if name in ("REDUCE", "NEWOBJ"):
                    self._check_use(name, *parts)
                self._stack.append(_Part(name, parts, limit))
            elif name in _ADDING:
                parts = self._pop(_ADDING[name][0])
                self._check_adding(name, parts, self._stack[-1])
                self._stack[-1].take(parts, limit)
            elif name == "MARK":
                self._below.append(self._stack)
                self._stack = []
            elif name in ("GLOBAL", "STACK_GLOBAL"):
                words = argument.split(" ", 1) if argument else self._pop(2)
                self._stack.append(_Part(name, name=self._checked_name(*words)))
            elif name == "BINPERSID":
                self._check_storage(*self._pop(1)[0].parts)
                self._stack.append(_Part(name))
            elif name == "FRAME" and not self._frame:
                self._frame = stream.tell() + argument
            elif name != "STOP" and (name != "PROTO" or start):
                raise ValueError(f"a pickle with the opcode {name}, which no checkpoint needs")
        if self._frame:
            self._end_frame(stream.tell())
        if len(self._stack) != 1 or self._below or stream.tell() != len(data):
            raise ValueError("a damaged pickle: it has no end, or more behind it")

    def _end_frame(self, end: int) -> None:
        """Raise ValueError for a frame that ends within an opcode: Python reads on elsewhere then."""
        if end != self._frame:
            raise ValueError("a damaged pickle: frames of whole opcodes are required")
        self._frame = 0

    def _pop(self, count: int | None) -> list[Any]:
        if count is None:
            values, self._stack = self._stack, self._below.pop()
            return values
        start = len(self._stack) - count
        if start < 0:
            raise ValueError("a damaged pickle: it takes what is not there")
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def _checked_name(self, module: str, name: str) -> str:
        found = f"{module}.{name}"
        if self._uses is not None and found not in self._uses:
            raise ValueError(
                f"checkpoint: the metadata is a pickle that asks for {found[:200]}, which no "
                "checkpoint needs; do not use this checkpoint"
            )
        return found

    def _check_use(self, by: str, thing: _Part, arguments: _Part) -> None:
        """Raise ValueError for a call, or an object, of what may not be used so."""
        if self._uses is None:
            return
        if self._uses.get(thing.name) != by:
            raise ValueError(f"a damaged pickle: no {by} of {thing.name} is required")
        if by == "NEWOBJ" and arguments.made_by != "EMPTY_TUPLE":
            raise ValueError("a damaged pickle: a record without arguments is required")

    def _check_adding(self, by: str, parts: list[Any], target: _Part) -> None:
        """Raise ValueError for what no genuine pickle adds to a value."""
        if by == "BUILD" and target.made_by not in ("REDUCE", "NEWOBJ"):
            raise ValueError("a damaged pickle: an object that is built once is required")
        if by in ("SETITEM", "SETITEMS") and len(parts) % 2:
            raise ValueError("a damaged pickle: a key without a value")
        if self._uses is not None:
            self._check_record(by, parts, target)
        if by == "BUILD":
            target.made_by = by

    def _check_record(self, by: str, parts: list[Any], target: _Part) -> None:
        """Raise ValueError for what is added to anything but records, lists and dictionaries."""
        if target.made_by != _ADDING[by][1]:
            raise ValueError(f"a damaged pickle: no {by} of {target.made_by} is required")
        # A pair of dictionaries would be a state for ``setattr``
        if by == "BUILD" and len(parts[0].parts) == 2:
            raise ValueError("a damaged pickle: fields by name are required")
        # Numbers can be chosen so that a dictionary of them takes for ever
        keys = parts[::2] if target.made_by == "EMPTY_DICT" else []
        if not all(type(key) is str or getattr(key, "made_by", "") == "BUILD" for key in keys):
            raise ValueError("a damaged pickle: keys that are names are required")

    def _check_storage(
        self, kind: str, storage: _Part, name: str, _: str, elements: object
    ) -> None:
        """Raise ValueError for a tensor whose file in the archive is smaller than its memory."""
        itemsize = _ITEMSIZES[storage.name.rpartition(".")[2]]
        if kind != "storage" or type(elements) is not int or elements < 0:
            raise ValueError("the memory of a tensor is required")
        if elements * itemsize > self._sizes.get(f"data/{name}", -1):
            raise ValueError("a tensor in its own memory is required")

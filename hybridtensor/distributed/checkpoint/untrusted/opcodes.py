"""Pickles as data: a machine of few opcodes that makes containers, and leaves all else to who asks.

``pickletools`` takes the bytes apart; nothing in a pickle is looked up, called or set by itself.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any, TypeAlias

_PLAIN = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"})  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})

Operation: TypeAlias = Callable[[Any], None]


class PickleMachine:
    """Reads one pickle of tuples, lists, dictionaries, numbers and text.

    Derived classes say what becomes of names, calls, objects and keys. An opcode that is not among
    the methods ends the reading: those that allocate what a number in the pickle says, for one.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.opcodes = 0
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._operations: dict[str, Operation] = {
            "MARK": lambda _: self._marks.append(len(self.stack)),
            "TUPLE": lambda _: self._push(self.tuple_of(self._above_mark())),
            "EMPTY_LIST": lambda _: self._push(self.new_list()),
            "EMPTY_DICT": lambda _: self._push(self.new_dict()),
            "APPEND": lambda _: self.append(self._pop(1), self._top()),
            "APPENDS": lambda _: self.append(self._above_mark(), self._top()),
            "SETITEM": lambda _: self._set_items(self._pop(2)),
            "SETITEMS": lambda _: self._set_items(self._above_mark()),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._top()),
            "GLOBAL": lambda text: self._push(self.named(*text.split(" ", 1))),
            "STACK_GLOBAL": lambda _: self._push(self.named(*self._pop(2))),
            "REDUCE": lambda _: self._push(self.call(*self._pop(2))),
            "NEWOBJ": lambda _: self._push(self.new(*self._pop(2))),
            "BUILD": lambda _: self.build(self._pop(1)[0], self._top()),
            "BINPERSID": lambda _: self._push(self.persistent(self._pop(1)[0])),
        }
        for name in ("BINPUT", "LONG_BINPUT"):
            self._operations[name] = lambda index: self._memo.__setitem__(index, self._top())
        for name in ("BINGET", "LONG_BINGET"):
            self._operations[name] = lambda index: self._push(self._memo[index])

    def read(self, data: bytes) -> Any:
        """Return the value that the pickle is of.

        Raises:
            ValueError: If it is damaged, or holds what is not admitted.
        """
        try:
            for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
                self.opcodes += 1
                self._do(opcode.name, argument)
        except ValueError:
            raise
        except Exception as error:  # damaged pickles raise whatever they like
            raise ValueError(f"a damaged pickle: {type(error).__name__}: {error}") from error
        if len(self.stack) != 1 or self._marks:
            raise ValueError("a damaged pickle: it has no end")
        return self.stack[0]

    def _do(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self._push(self.value(argument))
        elif name in _TUPLES:
            self._push(self.tuple_of(self._pop(_TUPLES[name])))
        elif name in _CONSTANTS:
            self._push(self.value(_CONSTANTS[name]))
        elif name in self._operations:
            self._operations[name](argument)
        elif name not in _IGNORED:
            raise ValueError(f"a pickle with the opcode {name}, which no checkpoint needs")

    # -- the stack
    # -----------------------------------------------------------------------------------------------------------

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _top(self) -> Any:
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        start = len(self.stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise ValueError("a damaged pickle: it takes what is not there")
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _above_mark(self) -> list[Any]:
        values = self._pop(len(self.stack) - self._marks[-1])
        self._marks.pop()
        return values

    def _set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a damaged pickle: a key without a value")
        self.set_items(list(zip(items[::2], items[1::2], strict=True)), self._top())

    # -- what becomes of it
    # --------------------------------------------------------------------------------------------------

    def value(self, value: object) -> Any:
        """Return the value that stands for a number, text, or None."""
        return value

    def tuple_of(self, values: list[Any]) -> Any:
        """Return a tuple."""
        return tuple(values)

    def new_list(self) -> Any:
        """Return an empty list."""
        return []

    def new_dict(self) -> Any:
        """Return an empty dictionary."""
        return {}

    def append(self, values: list[Any], target: Any) -> None:
        """Append to a list."""
        if type(target) is not list:
            raise ValueError(f"a damaged pickle: it appends to {type(target).__name__}")
        target.extend(values)

    def set_items(self, items: list[tuple[Any, Any]], target: Any) -> None:
        """Set items of a dictionary."""
        raise _refused("a dictionary")

    def named(self, module: Any, name: Any) -> Any:
        """Return the value that stands for a name in a module; it is not looked up."""
        raise _refused(f"{module}.{name}")

    def call(self, function: Any, arguments: Any) -> Any:
        """Return the value that stands for a call."""
        raise _refused("a call")

    def new(self, kind: Any, arguments: Any) -> Any:
        """Return the value that stands for a new object."""
        raise _refused("an object")

    def build(self, state: Any, target: Any) -> None:
        """Give an object its state."""
        raise _refused("the state of an object")

    def persistent(self, key: Any) -> Any:
        """Return the value that stands for a reference to outside the pickle."""
        raise _refused("a reference")


def _refused(what: str) -> ValueError:
    return ValueError(f"a pickle that asks for {what}, which no checkpoint needs")

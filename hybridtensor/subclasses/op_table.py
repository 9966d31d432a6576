"""A table from operators to handlers: one per tensor class, exact, without fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch

Func = Any
"""An operator of torch, or one of its functions."""
Args = tuple[Any, ...]
"""What it is called with, by position."""
Kwargs = dict[str, Any]
"""What it is called with, by name."""
Handler = Callable[[Func, Args, Kwargs], Any]
H = TypeVar("H", bound=Handler)


class OpTable:
    """Handlers ``(func, args, kwargs) -> result`` by exact operator.

    Registering an operator twice is an error, and so is looking up one that is not there: an
    operator that a class has not thought about must not quietly dequantize.

    Args:
        owner: Name of the class, for errors.
        advice: What a user should do about an operator that is not there.
    """

    def __init__(self, owner: str, advice: str) -> None:
        self._owner = owner
        self._advice = advice
        self.handlers: dict[Func, Handler] = {}

    def register(self, *funcs: Func) -> Callable[[H], H]:
        """Return a decorator that makes a function the handler of ``funcs``.

        Raises:
            TypeError: If an operator is given without its overload (``aten.mm`` rather than
                ``aten.mm.default``).
            ValueError: If one has a handler already.
        """

        for func in funcs:
            if isinstance(func, torch._ops.OpOverloadPacket):
                raise TypeError(
                    f"OpTable of {self._owner}: an exact overload is required, got {func}; name it"
                )

        def add(handler: H) -> H:
            for func in funcs:
                if func in self.handlers:
                    raise ValueError(
                        f"OpTable of {self._owner}: {func} has a handler already; register it once"
                    )
                self.handlers[func] = handler
            return handler

        return add

    def call(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run the handler of ``func``.

        Raises:
            NotImplementedError: If there is none.
        """
        handler = self.handlers.get(func)
        if handler is None:
            self.refuse(func)
        return handler(func, args, kwargs)

    def refuse(self, func: Func) -> NoReturn:
        """Raise NotImplementedError for an operator that the class does not answer."""
        raise NotImplementedError(
            f"{self._owner}: {func} is not an operation of this class; {self._advice}"
        )

    def __iter__(self) -> Iterator[Func]:
        return iter(self.handlers)

    def __len__(self) -> int:
        return len(self.handlers)


def overloads(*packets: Func) -> list[Func]:
    """Return every exact overload of the ``aten`` operators given that takes tensors and has no
    ``out``.
    """
    found = []
    for packet in packets:
        for name in packet.overloads():
            op = getattr(packet, name)
            arguments = op._schema.arguments  # private; nothing else says what an operator writes
            has_out = any(
                a.kwarg_only and a.alias_info and a.alias_info.is_write for a in arguments
            )
            if not has_out and any("Tensor" in str(a.type) for a in arguments):
                found.append(op)
    return found

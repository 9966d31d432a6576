"""A table from operators to handlers: one per tensor class, exact, without fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils._pytree import tree_leaves

Func = Any
"""An operator of torch, or one of its functions."""
Args = tuple[Any, ...]
"""What it is called with, by position."""
Kwargs = dict[str, Any]
"""What it is called with, by name."""
Handler = Callable[[Func, Args, Kwargs], object]
H = TypeVar("H", bound=Handler)


class OpTable:
    """Handlers ``(func, args, kwargs) -> result`` by exact operator; ``of_functions`` by what is called above autograd,
    where an operator has no overload yet."""

    # A missing operator raises: one that a class has not considered must not dequantize silently.

    def __init__(self, owner: str, advice: str, *, of_functions: bool = False) -> None:
        self._owner = owner
        self._of_functions = of_functions
        self._advice = advice
        self._of_others: Handler | None = None
        self._elementwise: tuple[Handler, Handler] | None = None
        self.handlers: dict[Func, Handler] = {}

    def register(self, *funcs: Func) -> Callable[[H], H]:
        """Return a decorator that registers a handler; raise TypeError without an overload, ValueError for a second
        handler."""

        for func in funcs:
            if isinstance(func, torch._ops.OpOverloadPacket) and not self._of_functions:
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

    def register_others(self, handler: H) -> H:
        """Register the handler of operators whose schema declares mutations: other libraries', and torch's that only
        write what is of the class."""
        self._of_others = handler
        return handler

    def register_elementwise(self, *, reading: Handler, writing: Handler) -> None:
        """Register the handlers of all elementwise operators of torch that have none of their own: they multiply no
        matrices."""
        self._elementwise = reading, writing

    def call(self, func: Func, args: Args, kwargs: Kwargs) -> Any:
        """Run the handler of ``func``, or of the operators that it is composed of; raise NotImplementedError if there
        is none."""
        handler = self.handlers.get(func)
        if handler is None and self._elementwise is not None and _is_elementwise(func):
            handler = self._elementwise[func._schema.is_mutable]  # private, as below
            if _has_out(func):
                _require_size_of_out(func, args, kwargs)
        if handler is None:
            # torch decomposes composite operators where autograd is; in inference mode they come here whole.
            if isinstance(func, torch._ops.OpOverload) and _is_composite(func):
                return func.decompose(*args, **kwargs)
            handler = self._handler_of_others(func, args, kwargs)
        return handler(func, args, kwargs)

    def _handler_of_others(self, func: Func, args: Args, kwargs: Kwargs) -> Handler:
        library = getattr(func, "namespace", "aten")
        if self._of_others is None:
            self.refuse(func, args, kwargs)
        if library in _OF_TORCH:
            if not _only_writes(func, args, kwargs):
                self.refuse(func, args, kwargs)
            return self._of_others
        if not func._schema.is_mutable:  # private; nothing else says whether an operator writes
            who = f"{self._owner}{of_layers((args, kwargs))}"
            raise NotImplementedError(
                f"{who}: {func} is an operator of the library {library}, whose schema names nothing that it writes, so "
                "that it may multiply the weight unquantized; pass it dequantize(), or declare what it writes "
                "(mutates_args)"
            )
        return self._of_others

    def refuse(self, func: Func, args: Args, kwargs: Kwargs) -> NoReturn:
        """Raise NotImplementedError for an operator without a handler."""
        who = f"{self._owner}{of_layers((args, kwargs))}"
        raise NotImplementedError(
            f"{who}: {func} is not an operation of this class; {self._advice}"
        )

    def __iter__(self) -> Iterator[Func]:
        return iter(self.handlers)

    def __len__(self) -> int:
        return len(self.handlers)


def of_layers(values: object) -> str:
    """Return for an error of which layers the weights among values are, where these have names."""
    found = (getattr(leaf, "layer_name", "") for leaf in tree_leaves(values))
    names = ", ".join(dict.fromkeys(name for name in found if name))
    return f" of layer {names}" if names else ""


def name_of_weights(values: object) -> str:
    """Return how an error names the weights among values: by their layers, where these have names."""
    return f"the weight{of_layers(values) or ' of a layer'}"


@functools.cache
def _is_composite(func: torch._ops.OpOverload[..., Any]) -> bool:
    """Return whether torch composes an operator of others on all devices; private, and what fake tensors ask, too."""
    if func is torch.ops.aten.set_data.default:  # replaces what a tensor is, and computes nothing
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@functools.cache
def _is_elementwise(func: Func) -> bool:
    """Return whether torch tags an operator as elementwise, or the one that it is the in-place or ``_foreach_`` form
    of: these forms are not always tagged."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
        return False
    # ``max.unary_out`` is not, though ``max.out`` is; Dynamo makes ``prims.fma`` of ``addcdiv_`` and others
    if _has_out(func) or func.namespace == "prims":
        return torch.Tag.pointwise in func.tags
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
    packet = getattr(torch.ops.aten, name if name.endswith("__") else name.removesuffix("_"), None)
    return packet is not None and any(
        torch.Tag.pointwise in getattr(packet, own).tags for own in packet.overloads()
    )


def _require_size_of_out(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Raise NotImplementedError where an elementwise operator would resize what it writes into."""
    read = [value.shape for value in args if isinstance(value, torch.Tensor)]
    size = torch.broadcast_shapes(*read)
    for out in written_by(func, args, kwargs):
        if isinstance(out, torch.Tensor) and out.shape != size:
            raise NotImplementedError(
                f"{func} would resize {name_of_weights(out)} to {list(size)}, got out of {list(out.shape)}; pass one "
                "of the size of the result"
            )


@functools.cache
def _has_out(op: Func) -> bool:
    """Return whether an operator writes into ``out``, by its schema, which is private."""
    return any(argument.is_out for argument in op._schema.arguments)


def _only_writes(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Return whether an operator writes values into all tensors of a class among its arguments, and reads none."""
    # An operator that replaces a tensor's memory or shape writes no values into it. One with ``out`` may resize that.
    if not isinstance(func, torch._ops.OpOverload) or torch.Tag.inplace_view in func.tags:
        return False
    if func in (torch.ops.aten.set_data.default, torch.ops.aten._resize_output_.default):
        return False
    read = []
    for position, argument in enumerate(func._schema.arguments):
        if not argument.is_write:
            given = args[position : position + 1] or (kwargs.get(argument.name),)
            read += tree_leaves(given)
        elif argument.kwarg_only:
            return False
    plain = torch.Tensor, torch.nn.Parameter
    return func._schema.is_mutable and not any(
        isinstance(item, torch.Tensor) and type(item) not in plain for item in read
    )


_OF_TORCH = frozenset(
    [
        "_c10d_functional",
        "_c10d_functional_autograd",
        "_dtensor",
        "_quantized",
        "aten",
        "c10d",
        "c10d_functional",
        "debugprims",
        "fsdp",
        "higher_order",
        "inductor",
        "mkldnn",
        "mkldnn_prim",
        "mkl",
        "nvprims",
        "onednn",
        "prim",
        "prims",
        "profiler",
        "quantized",
        "rngprims",
        "sparse",
        "symm_mem",
    ]
)
"""Libraries of operators that come with torch, for which classes register handlers one by one."""


def written_by(func: Func, args: Args, kwargs: Kwargs) -> Iterator[object]:
    """Yield the arguments that an operator mutates by its schema, list items one by one."""
    for position, name in _mutated(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else [value]


@functools.cache
def _mutated(func: Func) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operator mutates by its schema."""
    # ``_schema`` is private; nothing else says which arguments an operator writes.
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.is_write
    ]


def overloads(*packets: Func) -> list[Func]:
    """Return every overload of ``aten`` operators that takes tensors and has no ``out``."""
    found = []
    for packet in packets:
        for name in packet.overloads():
            op = getattr(packet, name)
            if not _has_out(op) and any("Tensor" in str(a.type) for a in op._schema.arguments):
                found.append(op)
    return found

"""The ``hybridtensor::`` operator namespace and the one way to add an operator to it."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch._guards
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("hybridtensor", "DEF")
_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {}
"""By name and type of device; "" is any."""
F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
T = TypeVar("T")
Operator: TypeAlias = OpOverload[..., Any]
"""An operator of any arguments and results."""


def left_whole(function: F) -> F:
    """Keep Dynamo from tracing into a function; AOTAutograd then traces it."""
    # This imports the compiler, and with it DTensor, 1.5 s together; torch has no later moment for it.
    whole: F = torch.compiler.allow_in_graph(function)
    return whole


def outside_graphs(reason: str) -> Callable[[F], F]:
    """Return a decorator that breaks the graph at a function and runs it eagerly; ``reason`` is for Dynamo's logs."""
    disable: Callable[[F], F] = torch.compiler.disable(reason=reason)
    return disable


def compiled_in_callers_only(function: F) -> F:
    """Keep Dynamo from compiling a function, and all that it calls, where eager code calls it; graphs trace it."""
    # Between graphs of one region, Dynamo would compile what eager code calls, with views of weights as inputs, which
    # guards do not know. Private; ``torch._dynamo.eval_frame.skip_code`` sets it for one function, and
    # ``torch.compiler.disable`` would break the caller's graph, too.
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def compile_methods_in_callers_only(cls: type) -> None:
    """Apply ``compiled_in_callers_only`` to what a class, and its bases in this package, define."""
    for base in cls.__mro__:
        for member in vars(base).values() if base.__module__.startswith("hybridtensor.") else ():
            is_property = isinstance(member, property)
            for one in (member.fget, member.fset, member.fdel) if is_property else (member,):
                function = getattr(one, "__func__", one)  # of a class method
                if isinstance(function, types.FunctionType):
                    compiled_in_callers_only(function)


def define(
    schema: str, *, reference: Callable[P, T], fake: Callable[..., object]
) -> OpOverload[P, T]:
    """Register an operator and return its overload.

    The reference runs on every device, unless ``implement`` has something faster there. Operators
    are opaque to autograd (the linear's autograd function is where gradients are defined) and to
    ``torch.compile``; the code that Inductor generates calls implementations without the dispatcher.

    Args:
        schema: ``name(arguments) -> returns`` in torch's schema language.
        reference: The definition, in plain torch operations.
        fake: Shapes, strides and dtypes of the result, for tracing.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    _IMPLEMENTATIONS[name] = {"": reference}

    @functools.wraps(fake)
    def traced(*arguments: object, **options: object) -> object:
        _lower_in_inductor(name, arguments, options)
        return fake(*arguments, **options)

    torch.library.register_fake(f"hybridtensor::{name}", traced, lib=_LIBRARY)
    overload: OpOverload[P, T] = getattr(torch.ops.hybridtensor, name).default
    return overload


def implement(name: str, cuda: Callable[..., object]) -> None:
    """Register a faster implementation on GPUs, with the same bits."""
    _LIBRARY.impl(name, cuda, "CUDA")
    _IMPLEMENTATIONS[name]["cuda"] = cuda


def implement_autograd(name: str) -> Callable[[F], F]:
    """Return a decorator that registers what autograd runs for an operator, above the implementations."""

    def add(function: F) -> F:
        _LIBRARY.impl(name, function, "Autograd")
        return function

    return add


def implementation(name: str, device_type: str) -> Callable[..., Any]:
    """Return the implementation that the dispatcher runs on a device type."""
    known = _IMPLEMENTATIONS[name]
    return known.get(device_type, known[""])


def _lower_in_inductor(
    name: str, arguments: tuple[object, ...], options: dict[str, object]
) -> None:
    """Say that an operator is traced, if Inductor is imported already, without importing it."""
    # Whoever compiles with Inductor has imported it before the first operator is traced; importing it here would make
    # everyone else wait.
    if "torch._inductor.lowering" in sys.modules:
        importlib.import_module("hybridtensor.ops.inductor").traced(name, arguments, options)


def is_traced() -> bool:
    """Return whether ``torch.compile`` traces the current code into a graph."""
    # Dynamo takes ``is_dynamo_compiling`` for true, and the rest cannot be traced; the tracing context is there while
    # AOTAutograd and export run what Dynamo left whole, such as a layer's torch function. ``is_compiling`` takes three
    # times as long.
    return _is_dynamo() or getattr(_local, "tracing_context", None) is not None


def is_exporting() -> bool:
    """Return whether ``torch.export`` traces the current code."""
    # Private: Dynamo of torch 2.11 takes ``torch.compiler.is_exporting()`` for true in any graph.
    return torch.compiler._is_exporting_flag


def runs_directly(x: torch.Tensor) -> bool:
    """Return whether an implementation can run directly: no mode, tracer or subclass observes operators on a tensor,
    whose memory has its values."""
    return (
        not _is_dynamo()  # first: the rest cannot be traced
        and getattr(_local, "tracing_context", None) is None
        and type(x) in _PLAIN
        and not dispatch_modes()
        and not _transforms()
        and not _is_of_vmap(x)
        and not x.is_neg()  # ``z.conj().imag``, also as a gradient: the dispatcher negates it
    )


def is_batched(x: torch.Tensor) -> bool:
    """Return whether the current code runs once for several tensors: in ``torch.func`` transforms, or for
    ``is_grads_batched``."""
    return _transforms() or _is_of_vmap(x)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Private; ``torch.autograd.grad`` has a ``vmap`` of its own, which is no transform of ``torch.func``
_is_of_vmap: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_is_dynamo = torch.compiler.is_dynamo_compiling
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes that observe operators."""
_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
_local = torch._guards._TLS  # private; ``TracingContext.try_get`` reads it, in twice the time
_cuda_is_there: Callable[[], bool] = torch.cuda.is_initialized

# Private, and what FSDP2 asks, too
backward_that_runs: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that the caller runs in, or -1 outside of any."""
saved_tensors_hooks: Callable[[bool], tuple[Callable[..., object], ...] | None]
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # private
"""The innermost hooks on saved tensors that are open, or None; called with False."""


def backward_with_callbacks() -> int:
    """Return ``backward_that_runs()``, but -1 under compiled autograd, which never calls what is queued for the end."""
    # Importing it would import the compiler.
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    is_compiled = compiled is not None and compiled.in_compiled_autograd_region
    return -1 if is_compiled else backward_that_runs()


# Private. ``is_captured`` asks first whether CUDA is initialized, which takes longer than this.
is_captured_on_cuda: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
"""``is_captured`` for code that has a CUDA tensor; raises where CUDA is not initialized."""


def is_captured() -> bool:
    """Return whether a CUDA graph is captured, whose replays skip Python."""
    return bool(_cuda_is_there() and is_captured_on_cuda())


def is_recorded() -> bool:
    """Return whether a CUDA graph or a dispatch mode records what runs, to be run again without Python."""
    return bool(dispatch_modes()) or is_captured()


def autocasts(device_type: str) -> bool:
    """Return whether autocast is enabled for a device type; torch raises for meta tensors."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)

"""Changing what a parameter is, while it stays the object that modules and optimizers hold."""

from __future__ import annotations

import copy
import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybridtensor.ops.library import compiled_in_callers_only
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.wrapper import WrapperTensor

_REFERENCED = (
    "the weight is referenced by a live graph or a weak reference and cannot be swapped; convert the model before "
    "compiling it and before DistributedDataParallel, outside of forward/backward and of a profiler that has "
    "record_shapes"
)


def require_swappable(who: str, parameter: nn.Parameter) -> None:
    """Raise RuntimeError if a graph or a weak reference refers to a parameter, which blocks ``swap``."""
    if not _is_swappable(parameter):
        raise RuntimeError(f"{who}: {_REFERENCED}")


def swap_all(who: str, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Replace several parameters in place, all or none; see ``swap``."""
    # before anything changes: swapping back does not mend the graphs of others
    for parameter, _ in pairs:
        require_swappable(who, parameter)
    undo: list[Callable[[], None]] = []
    try:
        for parameter, new in pairs:
            undo.append(swap(who, parameter, new))
    except BaseException:
        for back in reversed(undo):
            back()
        raise


@compiled_in_callers_only
def swap(who: str, parameter: nn.Parameter, new: Tensor) -> Callable[[], None]:
    """Replace the contents of the object ``parameter`` by ``new``, for every module and optimizer that holds it.

    Its gradient, its hooks and what others put on it stay.

    Args:
        who: The caller, for the error.
        parameter: A weight, plain or one of ours.
        new: What it becomes, plain or one of ours.

    Returns:
        What makes it be what it was.

    Raises:
        RuntimeError: If a graph or a weak reference refers to it. It is then as before.
    """
    own = parameter.own_names() if isinstance(parameter, WrapperTensor) else set()
    kept = {n: v for n, v in parameter.__dict__.items() if n not in own and n not in new.__dict__}
    replacement = nn.Parameter(new, requires_grad=parameter.requires_grad)
    # ``swap_tensors`` exchanges the dictionaries, too: what others put on the parameter has to be in the
    # replacement's.
    replacement.__dict__.update({**new.__dict__, **replacement.__dict__, **kept})
    try:
        _exchange(parameter, replacement)
    except RuntimeError as error:
        raise RuntimeError(f"{who}: {_REFERENCED} ({error})") from error
    return functools.partial(_exchange, parameter, replacement)


def _exchange(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Swap two parameters, keeping gradient and hooks of the first."""
    hooks = {
        name: getattr(parameter, name)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    }
    # Gradient and hooks belong to the C++ tensor, which is another one after the swap.
    grad, parameter.grad = parameter.grad, None
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError:
        parameter.grad = grad
        raise
    try:
        parameter.grad = grad
    except RuntimeError:  # of another dtype
        torch.utils.swap_tensors(parameter, other)
        parameter.grad = grad
        raise
    finally:
        _register(parameter, hooks)


def _register(parameter: nn.Parameter, hooks: dict[str, object]) -> None:
    """Register a parameter's hooks again after a swap."""
    for name, registered in hooks.items():
        if registered:
            # torch's setter registers the hooks with the C++ tensor, which is another one after the swap.
            setattr(parameter, name, None)
            setattr(parameter, name, registered)


def _is_swappable(parameter: Any) -> bool:
    """Return whether ``torch.utils.swap_tensors`` accepts a parameter; marks its graph."""
    if weakref.getweakrefs(parameter):
        return False
    count = parameter._use_count()  # private to torch, which goes by it
    if count == 2 and parameter.is_leaf and parameter.requires_grad:
        edge = torch.autograd.graph.get_gradient_edge(parameter)
        # unless the edge is new, it is what refers to the weight
        count = parameter._use_count() - 1
        del edge
    return bool(count == 1)


class ApplyInPlace:
    """The ``_apply`` of one module with weights of this library, which ``to``, ``cpu`` and ``half`` call.

    Args:
        module: The module, which is referred to weakly: it holds this as an attribute.
    """

    __slots__ = ("__weakref__", "_module")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, fn: Callable[[Tensor], Tensor], *args: bool, **kwargs: bool) -> nn.Module:
        module = self._required()
        # torch swaps a parameter of a subclass for its conversion, which raises while anything else refers to the
        # parameter, as the gradient accumulators do that DistributedDataParallel holds. Here the parameter becomes its
        # conversion, as plain ones do through ``data``.
        own = {name: p for name, p in module._parameters.items() if _is_own(p)}
        module._parameters.update(dict.fromkeys(own))  # torch passes over what is None
        try:
            for parameter in own.values():
                _convert(parameter, fn)
            type(module)._apply(module, fn, *args, **kwargs)
        finally:
            module._parameters.update(own)
        return module

    def _required(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError("_apply: the module that this converts is gone; call a module")
        return module

    def __deepcopy__(self, memo: dict[int, object]) -> ApplyInPlace:
        return type(self)(copy.deepcopy(self._required(), memo))

    def __reduce__(self) -> tuple[object, ...]:
        return copyreg.__newobj__, (ApplyInPlace,), (self._module(),)  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[nn.Module]) -> None:
        ApplyInPlace.__init__(self, *state)


def _is_own(parameter: object) -> bool:
    """Return whether this is a converted weight with memory of its own; FSDP2 converts gathered ones."""
    return isinstance(parameter, InterceptingTensor) and parameter.record.gathered is None


def _convert(parameter: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply ``fn`` to a parameter and its gradient in place."""
    with torch.no_grad():
        converted = fn(parameter)
        gradient = parameter.grad
        if converted is not parameter:
            parameter.grad = None
            # private, as torch asks in ``_apply``: memory on the meta device cannot be replaced by any other
            if not torch._has_compatible_shallow_copy_type(parameter, converted):
                swap("_apply", parameter, converted)
            elif isinstance(converted, type(parameter)):
                parameter.become(converted)
            else:  # the values are someone else's, the recipe is the model's
                parameter.data = converted
        if gradient is not None:
            parameter.grad = fn(gradient).requires_grad_(gradient.requires_grad)


def apply_in_place_(module: nn.Module) -> None:
    """Make ``to``, ``cpu`` and ``half`` convert a module's weights in place."""
    module.__dict__.setdefault("_apply", ApplyInPlace(module))


def drop_apply(module: nn.Module) -> None:
    """Restore the own ``_apply`` of a module."""
    if isinstance(module.__dict__.get("_apply"), ApplyInPlace):
        del module.__dict__["_apply"]

"""Changing what a parameter is, while it stays the object that modules and optimizers hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybridtensor.subclasses.wrapper import WrapperTensor


def swap(who: str, parameter: nn.Parameter, new: Tensor) -> None:
    """Make ``parameter``, the object, be ``new``: every module and optimizer that holds it sees the
    new weight.

    Its gradient, its hooks and what others put on it stay.

    Args:
        who: The caller, for the error.
        parameter: A weight, plain or one of ours.
        new: What it becomes, plain or one of ours.

    Raises:
        RuntimeError: If a graph or a weak reference refers to it.
    """
    own = parameter.own_names() if isinstance(parameter, WrapperTensor) else set()
    kept = {n: v for n, v in parameter.__dict__.items() if n not in own and n not in new.__dict__}
    hooks = {
        name: getattr(parameter, name)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    }
    replacement = nn.Parameter(new, requires_grad=parameter.requires_grad)
    replacement.__dict__.update({**new.__dict__, **replacement.__dict__, **kept})
    grad, parameter.grad = parameter.grad, None
    try:
        torch.utils.swap_tensors(parameter, replacement)
    except RuntimeError as error:
        parameter.grad = grad
        raise RuntimeError(
            f"{who}: the weight is referenced by a live graph or a weak reference and cannot be swapped; "
            f"convert the model before compiling it and outside of forward/backward ({error})"
        ) from error
    parameter.grad = grad
    for name, registered in hooks.items():
        if registered:  # they went with what the parameter was
            setattr(parameter, name, None)
            setattr(parameter, name, registered)

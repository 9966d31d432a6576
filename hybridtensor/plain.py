"""The way back: plain models, and state dicts that plain models load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_dtype, require_module, shown
from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.distributed.fsdp.torch_compat import all_params
from hybridtensor.dtensor import local, with_local
from hybridtensor.linear import layer_forward, sharing
from hybridtensor.masters import high_precision_values, warn_of_lost
from hybridtensor.selection import forget_left_alone
from hybridtensor.state import LayerState, weight_of_state
from hybridtensor.state_dicts import drop_hooks
from hybridtensor.subclasses import is_converted
from hybridtensor.swap import drop_apply, swap_all


def plain_(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Undo ``quantize_`` in place: make a converted model plain again.

    ::

        ht.plain_(model, dtype=torch.bfloat16)
        torch.save(model.state_dict(), "model.pt")

    The parameter objects stay the same, so that optimizers, tied weights and your hooks keep working. The exception is
    ``optim.MasterWeights`` of persistent weights: create a new optimizer for the plain parameters. Master weights keep
    their memory. Persistent weights become high-precision values: an optimizer's master, the original, or else the
    dequantized faces, with a warning if an optimizer had values. State of quantizers and this library's hooks are
    removed.

    Args:
        model: A model; parts that are not converted do not change.
        dtype: New dtype of the converted weights; by default their present one.

    Returns:
        ``model``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If a weight's gradient has another dtype than its new one.
        RuntimeError: If FSDP2 shards the model, a graph saved a weight, or a weak reference is to it. Every error
            leaves the model unchanged.
    """
    require_module("plain_", model)
    if dtype is not None:
        require_dtype("plain_", dtype)
    converted = {name: p for name, p in model.named_parameters() if is_converted(local(p))}
    managed = {id(sharded.tensor) for sharded in all_params()} if converted else set()
    for name, parameter in converted.items():
        if id(part_of(parameter)) in managed:
            raise RuntimeError(
                "plain_: FSDP2 shards this model, and would go on with the weights that it has; "
                "load plain_state_dict(model) into a plain model"
            )
        _check_gradient(name, parameter, dtype or parameter.dtype)
    warn_of_lost("plain_", converted.values())
    # All values before the first swap: an error, such as too little memory, leaves the model as it is.
    made = []
    with torch.inference_mode(False):  # parameters may be trained later
        for parameter in converted.values():
            values = high_precision_values(local(parameter)).to(dtype or parameter.dtype)
            values = values.clone() if values.is_inference() else values  # which nobody can train
            made.append((parameter, with_local(parameter, values)))
        swap_all("plain_", made)
    # Last, because it is not undone: what can fail is behind.
    for module in model.modules():
        _forget(module)
    return model


def _check_gradient(name: str, parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Raise ValueError for a gradient whose dtype is not the weight's new one."""
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != dtype:
        raise ValueError(
            f"plain_: the gradient of {name} is in {shown(gradient.dtype)}, and its weight would be in "
            f"{shown(dtype)}; call zero_grad() before, or leave dtype out"
        )


def plain_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a state dict that a plain model loads strictly: values in high precision, no state of quantizers.

    ::

        torch.save(ht.plain_state_dict(model), "model.pt")

    Args:
        model: A model, converted or not, sharded or not. Names are those of ``model.state_dict()``.

    Returns:
        Names to tensors. Master weights share their memory; persistent weights give the
        high-precision values that there are (an optimizer's master, or the original), or else
        what their faces hold, with a warning if an optimizer had values, in the dtype of the
        parameter. Of a weight that FSDP2 shards, DTensors.

    Raises:
        TypeError: If ``model`` is not a module.
    """
    require_module("plain_state_dict", model)
    state = model.state_dict()
    warn_of_lost(
        "plain_state_dict", (value for value in state.values() if isinstance(value, Tensor))
    )
    return {name: _plain(value) for name, value in state.items() if weight_of_state(name) is None}


def _plain(value: object) -> object:
    if not isinstance(value, Tensor) or not is_converted(local(value)):
        return value
    return with_local(value, high_precision_values(local(value)).to(value.dtype))


def _forget(module: nn.Module) -> None:
    """Remove this library's hooks and attributes from a module."""
    layer_forward.drop_recipe(module)
    for name, state in list(module._modules.items()):
        if isinstance(state, LayerState):
            del module._modules[name]
    sharing.forget(module)
    forget_left_alone(module)
    drop_hooks(module)
    drop_apply(module)

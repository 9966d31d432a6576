"""Hooks of state dicts: saving plain tensors, and preserving recipes when loading."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hybridtensor.distributed.checkpoint.plain import plain_weight
from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.dtensor import local, with_local
from hybridtensor.state import LayerState
from hybridtensor.state.keys import has_layer
from hybridtensor.subclasses import HybridTensor, MasterWeight, is_converted
from hybridtensor.subclasses.quantizing import persistent_weight


def give_plain_values_(module: nn.Module) -> None:
    """Make ``module.state_dict()`` return the plain tensors of master weights, in the same memory."""
    if not getattr(module, "_hybridtensor_save_hook", False):
        module.register_state_dict_post_hook(plain_values)
        module.__dict__["_hybridtensor_save_hook"] = True


def plain_values(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict[str, object]
) -> None:
    """Replace master weights by their plain tensors in a state dict; persistent ones give values to savers."""
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        # keep_vars=True asks for the parameters
        if value is not None and not isinstance(value, nn.Parameter):
            own = local(value)
            if isinstance(own, HybridTensor):
                own.is_saved = True
            state_dict[prefix + name] = plain_weight(value)


def keep_recipe_(module: nn.Module) -> None:
    """Load what a module's weights are quantized by before them, and preserve their recipes."""
    if not getattr(module, "_hybridtensor_load_hook", False):
        module.register_load_state_dict_pre_hook(before_loading)
        module.__dict__["_hybridtensor_load_hook"] = True


def drop_hooks(module: nn.Module) -> None:
    """Remove the state dict hooks of a converted layer."""
    # torch's private tables: a handle of each hook would be one more thing that is copied with it
    for table in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
        for key, hook in list(table.items()):
            if getattr(hook, "hook", hook) in (plain_values, before_loading):
                del table[key]
    for name in ("_hybridtensor_save_hook", "_hybridtensor_load_hook"):
        module.__dict__.pop(name, None)


def before_loading(
    module: nn.Module,
    state_dict: dict[str, Tensor],
    prefix: str,
    local_metadata: dict[str, object],
    strict: bool,
    missing: list[str],
    *_: object,
) -> None:
    """Load the scales that values are quantized by, and give tensors the model's recipes with ``assign=True``."""
    for name, state in module._modules.items():
        if isinstance(state, LayerState):
            own = f"{prefix}{name}."
            # torch loads a module's parameters before its submodules, and then this again, with its errors
            state._load_from_state_dict(state_dict, own, local_metadata, False, [], [], [])
            if not has_layer(state_dict, own):  # that time it sees its own entries only
                missing += [own + buffer for buffer in state.state_dict()]
    # Values belong to the checkpoint, the recipe to the model: without this hook a plain checkpoint would silently
    # turn quantization off.
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        weight = None if parameter is None else part_of(parameter)
        if is_converted(weight) and f"{prefix}{name}" in state_dict:
            _assign(weight, state_dict, f"{prefix}{name}")


def _assign(weight: Any, state_dict: dict[str, Tensor], key: str) -> None:
    """Give the entry at ``key`` the recipe of the weight that it replaces."""
    value = state_dict[key].detach()
    part = part_of(value)
    config = weight.config
    if isinstance(weight.layer, LayerState):
        weight.layer.materialize_(part.device)
    if isinstance(weight, MasterWeight):
        plain = part.dequantize() if is_converted(part) else part
        made: Any = MasterWeight(plain, config).like(weight)
    elif isinstance(part, HybridTensor) and part.config == config:
        made = part.like(weight)
    else:
        plain = part.dequantize() if is_converted(part) else part
        record = weight.record
        made = persistent_weight(
            plain, config, weight.requires_grad, weight.layer, record.section, record.first
        )
    state_dict[key] = with_local(value, made)

"""Advance what quantizers remember: the update rule of delayed scaling, once per step for all
layers and ranks.

Shape letters: ``N`` layers; ``S`` scales of a layer; ``L`` history length.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtensor.ops.library import is_captured
from hybridtensor.state.layer import DelayedRule, LayerState, required

_FP32_MAX = torch.finfo(torch.float32).max


def step_(model: nn.Module) -> nn.Module:
    """Advance what quantizers remember: call it once after every ``optimizer.step()``.

    Delayed scales follow from the amaxes of the step, reduced over the data-parallel group in one
    collective for all layers; stochastic rounding moves to its next step. Does nothing for recipes
    without state, but all ranks of a data-parallel group call it.

    The microbatches of one step share a step of the random rounding: call it after each of them if
    their errors should be independent, except with delayed scaling, whose scales follow once per
    optimizer step. A closure that an optimizer evaluates many times (LBFGS) calls it itself.

    Args:
        model: A model that went through ``quantize_``, or a ``LayerState``.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is not a module.
        RuntimeError: If ranks of the group have different numbers of scales, on all of them.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"step_: a module is required, got {type(model).__name__}")
    states = layer_states(model)
    with torch.no_grad():
        counters = [state.rounding[1] for state in states if state.rounding is not None]
        if counters:
            torch._foreach_add_(counters, 1)
        for group in dict.fromkeys(state.group for state in states) or [None]:
            _update_scales(model, [state for state in states if state.group is group], group)
    for state in states:
        state.version += 1
        state.replayed = state.replayed or is_captured()
    return model


def layer_states(model: nn.Module) -> list[LayerState]:
    """Return the states of all layers of ``model`` that keep something."""
    return [module for module in model.modules() if isinstance(module, LayerState)]


def set_data_parallel_group_(model: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    """Say which ranks train on parts of one batch: all by default.

    Over them delayed scales are reduced, and by the rank in it random rounding draws, so that a run
    does not depend on how many they are (given that a batch is split among them in order and
    evenly).
    """
    weights = (
        getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()
    )  # also of DTensors
    layers = (getattr(weight, "layer", None) for weight in weights)  # also those that are empty now
    for state in (
        *layer_states(model),
        *(layer for layer in layers if isinstance(layer, LayerState)),
    ):
        state.group = group
    return model


def _update_scales(
    model: nn.Module, states: list[LayerState], group: dist.ProcessGroup | None
) -> None:
    """Update the delayed scales of one data-parallel group, all layers in one collective."""
    states = [state for state in states if state.encode_scale is not None]
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    if distributed:
        _check_same_number(model, sum(len(state.slots) for state in states), group)
    for device in dict.fromkeys(required(state.encode_scale).device for state in states):
        of_device = [state for state in states if required(state.encode_scale).device == device]
        amaxes = torch.cat([required(state.amax) for state in of_device])
        if distributed:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        reduced = amaxes.split([len(state.slots) for state in of_device])
        for rules in dict.fromkeys(state.rules for state in of_device):
            chosen = [i for i, state in enumerate(of_device) if state.rules == rules]
            _update_alike(
                [of_device[i] for i in chosen], _stacked([reduced[i] for i in chosen]), rules
            )


_checked: weakref.WeakKeyDictionary[nn.Module, dict[Any, int]] = weakref.WeakKeyDictionary()


def _check_same_number(model: nn.Module, number: int, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if not all have the same number of scales: the reduction would hang or
    mix layers up.

    Asked once per model, group and number, so ranks must change their recipes together.
    """
    checked = _checked.setdefault(model, {})
    if checked.get(group) == number:
        return
    numbers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(numbers, number, group=group)
    if len(set(numbers)) > 1:
        raise RuntimeError(
            f"step_: ranks with the same number of delayed scales are required, got {numbers}; "
            "name the data-parallel ranks with set_data_parallel_group_"
        )
    checked[group] = number


def _update_alike(states: list[LayerState], last: Tensor, rules: tuple[DelayedRule, ...]) -> None:
    """Apply the update rule of delayed scaling to layers of the same rules.

    Nothing is copied from or to the host, so that a CUDA graph can hold it.

    Args:
        states: ``N`` layers.
        last: The amaxes of the step, fp32 ``[N, S]``.
        rules: Of the scales.

    Source: TransformerEngine, common/recipe/delayed_scaling.cu.
    """
    history = _stacked([required(state.amax_history) for state in states])  # [N, S, L]
    current = _stacked([required(state.encode_scale) for state in states])
    target = _constants([rule.largest * 2.0**-rule.margin for rule in rules], last)
    rolled = torch.cat([history[:, :, 1:], last[:, :, None]], dim=2)
    amax = _counting([rule.algorithm == "most_recent" for rule in rules], last, rolled.amax(dim=2))
    seen = last != 0
    factor = torch.where(seen & (amax < torch.inf), target / amax, current).clamp(max=_FP32_MAX)
    lengths = [
        rule.history_length for rule in rules
    ]  # what is older is zero, and the first entry of each is free
    rolled[:, :, : history.shape[2] - max(lengths) + 1].zero_()
    for slot, length in enumerate(lengths):
        if length < max(lengths):
            rolled[:, slot, : history.shape[2] - length + 1].zero_()
    updated = torch.where(seen[:, :, None], rolled, history)
    torch._foreach_copy_([required(state.amax_history) for state in states], list(updated.unbind()))
    torch._foreach_copy_([required(state.encode_scale) for state in states], list(factor.unbind()))
    torch._foreach_zero_([required(state.amax) for state in states])


def _stacked(tensors: list[Tensor]) -> Tensor:
    """Return tensors as one; a single one without a copy."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)


def _counting(most_recent: list[bool], last: Tensor, largest: Tensor) -> Tensor:
    """Return the amaxes that count, ``[N, S]``: the last or the largest."""
    if all(most_recent):
        return last
    for slot, newest in enumerate(most_recent):
        if newest:
            largest[:, slot] = last[:, slot]
    return largest


def _constants(values: list[float], like: Tensor) -> Tensor:
    """Return one number per scale, fp32 ``[S]``, made on the device of ``like``."""
    made = like.new_full((len(values),), values[0])
    for slot, value in enumerate(values):
        if value != values[0]:
            made[slot].fill_(value)
    return made

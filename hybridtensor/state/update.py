"""The update rule of delayed scaling: the scales of layers follow from the amaxes of a step.

Shape letters: ``N`` layers; ``S`` scales of a layer; ``L`` history length.

Source: TransformerEngine, common/recipe/delayed_scaling.cu.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.cache import LaunchTables
from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import is_captured, runs_directly
from hybridtensor.state.layer import LayerState
from hybridtensor.state.rules import DelayedRule, required

_FP32_MAX = torch.finfo(torch.float32).max


class LayerScales(NamedTuple):
    """The tensors of one layer's delayed scales, all of which an update writes.

    Attributes:
        amax: fp32 ``[S]``, the amaxes of the step.
        encode_scale: fp32 ``[S]``.
        history: fp32 ``[S, L]``, amaxes of former steps.
    """

    amax: Tensor
    encode_scale: Tensor
    history: Tensor

    @classmethod
    def of(cls, state: LayerState) -> LayerScales:
        """Return the tensors of a layer; raise ValueError if it has no delayed scales."""
        return cls(required(state.amax), required(state.encode_scale), required(state.amax_history))


def update_scales(states: list[LayerState], reduced: Tensor | None) -> None:
    """Update the delayed scales of layers on one device without host copies; ``reduced`` are their amaxes over all
    ranks."""
    scales = [LayerScales.of(state) for state in states]
    written = [tensor for of_layer in scales for tensor in of_layer]
    slots = _slots_of(states, written) if _kernel_runs_on(written) else None
    if slots is not None:
        slots.update(reduced)
        increment_version(written)  # kernels write where autograd does not look
        return
    last = torch.cat([of_layer.amax for of_layer in scales]) if reduced is None else reduced
    by_layer = last.split([len(state.slots) for state in states])
    for rules in dict.fromkeys(state.rules for state in states):
        chosen = [i for i, state in enumerate(states) if state.rules == rules]
        amaxes = torch.stack([by_layer[i] for i in chosen])
        update_reference([scales[i] for i in chosen], amaxes, rules)


def update_reference(
    scales: list[LayerScales], last: Tensor, rules: tuple[DelayedRule, ...]
) -> None:
    """Reference update of ``N`` layers with the same rules, by torch operations; ``last`` is fp32 ``[N, S]``."""
    amaxes, encode_scales, histories = (list(tensors) for tensors in zip(*scales, strict=True))
    history, current = torch.stack(histories), torch.stack(encode_scales)  # [N, S, L], [N, S]
    target = _constants([rule.target for rule in rules], last)
    rolled = torch.cat([history[:, :, 1:], last[:, :, None]], dim=2)
    amax = _counting([rule.algorithm == "most_recent" for rule in rules], last, rolled.amax(dim=2))
    seen = last != 0
    # As TransformerEngine does: the scale stays without an amax, and with an infinite one; of an
    # amax so small that the scale would be infinite it is the largest fp32.
    factor = torch.where(seen & (amax < torch.inf), target / amax, current).clamp(max=_FP32_MAX)
    # What is older than a rule's history is zero, and the first entry of each is free
    for slot, rule in enumerate(rules):
        rolled[:, slot, : history.shape[2] - rule.history_length + 1].zero_()
    updated = torch.where(seen[:, :, None], rolled, history)
    torch._foreach_copy_(histories, list(updated.unbind()))
    torch._foreach_copy_(encode_scales, list(factor.unbind()))
    torch._foreach_zero_(amaxes)


def _counting(most_recent: list[bool], last: Tensor, largest: Tensor) -> Tensor:
    """Return the effective amaxes ``[N, S]``: the last or the largest."""
    for slot, newest in enumerate(most_recent):
        if newest:
            largest[:, slot] = last[:, slot]
    return largest


def _constants(values: list[float], like: Tensor) -> Tensor:
    """Return one number per scale, fp32 ``[S]``, created on the device of ``like``."""
    # Filled on the device: copies from the host could not go into a CUDA graph.
    made = like.new_full((len(values),), values[0])
    for slot, value in enumerate(values):
        if value != values[0]:
            made[slot].fill_(value)
    return made


class Slots:
    """Addresses and rules of some layers' scales on their device, as the kernel takes them."""

    def __init__(self, states: list[LayerState]) -> None:
        self._device = required(states[0].amax).device
        rows, targets, entries = [], [], 1
        for state in states:
            scales = LayerScales.of(state)
            length = scales.history.shape[1]
            entries = max(entries, length)
            for slot, rule in enumerate(state.rules):
                addresses = [tensor[slot].data_ptr() for tensor in scales]
                newest = rule.algorithm == "most_recent"
                rows.append([*addresses, length, rule.history_length, int(newest)])
                targets.append(rule.target)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._targets = torch.tensor(targets, dtype=torch.float32, device=self._device)
        self._launches = [
            Launch(
                "delayed", "update_kernel", len(rows), options={"num_warps": 1}, REDUCED=reduced,
                BLOCK=1 << (entries - 1).bit_length(),
            )
            for reduced in (False, True)
        ]  # fmt: skip

    def update(self, reduced: Tensor | None) -> None:
        # Without ``REDUCED`` the kernel does not read its third argument.
        amaxes = self._targets if reduced is None else reduced
        with on_device(self._device):
            self._launches[reduced is not None](self._rows, self._targets, amaxes)


_KNOWN: LaunchTables[Slots] = LaunchTables(most=256)


def _kernel_runs_on(tensors: list[Tensor]) -> bool:
    return (
        tensors[0].is_cuda and runs_directly(tensors[0]) and all(t.is_contiguous() for t in tensors)
    )


def _slots_of(states: list[LayerState], written: list[Tensor]) -> Slots | None:
    """Return the kernel's table of scales; None if it is missing while a CUDA graph is captured."""
    addresses = [tensor.data_ptr() for tensor in written]
    key = (written[0].device, *addresses, *(state.rules for state in states))
    slots = _KNOWN.get(key)
    if slots is None and not is_captured():
        # For these addresses, which stay from step to step. One launch for all layers, in place of fifteen.
        slots = _KNOWN.add(key, Slots(states))
    return slots

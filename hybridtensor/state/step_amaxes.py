"""The amaxes of one step, for ``step_``: fold, drop or share them, and find layers whose inputs had equal ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hybridtensor.ops.amaxes import AmaxRecord, fold, forget_gathers
from hybridtensor.state.layer import LayerState
from hybridtensor.state.lineage import digest
from hybridtensor.state.rules import required
from hybridtensor.state.training import Pending, on_host


def records_of(states: Iterable[LayerState]) -> list[AmaxRecord]:
    """Return the records of the layers that have one."""
    return [state.record for state in states if state.record is not None]


def fold_amaxes(states: Iterable[LayerState]) -> None:
    """Fold the committed amaxes of all layers into ``amax``, in few launches per device, at the end of a step."""
    records = records_of(states)
    for device in dict.fromkeys(record.total.device for record in records):
        fold([record for record in records if record.total.device == device], ends_step=True)


def settle_alone(states: Iterable[LayerState], *, skipped: bool = False) -> None:
    """Commit the amaxes of forwards without a backward, of layers that had no backward in this step either."""
    for state in states:
        if state.record is not None:
            state.record.settle_alone(counts=not (skipped or state.recorded))


def drop_amaxes(states: Iterable[LayerState]) -> None:
    """Drop the amaxes of a skipped step, so that faces of weights are measured again."""
    kept = [state for state in states if state.record is not None]
    settle_alone(kept, skipped=True)
    fold_amaxes(kept)
    if kept:
        torch._foreach_zero_([required(state.amax) for state in kept])
        forget_gathers(records_of(kept))
    for state in kept:
        _measured_inputs(state)
        own = state.__dict__  # Module.__setattr__ would look through parameters and buffers first
        own["steps"] += 1
        own["version"] += 1
        own["recorded"] = own["unrecorded"] = False


def _measured_inputs(state: LayerState) -> frozenset[int] | None:
    """Return and clear the ids of the input amax tensors since the last step; None if one was recorded with others."""
    if state.record is None:
        return frozenset()
    of_inputs, state.record.of_inputs = state.record.of_inputs, []
    # Records hold the tensors of a step until here, so that equal ids are one tensor.
    found = [id(amax) for amax in of_inputs if amax is not None]
    return frozenset(found) if len(found) == len(of_inputs) else None


def gathered_amaxes(states: list[LayerState]) -> tuple[Tensor, Tensor]:
    """Return the amaxes of gathered weights, and numbers that are not 0 where a backward of the layer ran; fp32
    ``[N * S]`` both."""
    records = records_of(states)
    most = max(len(record.total) for record in records)
    ones = torch.ones(most, dtype=torch.float32, device=records[0].total.device)
    # All of them contiguous: ``cat`` launches once, or once for each.
    used = [ones[: len(r.total)] if r.is_used else r.used_in_graphs for r in records]
    return torch.cat([record.of_gathers for record in records]), torch.cat(used)


def share_amaxes(states: list[LayerState], amaxes: Sequence[Tensor]) -> None:
    """Set the amaxes ``[S]`` of layers with a common weight scale to their maximum."""
    by_scale: dict[int, list[tuple[LayerState, Tensor]]] = {}
    for state, amax in zip(states, amaxes, strict=True):
        if state.common is not None:
            by_scale.setdefault(id(state.common), []).append((state, amax))
    for siblings in by_scale.values():
        for slot in (slot for slot in siblings[0][0].slots if slot.startswith("weight")):
            found = [a[state.slots.index(slot)] for state, a in siblings if slot in state.slots]
            torch._foreach_copy_(found, [torch.stack(found).amax()] * len(found))


def next_lineages(states: list[LayerState]) -> dict[LayerState, object | None]:
    """Compute the lineages of the layers' input scales after this step.

    Layers keep equal lineages if they had equal ones and measured the same inputs in this step.
    """
    found: dict[LayerState, object | None] = {}
    after: dict[object, object] = {}
    for state in states:
        before, inputs = state.lineage, _measured_inputs(state)
        if before is None or inputs is None:
            found[state] = None if before is None else object()
        else:
            found[state] = after.setdefault((before, inputs), object()) if inputs else before
    return found


def find_siblings(states: list[LayerState]) -> None:
    """Give layers of unknown lineage one by their scales, which are read from the device.

    Called in the first step, before which DistributedDataParallel may have written them.
    """
    for state in states:
        if state.lineage is None:
            state.set_lineage(digest(state.slots, state.encode_scale, state.amax_history))


def leaders(states: list[LayerState], lineages: dict[LayerState, object | None]) -> Tensor:
    """Return for each layer the index of the first one with equal lineage, and how far that is from the end; fp32
    ``[2 * N]``."""
    # The maximum of both over ranks shows where ranks differ. Of an unknown lineage a layer is the first one itself.
    first = dict[object, int]()
    keys = [state if lineages[state] is None else lineages[state] for state in states]
    found = tuple(first.setdefault(key, index) for index, key in enumerate(keys))
    return _as_numbers(found, required(states[0].amax).device)


@functools.lru_cache(maxsize=64)
def _as_numbers(indices: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        found = torch.tensor(indices, dtype=torch.float32, device=device)
        return torch.cat([found, len(indices) - found])


def separate_siblings(pending: Pending, states: list[LayerState], largest: Tensor) -> None:
    """Part layers that measured equal inputs on some ranks only; ``largest`` are the ``leaders`` of all ranks.

    On a GPU the host learns of it in a later step; until then such layers may share a cast, by a scale of one of them.
    """
    first, from_end = largest.view(2, -1)
    pending.append((states, *on_host(first + from_end > len(states))))
    while pending and pending[0][2]():
        of_states, differ, _ = pending.pop(0)
        for state, alone in zip(of_states, differ.tolist(), strict=True):
            if alone and state.lineage is not None:
                state.set_lineage(object())

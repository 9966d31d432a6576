"""Advance the state of quantizers, scales and random-rounding counters, once per step for all layers and ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridtensor.arguments import require_flag, require_module, wrong
from hybridtensor.ops.amaxes import forget_gathers
from hybridtensor.ops.library import (
    backward_that_runs,
    backward_with_callbacks,
    is_captured,
    outside_graphs,
)
from hybridtensor.ranks import patience, require_alike
from hybridtensor.state.contract import (
    ADVICE,
    may_end_early,
    ranks_without_state,
    reduced,
    stages_of,
)
from hybridtensor.state.layer import LayerState
from hybridtensor.state.ranks import TrainingRanks
from hybridtensor.state.recording import require_finite, require_recorded
from hybridtensor.state.rules import in_words, required
from hybridtensor.state.step_amaxes import (
    drop_amaxes,
    find_siblings,
    fold_amaxes,
    gathered_amaxes,
    leaders,
    next_lineages,
    records_of,
    separate_siblings,
    settle_alone,
    share_amaxes,
)
from hybridtensor.state.training import Group, layer_states, training_of
from hybridtensor.state.update import update_scales

# Dynamo would trace counts of steps as constants, and compile again in each step.
_between_graphs = outside_graphs("the state of quantizers advances between compiled graphs")


@_between_graphs
def step_(model: nn.Module, *, skipped: bool = False) -> nn.Module:
    """Advance the state of quantizers; call it once after every ``optimizer.step()``.

    ::

        optimizer.step()
        ht.step_(model)

    It computes new delayed scales from the amaxes of the step. One collective for all layers reduces these over the
    ranks that train the model: all ranks, unless ``set_mesh_`` names them, and none if each rank has its own stage of
    a pipeline. It also increments the counter of stochastic rounding. Without state it does nothing, but all ranks
    that train the model must call it.

    The microbatches of one step use the same random numbers. Call it after each microbatch if their rounding errors
    should be independent, but not with delayed scaling, whose scales change once per optimizer step. A closure that an
    optimizer evaluates many times (LBFGS) must call it itself.

    Args:
        model: A model that went through ``quantize_``, or a ``LayerState``.
        skipped: Whether the optimizer skipped the step, for instance because of ``torch.amp.GradScaler``: the amaxes
            of the step are dropped, and nothing advances.

    Returns:
        ``model``.

    Raises:
        TypeError: If ``model`` is not a module, or ``skipped`` no bool.
        RuntimeError: If ranks have different scales or layers, on all of them. If a layer ran backward without
            recording amaxes, or an amax is not finite (on a GPU, one of the next calls raises this). If the model has
            the weight of a converted layer that is not in it, whose state nothing advances.
    """
    require_module("step_", model)
    require_flag("step_", skipped=skipped)
    states = layer_states(model)
    if skipped:
        drop_amaxes(states)
        return model
    # Before anything changes, so that an error leaves the step as it was.
    require_recorded(states)
    training = training_of(model)
    training.lost.require_none(model, states)
    with torch.no_grad():
        trained_by = list(dict.fromkeys(state.ranks for state in states))
        if not states and not training.steps:
            # A model without state takes part in the first comparison of scales: other ranks, with state, wait for it.
            trained_by = ranks_without_state(model)
        for ranks in trained_by:
            _update_scales(model, [state for state in states if state.ranks == ranks], ranks)
        counters = [state.rounding[1] for state in states if state.rounding is not None]
        if counters:
            torch._foreach_add_(counters, 1)
    training.steps += 1
    captured = is_captured()
    for state in states:
        state.count_step(captured)
    # Last: subscribers quantize weights by the new scales.
    for subscriber in after_step:
        subscriber(model, states)
    return model


after_step: list[Callable[[nn.Module, list[LayerState]], None]] = []
"""What is called at the end of each ``step_``, with the model and the states of its layers."""


class step_after:  # noqa: N801  (used as a function)
    """Call ``step_(model)`` after every step of an optimizer: once, where training is set up.

    ::

        ht.step_after(optimizer, model)
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()

    With several optimizers the state advances when all of them have stepped, or, if one was skipped, before another
    one steps for the second time. Steps within one backward, by hooks of gradients, are one; a checkpoint with
    ``use_reentrant=True`` runs a backward of its own, and would count apart.

    A step that ``torch.amp.GradScaler`` skips does not count. For a skipped step the scaler still calls an optimizer
    with ``fused=True``: the amaxes of the step are dropped, also if other optimizers take it. It calls no other
    optimizer: call ``step_`` with ``skipped=True`` yourself, or the next step raises because an amax is not finite::

        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            ht.step_(model, skipped=True)

    Another call for one of the optimizers and the same model, or one that contains it, takes the place of the first.

    Args:
        optimizers: An optimizer, or several that train the model together.
        model: As for ``step_``.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If there is no optimizer.
    """

    def __init__(self, optimizers: Optimizer | Iterable[Optimizer], model: nn.Module) -> None:
        require_module("step_after", model)
        several = isinstance(optimizers, Iterable) and not isinstance(optimizers, torch.Tensor)
        found: list[Optimizer] = list(optimizers) if several else [optimizers]  # type: ignore[arg-type, list-item]
        if not all(isinstance(optimizer, Optimizer) for optimizer in found):
            raise wrong("step_after", "an optimizer, or a list of them,", optimizers)
        for optimizer in found:
            # Wrappers such as torch's PostLocalSGDOptimizer leave out Optimizer.__init__, which makes the hooks.
            if not hasattr(optimizer, "_optimizer_step_post_hooks"):
                raise TypeError(
                    f"step_after: an optimizer with hooks of its steps is required, got {type(optimizer).__name__}, "
                    "which has none; pass the optimizer that it wraps"
                )
        if not found:
            raise ValueError("step_after: no optimizer was given; pass those that train the model")
        found = list(dict.fromkeys(found))
        # Not the optimizers, whose hooks hold this: a cycle would keep the model until garbage is collected
        self._count = len(found)
        self._model = model
        for former in [it for optimizer in found for it in _that_follow(optimizer)]:
            former._make_way_for(model)
        # The optimizers that were called in this step, by id, with the backward whose hooks called them or -1, and
        # whether one of them skipped it
        self._called: dict[int, int] = {}
        self._is_skipped = False
        self._handles = [
            handle
            for optimizer in found
            for handle in (
                optimizer.register_step_pre_hook(self._before),
                optimizer.register_step_post_hook(self._after),
            )
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _make_way_for(self, model: nn.Module) -> None:
        """End if a later call has the same model, or a wrapper of it: its state would advance twice in a step."""
        # By parameters: layers without a state may get one later. By states: these are modules without parameters
        covered = {*self._model.parameters(), *layer_states(self._model)}
        if model is self._model or (
            covered and covered <= {*model.parameters(), *layer_states(model)}
        ):
            self.remove()

    @_between_graphs
    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        called = self._called.get(id(optimizer))
        # Otherwise hooks of gradients call it for each parameter: see ``_after``.
        if called is not None and (called == -1 or called != backward_that_runs()):
            self._end_step()  # another one was left out of the step before

    @_between_graphs
    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        # The scaler calls fused optimizers also for skipped steps; they skip on the device.
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, torch.Tensor) and found_inf.item():
            # Now: if the others are left out of this step, it ends after the next backward has measured amaxes.
            step_(self._model, skipped=True)
            self._is_skipped = True
        was_complete = len(self._called) == self._count
        backward = self._called[id(optimizer)] = backward_that_runs()
        if was_complete or len(self._called) < self._count:
            return
        if backward == -1:
            self._end_step()
        elif backward_with_callbacks() == -1:
            raise NotImplementedError(
                "step_after: an optimizer steps in a hook of gradients under compiled autograd, which calls nothing "
                "at the end of a backward; remove() what step_after returned, and call step_(model) after each backward"
            )
        else:  # other layers have yet to run it, with the scales of their forward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        is_skipped, self._is_skipped = self._is_skipped, False
        self._called.clear()
        if not is_skipped:
            step_(self._model)


def _that_follow(optimizer: Optimizer) -> list[step_after]:
    owners = [
        getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values()
    ]
    return [owner for owner in owners if isinstance(owner, step_after)]


def _update_scales(model: nn.Module, states: list[LayerState], ranks: TrainingRanks) -> None:
    """Update the delayed scales of layers with the same ranks, with one collective per group."""
    states = [state for state in states if state.encode_scale is not None]
    settle_alone(states)
    # First: a lineage is valid for one version of the scales, which ``_update_on_device`` writes.
    lineages = next_lineages(states)
    fold_amaxes(states)
    groups = _groups(model, states, ranks)
    compared = [_check_same_scales(model, states, group) for group in groups]
    by_device = dict[torch.device, list[LayerState]]()
    for state in states:
        by_device.setdefault(required(state.encode_scale).device, []).append(state)
    for of_device in by_device.values():
        _update_on_device(model, of_device, groups, lineages)
    if any(compared) and not is_captured():
        find_siblings(states)


def _update_on_device(
    model: nn.Module,
    states: list[LayerState],
    groups: list[Group],
    lineages: dict[LayerState, object | None],
) -> None:
    """Update the delayed scales of layers on one device, and give them the lineages of the new scales.

    In this order: amaxes are reduced over ranks, since each rank has some; siblings share theirs; they are checked, so
    that an error leaves the scales as they were; the scales are updated, and have another version; lineages are set,
    each of one version; siblings part whose lineages differ on any rank.
    """
    records = records_of(states)
    by_layer = [record.amax for record in records]
    reduced: Tensor | None = None
    reduced_leaders: Tensor | None = None
    # Without other ranks the amaxes are used where they are, unless gathers have some, too.
    if groups or any(record.is_gathered for record in records):
        own_leaders = leaders(states, lineages) if groups and not is_captured() else None
        reduced, reduced_leaders = _over_ranks(model, states, groups, own_leaders)
        by_layer = list(reduced.split([len(amax) for amax in by_layer]))
    share_amaxes(states, by_layer)  # in place, so that ``reduced`` has them, too
    # A state without a model follows the rule of delayed scaling, in which an Inf enters the history
    if not isinstance(model, LayerState):
        require_finite(model, states, torch.cat(by_layer) if reduced is None else reduced)
    update_scales(states, reduced)
    forget_gathers(records)
    # After the update: a lineage is that of one version of the scales.
    for state in states:
        state.set_lineage(lineages[state])
    if reduced_leaders is not None:
        separate_siblings(training_of(model).siblings, states, reduced_leaders)


def _over_ranks(
    model: nn.Module, states: list[LayerState], groups: list[Group], others: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the amaxes of layers on one device over all ranks, fp32 ``[N * S]``, and the maximum of ``others`` over
    the ranks."""
    # One collective for all layers, and for the other numbers.
    parts = [torch.cat([required(state.amax) for state in states]), *gathered_amaxes(states)]
    sent = torch.cat(parts if others is None else [*parts, others])
    for group in groups:
        sent = reduced(training_of(model), sent, group)
    count = len(parts[0])
    amaxes, of_gathers, used = sent[: 3 * count].split(count)
    # Each rank has the amax of its part of a weight, and a backward may have run on another one.
    amaxes = torch.maximum(amaxes, torch.where(used != 0, of_gathers, 0.0))
    return amaxes, None if others is None else sent[3 * count :]


def _groups(model: nn.Module, states: list[LayerState], ranks: TrainingRanks) -> list[Group]:
    """Return the groups that scales are reduced over; none for pipeline stages; RuntimeError if stages are
    ambiguous."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = [group for group in ranks.groups if dist.get_world_size(group) > 1]
    size = None if ranks.named or not groups else _pipeline_size(model)
    if size is None:
        return groups
    if states and size < dist.get_world_size():
        raise RuntimeError(
            f"step_: {size} of {dist.get_world_size()} ranks run the pipeline of layer {states[0].name}, and "
            "no mesh says which of them train a stage together; call set_mesh_(stage, mesh) first"
        )
    return []


_known: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()


def _pipeline_size(model: nn.Module) -> int | None:
    """Return the size of the pipeline whose stage a model is, or None, looked up at the first step."""
    if model not in _known:
        _known[model] = next((stage.group_size for stage in stages_of(model)), None)
    return _known[model]


def _check_same_scales(model: nn.Module, states: list[LayerState], group: Group) -> bool:
    """Raise on every rank unless all have the same scales; return whether it compared: once per model, group and
    layout."""
    checked = training_of(model).scales
    layout = [(state.name, state.slots, state.rules) for state in states]
    if checked.get(group) == layout:
        return False
    if may_end_early(model):
        if not states:
            return False
        raise NotImplementedError(
            f"step_: all ranks reduce amaxes in every step, got {type(model).__name__} in join(), in which some take "
            "no more steps; pass join(throw_on_early_termination=True), or give all ranks equally many batches"
        )
    facts = {
        state.name or f"layer {i}": ", ".join(in_words(state.slots, state.rules))
        for i, state in enumerate(states)
    }
    require_alike(
        "step_: the same delayed scales of the same layers are required on all ranks",
        facts,
        advice=ADVICE,
        groups=[group],
        timeout=patience(),
    )
    checked[group] = layout
    return True

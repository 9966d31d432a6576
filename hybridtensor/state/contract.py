"""What the ranks that train a model together must have alike, and at which step they are."""

from __future__ import annotations

import datetime
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hybridtensor.dtensor import local
from hybridtensor.ops.library import is_captured
from hybridtensor.printed import some
from hybridtensor.ranks import PATIENCE, TIMEOUT, patience, require_alike
from hybridtensor.state.layer import LayerState
from hybridtensor.state.ranks import ALL_RANKS, TrainingRanks
from hybridtensor.state.training import Group, Training, on_host, training_of

if TYPE_CHECKING:
    from torch.distributed.pipelining.stage import _PipelineStageBase  # private

ADVICE = "convert the model alike everywhere, or name the ranks that train it with set_mesh_"


def require_contract(
    who: str,
    model: nn.Module,
    groups: Iterable[Group],
    timeout: datetime.timedelta = TIMEOUT,
) -> None:
    """Raise RuntimeError on every rank unless all in each group have equal recipes, persistence and frozen weights."""
    distinct = list(dict.fromkeys(None if group is dist.group.WORLD else group for group in groups))
    require_alike(who, _facts(model), advice=ADVICE, groups=distinct, timeout=timeout)


def require_contract_once(model: nn.Module) -> None:
    """Call ``require_contract`` in the first step of a model that DDP, or sharding, trains on several ranks."""
    training = training_of(model)
    if training.is_compared or not (dist.is_available() and dist.is_initialized()):
        return
    if may_end_early(model):
        return
    training.is_compared = True
    # its ranks have just reduced gradients
    require_contract(f"first step of {type(model).__name__}", model, groups_of(model), patience())


def _facts(model: nn.Module) -> dict[str, str]:
    """Return recipe, persistence and ``requires_grad`` of each weight by name."""
    facts = {}
    for name, parameter in model.named_parameters():
        part = local(parameter)
        config = getattr(part, "config", None)
        if config is not None:
            facts[name] = described(
                f"{config} ({config.fingerprint()[:8]})", part, parameter.requires_grad
            )
    return facts


def described(recipe: str, part: Tensor, is_trained: bool) -> str:
    """Return in words what ranks must have alike of a weight: its recipe, and whether it is persistent and trained."""
    kind = "persistent" if getattr(part, "plain", None) is None else "in high precision"
    trained = "trained" if is_trained else "frozen"
    return f"{recipe}, {kind}, {trained}"


def groups_of(model: nn.Module) -> list[Group]:
    """Return the process groups that train a model, as far as torch knows."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    parameters = list(model.parameters())
    found: list[Group] = [wrapper.process_group for wrapper in _wrappers(model)]
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            found += parameter.device_mesh.get_all_groups()
    return list(dict.fromkeys(found))


def _wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers of a model, or of a module that it is a part of, for data-parallel training."""
    own = {id(parameter) for parameter in model.parameters()}
    # Nothing says to a module that DistributedDataParallel wraps it; asked once for each model
    known = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
    return [one for one in known if any(id(p) in own for p in one.module.parameters())]


_PIPELINING = "torch.distributed.pipelining.stage"


def stages_of(model: nn.Module) -> list[_PipelineStageBase]:
    """Return the stages of pipelines that run a model, a part of it, or a module that it is a part of."""
    if _PIPELINING not in sys.modules:
        return []
    own = {id(parameter) for parameter in model.parameters()}
    kind = sys.modules[_PIPELINING]._PipelineStageBase  # private: that of traced stages, too
    # Nothing says to a module that a stage runs it. By type: isinstance asks every object for ``__class__``, which
    # proxies answer by running code.
    known = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return [one for one in known if any(id(p) in own for p in one.submod.parameters())]


def is_first_rank(who: str, model: nn.Module) -> bool:
    """Return whether this rank writes what all ranks hold: the first one, or a process alone.

    Raises:
        NotImplementedError: If the model is a stage of a pipeline, of which other ranks have others.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    if stages_of(model):
        raise NotImplementedError(
            f"{who}: {type(model).__name__} is a stage of a pipeline, of which only the first rank's would be written; "
            "save plain_state_dict(stage) on each rank, or load all stages into one model"
        )
    return dist.get_rank() == 0


def may_end_early(model: nn.Module) -> bool:
    """Return whether a model is in ``join()``, where ranks train on while others have no batches left, or none at all:
    these would not come to a comparison."""
    training = training_of(model)
    if not any(map(_ends_early, training.wrappers)):
        training.wrappers = weakref.WeakSet(_wrappers(model))
    return any(map(_ends_early, training.wrappers))


def _ends_early(wrapper: DistributedDataParallel) -> bool:
    config = wrapper._join_config
    return config.enable and not config.throw_on_early_termination


def ranks_without_state(model: nn.Module) -> list[TrainingRanks]:
    """Return the ranks that train a model whose layers have no tensors of state; by default all."""
    # Such a state need not be a submodule, but is known to the weight
    layers = [getattr(local(parameter), "layer", None) for parameter in model.parameters()]
    named = dict.fromkeys(layer.ranks for layer in layers if isinstance(layer, LayerState))
    return list(named) or [ALL_RANKS]


def reduced(training: Training, amaxes: Tensor, group: Group) -> Tensor:
    """Reduce amaxes over a group in one MAX collective that also compares steps; raise RuntimeError on every rank."""
    if is_captured():  # replays would send the numbers of the step that was captured
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        return amaxes
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # exact up to 2 ** 24; pinned, as a copy of pageable memory may wait for the device
    numbers = torch.zeros(2, size, dtype=torch.float32, device="cpu", pin_memory=amaxes.is_cuda)
    numbers[0, rank], numbers[1, rank] = training.steps, training.ended
    sent = torch.cat([amaxes, numbers.flatten().to(amaxes.device, non_blocking=True)])
    if sent.is_cuda:
        dist.all_reduce(sent, dist.ReduceOp.MAX, group=group)
    else:
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, group=group, async_op=True)
        _wait(work, training.steps, size)
    largest, step_counts = sent[: len(amaxes)], sent[len(amaxes) :].view(2, size)
    if sent.is_cuda:
        _compare_later(training, step_counts, group)
    else:
        _require_same_steps(step_counts, group)
    return largest


def _wait(work: dist.Work, steps: int, size: int) -> None:
    # all ranks have just reduced gradients, so that one that takes this long does not come
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        raise RuntimeError(
            f"step_: rank {dist.get_rank()} is at step {steps + 1} and got no answer from one of {size} ranks "
            f"in {PATIENCE.seconds} s; call step_ on all ranks after every step of the optimizer, with the same "
            f"recipes ({error})"
        ) from error


def _compare_later(training: Training, step_counts: Tensor, group: Group) -> None:
    """Schedule the comparison for a later step, so that the host does not synchronize."""
    before = training.step_counts
    if before is not None and before[1]():
        _require_same_steps(before[0], before[2])
    training.step_counts = (*on_host(step_counts), group)


def _require_same_steps(step_counts: Tensor, group: Group) -> None:
    """Raise RuntimeError unless all ranks of a group took equally many steps; it names one rank for each number."""
    for numbers, what in zip(step_counts.tolist(), ("step_", "step of the optimizer"), strict=True):
        first: dict[float, int] = {}
        for index, number in enumerate(numbers):
            first.setdefault(number, index)
        if len(first) > 1:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            counts = [f"rank {ranks[i]} is at {what} {int(n) + 1}" for n, i in first.items()]
            raise RuntimeError(
                f"step_: {some(counts, between=', ')}; all ranks call optimizer.step() and step_ equally often"
            )

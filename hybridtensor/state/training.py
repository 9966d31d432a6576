"""The training of one model as an object: its step counts, and the callbacks of its steps.

A step of the optimizers ends when each that holds parameters of the model has stepped. ``step_`` advances the state of
quantizers. Whoever depends on either subscribes here: nothing else counts steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from hybridtensor.ops.library import backward_that_runs, is_traced
from hybridtensor.state.layer import LayerState
from hybridtensor.state.lost import LostStates

Callback = Callable[[nn.Module, Optimizer], None]
"""Called when an optimizer ended a step of a model."""
callbacks_of_every_model: list[Callback] = []
"""Callbacks of each model whose training begins."""
callbacks_of_writes: list[Callable[[Optimizer], None]] = []
"""Called whenever an optimizer wrote parameters, also several times within one step."""
callbacks_of_optimizers: list[Callable[[Optimizer, list[nn.Module]], None]] = []
"""Called after each step of an optimizer, with the models that are known to have parameters of it."""
Group = dist.ProcessGroup | None
StateSlots = Sequence[tuple[LayerState, tuple[str, ...]]]
"""States with the names of their delayed scales."""
Pending = list[tuple[Sequence[LayerState], Tensor, Callable[[], bool]]]
"""Flags of layers on their way to the host, the oldest first: each with whether they have arrived."""


class Training:
    """The training of one model on this rank: its steps, callbacks, and pending comparisons between ranks.

    Attributes:
        steps: Calls of ``step_``.
        ended: Steps of the model's optimizers.
        callbacks: Called after each of the latter.
        wrappers: Those of DistributedDataParallel, as ``may_end_early`` found them.
    """

    def __init__(self) -> None:
        self.steps = self.ended = 0
        self.callbacks = list(callbacks_of_every_model)
        self.is_compared = False
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.scales: dict[Group, Sequence[tuple[object, ...]]] = {}
        self.step_counts: tuple[Tensor, Callable[[], bool], Group] | None = None
        self.finite: list[tuple[StateSlots, Tensor, Callable[[], bool]]] = []
        self.siblings: Pending = []
        self.lost = LostStates()
        self._taken: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._holds: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )

    def has_optimizer(self, optimizer: Optimizer, model: nn.Module) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._holds.get(optimizer)
        # The number tells of ``add_param_group``. Looking through all parameters takes longer, in every step.
        if known is None or known[0] != count:
            own = {id(parameter) for parameter in model.parameters()}
            found = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            known = self._holds[optimizer] = (count, found)
        return known[1]

    def count(self, optimizer: Optimizer) -> bool:
        """Count an optimizer's step, and return whether it completes a step of the model."""
        taken = self._taken
        # one that is new stepped with those that have: all of a step's are known from the second one on
        taken[optimizer] = taken.get(optimizer, max(self.ended - 1, 0)) + 1
        ran_ahead = taken[optimizer] > self.ended + 1  # another one was left out
        ends = ran_ahead or all(count > self.ended for count in taken.values())
        self.ended += ends
        return ends


_trainings: weakref.WeakKeyDictionary[nn.Module, Training] = weakref.WeakKeyDictionary()
_hooks: list[RemovableHandle] = []
_backwards: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""The last backward within which each optimizer stepped."""


def training_of(model: nn.Module) -> Training:
    """Return the training of a model, created at the first call."""
    watch_optimizers()
    known = _trainings.get(model)
    return _trainings.setdefault(model, Training()) if known is None else known


def watch_optimizers() -> None:
    """Observe the steps of optimizers from now on."""
    if not _hooks:
        # One hook for all optimizers of the process: nothing says which of them will step a model.
        _hooks.append(register_optimizer_step_post_hook(_after_optimizer))


def to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """Return copies of tensors of one GPU on the host, which does not wait for them, and when they are complete; on a
    CPU the tensors themselves."""
    device = tensors[0].device
    if device.type != "cuda":
        return list(tensors), None
    made = [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))  # not that of the current device
    return made, event


def on_host(flags: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Return flags on the host as ``to_host`` does, and whether they have arrived there."""
    (made,), event = to_host([flags])
    return made, (lambda: True) if event is None else event.query


def layer_states(model: nn.Module) -> list[LayerState]:
    """Return the states of all converted layers of a model, itself included, that hold tensors."""
    # Not by ``modules()``: the walk of a converted layer leaves its state out, and each step of training comes here,
    # where torch's generators take 1,400 calls for 16 blocks.
    seen, ahead = dict[nn.Module, None](), [model]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen[module] = None
            ahead += [child for child in reversed(module._modules.values()) if child is not None]
    return [module for module in seen if isinstance(module, LayerState) and not module.is_empty]


def _after_optimizer(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Call the callbacks of the models whose parameters an optimizer has stepped; compiled steps are not counted."""
    if is_traced():
        return
    for written in callbacks_of_writes:
        written(optimizer)
    # Hooks of gradients call an optimizer once per parameter; together these are one step.
    backward = backward_that_runs()
    if backward != -1 and _backwards.get(optimizer) == backward:
        return
    _backwards[optimizer] = backward
    trained = [
        (model, training)
        for model, training in list(_trainings.items())
        if training.callbacks and training.has_optimizer(optimizer, model)
    ]
    for model, training in trained:
        if training.count(optimizer):
            for callback in list(training.callbacks):
                callback(model, optimizer)
    for observe in callbacks_of_optimizers:
        observe(optimizer, [model for model, _ in trained])

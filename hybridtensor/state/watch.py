"""Notice that state is not advanced: an optimizer steps a model's parameters, and nobody calls
``step_``.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hybridtensor.ops.library import is_traced
from hybridtensor.state.contract import forget_contract, progress_of, require_contract_once
from hybridtensor.state.layer import LayerState

_FORGIVEN_STEPS = 2  # of one optimizer: loading, trying out, sharpness-aware steps


class _Steps:
    """Steps of optimizers that hold parameters of a model, since its state was advanced.

    Attributes:
        states: What is advanced.
        version: Sum of the versions of the states, as of the last look.
        taken: Steps, by optimizer.
        all: Steps since the recipes were set, by optimizer.
        holds: Whether an optimizer holds a parameter of the model, and how many it had then.
    """

    def __init__(self, states: list[LayerState]) -> None:
        self.states = states
        self.version = self._version()
        self.taken: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.all: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.holds: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()
        )

    def _version(self) -> int:
        return sum(state.version for state in self.states)

    def count(self, optimizer: Optimizer) -> int:
        """Count a step, and return how many this optimizer took since the state was advanced."""
        version = self._version()
        if version != self.version:
            self.version = version
            self.taken.clear()
        self.taken[optimizer] = taken = self.taken.get(optimizer, 0) + 1
        return taken

    def count_all(self, optimizer: Optimizer) -> int:
        """Count a step, and return how many this optimizer took of the model in all."""
        self.all[optimizer] = taken = self.all.get(optimizer, 0) + 1
        return taken

    def is_of(self, optimizer: Optimizer, model: nn.Module) -> bool:
        """Return whether the optimizer holds a parameter of the model."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self.holds.get(optimizer)
        if known is None or known[0] != count:
            own = {id(parameter) for parameter in model.parameters()}
            found = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
            known = self.holds[optimizer] = (count, found)
        return known[1]


_watched: weakref.WeakKeyDictionary[nn.Module, _Steps] = weakref.WeakKeyDictionary()
_hooks: list[object] = []


def watch(model: nn.Module) -> None:
    """Have optimizers that step ``model`` raise where its state is not advanced.

    Called whenever recipes change. Of a model without state, the first step compares recipes between ranks.
    """
    forget_contract(model)
    _watched[model] = _Steps(layer_states(model))
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count_step))


def layer_states(model: nn.Module) -> list[LayerState]:
    """Return the states of all layers of ``model`` that keep something."""
    found = dict.fromkeys(
        [*model.modules(), *model._modules.values()]
    )  # its own walk leaves states out
    return [module for module in found if isinstance(module, LayerState)]


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of any optimizer.

    Raises:
        RuntimeError: If it stepped parameters of a model again and again, and the model's state
            never advanced: scales and draws would stay those of one step for ever.
    """
    if is_traced():  # a compiled step goes uncounted
        return
    for model, steps in list(_watched.items()):
        if not steps.is_of(optimizer, model):
            continue
        require_contract_once(model)
        progress = progress_of(model)
        progress.taken = max(progress.taken, steps.count_all(optimizer))
        taken = steps.count(optimizer)
        if taken <= _FORGIVEN_STEPS or not steps.states:
            continue
        if layer_states(model) != steps.states:  # converted part by part, or made plain
            watch(model)
            continue
        raise RuntimeError(
            f"step_: the recipes of {type(model).__name__} keep state, which must advance with the "
            f"weights, but {type(optimizer).__name__} took {taken} steps without; call "
            "hybridtensor.step_(model) after every optimizer.step(), or "
            "hybridtensor.step_after(optimizer, model) once"
        )

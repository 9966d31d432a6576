"""Detect that ``step_`` is never called although an optimizer steps a model whose recipes have state."""

from __future__ import annotations

import weakref

from torch import nn
from torch.optim.optimizer import Optimizer

from hybridtensor.state.contract import require_contract_once
from hybridtensor.state.layer import LayerState
from hybridtensor.state.lost import state_of
from hybridtensor.state.training import callbacks_of_optimizers, layer_states, training_of

_FORGIVEN_STEPS = 2  # loading, trying out, sharpness-aware steps


class _StepCount:
    """Counts the steps of optimizers since any of some states advanced."""

    def __init__(self, states: list[LayerState]) -> None:
        self.states = states
        self._advanced = self._current()
        self.steps = 0

    def _current(self) -> int:
        return sum(state.steps for state in self.states)

    def add(self) -> bool:
        """Count a step, and return whether there were too many."""
        advanced = self._current()
        if advanced != self._advanced:
            self._advanced, self.steps = advanced, 0
        self.steps += 1
        return self.steps > _FORGIVEN_STEPS and bool(self.states)

    def error(self, whose: str, optimizer: Optimizer) -> RuntimeError:
        return RuntimeError(
            f"step_: {whose} state, which must advance with the weights, but {type(optimizer).__name__} took "
            f"{self.steps} steps without; call hybridtensor.step_(model) after every optimizer.step(), or "
            "hybridtensor.step_after(optimizer, model) once"
        )


class _MissingStep:
    """Callback of optimizer steps that raises if ``step_`` is missing."""

    def __init__(self, model: nn.Module) -> None:
        self._counted = _StepCount(layer_states(model))

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> None:
        require_contract_once(model)
        if not self._counted.add():
            return
        if layer_states(model) != self._counted.states:  # converted part by part, or made plain
            detect_missing_step(model)
            training_of(model).lost.require_none(model, layer_states(model), at_once=True)
            return
        raise self._counted.error(f"the recipes of {type(model).__name__} keep", optimizer)


class _MissingStepOfCopies:
    """Callback of optimizer steps that raises if ``step_`` is missing for layers that no known model has, such as those
    of a model that was copied or unpickled."""

    def __init__(self) -> None:
        # With the number of parameters, which tells of ``add_param_group``
        self._counted = weakref.WeakKeyDictionary[Optimizer, tuple[int, _StepCount]]()

    def __call__(self, optimizer: Optimizer, models: list[nn.Module]) -> None:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._counted.get(optimizer)
        if known is None or known[0] != count:
            known = self._counted[optimizer] = (count, _StepCount(_unknown(optimizer, models)))
        counted = known[1]
        used = [
            state
            for state in counted.states
            if (state.multiplied or state.is_in_graphs) and not state.is_empty
        ]
        if not used:
            counted.steps = 0
        elif counted.add():
            states = _unknown(optimizer, models)
            # set_config_ made a model known, or layers were exchanged
            if states != counted.states:
                self._counted[optimizer] = (count, _StepCount(states))
                return
            for model in models:  # which say what became of the layer
                training_of(model).lost.require_none(model, layer_states(model), at_once=True)
            name = used[0].name or "without a name"
            whose = f"the recipe of layer {name}, of a copied model or one that is gone, keeps"
            raise counted.error(whose, optimizer)


def _unknown(optimizer: Optimizer, models: list[nn.Module]) -> list[LayerState]:
    """Return the states of the layers whose weights an optimizer steps, without those that a known model has."""
    found = [state_of(p) for group in optimizer.param_groups for p in group["params"]]
    states = dict.fromkeys(state for state in found if state is not None)
    for model in models:
        if any(isinstance(one, _MissingStep) for one in training_of(model).callbacks):
            for state in layer_states(model):
                states.pop(state, None)
    return list(states)


callbacks_of_optimizers.append(_MissingStepOfCopies())


def detect_missing_step(model: nn.Module) -> None:
    """Make optimizers that step ``model`` raise if ``step_`` is never called."""
    training = training_of(model)
    training.is_compared = False
    others = [one for one in training.callbacks if not isinstance(one, _MissingStep)]
    training.callbacks[:] = [_MissingStep(model), *others]  # first: it compares ranks

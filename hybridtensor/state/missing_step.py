"""Detect that ``step_`` is never called although an optimizer steps a model whose recipes have state."""

from __future__ import annotations

from torch import nn
from torch.optim.optimizer import Optimizer

from hybridtensor.state.contract import require_contract_once
from hybridtensor.state.training import layer_states, training_of

_FORGIVEN_STEPS = 2  # loading, trying out, sharpness-aware steps


class _MissingStep:
    """Callback of optimizer steps that raises if ``step_`` is missing."""

    def __init__(self, model: nn.Module) -> None:
        self._states = layer_states(model)
        self._advanced = self._current()
        self._steps = 0  # of the optimizers, since the state was advanced

    def _current(self) -> int:
        return sum(state.steps for state in self._states)

    def __call__(self, model: nn.Module, optimizer: Optimizer) -> None:
        require_contract_once(model)
        advanced = self._current()
        if advanced != self._advanced:
            self._advanced, self._steps = advanced, 0
        self._steps += 1
        if self._steps <= _FORGIVEN_STEPS or not self._states:
            return
        if layer_states(model) != self._states:  # converted part by part, or made plain
            detect_missing_step(model)
            training_of(model).lost.require_none(model, layer_states(model), at_once=True)
            return
        raise RuntimeError(
            f"step_: the recipes of {type(model).__name__} keep state, which must advance with the "
            f"weights, but {type(optimizer).__name__} took {self._steps} steps without; call "
            "hybridtensor.step_(model) after every optimizer.step(), or "
            "hybridtensor.step_after(optimizer, model) once"
        )


def detect_missing_step(model: nn.Module) -> None:
    """Make optimizers that step ``model`` raise if ``step_`` is never called."""
    training = training_of(model)
    training.is_compared = False
    others = [one for one in training.callbacks if not isinstance(one, _MissingStep)]
    training.callbacks[:] = [_MissingStep(model), *others]  # first: it compares ranks

"""Weights that a module took over while their layer was dropped: no ``step_`` of the model reaches their state."""

from __future__ import annotations

from torch import Tensor, nn

from hybridtensor.dtensor import local
from hybridtensor.state.layer import LayerState

_FORGIVEN_STEPS = 2  # of one model, where the layer is in another one, whose state advances later


class LostStates:
    """The states of a model's weights that are not among its modules, and whether anything advances them."""

    def __init__(self) -> None:
        # Those that are, when the parameters were looked through last
        self._states: list[LayerState] | None = None
        # Name of a weight, the steps of its state, and the model's steps since these advanced
        self._waiting: dict[LayerState, tuple[str, int, int]] = {}

    def require_none(
        self, model: nn.Module, states: list[LayerState], *, at_once: bool = False
    ) -> None:
        """Raise RuntimeError if a product used a weight of the model whose state is not in it, and does not advance.

        Args:
            model: The model.
            states: The states of its layers.
            at_once: Whether to raise although another model's ``step_`` may still advance the state.
        """
        if at_once or self._states != states:  # else no layer came or went
            self._states, self._waiting = states, self._found(model, set(states))
        for state, (name, steps, waited) in self._waiting.items():
            waited = (
                waited + 1
                if (state.multiplied or state.is_in_graphs) and state.steps == steps
                else 0
            )
            self._waiting[state] = name, state.steps, waited
            if waited > (0 if at_once else _FORGIVEN_STEPS):
                raise RuntimeError(
                    f"step_: {name} is the weight of a converted layer ({state.name}) that is not in the model, so "
                    "that its delayed scales and random numbers neither advance nor are saved; keep the layer as a "
                    "child of the module that uses its weight, or replace layers before quantize_"
                )

    def _found(
        self, model: nn.Module, known: set[LayerState]
    ) -> dict[LayerState, tuple[str, int, int]]:
        found = {}
        for name, parameter in model.named_parameters():
            state = state_of(parameter)
            if state is not None and not state.is_empty and state not in known:
                found[state] = self._waiting.get(state, (name, state.steps, 0))
        return found


def state_of(parameter: Tensor) -> LayerState | None:
    """Return the state of the layer whose weight a parameter is; None of any other, such as an adapter's."""
    part = local(parameter)
    state = getattr(getattr(part, "record", None), "layer", None)
    is_of_layer = isinstance(state, LayerState) and not getattr(part, "is_of_no_layer", False)
    return state if is_of_layer else None

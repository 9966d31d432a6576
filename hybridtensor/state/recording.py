"""Whether the amaxes of a step are recorded, and whether they can be used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from hybridtensor.arguments import require_module
from hybridtensor.ops.library import is_captured
from hybridtensor.printed import some
from hybridtensor.state.layer import LayerState
from hybridtensor.state.tensors import layer_of
from hybridtensor.state.training import StateSlots, layer_states, on_host, training_of


class without_recording:  # noqa: N801  (used as a context)
    """Run a model without recording amaxes for delayed scaling.

    ::

        with ht.without_recording(model):
            attribution = torch.autograd.grad(model(x).sum(), x)

    For forwards with a backward that are no part of a training step: attribution, profiling, warming up. Forwards
    alone leave no trace anyway, under ``torch.no_grad()`` or of layers that are trained: what they measure is recorded
    in their backward. Nor do the dry runs of ``torch.distributed.pipelining`` and
    ``torch.cuda.make_graphed_callables``. What counts is where forward ran.

    Args:
        model: A model that went through ``quantize_``.

    Raises:
        TypeError: If ``model`` is not a module.
    """

    def __init__(self, model: nn.Module) -> None:
        require_module("without_recording", model)
        self._model = model
        self._before: list[tuple[LayerState, bool]] = []

    def __enter__(self) -> Self:
        self._before = [(state, state.recording) for state in layer_states(self._model)]
        for state, _ in self._before:
            state.recording = False
        return self

    def __exit__(self, *error: object) -> None:
        for state, recording in self._before:
            state.recording = recording


def require_recorded(states: Sequence[LayerState]) -> None:
    """Raise RuntimeError for layers whose backward ran in this step without recording amaxes.

    No error is raised if another layer ran both with and without recording: what ran without was then no part of the
    training step, which left these layers out.
    """
    # a recipe that was set since may have no delayed scales
    ran = [state for state in states if state.record is not None and state.unrecorded]
    names = [layer_of(state) for state in ran if not state.recorded]
    if len(names) < len(ran):
        return
    if names:
        raise RuntimeError(
            f"step_: no amaxes were recorded of {some(names, 8, ', ')}, although backward ran, so that delayed scales "
            "would not follow; leave without_recording before the forwards of a training step"
        )


def require_finite(model: nn.Module, states: Sequence[LayerState], amaxes: Tensor) -> None:
    """Raise RuntimeError for amaxes that are not finite; on a GPU in a later step, without synchronizing."""
    # A step captured in a CUDA graph never raises, and meta tensors have no values.
    if is_captured() or amaxes.is_meta:
        return
    pending = training_of(model).finite
    slots = [(state, state.slots) for state in states]  # a recipe may be set before the host looks
    pending.append((slots, *on_host(amaxes.isfinite())))
    while pending and pending[0][2]():
        of_states, flags, _ = pending.pop(0)
        if not bool(flags.all()):
            pending.clear()
            raise RuntimeError(
                f"step_: the amaxes of {_not_finite(of_states, flags)} are not finite: a tensor that was "
                "quantized held an Inf; where a gradient scaler skipped the optimizer's step, call "
                "step_(model, skipped=True), which drops them"
            )


def _not_finite(of_states: StateSlots, finite: Tensor) -> str:
    slots = [(state, slot) for state, of_state in of_states for slot in of_state]
    pairs = zip(slots, finite.tolist(), strict=True)
    names = [f"{layer_of(state)} ({slot})" for (state, slot), fine in pairs if not fine]
    return some(names, 8, ", ")

"""Write loaded tensors into a model, all of them or none."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hybridtensor.distributed.checkpoint.undo import Undo, of_module, of_parts, run_all
from hybridtensor.inference.weights import named
from hybridtensor.state import LayerState
from hybridtensor.subclasses import HybridTensor

Inputs: TypeAlias = list[tuple[LayerState, dict[str, Tensor]]]
"""Layer states, and the state dict that each loads."""


@torch.no_grad()
def write(who: str, model: nn.Module, state: dict[str, Tensor], inputs: Inputs) -> None:
    """Write tensors into the parameters and buffers of a model; restore the former values if that fails.

    Args:
        who: The caller, for errors.
        model: The model.
        state: The tensors by name, in the shapes of the model. Each is removed when it is written, since the copy of
            the former values needs as much memory.
        inputs: Layer states, and the state dict that each loads.
    """
    found = [(name, value) for name, value in named(model) if name in state]
    undo: list[Undo] = []
    try:
        for name, value in found:
            undo += _former(value)
            stored = state.pop(name)
            if stored.device != value.device:
                stored = stored.to(value.device)
            value.detach().copy_(stored)
        for quantizers, content in inputs:
            undo += of_module(quantizers)
            quantizers.load_state_dict(content)
    except BaseException as error:
        run_all(f"{who}: the model is not as it was", undo, error)
        raise


def _former(value: Tensor) -> list[Undo]:
    """Return functions that undo a write of a parameter or buffer: they restore its data, the state of its layer, and
    the weights that share its common scale, which a write requantizes.
    """
    layer = value.record.layer if isinstance(value, HybridTensor) else None
    if not isinstance(layer, LayerState):
        return list(of_parts([value.detach()]))
    common: Any = layer.common
    siblings = [] if common is None else common.parts
    amaxes = [] if common is None or common.amax is None else [common.amax]
    tensors = [value.detach(), *siblings, *amaxes]
    undo = [*of_parts(tensors), *of_module(layer)]
    if common is not None:
        undo.append(functools.partial(setattr, common, "amax", common.amax))
    return undo

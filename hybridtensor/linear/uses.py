"""Warn of a layer whose weight is read, by its own forward or by another module's, and never multiplied: it runs
unquantized.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.optim import Optimizer

from hybridtensor.dtensor import local
from hybridtensor.linear.operands import WEIGHTS
from hybridtensor.ops import Face
from hybridtensor.state import LayerState
from hybridtensor.state.training import callbacks_of_every_model
from hybridtensor.subclasses.observing import Observer, is_multiplied, observers, unmultiplied

_ADVICE = (
    "multiply by the weight itself (F.linear(x, {weight})), compute the weight in a parametrization, or leave the "
    "layer out of quantize_ (keep_bf16)"
)


def warn_unquantized(layer: nn.Module, state: LayerState, what: str, *, stacklevel: int) -> None:
    """Warn that a layer multiplies a plain tensor; ``what`` says what its forward does, and ``stacklevel`` leads past
    the layer's call."""
    warnings.warn(
        f"layer {state.name or '<root>'} ({type(layer).__name__}) runs unquantized: its forward {what}; "
        + _ADVICE.format(weight="self.weight"),
        stacklevel=stacklevel,
    )


class Uses(Observer):
    """Observe the first forward of a layer with its own forward: warn if it only reads its weight."""

    def __init__(self, layer: nn.Module, state: LayerState) -> None:
        self._layer, self._state = layer, state
        self._readers, self._multiplied = list[str](), False

    def __enter__(self) -> None:
        observers.append(self)

    def __exit__(self, kind: object, *error: object) -> None:
        observers.remove(self)
        unmultiplied.pop(self._state, None)
        if kind is None and self._readers and not self._multiplied:
            readers = ", ".join(dict.fromkeys(self._readers))
            warn_unquantized(
                self._layer,
                self._state,
                f"reads the weight ({readers}) and multiplies by the result, which is a plain tensor",
                stacklevel=8,
            )

    def observe_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        self._multiplied = self._multiplied or layer is self._state

    def observe_read(self, layer: object, reader: str) -> None:
        if layer is self._state:
            self._readers.append(reader)


def _warn_of_unmultiplied(model: nn.Module, optimizer: Optimizer) -> None:
    """Warn of layers whose weight others read and no product multiplied, once per layer; see
    ``state.training.Callback``."""
    if not unmultiplied:
        return
    weights = (local(parameter) for parameter in model.parameters())
    states = {weight.record.layer for weight in weights if isinstance(weight, WEIGHTS)}
    for state, read in list(unmultiplied.items()):
        if state not in states:
            continue
        del unmultiplied[state]
        if not is_multiplied(state, in_graph=read.in_graph):
            state.multiplied = True  # or said to be missing: once per layer
            where = "compiled code of " if read.in_graph else ""
            ran = "was traced (equal layers may share the code of one)" if read.in_graph else "ran"
            warnings.warn(
                f"layer {state.name or '<root>'}: its weight was read as values ({read.reader}) in {where}a training "
                f"step, and no product of the layer {ran}; a product of such values, which are a plain tensor, is not "
                "quantized; " + _ADVICE.format(weight="layer.weight"),
                stacklevel=2,
            )


callbacks_of_every_model.append(_warn_of_unmultiplied)

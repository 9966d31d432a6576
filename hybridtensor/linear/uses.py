"""Warn of a layer whose forward reads its weight and never multiplies by it: it runs unquantized."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from hybridtensor.ops import Face
from hybridtensor.state import LayerState
from hybridtensor.subclasses.observing import observers


class Uses:
    """Observe the first forward of a layer with its own forward: warn if it only reads its weight."""

    def __init__(self, layer: nn.Module, state: LayerState) -> None:
        self._layer, self._state = layer, state
        self._readers, self._multiplied = list[str](), False

    def __enter__(self) -> None:
        observers.append(self)

    def __exit__(self, kind: object, *error: object) -> None:
        observers.remove(self)
        if kind is None and self._readers and not self._multiplied:
            warnings.warn(
                f"layer {self._state.name or '<root>'} ({type(self._layer).__name__}) runs unquantized: its forward "
                f"reads the weight ({', '.join(dict.fromkeys(self._readers))}) and multiplies by the result, which is "
                "a plain tensor; multiply by the weight itself (F.linear(x, self.weight)), compute the weight in a "
                "parametrization, or leave the layer out of quantize_ (keep_bf16)",
                stacklevel=6,  # past the layer's call
            )

    def note_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        """See ``Observer.note_operand``."""

    def note_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        self._multiplied = self._multiplied or layer is self._state

    def note_read(self, layer: object, reader: str) -> None:
        if layer is self._state:
            self._readers.append(reader)

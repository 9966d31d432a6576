"""Who watches what weights are used for: nobody, but while ``hybridtensor.check`` runs a model, and in
the steps that ``hybridtensor.watch`` samples.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridtensor.ops import Face, select_backend
from hybridtensor.ops.reencoding import reencodes
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.state import Context


class Observer(Protocol):
    """Interface that is called at each use of a weight."""

    def note_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        """Record an operand before quantization; ``layer`` is the layer's state, ``call`` identifies a forward and
        its backward."""

    def note_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        """Record a product; ``layer`` is the layer's state, ``gemm`` ``output``, ``grad_input`` or ``grad_weight``."""

    def note_read(self, layer: object, reader: str) -> None:
        """Record that ``reader`` read a weight in high precision; ``layer`` is the layer's state."""


observers: list[Observer] = []
"""The observers; empty in most programs, which costs one look."""


def for_products(context: Context, dtype: torch.dtype, *, row: bool, column: bool) -> Context:
    """Return the context of a tensor whose faces only products read, and may be dequantized; not if observed or
    grouped."""
    # Observers and grouped products need elements; in other dtypes a product with one high-precision operand would
    # round the dequantized values.
    return context.with_values(values_of_products(context, dtype, row=row, column=column))


def for_products_of_weight(
    context: Context, dtype: torch.dtype, config: HybridConfig, device: torch.device
) -> Context:
    """Return ``for_products`` of a weight: elements where its product re-encodes them for the device's matrix units."""
    row, column = _weight_values(config, device)
    return for_products(context, dtype, row=row, column=column)


@functools.lru_cache(maxsize=1024)
def _weight_values(config: HybridConfig, device: torch.device) -> tuple[bool, bool]:
    """Return whether no product re-encodes the rowwise and the columnwise face of a weight."""
    output, grad_input, _ = (config.formats(gemm) for gemm in GEMMS)
    row, column = (
        reencodes(*pair) and select_backend(*pair, torch.bfloat16, device).name == "native"
        for pair in (output, grad_input)
    )
    return not row, not column


def values_of_products(
    context: Context, dtype: torch.dtype, *, row: bool, column: bool
) -> tuple[bool, bool]:
    """Return which faces may hold high-precision values in place of quantized data: none while something observes."""
    if observers or dtype != torch.bfloat16 or context.groups is not None:
        return False, False
    return row, column


def note_operand(layer: object, role: str, values: Tensor, call: object) -> None:
    """Pass an operand to every observer."""
    for observer in observers:
        observer.note_operand(layer, role, values, call)


def note_product(layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype) -> None:
    """Pass a product to every observer."""
    for observer in observers:
        observer.note_product(layer, gemm, left, right, dtype)


def note_read(weight: Any, reader: object) -> None:
    """Tell every observer which operator read a weight in high precision."""
    for observer in observers:
        observer.note_read(weight.record.layer, str(reader))

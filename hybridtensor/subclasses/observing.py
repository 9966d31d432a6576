"""Who watches what weights are used for: nobody, but while ``hybridtensor.check`` runs a model, and in
the steps that ``hybridtensor.watch`` samples.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from hybridtensor.ops import Face
from hybridtensor.state import Context


class Observer(Protocol):
    """Is called at each use of a weight."""

    def note_operand(self, layer: object, role: str, values: Tensor, call: object) -> None:
        """Record an operand of the next products, those of a forward or of its backward.

        Args:
            layer: State of the layer, which stands for it.
            role: ``input``, ``weight`` or ``grad_output``.
            values: As it was before it was quantized; the weight itself.
            call: Stands for the forward, in its backward, too; None if no backward follows.
        """

    def note_product(
        self, layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype
    ) -> None:
        """Record a product.

        Args:
            layer: State of the layer, which stands for it.
            gemm: ``output``, ``grad_input`` or ``grad_weight``.
            left: Left operand.
            right: Right operand.
            dtype: That of the product.
        """

    def note_read(self, layer: object, reader: str) -> None:
        """Record that values of a weight were read in high precision.

        Args:
            layer: State of the layer, which stands for it.
            reader: What read them.
        """


observers: list[Observer] = []
"""The observers; empty in most programs, which costs one look."""


def for_products(context: Context, dtype: torch.dtype, *, row: bool, column: bool) -> Context:
    """Return the context of a tensor whose faces only products read, and at once: they may be values.

    Who watches wants elements, and so does what goes by groups; in other dtypes a product of one operand in high
    precision would round values to these.

    Args:
        context: Which tensor it is.
        dtype: Dtype of the computation.
        row: Whether that is so of the rowwise face.
        column: Whether that is so of the columnwise face.
    """
    return context.with_values(values_of_products(context, dtype, row=row, column=column))


def values_of_products(
    context: Context, dtype: torch.dtype, *, row: bool, column: bool
) -> tuple[bool, bool]:
    """Return ``Context.values`` of such a tensor; see ``for_products``."""
    if observers or dtype != torch.bfloat16 or context.groups is not None:
        return False, False
    return row, column


def note_operand(layer: object, role: str, values: Tensor, call: object) -> None:
    """Tell all observers of an operand; see ``Observer.note_operand``."""
    for observer in observers:
        observer.note_operand(layer, role, values, call)


def note_product(layer: object, gemm: str, left: Face, right: Face, dtype: torch.dtype) -> None:
    """Tell all observers of a product; see ``Observer.note_product``."""
    for observer in observers:
        observer.note_product(layer, gemm, left, right, dtype)


def note_read(weight: Any, reader: object) -> None:
    """Tell all observers that values of a weight were read; see ``Observer.note_read``."""
    for observer in observers:
        observer.note_read(weight.record.layer, str(reader))

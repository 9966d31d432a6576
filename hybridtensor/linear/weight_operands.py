"""Operands that weights are, by where their columnwise face is until backward; see ``operands``.

| class | from |
|---|---|
| ``Operand`` | a persistent weight, whose faces are the parameter; in graphs any weight |
| ``KeptWeight`` | a weight whose faces are kept with it until backward has used them |
| ``GatheredWeight`` | a weight whose columnwise face FSDP2 gathers again for backward |
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtensor.linear.operands import Needs, Operand, Weight, required_face
from hybridtensor.ops import Face
from hybridtensor.ops.library import is_traced
from hybridtensor.subclasses import HybridTensor, MasterWeight


class KeptWeight(Operand):
    """A weight that keeps its faces until backward has used them.

    Args:
        weight: The weight.
        row: Its rowwise face.
        column: Its columnwise face, or None if backward will not use it.
    """

    __slots__ = ("_record",)

    def __init__(self, weight: MasterWeight, row: Face | None, column: Face | None) -> None:
        super().__init__(row, column)
        self._record = weight.record

    def save(self) -> list[Tensor]:
        """See ``Operand.save``."""
        saved = super().save()
        self._record.release_rowwise()
        return saved

    def release(self) -> None:
        """See ``Operand.release``."""
        self._record.release_faces()


class GatheredWeight(Operand):
    """A weight that FSDP2 gathers again for backward: its memory goes in between.

    Args:
        weight: The gathered weight, which stays the same object.
        row: The rowwise face.
        dtype: Dtype of the computation.
    """

    __slots__ = ("_dtype", "_weight")

    def __init__(self, weight: HybridTensor, row: Face | None, dtype: torch.dtype) -> None:
        super().__init__(row, None)
        self._weight, self._dtype = weight, dtype

    def columnwise(self, saved: list[Tensor]) -> Face:
        """See ``Operand.columnwise``."""
        column = self._weight.faces(rowwise=False, columnwise=True, dtype=self._dtype)[1]
        return required_face(column, "columnwise", "grad_input")


def weight_operand(weight: Weight, needs: Needs, dtype: torch.dtype) -> Operand:
    """Return the operand that a weight is: quantized now, kept from before, persistent or gathered."""
    gathered = isinstance(weight, HybridTensor) and weight.is_gathered
    row, column = weight.faces(rowwise=True, columnwise=needs.input and not gathered, dtype=dtype)
    if gathered and isinstance(weight, HybridTensor):
        return GatheredWeight(weight, row, dtype)
    if isinstance(weight, MasterWeight) and not is_traced():
        return KeptWeight(weight, row, column)
    return Operand(row, column)

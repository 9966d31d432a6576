"""One operand of a product: a face as the operators see it, and how it is kept for later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import IDENTITY, Format
from hybridtensor.ops.dequantize import dequantize, multipliable_values, scale_fits
from hybridtensor.ops.references.blocks import spread


class Operand(NamedTuple):
    """A face ``[other, contraction]``.

    Attributes:
        data: Elements, ``[other, contraction / elements_per_byte]``; the values themselves in the identity format.
        scale: Block scales; None in the identity format.
        tensor_scale: Second-level scale of two-level formats, else None.
        format: What the bytes mean.
    """

    data: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None
    format: Format

    @property
    def contraction(self) -> int:
        """Elements along the contraction axis."""
        return self.data.shape[1] * self.format.elements_per_byte

    @property
    def scales_partial_sums(self) -> bool:
        """Whether the scales vary along the contraction axis and cannot go into the elements exactly."""
        return self.scale is not None and self.format.block[1] is not None and not scale_fits(self.format)

    @property
    def scales_sum(self) -> bool:
        """Whether anything multiplies the sum of a product, or parts of it."""
        return self.scales_partial_sums or self.factor() is not None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the elements in ``dtype``, times those scales that vary along the contraction and fit in."""
        if self.scale is None:
            return self.data.to(dtype)
        return multipliable_values(self.data, self.scale, format=self.format, dtype=dtype)

    def factor(self) -> Tensor | None:
        """Return what multiplies the whole sum of each row, fp32 ``[1 or other, 1]``, or None."""
        if self.tensor_scale is not None:
            return self.tensor_scale * (1.0 / self.format.tensor_scale_max)
        return self.scale if self.scale is not None and self.format.block[1] is None else None

    def block_factor(self, start: int, stop: int) -> Tensor | None:
        """Return what multiplies the partial sum over ``[start, stop)``, fp32 ``[other, 1]``, or None."""
        along = self.format.block[1]
        if not self.scales_partial_sums or self.scale is None or along is None:
            return None
        if start // along != (stop - 1) // along:
            raise ValueError(f"scaled_mm: [{start}, {stop}) crosses a block of {along} of {self.format}")
        column = self.scale[:, start // along].unsqueeze(1)
        return spread(column, (self.format.block[0], None), (self.data.shape[0], 1))


class Held(NamedTuple):
    """A columnwise operand in high precision of what a rowwise face holds: it stores nothing, and is made when used.

    Attributes:
        rowwise: The face.
        dtype: Of the values.
    """

    rowwise: Operand
    dtype: torch.dtype

    def values(self) -> Operand:
        """Return the operand."""
        row = self.rowwise
        made = dequantize(row.data, _required(row.scale), row.tensor_scale, format=row.format, dtype=self.dtype)
        return plain_operand(made.t())


class Kept(NamedTuple):
    """What is left of an operand whose tensors are kept apart: the format, and the dtype if it was ``Held``."""

    format: Format
    held: torch.dtype | None


def plain_operand(values: Tensor) -> Operand:
    """Return high-precision values ``[other, contraction]`` as an operand."""
    return Operand(values, None, None, IDENTITY)


def take_apart(operand: Operand | Held | None) -> tuple[list[Tensor], Kept | None]:
    """Return the tensors of a columnwise operand, plain values as they lie in memory, and what they are."""
    if operand is None:
        return [], None
    face, held = (operand.rowwise, operand.dtype) if isinstance(operand, Held) else (operand, None)
    if face.scale is None:
        return [face.data.t()], Kept(face.format, held)
    tensors = [face.data, face.scale]
    return tensors if face.tensor_scale is None else [*tensors, face.tensor_scale], Kept(face.format, held)


def put_together(tensors: list[Tensor], kept: Kept) -> Operand | Held:
    """Undo ``take_apart``."""
    if kept.format.is_identity:
        return plain_operand(tensors[0].t())
    operand = Operand(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None, kept.format)
    return operand if kept.held is None else Held(operand, kept.held)


def _required(scale: Tensor | None) -> Tensor:
    if scale is None:
        raise ValueError("Held: a quantized face is required, got one in high precision")
    return scale

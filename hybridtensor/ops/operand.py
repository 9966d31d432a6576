"""One operand of a product: a face as the operators see it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.dequantize import element_values
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
        return self.scale is not None and self.format.block[1] is not None and not self._scale_fits

    @property
    def _scale_fits(self) -> bool:
        """Whether element times block scale is exact in bfloat16: a power of two, or E4M3 times E2M1."""
        return self.format.pow2_scale or self.format.scale_dtype == torch.float8_e4m3fn

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the elements in ``dtype``, times those scales that vary along the contraction and fit in."""
        if self.scale is None:
            return self.data.to(dtype)
        elements = element_values(self.data, self.format)
        if self.format.block[1] is not None and self._scale_fits:
            elements = elements * spread(self.scale.float(), self.format.block, elements.shape)
        largest = torch.finfo(dtype).max  # rounding up to a power-of-two scale's grid can step just beyond it
        return elements.clamp(-largest, largest).to(dtype)

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

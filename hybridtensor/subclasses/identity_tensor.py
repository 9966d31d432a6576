"""The passthrough face: high-precision values."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from hybridtensor.arguments import require_dtype
from hybridtensor.formats import IDENTITY, Format
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.wrapper import Size, Stride, WrapperTensor, require_plain


class IdentityTensor(WrapperTensor):
    """A face in high precision; serves both directions.

    ::

        face = ht.HybridQuantizer(ht.MXFP8Quantizer(), ht.IdentityQuantizer()).quantize(x).columnwise
        print(face.dequantize())

    ``source`` is a plain tensor, or a ``QuantizedTensor`` that is dequantized whenever the values are used: a
    high-precision face "of what the forward saw", which stores nothing beyond the bytes that it shares.

    Attributes:
        source: The values.
        turned: The transpose of ``source``, if that was made before: of a tensor without memory, which comes
            later, torch makes none.
    """

    ops = OpTable("IdentityTensor", "call dequantize() first")
    inner_names = ("source",)
    metadata_names = ()
    transient_names = (*WrapperTensor.transient_names, "turned")

    source: Tensor
    turned: Tensor | None = None

    @staticmethod
    def __new__(
        cls,
        source: Tensor,
        size: Size | None = None,
        stride: Stride = None,
    ) -> Self:
        if not isinstance(source, QuantizedTensor):
            require_plain("IdentityTensor", source)
        made = cls._make(source.size(), source.stride(), source.dtype, source.device)
        made.source = source
        return made

    @property
    def is_stack(self) -> bool:
        """Whether this may be a stack of matrices; plain values always may."""
        return not isinstance(self.source, QuantizedTensor) or self.source.is_stack

    @property
    def format(self) -> Format:
        return IDENTITY

    def alias_of(self, other: Self) -> Self:
        self.turned = other.turned
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values, which are of the nominal dtype, cast to ``dtype``: ``source`` itself where it is that."""
        values = (
            self.source.dequantize() if isinstance(self.source, QuantizedTensor) else self.source
        )
        if dtype is None or dtype == values.dtype:
            return values
        require_dtype("IdentityTensor.dequantize", dtype)
        return values.to(dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        of = f", of {self.source!r}" if isinstance(self.source, QuantizedTensor) else ""
        return f"IdentityTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}{of})"

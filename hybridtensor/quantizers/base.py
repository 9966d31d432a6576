"""Quantizers: frozen, compared by value, without state. Which faces to make is an argument of the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridtensor import formats, ops
from hybridtensor.formats import IDENTITY, Format
from hybridtensor.ops.library import require_float
from hybridtensor.subclasses import Face, HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.subclasses.wrapper import WrapperTensor, flatten

Faces = tuple[Face | None, Face | None]


@dataclass(frozen=True)
class Quantizer(ABC):
    """Makes the faces of a tensor. Subclasses say in which format and how."""

    repeatable: ClassVar[bool] = True
    """Whether quantizing one tensor twice gives the same bits (no random rounding, no history)."""

    def __init_subclass__(cls) -> None:
        torch.serialization.add_safe_globals([cls])  # weights of ours name their quantizers in checkpoints

    @property
    @abstractmethod
    def rowwise_format(self) -> Format:
        """Format of the rowwise face."""

    @property
    @abstractmethod
    def columnwise_format(self) -> Format:
        """Format of the columnwise face."""

    @abstractmethod
    def faces(self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
        """Return the faces asked for, with nominal ``dtype``. An identity face may alias ``x``; nothing is checked."""

    def quantize(
        self, x: Tensor, *, rowwise: bool = True, columnwise: bool = True, dtype: torch.dtype | None = None
    ) -> HybridTensor:
        """Quantize ``x``.

        Args:
            x: bf16, fp16 or fp32, one to four dimensions, any strides, may be empty. Leading dimensions count as one
                (the tokens): rowwise scale groups run along the last dimension, columnwise ones along the tokens.
            rowwise: Make the rowwise face.
            columnwise: Make the columnwise face. A face's bits never depend on whether the other is made.
            dtype: Nominal dtype of the result; by default that of ``x``.

        Returns:
            A ``HybridTensor`` without gradient, which shares no memory with ``x``; a face not asked for is None.

        Raises:
            TypeError: If ``x`` is not a tensor of those dtypes.
            ValueError: If ``x`` has no dimension or more than four, or no face is asked for.
        """
        who = type(self).__name__
        x = _values(who, x)
        if not 1 <= x.dim() <= 4:
            raise ValueError(f"{who}: one to four dimensions are required, got shape {tuple(x.shape)}; reshape it")
        if not rowwise and not columnwise:
            raise ValueError(f"{who}: at least one face is required, got rowwise=False and columnwise=False")
        with torch.no_grad():
            row, column = self.faces(x.detach(), rowwise=rowwise, columnwise=columnwise, dtype=dtype or x.dtype)
            return HybridTensor(_owned(row), _owned(column))

    def update_(self, dst: HybridTensor, x: Tensor) -> HybridTensor:
        """Quantize ``x`` into ``dst``, in place: every face that ``dst`` has is refreshed, none is added or dropped.

        Raises:
            TypeError: If ``dst`` is no HybridTensor or ``x`` no floating-point tensor.
            ValueError: If the shapes differ, or a face of ``dst`` is not in this quantizer's format.
        """
        who = f"{type(self).__name__}.update_"
        if not isinstance(dst, HybridTensor):
            raise TypeError(f"{who}: a HybridTensor is required, got {type(dst).__name__}; use quantize()")
        x = _values(who, x)
        if x.shape != dst.shape:
            raise ValueError(f"{who}: the shape {tuple(dst.shape)} is required, got {tuple(x.shape)}")
        with torch.no_grad():
            fresh = self.faces(
                x.detach(), rowwise=dst.rowwise is not None, columnwise=dst.columnwise is not None, dtype=dst.dtype
            )
            pairs = [(d, f) for d, f in zip((dst.rowwise, dst.columnwise), fresh, strict=True) if d is not None]
            for old, new in pairs:
                _check_refreshable(who, old, new)
            for old, new in pairs:
                for target, source in zip(flatten(old)[0], flatten(new)[0], strict=True):  # type: ignore[arg-type]
                    target.copy_(source)
        return dst


def _values(who: str, x: Tensor) -> Tensor:
    """Return ``x`` as a plain tensor, or raise."""
    if isinstance(x, MasterWeight):
        return x.master
    if isinstance(x, WrapperTensor):
        raise TypeError(f"{who}: a tensor in high precision is required, got {x!r}; call dequantize() on it")
    require_float(who, x)
    return x


def _check_refreshable(who: str, old: Face, new: Face | None) -> None:
    """Raise unless ``new`` can overwrite the payload of ``old``."""
    sources = [face.source if isinstance(face, IdentityTensor) else face for face in (old, new)]
    kinds = [(type(s), getattr(s, "format", None), getattr(s, "axis", None)) for s in sources]
    if type(old) is not type(new) or kinds[0] != kinds[1]:
        raise ValueError(f"{who}: a face of this quantizer's making is required, got {old!r}, it makes {new!r}")
    if isinstance(sources[0], QuantizedTensor) and sources[0].cuts_group:
        raise ValueError(f"{who}: {old!r} is a slice through a scale group; update the whole tensor")


def _owned(face: Face | None) -> Face | None:
    """Return a face that shares no memory with the tensor it was made from."""
    if isinstance(face, IdentityTensor) and not isinstance(face.source, QuantizedTensor):
        return IdentityTensor(face.source.clone(memory_format=torch.contiguous_format))
    return face


def tokens(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix ``[tokens, features]``; ``reshape`` could not infer -1 for an empty tensor."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


@dataclass(frozen=True)
class Float8Quantizer(Quantizer):
    """FP8 with current scaling: the scales come from the values that are being quantized.

    Args:
        granularity: ``"tensor"``: one scale; ``"row"``: one per row in the rowwise face and one per column in the
            columnwise face.
        dtype: Element, ``"e4m3"`` (range 448) or ``"e5m2"`` (range 57344).
        pow2_scale: Round scales down to powers of two.

    Raises:
        ValueError: If a word is unknown.
    """

    granularity: str = "tensor"
    dtype: str = "e4m3"
    pow2_scale: bool = False

    def __post_init__(self) -> None:
        for what, word, known in (
            ("granularity", self.granularity, ("tensor", "row")),
            ("dtype", self.dtype, ("e4m3", "e5m2")),
        ):
            if word not in known:
                raise ValueError(f"Float8Quantizer: unknown {what} {word!r}; {formats.nearest(str(word), known)}")
        if not isinstance(self.pow2_scale, bool):
            raise TypeError(f"Float8Quantizer: pow2_scale must be a bool, got {self.pow2_scale!r}")

    @property
    def rowwise_format(self) -> Format:
        """``fp8_<dtype>_<granularity>``, as for the columnwise face."""
        return formats.get_format(f"fp8_{self.dtype}_{self.granularity}")

    columnwise_format = rowwise_format

    def faces(self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
        """See ``Quantizer.faces``."""
        fmt, matrix = self.rowwise_format, tokens(x)
        row = column = None
        if rowwise:
            qdata, scale = ops.float8_quantize(matrix, fmt, pow2_scale=self.pow2_scale)
            row = QuantizedTensor(qdata, scale, None, fmt, -1, dtype, x.shape)
        if columnwise:
            if row is not None and self.granularity == "tensor":  # the same codes: transpose bytes, not values
                qdata, scale = row.qdata.t().contiguous(), row.scale.clone()
            else:
                qdata, scale = ops.float8_quantize(matrix.t(), fmt, pow2_scale=self.pow2_scale)
            column = QuantizedTensor(qdata, scale, None, fmt, 0, dtype, x.shape)
        return row, column


@dataclass(frozen=True)
class IdentityQuantizer(Quantizer):
    """No quantization: faces hold the values in the nominal dtype."""

    @property
    def rowwise_format(self) -> Format:
        """The identity format, as for the columnwise face."""
        return IDENTITY

    columnwise_format = rowwise_format

    def faces(self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
        """See ``Quantizer.faces``; both faces share one tensor, ``x`` itself where the dtype fits."""
        values = x.to(dtype)
        return IdentityTensor(values) if rowwise else None, IdentityTensor(values) if columnwise else None


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """A quantizer for each direction.

    Args:
        rowwise: Makes the rowwise face.
        columnwise: Makes the columnwise face.
        columnwise_source: What the columnwise face is made from: ``"original"``, the tensor itself, or
            ``"rowwise_dequantized"``, what a product with the rowwise face saw. An ``IdentityQuantizer`` of the latter
            stores nothing: its face is the rowwise one, dequantized when used.

    Raises:
        TypeError: If ``rowwise`` or ``columnwise`` is not a plain quantizer.
        ValueError: If ``columnwise_source`` is unknown.
    """

    rowwise: Quantizer
    columnwise: Quantizer
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        for direction in ("rowwise", "columnwise"):
            child = getattr(self, direction)
            if not isinstance(child, Quantizer) or isinstance(child, HybridQuantizer):
                raise TypeError(
                    f"HybridQuantizer: a quantizer of one format is required for {direction}, got {child!r}; "
                    "use IdentityQuantizer() for high precision"
                )
        sources = ("original", "rowwise_dequantized")
        if self.columnwise_source not in sources:
            raise ValueError(
                f"HybridQuantizer: unknown columnwise_source {self.columnwise_source!r}; "
                f"{formats.nearest(str(self.columnwise_source), sources)}"
            )

    @property
    def repeatable(self) -> bool:  # type: ignore[override]
        """Whether both directions repeat themselves."""
        return self.rowwise.repeatable and self.columnwise.repeatable

    @property
    def rowwise_format(self) -> Format:
        """Rowwise format of the rowwise quantizer."""
        return self.rowwise.rowwise_format

    @property
    def columnwise_format(self) -> Format:
        """Columnwise format of the columnwise quantizer."""
        return self.columnwise.columnwise_format

    def faces(self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Faces:
        """See ``Quantizer.faces``."""
        if self.columnwise_source == "original":
            if self.rowwise == self.columnwise:
                return self.rowwise.faces(x, rowwise=rowwise, columnwise=columnwise, dtype=dtype)
            row = self.rowwise.faces(x, rowwise=True, columnwise=False, dtype=dtype)[0] if rowwise else None
            column = self.columnwise.faces(x, rowwise=False, columnwise=True, dtype=dtype)[1] if columnwise else None
            return row, column
        row = self.rowwise.faces(x, rowwise=True, columnwise=False, dtype=dtype)[0]  # transient if not asked for
        column = self._of_rowwise(row, dtype) if columnwise and row is not None else None
        return row if rowwise else None, column

    def _of_rowwise(self, row: Face, dtype: torch.dtype) -> Face | None:
        """Make the columnwise face from the rowwise one."""
        if isinstance(self.columnwise, IdentityQuantizer):
            return row if isinstance(row, IdentityTensor) else IdentityTensor(row.detach())
        return self.columnwise.faces(row.dequantize(dtype), rowwise=False, columnwise=True, dtype=dtype)[1]

"""One quantized face of a tensor."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.arguments import require_dtype, require_kind, shown
from hybridtensor.formats import Format
from hybridtensor.ops import Face
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.wrapper import Metadata, Size, Stride, WrapperTensor


class QuantizedTensor(WrapperTensor):
    """One face: elements, scales and everything else that dequantizing needs, never the quantizer that made it.

    ::

        face = ht.NVFP4Quantizer().quantize(x).rowwise
        print(face.format.name, face.qdata, face.scale, face.tensor_scale)

    The elements are a matrix ``[other, contraction]``, whatever the logical shape: leading
    dimensions are flattened, and ``axis`` says which logical dimension is the contraction.

    - ``axis == -1`` (rowwise): scale groups run along the last dimension; ``qdata`` is ``[prod(leading), last]``.
    - ``axis == 0`` (columnwise): they run along the first; ``qdata`` is ``[last, prod(leading)]``.

    A stack of matrices ``[E, N, K]``, as experts' weights are, has the faces of its matrices one after
    the other: three dimensions of elements and scales. Columnwise groups then run along ``N``.

    Args:
        face: Elements, scales and their format.
        axis: -1 or 0.
        nominal_dtype: Default dtype of ``dequantize``.
        size: Logical shape.
        stride: Strides of the logical shape; None is contiguous.
        cuts_group: See below.

    Raises:
        ValueError: If the face is in high precision, or has no bytes of its own: ``IdentityTensor`` holds those.

    Attributes:
        qdata: Elements, dtype ``format.storage``; the last dimension counts bytes where elements are packed.
        scale: Block scales, ``format.scale_shape(*qdata.shape)``: element times scale is the value.
        tensor_scale: Second-level scale (fp32, ``format.tensor_scale_shape``), or None.
        format: Format of the elements.
        axis: -1 or 0.
        dtype: Nominal dtype, the default of ``dequantize``.
        cuts_group: Whether this is a slice through a scale group, which it shares with the rest of that group.
    """

    ops = OpTable("QuantizedTensor", "call dequantize() first")
    inner_names = ("qdata", "scale", "tensor_scale")
    metadata_names = ("format", "axis", "nominal_dtype", "cuts_group")
    transient_names = (*WrapperTensor.transient_names, "_flattened")
    _flattened: tuple[list[str], tuple[Metadata, Metadata | None]] | None = None

    qdata: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    format: Format
    axis: int
    nominal_dtype: torch.dtype
    cuts_group: bool

    @staticmethod
    def __new__(
        cls,
        face: Face,
        axis: int,
        nominal_dtype: torch.dtype,
        size: Size,
        stride: Stride = None,
        cuts_group: bool = False,
    ) -> Self:
        who = "QuantizedTensor"
        require_kind(who, "a face of hybridtensor.ops", face, Face)
        require_dtype(who, nominal_dtype)
        if type(axis) is not int or axis not in (-1, 0):
            raise ValueError(f"{who}: -1 or 0 is required as axis, got {shown(axis)}")
        if face.scale is None or face.dequantized_rowwise is not None:
            raise ValueError(
                f"{who}: a face with elements and scales of its own is required, got one in {face.format} "
                f"with dequantized_rowwise={face.dequantized_rowwise}; use IdentityTensor"
            )
        made = cls._make(size, stride, nominal_dtype, face.qdata.device)
        made.qdata, made.scale, made.tensor_scale = face.qdata, face.scale, face.tensor_scale
        made.format, made.axis = face.format, axis
        made.nominal_dtype, made.cuts_group = nominal_dtype, cuts_group
        return made

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Metadata, Metadata | None]]:
        # Nothing of a face is replaced. Guards and AOTAutograd ask three times per call of a graph.
        if self._flattened is None:
            self._flattened = super().__tensor_flatten__()
        return self._flattened

    @classmethod
    def from_parts(
        cls, inner: dict[str, Tensor], metadata: Metadata, size: Size, stride: Stride
    ) -> Self:
        # In the order of ``metadata_names``, in which files of all versions hold them.
        format, axis, nominal_dtype, cuts_group = metadata
        face = Face(inner["qdata"], inner["scale"], inner.get("tensor_scale"), format)
        return cls(face, axis, nominal_dtype, size, stride, cuts_group)

    @property
    def face(self) -> Face:
        return Face(self.qdata, self.scale, self.tensor_scale, self.format)

    @property
    def is_stack(self) -> bool:
        """Whether this is a face of each matrix of a stack, which is not flattened."""
        return self.qdata.dim() == self.dim() == 3

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Shape of the quantized matrix, ``(prod(leading), last)``, with padding rows; of a stack each matrix."""
        rows, width = self.qdata.shape[-2:]
        other, contraction = rows, width * self.format.elements_per_byte
        return (other, contraction) if self.axis == -1 else (contraction, other)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a plain contiguous tensor of this shape, in ``dtype`` (default: the nominal dtype)."""
        dtype = self.nominal_dtype if dtype is None else dtype
        values = ops.rowwise_values(self.face, dtype)
        matrix = values if self.axis == -1 else values.transpose(-2, -1)
        if matrix.numel() > self.numel():  # rows of zeros complete a block
            matrix = matrix[: self.numel() // matrix.shape[-1]]
        return matrix.reshape(self.shape).contiguous()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        direction = "rowwise" if self.axis == -1 else "columnwise"
        return (
            f"QuantizedTensor({self.format}, {direction}, shape={tuple(self.shape)}, dtype={self.nominal_dtype}, "
            f"device={self.qdata.device})"
        )

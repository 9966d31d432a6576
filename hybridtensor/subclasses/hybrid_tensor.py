"""A tensor with two faces, each in its own format."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self

import torch
from torch import Tensor

from hybridtensor.ops import Held, Operand
from hybridtensor.ops.operand import plain_operand
from hybridtensor.state import Context
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.kept import Kept, is_same
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor
from hybridtensor.subclasses.wrapper import InterceptingTensor

Face = QuantizedTensor | IdentityTensor


class HybridTensor(InterceptingTensor):
    """A tensor that carries a rowwise and a columnwise face; either may be absent.

    ``t()`` swaps the faces, and a matrix product takes ``rowwise`` of its left and ``columnwise`` of its right operand.
    As a parameter it is a persistent low-precision weight: there is no high-precision copy.

    Attributes:
        rowwise: Face whose scale groups run along the last dimension, or None.
        columnwise: Face whose scale groups run along the first dimension, or None.
        config: The recipe of the layer whose weight this is (a ``HybridConfig``), or None.
        kept: Its values in high precision, which aliases of a weight share.
    """

    ops = OpTable("HybridTensor", "call dequantize() first, or step it through hybridtensor.optim.MasterWeights")
    functions = OpTable("HybridTensor", "")
    inner_names = ("rowwise", "columnwise")
    metadata_names = ("config",)
    transient_names = ("gathered",)

    rowwise: Face | None
    columnwise: Face | None
    config: Any
    kept: Kept

    @staticmethod
    def __new__(
        cls,
        rowwise: Face | None,
        columnwise: Face | None,
        config: Hashable = None,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> Self:
        face = rowwise if rowwise is not None else columnwise
        if face is None:
            raise ValueError("HybridTensor: at least one face is required, got rowwise=None and columnwise=None")
        if rowwise is not None and columnwise is not None:
            _check_same(rowwise, columnwise)
        size = face.size() if size is None else size
        return cls._make(size, face.stride() if stride is None else stride, face.dtype, face.device)

    def __init__(
        self,
        rowwise: Face | None,
        columnwise: Face | None,
        config: Hashable = None,
        size: torch.Size | tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
    ) -> None:
        self.rowwise, self.columnwise, self.config = rowwise, columnwise, config
        self.kept = Kept()

    @property
    def original(self) -> Tensor | None:
        """High-precision value that a trainable weight was made from, until an optimizer takes it; or None."""
        return self.kept.original

    def require_face(self, direction: str, *, name: str, gemm: str) -> Face:
        """Return the face in ``direction``.

        Args:
            direction: ``"rowwise"`` or ``"columnwise"``.
            name: What this tensor is to the caller, for the error.
            gemm: What the face is needed for, for the error.

        Raises:
            ValueError: If the face is absent: it is not made up silently.
        """
        if not torch.compiler.is_compiling() and self.gathered is not None:
            self.gathered.require(direction)
        face: Face | None = getattr(self, direction)
        if face is None:
            raise ValueError(
                f"{gemm}: the {direction} face of {name} is required, got a HybridTensor of shape {tuple(self.shape)} "
                f"without it; quantize with {direction}=True"
            )
        return face

    def faces(self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> tuple[Face | None, Face | None]:
        """Return the faces asked for, with nominal dtype ``dtype``: what ``MasterWeight.faces`` does, without work.

        Raises:
            ValueError: If one is absent.
        """
        row = self.require_face("rowwise", name="weight", gemm="output") if rowwise else None
        column = self.require_face("columnwise", name="weight", gemm="grad_input") if columnwise else None
        return _as_dtype(row, dtype), _as_dtype(column, dtype)

    def rows(self) -> Tensor:
        """Return the values that an embedding reads: those of the rowwise face, or what FSDP2 gathered them from."""
        gathered = None if torch.compiler.is_compiling() else self.gathered
        face = self.require_face("rowwise", name="weight", gemm="embedding")
        values: Tensor | None = None if gathered is None else gathered.values
        return face.dequantize() if values is None else values

    def operands(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype
    ) -> tuple[Operand | None, Operand | Held | None]:
        """Return the operands asked for: what ``MasterWeight.operands`` does, without work."""
        row, column = self.faces(rowwise=rowwise, columnwise=columnwise, dtype=dtype)
        return row_operand(row), column_operand(column)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """See ``InterceptingTensor``; that a graph holds the faces is noted for a weight that is gathered."""
        if self.gathered is not None:
            self.gathered.note_traced()
        return super().__tensor_flatten__()

    def like(self, other: Self) -> Self:
        """See ``InterceptingTensor.like``."""
        self.gathered = other.gathered
        return super().like(other)

    def alias_of(self, other: Self) -> Self:
        """See ``WrapperTensor.alias_of``."""
        self.kept = other.kept
        return self

    def check_shards(self, size: int, dim: int) -> None:
        """Raise where ``fully_shard`` is about to cut this weight into parts that cannot be gathered.

        Args:
            size: Extent of a part.
            dim: Which dimension is cut.

        Raises:
            ValueError: If so; on every rank, because every rank cuts the whole.
        """
        if self.config is not None and self.gathering is not None:
            self.gathering.check_shards(self, size, dim)

    def refresh_(self, values: Tensor) -> None:
        """Quantize new values into every face, by the recipe of the layer whose weight this is.

        All ranks do it together where this is a part of a sharded weight: its scales are those of the whole.
        """
        if self.gathering is None or not self.gathering.refresh([(self, values)]):
            self.config.weight.update_(self, values, context=Context("weight", self.state))
        self.kept.note_quantized(values)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values of the more precise face as a plain tensor, in ``dtype`` (default: the nominal dtype).

        A plain high-precision face is the most precise; then more mantissa, then the rowwise one.
        """
        names = [name for name in self.inner_names if self.gathered is None or self.gathered.is_there(name)]
        faces: list[Face] = [face for face in (getattr(self, name) for name in names) if face is not None]
        return max(faces, key=_precision).dequantize(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        faces = ", ".join(f"{n}={_format_of(getattr(self, n))}" for n in self.inner_names)
        return f"HybridTensor({faces}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _check_same(rowwise: Face, columnwise: Face) -> None:
    for what in ("shape", "dtype", "device"):
        row, column = getattr(rowwise, what), getattr(columnwise, what)
        if row != column:
            raise ValueError(
                f"HybridTensor: faces of one {what} are required, got rowwise {row} and columnwise {column}; "
                "make both from one tensor"
            )


def is_of(face: Face | None, other: Face | None) -> bool:
    """Whether ``face`` gives back what ``other`` holds, quantized, from the same memory."""
    source = face.source if isinstance(face, IdentityTensor) else None
    if not isinstance(source, QuantizedTensor) or not isinstance(other, QuantizedTensor):
        return False
    names, metadata = source.parts()
    return (names, metadata) == other.parts() and all(is_same(getattr(source, n), getattr(other, n)) for n in names)


def _format_of(face: Face | None) -> str:
    if isinstance(face, IdentityTensor) and isinstance(face.source, QuantizedTensor):
        return f"identity of {face.source.format}"
    return "None" if face is None else str(face.format)


def _precision(face: Face) -> tuple[bool, int, bool, bool]:
    """Order faces by precision: plain values, then mantissa bits, then no rotation, then fewer values per scale."""
    leaf = face.source if isinstance(face, IdentityTensor) else face
    if not isinstance(leaf, QuantizedTensor) or leaf.format.element is None:
        return True, 0, True, True
    return False, leaf.format.mantissa_bits, not leaf.format.hadamard, leaf.format.block != (None, None)


def _as_dtype(face: Face | None, dtype: torch.dtype) -> Face | None:
    """Return ``face`` with another nominal dtype; quantized bytes are shared, not copied."""
    if face is None or face.dtype == dtype:
        return face
    if isinstance(face, QuantizedTensor):
        return face.map_inner(lambda t: t, nominal_dtype=dtype)
    source = face.source
    return IdentityTensor(
        source.map_inner(lambda t: t, nominal_dtype=dtype) if isinstance(source, QuantizedTensor) else source.to(dtype)
    )


def row_operand(face: Face | None) -> Operand | None:
    """Return the rowwise face of a matrix as the operators see it."""
    if face is None or isinstance(face, QuantizedTensor):
        return None if face is None else _operand(face, -1)
    return plain_operand(_matrix(face.dequantize()))


def column_operand(face: Face | None) -> Operand | Held | None:
    """Return the columnwise face of a matrix as the operators see it."""
    if face is None or isinstance(face, QuantizedTensor):
        return None if face is None else _operand(face, 0)
    if isinstance(face.source, QuantizedTensor) and face.source.axis == -1:
        return Held(_operand(face.source, -1), face.dtype)
    return plain_operand(_matrix(face.dequantize()).t())


def _operand(face: QuantizedTensor, axis: int) -> Operand:
    if face.axis != axis:
        raise ValueError(f"HybridTensor: a face along axis {axis} is required, got {face!r}; take the other face")
    return Operand(face.qdata, face.scale, face.tensor_scale, face.format)


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(values.shape[:-1].numel(), values.shape[-1])


def as_face(operand: Operand | Held | None, axis: int, x: Tensor, dtype: torch.dtype) -> Face | None:
    """Return what was made of ``x`` as a face: rowwise with axis -1, columnwise with axis 0.

    One in high precision shares the memory of ``x`` where the dtype fits.
    """
    if operand is None:
        return None
    if isinstance(operand, Held):
        return IdentityTensor(_quantized(operand.rowwise, -1, x, operand.dtype))
    if operand.scale is not None:
        return _quantized(operand, axis, x, dtype)
    values = operand.data if axis == -1 else operand.data.t()
    return IdentityTensor(values.view(x.shape))


def _quantized(operand: Operand, axis: int, x: Tensor, dtype: torch.dtype) -> QuantizedTensor:
    if operand.scale is None:
        raise ValueError("HybridTensor: a quantized operand is required, got one in high precision")
    return QuantizedTensor(operand.data, operand.scale, operand.tensor_scale, operand.format, axis, dtype, x.shape)


torch.serialization.add_safe_globals([HybridTensor])

"""What every quantizer is: frozen, compared by value, without state; which faces to make is an argument of the call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.formats import Format, nearest
from hybridtensor.ops import Cast, Casts, Held, Hint, Operand
from hybridtensor.ops.library import require_float
from hybridtensor.ops.references.blocks import amax_by_rows
from hybridtensor.state import Context, DelayedRule
from hybridtensor.subclasses import Face, HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.subclasses.hybrid_tensor import as_face, column_operand, row_operand
from hybridtensor.subclasses.wrapper import WrapperTensor, flatten

Faces = tuple[Face | None, Face | None]
Operands = tuple[Operand | None, Operand | Held | None]
ALONE = Context()


@dataclass(frozen=True)
class Quantizer(ABC):
    """Makes the faces of a tensor. Subclasses say in which format and how."""

    repeatable: ClassVar[bool] = True
    """Whether quantizing one tensor twice gives the same bits whatever happened in between."""

    stochastic: ClassVar[bool] = False
    """Whether elements are rounded at random."""

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

    def faces(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context = ALONE
    ) -> Faces:
        """Return the faces asked for, with nominal ``dtype``. An identity face may alias ``x``."""
        row, column = self.operands(x, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context)
        return as_face(row, -1, x, dtype), as_face(column, 0, x, dtype)

    def operands(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context = ALONE
    ) -> Operands:
        """Return the faces asked for as the operators see them. Subclasses define this or ``faces``."""
        row, column = self.faces(x, rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context)
        return row_operand(row), column_operand(column)

    def casts(self, *, rowwise: bool, columnwise: bool, context: Context = ALONE) -> Casts | None:
        """Return how one operator makes the faces asked for, just as ``operands`` does; None if that is not enough."""
        return None

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        """Return the delayed scales that this quantizer needs for the tensor called ``slot``, by slot."""
        return {}

    def check_matrix(self, rows: int | None, columns: int | None, who: str) -> None:
        """Raise ValueError if a ``[rows, columns]`` matrix cannot be quantized; None is an extent not known yet."""
        for direction, fmt, shape in (
            ("rowwise", self.rowwise_format, (rows, columns)),
            ("columnwise", self.columnwise_format, (columns, rows)),
        ):
            _check_blocks(fmt, shape, who, direction)

    def quantize(
        self,
        x: Tensor,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        dtype: torch.dtype | None = None,
        context: Context = ALONE,
    ) -> HybridTensor:
        """Quantize ``x``.

        Args:
            x: bf16, fp16 or fp32, one to four dimensions, any strides, may be empty. Leading dimensions count as one
                (the tokens): rowwise scale groups run along the last dimension, columnwise ones along the tokens.
            rowwise: Make the rowwise face.
            columnwise: Make the columnwise face. A face's bits never depend on whether the other is made.
            dtype: Nominal dtype of the result; by default that of ``x``.
            context: Which tensor of which layer this is. Delayed scaling needs one, with a state; without one,
                stochastic rounding draws from torch's generator.

        Returns:
            A ``HybridTensor`` without gradient, which shares no memory with ``x``; a face not asked for is None.

        Raises:
            TypeError: If ``x`` is not a tensor of those dtypes.
            ValueError: If ``x`` has no dimension or more than four, cannot be cut into blocks, or no face is asked for.
        """
        who = type(self).__name__
        x = _values(who, x)
        if not 1 <= x.dim() <= 4:
            raise ValueError(f"{who}: one to four dimensions are required, got shape {tuple(x.shape)}; reshape it")
        if not rowwise and not columnwise:
            raise ValueError(f"{who}: at least one face is required, got rowwise=False and columnwise=False")
        with torch.no_grad():
            row, column = self.faces(
                x.detach(), rowwise=rowwise, columnwise=columnwise, dtype=dtype or x.dtype, context=context
            )
            return HybridTensor(_owned(row), _owned(column))

    def update_(self, dst: HybridTensor, x: Tensor, *, context: Context = ALONE) -> HybridTensor:
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
            x, asked = x.detach(), {"rowwise": dst.rowwise is not None, "columnwise": dst.columnwise is not None}
            casts = None if torch.compiler.is_compiling() else self.casts(**asked, context=context)
            write = None if casts is None else writer(_tensors_of(dst, casts), x, casts, dst.dtype, context)
            if write is not None:
                write(tokens(x))
            else:
                overwrite_(who, dst, self.faces(x, **asked, dtype=dst.dtype, context=context))
        return dst


def overwrite_(who: str, dst: HybridTensor, fresh: Faces) -> None:
    """Copy new faces over those of ``dst``, all of them or none.

    Raises:
        ValueError: If a face of ``dst`` is of another kind, or has no successor.
    """
    pairs = [(d, f) for d, f in zip((dst.rowwise, dst.columnwise), fresh, strict=True) if d is not None]
    for old, new in pairs:
        _check_refreshable(who, old, new)
    for old, new in pairs:
        for target, source in zip(flatten(old)[0], flatten(new)[0], strict=True):  # type: ignore[arg-type]
            target.copy_(source)


def writer(
    out: list[Tensor], x: Tensor, casts: Casts, dtype: torch.dtype, context: Context
) -> Callable[[Tensor], None] | None:
    """Return what casts ``x`` into ``out``, or None if that is not as the operator would make it.

    What is returned can be called again and again with the matrix ``x``, or one that lies just as it does, as long as
    all other tensors stay where they are, those of the context too; where a tensor on its own is rounded at random,
    with the same random numbers.
    """
    matrix = tokens(x)
    if not ops.can_hold(out, matrix, casts.row, casts.column):
        return None
    return ops.writer(matrix, out, **_arguments(matrix, casts, dtype, context))


def _tensors_of(dst: HybridTensor, casts: Casts) -> list[Tensor]:
    """Return the tensors of faces that casts can refresh."""
    return [*_tensors(dst.rowwise, casts.row, -1), *_tensors(dst.columnwise, casts.column, 0)]


def _tensors(face: Face | None, cast: Cast | None, axis: int) -> list[Tensor]:
    """Return the tensors of a face that a cast can refresh, or none."""
    if not isinstance(face, QuantizedTensor) or cast is None or face.cuts_group:
        return []
    return flatten(face)[0] if (face.format, face.axis) == (cast.format, axis) else []


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
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class OneFormatQuantizer(Quantizer):
    """A quantizer whose faces have one format; subclasses name it and say how it is made."""

    @property
    @abstractmethod
    def format(self) -> Format:
        """Format of both faces."""

    @property
    def rowwise_format(self) -> Format:
        """The one format."""
        return self.format

    @property
    def columnwise_format(self) -> Format:
        """The one format."""
        return self.format

    @abstractmethod
    def cast(self, context: Context) -> Cast:
        """Say how a face is made."""

    def operands(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context = ALONE
    ) -> Operands:
        """See ``Quantizer.operands``."""
        casts = self.casts(rowwise=rowwise, columnwise=columnwise, context=context)
        return cast_together(x, casts, dtype, context)

    def casts(self, *, rowwise: bool, columnwise: bool, context: Context = ALONE) -> Casts:
        """See ``Quantizer.casts``."""
        cast = self.cast(context)
        return Casts(cast if rowwise else None, cast.for_columnwise() if columnwise else None)


def cast_together(
    x: Tensor, casts: Casts, dtype: torch.dtype, context: Context
) -> tuple[Operand | None, Operand | None]:
    """Return what casts make of ``x``, in one go; see ``ops.quantize``."""
    matrix, (row, column, _) = tokens(x), casts
    if torch.compiler.is_compiling() and context.role != "weight":
        context = _measured_by_the_graph(matrix, casts, context)
    made = ops.quantize(matrix, **_arguments(matrix, casts, dtype, context), hint=_hint(casts, context))
    size = 0 if row is None else 2 + (row.format.tensor_block is not None)
    return _operand(made[:size], row), _operand(made[size:], column)


def _measured_by_the_graph(matrix: Tensor, casts: Casts, context: Context) -> Context:
    """Return the context with the amax of the matrix, if that is all that casts measure, from operations of torch.

    A compiler puts them into what makes the matrix, which saves a pass over it. Weights are not made, but read. Of a
    single row nothing would be stored in between, so that the amax could be of values that were not rounded yet.
    """
    if matrix.shape[0] == 1:
        return context
    of_matrix = (casts.row or casts.source, casts.column if casts.source is None else None)
    measures = [cast is not None and cast.measures is not None for cast in of_matrix]
    if any(cast is not None and (cast.measures or cast.format.hadamard) for cast in of_matrix) or not any(measures):
        return context
    amax = amax_by_rows(matrix)
    row, column = (amax if wanted else None for wanted in measures)
    return context._replace(amaxes=(row, column))


def _arguments(matrix: Tensor, casts: Casts, dtype: torch.dtype, context: Context) -> dict[str, Any]:
    """Return what ``ops.quantize`` needs beside the matrix, or raise if it is not of whole blocks."""
    (rows, columns), (row, column, source) = matrix.shape, casts
    for cast, shape, direction in (
        (row or source, (rows, columns), "rowwise"),
        (column, (columns, rows), "columnwise"),
    ):
        if cast is not None and not cast.format.ragged:
            _check_blocks(cast.format, shape, str(context), direction)
    state, rounding, first_row = context.state, None, 0
    if any(cast is not None and cast.stream >= 0 for cast in (row, column, source)):
        rounding, first_row = context.draws(rows, matrix.device)
    return dict(
        row=row, column=column, source=source, dtype=dtype,
        factors=None if state is None else state.encode_scale,
        amaxes=state.amax if state is not None and context.record else None,
        rounding=rounding, first_row=first_row,
        row_amax=None if row is None and source is None else context.amaxes[0],
        column_amax=None if column is None else context.amaxes[1],
    )  # fmt: skip


def _hint(casts: Casts, context: Context) -> Hint | None:
    """Return what the layer remembers of the last such tensor, where casts can go by it."""
    cast = casts.row or casts.column
    hints = None if context.state is None else context.state.hints
    if cast is None or hints is None or not cast.pow2_scale or cast.measures is not False:
        return None
    return hints.setdefault(context.slot, Hint())


def _operand(tensors: list[Tensor], cast: Cast | None) -> Operand | None:
    if cast is None:
        return None
    return Operand(tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None, cast.format)


def _check_blocks(fmt: Format, shape: tuple[int | None, int | None], who: str, direction: str) -> None:
    """Raise ValueError unless a face ``[other, contraction]`` is whole blocks of ``fmt``; None is not known yet."""
    try:
        fmt.check_shape(*(0 if extent is None else extent for extent in shape))
    except ValueError as error:
        raise ValueError(f"{who}: the {direction} face in {error}") from None


def require_choice(who: str, what: str, word: object, known: tuple[str, ...]) -> None:
    """Raise ValueError unless ``word`` is one of ``known``, with the nearest."""
    if word not in known:
        raise ValueError(f"{who}: unknown {what} {word!r}; {nearest(str(word), known)}")


def require_bool(who: str, **options: object) -> None:
    """Raise TypeError unless every option is a bool."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{who}: {name} must be a bool, got {value!r}")


def require_int(who: str, **options: object) -> None:
    """Raise TypeError unless every option is an integer."""
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{who}: {name} must be an integer, got {value!r}")

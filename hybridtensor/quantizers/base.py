"""What every quantizer is: frozen, compared by value, without state; which faces to make is an
argument of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.formats import Format, work_out
from hybridtensor.ops import NO_INPUTS, Cast, CastInputs, CastRequest, Faces, Hint
from hybridtensor.ops.amaxes import Notes
from hybridtensor.ops.library import is_traced
from hybridtensor.ops.references.blocks import amax_by_rows
from hybridtensor.state import Context, DelayedRule

ALONE = Context()


@dataclass(frozen=True)
class Quantizer(ABC):
    """Makes the faces of a tensor. Subclasses say in which format and how.

    ``quantizer.quantize(x)`` gives a ``HybridTensor`` and ``quantizer.update_(tensor, x)``
    overwrites one: see ``hybridtensor.subclasses.quantizing``, which adds them here, because
    tensors are built on quantizers.
    """

    repeatable: ClassVar[bool] = True
    """Whether quantizing one tensor twice gives the same bits whatever happened in between."""

    stochastic: ClassVar[bool] = False
    """Whether elements are rounded at random."""

    quantize: ClassVar[Callable[..., object]]
    update_: ClassVar[Callable[..., object]]

    def __init_subclass__(cls) -> None:
        torch.serialization.add_safe_globals(
            [cls]
        )  # weights of ours name their quantizers in checkpoints

    def __getstate__(self) -> dict[str, object]:
        """Return the fields only: pickles do not hold what was worked out from them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, fields: dict[str, object]) -> None:
        self.__dict__.update(fields)
        work_out(self)

    @property
    @abstractmethod
    def rowwise_format(self) -> Format:
        """Format of the rowwise face."""

    @property
    @abstractmethod
    def columnwise_format(self) -> Format:
        """Format of the columnwise face."""

    @abstractmethod
    def faces(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context = ALONE,
    ) -> Faces:
        """Return the faces asked for.

        Args:
            x: Plain tensor, bf16, fp16 or fp32, one to four dimensions. Leading dimensions count as
                rows, of which there may be any number but in a weight: see ``ops.quantize``. With
                groups in the context, tokens or a stack of weights: see ``ops.quantize_groups``.
            rowwise: Make the rowwise face.
            columnwise: Make the columnwise face.
            dtype: Dtype of a face in high precision, which may share the memory of ``x``.
            context: Which tensor of which layer this is.

        Raises:
            ValueError: If the features, or the rows of a weight, are not whole blocks.
        """

    def request(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> CastRequest | None:
        """Return the one cast that makes just the faces that ``faces`` makes, or None if one cast
        does not.
        """
        return None

    def delayed_rules(self, slot: str) -> dict[str, DelayedRule]:
        """Return the delayed scales that this quantizer needs for the tensor called ``slot``, by
        slot.
        """
        return {}

    def check_matrix(
        self,
        rows: int | None,
        columns: int | None,
        who: str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        """Raise ValueError if faces of a ``[rows, columns]`` matrix are not of whole blocks.

        Args:
            rows: None is any number.
            columns: None is any number.
            who: Begins the message.
            rowwise: Check the rowwise face.
            columnwise: Check the columnwise face.
        """
        if rowwise:
            check_blocks(self.rowwise_format, (rows, columns), who, "rowwise")
        if columnwise:
            check_blocks(self.columnwise_format, (columns, rows), who, "columnwise")


def tokens(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix ``[tokens, features]``; ``reshape`` could not infer -1 for an empty
    tensor.
    """
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
        """Return how a face is made."""

    def faces(
        self,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        context: Context = ALONE,
    ) -> Faces:
        """See ``Quantizer.faces``."""
        request = self.request(rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context)
        return cast_faces(x, request, context)

    def request(
        self, *, rowwise: bool, columnwise: bool, dtype: torch.dtype, context: Context
    ) -> CastRequest:
        """See ``Quantizer.request``."""
        cast = self.cast(context)
        column = cast if cast.stream < 0 else cast.for_columnwise()
        return CastRequest(cast if rowwise else None, column if columnwise else None)


def cast_faces(x: Tensor, request: CastRequest, context: Context) -> Faces:
    """Return the faces of ``x`` that one cast makes, of each group if it has groups."""
    if context.groups is not None:
        return ops.quantize_groups(x, context.groups, request, cast_inputs(x, request, context))
    matrix = x if x.dim() == 2 else tokens(x)
    if is_traced() and context.role != "weight" and context.amaxes == (None, None):
        context = _measured_by_the_graph(matrix, request, context)
    inputs = cast_inputs(matrix, request, context)
    request = in_values(request, context, x.device)
    return ops.prepare(matrix, request, inputs).run(matrix, inputs)


def in_values(request: CastRequest, context: Context, device: torch.device) -> CastRequest:
    """Return the request for values instead, of those faces that products read at once and whose elements the device
    does not multiply.
    """
    if not any(context.values):
        return request
    as_values = _as_values.__wrapped__ if is_traced() else _as_values  # no caches in traces
    return as_values(request, context.values, device)


@functools.lru_cache(maxsize=1024)
def _as_values(
    request: CastRequest, wanted: tuple[bool, bool], device: torch.device
) -> CastRequest:
    row, column = (
        cast.for_values()
        if value and cast is not None and ops.multiplies_values(cast.format, device)
        else cast
        for cast, value in zip(request[:2], wanted, strict=True)
    )
    return request._replace(row=row, column=column)


def _measured_by_the_graph(matrix: Tensor, request: CastRequest, context: Context) -> Context:
    """Return the context with the amax of the matrix, if that is all that casts measure, from
    operations of torch.

    A compiler puts them into what makes the matrix, which saves a pass over it. Weights are not
    made, but read. Of a single row nothing would be stored in between, so that the amax could be of
    values that were not rounded yet.
    """
    if matrix.shape[0] == 1:
        return context
    of_matrix = (request.row or request.source, request.column if request.source is None else None)
    measures = [cast is not None and cast.measures is not None for cast in of_matrix]
    per_row_or_rotated = any(
        cast is not None and (cast.measures or cast.format.hadamard) for cast in of_matrix
    )
    if per_row_or_rotated or not any(measures):
        return context
    amax = amax_by_rows(matrix)
    row, column = (amax if wanted else None for wanted in measures)
    return context._replace(amaxes=(row, column))


def measured(quantizer: Quantizer, matrix: Tensor, dtype: torch.dtype, context: Context) -> Context:
    """Return the context with the amaxes that both faces of a matrix are scaled by, measured in one
    pass, so that neither of two casts measures again.

    It is the same where none is scaled by an amax that one pass finds, or casts know better: from a
    common scale, or by what the layer remembers.
    """
    requests = (
        quantizer.request(rowwise=True, columnwise=columnwise, dtype=dtype, context=context)
        for columnwise in (True, False)
    )
    request = next((one for one in requests if one is not None), None)
    if request is None or context.groups is not None or not matrix.numel():
        return context
    needs, state = _Needs(request) if is_traced() else _needs(request), context.state
    if (needs.hint and not is_traced()) or (state is not None and state.common_amax is not None):
        return context
    of_matrix = (request.row, request.column if request.source is None else None)
    found = [
        cast is not None and cast.measures is not None and not cast.format.hadamard
        for cast in of_matrix
    ]
    if not any(found):
        return context
    amaxes = ops.prepare(matrix, request, cast_inputs(matrix, request, context)).measure(matrix)
    row, column = (amax if wanted else None for amax, wanted in zip(amaxes, found, strict=True))
    return context._replace(amaxes=(row, column))


def measured_in_backward(context: Context, quantizer: Quantizer) -> Context:
    """Return the context of a cast in forward whose tensor backward casts columnwise: in a graph it records no amax
    if backward measures the same one, as forward would have to save it.
    """
    state = context.state
    if state is None or not isinstance(state.amax, Notes):
        return context
    if quantizer.delayed_rules(context.role).keys() != {context.role}:
        return context
    return context._replace(state=state._replace(amax=None))


def cast_inputs(matrix: Tensor, request: CastRequest, context: Context) -> CastInputs:
    """Return the tensors that a cast needs beside the matrix.

    Raises:
        ValueError: If the features of the matrix, or both axes of a weight, are not of whole
            blocks, or the layer's state has no counter for random rounding, or is on another device.
    """
    needs = _Needs(request) if is_traced() else _needs(request)  # no caches in traces
    if needs.whole_blocks:
        _check_matrix(matrix, request, context)
    state, (row_amax, column_amax) = context.state, _amaxes(needs, context)
    if not needs.state and row_amax is None and column_amax is None and context.after is None:
        return NO_INPUTS
    if state is not None and needs.state:
        state.require_on(matrix.device, context)
    rounding, first_row = None, 0
    if needs.draws:
        rounding, first_row = context.draws(math.prod(matrix.shape[:-1]), matrix.device)
    return CastInputs(
        encode_scale=state.encode_scale if state is not None and needs.delayed else None,
        noted_amax=state.amax if state is not None and needs.delayed and context.record else None,
        rounding=rounding,
        first_row=first_row,
        row_amax=row_amax if needs.row else None,
        column_amax=column_amax if needs.column else None,
        hint=_hint(context) if needs.hint else None,
        after=context.after,
    )


def _amaxes(needs: _Needs, context: Context) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes that faces are scaled by instead of their own: those of the context, but for
    weights with a common scale.
    """
    state, (row_amax, column_amax) = context.state, context.amaxes
    common = None if state is None or context.role != "weight" else state.common_amax
    if common is None:
        return row_amax, column_amax
    return common if needs.row_of_tensor else row_amax, (
        common if needs.column_of_tensor else column_amax
    )


def scales_by_amax(request: CastRequest) -> bool:
    """Return whether the faces of a matrix are all scaled by its amax, which a cast does not know from before."""
    needs = _needs(request)
    wanted = [needs.row == needs.row_of_tensor, needs.column == needs.column_of_tensor]
    return all(wanted) and not needs.hint and not needs.delayed


def gains_by_fusing(request: CastRequest, device: torch.device) -> bool:
    """Return whether a cast takes less time if the matrix is computed or measured on the way: where that saves a pass,
    and nothing makes values of faces again.

    Casts that measure rows read twice, and those of blocks of 128 and of NVFP4 compute most of their time: there values
    that are stored first are as fast, measured on an H200.
    """
    casts = [cast for cast in request[:3] if cast is not None]
    if any(ops.multiplies_values(cast.format, device) for cast in casts):
        return False
    return scales_by_amax(request) or all(map(_reads_once, casts))


def _reads_once(cast: Cast) -> bool:
    """Return whether a cast measures nothing, or only if the last scale does not hold, and computes little."""
    by_last = cast.pow2_scale and cast.measures is False
    return cast.slot >= 0 or by_last or cast.format.scale_dtype == torch.float8_e8m0fnu


class _Needs:
    """What a request needs beside the matrix.

    Attributes:
        whole_blocks: Whether a format has no partial blocks.
        draws: Whether elements are rounded at random.
        delayed: Whether a scale is a delayed one.
        row: Whether there is a rowwise face, or what the columnwise one is made from.
        column: Whether there is a columnwise face.
        row_of_tensor: Whether the rowwise face has a scale from the amax of the tensor.
        column_of_tensor: The same of a columnwise face that is made of the tensor.
        hint: Whether a cast can go by what it was scaled by before.
        state: Whether any of that is in the layer's state.
    """

    def __init__(self, request: CastRequest) -> None:
        casts = [cast for cast in request[:3] if cast is not None]
        self.whole_blocks = any(not cast.format.ragged for cast in casts)
        self.draws = any(cast.stream >= 0 for cast in casts)
        self.delayed = any(cast.slot >= 0 for cast in casts)
        self.row = request.row is not None or request.source is not None
        self.column = request.column is not None
        self.row_of_tensor = _is_of_tensor(request.row or request.source)
        self.column_of_tensor = request.source is None and _is_of_tensor(request.column)
        first = request.row or request.column
        self.hint = first is not None and first.pow2_scale and first.measures is False
        self.state = self.draws or self.delayed or self.hint


_needs = functools.lru_cache(maxsize=1024)(_Needs)


def _is_of_tensor(cast: Cast | None) -> bool:
    """Return whether a cast scales by the amax of the tensor as it is, not after a rotation."""
    return cast is not None and cast.measures is False and not cast.format.hadamard


def _check_matrix(matrix: Tensor, request: CastRequest, context: Context) -> None:
    """Raise ValueError unless the faces of the matrix are whole blocks, but for tokens: there may
    be any number of them.
    """
    columns, who = matrix.shape[-1], str(context)
    rows = matrix.shape[-2] if context.role == "weight" else None
    row, column, source, _ = request
    row = row or source
    if row is not None:
        check_blocks(row.format, (rows, columns), who, "rowwise")
    if column is not None:
        check_blocks(column.format, (columns, rows), who, "columnwise")


def _hint(context: Context) -> Hint | None:
    """Return the layer's hint for tensors of this slot, or None without a layer."""
    hints = None if context.state is None else context.state.hints
    return None if hints is None else hints.setdefault(context.slot, Hint())


def check_blocks(
    fmt: Format, shape: tuple[int | None, int | None], who: str, direction: str
) -> None:
    """Raise ValueError unless a face ``[other, contraction]`` is whole blocks of ``fmt``; None is
    any extent.
    """
    try:
        fmt.check_shape(*(0 if extent is None else extent for extent in shape))
    except ValueError as error:
        raise ValueError(f"{who}: the {direction} face in {error}") from None

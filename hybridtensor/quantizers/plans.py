"""Which cast makes the faces of a tensor of a layer, decided once, and what it needs in each call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridtensor import ops
from hybridtensor.formats import Format
from hybridtensor.ops import NO_INPUTS, Cast, CastInputs, CastRequest, Faces, Hint
from hybridtensor.ops.amaxes import ReturnedAmaxes
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.library import is_traced, runs_directly
from hybridtensor.ops.references.blocks import amaxes_of_rows
from hybridtensor.quantizers.own_faces import require_formats
from hybridtensor.state import Context

if TYPE_CHECKING:
    from hybridtensor.quantizers.base import Quantizer


Amaxes = tuple[Tensor | None, Tensor | None]
"""What the rowwise and the columnwise face are scaled by, where that is known before."""


def tokens(x: Tensor) -> Tensor:
    """Return ``x`` as a matrix ``[tokens, features]``; ``reshape`` could not infer -1 for an empty tensor."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class CastPlan:
    """The one cast that makes some faces of some tensor of a layer, decided once.

    Args:
        request: The faces to make, and their casts.
        context: The layer and role of the tensor.
        device: Where it is.

    Attributes:
        request: The same.
        run_request: The same, as values where products read these at once and the device does not multiply elements.
        needs: Inputs of the cast besides the matrix.
        measured: Whether the rowwise and the columnwise face are scaled by amaxes that one pass over the matrix finds.
    """

    def __init__(self, request: CastRequest, context: Context, device: torch.device) -> None:
        self.request = request
        self.run_request = _as_values(request, context.values, device)
        self.needs = _Needs(request)
        row, column = request.row, request.column if request.source is None else None
        self.measured = _is_measured(row), _is_measured(column)
        self._whole: set[object] = set()  # extents that are whole blocks

    def run(self, x: Tensor, context: Context) -> Faces:
        """Return the faces of ``x``, per group if it has groups."""
        if context.groups is not None:
            inputs = self.inputs(x, context)
            return ops.quantize_groups(x, context.groups, self.request, inputs)
        matrix = x if x.dim() == 2 else tokens(x)
        direct = context.direct or runs_directly(matrix)
        if not direct and is_traced() and context.role != "weight":
            context = _measured_by_the_graph(matrix, self.request, context)
        inputs = self.inputs(matrix, context)
        return ops.prepare(matrix, self.run_request, inputs, direct=direct).run(matrix, inputs)

    def of_measured(self, of_row: Tensor, of_column: Tensor) -> Amaxes:
        """Return those of two measured amaxes that the faces are scaled by."""
        row, column = self.measured
        return of_row if row else None, of_column if column else None

    @property
    def scales_by_amax(self) -> bool:
        """Whether all faces of a matrix are scaled by its amax, which must be measured."""
        needs = self.needs
        wanted = needs.row == needs.row_of_tensor and needs.column == needs.column_of_tensor
        return wanted and not needs.hint and not needs.delayed

    def gains_by_fusing(self, device: torch.device) -> bool:
        """Return whether fusing a computation or measurement into the cast saves a pass (measured on an H200): not
        for rows, 128-blocks, NVFP4."""
        # Casts that measure rows read twice, and casts of 128-blocks and NVFP4 are bound by arithmetic: storing the
        # values first is as fast there (H200).
        casts = [cast for cast in self.request[:3] if cast is not None]
        if not self.request.has_kernels or any(
            ops.multiplies_values(cast.format, device) for cast in casts
        ):
            return False
        return self.scales_by_amax or all(map(_reads_once, casts))

    def inputs(self, matrix: Tensor, context: Context, amaxes: Amaxes | None = None) -> CastInputs:
        """Return the tensors that the cast needs beside the matrix.

        Args:
            matrix: The matrix.
            context: The layer and role of the tensor.
            amaxes: Amaxes that the faces are scaled by, if not ``context.amaxes``.

        Raises:
            ValueError: If the features of the matrix, or both axes of a weight, are not of whole blocks, or the layer's
                state has no counter for random rounding, or is on another device.
        """
        needs, state, after = self.needs, context.state, context.after
        is_known = context.direct and matrix.shape[-1] in self._whole  # as mostly
        if needs.whole_blocks and not is_known:
            self._check_whole_blocks(matrix, context)
        row_amax, column_amax = context.amaxes if amaxes is None else amaxes
        common = None if state is None else state.common_amax
        if not needs.state and row_amax is column_amax is after is common is None:
            return NO_INPUTS
        if common is not None and context.role == "weight":
            row_amax = common if needs.row_of_tensor else row_amax
            column_amax = common if needs.column_of_tensor else column_amax
        if not needs.row:
            row_amax = None
        if not needs.column:
            column_amax = None
        if not needs.state:
            return CastInputs(None, None, None, 0, row_amax, column_amax, None, after)
        if state is not None:
            state.require_on(matrix.device, context)
        rounding, first_row = None, 0
        if needs.draws:
            rounding, first_row = context.draws(math.prod(matrix.shape[:-1]), matrix.device)
        delayed = state is not None and needs.delayed
        return CastInputs(
            encode_scale=state.encode_scale if state is not None and delayed else None,
            amax_record=state.amax if state is not None and delayed and context.record else None,
            rounding=rounding,
            first_row=first_row,
            row_amax=row_amax,
            column_amax=column_amax,
            hint=_hint(context) if needs.hint else None,
            after=after,
        )

    def _check_whole_blocks(self, matrix: Tensor, context: Context) -> None:
        extents = matrix.shape if context.role == "weight" else matrix.shape[-1]
        if not context.direct and is_traced():  # extents may be symbols, which have no hash
            _check_matrix(matrix, self.request, context)
        elif extents not in self._whole:
            _check_matrix(matrix, self.request, context)
            self._whole.add(extents)


Plans = Cache[tuple[object, ...], "CastPlan | None"]
"""The casts of a quantizer, by what they depend on."""
_MOST_ROWS = 4096
"""Whose amaxes a cast reads itself, which saves a launch; each of its programs reads them all."""
_MISSING = CastPlan.__new__(CastPlan)  # stands for a plan that is not there


def cast_plan(
    quantizer: Quantizer,
    rowwise: bool,
    columnwise: bool,
    dtype: torch.dtype,
    context: Context,
    device: torch.device,
) -> CastPlan | None:
    """Return the one cast that makes the requested faces of a tensor, or None if one cast is not enough."""
    state, groups = context.state, context.groups
    # A plan holds no tensor: only Dynamo, which would guard the table, must not see it.
    traced = torch.compiler.is_dynamo_compiling()
    # Everything that ``request`` may depend on. What changes from call to call, tensors and rows,
    # goes to ``CastPlan.inputs``.
    key = (
        rowwise,
        columnwise,
        dtype,
        device,
        context.role,
        context.direction,
        context.values,
        None if state is None else state.slots,
        state is None or state.encode_scale is None,
        None if groups is None else groups.first,
    )
    if not traced and (known := quantizer.plans.get(key, _MISSING)) is not _MISSING:
        return known
    request = quantizer.request(
        rowwise=rowwise, columnwise=columnwise, dtype=dtype, context=context
    )
    if request is not None:
        require_formats(quantizer, request)
    plan = None if request is None else CastPlan(request, context, device)
    if not traced:
        quantizer.plans[key] = plan
    return plan


def _as_values(
    request: CastRequest, wanted: tuple[bool, bool], device: torch.device
) -> CastRequest:
    """Return the request for dequantized ``values`` of faces whose elements the device cannot multiply."""
    if not any(wanted):
        return request
    row, column = (
        cast.for_values()
        if value and cast is not None and ops.multiplies_values(cast.format, device)
        else cast
        for cast, value in zip(request[:2], wanted, strict=True)
    )
    return request._replace(row=row, column=column)


def _measured_by_the_graph(matrix: Tensor, request: CastRequest, context: Context) -> Context:
    """Return the context with the amaxes of the matrix, or of its rows, if that is all that casts measure, from
    operations of torch.

    A compiler puts them into what makes the matrix, which saves a pass over it. Weights are not made, but read. Of a
    single row nothing would be stored in between, so that the amax could be of values that were not rounded yet: those
    of rows stay in their dtype for that.
    """
    rows = matrix.shape[0]
    if rows <= 1 or any(amax is not None for amax in context.amaxes):
        return context
    of_matrix = (request.row or request.source, request.column if request.source is None else None)
    measured = [None if cast is None else cast.amax_per for cast in of_matrix]
    rotated = any(cast is not None and cast.format.hadamard for cast in of_matrix)
    # Amaxes of columns are measured by a kernel, and those of rows with them. With amaxes of rows kernels are of one
    # number of rows.
    by_kernel = measured[1] == "row" or (measured[0] == "row" and not isinstance(rows, int))
    if rotated or by_kernel or measured == [None, None]:
        return context
    amaxes: dict[str | None, Tensor | None] = {None: None}
    amaxes["row"] = amaxes["tensor"] = amax = amaxes_of_rows(matrix)
    if request.source is not None or not (isinstance(rows, int) and rows <= _MOST_ROWS):
        amaxes["tensor"] = amax.amax(dim=0, keepdim=True).float()
    row, column = (amaxes[per] for per in measured)
    return context._replace(amaxes=(row, column))


def measured_amaxes(
    quantizer: Quantizer, matrix: Tensor, dtype: torch.dtype, context: Context
) -> Amaxes:
    """Return the amaxes that both faces are scaled by, measured in one pass; those of the context where no pass is
    needed."""
    groups = context.groups
    if not matrix.numel() or (groups is not None and groups.ends is not None):
        return context.amaxes
    plan = measuring_plan(quantizer, dtype, context, matrix.device)
    if plan is None or (plan.needs.hint and not is_traced()):
        return context.amaxes
    if groups is not None:
        if not all(plan.measured):  # one face alone is measured where it is cast
            return context.amaxes
        return ops.measure_stack(matrix, plan.request)
    direct = runs_directly(matrix)
    cast = ops.prepare(matrix, plan.request, plan.inputs(matrix, context), direct=direct)
    return plan.of_measured(*cast.measure(matrix))


def measuring_plan(
    quantizer: Quantizer, dtype: torch.dtype, context: Context, device: torch.device
) -> CastPlan | None:
    """Return the cast whose one measurement finds both faces' amaxes, or None if none must be measured."""
    if context.state is not None and context.state.common_amax is not None:
        return None
    plan = cast_plan(quantizer, True, True, dtype, context, device)
    if plan is None:  # one face is in high precision
        plan = cast_plan(quantizer, True, False, dtype, context, device)
    return plan if plan is not None and any(plan.measured) else None


def recorded_in_backward(context: Context, quantizer: Quantizer) -> Context:
    """Return the context of a forward cast whose tensor backward casts again: in a graph backward's cast alone records
    the amax, which forward would save."""
    state = context.state
    if state is None or not isinstance(state.amax, ReturnedAmaxes):
        return context
    if quantizer.delayed_rules(context.role).keys() != {context.role}:
        return context
    return context._replace(state=state._replace(amax=None))


def _reads_once(cast: Cast) -> bool:
    """Return whether a cast reads the matrix once: it measures nothing, or relies on the last scale."""
    by_last = cast.pow2_scale and cast.amax_per == "tensor"
    return cast.slot >= 0 or by_last or cast.format.scale_dtype == torch.float8_e8m0fnu


class _Needs:
    """What a request needs besides the matrix.

    Attributes:
        whole_blocks: Whether a face has formats without partial blocks.
        draws: Random numbers.
        delayed: Delayed scales.
        row: An amax of the rowwise face, or of the source, where it is known.
        column: The same of the columnwise face.
        row_of_tensor: Whether that is one amax of the whole tensor, which a common scale may replace.
        column_of_tensor: The same.
        hint: The amax of the last such tensor.
        state: One of those that a layer's state has: ``draws``, ``delayed``, ``hint``.
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
        self.hint = first is not None and first.pow2_scale and first.amax_per == "tensor"
        self.state = self.draws or self.delayed or self.hint


def _is_measured(cast: Cast | None) -> bool:
    """Return whether a cast scales by amaxes of the matrix itself, without rotation."""
    return cast is not None and cast.amax_per is not None and not cast.format.hadamard


def _is_of_tensor(cast: Cast | None) -> bool:
    """Return whether a cast scales by the amax of the tensor itself, without rotation."""
    return cast is not None and cast.amax_per == "tensor" and not cast.format.hadamard


def _check_matrix(matrix: Tensor, request: CastRequest, context: Context) -> None:
    """Raise ValueError unless the faces of the matrix consist of whole blocks; the number of tokens is arbitrary."""
    columns, who = matrix.shape[-1], str(context)
    rows = matrix.shape[-2] if context.role == "weight" else None
    row, column, source, _ = request
    row = row or source
    if row is not None:
        check_blocks(row.format, (rows, columns), who, "rowwise")
    if column is not None:
        check_blocks(column.format, (columns, rows), who, "columnwise")


def _hint(context: Context) -> Hint | None:
    hints = None if context.state is None else context.state.hints
    return None if hints is None else hints.setdefault(context.slot, Hint())


def check_blocks(
    fmt: Format, shape: tuple[int | None, int | None], who: str, direction: str
) -> None:
    """Raise ValueError unless a face ``[other, contraction]`` consists of whole blocks; None is any extent."""
    try:
        fmt.check_shape(*(0 if extent is None else extent for extent in shape))
    except ValueError as error:
        raise ValueError(f"{who}: the {direction} face in {error}") from None

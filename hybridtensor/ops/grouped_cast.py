"""Casting tokens that are sorted by expert, and stacks of experts' weights: each group, each matrix as
if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.ops.amaxes import ReturnedAmaxes
from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.grouped import (
    amax_sizes,
    amaxes_of_faces,
    grouped_cast,
    grouped_measure,
)
from hybridtensor.ops.cast.operator import NUM_INPUTS, taken_inputs
from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest, parse_request
from hybridtensor.ops.face import Face, FaceKind, Groups, TensorLayout, bytewise
from hybridtensor.ops.groups import (
    Group,
    checked,
    each_group,
    layouts_of,
    put_columns,
    put_matrix,
    put_rows,
    rows_of_none,
)
from hybridtensor.ops.library import define, implement, runs_directly


def quantize_groups(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> Faces:
    """Return both faces of tokens ``[T, K]`` with groups, or of a stack ``[E, N, K]``; a delayed scale is the first
    of ``E``.

    Raises:
        ValueError: If amaxes are given that are not those of ``measure_stack``.
    """
    if inputs.row_amax is not None or inputs.column_amax is not None:
        _check_amaxes(x, groups, request, inputs)
    if x.is_cuda and runs_directly(x):
        made = by_kernels(x, groups, request, inputs)
    else:
        returned = inputs.amax_record
        num_amaxes = returned.size if isinstance(returned, ReturnedAmaxes) else 0
        taken = inputs._replace(amax_record=None) if num_amaxes else inputs
        given = x, groups.ends, groups.num_groups, groups.step, str(request)
        made = _OP(*given, *taken[:NUM_INPUTS], after=inputs.after, num_amaxes=num_amaxes)
        if isinstance(returned, ReturnedAmaxes):
            returned.tensors.append(made.pop())
    marks = None if groups.ends is None else groups
    faces: list[Face | None] = []
    for cast in request[:2]:
        size = 0 if cast is None else cast.format.num_tensors
        face = None if cast is None else Face.of(made[:size], FaceKind(cast.format))
        faces.append(None if face is None else face._replace(groups=marks))
        made = made[size:]
    return faces[0], faces[1]


def _check_amaxes(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> None:
    """Raise ValueError unless given amaxes are those of a stack's matrices."""
    row, column, source, _ = request
    given = (row or source, inputs.row_amax, 0), (column, inputs.column_amax, 1)
    for cast, amax, axis in given:
        if amax is None:
            continue
        per = None if cast is None else cast.amax_per
        size = None if groups.ends is not None or per is None else x.shape[0]
        if size is not None and per == "row":
            size *= x.shape[1 + axis]
        if size is None or tuple(amax.shape) != (size,):
            raise ValueError(
                f"quantize_groups: amaxes of shape {None if size is None else (size,)} are required for {cast} of "
                f"{tuple(x.shape)}, got {tuple(amax.shape)}; see ops.measure_stack"
            )


def _layouts(
    x: Tensor, groups: Groups, request: CastRequest
) -> tuple[list[TensorLayout], list[TensorLayout]]:
    row, column = (None if cast is None else cast.format for cast in request[:2])
    return layouts_of(row, column, x.shape, groups)


def reference(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> list[Tensor]:
    """Reference definition of the tensors of both faces."""
    row_layout, column_layout = _layouts(x, groups, request)
    row, column = (
        [_zeros(layout, x.device) for layout in of] for of in (row_layout, column_layout)
    )
    if groups.ends is None:
        for index, matrix in enumerate(x.unbind()):
            asked = _of_group(request, index)
            made = reference_cast(asked).run(matrix, _of_matrix(inputs, index, x.shape))
            for out, face in zip((row, column), made, strict=True):
                if face is not None:
                    put_matrix(out, face, index)
        return [*row, *column]
    found = each_group(groups, x.shape[0])
    for group in found:
        _put_group(x[group.start : group.stop], group, request, inputs, row, column)
    rest = rows_of_none(groups, found, x.shape[0])
    zeros = torch.zeros_like(x[rest.start :])
    _put_group(zeros, rest, request, inputs, row, column, spanning=False)
    return [*row, *column]


def _of_matrix(inputs: CastInputs, index: int, shape: torch.Size) -> CastInputs:
    """Return the inputs of one matrix of a stack ``[E, M, K]``."""
    row, column = (
        None if amax is None else amax.view(shape[0], -1)[index]
        for amax in (inputs.row_amax, inputs.column_amax)
    )
    first = inputs.first_row + index * shape[1]
    return inputs._replace(first_row=first, row_amax=row, column_amax=column)


def _put_group(
    x: Tensor,
    group: Group,
    request: CastRequest,
    inputs: CastInputs,
    row: list[Tensor],
    column: list[Tensor],
    *,
    spanning: bool = True,
) -> None:
    taken = inputs._replace(first_row=inputs.first_row + group.start)
    faces = _of_rows(x, group, _of_group(request, group.number), taken)
    if faces[0] is not None:
        put_rows(row, faces[0], group, spanning=spanning)
    if faces[1] is not None:
        put_columns(column, faces[1], group, spanning=spanning)


def _of_rows(x: Tensor, group: Group, request: CastRequest, inputs: CastInputs) -> Faces:
    """Return a group's faces; the columnwise one has all its padded rows."""
    of_row = reference_cast(CastRequest(request.row)).run(x, inputs)[0]
    if request.column is None:
        return of_row, None
    padded = F.pad(x, (0, 0, 0, group.size - x.shape[0]))
    return of_row, reference_cast(request._replace(row=None)).run(padded, inputs)[1]


def _of_group(request: CastRequest, index: int) -> CastRequest:
    def own(cast: Cast | None) -> Cast | None:
        return cast if cast is None or cast.slot < 0 else cast._replace(slot=cast.slot + index)

    return request._replace(
        row=own(request.row), column=own(request.column), source=own(request.source)
    )


def _zeros(layout: TensorLayout, device: torch.device) -> Tensor:
    made = layout.empty(device)
    bytewise(made).zero_()
    return made


def _operator(
    run: Callable[[Tensor, Groups, CastRequest, CastInputs], list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Return a function with the operator's arguments."""

    def on_arguments(
        x: Tensor, ends: Tensor | None, count: int, step: int, request: str, *inputs: object
    ) -> list[Tensor]:
        taken, returned = taken_inputs(x, *inputs)
        return [*run(x, Groups(count, ends, step), parse_request(request), taken), *returned]

    return on_arguments


def by_kernels(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> list[Tensor]:
    """Run kernels without synchronizing with the device."""
    if groups.ends is not None:
        checked(groups, x.shape[0])
    if not request.has_kernels:
        return reference(x, groups, request, inputs)  # where tokens are groups, after their ends
    if x.numel() == 0:  # without a look at offsets, which are zeros
        if groups.ends is not None:
            groups = groups._replace(ends=torch.zeros(groups.num_groups, dtype=torch.int32))
        return reference(x, groups, request, inputs)
    return grouped_cast(x, groups, request, inputs)


def _fake(
    x: Tensor, ends: Tensor | None, count: int, step: int, request: str, *inputs: object
) -> list[Tensor]:
    row, column = _layouts(x, Groups(count, ends, step), parse_request(request))
    return [*(layout.empty(x.device) for layout in (*row, *column)), *taken_inputs(x, *inputs)[1]]


# As ``quantize``, silent about the write to ``amax_record``.
_OP = define(
    "quantize_groups(Tensor x, Tensor? ends, int count, int step, str request, Tensor? encode_scale, "
    "Tensor? amax_record, Tensor? rounding, SymInt first_row, Tensor? row_amax=None, Tensor? column_amax=None, "
    "Tensor? after=None, int num_amaxes=0) -> Tensor[]",
    reference=_operator(reference),
    fake=_fake,
)
implement("quantize_groups", _operator(by_kernels))


def measure_stack(x: Tensor, request: CastRequest) -> tuple[Tensor | None, Tensor | None]:
    """Return the amaxes that the faces of each matrix of a stack ``[E, M, K]`` are scaled by, measured in one pass:
    fp32 ``[E]``, or ``[E * M]`` and ``[E * K]`` for a scale per row; None of a face that is not asked for.

    Args:
        x: The stack.
        request: The faces, with scales per tensor or row, without rotation.
    """
    direct = x.is_cuda and runs_directly(x)
    found = grouped_measure(x, request) if direct else _MEASURE(x, str(request))
    return amaxes_of_faces(found, x.shape, request)


def _measure_reference(x: Tensor, request: str) -> Tensor:
    parsed = parse_request(request)
    found = [reference_cast(parsed).measure(matrix) for matrix in x.unbind()]
    rows, columns = (torch.cat(amaxes) for amaxes in zip(*found, strict=True))
    of_row, of_column = amax_sizes(x.shape, parsed)
    return torch.cat(([rows] if of_row else []) + ([columns] if of_column else []))


def _measure_by_kernels(x: Tensor, request: str) -> Tensor:
    parsed = parse_request(request)
    if not parsed.has_kernels or x.numel() == 0:
        return _measure_reference(x, request)
    return grouped_measure(x, parsed)


_MEASURE = define(
    "measure_stack(Tensor x, str request) -> Tensor",
    reference=_measure_reference,
    fake=lambda x, request: x.new_empty(
        sum(amax_sizes(x.shape, parse_request(request))), dtype=torch.float32
    ),
)
implement("measure_stack", _measure_by_kernels)

"""Casting tokens that are sorted by expert, and stacks of experts' weights: each group, each matrix as
if it were alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.ops.amaxes import ReturnedAmaxes
from hybridtensor.ops.cast.grouped import grouped_cast
from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest, parse_request
from hybridtensor.ops.face import Face, FaceKind, Groups, TensorLayout
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
from hybridtensor.ops.references.faces import define_faces


def quantize_groups(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> Faces:
    """Return both faces of tokens ``[T, K]`` with groups, or of a stack ``[E, N, K]``; a delayed scale is the first
    of ``E``."""
    if x.is_cuda and runs_directly(x):
        made = by_kernels(x, groups, request, inputs)
    else:
        returned = inputs.amax_record
        num_amaxes = returned.size if isinstance(returned, ReturnedAmaxes) else 0
        taken = inputs._replace(amax_record=None) if num_amaxes else inputs
        given = x, groups.ends, groups.num_groups, groups.step, str(request)
        made = _OP(*given, *taken[:4], after=inputs.after, num_amaxes=num_amaxes)
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
            start = inputs.first_row + index * x.shape[1]
            made = define_faces(matrix, asked, inputs._replace(first_row=start))
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
    row, column, source, dtype = request
    of_row = define_faces(x, CastRequest(row), inputs)[0]
    if column is None:
        return of_row, None
    padded = F.pad(x, (0, 0, 0, group.size - x.shape[0]))
    return of_row, define_faces(padded, CastRequest(None, column, source, dtype), inputs)[1]


def _of_group(request: CastRequest, index: int) -> CastRequest:
    def own(cast: Cast | None) -> Cast | None:
        return cast if cast is None or cast.slot < 0 else cast._replace(slot=cast.slot + index)

    return request._replace(
        row=own(request.row), column=own(request.column), source=own(request.source)
    )


def _zeros(layout: TensorLayout, device: torch.device) -> Tensor:
    made = layout.empty(device)
    (made.view(torch.uint8) if made.itemsize == 1 else made).zero_()
    return made


def _operator(
    run: Callable[[Tensor, Groups, CastRequest, CastInputs], list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Return a function with the operator's arguments."""

    def on_arguments(
        x: Tensor, ends: Tensor | None, count: int, step: int, request: str, *inputs: object
    ) -> list[Tensor]:
        taken, returned = _taken(x, *inputs)
        return [*run(x, Groups(count, ends, step), parse_request(request), taken), *returned]

    return on_arguments


def _taken(x: Tensor, *inputs: Any) -> tuple[CastInputs, list[Tensor]]:
    """Convert the operator's arguments to a cast's inputs, and the amaxes to return, if any."""
    taken, num_amaxes = CastInputs(*inputs[:4]), inputs[5] if len(inputs) > 5 else 0
    returned = [x.new_zeros(num_amaxes, dtype=torch.float32)] if num_amaxes else []
    return taken._replace(amax_record=returned[0]) if returned else taken, returned


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
    return [*(layout.empty(x.device) for layout in (*row, *column)), *_taken(x, *inputs)[1]]


# As ``quantize``, silent about the write to ``amax_record``.
_OP = define(
    "quantize_groups(Tensor x, Tensor? ends, int count, int step, str request, Tensor? encode_scale, "
    "Tensor? amax_record, Tensor? rounding, SymInt first_row, Tensor? after=None, int num_amaxes=0) -> Tensor[]",
    reference=_operator(reference),
    fake=_fake,
)
implement("quantize_groups", _operator(by_kernels))

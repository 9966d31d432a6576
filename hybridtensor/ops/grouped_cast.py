"""Casting tokens that are sorted by expert, and stacks of experts' weights: each group, each matrix as
if it were alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest, parse_request
from hybridtensor.ops.face import Face, FaceKind, Groups, Layout
from hybridtensor.ops.groups import (
    Group,
    column_layouts,
    each_group,
    put_columns,
    put_matrix,
    put_rows,
    row_layouts,
    stack_layouts,
)
from hybridtensor.ops.library import define
from hybridtensor.ops.references.faces import define_faces


def quantize_groups(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> Faces:
    """Return the rowwise and the columnwise face of tokens ``[T, K]``, or of a stack ``[E, N, K]``.

    Args:
        x: As for ``quantize``, whose bits each group and each matrix gets. A delayed scale of the
            request is the first of ``E``.
        groups: Which rows belong together; without ends, ``x`` is a stack.
        request: Which faces, and how.
        inputs: The tensors that the request needs beside ``x``; amaxes are measured.
    """
    made = _OP(x, groups.ends, groups.num_groups, groups.step, str(request), *inputs[:4])
    marks = None if groups.ends is None else groups
    faces: list[Face | None] = []
    for cast in request[:2]:
        size = 0 if cast is None else 2 + (cast.format.tensor_block is not None)
        face = None if cast is None else Face.of(made[:size], FaceKind(cast.format))
        faces.append(None if face is None else face._replace(groups=marks))
        made = made[size:]
    return faces[0], faces[1]


def _layouts(x: Tensor, groups: Groups, request: CastRequest) -> tuple[list[Layout], list[Layout]]:
    """Return how the tensors of both faces lie."""
    row, column = request[:2]
    if groups.ends is None:
        count, rows, columns = x.shape
        return (
            [] if row is None else stack_layouts(row.format, count, rows, columns),
            [] if column is None else stack_layouts(column.format, count, columns, rows),
        )
    rows, columns = x.shape
    return (
        [] if row is None else row_layouts(row.format, groups, rows, columns),
        [] if column is None else column_layouts(column.format, groups, rows, columns),
    )


def _reference(
    x: Tensor,
    ends: Tensor | None,
    count: int,
    step: int,
    request: str,
    encode_scale: Tensor | None,
    noted_amax: Tensor | None,
    rounding: Tensor | None,
    first_row: int,
) -> list[Tensor]:
    groups, parsed = Groups(count, ends, step), parse_request(request)
    inputs = CastInputs(encode_scale, noted_amax, rounding, first_row)
    row_layout, column_layout = _layouts(x, groups, parsed)
    row, column = (
        [_zeros(layout, x.device) for layout in of] for of in (row_layout, column_layout)
    )
    if ends is None:
        for index, matrix in enumerate(x.unbind()):
            asked = _of_group(parsed, index)
            start = first_row + index * x.shape[1]
            made = define_faces(matrix, asked, inputs._replace(first_row=start))
            for out, face in zip((row, column), made, strict=True):
                if face is not None:
                    put_matrix(out, face, index)
        return [*row, *column]
    for group in each_group(groups, x.shape[0]):
        asked, taken = (
            _of_group(parsed, group.number),
            inputs._replace(first_row=first_row + group.start),
        )
        of_row, of_column = _of_rows(x[group.start : group.stop], group, asked, taken)
        if of_row is not None:
            put_rows(row, of_row, group)
        if of_column is not None:
            put_columns(column, of_column, group)
    return [*row, *column]


def _of_rows(x: Tensor, group: Group, request: CastRequest, inputs: CastInputs) -> Faces:
    """Return the faces of a group: the columnwise one has all its padded rows."""
    row, column, source, dtype = request
    of_row = define_faces(x, CastRequest(row), inputs)[0]
    if column is None:
        return of_row, None
    padded = F.pad(x, (0, 0, 0, group.size - x.shape[0]))
    return of_row, define_faces(padded, CastRequest(None, column, source, dtype), inputs)[1]


def _of_group(request: CastRequest, index: int) -> CastRequest:
    """Return the request with the delayed scales of a group."""

    def own(cast: Cast | None) -> Cast | None:
        return cast if cast is None or cast.slot < 0 else cast._replace(slot=cast.slot + index)

    return request._replace(
        row=own(request.row), column=own(request.column), source=own(request.source)
    )


def _zeros(layout: Layout, device: torch.device) -> Tensor:
    made = layout.empty(device)
    (made.view(torch.uint8) if made.itemsize == 1 else made).zero_()
    return made


def _fake(
    x: Tensor, ends: Tensor | None, count: int, step: int, request: str, *_: Any
) -> list[Tensor]:
    row, column = _layouts(x, Groups(count, ends, step), parse_request(request))
    return [layout.empty(x.device) for layout in (*row, *column)]


# As ``quantize``, silent about the write to ``noted_amax``.
_OP = define(
    "quantize_groups(Tensor x, Tensor? ends, int count, int step, str request, Tensor? encode_scale, "
    "Tensor? noted_amax, Tensor? rounding, SymInt first_row) -> Tensor[]",
    reference=_reference,
    fake=_fake,
)

"""Casts that others make: each face in a launch of its own, and matrices stored transposed, as GPT-2's weights are."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import NO_INPUTS, CastInputs, CastRequest


class FaceByFace(PreparedCast):
    """Casts each face in a launch of its own: under drawn signs one for both takes four times as long (H100).

    Args:
        request: What is made, both faces from the matrix.
        row: The cast of the rowwise face alone.
        column: The cast of the columnwise face alone.
    """

    def __init__(self, request: CastRequest, row: PreparedCast, column: PreparedCast) -> None:
        self.request, self._row, self._column = request, row, column
        # Of a face whose signs each cast draws there is no amax before
        self._measures = column if row.request.draws_signs else row

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        row, column = inputs_of_row(inputs), inputs_of_column(inputs)
        return self._row.run(x, row)[0], self._column.run(x, column)[1]

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        of_row = self.request.num_row_tensors
        self._row.run_into(x, out[:of_row], inputs_of_row(inputs))
        self._column.run_into(x, out[of_row:], inputs_of_column(inputs))

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._measures.measure(x)

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        self._measures.measure_into(x, out)


def inputs_of_row(inputs: CastInputs) -> CastInputs:
    """Return the inputs of a cast of the rowwise face alone."""
    return inputs._replace(column_amax=None)


def inputs_of_column(inputs: CastInputs) -> CastInputs:
    """Return the inputs of a cast of the columnwise face alone."""
    return inputs._replace(row_amax=None)


class CastOfTranspose(PreparedCast):
    """Casts the transpose of a matrix, whose rowwise face is the columnwise one of the matrix: kernels read rows.

    Args:
        request: What is made of the matrix.
        cast: The cast of the transpose, which makes the same with the faces swapped.
    """

    def __init__(self, request: CastRequest, cast: PreparedCast) -> None:
        self.request, self._cast = request, cast

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        column, row = self._cast.run(x.t(), swapped_inputs(inputs))
        return row, column

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        of_row = self.request.num_row_tensors
        self._cast.run_into(x.t(), [*out[of_row:], *out[:of_row]], swapped_inputs(inputs))

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        column, row = self._cast.measure(x.t())
        return row, column

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        self._cast.measure_into(x.t(), out)


def swapped(request: CastRequest) -> CastRequest:
    """Return the request that makes the same faces of the transpose."""
    return CastRequest(request.column, request.row)


def swapped_inputs(inputs: CastInputs) -> CastInputs:
    """Return the inputs of a cast of the transpose."""
    row, column = inputs.row_amax, inputs.column_amax
    return inputs if row is column else inputs._replace(row_amax=column, column_amax=row)


def casts_transpose(x: Tensor, request: CastRequest, inputs: CastInputs = NO_INPUTS) -> bool:
    """Return whether matrices ``[..., M, K]`` are stored transposed and can be cast so, by swapping the faces."""
    if x.stride(-1) == 1 or x.stride(-2) != 1:
        return False
    if request.source is not None or inputs.prologue is not None:
        return False
    for cast in request[:2]:
        # Draws are numbered along rows, in which order the errors of a square block are added up, too.
        if cast is not None and (cast.stream >= 0 or (cast.rule and cast.format.is_square)):
            return False
    # What pads a last block is written by columnwise faces only.
    if request.column is not None and x.shape[-2] % request.column.format.step:
        return False
    # Amaxes of rows, of which the largest is that of the tensor, belong to rows of the matrix.
    given = zip(request[:2], (inputs.row_amax, inputs.column_amax), strict=True)
    return not any(
        cast and cast.amax_per != "row" and amax is not None and amax.numel() > 1
        for cast, amax in given
    )

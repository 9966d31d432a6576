"""Casting with a launch for each face."""

from __future__ import annotations

from torch import Tensor

from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import CastInputs, CastRequest


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
        of_row = 0 if self.request.row is None else self.request.row.format.num_tensors
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

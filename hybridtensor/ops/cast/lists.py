"""The launches that measure and cast a list of matrices, by a table of where each one's tensors are.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.kernels.groups import GIVEN, Address, Matrix, Output, State
from hybridtensor.ops.cast.prepared import Faces
from hybridtensor.ops.cast.request import Cast, CastInputs, CastRequest
from hybridtensor.ops.cast.tiles import MEASURED, KernelFace, Tiling, converts_to_fp8, tile_of
from hybridtensor.ops.face import Face, FaceKind, TensorLayout, numeric_layouts
from hybridtensor.ops.kernel_library import Launch, aligned_fp32, lasting, on_device
from hybridtensor.ops.zeros import zeros

_ALIGNED = 128  # entries, of which the tensors of faces begin at multiples

Amaxes = tuple[Tensor, Tensor]
"""Of the rowwise and of the columnwise face."""
BufferView = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a tensor in a buffer."""


class Distances(NamedTuple):
    """Offsets of each matrix's tensors from those of the first, in entries; None for absent inputs."""

    matrices: tuple[int, ...]
    strides: tuple[int, ...]
    first_rows: tuple[int, ...] | None = None
    scales: tuple[int, ...] | None = None
    records: tuple[int, ...] | None = None
    counters: tuple[int, ...] | None = None
    row_amaxes: tuple[int, ...] | None = None
    column_amaxes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, xs: Sequence[Tensor], inputs: Sequence[CastInputs]) -> Distances:
        """Return the offsets of matrices and their inputs; raise ValueError if only some have an input."""
        begin, size = xs[0].data_ptr(), xs[0].itemsize
        matrices = tuple([(x.data_ptr() - begin) // size for x in xs])
        return cls(matrices, tuple([x.stride(0) for x in xs]), *of_inputs(inputs))


def of_inputs(inputs: Sequence[CastInputs]) -> tuple[tuple[int, ...] | None, ...]:
    """Return the fields of ``Distances`` that describe inputs; see ``Distances.of``."""
    if not inputs:
        return ()
    scales, records, counters, first_rows, row_amaxes, column_amaxes, *_ = zip(*inputs, strict=True)
    apart = [_apart(given) for given in (scales, records, counters, row_amaxes, column_amaxes)]
    return first_rows, *apart


def _apart(tensors: tuple[Tensor | None, ...]) -> tuple[int, ...] | None:
    first = tensors[0]
    if first is None:
        if any([tensor is not None for tensor in tensors]):
            raise ValueError(_NOT_ALIKE)
        return None
    begin, size = first.data_ptr(), first.itemsize
    try:
        return tuple([(tensor.data_ptr() - begin) // size for tensor in tensors])  # type: ignore[union-attr]
    except AttributeError:
        raise ValueError(_NOT_ALIKE) from None


_NOT_ALIKE = (
    "quantize_all: inputs of the same kinds are required for all matrices, got some without"
)


class List:
    """The table and tiles that launches for matrices at these distances share."""

    def __init__(self, xs: Sequence[Tensor], request: CastRequest, distances: Distances) -> None:
        first = xs[0]
        self.faces = row, column = KernelFace.of(request.row), KernelFace.of(request.column)
        self.shapes = [(x.shape[0], x.shape[1]) for x in xs]
        draws = max(row.stream, column.stream) >= 0
        tilings = [
            Tiling.of(
                tile_of(row, column, False),
                Matrix(None, stride, 1, *shape),
                first.dtype,
                draws=draws,
            )
            for stride, shape in zip(distances.strides, self.shapes, strict=True)
        ]
        self.tiles = [tiling.number for tiling in tilings]
        self.options = tilings[0].options
        constants = tilings[0].constants._replace(
            # One kernel for all matrices: it may rely on what holds for every one.
            even=all(tiling.constants.even for tiling in tilings),
            wide=any(tiling.constants.wide for tiling in tilings),
        )
        self.constants = {"TILE": constants, "HW": converts_to_fp8(first.device)}

    def upload(
        self,
        distances: Distances,
        of_row: list[list[int]],
        of_column: list[list[int]],
        device: torch.device,
    ) -> None:
        """Copy the kernels' table, and the matrix of each tile, to the device."""
        count = len(self.shapes)
        given = [(0,) * count if known is None else known for known in distances[2:6]]
        firsts = list(itertools.accumulate(self.tiles, initial=0))[:count]
        lines = zip(
            distances.matrices,
            distances.strides,
            *zip(*self.shapes, strict=True),
            firsts,
            *given,
            strict=True,
        )
        table = [
            [*line, *row, *column]
            for line, row, column in zip(lines, of_row, of_column, strict=True)
        ]
        # Devices are named: a default one may be set, which recording a CUDA graph does
        numbers, tiles = torch.arange(count, dtype=torch.int32, device="cpu"), self.tiles
        owners = numbers.repeat_interleave(torch.tensor(tiles, device="cpu"))
        entries = torch.tensor(table, dtype=torch.int64, device="cpu")
        self.table = lasting(lambda: entries.to(device), device)
        self.owners = lasting(lambda: owners.to(device), device)


class AmaxBuffer:
    """Where the amaxes of matrices ``[M, K]`` of these shapes are in one fp32 buffer.

    Attributes:
        size: Of the buffer, in numbers.
        starts: Of the rowwise and the columnwise face's amaxes of each matrix.
        places: Of the same; one place where both faces are scaled by the amax of the matrix.
        is_shared: Whether they are.
    """

    def __init__(self, request: CastRequest, shapes: Sequence[tuple[int, int]]) -> None:
        faces = KernelFace.of(request.row), KernelFace.of(request.column)
        self.is_shared = all(f.kind in MEASURED and f.takes_amax_of_tensor for f in faces)
        row, column = faces
        sizes = [(m if row.per_row else 1, k if column.per_row else 1) for m, k in shapes]
        rooms = [aligned_fp32(size) for pair in sizes for size in pair]
        ends = list(itertools.accumulate(rooms, initial=0))
        self.starts, self.size = list(zip(ends[:-1:2], ends[1::2], strict=True)), ends[-1]
        self.places: list[tuple[BufferView, BufferView]] = []
        for (of_row, of_column), (rows, columns) in zip(self.starts, sizes, strict=True):
            first = (rows,), (1,), of_row
            second = first if self.is_shared else ((columns,), (1,), of_column)
            self.places.append((first, second))


class ListMeasurement(List):
    """The launch that measures; see ``measure_all``."""

    def __init__(self, xs: Sequence[Tensor], request: CastRequest, distances: Distances) -> None:
        super().__init__(xs, request, distances)
        self._amaxes = amaxes = AmaxBuffer(request, self.shapes)
        # Of a face a measurement only reads the last entry, where its amaxes are.
        of_rows, of_columns = (
            [[0] * 5 + [at] for at in each] for each in zip(*amaxes.starts, strict=True)
        )
        self.upload(distances, of_rows, of_columns, xs[0].device)
        row, column = self.faces
        self._launch = Launch(
            "multi_tensor",
            "multi_tensor_measure_kernel",
            sum(self.tiles),
            options=self.options,
            ROW=row.measurement(row.kind in MEASURED),
            COLUMN=column.measurement(column.kind in MEASURED and not amaxes.is_shared),
            **self.constants,
        )

    def run(self, xs: Sequence[Tensor]) -> list[Amaxes]:
        return self._views(xs, self._amaxes.places)

    def of_first(self, xs: Sequence[Tensor]) -> Amaxes:
        """Measure all matrices, and return the amaxes of the first one, from which those of the others are apart."""
        return self._views(xs, self._amaxes.places[:1])[0]

    def _views(
        self, xs: Sequence[Tensor], places: list[tuple[BufferView, BufferView]]
    ) -> list[Amaxes]:
        amaxes = zeros(self._amaxes.size, xs[0])
        self.run_into(xs, amaxes)
        found: list[Amaxes] = []
        for of_row, of_column in places:
            row = amaxes.as_strided(*of_row)
            found.append((row, row if of_column is of_row else amaxes.as_strided(*of_column)))
        return found

    def run_into(self, xs: Sequence[Tensor], amaxes: Tensor) -> None:
        """Measure into an ``AmaxBuffer`` of zeros."""
        with on_device(xs[0].device):
            self._launch(xs[0], amaxes, amaxes, self.table, self.owners)


class ListCast(List):
    """The launch that casts; see ``quantize_all``. ``outs`` None allocates."""

    def __init__(
        self,
        xs: Sequence[Tensor],
        request: CastRequest,
        distances: Distances,
        outs: Sequence[list[Tensor]] | None = None,
    ) -> None:
        super().__init__(xs, request, distances)
        first, (row, column) = xs[0], self.faces
        self._row = FaceBuffers(request.row, self.shapes, outs)
        turned, of_row = [(k, m) for m, k in self.shapes], self._row.count
        others = None if outs is None else [out[of_row:] for out in outs]
        self._column = FaceBuffers(request.column, turned, others)
        self.upload(
            distances,
            self._row.entries(distances.row_amaxes),
            self._column.entries(distances.column_amaxes),
            first.device,
        )
        recorded = distances.records is not None
        records = (
            recorded and row.kind == GIVEN,
            recorded and column.kind == GIVEN and row.kind != GIVEN,
        )
        self._numbers = row.slot, row.stream, column.slot, column.stream
        self._launch = Launch(
            "multi_tensor",
            "multi_tensor_cast_kernel",
            sum(self.tiles),
            options=self.options,
            ROW_FACE=row.constants(
                first.dtype,
                _partial([k for _, k in self.shapes], row.step),
                record=records[0],
                store=True,
            ),
            COLUMN_FACE=column.constants(
                first.dtype,
                _partial([m for m, _ in self.shapes], column.step),
                record=records[1],
                store=True,
            ),
            **self.constants,
        )

    def run(self, xs: Sequence[Tensor], inputs: Sequence[CastInputs]) -> list[Faces]:
        """Return the faces of each matrix, newly allocated."""
        row, column = (buffers.empty(xs[0].device) for buffers in (self._row, self._column))
        self.start(xs[0], inputs[0], row, column)
        return list(zip(self._row.faces(row), self._column.faces(column), strict=True))

    def run_into_buffers(self, first: Tensor, given: CastInputs, buffers: list[Tensor]) -> None:
        """Write the faces into buffers as ``FaceBuffers`` says; the matrix and its inputs are the first ones."""
        of_row = self._row.count
        self.start(first, given, buffers[:of_row], buffers[of_row:])

    def run_into(
        self, xs: Sequence[Tensor], inputs: Sequence[CastInputs], outs: Sequence[list[Tensor]]
    ) -> None:
        """Write the faces into tensors at the addresses that this was prepared for."""
        of_row = self._row.count
        self.start(xs[0], inputs[0], outs[0][:of_row], outs[0][of_row:])
        # Kernels write where autograd does not look.
        increment_version([tensor for out in outs for tensor in out])

    def start(
        self, first: Tensor, given: CastInputs, row: list[Tensor], column: list[Tensor]
    ) -> None:
        launch = self._launch
        take, device = launch.take, first.device
        taken = take(first)
        of_row = _arguments(row, given.row_amax, taken, launch)
        of_column = _arguments(column, given.column_amax, taken, launch)
        needed = given.encode_scale, given.record, given.rounding
        state: tuple[Address, ...] = tuple(
            [taken if tensor is None else take(tensor) for tensor in needed]
        )
        if not launch.is_compiled:
            of_row, of_column, state = Output(*of_row), Output(*of_column), State(*state)
        with on_device(device):
            launch.start(
                taken, of_row, of_column, state, take(self.table), take(self.owners), *self._numbers
            )


def _arguments(
    buffers: list[Tensor], amax: Tensor | None, nothing: Address, launch: Launch
) -> tuple[Address, Address, int, int, Address, Address]:
    """Return the fields of ``Output``: the buffers of all matrices, and the first one's amaxes."""
    parts = [launch.take(buffer) for buffer in buffers]
    qdata, scales, tensor_scales = (*parts, nothing, nothing, nothing)[:3]
    return qdata, scales, 0, 0, tensor_scales, nothing if amax is None else launch.take(amax)


def _partial(contractions: list[int], step: int) -> int:
    """Return a contraction that is not a whole number of steps, if any: compile-time constants are shared."""
    return next((size for size in contractions if size % step), contractions[0])


class FaceBuffers:
    """The memory of one face of all matrices: buffers of elements, scales and tensor scales.

    Attributes:
        sizes: Entries and dtype of each buffer.
        places: Of the face's tensors in the buffers, for each matrix.
    """

    def __init__(
        self,
        cast: Cast | None,
        shapes: Sequence[tuple[int, int]],
        outs: Sequence[list[Tensor]] | None = None,
    ) -> None:
        self._kind = None if cast is None else FaceKind(cast.format)
        layouts = [() if cast is None else numeric_layouts(cast.format, *shape) for shape in shapes]
        by_buffer = list(zip(*layouts, strict=True))
        self.count = len(by_buffer)
        ends = [list(itertools.accumulate(map(_room, each), initial=0)) for each in by_buffer]
        self.sizes = [
            (of_buffer[-1], each[0].dtype) for of_buffer, each in zip(ends, by_buffer, strict=True)
        ]
        starts: list[Any] = list(ends)
        if outs is not None:
            starts = [_apart(tuple(out[number] for out in outs)) for number in range(self.count)]
        self.places: list[list[BufferView]] = [
            [
                (layout.shape, layout.strides, of_buffer[i])
                for layout, of_buffer in zip(of_matrix, starts, strict=True)
            ]
            for i, of_matrix in enumerate(layouts)
        ]

    def entries(self, amaxes: tuple[int, ...] | None) -> list[list[int]]:
        """Return the table entries of each matrix's face; ``amaxes`` are offsets of its amaxes."""
        measured = (0,) * len(self.places) if amaxes is None else amaxes
        lines = []
        for places, amax in zip(self.places, measured, strict=True):
            starts = (*(start for _, _, start in places), 0, 0, 0)[:3]
            strides = places[1][1] if len(places) > 1 else (0, 0)
            lines.append([*starts, *strides, amax])
        return lines

    def empty(self, device: torch.device) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=device) for size, dtype in self.sizes]

    def faces(self, buffers: list[Tensor]) -> list[Face | None]:
        kind = self._kind
        if kind is None:
            return [None] * len(self.places)
        return [
            Face.of([b.as_strided(*place) for b, place in zip(buffers, places, strict=True)], kind)
            for places in self.places
        ]


def _room(layout: TensorLayout) -> int:
    """Return the entries of a buffer that a tensor occupies."""
    return -(-layout.shape[0] * layout.shape[1] // _ALIGNED) * _ALIGNED

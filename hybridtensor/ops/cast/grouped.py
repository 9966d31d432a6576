"""Casting several matrices with kernels, in one launch for all and both faces: groups of rows, or a stack.

Shape letters: ``E`` matrices, ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.kernels.groups import AMAX, AMAX_ROW, GIVEN, Matrix
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.cast.composed import (
    casts_transpose,
    inputs_of_column,
    inputs_of_row,
    swapped,
    swapped_inputs,
)
from hybridtensor.ops.cast.launches import CastLaunch, FaceOutput, KernelTask, Several
from hybridtensor.ops.cast.planning import Planning
from hybridtensor.ops.cast.request import NO_INPUTS, CastInputs, CastRequest, check_draws
from hybridtensor.ops.cast.tiles import (
    MEASURED,
    KernelFace,
    Tiling,
    converts_to_fp8,
    overlaps_kernels,
    tile_of,
)
from hybridtensor.ops.face import FaceKind, Groups
from hybridtensor.ops.groups import layouts_of, padded_rows
from hybridtensor.ops.kernel_library import ALIGNMENT, Launch, on_device

_ALIGNMENT = 16  # elements from row to row: kernels rely on it


class _Key(NamedTuple):
    """Cache key of a grouped cast: everything but addresses."""

    request: CastRequest
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # whether the first matrix begins at a multiple of 16 bytes
    groups: Groups  # without where they end
    tokens: bool
    scaled: bool  # whether delayed scales are given
    record_dtype: torch.dtype | None  # of where amaxes are recorded
    row_amax: bool | None  # of given amaxes whether their address is a multiple of ``ALIGNMENT``
    column_amax: bool | None


_CASTS: Cache[_Key, GroupedCast] = Cache()


def grouped_cast(
    x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs
) -> list[Tensor]:
    """Return the tensors of both faces of a non-empty ``x``; see ``ops.quantize_groups``."""
    if request.is_face_by_face:
        alone = request._replace(column=None), request._replace(row=None)
        return [
            *grouped_cast(x, groups, alone[0], inputs_of_row(inputs)),
            *grouped_cast(x, groups, alone[1], inputs_of_column(inputs)),
        ]
    of_transpose = groups.ends is None and casts_transpose(x, request)
    if of_transpose:
        x, request, inputs = x.transpose(-2, -1), swapped(request), swapped_inputs(inputs)
    row, column = _cached(x, groups, request, inputs).run(x, groups.ends, inputs)
    return [*column, *row] if of_transpose else [*row, *column]


def grouped_measure(x: Tensor, request: CastRequest) -> Tensor:
    """Return the amaxes of a non-empty stack that ``amaxes_of_faces`` splits; see ``ops.measure_stack``."""
    turned = casts_transpose(x, request)
    if turned:
        x, request = x.transpose(-2, -1), swapped(request)
    found = _cached(x, Groups(x.shape[0]), request, NO_INPUTS).measure(x)
    if not turned:
        return found
    of_row, of_column = amaxes_of_faces(found, x.shape, request)
    if of_row is None or of_column is None or of_row is of_column:
        return found
    return torch.cat([of_column, of_row])


def amax_sizes(shape: torch.Size, request: CastRequest) -> tuple[int, int]:
    """Return the numbers of amaxes of both faces of a stack ``[E, M, K]``; none of the columnwise face where it has the
    rowwise one's."""
    count, *extents = shape
    row, column = (
        0 if cast is None else count * (extent if cast.amax_per == "row" else 1)
        for cast, extent in zip(request[:2], extents, strict=True)
    )
    return row, 0 if _shares(request) else column


def amaxes_of_faces(
    found: Tensor, shape: torch.Size, request: CastRequest
) -> tuple[Tensor | None, Tensor | None]:
    """Split what was measured of a stack into the amaxes of its faces."""
    row, column = amax_sizes(shape, request)
    if _shares(request):
        return found, found
    return found[:row] if row else None, found[row:] if column else None


def _shares(request: CastRequest) -> bool:
    """Return whether both faces have one amax per matrix."""
    return all(cast is not None and cast.amax_per == "tensor" for cast in request[:2])


def _cached(x: Tensor, groups: Groups, request: CastRequest, inputs: CastInputs) -> GroupedCast:
    """Return the cached cast of matrices like ``x``."""
    given = (inputs.row_amax, inputs.column_amax)
    key = _Key(
        request,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() % ALIGNMENT == 0,
        Groups(groups.num_groups, None, groups.step),
        groups.ends is not None,
        inputs.encode_scale is not None,
        None if (record := inputs.record) is None else record.dtype,
        *(None if amax is None else amax.data_ptr() % ALIGNMENT == 0 for amax in given),
    )
    cast = _CASTS.get(key)
    if cast is None:
        cast = _CASTS[key] = GroupedCast(key)
    return cast


class GroupedCast:
    """The kernels and arguments of one kind of grouped matrix."""

    def __init__(self, key: _Key) -> None:
        self._copies = not _is_readable(key)
        if self._copies:
            key = key._replace(strides=_readable_strides(key.shape))
        self._strides, self._request = key.strides, key.request
        self._draws_signs = key.request.draws_signs
        request, count = key.request, key.groups.num_groups
        source = None if request.column is None else request.source
        faces = KernelFace.of(source or request.row), KernelFace.of(request.column)
        row, column = faces
        m, k = key.shape[-2:]
        rows = m if key.tokens else count * m
        self._amaxes = rows if row.per_row else count, count * k if column.per_row else count
        self._task = task = _task(key, faces, requantizes=source is not None)
        # Blocks of rows that only pad are not written
        self._clears = key.tokens and request.row is not None and row.side > 1
        given = key.row_amax, key.column_amax
        measured = [
            face.kind in MEASURED and known is None
            for face, known in zip(faces, given, strict=True)
        ]
        wanted = measured[0], measured[1] and source is None
        recorded = [key.record_dtype is not None and face.kind == GIVEN for face in faces]
        once = source is not None or not recorded[0]  # both faces of a matrix have its amax
        record = recorded[0], recorded[1] and once
        self._plan = None
        if key.tokens:
            self._plan = Planning(key.groups, m, task.tiling.constants.BM)
        self._measurement = _Measurement(task, wanted, self._amaxes) if any(wanted) else None
        passes = int(self._measurement is not None)
        self._measure_source = None
        if source is not None and measured[1]:
            self._measure_source = CastLaunch(
                task,
                column=column.as_amax(AMAX_ROW if column.per_row else AMAX),
                store=False,
                reverse=passes == 1,
            )
            passes += 1
        self._cast = CastLaunch(
            task,
            record=record,
            store=request.row is not None,
            reverse=passes == 1,
        )

    def run(
        self, x: Tensor, ends: Tensor | None, inputs: CastInputs
    ) -> tuple[list[Tensor], list[Tensor]]:
        if self._draws_signs:
            check_draws(self._request, inputs)
        row, column = (output.empty() for output in self._task.outputs)
        x = self._readable(x)
        with on_device(x.device):
            if self._clears:
                row[1].view(torch.uint8).zero_()
            # Two launches over all groups. One that measures a group and casts it while the L2 holds it was slower:
            # weights 0.26 ms instead of 0.22, tokens 0.14 instead of 0.13. A program then waits for its plan, its
            # group, its amaxes and its tile in turn.
            plan = None if self._plan is None or ends is None else self._plan(ends)
            row_amax = column_amax = x  # stands for nothing
            if self._measurement is not None:
                amaxes = self._measurement(x, plan, inputs.rounding)
                row_amax, column_amax = self._measurement.of_faces(amaxes)
            if inputs.row_amax is not None:
                row_amax = inputs.row_amax
            if inputs.column_amax is not None:
                column_amax = inputs.column_amax
            if self._measure_source is not None:
                column_amax = torch.zeros(self._amaxes[1], dtype=torch.float32, device=x.device)
                self._measure_source(x, ([], []), (row_amax, column_amax), inputs, plan)
            if inputs[0] is inputs[1] is inputs[2] is None and not inputs[3]:
                inputs = NO_INPUTS  # most casts need nothing but amaxes
            self._cast(x, (row, column), (row_amax, column_amax), inputs, plan)
        return row, column

    def measure(self, x: Tensor) -> Tensor:
        """Return the amaxes of both faces of a stack, of the rowwise one first."""
        if self._measurement is None:
            raise ValueError(
                f"measure_stack: scales per tensor or row are required, got {self._request}"
            )
        x = self._readable(x)
        with on_device(x.device):
            return self._measurement(x, None, None)

    def _readable(self, x: Tensor) -> Tensor:
        """Return the matrices, or a copy that kernels can read."""
        if not self._copies:
            return x
        return x.new_empty(*x.shape[:-1], self._strides[-2])[..., : x.shape[-1]].copy_(x)


def _is_readable(key: _Key) -> bool:
    """Return whether rows begin at multiples of 16 elements and bytes; see ``KernelCast``."""
    apart = all(stride % _ALIGNMENT == 0 for stride in key.strides[:-1])
    return key.strides[-1] == 1 and apart and key.aligned


def _readable_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a copy whose rows begin at multiples of 16 elements."""
    width = -(-shape[-1] // _ALIGNMENT) * _ALIGNMENT
    return (width, 1) if len(shape) == 2 else (shape[1] * width, width, 1)


def _task(key: _Key, faces: tuple[KernelFace, KernelFace], *, requantizes: bool) -> KernelTask:
    *_, dtype = key.request
    m, k = key.shape[-2:]
    matrix = Matrix(None, key.strides[-2], key.strides[-1], m, k)
    pitch = padded_rows(m, key.groups) if key.tokens else 0
    tile = tile_of(*faces, requantizes)
    tiling = Tiling.of(
        tile,
        matrix._replace(M=max(pitch, m)),
        key.dtype,
        draws=max(face.stream for face in faces) >= 0,
    )
    count = key.groups.num_groups
    if key.tokens:
        tiling = tiling._replace(
            # Groups end anywhere. Each may have a partial row of tiles, and so may the rows of no group.
            constants=tiling.constants._replace(even=False),
            number=(pitch // tile.rows + count + 1) * -(-k // tile.columns),
        )
    else:
        tiling = tiling._replace(number=tiling.number * count)
    outputs = _outputs(key)
    apart = [
        1 if not faces[0].per_row else 0 if key.tokens else m,
        1 if not faces[1].per_row else k,
    ]
    sizes = [output.sizes(each) for output, each in zip(outputs, apart, strict=True)]
    return KernelTask(
        matrix=matrix,
        dtype=key.dtype,
        device=key.device,
        tiling=tiling,
        faces=faces,
        outputs=outputs,
        source_dtype=(dtype or key.dtype) if requantizes else None,
        several=Several(key.tokens, 0 if key.tokens else key.strides[0], pitch, sizes[0], sizes[1]),
    )


def _outputs(key: _Key) -> tuple[FaceOutput, FaceOutput]:
    row, column, *_ = key.request
    formats = [None if cast is None else cast.format for cast in (row, column)]
    of_row, of_column = layouts_of(formats[0], formats[1], key.shape, key.groups)
    return (
        FaceOutput(None if row is None else FaceKind(row.format), tuple(of_row), key.device),
        FaceOutput(
            None if column is None else FaceKind(column.format), tuple(of_column), key.device
        ),
    )


class _Measurement:
    """The kernel that measures the amaxes of several matrices."""

    def __init__(
        self, task: KernelTask, wanted: tuple[bool, bool], amaxes: tuple[int, int]
    ) -> None:
        row, column = task.faces
        shared = all(wanted) and row.takes_amax_of_tensor and column.takes_amax_of_tensor
        # Whose amaxes nobody reads has none.
        self._sizes = [size if asked else 0 for size, asked in zip(amaxes, wanted, strict=True)]
        self._one = shared or not all(wanted)
        self._size = amaxes[0] if shared else sum(self._sizes)
        several = task.several
        if several is None:
            raise ValueError("quantize_groups: several matrices are required, got one")
        self._matrix, self._several = task.matrix, several
        self._streams = row.stream, column.stream
        self._launch = Launch(
            "grouped_quantize",
            "grouped_measure_kernel",
            task.tiling.number,
            options=task.tiling.options,
            ROW=row.measurement(wanted[0]),
            COLUMN=column.measurement(wanted[1] and not shared),
            TILE=task.tiling.constants,
            HW=converts_to_fp8(task.device),
            FOLLOWED=overlaps_kernels(task.device),
            TOKENS=several.tokens,
        )

    def __call__(self, x: Tensor, plan: Tensor | None, rounding: Tensor | None) -> Tensor:
        """Return the fp32 amaxes of both faces, of the rowwise one first, which ``of_faces`` splits; ``rounding``, key
        and step, is needed where signs are drawn."""
        new = x.new_zeros(self._size, dtype=torch.float32)
        of_row, of_column = self.of_faces(new)
        launch, several = self._launch, self._several
        take = launch.take
        taken = take(x)
        launch.start(
            Matrix(taken, *self._matrix[1:]),
            take(of_row),
            take(of_column),
            several.parts(taken if plan is None else take(plan)),
            several.row_sizes.measured,
            several.column_sizes.measured,
            taken if rounding is None else take(rounding),
            *self._streams,
        )
        return new

    def of_faces(self, amaxes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the amaxes of each face; the same tensor twice if they are equal, or one face has none."""
        if self._one:
            return amaxes, amaxes
        of_row, of_column = amaxes.split(self._sizes)
        return of_row, of_column

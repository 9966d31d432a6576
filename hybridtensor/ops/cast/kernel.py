"""Casting with kernels: which kernels cast one kind of matrix, with which arguments, cached.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.kernels.groups import AMAX, AMAX_ROW, GIVEN, NONE, NVFP4, TENSOR, Matrix
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.cast.composed import (
    CastOfTranspose,
    FaceByFace,
    casts_transpose,
    inputs_of_column,
    inputs_of_row,
    swapped,
    swapped_inputs,
)
from hybridtensor.ops.cast.definition import reference_cast
from hybridtensor.ops.cast.launches import CastLaunch, FaceOutput, KernelTask, Outs, RecastLaunch
from hybridtensor.ops.cast.lengths import lengths_to_compile
from hybridtensor.ops.cast.measurement import Measurement
from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import (
    NO_INPUTS,
    CastInputs,
    CastRequest,
    Hint,
    check_draws,
    check_inputs,
    check_rules,
)
from hybridtensor.ops.cast.tiles import MEASURED, KernelFace, Tiling, computed, tile_of
from hybridtensor.ops.face import Face
from hybridtensor.ops.kernel_library import ALIGNMENT, is_current, on_device
from hybridtensor.ops.library import is_captured
from hybridtensor.ops.prologue import NONE as NO_PROLOGUE
from hybridtensor.ops.prologue import Prologue, like_rows

_logger = logging.getLogger("hybridtensor")


_Amax: TypeAlias = tuple[torch.Size, torch.dtype, bool] | None
"""Of a given amax: its shape and dtype, and whether its address is a multiple of ``ALIGNMENT``."""


def _size(amax: _Amax) -> int:
    return 0 if amax is None else amax[0].numel()


class _Key(NamedTuple):
    """Cache key of a cast: everything but addresses."""

    request: CastRequest
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # whether the matrix begins at a multiple of 16 bytes
    scaled: bool  # whether delayed scales are given
    record_dtype: torch.dtype | None  # of where amaxes are recorded
    row_amax: _Amax
    column_amax: _Amax
    prologue: tuple[int, ...] | None  # its key, and whether kernels can read it


_CASTS: Cache[tuple[object, ...], PreparedCast] = Cache()


def cast_on_gpu(x: Tensor, request: CastRequest, inputs: CastInputs) -> PreparedCast:
    """Return the cached cast of a non-empty ``x``: by kernels, or by the definition for formats without kernels."""
    matrix = request, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0
    key = matrix if inputs is NO_INPUTS else (*matrix, *_kinds(inputs))
    cast = _CASTS.get(key)
    if cast is None:
        check_rules(request)
        check_inputs(x, request, inputs)
        if request.has_kernels and request.is_face_by_face:
            row, column = request._replace(column=None), request._replace(row=None)
            of_row = cast_on_gpu(x, row, inputs_of_row(inputs))
            cast = FaceByFace(request, of_row, cast_on_gpu(x, column, inputs_of_column(inputs)))
        elif request.has_kernels and casts_transpose(x, request, inputs):
            of_transpose = cast_on_gpu(x.t(), swapped(request), swapped_inputs(inputs))
            cast = CastOfTranspose(request, of_transpose)
        elif request.has_kernels:
            kind = _Key(*matrix, *_kinds(inputs))
            _compile_for_other_lengths(x, kind, inputs)
            cast = KernelCast(kind)
        else:
            cast = reference_cast(request)
            _say_without_kernels(request)
        _CASTS[key] = cast
    return cast


def _compile_for_other_lengths(x: Tensor, key: _Key, inputs: CastInputs) -> None:
    """Compile kernels for matrices with other numbers of rows, once these vary: later steps wait for no compiler."""
    rows, columns = x.shape
    if not x.is_cuda or x.stride(1) != 1 or x.stride(0) < columns or is_captured():
        return
    if inputs.hint is not None:
        # Of its own: the caller's hint is of an amax that was measured.
        inputs = inputs._replace(hint=Hint())
    # Amaxes of rows have the length in their shape: such kinds have one length each
    for other in lengths_to_compile(key._replace(shape=key.shape[1:]), rows):
        cast = KernelCast(key._replace(shape=torch.Size((other, columns))))
        zeros, prologue = like_rows(x, other), inputs.prologue
        if prologue is not None:
            inputs = inputs._replace(prologue=prologue.with_rows(other))
        # With a hint, the second cast runs other kernels
        for _ in range(1 if inputs.hint is None else 2):
            cast.run(zeros, inputs)  # recorded amaxes stay what they are


@functools.cache
def _say_without_kernels(request: CastRequest) -> None:
    """Log once per request that its formats, or else it itself, have no kernels."""
    formats = {cast.format for cast in request[:3] if cast is not None}
    without = sorted(f"format {fmt.name}" for fmt in formats if not fmt.has_kernels)
    for what in without or [f"cast {request}"]:
        _logger.warning(
            "%s has no kernels: its definition casts it, with the same bits, in more time", what
        )


def _kinds(
    inputs: CastInputs,
) -> tuple[bool, torch.dtype | None, _Amax, _Amax, tuple[int, ...] | None]:
    """Return the fields of ``_Key`` that depend on a cast's inputs."""
    row_amax, column_amax, prologue = inputs.row_amax, inputs.column_amax, inputs.prologue
    return (
        inputs.encode_scale is not None,
        None if (record := inputs.record) is None else record.dtype,
        _amax(row_amax),
        _amax(column_amax),
        None if prologue is None else (*prologue.key(), prologue.is_readable()),
    )


def _amax(given: Tensor | None) -> _Amax:
    return None if given is None else (given.shape, given.dtype, given.data_ptr() % ALIGNMENT == 0)


def _is_readable(key: _Key) -> bool:
    """Return whether rows begin at multiples of 16 elements and bytes, so that threads read whole vectors."""
    # Kernels rely on it: for narrower reads Triton 3.6 lays tiles out in a way that it then reduces wrongly.
    if key.prologue is not None and not key.prologue[-1]:
        return False
    return key.strides[1] == 1 and key.strides[0] % 16 == 0 and key.aligned


def _readable_copy(x: Tensor) -> Tensor:
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // 16) * 16)[:, :columns].copy_(x)


class KernelCast(PreparedCast):
    """The kernels and arguments of one kind of matrix.

    Attributes:
        key: What kind.
        copies: Whether kernels cannot read such a matrix, and read a copy.
    """

    def __init__(self, key: _Key) -> None:
        self.request = request = key.request
        self.copies = not _is_readable(key)
        if self.copies:
            key = key._replace(strides=(-(-key.shape[1] // 16) * 16, 1))
        self.key = key
        source = None if request.column is None else request.source
        given = key.row_amax, key.column_amax
        row, column = map(KernelFace.of, (source or request.row, request.column), map(_size, given))
        if request.row is not None:
            row = row._replace(values=KernelFace.of(request.row).values)
        faces, (m, k) = (row, column), key.shape
        matrix = Matrix(None, key.strides[0], key.strides[1], m, k)
        tile = tile_of(row, column, source is not None)
        draws, prologue = max(row.stream, column.stream) >= 0, None
        if key.prologue is not None and not self.copies:
            tile, prologue = computed(tile), key.prologue[0]
        tiling = Tiling.of(tile, matrix, key.dtype, draws=draws)
        if prologue is not None:
            tiling = tiling.of_prologue(prologue, key.device)
        self.task = KernelTask(
            matrix=matrix,
            dtype=key.dtype,
            device=key.device,
            tiling=tiling,
            faces=faces,
            outputs=(
                FaceOutput.of(request.row, m, k, key.device),
                FaceOutput.of(request.column, k, m, key.device),
            ),
            source_dtype=None if source is None else request.dtype or key.dtype,
        )
        self._stores_row = request.row is not None
        self._draws_signs = row.draws_signs or column.draws_signs
        measured = [
            face.kind in MEASURED and known is None
            for face, known in zip(faces, given, strict=True)
        ]
        self.wanted = measured[0], measured[1] and source is None
        self._measurement = self._new_measurement(self.wanted) if any(self.wanted) else None
        passes = int(self._measurement is not None)
        self.measure_source = None
        if source is not None and measured[1]:
            # Rounding is monotone: under one scale, the largest value becomes the largest, and is cast alone.
            self.by_largest = (
                row.kind == TENSOR and column.kind in (TENSOR, NVFP4) and not column.rotated
            )
            self.measure_source = self._source_measurement(reverse=passes == 1)
            passes += not self.by_largest
        recorded = key.record_dtype is not None
        needs_state = key.scaled or recorded or draws or key.prologue is not None
        self._needs_amaxes_only = not (needs_state or passes or self.measure_source is not None)
        records = recorded and row.kind == GIVEN, recorded and column.kind == GIVEN
        once = source is not None or not records[0]  # both faces of a matrix have its amax
        self.cast = CastLaunch(
            self.task,
            record=(records[0], records[1] and once),
            store=self._stores_row,
            reverse=passes == 1,  # a second pass ended at the first tiles
        )

    @functools.cached_property
    def of_row(self) -> int:
        """Number of tensors of the rowwise face."""
        return len(self.task.outputs[0].layouts)

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        row, column = self.task.outputs
        outs = row.empty(), column.empty()
        self._write(x, outs, inputs)
        return (
            None if row.kind is None else Face.of(outs[0], row.kind),
            None if column.kind is None else Face.of(outs[1], column.kind),
        )

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        self._write(x, (out[: self.of_row], out[self.of_row :]), inputs)
        increment_version(out)  # kernels write where autograd does not look

    def _write(self, x: Tensor, outs: Outs, inputs: CastInputs) -> None:
        if self.copies:
            x, inputs = self._readable(x, inputs)
        if is_current(x.device):  # entering no context takes less time than one that does nothing
            self.launch(x, outs, inputs)
        else:
            with on_device(x.device):
                self.launch(x, outs, inputs)

    def _readable(self, x: Tensor, inputs: CastInputs) -> tuple[Tensor, CastInputs]:
        """Return a copy of the matrix that kernels can read, with matching inputs."""
        if inputs.prologue is None:
            return _readable_copy(x), inputs
        return _readable_copy(inputs.prologue.matrix(x)), inputs._replace(prologue=None)

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Measure both faces' amaxes; raise ValueError if the formats have none per tensor or row."""
        x = _readable_copy(x) if self.copies else x
        with on_device(x.device):
            return self._measures.run(x)

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        if self.copies:
            of_row, of_column = self.measure(x)
            out.copy_(of_row if self.request.column is None else of_column)
            return
        with on_device(x.device):
            self._measures_into.run_into(x, out)

    def _new_measurement(self, wanted: tuple[bool, bool]) -> Measurement:
        task = self.task
        return Measurement(task.faces, wanted, task.matrix, task.device, task.tiling)

    def _measurable(self) -> tuple[bool, bool]:
        """Return which faces have an amax before a cast draws signs; raise ValueError if none has."""
        row, column = (
            wanted and not face.draws_signs
            for wanted, face in zip(self.wanted, self.task.faces, strict=True)
        )
        if not (row or column):
            raise ValueError(
                "measure: formats with scales per tensor or row, of which no signs are drawn, are required, got "
                f"{self.request}"
            )
        return row, column

    @functools.cached_property
    def _measures(self) -> Measurement:
        known = self._measurement if self._measurable() == self.wanted else None
        return known or self._new_measurement(self._measurable())

    @functools.cached_property
    def _measures_into(self) -> Measurement:
        """A second measurement, compiled separately for addresses of another alignment."""
        return self._new_measurement(self._measurable())

    def _source_measurement(self, *, reverse: bool) -> CastLaunch:
        """Return the launch that measures the columnwise face's amaxes from the dequantized rowwise face."""
        column = self.task.faces[1]
        face = column.as_amax(AMAX_ROW if column.per_row else AMAX)
        if not self.by_largest:
            return CastLaunch(self.task, column=face, store=False, reverse=reverse)
        tiling, vector = self.task.tiling, self.task.tiling.constants.V * self.task.dtype.itemsize
        # The matrix of this launch is one fp32 number, whatever is cast: vectors of fp32, tiles that are not full.
        constants = tiling.constants._replace(
            even=False, wide=False, V=vector // 4, prologue=NO_PROLOGUE
        )
        task = self.task._replace(
            matrix=Matrix(None, 1, 1, 1, 1), tiling=Tiling(constants, 1, tiling.options)
        )
        return CastLaunch(task, column=face, store=False)

    def launch(self, x: Tensor, outs: Outs, inputs: CastInputs) -> None:
        """Measure missing amaxes, and cast a matrix that kernels can read, on the current device."""
        if self._draws_signs:
            check_draws(self.request, inputs)
        if inputs is NO_INPUTS and self.measure_source is None:  # most are
            amaxes = (x, x) if self._measurement is None else self._measurement.run(x)
            self.cast(x, outs, amaxes, inputs)
            return
        if self._needs_amaxes_only:
            of_row, of_column = inputs.row_amax, inputs.column_amax
            amaxes = (x if of_row is None else of_row, x if of_column is None else of_column)
            self.cast(x, outs, amaxes, NO_INPUTS)
            return
        if inputs.hint is not None and self.is_one_pow2_scale and not is_captured():
            self._run_by(inputs.hint, x, outs, inputs.prologue)
            return
        row_amax = column_amax = x  # stands for nothing
        if self._measurement is not None:
            row_amax, column_amax = self._measurement.run(x, inputs.prologue, inputs.rounding)
        if inputs.row_amax is not None:
            row_amax = inputs.row_amax
        if inputs.column_amax is not None:
            column_amax = inputs.column_amax
        if self.measure_source is not None:
            size = self.key.shape[1] if self.task.faces[1].per_row else 1
            column_amax = torch.zeros(size, dtype=torch.float32, device=x.device)
            seen, of_it = x, inputs
            if self.by_largest:
                # The largest value alone is cast, in place of the matrix.
                seen, of_it = row_amax, inputs._replace(prologue=None)
            self.measure_source(seen, ([], []), (row_amax, column_amax), of_it)
        self.cast(x, outs, (row_amax, column_amax), inputs)

    @functools.cached_property
    def is_one_pow2_scale(self) -> bool:
        """Whether all scales are one power of two, which follows from the tensor's amax."""
        if self.key.row_amax is not None or self.key.column_amax is not None:
            return False
        faces = [face for face in self.task.faces if face.kind != NONE]
        alike = {(face.kind, face.pow2, face.e5m2) for face in faces}
        return len(alike) == 1 and alike <= {(TENSOR, True, True), (TENSOR, True, False)}

    @functools.cached_property
    def _guess_and_check(self) -> tuple[CastLaunch, RecastLaunch]:
        """A cast by a guessed amax that measures the true one, and one that recasts if the scale differs."""
        of_row = self.task.faces[0].kind == TENSOR
        store = self._stores_row
        guess = CastLaunch(self.task, record=(of_row, not of_row), store=store)
        return guess, RecastLaunch(self.task, store=store)

    def _run_by(self, hint: Hint, x: Tensor, outs: Outs, prologue: Prologue | None) -> None:
        """Cast in one pass if the hint's amax gives the right scale, with the bits of ``launch``."""
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
        last = hint.last(x.device, stream)
        if last is not None:
            now = torch.zeros(1, dtype=torch.float32, device=x.device)
            guess, check = self._guess_and_check
            # The first launch measures while it casts, the second does nothing where the scale holds: 0.83 to 0.86 of
            # copy speed, 0.40 to 0.43 where it does not hold.
            guess(x, outs, (last, last), CastInputs(amax_record=now, prologue=prologue))
            check(x, outs, now, last, prologue)
        else:
            amaxes = (x, x) if self._measurement is None else self._measurement.run(x, prologue)
            self.cast(x, outs, amaxes, NO_INPUTS._replace(prologue=prologue))
            now = amaxes[0] if self.task.faces[0].kind == TENSOR else amaxes[1]
        # The next cast reads it in a kernel that was compiled for aligned addresses, and on this stream only.
        hint.amax, hint.stream = now if now.data_ptr() % ALIGNMENT == 0 else None, stream

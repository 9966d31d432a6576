"""Casting with kernels: which kernels cast one kind of matrix, with which arguments, worked out
once.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.cast.measurement import Measurement
from hybridtensor.ops.cast.prepared import Faces, PreparedCast
from hybridtensor.ops.cast.request import (
    NO_INPUTS,
    Cast,
    CastInputs,
    CastRequest,
    Hint,
    check_inputs,
)
from hybridtensor.ops.cast.tiles import (
    AMAX,
    AMAX_ROW,
    GIVEN,
    MEASURED,
    NONE,
    NVFP4,
    PER_ROW,
    TENSOR,
    FaceConstants,
    converts_to_fp8,
    overlaps_kernels,
    tile_of,
)
from hybridtensor.ops.face import Face, FaceKind, Layout, numeric_layouts
from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import is_captured

_ALIGNMENT = 16  # bytes: kernels are compiled for such addresses
_DTYPES = {torch.bfloat16: 1, torch.float16: 2}  # as the kernel names them
_FP32 = 3  # also for wider dtypes: no value of a face needs them
_WAVE = 8  # programs per multiprocessor that run at once


class _Output:
    """The tensors of one face that a kernel writes.

    Attributes:
        layouts: How they lie; none for a face that is not asked for.
        scale_strides: Strides of its scales.
    """

    def __init__(self, kind: FaceKind | None, layouts: tuple[Layout, ...]) -> None:
        self._kind, self.layouts = kind, layouts
        self.scale_strides = layouts[1].strides if layouts else (0, 0)

    @classmethod
    def of(cls, cast: Cast | None, other: int, contraction: int) -> _Output:
        """Return what a cast to an ``[other, contraction]`` face writes."""
        if cast is None:
            return cls(None, ())
        return cls(FaceKind(cast.format), numeric_layouts(cast.format, other, contraction))

    def empty(self, device: torch.device) -> list[Tensor]:
        """Return the tensors, not filled."""
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.layouts
        ]

    def face(self, tensors: list[Tensor]) -> Face | None:
        """Return the face that the tensors hold, or None if it is not asked for."""
        return None if self._kind is None else Face.of(tensors, self._kind)


class _Key(NamedTuple):
    """What decides how a matrix is cast, but for the addresses."""

    request: CastRequest
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # whether the matrix begins at a multiple of 16 bytes
    scaled: bool  # whether delayed scales are given
    notes: bool
    row_amax: (
        tuple[torch.Size, bool] | None
    )  # of a given amax its shape, and whether it is aligned so
    column_amax: tuple[torch.Size, bool] | None


_CASTS: dict[_Key, KernelCast] = {}
_MOST_CASTS = 4096


def kernel_cast(x: Tensor, request: CastRequest, inputs: CastInputs) -> KernelCast:
    """Return the cast of ``x``, not empty, by kernels: worked out for the first matrix that lies
    so.
    """
    row_amax, column_amax = inputs.row_amax, inputs.column_amax
    key = _Key(
        request,
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() % _ALIGNMENT == 0,
        inputs.encode_scale is not None,
        inputs.noted_amax is not None,
        None if row_amax is None else (row_amax.shape, row_amax.data_ptr() % _ALIGNMENT == 0),
        None
        if column_amax is None
        else (column_amax.shape, column_amax.data_ptr() % _ALIGNMENT == 0),
    )
    cast = _CASTS.get(key)
    if cast is None:
        check_inputs(x, request, inputs)
        if len(_CASTS) >= _MOST_CASTS:
            _CASTS.clear()
        cast = _CASTS[key] = KernelCast(key)
    return cast


def _is_readable(key: _Key) -> bool:
    """Return whether rows begin at multiples of 16 elements and bytes, so that threads read whole
    vectors.

    Kernels rely on it: for narrower reads Triton 3.6 lays tiles out in a way that it then reduces
    wrongly.
    """
    return key.strides[1] == 1 and key.strides[0] % 16 == 0 and key.aligned


def _readable_copy(x: Tensor) -> Tensor:
    """Return a copy of ``x`` whose rows begin at multiples of 16 elements."""
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // 16) * 16)[:, :columns].copy_(x)


class KernelCast(PreparedCast):
    """Which kernels run with which arguments for one kind of matrix."""

    def __init__(self, key: _Key) -> None:
        self.request = key.request
        self._copies = not _is_readable(key)
        if self._copies:
            key = key._replace(strides=(-(-key.shape[1] // 16) * 16, 1))
        self.key = key
        source = None if key.request.column is None else key.request.source
        self._source, (m, k) = source, key.shape
        self._held = 0 if source is None else _DTYPES.get(key.request.dtype or key.dtype, _FP32)
        row, column = self.faces = (
            FaceConstants.of(source or key.request.row),
            FaceConstants.of(key.request.column),
        )
        tile = tile_of(row, column, source is not None)
        wide = max(tile.rows, tile.columns) * max(*key.strides, m, k) >= 2**31
        self.tiles = -(-m // tile.rows) * -(-k // tile.columns)
        self.options: dict[str, int | None] = {"num_warps": tile.warps, "maxnreg": tile.registers}
        self.shape: dict[str, Any] = {
            "EVEN": m % tile.rows == 0 and k % tile.columns == 0,
            "WIDE": wide,
            "BM": tile.rows,
            "BK": tile.columns,
            "R": tile.neighbours,
            "V": tile.vector // key.dtype.itemsize,
        }
        self.extents = (key.strides[0], key.strides[1], m, k)
        self._row_out = _Output.of(key.request.row, m, k)
        self._column_out = _Output.of(key.request.column, k, m)
        given = key.row_amax, key.column_amax
        measured = [
            face.kind in MEASURED and known is None
            for face, known in zip(self.faces, given, strict=True)
        ]
        self.wanted = measured[0], measured[1] and source is None
        self._measurement = self._new_measurement() if any(self.wanted) else None
        passes = int(self._measurement is not None)
        self.measure_held = None
        if source is not None and measured[1]:
            # Rounding is monotone: where all values have one scale, the largest is what the largest
            # becomes
            self.by_largest = (
                row.kind == TENSOR and column.kind in (TENSOR, NVFP4) and not column.rotated
            )
            self.measure_held = self._held_measurement(reverse=passes == 1)
            passes += not self.by_largest
        self.cast = self._cast(column, reverse=passes == 1)

    def run(self, x: Tensor, inputs: CastInputs) -> Faces:
        """See ``PreparedCast.run``."""
        row_out, column_out = self._row_out.empty(x.device), self._column_out.empty(x.device)
        x = _readable_copy(x) if self._copies else x
        with on_device(x.device):
            if inputs.hint is not None and self.is_one_pow2_scale and not is_captured():
                self._run_by(inputs.hint, x, row_out, column_out)
            else:
                self._run(x, row_out, column_out, inputs)
        return self._row_out.face(row_out), self._column_out.face(column_out)

    def run_into(self, x: Tensor, out: list[Tensor], inputs: CastInputs) -> None:
        """See ``PreparedCast.run_into``."""
        of_row = len(self._row_out.layouts)
        x = _readable_copy(x) if self._copies else x
        with on_device(x.device):
            self._run(x, out[:of_row], out[of_row:], inputs)
        increment_version(out)  # kernels write where autograd does not look

    def measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PreparedCast.measure``.

        Raises:
            ValueError: If the formats have no amax per tensor or row.
        """
        x = _readable_copy(x) if self._copies else x
        with on_device(x.device):
            return self._measures.run(x)

    def measure_into(self, x: Tensor, out: Tensor) -> None:
        """See ``PreparedCast.measure_into``."""
        if self._copies:
            of_row, of_column = self.measure(x)
            out.copy_(of_row if self.request.column is None else of_column)
            return
        with on_device(x.device):
            self._measures_into.run_into(x, out)

    def _new_measurement(self) -> Measurement:
        tiling = self.shape, self.tiles, self.options
        return Measurement(self.faces, self.wanted, self.extents, self.key.device, tiling)

    @property
    def _measures(self) -> Measurement:
        if self._measurement is None:
            raise ValueError(
                f"measure: formats with scales per tensor or row are required, got {self.request}"
            )
        return self._measurement

    @functools.cached_property
    def _measures_into(self) -> Measurement:
        """A second measurement, compiled apart: it writes to addresses of another alignment."""
        return self._new_measurement()

    def _run(
        self, x: Tensor, row_out: list[Tensor], column_out: list[Tensor], inputs: CastInputs
    ) -> None:
        """Measure what is not given, and cast."""
        row_amax = column_amax = x  # stands for nothing
        if self._measurement is not None:
            row_amax, column_amax = self._measurement.run(x)
        if inputs.row_amax is not None:
            row_amax = inputs.row_amax
        if inputs.column_amax is not None:
            column_amax = inputs.column_amax
        if self.measure_held is not None:
            size = self.key.shape[1] if self.faces[1].kind in PER_ROW else 1
            column_amax = torch.zeros(size, dtype=torch.float32, device=x.device)
            seen, extents = (row_amax, (1, 1, 1, 1)) if self.by_largest else (x, self.extents)
            self._start(self.measure_held, seen, extents, [], [], (row_amax, column_amax), inputs)
        self._start(
            self.cast, x, self.extents, row_out, column_out, (row_amax, column_amax), inputs
        )

    @functools.cached_property
    def is_one_pow2_scale(self) -> bool:
        """Whether all is scaled by one power of two, which follows from the amax of the tensor."""
        if self.key.row_amax is not None or self.key.column_amax is not None:
            return False
        alike = {(face.kind, face.pow2, face.e5m2) for face in self.faces if face.kind != NONE}
        return len(alike) == 1 and alike <= {(TENSOR, True, True), (TENSOR, True, False)}

    @functools.cached_property
    def _guess_and_check(self) -> tuple[Launch, Launch]:
        """A cast by a known amax that raises another one, and one that casts again if that has
        another scale.
        """
        row, column = self.faces
        guess = self._cast(
            column, reverse=False, ROW_NOTE=row.kind == TENSOR, COLUMN_NOTE=row.kind == NONE
        )
        device = self.key.device
        programs = 2
        if device.type == "cuda":
            programs = _WAVE * torch.cuda.get_device_properties(device).multi_processor_count
        return guess, self._cast(
            column, reverse=False, CHECKED=True, programs=min(self.tiles, programs)
        )

    def _run_by(
        self, hint: Hint, x: Tensor, row_out: list[Tensor], column_out: list[Tensor]
    ) -> None:
        """Cast in one pass if the tensor has the scale of the hint's amax; the faces are those of
        ``_run``.
        """
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
        last = hint.last(x.device, stream)
        if last is not None:
            now = torch.zeros(1, dtype=torch.float32, device=x.device)
            guess, check = self._guess_and_check
            self._start(
                guess,
                x,
                self.extents,
                row_out,
                column_out,
                (last, last),
                CastInputs(noted_amax=now),
            )
            self._start(
                check,
                x,
                self.extents,
                row_out,
                column_out,
                (now, now),
                CastInputs(encode_scale=last),
            )
        else:
            row_amax, column_amax = (
                (x, x) if self._measurement is None else self._measurement.run(x)
            )
            self._start(
                self.cast, x, self.extents, row_out, column_out, (row_amax, column_amax), NO_INPUTS
            )
            now = row_amax if self.faces[0].kind == TENSOR else column_amax
        hint.amax, hint.stream = now if now.data_ptr() % _ALIGNMENT == 0 else None, stream

    def _start(
        self,
        launch: Launch,
        x: Tensor,
        extents: tuple[int, ...],
        row_out: list[Tensor],
        column_out: list[Tensor],
        amaxes: tuple[Tensor, Tensor],
        inputs: CastInputs,
    ) -> None:
        """Run the cast kernel; ``x`` stands for tensors that are not there."""
        row, column = self.faces
        encode_scale, noted_amax, rounding, first_row = inputs[:4]
        launch(
            x,
            *extents,
            *_addresses(launch, row_out, self._row_out.scale_strides, x),
            amaxes[0],
            row.slot,
            row.stream,
            *_addresses(launch, column_out, self._column_out.scale_strides, x),
            amaxes[1],
            column.slot,
            column.stream,
            x if encode_scale is None else encode_scale,
            x if noted_amax is None else noted_amax,
            x if rounding is None else rounding,
            first_row,
        )

    def _cast(self, column: FaceConstants, *, reverse: bool, **changes: Any) -> Launch:
        """Return the launch that casts.

        Args:
            column: The columnwise face.
            reverse: Whether to begin at the end, where the pass before this one ended.
            changes: Constants that differ, by name, and the number of ``programs``.
        """
        key, row, held = self.key, self.faces[0], self._held
        rows, columns = key.shape
        given = row.kind == GIVEN, column.kind == GIVEN
        constants = {
            **_face_constants("ROW", row, columns),
            **_face_constants("COLUMN", column, rows),
            "ROW_OVERFLOW": row.overflow(key.dtype),
            "COLUMN_OVERFLOW": column.overflow(
                key.request.dtype or key.dtype if held else key.dtype
            ),
            "ROW_NOTE": key.notes and given[0],
            "COLUMN_NOTE": key.notes and given[1] and (bool(held) or not given[0]),
            "ROW_STORE": key.request.row is not None,
            "HELD": held,
            "REVERSED": reverse,
            "CHECKED": False,
            "ALIGNED": columns % 8 == 0,
            "HW": converts_to_fp8(key.device),
            **self.shape,
            "FOLLOWING": reverse and overlaps_kernels(key.device),
        }
        programs = changes.pop("programs", self.tiles)
        constants |= changes
        options = dict(self.options)
        if constants["FOLLOWING"]:
            options["launch_pdl"] = True
        return Launch("quantize", "cast_kernel", programs, options=options, **constants)

    def _held_measurement(self, *, reverse: bool) -> Launch:
        """Return the launch that raises the amaxes that the columnwise face needs of what the
        rowwise one holds.
        """
        column = self.faces[1]
        face = FaceConstants(AMAX_ROW if column.kind in PER_ROW else AMAX, rotated=column.rotated)
        changes: dict[str, Any] = {"ROW_NOTE": False, "ROW_STORE": False}
        if self.by_largest:
            vector = self.shape["V"] * self.key.dtype.itemsize // 4
            changes |= {
                "programs": 1,
                "FOLLOWING": False,
                "EVEN": False,
                "WIDE": False,
                "V": vector,
            }
        return self._cast(face, reverse=reverse, **changes)


def _face_constants(prefix: str, face: FaceConstants, contraction: int) -> dict[str, Any]:
    """Return the kernel's constants of one face by name, in the kernel's order."""
    return {
        f"{prefix}_KIND": face.kind,
        f"{prefix}_SIDE": face.side,
        f"{prefix}_E5M2": face.e5m2,
        f"{prefix}_POW2": face.pow2,
        f"{prefix}_ROTATED": face.rotated,
        f"{prefix}_STOCHASTIC": face.stream >= 0,
        f"{prefix}_PACK": face.packs(contraction),
    }


def _addresses(
    launch: Launch, out: list[Tensor], scale_strides: tuple[int, int], x: Tensor
) -> tuple[Any, ...]:
    """Return elements, scales with their strides and tensor scales as the kernel takes them."""
    if not out:
        return x, x, *scale_strides, x
    if not launch.is_compiled:  # Triton does not know every dtype; later only addresses count
        out = [t if t.dtype == torch.float32 else t.view(torch.uint8) for t in out]
    return out[0], out[1], *scale_strides, out[2] if len(out) == 3 else x

"""Which kernels cast one kind of matrix, with which arguments: worked out once, and run for every matrix of the kind.

Shape letters: ``M`` rows, ``K`` columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops.cast import Cast, Hint, State, face_layouts
from hybridtensor.ops.kernel_library import Launch

# As the kernels name them
_NONE, _GIVEN, _TENSOR, _ROW, _BLOCK, _MX, _NVFP4, _NVFP4_ROW, _AMAX, _AMAX_ROW = range(10)
_DTYPES = {torch.bfloat16: 1, torch.float16: 2}
_FP32 = 3  # also for wider dtypes: no value of a face needs them
_MEASURED = (_TENSOR, _ROW, _NVFP4, _NVFP4_ROW)
_PER_ROW = (_ROW, _NVFP4_ROW)
_FP32_MAX = torch.finfo(torch.float32).max
_FLAT_BLOCK, _FLAT_STEPS = 8192, 4


class _Face(NamedTuple):
    """A cast as the kernels see it."""

    kind: int
    side: int = 1
    e5m2: bool = False
    pow2: bool = False
    rotated: bool = False
    slot: int = -1
    stream: int = -1

    @classmethod
    def of(cls, cast: Cast | None) -> _Face:
        """Translate a cast."""
        if cast is None:
            return cls(_NONE)
        fmt = cast.format
        return cls(
            _kind(fmt, cast.slot), fmt.block[0] or 1, fmt.element == torch.float8_e5m2,
            cast.pow2_scale or fmt.pow2_scale, fmt.hadamard, cast.slot, cast.stream,
        )  # fmt: skip


def _kind(fmt: Format, slot: int) -> int:
    if fmt.tensor_block is not None:
        return _NVFP4 if fmt.tensor_block[0] is None else _NVFP4_ROW
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return _MX
    if fmt.block[1] is not None:
        return _BLOCK
    if slot >= 0:
        return _GIVEN
    return _TENSOR if fmt.block[0] is None else _ROW


class Key(NamedTuple):
    """What decides how a matrix is cast, but for the addresses."""

    row: Cast | None
    column: Cast | None
    source: Cast | None
    held: torch.dtype | None
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    notes: bool
    known: tuple[bool | None, ...]  # of given amaxes, whether their addresses are multiples of 16


_PLANS: dict[Key, Plan] = {}
_MOST_PLANS = 4096


def key_of(
    x: Tensor, row: Cast | None, column: Cast | None, source: Cast | None, held: torch.dtype | None, state: State
) -> Key:
    """Return what decides how this matrix is cast."""
    known = tuple(None if amax is None else amax.data_ptr() % 16 == 0 for amax in (state.row_amax, state.column_amax))
    return Key(row, column, source, held, x.shape, x.stride(), x.dtype, x.device, state.amaxes is not None, known)


def plan_of(key: Key) -> Plan:
    """Return the plan for one kind of matrix; make it if there is none."""
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(key)
    return plan


class Plan:
    """Which kernels run with which arguments for one kind of matrix."""

    def __init__(self, key: Key) -> None:
        self.key = key
        m, k = key.shape
        row, column = self.faces = _Face.of(key.source or key.row), _Face.of(key.column)
        tile = _tile(row, column, key.source is not None)
        wide = max(tile.rows, tile.columns) * max(*key.strides, m, k) >= 2**31
        self.tiles = -(-m // tile.rows) * -(-k // tile.columns)
        self.options = {"num_warps": tile.warps, "maxnreg": tile.registers}
        self.shape = {
            "EVEN": m % tile.rows == 0 and k % tile.columns == 0, "WIDE": wide, "BM": tile.rows, "BK": tile.columns,
            "R": tile.neighbours, "V": tile.vector // key.dtype.itemsize,
        }  # fmt: skip
        self.extents = *key.strides, m, k
        self.layouts = face_layouts(key.row, m, k), face_layouts(key.column, k, m)
        self.row_strides, self.column_strides = (made[1].strides if made else (0, 0) for made in self.layouts)
        kinds = [face.kind in _MEASURED and known is None for face, known in zip(self.faces, key.known, strict=True)]
        self.wanted = kinds[0], kinds[1] and key.source is None
        self.measure = self._measurement() if any(self.wanted) else None
        passes = int(self.measure is not None)
        self.measure_held = None
        if key.source is not None and kinds[1]:
            # Rounding is monotone: where all values have one scale, the largest is what the largest becomes
            self.by_largest = row.kind == _TENSOR and column.kind in (_TENSOR, _NVFP4) and not column.rotated
            self.measure_held = self._held_measurement(reverse=passes == 1)
            passes += not self.by_largest
        self.cast = self._cast(column, reverse=passes == 1)

    @functools.cached_property
    def measurement_into(self) -> Callable[[Tensor, Tensor], object]:
        """What ``measure`` does, into zeros that are given: compiled apart, because of other addresses."""
        return self._measurement()

    def run(self, x: Tensor, state: State, out: list[Tensor] | None) -> list[Tensor]:
        """Allocate if there is no ``out``, measure and cast."""
        device, of_row = x.device, len(self.layouts[0])
        out = self._empty(device) if out is None else out
        row_out, column_out = out[:of_row], out[of_row:]
        row_amax = column_amax = x
        if self.measure is not None:
            row_amax, column_amax = self.measure(x)
        row_amax = row_amax if state.row_amax is None else state.row_amax
        column_amax = column_amax if state.column_amax is None else state.column_amax
        if self.measure_held is not None:
            size = self.key.shape[1] if self.faces[1].kind in _PER_ROW else 1
            column_amax = torch.zeros(size, dtype=torch.float32, device=device)
            seen, extents = (row_amax, (1, 1, 1, 1)) if self.by_largest else (x, self.extents)
            self._start(self.measure_held, seen, extents, [], [], row_amax, column_amax, state)
        self._start(self.cast, x, self.extents, row_out, column_out, row_amax, column_amax, state)
        return out

    def _empty(self, device: torch.device) -> list[Tensor]:
        """Return the faces, not filled."""
        return [layout.empty(device) for layouts in self.layouts for layout in layouts]

    @functools.cached_property
    def is_one_pow2_scale(self) -> bool:
        """Whether all is scaled by one power of two, which follows from the amax of the tensor."""
        faces = [face for face in self.faces if face.kind != _NONE]
        alike = {(face.kind, face.pow2, face.e5m2) for face in faces}
        return (
            alike <= {(_TENSOR, True, True), (_TENSOR, True, False)}
            and len(alike) == 1
            and self.key.known == (None, None)
        )

    @functools.cached_property
    def _guess_and_check(self) -> tuple[Launch, Launch]:
        """What casts by an amax and raises another one, and what casts again if that has another scale."""
        row, column = self.faces
        guess = self._cast(column, reverse=False, ROW_NOTE=row.kind == _TENSOR, COLUMN_NOTE=row.kind == _NONE)
        device = self.key.device
        wave = 8 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        return guess, self._cast(column, reverse=False, CHECKED=True, programs=min(self.tiles, wave))

    def run_by(self, hint: Hint, x: Tensor) -> list[Tensor]:
        """Do what ``run`` does, in one pass if the tensor has the scale that the hint's amax has."""
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
        last, out = hint.last(x.device, stream), self._empty(x.device)
        row_out, column_out = out[: len(self.layouts[0])], out[len(self.layouts[0]) :]
        if last is not None:
            now = torch.zeros(1, dtype=torch.float32, device=x.device)
            guess, check = self._guess_and_check
            self._start(guess, x, self.extents, row_out, column_out, last, last, State(amaxes=now))
            self._start(check, x, self.extents, row_out, column_out, now, now, State(factors=last))
        else:
            row_amax, column_amax = (x, x) if self.measure is None else self.measure(x)
            self._start(self.cast, x, self.extents, row_out, column_out, row_amax, column_amax, State())
            now = row_amax if self.faces[0].kind == _TENSOR else column_amax
        hint.amax, hint.stream = now if now.data_ptr() % 16 == 0 else None, stream
        return out

    def _start(
        self, launch: Launch, x: Tensor, extents: tuple[int, ...], row_out: list[Tensor], column_out: list[Tensor],
        row_amax: Tensor, column_amax: Tensor, state: State,
    ) -> None:  # fmt: skip
        """Run the cast kernel."""
        row, column = self.faces
        row_codes, row_scales, row_levels = _arguments(launch, row_out, x)
        column_codes, column_scales, column_levels = _arguments(launch, column_out, x)
        factors, amaxes, rounding = (x if tensor is None else tensor for tensor in state[:3])
        launch(
            x, *extents,
            row_codes, row_scales, *self.row_strides, row_levels, row_amax, row.slot, row.stream,
            column_codes, column_scales, *self.column_strides, column_levels, column_amax, column.slot, column.stream,
            factors, amaxes, rounding, state.first_row,
        )  # fmt: skip

    def _cast(self, column: _Face, *, reverse: bool, **changes: Any) -> Launch:
        """Return what casts; ``changes`` of the constants, by name, make something else of it."""
        key, row = self.key, self.faces[0]
        held = 0 if key.held is None else _DTYPES.get(key.held, _FP32)
        constants = dict(
            ROW_KIND=row.kind, ROW_SIDE=row.side, ROW_E5M2=row.e5m2, ROW_POW2=row.pow2, ROW_ROTATED=row.rotated,
            ROW_STOCHASTIC=row.stream >= 0, ROW_PACK=_packs(row, key.shape[1]),
            COLUMN_KIND=column.kind, COLUMN_SIDE=column.side, COLUMN_E5M2=column.e5m2, COLUMN_POW2=column.pow2,
            COLUMN_ROTATED=column.rotated, COLUMN_STOCHASTIC=column.stream >= 0,
            COLUMN_PACK=_packs(column, key.shape[0]),
            ROW_OVERFLOW=_overflow(row, key.dtype), COLUMN_OVERFLOW=_overflow(column, key.held or key.dtype),
            ROW_NOTE=key.notes and row.kind == _GIVEN,
            COLUMN_NOTE=key.notes and column.kind == _GIVEN and (bool(held) or row.kind != _GIVEN),
            ROW_STORE=key.row is not None, HELD=held, REVERSED=reverse, CHECKED=False, ALIGNED=key.shape[1] % 8 == 0,
            HW=converts_to_fp8(key.device), **self.shape,
            FOLLOWING=reverse and overlaps_kernels(key.device),
        )  # fmt: skip
        programs = changes.pop("programs", self.tiles)
        constants |= changes
        options = self.options | ({"launch_pdl": True} if constants["FOLLOWING"] else {})
        return Launch("quantize", "cast_kernel", programs, options=options, **constants)

    def _held_measurement(self, *, reverse: bool) -> Launch:
        """Return what raises the amaxes that the columnwise face needs of what the rowwise one holds."""
        column = self.faces[1]
        face = _Face(_AMAX_ROW if column.kind in _PER_ROW else _AMAX, rotated=column.rotated)
        changes: dict[str, Any] = {"ROW_NOTE": False, "ROW_STORE": False}
        if self.by_largest:
            changes |= {
                "programs": 1,
                "FOLLOWING": False,
                "EVEN": False,
                "WIDE": False,
                "V": self.shape["V"] * self.key.dtype.itemsize // 4,
            }
        return self._cast(face, reverse=reverse, **changes)

    def _measurement(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return what gives the amaxes that each face needs; those of one face in zeros that are given, if they are."""
        key, (row, column) = self.key, self.faces
        m, k = key.shape
        sizes = [extent if face.kind in _PER_ROW else 1 for face, extent in zip(self.faces, key.shape, strict=True)]
        wanted = self.wanted
        plain = [face.kind not in _PER_ROW and not face.rotated for face in self.faces]
        shared = all(wanted) and all(plain)
        alone, followed = False, overlaps_kernels(key.device)
        flat = all(p for p, w in zip(plain, wanted, strict=True) if w) and _is_contiguous(key)
        if flat:
            programs = -(-m * k // (_FLAT_BLOCK * _FLAT_STEPS))
            alone = programs == 1
            launch = Launch(
                "measure", "measure_flat_kernel", programs,
                BLOCK=_FLAT_BLOCK, STEPS=_FLAT_STEPS, ALONE=alone, FOLLOWED=followed, options={"num_warps": 8},
            )  # fmt: skip
        else:
            launch = Launch(
                "measure", "measure_kernel", self.tiles,
                ROW=wanted[0], ROW_PER_ROW=row.kind in _PER_ROW, ROW_ROTATED=row.rotated,
                COLUMN=wanted[1] and not shared, COLUMN_PER_ROW=column.kind in _PER_ROW,
                COLUMN_ROTATED=column.rotated, HW=converts_to_fp8(key.device), options=self.options,
                **self.shape, FOLLOWED=followed,
            )  # fmt: skip
        one = flat or shared

        def measure(x: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
            new = torch.empty if alone else torch.zeros
            amaxes = new(1 if one else sum(sizes), dtype=torch.float32, device=x.device) if out is None else out
            together = one or out is not None
            of_row, of_column = (amaxes, amaxes) if together else (amaxes[: sizes[0]], amaxes[sizes[0] :])
            if flat:
                launch(x, amaxes, m * k)
            else:
                launch(x, *key.strides, m, k, of_row, of_column)
            return of_row, of_column

        return measure


def _arguments(launch: Launch, out: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return codes, scales and levels as the kernel takes them; ``x`` stands for nothing."""
    if not out:
        return [x, x, x]
    if not launch.is_compiled:  # Triton does not know every dtype; later only addresses count
        out = [t if t.dtype == torch.float32 else t.view(torch.uint8) for t in out]
    return out if len(out) == 3 else [*out, x]


class _Tile(NamedTuple):
    """What one program casts, and how.

    Attributes:
        rows: Of the matrix.
        columns: Of the matrix.
        vector: Bytes of a row that a thread reads at once.
        neighbours: Rows below each other that a thread has.
        warps: Of a program.
        registers: That a thread may use; the rarely needed rest is spilled.
    """

    rows: int
    columns: int
    vector: int
    neighbours: int
    warps: int
    registers: int | None


# Measured on an H200 with Triton 3.6, 2026-11-21, with matrices of 128 million elements; elsewhere a sane default.
_BLOCK_TILE = _Tile(128, 128, 16, 16, 4, 176)
_FP8_TILE = _Tile(64, 64, 16, 8, 2, None)
_NVFP4_TILE = _Tile(64, 64, 16, 8, 2, 128)
_MIXED_TILE = _Tile(64, 64, 16, 8, 2, 152)  # NVFP4 and FP8
_ROTATED_TILE = _Tile(64, 64, 8, 16, 2, 168)  # a thread rotates 16 rows on its own


_HELD_REGISTERS = 168  # so many that three programs of four warps, or six of two, fit; found by compiling only


def _tile(row: _Face, column: _Face, held: bool) -> _Tile:
    """Return what suits the formats, and whether the columnwise face is made of what the rowwise one holds.

    Scale blocks of every format lie in one tile, so that values are quantized, dequantized and quantized again there.
    """
    kinds = {face.kind for face in (row, column)} - {_NONE}
    two_level = bool(kinds & {_NVFP4, _NVFP4_ROW})
    if _BLOCK in kinds:
        tile = _BLOCK_TILE
    elif not two_level:
        return _FP8_TILE
    elif row.rotated or column.rotated:
        tile = _ROTATED_TILE
    else:
        tile = _NVFP4_TILE if kinds <= {_NVFP4, _NVFP4_ROW} else _MIXED_TILE
    if not held:
        return tile
    much = row.rotated or max(row.stream, column.stream) >= 0  # would spill hundreds
    much |= tile is _BLOCK_TILE and (two_level or row.kind not in (_BLOCK, _MX))
    return tile._replace(registers=None if much else _HELD_REGISTERS)


def _packs(face: _Face, contraction: int) -> bool:
    """Whether rows of elements begin at multiples of the 32 bits that are stored at once."""
    return contraction % (8 if face.kind in (_NVFP4, _NVFP4_ROW) else 4) == 0


def _is_contiguous(key: Key) -> bool:
    return key.strides[1] == 1 and key.strides[0] == key.shape[1]


def _overflow(face: _Face, dtype: torch.dtype) -> float:
    """Return what a factor is where it is beyond fp32."""
    return torch.finfo(dtype).max if face.kind == _BLOCK else _FP32_MAX


def converts_to_fp8(device: torch.device) -> bool:
    """Whether the device rounds to FP8 itself."""
    return _nvidia(device) >= (8, 9)


def overlaps_kernels(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it ends: programmatic dependent launch."""
    return _nvidia(device) >= (9, 0)


def _nvidia(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, of anything else zeros."""
    ours = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if ours else (0, 0)

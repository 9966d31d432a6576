"""A face as the cast kernel sees it, and the tiles in which it is cast."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hybridtensor.formats import Format
from hybridtensor.kernels.groups import (
    BLOCK,
    DRAWN,
    EDEN,
    EXPONENT_EVEN,
    EXPONENT_FLOOR,
    GIVEN,
    LEAST_ABSOLUTE,
    LEAST_SQUARED,
    MX,
    MXFP4,
    NONE,
    NVFP4,
    NVFP4_ROW,
    OWN_RULE,
    ROW,
    TENSOR,
    FaceConstants,
    Matrix,
    MeasureConstants,
    TileConstants,
)
from hybridtensor.ops.cast.request import Cast

MEASURED = (TENSOR, ROW, EDEN, NVFP4, NVFP4_ROW)
_FP32_MAX = torch.finfo(torch.float32).max
_FP4 = {MXFP4, EDEN, NVFP4, NVFP4_ROW}
_RULES = {
    "": OWN_RULE,
    "mae": LEAST_ABSOLUTE,
    "mse": LEAST_SQUARED,
    "even": EXPONENT_EVEN,
    "floor": EXPONENT_FLOOR,
}


class KernelFace(NamedTuple):
    """One face as the cast kernel sees it.

    Attributes:
        kind: Kind of its scales.
        side: Rows of a scale block.
        e5m2: Whether FP8 elements are E5M2.
        pow2: Whether encode scales are powers of two.
        rotated: How many values are rotated together first, or 0.
        slot: Index of the delayed scale; -1 is none.
        stream: Random stream; -1 is none.
        step: Multiple of the entries stored along the contraction.
        values: Whether values are stored in place of elements and block scales.
        rule: Choice of block scales.
        tensor_scale_max: What an amax per tensor or row maps to in a two-level format.
        of_rows: Whether the tensor's amax is given as those of the matrix's rows.
    """

    kind: int
    side: int = 1
    e5m2: bool = False
    pow2: bool = False
    rotated: int = 0
    slot: int = -1
    stream: int = -1
    step: int = 1
    values: bool = False
    rule: int = OWN_RULE
    tensor_scale_max: float = 1.0
    of_rows: bool = False

    @classmethod
    def of(cls, cast: Cast | None, num_amaxes: int = 0) -> KernelFace:
        if cast is None:
            return cls(NONE)
        fmt = cast.format.base
        return cls(
            kind=_kind(fmt, cast.slot),
            side=fmt.block[0] or 1,
            e5m2=fmt.element == torch.float8_e5m2,
            pow2=cast.pow2_scale or fmt.pow2_scale,
            rotated=fmt.rotated,
            slot=cast.slot,
            stream=cast.stream,
            step=cast.format.step,
            values=fmt is not cast.format,
            rule=_RULES[cast.rule],
            tensor_scale_max=fmt.tensor_scale_max,
            of_rows=num_amaxes > 1 and cast.amax_per != "row",
        )

    @property
    def draws_signs(self) -> bool:
        """Whether values are rotated under drawn signs, and scales rounded at random in place of elements."""
        return self.rotated == DRAWN

    @property
    def per_row(self) -> bool:
        """Whether each row has an amax."""
        return self.kind in (ROW, NVFP4_ROW)

    @property
    def takes_amax_of_tensor(self) -> bool:
        """Whether a measurement finds the amax of the tensor, which serves both faces: none per row, or of rotated
        values."""
        return not self.per_row and not self.rotated

    def measurement(self, wanted: bool) -> MeasureConstants:
        """Return the compile-time constants of a measurement; ``wanted`` is whether amaxes of this face are."""
        return MeasureConstants(wanted=wanted, per_row=self.per_row, rotated=self.rotated)

    def as_amax(self, kind: int) -> KernelFace:
        """Return the face with which a launch measures the amaxes and casts nothing."""
        stream = self.stream if self.draws_signs else -1
        return KernelFace(kind, rotated=self.rotated, stream=stream)

    def constants(
        self, dtype: torch.dtype, contraction: int, *, record: bool, store: bool
    ) -> FaceConstants:
        """Return the compile-time constants; ``store`` is whether the face is wanted, not only its values."""
        whole = contraction % self.step == 0
        return FaceConstants(
            kind=self.kind,
            side=self.side,
            e5m2=self.e5m2,
            pow2=self.pow2,
            rotated=self.rotated,
            stochastic=self.stream >= 0 and not self.draws_signs,
            # Multiples of 4 or 8 would do, too: of 16 Triton compiles kernels of their own anyway
            pack=not whole or contraction % 16 == 0,
            overflow=torch.finfo(dtype).max if self.kind == BLOCK else _FP32_MAX,
            record=record,
            store=store,
            step=1 if whole else self.step,
            values=self.values,
            rule=self.rule,
            tensor_scale_max=self.tensor_scale_max,
            of_rows=self.of_rows,
        )


def _kind(fmt: Format, slot: int) -> int:
    if fmt.drawn_signs:
        return EDEN
    if fmt.tensor_block is not None:
        return NVFP4 if fmt.tensor_block[0] is None else NVFP4_ROW
    if fmt.scale_dtype == torch.float8_e8m0fnu:
        return MX if fmt.elements_per_byte == 1 else MXFP4
    if fmt.block[1] is not None:
        return BLOCK
    if slot >= 0:
        return GIVEN
    return TENSOR if fmt.block[0] is None else ROW


class Tile(NamedTuple):
    """The tile of one program, and its launch options.

    Attributes:
        rows: Rows of the matrix.
        columns: Columns of the matrix.
        vector: Bytes of a row that a thread reads at once.
        neighbours: Rows below each other that a thread has.
        warps: Warps of a program.
        registers: Registers that a thread may use; the rarely needed rest is spilled.
        fuses: Whether a product and a sum may be rounded once.
    """

    rows: int
    columns: int
    vector: int
    neighbours: int
    warps: int
    registers: int | None
    fuses: bool = True


# Measured on an H200 with Triton 3.6, 2026-11-21, with matrices of 128 million elements; elsewhere
# a sane default.
_BLOCK_TILE = Tile(128, 128, 16, 16, 4, 176)
_FP8_TILE = Tile(64, 64, 16, 8, 2, None)
_NVFP4_TILE = Tile(64, 64, 16, 8, 2, 128)
# Both faces of 16,384 x 4,096 on an H100: 0.114 ms in place of 0.122, as values 0.153 in place of 0.169 (MXFP8 0.099
# and 0.150). Square blocks take 7 % longer in it.
_MXFP4_TILE = Tile(32, 128, 16, 8, 2, None)
_MIXED_TILE = Tile(64, 64, 16, 8, 2, 152)  # FP4 and FP8
_ROTATED_TILE = Tile(64, 64, 8, 16, 2, 168)  # a thread rotates 16 rows on its own
# Two candidates spill 140 times per 5,500 instructions; with 168 or 200 registers both faces take longer (H100)
_CHOOSING_TILE = _NVFP4_TILE
# What is rotated together is in one tile, and sums are compared to the last bit; found by compiling only
_DRAWN_ROW_TILE = Tile(32, 128, 16, 4, 4, None, fuses=False)
_DRAWN_COLUMN_TILE = Tile(128, 32, 8, 16, 2, None, fuses=False)
_DRAWN_COLUMN_ALONE_TILE = Tile(128, 16, 8, 16, 1, None, fuses=False)  # no warp waits for another
# Found by compiling only: so many that three programs of four warps, or six of two, fit
_REQUANTIZING_REGISTERS = 168


def tile_of(row: KernelFace, column: KernelFace, requantizes: bool) -> Tile:
    """Return the tile that suits the formats, such that all scale blocks lie in one tile."""
    if row.draws_signs:
        return _DRAWN_ROW_TILE
    if column.draws_signs:
        return _DRAWN_COLUMN_ALONE_TILE if row.kind == NONE else _DRAWN_COLUMN_TILE
    tile = _tile_of(row, column, requantizes)
    if {row.rule, column.rule} & {LEAST_ABSOLUTE, LEAST_SQUARED}:
        # errors are compared to the last bit
        tile = _CHOOSING_TILE if tile.rows == _CHOOSING_TILE.rows else tile
        tile = tile._replace(fuses=False)
    return tile


def _tile_of(row: KernelFace, column: KernelFace, requantizes: bool) -> Tile:
    kinds = {face.kind for face in (row, column)} - {NONE}
    fp4 = bool(kinds & _FP4)
    if BLOCK in kinds:
        tile = _BLOCK_TILE
    elif not fp4:
        return _FP8_TILE
    elif row.rotated or column.rotated:
        tile = _ROTATED_TILE
    elif kinds == {MXFP4} and not (requantizes or _is_square_or_drawn(row, column)):
        tile = _MXFP4_TILE
    else:
        tile = _NVFP4_TILE if kinds <= _FP4 else _MIXED_TILE
    if not requantizes:
        return tile
    spills = row.rotated or max(row.stream, column.stream) >= 0  # hundreds of registers
    spills |= tile is _BLOCK_TILE and (fp4 or row.kind not in (BLOCK, MX))
    return tile._replace(registers=None if spills else _REQUANTIZING_REGISTERS)


def _is_square_or_drawn(*faces: KernelFace) -> bool:
    return any(face.side > 1 or face.stream >= 0 for face in faces)


def computed(tile: Tile) -> Tile:
    """Return the tile for a computed matrix: twice as many threads with half the elements each."""
    # In the tile of a cast two arrays of fp32 do not fit into registers (308 to 1150 us for a gated matrix of 8192 x
    # 14336).
    return tile._replace(vector=8, warps=2 * tile.warps, registers=None)


class Tiling(NamedTuple):
    """How tiles cover matrices with one layout: constants, number of tiles, and launch options."""

    constants: TileConstants
    number: int
    options: dict[str, int | None]

    @classmethod
    def of(cls, tile: Tile, matrix: Matrix, dtype: torch.dtype, *, draws: bool) -> Tiling:
        """Return the tiling of a matrix; ``draws`` is whether elements are rounded at random."""
        m, k = matrix.M, matrix.K
        # The largest offset inside of a tile, of the matrix or of a face.
        reach = max(tile.rows, tile.columns) * max(matrix[1:])
        constants = TileConstants(
            BM=tile.rows,
            BK=tile.columns,
            R=tile.neighbours,
            V=tile.vector // dtype.itemsize,
            even=m % tile.rows == 0 and k % tile.columns == 0,
            wide=reach >= 2**31,
            aligned=draws and k % 8 == 0,
        )
        number = -(-m // tile.rows) * -(-k // tile.columns)
        options = {"num_warps": tile.warps, "maxnreg": tile.registers}
        if not tile.fuses:
            # No fused multiply-add, which rounds once where the definition rounds twice.
            options["enable_fp_fusion"] = False
        return cls(constants, number, options)

    def of_prologue(self, kind: int, device: torch.device) -> Tiling:
        """Return the tiling, of ``computed`` tiles, of a matrix with a prologue."""
        on_gpu = device.type == "cuda"
        return self._replace(constants=self.constants._replace(prologue=kind, gpu=on_gpu))


def converts_to_fp8(device: torch.device) -> bool:
    """Return whether the device rounds to FP8 itself."""
    return _nvidia(device) >= (8, 9)


def overlaps_kernels(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch."""
    return _nvidia(device) >= (9, 0)


def _nvidia(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU, zeros for anything else."""
    ours = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if ours else (0, 0)

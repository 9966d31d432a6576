"""Groups of kernel arguments. No Triton here, so that launches are prepared without importing it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# How a face is scaled
NONE = 0
GIVEN = 1  # per tensor, by a factor that is known
TENSOR = 2  # per tensor, by its amax
ROW = 3  # per row of the face, by its amax
BLOCK = 4  # fp32 per SIDE x 128
MX = 5  # E8M0 per SIDE x 32, FP8 elements
MXFP4 = 6  # the same of E2M1 elements
EDEN = 7  # E4M3 per 1 x 16, rounded at random, under an fp32 scale per tensor, E2M1 elements
NVFP4 = 8  # E4M3 per SIDE x 16, under an fp32 scale per tensor
NVFP4_ROW = 9  # the same under an fp32 scale per row of the face
AMAX = 10  # not at all: the amax of the tensor is raised instead
AMAX_ROW = 11  # the same per row of the face

DRAWN = 128  # values that are rotated together where signs are drawn

# Which block scale is chosen
OWN_RULE = 0  # the one that follows from the amax
LEAST_ABSOLUTE = 1  # NVFP4: of the two for 6 and 4 the one with less absolute error
LEAST_SQUARED = 2  # the same of squared errors
EXPONENT_EVEN = 3  # MXFP4: the exponent of the amax rounded to one mantissa bit
EXPONENT_FLOOR = 4  # MXFP4: the exponent of the amax

Address = Tensor | int | None
"""A tensor, or its address where nothing else counts; None where a group only says how it lies."""


class Matrix(NamedTuple):
    """A matrix ``[M, K]`` and its strides.

    Attributes:
        x: Its address.
        stride_m: From row to row.
        stride_k: From column to column.
        M: Rows.
        K: Columns.
    """

    x: Address
    stride_m: int
    stride_k: int
    M: int
    K: int


class GatedMatrix(NamedTuple):
    """A matrix that is ``silu(x) * up`` of two; the first five are those of ``Matrix``.

    Attributes:
        x: Address of the gate.
        stride_m: From row to row of the gate.
        stride_k: From column to column of both.
        M: Rows.
        K: Columns.
        up: Address of what is gated.
        up_stride_m: From row to row of it.
    """

    x: Address
    stride_m: int
    stride_k: int
    M: int
    K: int
    up: Address
    up_stride_m: int


class NormedMatrix(NamedTuple):
    """A matrix that is ``x`` times a factor per row and one per column; the first five are those of ``Matrix``.

    Attributes:
        x: Address of what is normalized.
        stride_m: From row to row.
        stride_k: From column to column.
        M: Rows.
        K: Columns.
        factors: fp32, of rows.
        weight: Of columns.
    """

    x: Address
    stride_m: int
    stride_k: int
    M: int
    K: int
    factors: Address
    weight: Address


class Output(NamedTuple):
    """The addresses of a face ``[OTHER, ALONG]`` that is written, and the amaxes that it is scaled by.

    Attributes:
        qdata: Elements.
        scales: Scales.
        stride_other: Of the scales, from row to row of blocks.
        stride_along: Of the scales, from block to block along the contraction.
        tensor_scale: fp32.
        measured: fp32 amaxes, per tensor or row; or the matrix's rows' in its dtype.
    """

    qdata: Address
    scales: Address
    stride_other: int
    stride_along: int
    tensor_scale: Address
    measured: Address


class State(NamedTuple):
    """Addresses of what a layer remembers.

    Attributes:
        factors: Delayed encode scales.
        amaxes: Where their amaxes are recorded: fp32, or int64, the address of those.
        rounding: Key and step of random rounding.
    """

    factors: Address
    amaxes: Address
    rounding: Address


class FaceConstants(NamedTuple):
    """How a face is cast: compile-time constants.

    Attributes:
        kind: How it is scaled, as ``quantize`` names it.
        side: Rows of a scale block.
        e5m2: Whether FP8 elements are E5M2.
        pow2: Whether encode scales are powers of two.
        rotated: How many values are rotated together first, or 0.
        stochastic: Whether elements are rounded at random.
        pack: Whether rows of elements begin at multiples of the 32 bits that are stored at once.
        overflow: The encode scale that stands for one beyond fp32.
        record: Whether the amax is recorded.
        store: Whether it is wanted, not only what it holds.
        step: Entries along the contraction are stored up to a multiple of this, the last ones zeros; 1 where there are
            as many anyway.
        values: Whether elements times block scales are stored, in bf16, and in place of scales what is left of them.
        rule: Which block scale is chosen, as ``quantize`` names it.
        tensor_scale_max: What an amax per tensor or row maps to in a two-level format.
        of_rows: Whether the tensor's amax is the largest of those of the matrix's rows.
    """

    kind: int
    side: int = 1
    e5m2: bool = False
    pow2: bool = False
    rotated: int = 0
    stochastic: bool = False
    pack: bool = False
    overflow: float = 0.0
    record: bool = False
    store: bool = True
    step: int = 1
    values: bool = False
    rule: int = OWN_RULE
    tensor_scale_max: float = 1.0
    of_rows: bool = False


class MeasureConstants(NamedTuple):
    """Compile-time constants: how a face is measured (per row or tensor), and how many values are rotated first."""

    wanted: bool
    per_row: bool
    rotated: int


class TileConstants(NamedTuple):
    """The tile of a program: compile-time constants.

    Attributes:
        BM: Rows of the matrix.
        BK: Columns of the matrix.
        R: Rows below each other that a thread has.
        V: Elements of a row that a thread reads at once.
        even: Whether tiles cover the matrix exactly.
        wide: Whether offsets take 64 bits.
        aligned: Whether K is a multiple of 8, so that eight neighbours share a draw; false where nothing is drawn.
        prologue: What the matrix is computed of while it is read, as ``prologue`` names it.
        gpu: Whether a GPU runs this, which has functions that the interpreter lacks.
    """

    BM: int
    BK: int
    R: int
    V: int
    even: bool
    wide: bool
    aligned: bool = False
    prologue: int = 0
    gpu: bool = False


class Place(NamedTuple):
    """Where a tile lies in a face.

    Attributes:
        other: Its first row.
        along: Its first entry along the contraction.
        OTHER: Rows of the face.
        ALONG: Entries along the contraction.
        pitch: Entries from row to row: more than ``ALONG`` where other groups' lie between.
    """

    other: int
    along: int
    OTHER: int
    ALONG: int
    pitch: int


class Parts(NamedTuple):
    """The layout of matrices that are cast together: groups of rows of one, or a stack.

    Attributes:
        plan: Of groups: which rows each row of tiles has, int32 ``[tiles, 8]``; see ``plan_kernel``.
        stride: Of a stack: from matrix to matrix.
        pitch: Of groups: padded rows of all of them.
    """

    plan: Address
    stride: int
    pitch: int


class Sizes(NamedTuple):
    """Offsets from one matrix's part of a face to the next one's; 0 where they depend on rows."""

    qdata: int
    scales: int
    tensor_scale: int
    measured: int


class Part(NamedTuple):
    """A tile of one of several matrices.

    Attributes:
        matrix: The matrix alone.
        group: Its number.
        start: Its first row among those of all.
        padded: Its first row among the padded ones.
        top: First row of the tile.
        left: First column of the tile.
        stored: Rows of its rowwise face.
        size: Entries along the contraction of its columnwise face.
    """

    matrix: Matrix
    group: int
    start: int
    padded: int
    top: int
    left: int
    stored: int
    size: int


class Side(NamedTuple):
    """An operand of a grouped product: elements ``[other, contraction]``, or a stack of such.

    Attributes:
        data: Elements.
        stride_group: From matrix to matrix of a stack, else 0.
        stride_other: From row to row.
        stride_along: From entry to entry along the contraction.
        factor: fp32 factors of whole sums.
        factor_by_group: From group to group, 0 where rows of all tokens have one each.
        factor_by_row: From row to row, 0 where a group has one.
        scales: fp32 scales of blocks.
        scales_by_group: From matrix to matrix of a stack, else 0.
        stride_scale: From row to row of blocks.
        stride_block: From block to block along the contraction.
    """

    data: Address
    stride_group: int
    stride_other: int
    stride_along: int
    factor: Address
    factor_by_group: int
    factor_by_row: int
    scales: Address
    scales_by_group: int
    stride_scale: int
    stride_block: int


class SideConstants(NamedTuple):
    """Compile-time constants of a grouped product's operand; ``side`` is 0 without scales of partial sums."""

    element: int
    factor: bool
    side: int


class BlockScaled(NamedTuple):
    """An operand ``[M, K]`` in FP8 with fp32 scales per 1 x 128.

    Attributes:
        data: Elements.
        stride_m: From row to row.
        scales: Scales.
        scale_m: From row to row of the scales.
        scale_block: From block to block along K.
    """

    data: Address
    stride_m: int
    scales: Address
    scale_m: int
    scale_block: int


class Mxfp4(NamedTuple):
    """Matrices ``[N, K]`` in MXFP4, those of a stack one after the other.

    Attributes:
        qdata: Elements, contiguous: bytes of two, or words of eight.
        scales: E8M0 per SIDE x 32.
        by_matrix: Of the scales, from matrix to matrix of a stack, else 0.
        by_row: Of the scales, from row to row of blocks.
        by_block: Of the scales, from block to block along K.
    """

    qdata: Address
    scales: Address
    by_matrix: int
    by_row: int
    by_block: int


class Blocks(NamedTuple):
    """The extents of a matrix, in elements and in blocks of 128 x 128.

    Attributes:
        N: Rows.
        K: Columns.
        down: Rows of blocks.
        across: Blocks of a row.
    """

    N: int
    K: int
    down: int
    across: int

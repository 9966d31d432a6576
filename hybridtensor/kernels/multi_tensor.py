"""The kernels of ``ops.cast.multi_tensor``: measure and cast several matrices in one launch, each as if it were alone.

Every program casts one tile. ``owners`` says of which matrix, and a table has one row per matrix: where its tensors
are, as distances from those of the first matrix, or from the begin of a buffer, in entries of their dtype.

Legend: as in ``tiles`` and ``quantize``.
"""

import triton
import triton.language as tl

from hybridtensor.kernels.groups import Matrix, Output, Place, State
from hybridtensor.kernels.measure import measure_tile
from hybridtensor.kernels.quantize import cast_tile, stored
from hybridtensor.kernels.tiles import load_tile

# Columns of the table, int64. Those of a face: elements, scales, tensor scales, the two strides of scales, amaxes
X = tl.constexpr(0)
STRIDE = tl.constexpr(1)
ROWS = tl.constexpr(2)
COLUMNS = tl.constexpr(3)
FIRST_TILE = tl.constexpr(4)
FIRST_ROW = tl.constexpr(5)
FACTORS = tl.constexpr(6)
AMAXES = tl.constexpr(7)
ROUNDING = tl.constexpr(8)
ROW_FACE_AT = tl.constexpr(9)
COLUMN_FACE_AT = tl.constexpr(15)
WIDTH = tl.constexpr(21)


@triton.jit
def _size(entry):
    """Return an extent or stride that is a multiple of 16, so that loads and stores are vectorized."""
    # True because ``ops.cast.multi_tensor.is_whole`` takes no other matrices; loaded numbers are not specialized on,
    # as arguments are.
    return tl.multiple_of(tl.load(entry).to(tl.int32), 16)


@triton.jit
def _matrix(x, entry):
    start = x + tl.multiple_of(tl.load(entry + X), 16)
    return Matrix(start, _size(entry + STRIDE), 1, _size(entry + ROWS), _size(entry + COLUMNS))


@triton.jit
def _face(out, entry):
    """Return the position of a matrix's face in the shared buffers."""
    qdata = out.qdata + tl.multiple_of(tl.load(entry), 16)
    scales = out.scales + tl.load(entry + 1)
    tensor_scale = out.tensor_scale + tl.load(entry + 2)
    measured = out.measured + tl.load(entry + 5)
    return Output(qdata, scales, tl.load(entry + 3), tl.load(entry + 4), tensor_scale, measured)


@triton.jit(do_not_specialize=["row_slot", "row_stream", "column_slot", "column_stream"])
def multi_tensor_cast_kernel(x, row, column, state, table, owners, row_slot, row_stream, column_slot, column_stream,
                             ROW_FACE: tl.constexpr, COLUMN_FACE: tl.constexpr, TILE: tl.constexpr,
                             HW: tl.constexpr):  # fmt: skip
    """Cast one tile into the faces that are asked for; see ``quantize.cast_kernel``.

    Args:
        x: The first matrix.
        row: The buffers of all rowwise faces, and the amaxes of the first. The same for the columnwise ones.
        state: What the first layer remembers.
        table: int64 ``[matrices, WIDTH]``.
        owners: int32, the matrix of each tile.
    """
    pid = tl.program_id(0)
    entry = table + tl.load(owners + pid).to(tl.int64) * WIDTH
    matrix = _matrix(x, entry)
    number = pid - tl.load(entry + FIRST_TILE).to(tl.int32)
    tiles = tl.cdiv(matrix.K, TILE.BK)
    top = number // tiles * TILE.BM
    left = number % tiles * TILE.BK
    own = State(
        state.factors + tl.load(entry + FACTORS), state.amaxes + tl.load(entry + AMAXES),
        state.rounding + tl.load(entry + ROUNDING),
    )  # fmt: skip
    of_row = _face(row, entry + ROW_FACE_AT)
    of_column = _face(column, entry + COLUMN_FACE_AT)
    along = stored(matrix.M, COLUMN_FACE.step)
    tile = load_tile(matrix, top, left, TILE)
    cast_tile(
        tile, matrix, of_row, of_column, own, Place(top, left, matrix.M, matrix.K, matrix.K),
        Place(left, top, matrix.K, along, along), tl.load(entry + FIRST_ROW), row_slot, row_stream,
        column_slot, column_stream, ROW_FACE, COLUMN_FACE, TILE, 0, HW,
    )  # fmt: skip


@triton.jit
def multi_tensor_measure_kernel(x, row_target, column_target, table, owners, ROW: tl.constexpr, COLUMN: tl.constexpr,
                                TILE: tl.constexpr, HW: tl.constexpr):  # fmt: skip
    """Raise the amaxes that the casts of either face need, which begin at zero; see ``measure.measure_kernel``."""
    pid = tl.program_id(0)
    entry = table + tl.load(owners + pid).to(tl.int64) * WIDTH
    matrix = _matrix(x, entry)
    number = pid - tl.load(entry + FIRST_TILE).to(tl.int32)
    tiles = tl.cdiv(matrix.K, TILE.BK)
    top = number // tiles * TILE.BM
    left = number % tiles * TILE.BK
    tile = load_tile(matrix, top, left, TILE)
    measure_tile(
        tile, matrix, top, left, row_target + tl.load(entry + ROW_FACE_AT + 5),
        column_target + tl.load(entry + COLUMN_FACE_AT + 5), table, -1, -1, ROW, COLUMN, TILE, HW,
    )  # fmt: skip

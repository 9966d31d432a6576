"""Which bytes of a sharded weight are sent, and which amaxes its shards exchange before they are quantized.

A shard holds whole rows. What it can quantize alone depends on the scale groups of a face:

- within a row (rowwise blocks and rows), or in blocks of rows that no shard cuts: alone;
- across the whole tensor, a whole column, or square blocks that shards cut: after an all-reduce of amaxes;
- across blocks of one column that shards cut: not at all. High-precision values are sent and quantized after the
  gather, because as many amaxes would be reduced as bytes are saved.

A columnwise face that is made of what the rowwise one holds needs nothing but that one's bytes: where a shard cannot
quantize it alone, or it has more bytes, these are sent, and it is quantized after the gather.

A shard of a stack of experts' weights holds whole experts, and so whole scale groups: each is quantized alone, and
their faces are concatenated.

Shape letters: ``N`` rows of the whole weight, ``n`` of a shard, ``K`` columns, ``R`` ranks, ``E`` experts, ``e`` of a
shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch

from hybridtensor.formats import Format
from hybridtensor.ops.groups import stack_layouts
from hybridtensor.quantizers import (
    IdentityQuantizer,
    NVFP4Quantizer,
    OneFormatQuantizer,
    Quantizer,
)
from hybridtensor.quantizers.hybrid import by_direction, is_its_transpose
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.subclasses.op_table import of_layers

ROW, COLUMN = DIRECTIONS = "rowwise", "columnwise"


@dataclass(frozen=True)
class FacePlan:
    """How one face of a weight is gathered.

    Attributes:
        kind: ``"bytes"``: each shard quantizes its rows, and the bytes are sent; ``"values"``: the face is in high
            precision, its values are sent in the dtype of the computation; ``"rowwise"``: it is made of the rowwise
            face after the gather, and nothing of its own is sent; ``"whole"``: the values are sent in the weight's own
            dtype and are quantized after the gather.
        format: Format of the face.
        reduce: Largest magnitudes that shards must know of each other: of the ``"tensor"``, of a
            ``"column"``, of square ``"blocks"`` that they cut; or None.
        reason: Why the face is ``"whole"``.
    """

    kind: str
    format: Format
    reduce: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """How a weight is gathered.

    Attributes:
        row: The rowwise face.
        column: The columnwise face.
        transposed: Whether the columnwise face is the transpose of the rowwise one: gathered together, one is enough.
        num_ranks: ``R``.
        rows: ``n``; of the largest shard where they are uneven. Of a stack ``e``.
        columns: ``K``; of a stack the elements of an expert.
        whole: The values are sent as they are, whichever face is wanted: FSDP2 takes nothing else for such shards.
        derives_columnwise: Whether the columnwise face is made of what the rowwise one holds, by shards or after the
            gather.
        read: Whether something besides linear layers, such as a tied embedding, reads the gathered weight's values.
        matrix: ``(N, K)`` of each expert, as linear layers have them, if this is a stack; or None.
    """

    row: FacePlan
    column: FacePlan
    transposed: bool
    num_ranks: int
    rows: int
    columns: int
    whole: str = ""
    derives_columnwise: bool = False
    read: bool = False
    matrix: tuple[int, int] | None = None

    def face(self, direction: str) -> FacePlan:
        return self.row if direction == ROW else self.column

    @functools.cached_property
    def reduce(self) -> str | None:
        """Which amaxes shards exchange before they quantize."""
        needs = (
            {}
            if self.whole
            else {face.reduce for face in (self.row, self.column) if face.kind == "bytes"}
        )
        # The finest: the amax of a tensor is the maximum of those of its columns, so that one
        # all-reduce serves both faces. ``_one_exchange`` leaves no plan with blocks and something
        # else.
        return _finest(needs)

    @property
    def block(self) -> int:
        """Side length of the square blocks that shards cut."""
        face = self.row if self.row.reduce == "blocks" else self.column
        return face.format.block[0] or 1

    @functools.cached_property
    def amaxes(self) -> tuple[int, int]:
        """Shape of the amaxes that are reduced."""
        if self.reduce == "blocks":
            return -(-self.rows * self.num_ranks // self.block), -(-self.columns // self.block)
        return {None: (0, 0), "tensor": (1, 1), "column": (1, self.columns)}[self.reduce]

    @property
    def derives_after_gather(self) -> bool:
        """Whether the columnwise face is made of the gathered rowwise one, so that nothing of its own is sent."""
        return self.column.kind == ROW

    @property
    def shares(self) -> bool:
        """Whether the columnwise face consists of the tensors of the rowwise one."""
        return self.derives_after_gather and self.column.format.is_identity

    def fills(self, rowwise: bool, columnwise: bool) -> tuple[bool, bool]:
        """Return which faces a gather of the requested ones fills: also the rowwise one where the columnwise one is
        made of it."""
        return rowwise or (columnwise and self.derives_after_gather), columnwise

    def sends(self, rowwise: bool, columnwise: bool) -> tuple[str, ...]:
        """Return the names of the tensors sent for the requested faces: ``"whole"``, or ``"rowwise"``,
        ``"columnwise"``, ``"values"``."""
        rowwise, columnwise = self.fills(rowwise, columnwise)
        columnwise = columnwise and not self.derives_after_gather
        if columnwise and self.transposed and self.row.kind == self.column.kind == "bytes":
            rowwise, columnwise = True, False  # transposed after the gather
        wanted = {ROW: self.row} if rowwise else {}
        if columnwise:
            wanted[COLUMN] = self.column
        if self.whole or any(face.kind == "whole" for face in wanted.values()):
            return ("whole",)
        names = ("values" if face.kind == "values" else name for name, face in wanted.items())
        return tuple(dict.fromkeys(names))

    def whole_dtype(self, dtype: torch.dtype, master: torch.dtype) -> torch.dtype:
        """Return the dtype of a weight sent ``"whole"``: its own where it is quantized after the gather."""
        return dtype if self.row.format.is_identity and self.column.format.is_identity else master


@dataclass(frozen=True)
class Piece:
    """A tensor of a shard's face that is sent; see ``rows_per_block`` and ``by_block`` for scales of blocks."""

    index: int
    shape: tuple[int, int]
    dtype: torch.dtype
    dim: int
    rows_per_block: int = 0
    by_block: bool = False

    @property
    def strides(self) -> tuple[int, int]:
        return (1, self.shape[0]) if self.by_block else (self.shape[1], 1)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize


@functools.lru_cache(maxsize=1024)
def pieces(fmt: Format, direction: str, rows: int, columns: int) -> tuple[Piece, ...]:
    """Return the tensors that are sent of a shard's face ``[rows, columns]``; those equal on all shards are not."""
    matrix, dim = ((rows, columns), 0) if direction == ROW else ((columns, rows), 1)
    if fmt.storage is None or fmt.scale_dtype is None:
        raise ValueError(f"pieces: a quantized format is required, got {fmt}")
    made = [Piece(0, (matrix[0], matrix[1] // fmt.elements_per_byte), fmt.storage, dim)]
    block = fmt.block[dim]
    if block is not None:
        shape, cut = fmt.scale_shape(*matrix), bool(rows % block)
        most = (rows - 1) // block + 2  # blocks that so many rows can touch
        shape = shape if not cut else (most, shape[1]) if dim == 0 else (shape[0], most)
        by_block = fmt.block[0] == 1 and fmt.block[1] is not None
        made.append(Piece(1, shape, fmt.scale_dtype, dim, block if cut else 0, by_block))
    of_tensor = fmt.tensor_scale_shape(*matrix)
    if fmt.tensor_block is not None and of_tensor is not None and fmt.tensor_block[dim] is not None:
        made.append(Piece(2, of_tensor, torch.float32, dim))
    return tuple(made)


def stack_pieces(
    fmt: Format, direction: str, count: int, matrix: tuple[int, int]
) -> tuple[Piece, ...]:
    """Return the tensors of a face of ``count`` experts as they lie in memory, a row for each."""
    layouts = stack_layouts(fmt, count, *(matrix if direction == ROW else matrix[::-1]))
    return tuple(
        Piece(i, (count, math.prod(layout.shape[1:])), layout.dtype, 0)
        for i, layout in enumerate(layouts)
    )


# Cached for identity, not for speed alone: payloads and exchanges compare plans by ``is``.
@functools.lru_cache(maxsize=1024)
def make_plan(
    config: HybridConfig,
    size: tuple[int, int],
    num_ranks: int,
    dim: int,
    reader: str = "",
    *,
    turned: bool = False,
    persistent: bool = False,
) -> Plan:
    """Return the plan of a weight.

    Args:
        config: The recipe.
        size: ``(N, K)``.
        num_ranks: ``R``.
        dim: The dimension that is sharded.
        reader: Class of a module besides linear layers that reads the values, or ``""``.
        turned: Whether the weight is stored ``[K, N]``.
        persistent: Whether shards store both faces, and send what they store.
    """
    quantizer: Quantizer = config.weight
    row_quantizer, column_quantizer, derived = by_direction(quantizer)
    whole, rows = "", -(-size[0] // num_ranks)
    if dim != 0:
        whole, rows = (
            f"Shard({dim}): FSDP2 rearranges one tensor of as many elements as the shard has",
            size[0],
        )
    elif turned:
        whole, rows = "it is stored [in, out]: a shard has a part of every output", size[0]
    elif size[0] % num_ranks:
        whole = f"{size[0]} rows on {num_ranks} ranks: FSDP2 takes one tensor of the padded shard's shape"
    elif reader:
        whole = f"{reader} reads its values, too"
    row = face_plan(row_quantizer, ROW, rows, num_ranks)
    column = face_plan(column_quantizer, COLUMN, rows, num_ranks)
    columns = size[1] if dim == 0 and not turned else size[1] // num_ranks
    if derived:
        column = derived_plan(row, column, row_quantizer)
        if not whole and not persistent and _is_smaller(row, column, rows, columns):
            column = FacePlan(ROW, column.format)
    if "blocks" in (row.reduce, column.reduce):
        row, column = _one_exchange(row, column)
    transposed = is_its_transpose(quantizer) or row.kind == column.kind == "values"
    return Plan(row, column, transposed, num_ranks, rows, columns, whole, derived, bool(reader))


def face_plan(quantizer: Quantizer, direction: str, rows: int, num_ranks: int) -> FacePlan:
    """Return how one face of a weight is gathered whose shards have ``rows`` rows each."""
    fmt = quantizer.rowwise_format if direction == ROW else quantizer.columnwise_format
    if isinstance(quantizer, IdentityQuantizer):
        return FacePlan("values", fmt)
    if not isinstance(quantizer, OneFormatQuantizer):
        return FacePlan(
            "whole", fmt, reason=f"{type(quantizer).__name__} says nothing about its groups"
        )
    if num_ranks == 1:
        return FacePlan("bytes", fmt)
    reduce: set[str | None] = set()
    delayed = bool(quantizer.delayed_rules("weight"))  # its scale is known before
    for block in [] if delayed else [fmt.block, fmt.tensor_block]:
        if block is None:
            continue
        across_rows, across_columns = block if direction == ROW else (block[1], block[0])
        if across_rows is None:
            reduce.add("tensor" if across_columns is None else "column")
        elif rows % across_rows and across_columns == across_rows and fmt.tensor_block is None:
            reduce.add("blocks")
        elif rows % across_rows:  # in two-level formats, because a NaN marks its block by the scale
            cut = f"shards of {rows} rows cut blocks of {across_rows}"
            return FacePlan("whole", fmt, reason=f"{direction} {fmt}: {cut}")
    if fmt.hadamard and direction == COLUMN and rows % 16:
        return FacePlan(
            "whole",
            fmt,
            reason=f"{direction} {fmt}: shards of {rows} rows cut what is rotated together",
        )
    if fmt.hadamard and reduce:
        return FacePlan(
            "whole", fmt, reason=f"{direction} {fmt}: its scale is that of the rotated values"
        )
    return FacePlan("bytes", fmt, _finest(reduce))


def _finest(needs: Collection[str | None]) -> str | None:
    """Return the kind of amaxes that serves all ``needs``, see ``FacePlan.reduce``; None if there are none."""
    return next((need for need in ("blocks", "column", "tensor") if need in needs), None)


def _one_exchange(row: FacePlan, column: FacePlan) -> tuple[FacePlan, FacePlan]:
    """Return both face plans with one kind of amaxes; cut blocks need positions of their own."""
    kinds = {
        (face.reduce, face.format.block)
        for face in (row, column)
        if face.kind == "bytes" and face.reduce
    }
    if len(kinds) == 1:
        return row, column
    reason = "shards cut its blocks, and the other face needs other magnitudes"
    made = [
        FacePlan("whole", face.format, reason=f"{face.format}: {reason}")
        if face.reduce == "blocks"
        else face
        for face in (row, column)
    ]
    return made[0], made[1]


def derived_plan(row: FacePlan, column: FacePlan, row_quantizer: Quantizer) -> FacePlan:
    """Return the plan of a columnwise face that is requantized from the rowwise data."""
    if row.kind == column.kind == "values":
        return column
    if column.kind == "values" or row.kind == "whole" or column.format.drawn_signs:
        return FacePlan(ROW, column.format)  # of drawn signs no shard keeps those of another step
    if column.kind == "whole":
        return FacePlan(ROW, column.format, reason=column.reason)
    if column.reduce in ("column", "blocks") or (
        column.reduce == "tensor" and not _keeps_largest(row_quantizer)
    ):
        reason = f"columnwise {column.format}: its scales are those of what the rowwise face of all shards holds"
        return FacePlan(ROW, column.format, reason=reason)
    return column


def _keeps_largest(quantizer: Quantizer) -> bool:
    """Return whether the largest magnitude of what a face holds is what the amax of its values is quantized to."""
    # Of four over six the other values of its block decide between two scales, which round it differently
    chooses = isinstance(quantizer, NVFP4Quantizer) and quantizer.four_over_six is not None
    return not quantizer.stochastic and not chooses


def _is_smaller(row: FacePlan, column: FacePlan, rows: int, columns: int) -> bool:
    """Return whether shards ``[rows, columns]`` can quantize both faces, and the rowwise one has fewer bytes."""
    if not row.kind == column.kind == "bytes":
        return False
    of_row, of_column = (
        sum(piece.nbytes for piece in pieces(face.format, direction, rows, columns))
        for face, direction in ((row, ROW), (column, COLUMN))
    )
    return of_row < of_column


def rows_together(plan: Plan) -> int:
    """Return the row multiple that both faces can quantize independently."""
    extents = [1]
    for face, along_rows in ((plan.row, 0), (plan.column, 1)):
        if not face.format.is_identity:
            extents.append(face.format.block[along_rows] or 1)
    return math.lcm(*extents)


def check_persistent(weight: object, plan: Plan, size: tuple[int, ...]) -> None:
    """Raise ValueError unless the faces of a persistent weight of this size can be gathered: there are no values to
    fall back on."""
    reasons = [plan.whole, plan.row.reason, plan.column.reason]
    if plan.reduce == "blocks":
        reasons.append(f"shards of {plan.rows} rows cut blocks of {plan.block}")
    reason = next((reason for reason in reasons if reason), None)
    if reason is not None:
        raise ValueError(
            f"fully_shard: a persistent weight {size}{of_layers(weight)} is cut inside a row or block: {reason}; "
            "use another number of ranks or recipe, or quantize_ without persistent=True"
        )

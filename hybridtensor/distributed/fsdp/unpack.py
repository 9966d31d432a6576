"""From all ranks' payloads to the faces of the whole weights.

The copies are prepared once per kind of gather; a gather then runs those of all its weights. Where one face is the
transpose of the other, its elements are transposed in the same read.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Piece, Plan
from hybridtensor.ops.face import bytewise
from hybridtensor.ops.transpose import prepare_transpose

_WORD = torch.int64


class _View(NamedTuple):
    """A strided view of all ranks' parts in the received bytes, in elements of ``dtype``."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int

    def of(self, received: Tensor) -> Tensor:
        """Return the view of a byte tensor."""
        flat = received.view(self.dtype)
        return flat.as_strided(self.size, self.strides, flat.storage_offset() + self.begin)

    def in_words(self) -> _View:
        """Return the same view in 64-bit words, if alignment allows."""
        *outer, step = self.strides
        *sizes, width = self.size
        if (
            self.dtype != torch.uint8
            or step != 1
            or any(count % 8 for count in (*outer, width, self.begin))
        ):
            return self
        return _View(
            _WORD, (*sizes, width // 8), (*(stride // 8 for stride in outer), 1), self.begin // 8
        )


class Received(NamedTuple):
    """A tensor in what all ranks sent: at ``begin`` bytes of each rank's ``stride``; ``flat`` is uint8 ``[R *
    stride]``."""

    name: str
    piece: Piece
    flat: Tensor
    begin: int
    stride: int


class Copies:
    """Copies from the received bytes to faces, in order."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._others: list[Callable[[], object]] = []

    def add(self, target: Tensor, source: Tensor) -> None:
        """Add the copy of a tensor.

        That is no write to what the target is a view of: autograd saved the tensors of faces in
        forward, and would take the gather before backward for one.
        """
        self._targets.append(target.data)
        self._sources.append(source)

    def run(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for other in self._others:
            other()

    def add_face(
        self,
        plan: Plan,
        got: Received,
        tensors: dict[str, list[Tensor]],
        wanted: tuple[bool, bool],
    ) -> None:
        """Add the copies that fill a weight's faces from one received tensor, whose storage may be replaced between
        gathers."""
        name, piece = got.name, got.piece
        turns = name == ROW and plan.transposed and wanted[1]
        if turns and piece.index == 0:
            self._others.append(_transposer(plan, got, tensors, wanted[0]))
            return
        if not turns or wanted[0]:
            self._add(plan, got, tensors[name][piece.index], turned=False)
        if turns:
            self._add(plan, got, tensors[COLUMN][piece.index], turned=True)

    def _add(self, plan: Plan, got: Received, whole: Tensor, *, turned: bool) -> None:
        """Add the copy of one tensor of all ranks, or of its transpose."""
        if got.piece.rows_per_block:
            self._others.append(_filler_of_blocks(plan, got, whole.data, turned))
            return
        view, target = _views(plan, got, whole, turned)
        words = view.in_words()
        if words is not view and target.stride(-1) == 1:
            target, view = target.view(_WORD), words
        self.add(target, view.of(got.flat))


def _transposer(
    plan: Plan, got: Received, tensors: dict[str, list[Tensor]], copied: bool
) -> Callable[[], None]:
    """Return a function that writes transposed elements, and also the elements themselves if ``copied``."""
    rows, width = got.piece.shape
    view = _View(torch.uint8, (plan.num_ranks, rows, width), (got.stride, width, 1), got.begin)
    row, column = (
        bytewise(tensors[ROW][0].data) if copied else None,
        bytewise(tensors[COLUMN][0].data),
    )
    bits = 8 // plan.row.format.elements_per_byte
    return prepare_transpose(view.of(got.flat), row=row, column=column, bits=bits)


def _views(plan: Plan, got: Received, whole: Tensor, turned: bool) -> tuple[_View, Tensor]:
    """Return views of the received parts and of the whole tensor, of one shape, in memory order."""
    if plan.matrix is not None:  # as it lies in memory, a row for each expert
        elements = math.prod(whole.shape[1:])
        whole = whole.as_strided((whole.shape[0], elements), (elements, 1))
    whole, ranks = bytewise(whole), plan.num_ranks
    size, piece = whole.itemsize, got.piece
    shape, dim = (piece.shape[::-1], 1 - piece.dim) if piece.by_block else (piece.shape, piece.dim)
    outer, inner = shape  # as a part lies in memory
    between, begin = got.stride // size, got.begin // size
    memory = (whole.t() if piece.by_block else whole).view(-1)
    if turned:  # parts follow each other along what is the last dimension of the transpose
        view = _View(whole.dtype, (inner, ranks, outer), (1, between, inner), begin)
    elif dim == 0:
        view = _View(whole.dtype, (ranks, outer * inner), (between, 1), begin)
    else:
        view = _View(whole.dtype, (outer, ranks, inner), (inner, between, 1), begin)
    return view, memory.view(view.size)


def _filler_of_blocks(plan: Plan, got: Received, whole: Tensor, turned: bool) -> Callable[[], None]:
    """Return a function that copies scales of cut blocks, each from the rank that holds its first row."""
    whole, piece = bytewise(whole.t() if turned else whole), got.piece
    size, (rows, columns) = whole.itemsize, piece.shape
    strides = (got.stride // size, *piece.strides)
    parts = _View(whole.dtype, (plan.num_ranks, rows, columns), strides, got.begin // size).of(
        got.flat
    )

    def fill() -> None:
        # [R * blocks that a shard touches, ...]
        of_blocks = parts.movedim(1 + piece.dim, 1).flatten(0, 1)
        chosen = of_blocks.index_select(
            0, _positions(plan.rows, plan.num_ranks, piece, of_blocks.device)
        )
        whole.copy_(chosen.movedim(0, piece.dim))

    return fill


@functools.lru_cache(maxsize=1024)
def _positions(rows: int, num_ranks: int, piece: Piece, device: torch.device) -> Tensor:
    """Return the position of each block's scale among the received ones; all copies of a cut block's scale are
    equal."""
    block, most = piece.rows_per_block, piece.shape[piece.dim]
    # The rank of each block's first row
    ranks = [first // rows for first in range(0, rows * num_ranks, block)]
    return torch.tensor(
        [r * most + b - r * rows // block for b, r in enumerate(ranks)], device=device
    )

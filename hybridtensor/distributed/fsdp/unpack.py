"""From the bytes that all ranks sent to the faces of the whole weight.

Which bytes go where is worked out once per weight and kind of gather; a gather then runs one copy
per tensor. Where one face is the transpose of the other, its elements are transposed on the way,
both faces while they are read once.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.payload import Wire, by_expert, bytewise
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Piece, Plan
from hybridtensor.ops import transpose

Filler = Callable[[Tensor], object]
"""Copies some of the bytes that all ranks sent to where they belong in a face."""

_WORD = torch.int64


class _View(NamedTuple):
    """Where the parts of all ranks lie in what was gathered, in elements of ``dtype``."""

    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int

    def of(self, received: Tensor) -> Tensor:
        """Return it as a view of the bytes."""
        flat = received.view(self.dtype)
        return flat.as_strided(self.size, self.strides, flat.storage_offset() + self.begin)

    def in_words(self) -> _View:
        """Return the same in words of 64 bits, if bytes lie so."""
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


def fillers(
    plan: Plan, layout: Wire, tensors: dict[str, list[Tensor]], wanted: tuple[bool, bool]
) -> list[Filler]:
    """Return functions that fill the faces from the bytes, uint8 ``[R * layout.nbytes]``, one after
    the other.

    Args:
        plan: How the weight is gathered.
        layout: What each rank sent.
        tensors: Of each face, with memory; they may lose it afterwards, and get other memory.
        wanted: Whether the rowwise face is filled, and the columnwise one.
    """
    found: list[Filler] = []
    for name, piece, begin in layout.parts:
        turns = name == ROW and plan.transposed and wanted[1]
        if turns and piece.index == 0:
            found.append(_transposer(plan, layout, piece, begin, tensors, wanted[0]))
            continue
        if name != ROW or not turns or wanted[0]:
            found.append(
                _filler(plan, layout, piece, begin, tensors[name][piece.index], turned=False)
            )
        if turns:
            found.append(
                _filler(plan, layout, piece, begin, tensors[COLUMN][piece.index], turned=True)
            )
    return found


def _transposer(
    plan: Plan,
    layout: Wire,
    piece: Piece,
    begin: int,
    tensors: dict[str, list[Tensor]],
    copied: bool,
) -> Filler:
    """Return a function that writes the transpose of elements, and the elements themselves if they
    are ``copied``.
    """
    rows, width = piece.shape
    view = _View(torch.uint8, (plan.num_ranks, rows, width), (layout.nbytes, width, 1), begin)
    row, column = bytewise(tensors[ROW][0]) if copied else None, bytewise(tensors[COLUMN][0])
    bits = 8 // plan.row.format.elements_per_byte
    return lambda received: transpose(view.of(received), row=row, column=column, bits=bits)


def _filler(
    plan: Plan, layout: Wire, piece: Piece, begin: int, whole: Tensor, *, turned: bool
) -> Filler:
    """Return a function that copies one tensor of all ranks, or its transpose."""
    if piece.rows_per_block:
        return _filler_of_blocks(plan, layout, piece, begin, whole, turned)
    view, target = _views(plan, layout, piece, begin, whole, turned)
    words = view.in_words()
    if words is not view and target.stride(-1) == 1:
        target, view = target.view(_WORD), words
    return lambda received: target.copy_(view.of(received))


def _views(
    plan: Plan, layout: Wire, piece: Piece, begin: int, whole: Tensor, turned: bool
) -> tuple[_View, Tensor]:
    """Return a view of the parts in what was gathered, and one of the whole tensor: of one size, in
    the order of memory.
    """
    whole, ranks = bytewise(whole if plan.matrix is None else by_expert(whole)), plan.num_ranks
    size = whole.itemsize
    shape, dim = (piece.shape[::-1], 1 - piece.dim) if piece.by_block else (piece.shape, piece.dim)
    outer, inner = shape  # as a part lies in memory
    between = layout.nbytes // size
    memory = (whole.t() if piece.by_block else whole).view(-1)
    if turned:  # parts follow each other along what is the last dimension of the transpose
        view = _View(whole.dtype, (inner, ranks, outer), (1, between, inner), begin // size)
    elif dim == 0:
        view = _View(whole.dtype, (ranks, outer * inner), (between, 1), begin // size)
    else:
        view = _View(whole.dtype, (outer, ranks, inner), (inner, between, 1), begin // size)
    return view, memory.view(view.size)


def _filler_of_blocks(
    plan: Plan, layout: Wire, piece: Piece, begin: int, whole: Tensor, turned: bool
) -> Filler:
    """Return a function that copies scales of blocks that shards cut, each from the rank of its
    first row.
    """
    whole = bytewise(whole.t() if turned else whole)
    size, (rows, columns) = whole.itemsize, piece.shape
    strides = (layout.nbytes // size, *piece.strides)
    view = _View(whole.dtype, (plan.num_ranks, rows, columns), strides, begin // size)

    def fill(received: Tensor) -> None:
        of_blocks = (
            view.of(received).movedim(1 + piece.dim, 1).flatten(0, 1)
        )  # [R * blocks that a shard touches, ..]
        chosen = of_blocks.index_select(
            0, _positions(plan.rows, plan.num_ranks, piece, received.device)
        )
        whole.copy_(chosen.movedim(0, piece.dim))

    return fill


@functools.lru_cache(maxsize=1024)
def _positions(rows: int, num_ranks: int, piece: Piece, device: torch.device) -> Tensor:
    """Return the position of each block's scale among those that all ranks sent; of a cut block all
    have the same.
    """
    block, most = piece.rows_per_block, piece.shape[piece.dim]
    ranks = [
        first // rows for first in range(0, rows * num_ranks, block)
    ]  # the rank of each block's first row
    return torch.tensor(
        [r * most + b - r * rows // block for b, r in enumerate(ranks)], device=device
    )

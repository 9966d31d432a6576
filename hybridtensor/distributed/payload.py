"""The bytes of a shard on the wire, and the faces that they become.

A shard sends one flat tensor of bytes: the tensors of the faces that are wanted, one after the other, each from a
multiple of 16 on (``Wire``). After the gather, ``unpack`` copies the parts of all ranks to where they belong in the
faces of the whole weight; where one face is the transpose of the other, both are written while their elements are read
once.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridtensor.distributed.plan import COLUMN, ROW, Piece, Plan, pieces
from hybridtensor.formats import Format
from hybridtensor.ops import Operand, transpose

_ALIGNMENT = 16


@dataclass(frozen=True)
class Wire:
    """What a shard sends.

    Attributes:
        parts: ``"rowwise"``, ``"columnwise"`` or ``"values"``, the tensor, and where it begins.
        nbytes: Bytes of all.
    """

    parts: tuple[tuple[str, Piece, int], ...]
    nbytes: int


@functools.lru_cache(maxsize=1024)
def wire(plan: Plan, sent: tuple[str, ...], dtype: torch.dtype) -> Wire:
    """Lay out what ``plan.sends`` named; values have ``dtype``."""
    parts, begin = [], 0
    for name in sent:
        of_face = (Piece(0, (plan.rows, plan.columns), dtype, 0),)
        if name != "values":
            of_face = pieces(plan.face(name).format, name, plan.rows, plan.columns)  # type: ignore[assignment]
        for piece in of_face:
            parts.append((name, piece, begin))
            begin += math.ceil(piece.nbytes / _ALIGNMENT) * _ALIGNMENT
    return Wire(tuple(parts), begin)


def bytes_per_rank(plan: Plan, rowwise: bool, columnwise: bool, dtype: torch.dtype, master: torch.dtype) -> int:
    """Return the bytes that a rank sends for the faces wanted.

    Args:
        plan: How the weight is gathered.
        rowwise: Whether the rowwise face is wanted.
        columnwise: Whether the columnwise face is wanted.
        dtype: Of the computation.
        master: Of the weight.
    """
    sent = plan.sends(rowwise, columnwise)
    if sent == ("whole",):
        return plan.rows * plan.columns * plan.whole_dtype(dtype, master).itemsize
    return wire(plan, sent, dtype).nbytes


def pack(layout: Wire, tensors: dict[str, list[Tensor]], device: torch.device) -> Tensor:
    """Return the bytes of a shard, uint8 ``[layout.nbytes]``."""
    sent = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
    for name, piece, begin in layout.parts:
        part = sent[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
        tensor = tensors[name][piece.index]
        if piece.rows_per_block:
            part = part.narrow(piece.dim, 0, tensor.shape[piece.dim])
        _copy_(part, tensor)
    return sent


def unpack(
    plan: Plan, layout: Wire, received: Tensor, tensors: dict[str, list[Tensor]], *, transposed: bool = False
) -> None:
    """Copy what was gathered, uint8 ``[R * layout.nbytes]``, into the tensors of the whole faces.

    Args:
        plan: How the weight is gathered.
        layout: What each rank sent.
        received: What all ranks sent.
        tensors: Of each face.
        transposed: Whether the elements of the rowwise face are written into the columnwise one, too; its scales are
            left to ``transpose_scales_``.
    """
    num_ranks = plan.num_ranks
    by_rank = received.view(num_ranks, layout.nbytes)
    for name, piece, begin in layout.parts:
        part = by_rank[:, begin : begin + piece.nbytes].view(piece.dtype)
        part = part.unflatten(1, piece.shape)  # [R, *piece.shape]
        if transposed and name == ROW and piece.index == 0:
            row, column = (_bytewise(tensors[direction][0]) for direction in (ROW, COLUMN))
            transpose(_bytewise(part), row=row, column=column, bits=8 // plan.row.format.elements_per_byte)
            continue
        if piece.rows_per_block:
            of_blocks = _bytewise(part).movedim(1 + piece.dim, 1).flatten(0, 1)  # [R * blocks that a shard touches, ..]
            chosen = of_blocks.index_select(0, _positions(plan.rows, num_ranks, piece, part.device))
            _copy_(tensors[name][piece.index], chosen.movedim(0, piece.dim))
            continue
        whole = tensors[name][piece.index].unflatten(piece.dim, (num_ranks, piece.shape[piece.dim]))
        _copy_(whole, part if piece.dim == 0 else part.transpose(0, 1))


@functools.lru_cache(maxsize=1024)
def _positions(rows: int, num_ranks: int, piece: Piece, device: torch.device) -> Tensor:
    """Return where the scale of each block is among those that all ranks sent; of a cut block all have the same."""
    block, most = piece.rows_per_block, piece.shape[piece.dim]
    ranks = [first // rows for first in range(0, rows * num_ranks, block)]  # the rank of each block's first row
    return torch.tensor([r * most + b - r * rows // block for b, r in enumerate(ranks)], device=device)


def _bytewise(tensor: Tensor) -> Tensor:
    """Return a view as bytes where elements are bytes: not every dtype of one byte can be copied everywhere."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _copy_(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of one shape and dtype, eight bytes at once where both lie so: torch copies element by element."""
    target, source = _bytewise(target), _bytewise(source)
    if _is_of_words(target) and _is_of_words(source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _is_of_words(tensor: Tensor) -> bool:
    """Whether bytes can be viewed as words of 64 bits."""
    counts = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.dtype == torch.uint8 and tensor.stride(-1) == 1 and all(count % 8 == 0 for count in counts)


def shared(fmt: Format, direction: str, operand: Operand) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensors of a face that all shards share, with their index: they do not travel."""
    travelling = {piece.index for piece in pieces(fmt, direction, 128, 128)}
    for index, tensor in enumerate(operand[1:3], start=1):
        if isinstance(tensor, Tensor) and index not in travelling:
            yield index, tensor


def cut_out(operand: Operand, direction: str, first: int, rows: int) -> list[Tensor]:
    """Return the tensors of a face of ``rows`` rows from ``first`` on, of a face that was made of more."""
    fmt, dim = operand.format, 0 if direction != COLUMN else 1
    packed = fmt.elements_per_byte if dim == 1 else 1
    tensors = [operand.data.narrow(dim, first // packed, rows // packed)]
    for tensor, block in ((operand.scale, fmt.block), (operand.tensor_scale, fmt.tensor_block)):
        if tensor is not None and block is not None:
            extent = block[dim]
            if extent is not None:
                start = first // extent
                tensor = tensor.narrow(dim, start, -(-(first + rows) // extent) - start)
            tensors.append(tensor)
    return tensors


def transpose_scales_(column: list[Tensor], row: list[Tensor]) -> None:
    """Fill the scales of a columnwise face whose rowwise face is its transpose."""
    for target, source in zip(column[1:], row[1:], strict=True):
        _copy_(target, source.t())

"""How the tokens of ranks follow each other, and the gathers that put their faces together.

Shape letters: ``B`` sequences, ``R`` ranks, ``s`` tokens of a sequence on a rank, ``K`` features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.plan import ROW, pieces
from hybridtensor.ops import Face

c10d = torch.ops._c10d_functional


class _Piece(NamedTuple):
    """A tensor of a face that travels.

    Attributes:
        which: Its place among the face's tensors.
        memory: Its elements as they lie in memory, a contiguous matrix, as bytes where backends
            know no such numbers.
        axis: Along which axis of that matrix tokens follow each other.
        by_block: Whether it is the transpose of the tensor.
        dtype: That of the tensor.
    """

    which: int
    memory: Tensor
    axis: int
    by_block: bool
    dtype: torch.dtype


def _travelling(face: Face, direction: str) -> list[_Piece]:
    """Return what travels of a face of a rank's tokens: all but what all ranks have alike."""
    tensors, along = face.tensors(), 0 if direction == ROW else 1
    if face.scale is None:  # values lie as those of the rowwise face, whichever it is
        values = tensors[0].contiguous()
        return [_Piece(0, values, 0, False, values.dtype)]
    other, contraction = tensors[0].shape
    contraction *= face.format.elements_per_byte
    rows, columns = (other, contraction) if along == 0 else (contraction, other)
    found = []
    for piece in pieces(face.format, direction, rows, columns):
        tensor = tensors[piece.index]
        memory = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        memory = (memory.t() if piece.by_block else memory).contiguous()
        axis = 1 - along if piece.by_block else along
        found.append(_Piece(piece.index, memory, axis, piece.by_block, tensor.dtype))
    return found


@dataclass(frozen=True)
class SequenceLayout:
    """``[B * s, K]`` on each of ``R`` ranks; the whole has ``[B, R, s]`` tokens in this order.

    Attributes:
        group: Name of the process group.
        num_ranks: ``R``.
        num_sequences: ``B``; 1 where the sequence is the first dimension.
    """

    group: str
    num_ranks: int
    num_sequences: int

    def start(self, face: Face, direction: str) -> list[Tensor]:
        """Begin to gather what travels of a face of this rank's tokens."""
        return [
            c10d.all_gather_into_tensor(piece.memory, self.num_ranks, self.group)
            for piece in _travelling(face, direction)
        ]

    def finish(self, face: Face, direction: str, parts: list[Tensor]) -> Face:
        """Return the face of all tokens.

        Args:
            face: That of this rank's tokens.
            direction: Which one it is.
            parts: What ``start`` returned.
        """
        tensors = list(face.tensors())
        for piece, part in zip(_travelling(face, direction), parts, strict=True):
            gathered = c10d.wait_tensor(part).view(self.num_ranks, *piece.memory.shape)
            whole = self._in_order(gathered, piece.axis).view(piece.dtype)
            tensors[piece.which] = whole.t() if piece.by_block else whole
        return Face.of(tensors, face.kind)

    def _in_order(self, gathered: Tensor, axis: int) -> Tensor:
        """Return parts ``[R, a, b]``, whose tokens are along ``axis`` of ``[a, b]``, one after the
        other.
        """
        ranks, a, b = gathered.shape
        batch = self.num_sequences
        if axis == 0:
            if batch == 1:
                return gathered.reshape(ranks * a, b)
            split = gathered.view(ranks, batch, a // batch, b)
            return split.transpose(0, 1).reshape(ranks * a, b)
        split = gathered.view(ranks, a, batch, b // batch)
        return split.permute(1, 2, 0, 3).reshape(a, ranks * b)

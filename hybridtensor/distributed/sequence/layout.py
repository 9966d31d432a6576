"""How the tokens of ranks follow each other, and the gathers that put their faces together.

Shape letters: ``B`` sequences, ``R`` ranks, ``s`` tokens of a sequence on a rank, ``K`` features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.plan import ROW
from hybridtensor.ops import Face
from hybridtensor.ops.face import bytewise

c10d = torch.ops._c10d_functional


class _Piece(NamedTuple):
    """A tensor of a face that is sent, as a contiguous matrix whose tokens lie along ``axis``."""

    which: int
    tensor: Tensor
    axis: int
    by_block: bool = False

    @property
    def memory(self) -> Tensor:
        """What is sent; a copy if the tensor lies otherwise."""
        memory = self.tensor.view(torch.uint8) if _as_bytes(self.tensor) else self.tensor
        return (memory.t() if self.by_block else memory).contiguous()


def _sent_pieces(face: Face, direction: str) -> list[_Piece]:
    """Return the tensors of a face that are sent; those equal on all ranks are not."""
    tensors, along, fmt = face.tensors(), 0 if direction == ROW else 1, face.format
    if face.scale is None:  # values lie as those of the rowwise face, whichever it is
        return [_Piece(0, tensors[0], 0)]
    sent = [True, fmt.block[along] is not None]
    if fmt.tensor_block is not None:
        sent.append(fmt.tensor_block[along] is not None)
    found = []
    for which, tensor in enumerate(tensors):
        if sent[which]:
            # Scales of 1 x n lie block by block (``face_layouts``): transposed they are contiguous, and are sent
            # without a copy.
            by_block = which == 1 and fmt.block[0] == 1 and fmt.block[1] is not None
            found.append(_Piece(which, tensor, 1 - along if by_block else along, by_block))
    return found


def _as_bytes(tensor: Tensor) -> bool:
    """Return whether a dtype must be sent as bytes: NCCL supports FP8, gloo does not."""
    known = tensor.is_cuda and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return tensor.itemsize == 1 and not known


@dataclass(frozen=True)
class SequenceLayout:
    """``[B * s, K]`` on each of ``R`` ranks; the whole has ``[B, R, s]`` tokens in this order.

    Attributes:
        group: Name of the process group.
        num_ranks: ``R``.
        batched: Whether sequences are behind a batch; otherwise ``B`` is 1.
    """

    group: str
    num_ranks: int
    batched: bool

    def start(self, face: Face, direction: str) -> list[Tensor]:
        parts = []
        for piece in _sent_pieces(face, direction):
            part = c10d.all_gather_into_tensor(piece.memory, self.num_ranks, self.group)
            # gloo of torch 2.11 corrupts memory where several of these gathers are in flight: on 16 cores three at a
            # time crash within a minute, and one at a time does not.
            parts.append(c10d.wait_tensor(part) if part.is_cpu else part)
        return parts

    def finish(self, face: Face, direction: str, parts: list[Tensor], shape: torch.Size) -> Face:
        """Return the face of all tokens from ``parts`` that ``start`` returned."""
        batch = shape[0] if self.batched else 1
        tensors = list(face.tensors())
        for piece, part in zip(_sent_pieces(face, direction), parts, strict=True):
            whole = c10d.wait_tensor(part)
            if piece.axis or batch != 1:  # else no view: compilers look for products of a gather
                whole = self._in_order(whole, piece.axis, batch)
            if whole.dtype != piece.tensor.dtype:
                whole = whole.view(piece.tensor.dtype)
            tensors[piece.which] = whole.t() if piece.by_block else whole
        return Face.of(tensors, face.kind)

    def _in_order(self, gathered: Tensor, axis: int, batch: int) -> Tensor:
        """Return ``[R * a, b]`` with the ranks' tokens along ``axis`` in the order of the sequence."""
        gathered = bytewise(gathered)
        ranks, a, b = self.num_ranks, gathered.shape[0] // self.num_ranks, gathered.shape[1]
        if axis == 0:
            split = gathered.view(ranks, batch, a // batch, b)
            return split.transpose(0, 1).reshape(ranks * a, b)
        split = gathered.view(ranks, a, batch, b // batch)
        return split.permute(1, 2, 0, 3).reshape(a, ranks * b)

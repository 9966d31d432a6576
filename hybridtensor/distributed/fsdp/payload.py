"""The bytes of a shard on the wire.

A shard sends one flat tensor of bytes: the tensors of the faces that are wanted, one after the
other, each from a multiple of 16 on and as casts lay it out (``Wire``). Faces are cast straight
into that tensor, which is kept until the shard is written again (``Payload``): backward, and every
further microbatch, send what forward made.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.agreement import Place, place_of
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Piece, Plan, pieces
from hybridtensor.distributed.fsdp.stack_plan import stack_pieces
from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.ops import CastInputs, Face, PreparedCast
from hybridtensor.ops.face import face_layouts
from hybridtensor.ops.groups import stack_layouts

_ALIGNMENT = 16
_DIRECTIONS = (ROW, COLUMN)


@dataclass(frozen=True)
class Wire:
    """What a shard sends.

    Attributes:
        parts: ``"rowwise"``, ``"columnwise"`` or ``"values"``, the tensor, and where it begins.
        nbytes: Bytes of all.
    """

    parts: tuple[tuple[str, Piece, int], ...]
    nbytes: int

    def stretch(self, names: tuple[str, ...]) -> tuple[int, int]:
        """Return begin and end of the parts of neighbouring names, in bytes."""
        begins = [begin for name, _, begin in self.parts if name in names]
        after = [begin for name, _, begin in self.parts if begin > begins[-1]]
        return begins[0], after[0] if after else self.nbytes


@functools.lru_cache(maxsize=1024)
def wire(plan: Plan, sent: tuple[str, ...], dtype: torch.dtype) -> Wire:
    """Lay out what ``plan.sends`` named; values have ``dtype``."""
    parts, begin = [], 0
    for name in sent:
        of_face: tuple[Piece, ...] = (Piece(0, (plan.rows, plan.columns), dtype, 0),)
        if name != "values" and plan.matrix is not None:
            of_face = stack_pieces(plan.face(name).format, name, plan.rows, plan.matrix)
        elif name != "values":
            of_face = pieces(plan.face(name).format, name, plan.rows, plan.columns)
        for piece in of_face:
            parts.append((name, piece, begin))
            begin += math.ceil(piece.nbytes / _ALIGNMENT) * _ALIGNMENT
    return Wire(tuple(parts), begin)


def bytes_per_rank(
    plan: Plan, rowwise: bool, columnwise: bool, dtype: torch.dtype, master: torch.dtype
) -> int:
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


class Remake(NamedTuple):
    """A cast that makes the bytes of a payload again.

    Attributes:
        cast: The cast.
        inputs: What it needs beside the part.
        out: The tensors of the payload.
    """

    cast: PreparedCast
    inputs: CastInputs
    out: list[Tensor]

    def run(self, part: Tensor) -> None:
        """Make the bytes of a part that lies as the first one did."""
        self.cast.run_into(part, self.out, self.inputs)


class Payload:
    """What a shard sends: its bytes, and tensors of its faces that do not travel, because all
    shards have them alike.

    Args:
        plan: How the weight is gathered.
        names: What ``plan.sends`` names, all that may be asked for.
        dtype: Of the computation.
        device: Where it is gathered.

    Attributes:
        plan: The same.
        names: The same.
        dtype: The same.
        tensors: Of each name; those that travel are views of the bytes.
        alike: Those that do not travel, by name and index.
        key: What the bytes were made from, or None: a payload that is sent once.
    """

    def __init__(
        self, plan: Plan, names: tuple[str, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.plan, self.names, self.dtype = plan, names, dtype
        self.key: tuple[object, ...] | None = None
        self.tensors: dict[str, list[Tensor]] = {}
        self.alike: dict[tuple[str, int], Tensor] = {}
        self._layout = wire(plan, names, dtype)
        self._bytes = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=device)
        self._stretches: dict[tuple[str, ...], Tensor] = {}
        self._order = StreamOrder()
        self._again: Remake | None = None
        self._inputs: tuple[Place | None, tuple[object, ...]] = None, ()
        for name in names:
            self.tensors[name] = list(self._travelling(name))
            if name in _DIRECTIONS and plan.matrix is None:
                self._add_alike(name, device)

    def _travelling(self, name: str) -> list[Tensor]:
        """Return views of the bytes."""
        return [
            self._bytes[begin : begin + piece.nbytes]
            .view(piece.dtype)
            .as_strided(piece.shape, piece.strides)
            for of, piece, begin in self._layout.parts
            if of == name
        ]

    def _add_alike(self, name: str, device: torch.device) -> None:
        """Put the tensors that do not travel where they belong in a face."""
        fmt, matrix = self.plan.face(name).format, (self.plan.rows, self.plan.columns)
        travelling = {piece.index for of, piece, _ in self._layout.parts if of == name}
        for index, layout in enumerate(
            face_layouts(fmt, *(matrix if name == ROW else matrix[::-1]))
        ):
            if index not in travelling:
                self.alike[name, index] = layout.empty(device)
                self.tensors[name].insert(index, self.alike[name, index])

    def remake(self, part: Tensor, others: tuple[object, ...]) -> bool:
        """Make the bytes of ``part`` again; False if they were not kept for it and ``others``."""
        known, inputs = self._inputs
        same = (
            known == place_of(part)
            and len(inputs) == len(others)
            and all(map(operator.is_, inputs, others))
        )
        if self._again is None or not same:
            return False
        self._again.run(part)
        return True

    def keep(self, again: Remake | None, part: Tensor, others: tuple[object, ...]) -> None:
        """Keep what made the bytes of ``part`` and ``others``.

        The part is not kept alive: it is the rank's high-precision weight, which may be moved to
        another device.
        """
        self._again, self._inputs = again, (place_of(part), others)

    def fill(self, name: str, face: Face, first: int, rows: int) -> None:
        """Take a face of ``rows`` rows from ``first`` on, of a face that was made of more; of a stack
        all of it.
        """
        targets = self.tensors[name]
        if self.plan.matrix is not None:
            matrix = self.plan.matrix if name == ROW else self.plan.matrix[::-1]
            layouts = stack_layouts(face.format, self.plan.rows, *matrix)
            for target, source, layout in zip(targets, face.tensors(), layouts, strict=True):
                of_face = target.as_strided(layout.shape, layout.strides)
                bytewise(of_face).copy_(bytewise(source))
            return
        sources = face.cut(0 if name == ROW else 1, first, rows).tensors()
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            piece = next(
                (p for of, p, _ in self._layout.parts if (of, p.index) == (name, index)), None
            )
            if piece is not None and piece.rows_per_block:
                target = target.narrow(piece.dim, 0, source.shape[piece.dim])
            bytewise(target).copy_(bytewise(source))

    def sent(self, names: tuple[str, ...]) -> Tensor:
        """Return the bytes of neighbouring names, uint8 ``[bytes]``."""
        if names == self.names:
            return self._bytes
        if names not in self._stretches:
            begin, end = self._layout.stretch(names)
            self._stretches[names] = self._bytes[begin:end]
        return self._stretches[names]

    def order(self) -> None:
        """Let what follows on this stream wait for what the last user's stream does with the bytes."""
        self._order.take(self._bytes, *self.alike.values())


def by_expert(tensor: Tensor) -> Tensor:
    """Return a tensor of a stack's face as it lies in memory, a row for each expert."""
    count, elements = tensor.shape[0], math.prod(tensor.shape[1:])
    return tensor.as_strided((count, elements), (elements, 1))


def bytewise(tensor: Tensor) -> Tensor:
    """Return a view as bytes where elements are bytes: not every dtype of one byte can be copied
    everywhere.
    """
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class Sent(NamedTuple):
    """What a gather leaves for its second half.

    Attributes:
        wanted: Whether the rowwise face was asked for, and the columnwise one.
        names: What the bytes are, as ``plan.sends`` names it.
        payload: What they are part of; None if values travelled whole.
    """

    wanted: tuple[bool, bool]
    names: tuple[str, ...]
    payload: Payload | None

"""The bytes of shards on the wire.

The shards that a rank gathers together send one flat tensor of bytes: of every face that is wanted
its tensors, one weight after the other, each from a multiple of 16 on and as casts lay it out
(``Wire``). Faces are cast straight into that tensor, which is kept until a shard is written again
(``Payload``): backward, and every further microbatch, send what forward made.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.agreement import Place, place_of
from hybridtensor.distributed.fsdp.plan import COLUMN, ROW, Piece, Plan, pieces
from hybridtensor.distributed.fsdp.stack_plan import stack_pieces
from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.distributed.fsdp.torch_compat import alloc_storage, free_storage
from hybridtensor.ops import CastInputs, Face, PreparedCast, PreparedList
from hybridtensor.ops.face import face_layouts
from hybridtensor.ops.groups import stack_layouts

_ALIGNMENT = 16
_DIRECTIONS = (ROW, COLUMN)


class Sending(NamedTuple):
    """What is sent of one weight.

    Attributes:
        plan: How the weight is gathered.
        names: What ``plan.sends`` names, all that may be asked for.
        dtype: Of the computation.
    """

    plan: Plan
    names: tuple[str, ...]
    dtype: torch.dtype

    def joined(self, other: Sending) -> Sending:
        """Return the same with the names of another one, too."""
        return self._replace(names=tuple(dict.fromkeys((*other.names, *self.names))))


class Slot(NamedTuple):
    """A tensor in what is sent.

    Attributes:
        weight: Index of the weight.
        name: ``"rowwise"``, ``"columnwise"`` or ``"values"``.
        piece: The tensor.
        begin: Where it begins, in bytes.
        end: Where the next one begins.
    """

    weight: int
    name: str
    piece: Piece
    begin: int
    end: int


@dataclass(frozen=True)
class Wire:
    """What shards send.

    Attributes:
        slots: One after the other: of each name those of all weights.
        nbytes: Bytes of all.
    """

    slots: tuple[Slot, ...]
    nbytes: int

    def stretches(self, asked: Sequence[tuple[str, ...]]) -> list[Stretch]:
        """Return the stretches of neighbouring slots, of the names asked for of each weight."""
        found: list[list[Slot]] = []
        for slot in self.slots:
            if slot.name in asked[slot.weight]:
                if not found or found[-1][-1].end != slot.begin:
                    found.append([])
                found[-1].append(slot)
        return [Stretch(tuple(slots)) for slots in found]


class Stretch(NamedTuple):
    """Slots of what is sent, and what lies between them.

    Attributes:
        slots: The slots, in order.
    """

    slots: tuple[Slot, ...]

    @property
    def begin(self) -> int:
        """Where it begins, in bytes."""
        return self.slots[0].begin

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.slots[-1].end - self.begin


@functools.lru_cache(maxsize=1024)
def wire(sendings: tuple[Sending, ...]) -> Wire:
    """Lay out what is sent of weights; values have the dtype of the computation."""
    slots, begin = [], 0
    for name in (*_DIRECTIONS, "values"):
        for weight, sending in enumerate(sendings):
            for piece in _pieces(sending, name) if name in sending.names else ():
                end = begin + math.ceil(piece.nbytes / _ALIGNMENT) * _ALIGNMENT
                slots.append(Slot(weight, name, piece, begin, end))
                begin = end
    return Wire(tuple(slots), begin)


def _pieces(sending: Sending, name: str) -> tuple[Piece, ...]:
    """Return the tensors of a name that are sent."""
    plan = sending.plan
    if name == "values":
        return (Piece(0, (plan.rows, plan.columns), sending.dtype, 0),)
    if plan.matrix is not None:
        return stack_pieces(plan.face(name).format, name, plan.rows, plan.matrix)
    return pieces(plan.face(name).format, name, plan.rows, plan.columns)


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
    return wire((Sending(plan, sent, dtype),)).nbytes


class Remake:
    """A cast that makes the bytes of a weight.

    Args:
        cast: The cast.
        inputs: What it needs beside the part.
        out: Where it puts them.
    """

    def __init__(self, cast: PreparedCast, inputs: CastInputs, out: list[Tensor]) -> None:
        self.cast, self.inputs, self.out = cast, inputs, out

    def run(self, values: Tensor) -> None:
        """Make the bytes from values that lie as the first ones did."""
        self.cast.run_into(values, self.out, self.inputs)

    def kind(self) -> tuple[object, ...]:
        """Return the key of casts that one launch can do together."""
        return self.cast.request, tuple([given is None for given in self.inputs])


class Share:
    """What is sent of one weight, in the bytes of all: tensors of its faces, also those that are not sent, because
    all shards have them alike.

    Args:
        sending: What is sent of it.
        slots: Where.
        memory: The bytes of all.

    Attributes:
        sending: The same.
        tensors: Of each name; those that are sent are views of the bytes.
        alike: Those that are not sent, by name and index.
        seen: What the bytes were made from, or None.
        of: The tensor that the bytes were made from.
    """

    def __init__(self, sending: Sending, slots: Sequence[Slot], memory: Tensor) -> None:
        self.sending, self._slots = sending, slots
        self.seen: object = None
        self.of: weakref.ref[Tensor] | None = None
        self.tensors: dict[str, list[Tensor]] = {}
        self.alike: dict[tuple[str, int], Tensor] = {}
        self._again: Remake | None = None
        self._inputs: tuple[Place | None, tuple[object, ...]] = None, ()
        for name in sending.names:
            self.tensors[name] = [
                memory[slot.begin : slot.begin + slot.piece.nbytes]
                .view(slot.piece.dtype)
                .as_strided(slot.piece.shape, slot.piece.strides)
                for slot in slots
                if slot.name == name
            ]
            if name in _DIRECTIONS and sending.plan.matrix is None:
                self._add_alike(name, memory.device)

    def _add_alike(self, name: str, device: torch.device) -> None:
        """Put the tensors that are not sent where they belong in a face."""
        plan = self.sending.plan
        matrix = (plan.rows, plan.columns) if name == ROW else (plan.columns, plan.rows)
        sent = {slot.piece.index for slot in self._slots if slot.name == name}
        for index, layout in enumerate(face_layouts(plan.face(name).format, *matrix)):
            if index not in sent:
                self.alike[name, index] = layout.empty(device)
                self.tensors[name].insert(index, self.alike[name, index])

    def again(self, part: Tensor, others: tuple[object, ...]) -> Remake | None:
        """Return the cached cast that requantizes ``part``; None if it was made for another part or ``others``."""
        known, inputs = self._inputs
        same = (
            known == place_of(part)
            and len(inputs) == len(others)
            and all(map(operator.is_, inputs, others))
        )
        return self._again if same else None

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
        targets, plan = self.tensors[name], self.sending.plan
        if plan.matrix is not None:
            matrix = plan.matrix if name == ROW else plan.matrix[::-1]
            layouts = stack_layouts(face.format, plan.rows, *matrix)
            for target, source, layout in zip(targets, face.tensors(), layouts, strict=True):
                of_face = target.as_strided(layout.shape, layout.strides)
                bytewise(of_face).copy_(bytewise(source))
            return
        sources = face.cut(0 if name == ROW else 1, first, rows).tensors()
        pieces_of_face = [slot.piece for slot in self._slots if slot.name == name]
        cut = {piece.index: piece.dim for piece in pieces_of_face if piece.rows_per_block}
        for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
            if index in cut:
                target = target.narrow(cut[index], 0, source.shape[cut[index]])
            bytewise(target).copy_(bytewise(source))


class Payload:
    """What a rank sends of weights that are gathered together.

    Args:
        sendings: What of each.
        device: Where they are gathered.

    Attributes:
        sendings: The same.
        layout: Where everything is.
        shares: Of each weight.
        time: Time of the group as of which the bytes are what is to be sent.
        answers: What was made of the bytes for each kind of gather, which nobody else keeps alive.
    """

    def __init__(self, sendings: tuple[Sending, ...], device: torch.device) -> None:
        self.sendings, self.layout = sendings, wire(sendings)
        self._bytes = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=device)
        self._order = StreamOrder()
        self.answers: dict[object, Any] = {}
        self.time = -1
        self._casts: tuple[list[Remake], list[tuple[list[int], PreparedList]]] = [], []
        self.shares = [
            Share(sending, [slot for slot in self.layout.slots if slot.weight == i], self._bytes)
            for i, sending in enumerate(sendings)
        ]
        alike = [tensor for share in self.shares for tensor in share.alike.values()]
        self._all = [self._bytes, *alike]

    def sent(self, stretches: Iterable[Stretch]) -> tuple[Tensor, ...]:
        """Return stretches of the bytes, uint8 ``[bytes]`` each."""
        return tuple(self._bytes[one.begin : one.begin + one.nbytes] for one in stretches)

    def cast(self, casts: list[Remake], values: Sequence[Tensor]) -> None:
        """Make the bytes of weights, those of one kind together, from values that lie as the first ones did."""
        if casts != self._casts[0]:
            by_kind: dict[object, list[int]] = {}
            for index, cast in enumerate(casts):
                by_kind.setdefault(cast.kind(), []).append(index)
            self._casts = (
                casts,
                [(found, _together(found, casts, values)) for found in by_kind.values()],
            )
        for indices, prepared in self._casts[1]:
            prepared.run([values[index] for index in indices])

    def acquire(self) -> None:
        """Have memory for the bytes."""
        alloc_storage(self._bytes)

    def release(self) -> None:
        """Have none until they are recomputed."""
        free_storage(self._bytes)

    def order(self) -> None:
        """Let what follows on this stream wait for what the last user's stream does with the bytes."""
        self._order.take(*self._all)


def _together(
    indices: Sequence[int], casts: Sequence[Remake], values: Sequence[Tensor]
) -> PreparedList:
    """Return some of the casts as one."""
    chosen = [casts[index] for index in indices]
    return PreparedList(
        [values[index] for index in indices],
        [one.cast for one in chosen],
        [one.out for one in chosen],
        [one.inputs for one in chosen],
    )


def by_expert(tensor: Tensor) -> Tensor:
    """Return a tensor of a stack's face as it lies in memory, a row for each expert."""
    count, elements = tensor.shape[0], math.prod(tensor.shape[1:])
    return tensor.as_strided((count, elements), (elements, 1))


def bytewise(tensor: Tensor) -> Tensor:
    """Return a view as bytes where elements are bytes: not every dtype of one byte can be copied
    everywhere.
    """
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor

"""The payload of shards that are gathered together.

A rank sends one flat tensor of bytes: the tensors of every requested face, weight by weight, each at a multiple of 16
bytes and in the layout that casts write (``Layout``). Shards are quantized straight into it. Its bytes are valid
until a shard is written, and are then cast again in place (``Payload``): backward, and every further microbatch, send
what forward quantized.

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

from hybridtensor.distributed.fsdp.agreement import MemoryKey, memory_key
from hybridtensor.distributed.fsdp.plan import DIRECTIONS, ROW, Piece, Plan, pieces, stack_pieces
from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.distributed.fsdp.torch_compat import alloc_storage, free_storage
from hybridtensor.ops import CastInputs, Face, PreparedCast, PreparedList
from hybridtensor.ops.face import bytewise, face_layouts
from hybridtensor.ops.groups import stack_layouts

# Kernels are compiled for addresses that are multiples of 16 bytes, on which Triton specializes.
_ALIGNMENT = 16


class Sending(NamedTuple):
    """How one weight is sent: its plan, the tensors that may be requested, and the dtype of the computation."""

    plan: Plan
    names: tuple[str, ...]
    dtype: torch.dtype

    def joined(self, other: Sending) -> Sending:
        """Return the union of two requests for one weight."""
        return self._replace(names=tuple(dict.fromkeys((*other.names, *self.names))))


class Slot(NamedTuple):
    """A tensor in the payload, from byte ``begin`` to ``end``, where the next one begins."""

    weight: int
    name: str
    piece: Piece
    begin: int
    end: int


@dataclass(frozen=True)
class Layout:
    """The layout of a payload: its slots, grouped by name, and its size in bytes."""

    slots: tuple[Slot, ...]
    nbytes: int

    def stretches(self, asked: Sequence[tuple[str, ...]]) -> list[Stretch]:
        """Return contiguous runs of slots for the names requested of each weight."""
        found: list[list[Slot]] = []
        for slot in self.slots:
            if slot.name in asked[slot.weight]:
                if not found or found[-1][-1].end != slot.begin:
                    found.append([])
                found[-1].append(slot)
        return [Stretch(tuple(slots)) for slots in found]


class Stretch(NamedTuple):
    """A contiguous run of slots."""

    slots: tuple[Slot, ...]

    @property
    def begin(self) -> int:
        return self.slots[0].begin

    @property
    def nbytes(self) -> int:
        return self.slots[-1].end - self.begin


@functools.lru_cache(maxsize=1024)
def layout_of(sendings: tuple[Sending, ...]) -> Layout:
    """Lay out the payload of several weights; high-precision values have the dtype of the computation."""
    slots, begin = [], 0
    # By face, then by weight: what a gather of one face sends is then one stretch of bytes.
    for name in (*DIRECTIONS, "values"):
        for weight, sending in enumerate(sendings):
            for piece in _pieces(sending, name) if name in sending.names else ():
                end = begin + math.ceil(piece.nbytes / _ALIGNMENT) * _ALIGNMENT
                slots.append(Slot(weight, name, piece, begin, end))
                begin = end
    return Layout(tuple(slots), begin)


def _pieces(sending: Sending, name: str) -> tuple[Piece, ...]:
    plan = sending.plan
    if name == "values":
        return (Piece(0, (plan.rows, plan.columns), sending.dtype, 0),)
    if plan.matrix is not None:
        return stack_pieces(plan.face(name).format, name, plan.rows, plan.matrix)
    return pieces(plan.face(name).format, name, plan.rows, plan.columns)


class PayloadCast:
    """A prepared cast into the payload, with its inputs besides the local shard."""

    def __init__(self, cast: PreparedCast, inputs: CastInputs, out: list[Tensor]) -> None:
        self.cast, self.inputs, self.out = cast, inputs, out

    def run(self, values: Tensor) -> None:
        """Run the cast for a tensor with the memory layout of the first one."""
        self.cast.run_into(values, self.out, self.inputs)

    def kind(self) -> tuple[object, ...]:
        """Return the key of casts that one launch can do together."""
        return self.cast.request, tuple([given is None for given in self.inputs])


class WeightPayload:
    """One weight's tensors in the payload, as views, and those that need not be sent because all shards have them
    alike."""

    def __init__(self, sending: Sending, slots: Sequence[Slot], memory: Tensor) -> None:
        self.sending, self._slots = sending, slots
        self.contents: object = None
        self.source: weakref.ref[Tensor] | None = None
        self.tensors: dict[str, list[Tensor]] = {}
        self.alike: dict[tuple[str, int], Tensor] = {}
        self._cast: PayloadCast | None = None
        self._inputs: tuple[MemoryKey | None, tuple[object, ...]] = None, ()
        for name in sending.names:
            self.tensors[name] = [
                memory[slot.begin : slot.begin + slot.piece.nbytes]
                .view(slot.piece.dtype)
                .as_strided(slot.piece.shape, slot.piece.strides)
                for slot in slots
                if slot.name == name
            ]
            if name in DIRECTIONS and sending.plan.matrix is None:
                self._add_alike(name, memory.device)

    def _add_alike(self, name: str, device: torch.device) -> None:
        """Add the tensors that are not sent to the faces."""
        plan = self.sending.plan
        matrix = (plan.rows, plan.columns) if name == ROW else (plan.columns, plan.rows)
        sent = {slot.piece.index for slot in self._slots if slot.name == name}
        for index, layout in enumerate(face_layouts(plan.face(name).format, *matrix)):
            if index not in sent:
                # Its place among the others is that in ``Face.tensors()``, the order in which casts
                # write.
                self.alike[name, index] = layout.empty(device)
                self.tensors[name].insert(index, self.alike[name, index])

    def cached_cast(self, part: Tensor, others: tuple[object, ...]) -> PayloadCast | None:
        """Return the cached cast that requantizes ``part``; None if it was made for another part or ``others``."""
        # Identity is enough, and does not read the device: a prepared cast holds addresses, so that
        # a new tensor needs a new cast even if its values are equal.
        known, inputs = self._inputs
        same = (
            known == memory_key(part)
            and len(inputs) == len(others)
            and all(map(operator.is_, inputs, others))
        )
        return self._cast if same else None

    def cache_cast(
        self, cast: PayloadCast | None, part: Tensor, others: tuple[object, ...]
    ) -> None:
        """Record the cast of ``part``, by its memory, and ``others``."""
        self._cast, self._inputs = cast, (memory_key(part), others)

    def fill(self, name: str, face: Face, first: int, rows: int) -> None:
        """Copy rows ``first`` to ``first + rows`` of a quantized face into the payload; of a stack all of it."""
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
    """What a rank sends of weights that are gathered together: one byte tensor, its layout, and views for each
    weight."""

    def __init__(self, sendings: tuple[Sending, ...], device: torch.device) -> None:
        self.sendings, self.layout = sendings, layout_of(sendings)
        self._bytes = torch.empty(self.layout.nbytes, dtype=torch.uint8, device=device)
        self._order = StreamOrder()
        self.gathers: dict[object, Any] = {}
        self.generation = -1
        self._casts: tuple[list[PayloadCast], list[tuple[list[int], PreparedList]]] = [], []
        self.weights = [
            WeightPayload(
                sending, [slot for slot in self.layout.slots if slot.weight == i], self._bytes
            )
            for i, sending in enumerate(sendings)
        ]
        alike = [tensor for each in self.weights for tensor in each.alike.values()]
        self._all = [self._bytes, *alike]

    def sent(self, stretches: Iterable[Stretch]) -> tuple[Tensor, ...]:
        return tuple(self._bytes[one.begin : one.begin + one.nbytes] for one in stretches)

    def cast(self, casts: list[PayloadCast], values: Sequence[Tensor]) -> None:
        """Run the casts of weights, those with one key in one launch, for tensors with the memory layout of the
        first ones."""
        # Casts have no ``__eq__``: lists are equal if they hold the same objects, those of the last
        # step.
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
        """Allocate the storage of the bytes."""
        # Of a payload that is sent once: between gathers it holds no memory, while its views stay
        # valid.
        alloc_storage(self._bytes)

    def release(self) -> None:
        """Free the storage until the bytes are recomputed."""
        free_storage(self._bytes)

    def order(self) -> None:
        """Make the current stream wait for the last stream that used the bytes."""
        self._order.wait_for_last_use(*self._all)


def _together(
    indices: Sequence[int], casts: Sequence[PayloadCast], values: Sequence[Tensor]
) -> PreparedList:
    """Return one cast that does several."""
    chosen = [casts[index] for index in indices]
    return PreparedList(
        [values[index] for index in indices],
        [one.cast for one in chosen],
        [one.out for one in chosen],
        [one.inputs for one in chosen],
    )

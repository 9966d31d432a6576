"""The bytes of a shard on the wire.

A shard sends one flat tensor of bytes: the tensors of the faces that are wanted, one after the other, each from a
multiple of 16 on and as casts lay it out (``Wire``). Faces are cast straight into that tensor, which is kept until the
shard is written again (``Payload``): backward, and every further microbatch, send what forward made.

Shape letters: ``R`` ranks.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridtensor.distributed.agreement import place_of
from hybridtensor.distributed.plan import COLUMN, ROW, Piece, Plan, pieces
from hybridtensor.distributed.streams import Turns
from hybridtensor.ops import Cast, Operand
from hybridtensor.ops.cast import face_layouts

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
        """Return where the parts of neighbouring names begin and end."""
        begins = [begin for name, _, begin in self.parts if name in names]
        after = [begin for name, _, begin in self.parts if begin > begins[-1]]
        return begins[0], after[0] if after else self.nbytes


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


class Payload:
    """What a shard sends: its bytes, and tensors of its faces that do not travel, because all shards have them alike.

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

    def __init__(self, plan: Plan, names: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.plan, self.names, self.dtype = plan, names, dtype
        self.key: Any = None
        self.tensors: dict[str, list[Tensor]] = {}
        self.alike: dict[tuple[str, int], Tensor] = {}
        self._layout = wire(plan, names, dtype)
        self._bytes = torch.empty(self._layout.nbytes, dtype=torch.uint8, device=device)
        self._stretches: dict[tuple[str, ...], Tensor] = {}
        self._turns = Turns()
        self._again: Callable[[Tensor], None] | None = None
        self._inputs: tuple[Any, tuple[Any, ...]] = None, ()
        for name in names:
            self.tensors[name] = list(self._travelling(name))
            if name in _DIRECTIONS:
                self._add_alike(name, device)

    def _travelling(self, name: str) -> list[Tensor]:
        """Return views of the bytes."""
        return [
            self._bytes[begin : begin + piece.nbytes].view(piece.dtype).as_strided(piece.shape, piece.strides)
            for of, piece, begin in self._layout.parts
            if of == name
        ]

    def _add_alike(self, name: str, device: torch.device) -> None:
        """Put the tensors that do not travel where they belong in a face."""
        fmt, matrix = self.plan.face(name).format, (self.plan.rows, self.plan.columns)
        travelling = {piece.index for of, piece, _ in self._layout.parts if of == name}
        for index, layout in enumerate(face_layouts(Cast(fmt.name), *(matrix if name == ROW else matrix[::-1]))):
            if index not in travelling:
                self.alike[name, index] = layout.empty(device)
                self.tensors[name].insert(index, self.alike[name, index])

    def remake(
        self, part: Tensor, others: tuple[Any, ...], make: Callable[[], Callable[[Tensor], None] | None]
    ) -> None:
        """Make the bytes of ``part`` and ``others``: by what ``make`` returned for the same tensors, or by ``make()``.

        The part is not kept alive: it is the rank's high-precision weight, which may be moved to another device.
        """
        known, inputs = self._inputs
        same = known == place_of(part) and len(inputs) == len(others) and all(map(operator.is_, inputs, others))
        if self._again is not None and same:
            self._again(part)
        else:
            self._again, self._inputs = make(), (place_of(part), others)

    def fill(self, name: str, operand: Operand, first: int, rows: int) -> None:
        """Take a face of ``rows`` rows from ``first`` on, of a face that was made of more."""
        targets = self.tensors[name]
        for index, (target, source) in enumerate(zip(targets, cut_out(operand, name, first, rows), strict=True)):
            piece = next((p for of, p, _ in self._layout.parts if (of, p.index) == (name, index)), None)
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
        self._turns.take(self._bytes, *self.alike.values())


def bytewise(tensor: Tensor) -> Tensor:
    """Return a view as bytes where elements are bytes: not every dtype of one byte can be copied everywhere."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


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

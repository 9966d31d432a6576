"""What is known of the operands of one forward and of its backward: their values, as far as they are here.

Of a stack of experts one is measured in each forward, the next one from sample to sample: its tokens and
its weight are those of a linear layer, and its faces are cut out of those of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops import Face, Groups
from hybridtensor.ops.groups import Group, cut_columns, cut_rows, each_group, matrix_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.wrapper import WrapperTensor

_ALIGNED = 128  # no block of a format is longer
_KEPT = 128  # features of an input that are kept until backward


class Values(NamedTuple):
    """Values of an operand that are known here.

    Attributes:
        matrix: ``[rows, columns]``; of experts, those of the one that is measured.
        amaxes: Largest magnitudes, NaN where there is one, ``[1]``; of experts, of each that is known.
        place: Which of the layer's places the first of these is for.
        first: The first of these rows, or columns, in the operand.
        dim: The axis of the operand that is known in part, of a weight that ranks share, or None.
    """

    matrix: Tensor
    amaxes: Tensor
    place: int = 0
    first: int = 0
    dim: int | None = None


class Expert(NamedTuple):
    """The expert that is measured in a forward.

    Attributes:
        group: Its tokens.
        every: The tokens of each of this rank's experts.
        first: Number of the first of them among all experts of the layer.
    """

    group: Group
    every: Sequence[Group]
    first: int

    @property
    def place(self) -> int:
        """Which of the layer's places it has."""
        return 1 + self.first + self.group.number

    def tokens(self, matrix: Tensor) -> Values:
        """Return the values of its tokens, without those of no expert."""
        rows = torch.linalg.vector_norm(matrix, torch.inf, dim=1).float()
        sizes = [group.stop - group.start for group in self.every]
        lengths = torch.tensor(sizes, device=rows.device)
        amaxes = torch.segment_reduce(rows[: sum(sizes)], "max", lengths=lengths, initial=0)
        return Values(matrix[self.group.start : self.group.stop], amaxes, 1 + self.first)

    def weight(self, part: _Part) -> Values | None:
        """Return the values of its weight, or None if they are on another rank."""
        if self.group.number not in part.experts:
            return None
        index = self.group.number - part.experts.start
        amaxes = torch.linalg.vector_norm(part.values, torch.inf, dim=(1, 2)).float()
        place = 1 + self.first + part.experts.start
        first, dim = (part.first, part.dim - 1) if part.dim else (0, None)
        return Values(part.values[index], amaxes, place, first, dim)

    def face(self, face: Face, role: str, direction: str) -> Face:
        """Return its face, of that of all."""
        if role == "weight":
            return matrix_of(face, self.group.number)
        return (cut_rows if direction == "rowwise" else cut_columns)(face, self.group)


class Call:
    """What is known of one forward until its backward.

    Args:
        key: What stands for it.
        turn: Which sample this is: says which stretch is measured.

    Attributes:
        key: The same, held, so that no other one gets its address.
        expert: Which expert is measured, once the forward has its product.
        operands: Values of operands, by role; that of the input until the forward has its product.
        input_columns: A stretch of the input's features for backward, ``[features, tokens]``; where it begins.
    """

    def __init__(self, key: object, turn: int) -> None:
        self.key = key
        self.expert: Expert | None = None
        self.operands: dict[str, Values] = {}
        self.input_columns: tuple[Values, int] | None = None
        self._turn = turn
        self._noted: dict[str, Tensor] = {}

    @property
    def place(self) -> int:
        """Which of the layer's places is measured."""
        return 0 if self.expert is None else self.expert.place

    def note(self, role: str, values: Tensor) -> None:
        """Record an operand."""
        self._noted[role] = values

    def choose(self, groups: Groups, rows: int) -> None:
        """Choose the expert that is measured, if one has tokens. Waits for the device that has the offsets.

        It is the next one whose weight is known here; without tokens for any of those, the next one.

        Args:
            groups: Which tokens belong to which expert.
            rows: Tokens, with those of no expert.
        """
        every = each_group(groups, rows)
        part = _part_of(self._noted.get("weight"))
        for known in (range(0) if part is None else part.experts, range(len(every))):
            for i in range(len(known)):
                group = every[known[(self._turn + i) % len(known)]]
                if group.start < group.stop:
                    self.expert = Expert(group, every, groups.first)
                    self._turn //= len(known)
                    return

    def take(self) -> None:
        """Take the values of what was noted."""
        for role, noted in self._noted.items():
            known = self._weight(noted) if role == "weight" else self._tokens(noted)
            if known is not None and known.matrix.numel():
                self.operands[role] = known
                if role == "input":
                    first, count = self.stretch(known.matrix.shape[1], _KEPT)
                    columns = known.matrix[:, first : first + count].t().contiguous()
                    self.input_columns = known._replace(matrix=columns), first
        self._noted.clear()

    def _tokens(self, noted: Tensor) -> Values | None:
        if isinstance(noted, WrapperTensor):
            return None
        matrix = noted.detach().reshape(-1, noted.shape[-1])
        return Values(matrix, _amax(matrix)) if self.expert is None else self.expert.tokens(matrix)

    def _weight(self, noted: Tensor) -> Values | None:
        part = _part_of(noted)
        if part is None:
            return None
        if self.expert is not None:
            return self.expert.weight(part)
        return Values(part.values, _amax(part.values), 0, part.first, part.dim)

    def known(self, role: str, direction: str) -> Values | None:
        """Return the values of a face that are known."""
        if (role, direction) == ("input", "columnwise"):
            return None if self.input_columns is None else self.input_columns[0]
        return self.operands.get(role)

    def stretch(self, extent: int, most: int) -> tuple[int, int]:
        """Return where this sample's stretch of an axis begins, and how long it is."""
        if extent <= most:
            return 0, extent
        steps = (extent - most) // _ALIGNED + 1
        return (self._turn * 7) % steps * _ALIGNED, most


def _amax(matrix: Tensor) -> Tensor:
    """Return the largest magnitude, ``[1]``, NaN if there is one; 0 of nothing."""
    if matrix.numel() == 0:
        return matrix.new_zeros(1)
    norm: Tensor = torch.linalg.vector_norm(matrix, torch.inf)
    return norm[None]


class _Part(NamedTuple):
    """The part of a weight whose values are known on this rank.

    Attributes:
        values: As layers have them, ``[N, K]`` or ``[E, N, K]``.
        first: Where it begins, along ``dim``.
        dim: The axis that ranks share, or None.
    """

    values: Tensor
    first: int = 0
    dim: int | None = None

    @property
    def experts(self) -> range:
        """The experts of a stack whose values, or parts of them, these are."""
        first = self.first if self.dim == 0 else 0
        return range(first, first + self.values.shape[0])


def _part_of(weight: Any) -> _Part | None:
    """Return the values of a weight that are known on this rank, or None."""
    if weight is None:
        return None
    gathered = weight.record.gathered if isinstance(weight, HybridTensor) else None
    if gathered is None:
        values = _values(weight)
        return None if values is None else _Part(values)
    sharded = gathered.sharded
    mine, dim = sharded.tensor, sharded.dim
    values = _values(mine)
    if values is None or values.dim() != weight.dim():  # or one matrix of a stack
        return None
    first = sharded.rank * -(-sharded.size[dim] // sharded.num_ranks)
    if mine.is_transposed:
        values, dim = values.transpose(-2, -1), (1, 0)[dim] if values.dim() == 2 else (0, 2, 1)[dim]
    return _Part(values, first, dim)


def _values(weight: Any) -> Tensor | None:
    """Return the values of a weight, or of a part, or None if nobody has them."""
    if isinstance(weight, MasterWeight):
        values: Tensor = weight.source.detach()
        return values
    known = weight.high_precision.current if weight.record.values is not None else None
    return None if known is None else weight.taken(known)

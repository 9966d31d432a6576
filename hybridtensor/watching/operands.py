"""The operands of one forward and its backward: their high-precision values, as far as they are on this rank.

Of a stack of experts one is measured in each forward, the next one from sample to sample: its tokens and
its weight are those of a linear layer, and its faces are cut out of those of all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops import Face, Groups
from hybridtensor.ops.groups import Group, cut_columns, cut_rows, each_group, matrix_of
from hybridtensor.subclasses import HybridTensor, MasterWeight
from hybridtensor.subclasses.wrapper import WrapperTensor

_ALIGNED = 128  # no block of a format is longer
_DISTANCE = 7  # places between the stretches of two samples, at least
_KEPT = 128  # features of an input that are kept until backward


class Values(NamedTuple):
    """High-precision values of an operand on this rank; ``first`` and ``dim`` locate a sharded weight's part."""

    matrix: Tensor
    amaxes: Tensor
    place: int = 0
    first: int = 0
    dim: int | None = None


class Expert(NamedTuple):
    """The measured expert of a forward: its tokens, all experts' tokens, and the number of the first expert."""

    group: Group
    every: Sequence[Group]
    first: int

    @property
    def place(self) -> int:
        """Index of the expert among the layer's places."""
        return 1 + self.first + self.group.number

    def tokens(self, matrix: Tensor) -> Values:
        """Slice the expert's tokens."""
        rows = torch.linalg.vector_norm(matrix, torch.inf, dim=1).float()
        sizes = [group.stop - group.start for group in self.every]
        lengths = torch.tensor(sizes, device=rows.device)
        # ``initial``: the amax of an expert without tokens is 0, not -Inf.
        amaxes = torch.segment_reduce(rows[: sum(sizes)], "max", lengths=lengths, initial=0)
        return Values(matrix[self.group.start : self.group.stop], amaxes, 1 + self.first)

    def weight(self, part: _Part) -> Values | None:
        """Slice the expert's weight, or return None if it is on another rank."""
        if self.group.number not in part.experts:
            return None
        index = self.group.number - part.experts.start
        amaxes = torch.linalg.vector_norm(part.values, torch.inf, dim=(1, 2)).float()
        place = 1 + self.first + part.experts.start
        first, dim = (part.first, part.dim - 1) if part.dim else (0, None)
        return Values(part.values[index], amaxes, place, first, dim)

    def face(self, face: Face, role: str, direction: str) -> Face:
        """Slice the expert's face out of the stacked face."""
        if role == "weight":
            return matrix_of(face, self.group.number)
        return (cut_rows if direction == "rowwise" else cut_columns)(face, self.group)


class Call:
    """What is known of one forward until its backward: operands, the measured expert, and a stretch of the input."""

    def __init__(self, key: object, turn: int) -> None:
        self.key = key
        self.expert: Expert | None = None
        self.operands: dict[str, Values] = {}
        self.input_columns: tuple[Values, int] | None = None
        self._turn = turn
        self._operands: dict[str, Tensor] = {}

    @property
    def place(self) -> int:
        """Index of the measured place."""
        return 0 if self.expert is None else self.expert.place

    def add(self, role: str, values: Tensor) -> None:
        self._operands[role] = values

    def choose(self, groups: Groups, rows: int) -> None:
        """Choose the measured expert: the next one with tokens and a local weight; synchronizes with the device."""
        every = each_group(groups, rows)
        part = _part_of(self._operands.get("weight"))
        for known in (range(0) if part is None else part.experts, range(len(every))):
            for i in range(len(known)):
                group = every[known[(self._turn + i) % len(known)]]
                if group.start < group.stop:
                    self.expert = Expert(group, every, groups.first)
                    self._turn //= len(known)
                    return

    def take(self) -> None:
        """Slice the values of the recorded operands."""
        for role, operand in self._operands.items():
            known = self._weight(operand) if role == "weight" else self._tokens(operand)
            if known is not None and known.matrix.numel():
                self.operands[role] = known
                if role == "input":
                    first, count = self.stretch(known.matrix.shape[1], _KEPT)
                    columns = known.matrix[:, first : first + count].t().contiguous()
                    self.input_columns = known._replace(matrix=columns), first
        self._operands.clear()

    def _tokens(self, operand: Tensor) -> Values | None:
        if isinstance(operand, WrapperTensor):
            return None
        matrix = operand.detach().reshape(-1, operand.shape[-1])
        return Values(matrix, _amax(matrix)) if self.expert is None else self.expert.tokens(matrix)

    def _weight(self, operand: Tensor) -> Values | None:
        part = _part_of(operand)
        if part is None:
            return None
        if self.expert is not None:
            return self.expert.weight(part)
        return Values(part.values, _amax(part.values), 0, part.first, part.dim)

    def known(self, role: str, direction: str) -> Values | None:
        """Return the values of a face on this rank."""
        if (role, direction) == ("input", "columnwise"):
            return None if self.input_columns is None else self.input_columns[0]
        return self.operands.get(role)

    def stretch(self, extent: int, most: int) -> tuple[int, int]:
        """Return start and length of this sample's stretch of an axis."""
        if extent <= most:
            return 0, extent
        steps = (extent - most) // _ALIGNED + 1
        # Coprime to the number of places: n samples reach all n of them.
        distance = next(i for i in itertools.count(_DISTANCE) if math.gcd(i, steps) == 1)
        return self._turn * distance % steps * _ALIGNED, most


def _amax(matrix: Tensor) -> Tensor:
    """Return the amax ``[1]``, NaN if there is one; 0 of an empty tensor."""
    if matrix.numel() == 0:
        return matrix.new_zeros(1)
    norm: Tensor = torch.linalg.vector_norm(matrix, torch.inf)
    return norm[None]


class _Part(NamedTuple):
    """The local values of a weight, ``[N, K]`` or ``[E, N, K]``, from ``first`` along ``dim``."""

    values: Tensor
    first: int = 0
    dim: int | None = None

    @property
    def experts(self) -> range:
        """The experts whose values, or parts of them, are local."""
        first = self.first if self.dim == 0 else 0
        return range(first, first + self.values.shape[0])


def _part_of(weight: Any) -> _Part | None:
    """Return a weight's local values, or None."""
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
    if isinstance(weight, MasterWeight):
        values: Tensor = weight.source.detach()
        return values
    known: Tensor | None = weight.known_values
    return known

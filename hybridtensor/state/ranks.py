"""Which ranks hold what of a layer and its batch."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist


class TrainingRanks(NamedTuple):
    """The ranks that train a layer together.

    Attributes:
        groups: What delayed scales are reduced over, one group after the other; None is all ranks.
        batch: Which part of a batch this rank has, counted in order; None is its rank in the first
            group.
        named: Whether someone named them.
    """

    groups: tuple[dist.ProcessGroup | None, ...] = (None,)
    batch: int | None = None
    named: bool = False

    def part_of_batch(self) -> int:
        """Return which part of a batch this rank has."""
        if self.batch is not None:
            return self.batch
        if not (dist.is_available() and dist.is_initialized()):
            return 0
        return dist.get_rank(self.groups[0])


ALL_RANKS = TrainingRanks()


class Section(NamedTuple):
    """Which part of a layer's matrix tensor parallelism gives to this rank.

    Attributes:
        out_index: Which of ``out_count`` parts of the out features.
        out_count: How many there are.
        first_out: The first of the out features.
        in_index: Which of ``in_count`` parts of the in features.
        in_count: How many there are.
    """

    out_index: int = 0
    out_count: int = 1
    first_out: int = 0
    in_index: int = 0
    in_count: int = 1

    def columns(self, role: str) -> tuple[int, int]:
        """Return which part of a row of a tensor this rank has, and how many parts there are."""
        if role == "grad_output":
            return self.out_index, self.out_count
        return self.in_index, self.in_count

"""The ranks that hold shards of a layer and its batch."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist


class TrainingRanks(NamedTuple):
    """The groups of ranks that train a layer together, and which part of the batch this one has."""

    groups: tuple[dist.ProcessGroup | None, ...] = (None,)
    batch: int | None = None
    named: bool = False

    def part_of_batch(self) -> int:
        """Return this rank's index among the parts of a batch."""
        if self.batch is not None:
            return self.batch
        if not (dist.is_available() and dist.is_initialized()):
            return 0
        return dist.get_rank(self.groups[0])


ALL_RANKS = TrainingRanks()


class Section(NamedTuple):
    """This rank's section of a layer's matrix under tensor parallelism."""

    out_index: int = 0
    out_count: int = 1
    first_out: int = 0
    in_index: int = 0
    in_count: int = 1

    def columns(self, role: str) -> tuple[int, int]:
        """Return the index of this rank's part of a tensor's rows, and the number of parts."""
        if role == "grad_output":
            return self.out_index, self.out_count
        return self.in_index, self.in_count

"""Which ranks watch the same layers, and adding up what they have measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtensor.ranks import Ranks as ProcessRanks
from hybridtensor.ranks import patience
from hybridtensor.state.contract import stages_of
from hybridtensor.watching.sums import Numbers, Sums, Watched


class Ranks(NamedTuple):
    """The ranks that sample the same layers."""

    group: dist.ProcessGroup | None = None
    alone: bool = True
    first: bool = True


def agree(
    how: tuple[int, ...], model: nn.Module, layers: Sequence[Watched], error: Exception | None
) -> Ranks:
    """Find the ranks with the same layers; raise ``error``, or RuntimeError on all if ranks sample other steps."""
    # Layers of unlike stages may have equal names, as in a list of stages
    stages = sorted({stage.stage_index for stage in stages_of(model)})
    names = tuple(f"{layer.name} {layer.config} {layer.experts} {stages}" for layer in layers)
    ranks = ProcessRanks("watch", None, patience())
    alone = ranks.size == 1
    every = ranks.gather(lambda: (how, names, None if error is None else str(error)))
    if error is not None:
        raise error
    failed = next((text for _, _, text in every if text is not None), None)
    if failed is not None:
        raise RuntimeError(f"watch: another rank cannot watch: {failed}")
    if len({one for one, _, _ in every}) > 1:
        raise RuntimeError(
            f"watch: ranks have different every, rows or steps: {[one for one, _, _ in every]}; pass the same "
            "on all of them"
        )
    if not any(known for _, known, _ in every):
        raise ValueError("watch: the model has no quantized weights; call quantize_ first")
    return Ranks() if alone else _alike([known for _, known, _ in every])


def _alike(names: Sequence[tuple[str, ...]]) -> Ranks:
    """Return the ranks that have this rank's layers; collective."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, known in enumerate(names):
        ranks.setdefault(known, []).append(rank)
    mine = names[dist.get_rank()]
    group = None
    if len(ranks) > 1:
        # All ranks make all groups, in one order: new_group is a collective of the world.
        groups = {known: dist.new_group(members) for known, members in ranks.items()}
        group = groups[mine]
    members = ranks[mine]
    # Without layers there is nothing to add up, and no device on which
    return Ranks(group, len(members) == 1 or not mine, dist.get_rank() == members[0])


def added_up(sums: Sums, ranks: Ranks) -> tuple[Numbers, Tensor]:
    """Sum the measurements of ranks; an infinite maximum stands for a non-finite value."""
    counts, norms, maxima, products = sums.numbers
    # NaN would get lost in a maximum of ranks
    maxima = maxima.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    numbers, sizes = Numbers(counts, norms, maxima, products), sums.all_sizes()
    for tensor in () if ranks.alone else (*numbers, sizes):
        operation = dist.ReduceOp.MAX if tensor is maxima else dist.ReduceOp.SUM
        dist.all_reduce(tensor, operation, group=ranks.group)
    return numbers, sizes

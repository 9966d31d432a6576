"""What ranks agree on before they gather: the recipes, once, and the largest magnitudes, once per step.

One MAX all-reduce serves all weights under one root: the first gather that finds a weight written since the last
reduction reduces for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.distributed.plan import Plan
from hybridtensor.distributed.torch_compat import Sharded
from hybridtensor.ops import Cast, measure
from hybridtensor.ops.references.blocks import block_amax


class Shard(Protocol):
    """What is needed here of a shard; see ``shard.Shard``."""

    sharded: Sharded
    plan: Plan
    config: Any
    agreed: Any
    amaxes: Tensor | None


def check_recipes(shards: Sequence[Shard]) -> None:
    """Raise on every rank unless all ranks have the same weights and recipes: gathers of other sizes would hang.

    Args:
        shards: All weights under one root.

    Raises:
        RuntimeError: If ranks differ, on all of them.
    """
    mine = [f"{shard.sharded.size}: {shard.config} {shard.config.fingerprint()}" for shard in shards]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    first = shards[0].sharded
    extremes = torch.tensor([number, -number], device=first.device)
    for group in first.process_groups():
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    if largest != -smallest:
        recipes = ", ".join(sorted({f"{shard.config} ({shard.config.fingerprint()})" for shard in shards}))
        raise RuntimeError(
            f"fully_shard: the same weights with the same recipes are required on all ranks, got others than the "
            f"{len(shards)} of rank {dist.get_rank()} with {recipes}; convert the model alike everywhere"
        )
    for shard in shards:
        shard.agreed = shard.config


def reduce_amaxes(pairs: Sequence[tuple[Shard, Tensor]]) -> None:
    """Reduce the largest magnitudes of all shards of one process group, in one collective.

    Args:
        pairs: Shards that need it, on every rank in the same order, and the values of this rank's parts.
    """
    first = pairs[0][0].sharded
    own = [_amaxes(shard.plan, shard.sharded.rank, values).flatten().to(first.device) for shard, values in pairs]
    found = torch.cat(own)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=first.process_group)
    split = found.split([len(amaxes) for amaxes in own])
    kept = []  # memory that stays: streams may use it later
    for (shard, _), flat in zip(pairs, split, strict=True):
        if shard.amaxes is None or shard.amaxes.shape != shard.plan.amaxes:
            shard.amaxes = torch.empty(shard.plan.amaxes, device=flat.device)
        kept.append(shard.amaxes.view(-1))
    torch._foreach_copy_(kept, list(split))


def _amaxes(plan: Plan, rank: int, values: Tensor) -> Tensor:
    """Return the largest magnitudes of this rank's values, fp32, of shape ``plan.amaxes``."""
    if plan.reduce == "tensor":
        return measure(values, row=Cast("fp8_e4m3_tensor"))[0].view(plan.amaxes)
    if plan.reduce == "column":
        return measure(values, column=Cast("fp8_e4m3_row"))[1].view(plan.amaxes)
    block = plan.block
    before, after = around(plan, rank)
    mine = block_amax(F.pad(values, (0, 0, before, after)), (block, block))
    amaxes = mine.new_zeros(plan.amaxes)
    amaxes.narrow(0, rank * plan.rows // block, len(mine)).copy_(mine)
    return amaxes


def around(plan: Plan, rank: int) -> tuple[int, int]:
    """Return how many rows are missing before and after a shard to whole blocks."""
    begin, end = rank * plan.rows, (rank + 1) * plan.rows
    return begin % plan.block, -end % plan.block

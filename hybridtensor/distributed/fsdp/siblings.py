"""Amaxes of sharded weights, reduced over all ranks and over weights with a common scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridtensor.distributed.fsdp import common_scale
from hybridtensor.distributed.fsdp.agreement import reduce_amaxes
from hybridtensor.subclasses import MasterWeight

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.shard import Shard
    from hybridtensor.subclasses.common_scale import CommonScale


def reduce_written(shard: Shard, mine: MasterWeight) -> None:
    """Reduce the amaxes of all weights under the root if ``shard``, or one with its common scale, was written.

    Args:
        shard: The shard record of a weight whose cast needs amaxes of other ranks or weights.
        mine: The local shard.
    """
    common = shard.common
    # FSDP2 may pad the shards of some ranks again, in new tensors: not all ranks see a write, so that all update
    # the scale.
    if common is None:  # then it is measured for its own sake
        if shard.reduced == shard.written(mine):
            return
        uneven = False
    else:
        uneven = shard.plan.reduce is None and bool(shard.sharded.size[0] % shard.sharded.num_ranks)
        alike = _alike(shard, common)
        if not uneven and all(one.reduced == one.written(part) for one, part in alike):
            return
    group = shard.sharded.process_group
    found = [
        (one, part)
        for one, part in shard.with_all()
        if one.is_measured(part)
        and one.sharded.process_group is group
        and not (uneven and one.common is not common)
    ]
    written = [common_scale.Written(one, part, part.source) for one, part in found]
    reducing = [
        (one, made.values)
        for (one, _), made in zip(found, written, strict=True)
        if one.plan.reduce is not None
    ]
    if reducing:
        reduce_amaxes(reducing)
    common_scale.update_scales(written)
    for one, part in found:
        one.reduced = one.written(part)


def _alike(shard: Shard, common: CommonScale) -> list[tuple[Shard, MasterWeight]]:
    """Return the weights with the same common scale, itself included, and their local shards."""
    known = []
    for part in common.parts:
        one = None if part.record.shard is None else part.record.shard()
        if one is None or one.sharded.tensor is not part:  # not gathered yet
            every = shard.with_all()
            return [(s, own) for s, own in every if s.common is common and s.is_measured(own)]
        known.append((one, part))
    return known

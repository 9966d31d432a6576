"""Common scales of weights that FSDP2 shards: the largest amax of the weights' parts on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.subclasses.common_scale import CommonScale, by_scale
from hybridtensor.subclasses.intercepting import InterceptingTensor

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.shard import Shard


class Written(NamedTuple):
    """A local shard and the high-precision values that it is quantized from."""

    shard: Shard
    part: Any
    values: Tensor


def update_scales(written: Sequence[Written]) -> None:
    """Update common scales on every rank; all-reduce those whose weights' amaxes are not reduced already."""
    for scale, members in by_scale(written, lambda one: one.part):
        order_of(scale).wait_for_last_use(members[0].values)
        known = [
            one.shard.amaxes for one in members if one.shard.plan.reduce in ("tensor", "column")
        ]
        if len(known) == len(members):
            scale.set_amaxes([amaxes.max() for amaxes in known if amaxes is not None])
            continue
        scale.measure([one.values for one in members])
        if members[0].shard.sharded.num_ranks > 1 and scale.amax is not None:
            group = members[0].shard.sharded.process_group
            dist.all_reduce(scale.amax, dist.ReduceOp.MAX, group=group)


def of_weight(tensor: object) -> CommonScale | None:
    """Return the common scale that a weight has with others, or None."""
    layer = tensor.record.layer if isinstance(tensor, InterceptingTensor) else None
    return getattr(layer, "common", None)


def order_of(scale: CommonScale) -> StreamOrder:
    """Return the order of the streams that use a common scale."""
    if scale.order is None:
        scale.order = StreamOrder()
    order: StreamOrder = scale.order
    return order

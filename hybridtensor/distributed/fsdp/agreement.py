"""Collectives before a gather: comparing recipes once, one MAX all-reduce of amaxes per step for a whole root, and the
common scales that several weights have."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridtensor import ops
from hybridtensor.distributed.fsdp.plan import Plan
from hybridtensor.distributed.fsdp.stream_order import StreamOrder
from hybridtensor.formats import FP8_E4M3_ROW, FP8_E4M3_TENSOR
from hybridtensor.ops import Cast, CastRequest
from hybridtensor.ops.kernel_library import aligned_fp32
from hybridtensor.ops.references.blocks import block_amax
from hybridtensor.ranks import require_alike
from hybridtensor.state.contract import described
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.common_scale import CommonScale, by_scale
from hybridtensor.subclasses.intercepting import InterceptingTensor
from hybridtensor.subclasses.op_table import of_layers

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.shard import Shard

Measure = Callable[[Tensor, Tensor], object]
"""Writes the amaxes of the first tensor into the second one, which holds zeros."""

MemoryKey: TypeAlias = tuple[object, ...]
"""The address, layout, dtype and device of a tensor."""

_OF_TENSOR = CastRequest(Cast(FP8_E4M3_TENSOR))


def check_recipes(shards: Sequence[Shard]) -> None:
    """Raise RuntimeError on every rank unless all have the same weights and recipes: other sizes would hang
    all-gathers, and other kinds of weights the collectives for amaxes and gradients."""
    facts, shown = dict[str, str](), dict[str, str]()
    for index, shard in enumerate(shards):
        name, tensor = f"weight {index} {tuple(shard.sharded.size)}", shard.sharded.tensor
        recipe = f"{shard.config} ({shard.config.fingerprint()[:8]})"
        facts[name] = described(recipe, tensor, shard.sharded.is_trained)
        shown[name] = name + of_layers(tensor)  # which ranks may name otherwise
    require_alike(
        "fully_shard",
        facts,
        advice="convert the model alike everywhere",
        groups=shards[0].sharded.process_groups(),
        shown=shown,
    )
    for shard in shards:
        shard.agreed = shard.config


def reduce_amaxes(pairs: Sequence[tuple[Shard, Tensor]]) -> None:
    """All-reduce the amaxes of all shards of one process group in one collective; the same order on every rank."""
    shards, first = [shard for shard, _ in pairs], pairs[0][0]
    if first.exchange is None or not first.exchange.is_of(shards):
        # The buffer stays for later gathers, of training, too.
        with torch.inference_mode(False):
            first.exchange = Exchange(shards)
    first.exchange.reduce([values for _, values in pairs])


def reduce_written(shard: Shard, mine: MasterWeight) -> None:
    """Reduce the amaxes of all weights under the root if ``shard``, or one with its common scale, was written.

    Args:
        shard: The shard record of a weight whose cast needs amaxes of other ranks or weights.
        mine: The local shard.
    """
    common = shard.common
    alike = [(shard, mine)] if common is None else _with_scale(common, shard)
    # FSDP2 may pad the shards of some ranks again, in new tensors: not all ranks see a write, so that all
    # update the scale.
    is_padded = bool(shard.sharded.size[0] % shard.sharded.num_ranks)
    uneven = common is not None and shard.plan.reduce is None and is_padded
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
    written = [(one, part, part.source) for one, part in found]
    reducing = [(one, values) for one, _, values in written if one.plan.reduce is not None]
    if reducing:
        reduce_amaxes(reducing)
    update_common_scales(written)
    for one, part in found:
        one.reduced = one.written(part)


def _with_scale(common: CommonScale, shard: Shard) -> list[tuple[Shard, MasterWeight]]:
    """Return the weights with a common scale, of which ``shard`` is one, and their local shards."""
    known = []
    for part in common.parts:
        one = None if part.record.shard is None else part.record.shard()
        if one is None or one.sharded.tensor is not part:  # not gathered yet
            every = shard.with_all()
            return [(s, own) for s, own in every if s.common is common and s.is_measured(own)]
        known.append((one, part))
    return known


def update_common_scales(written: Sequence[tuple[Shard, InterceptingTensor, Tensor]]) -> None:
    """Update common scales on every rank from local shards and the high-precision values that these are quantized
    from; all-reduce those whose weights' amaxes are not reduced already."""
    for scale, members in by_scale(written, lambda one: one[1]):
        order_of(scale).wait_for_last_use(members[0][2])
        known = [s.amaxes for s, _, _ in members if s.plan.reduce in ("tensor", "column")]
        if len(known) == len(members):
            scale.set_amaxes([amaxes.max() for amaxes in known if amaxes is not None])
            continue
        scale.measure([values for _, _, values in members])
        sharded = members[0][0].sharded
        if sharded.num_ranks > 1 and scale.amax is not None:
            dist.all_reduce(scale.amax, dist.ReduceOp.MAX, group=sharded.process_group)


def common_scale_of(tensor: object) -> CommonScale | None:
    """Return the common scale that a weight has with others, or None."""
    layer = tensor.record.layer if isinstance(tensor, InterceptingTensor) else None
    return getattr(layer, "common", None)


def order_of(scale: CommonScale) -> StreamOrder:
    """Return the order of the streams that use a common scale."""
    if scale.order is None:
        scale.order = StreamOrder()
    order: StreamOrder = scale.order
    return order


class Exchange:
    """One buffer of amaxes for several shards, and the prepared casts that fill it."""

    def __init__(self, shards: list[Shard]) -> None:
        self._shards, self._plans = shards, [shard.plan for shard in shards]
        sizes = [math.prod(plan.amaxes) for plan in self._plans]
        begins = [0, *itertools.accumulate(map(aligned_fp32, sizes))]
        self._all = torch.zeros(begins[-1], dtype=torch.float32, device=shards[0].sharded.device)
        self._order = StreamOrder()
        self._parts = [
            self._all[begin : begin + size] for begin, size in zip(begins[:-1], sizes, strict=True)
        ]
        self._amaxes = [
            part.view(plan.amaxes) for part, plan in zip(self._parts, self._plans, strict=True)
        ]
        self._measures: dict[int, tuple[MemoryKey, Measure]] = {}

    def is_of(self, shards: list[Shard]) -> bool:
        """Return whether this exchange was built for those shards and their present local tensors."""
        # Plans by identity: an equal number of shards may have another recipe, with other amaxes.
        if len(shards) != len(self._shards):
            return False
        known = zip(shards, self._shards, self._plans, strict=True)
        return all(shard is mine and shard.plan is plan for shard, mine, plan in known)

    def reduce(self, parts: list[Tensor]) -> None:
        """Compute the amaxes of the local shards, and all-reduce them."""
        self._order.wait_for_last_use(self._all)
        self._all.zero_()
        self._measure_tensors(parts)
        for index, (shard, values) in enumerate(zip(self._shards, parts, strict=True)):
            if shard.plan.reduce != "tensor":
                self._measure(index, shard, values)
            shard.amaxes, shard.amaxes_order = self._amaxes[index], self._order
            shard.contents = None  # another rank may have written its part
        # One collective for all weights under the root: per weight, latency would be paid before
        # each gather.
        dist.all_reduce(self._all, dist.ReduceOp.MAX, group=self._shards[0].sharded.process_group)

    def _measure_tensors(self, parts: list[Tensor]) -> None:
        """Compute the single-amax shards in one launch."""
        chosen = [
            index
            for index, (plan, part) in enumerate(zip(self._plans, parts, strict=True))
            if plan.reduce == "tensor" and part.numel()
        ]
        if chosen:
            found = ops.measure_all([parts[index] for index in chosen], _OF_TENSOR)
            outs = [self._parts[index] for index in chosen]
            torch._foreach_copy_(outs, [amax for amax, _ in found])

    def _measure(self, index: int, shard: Shard, values: Tensor) -> None:
        """Compute the amaxes of one shard; the prepared cast is cached by ``memory_key``."""
        key, known = memory_key(values), self._measures.get(index)
        if known is None or known[0] != key:
            known = key, _prepared(shard.plan, shard.sharded.rank, values)
            self._measures[index] = known
        known[1](values, self._parts[index])


def memory_key(tensor: Tensor) -> MemoryKey:
    """Return the key of a tensor's memory: a prepared cast serves any tensor with the same key."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _prepared(plan: Plan, rank: int, values: Tensor) -> Measure:
    """Return a function that writes the amaxes of a local shard into a slice of the exchange (``plan.amaxes``,
    flat)."""
    if plan.reduce == "column":
        return ops.prepare(values, CastRequest(None, Cast(FP8_E4M3_ROW))).measure_into
    return functools.partial(_measure_blocks, plan, rank)


def _measure_blocks(plan: Plan, rank: int, values: Tensor, out: Tensor) -> None:
    """Write the amaxes of this rank's square blocks, where they are among those of all ranks."""
    before, after = around(plan, rank)
    mine = block_amax(F.pad(values, (0, 0, before, after)), (plan.block, plan.block))
    out.view(plan.amaxes).narrow(0, rank * plan.rows // plan.block, len(mine)).copy_(mine)


def around(plan: Plan, rank: int) -> tuple[int, int]:
    """Return the numbers of rows before and after a shard that complete its first and last block."""
    begin, end = rank * plan.rows, (rank + 1) * plan.rows
    return begin % plan.block, -end % plan.block

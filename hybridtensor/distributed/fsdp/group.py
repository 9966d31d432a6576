"""The converted weights that FSDP2 gathers together, and the work done once per gather for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hybridtensor.distributed.fsdp.bundle import Bundle
from hybridtensor.distributed.fsdp.payload import Payload
from hybridtensor.distributed.fsdp.sending import HookMetadata, HookResult
from hybridtensor.distributed.fsdp.shard import Shard, shard_of
from hybridtensor.distributed.fsdp.torch_compat import ShardedParam
from hybridtensor.linear.operands import Weight
from hybridtensor.ops.library import is_recorded
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.intercepting import InterceptingTensor


class Gather:
    """One kind of gather: which faces FSDP2 requests of which weights, and their bundle."""

    def __init__(self, group: WeightGroup, wants: tuple[bool, bool]) -> None:
        self._wanted = [shard.wants(*wants) for shard in group.shards]
        self._bundles: list[tuple[Bundle, list[int]]] = []
        self._places: dict[int, tuple[Bundle, int]] = {}
        by_kind: dict[bool, list[int]] = {}
        for index, (shard, wanted) in enumerate(zip(group.shards, self._wanted, strict=True)):
            names = shard.plan.sends(*wanted)
            if names != ("whole",):
                # quantized, and not what is there anyway
                caches = "values" not in names and not isinstance(
                    shard.sharded.tensor, HybridTensor
                )
                by_kind.setdefault(caches, []).append(index)
        for caches, indices in by_kind.items():
            shards = tuple(group.shards[index] for index in indices)
            bundle = Bundle(group, shards, [self._wanted[index] for index in indices], caches)
            self._bundles.append((bundle, indices))
            self._places.update({i: (bundle, number) for number, i in enumerate(indices)})
        self._shards = group.shards
        self._needed: list[tuple[ShardedParam, list[Tensor]]] = []

    def begin(self, parts: Sequence[Weight], generation: int) -> Sequence[HookResult | None]:
        """Prepare the payload of all weights; return the hook result of each, or None where it must be copied first."""
        if len(self._needed) < len(self._shards):  # faces are known after the first gather
            pairs = [
                (s.sharded, s.needed(w)) for s, w in zip(self._shards, self._wanted, strict=True)
            ]
            self._needed = [(sharded, needed) for sharded, needed in pairs if needed is not None]
        # Before FSDP2 gathers: it allocates the tensors of this list before it calls the second
        # hook, and those of the last gather may be another face's.
        for sharded, needed in self._needed:
            sharded.free_on_reshard(needed)
        results: list[HookResult | None] = [None] * len(parts)
        recorded = is_recorded()
        for bundle, indices in self._bundles:
            prepared = bundle.prepare([parts[index] for index in indices], generation, recorded)
            if prepared is not None:
                for index, result in zip(indices, prepared, strict=True):
                    results[index] = result
        return results

    def send(self, index: int, tensor: Weight) -> HookResult:
        """Return the ``fsdp_pre_all_gather`` result of a weight whose payload was not prepared."""
        place = self._places.get(index)
        if place is not None:
            bundle, number = place
            return bundle.send(number, tensor)
        shard = self._shards[index]
        return (shard.send_whole(tensor),), (shard, HookMetadata(self._wanted[index]))


class WeightGroup:
    """The converted weights that FSDP2 gathers together, from gather to gather."""

    # FSDP2 calls the first hook of each weight in order: the first call prepares the payload of all.

    def __init__(self, sharded: ShardedParam) -> None:
        self._sharded = sharded
        self.shards: list[Shard] = []
        self.payloads: dict[tuple[Shard, ...], Payload] = {}
        self._gathers: dict[tuple[bool, bool], Gather] = {}
        self._kinds: list[type] = []
        self._indices: list[int] = []  # of the weights among all parameters
        self._generation = 0  # counts writes of the shards
        self._gather: Gather | None = None

    def send(self, shard: Shard, tensor: Weight) -> HookResult:
        """Return the ``fsdp_pre_all_gather`` result of a weight; ``tensor`` is the local shard, or a copy on another
        device."""
        if self._gather is None or shard.prepared is None:
            self._gather = self._begin()
        _, result = shard.prepared or (None, None)
        # The next gather begins with the hook of the first weight, also if this one is broken off.
        shard.prepared = self.shards[0].prepared = None
        return result or self._gather.send(self.shards.index(shard), tensor)

    def _begin(self) -> Gather:
        """Exchange amaxes with the other ranks, and prepare the payload."""
        sharded = self._sharded
        every = sharded.parts_of_the_group()
        kinds = [type(part) for part in every]
        if kinds != self._kinds:
            self._enroll(every)
            self._kinds = kinds
        parts: list[Any] = [every[index] for index in self._indices]
        adopts = not sharded.before_backward
        # All weights are looked at before any is quantized: reducing the amaxes of one may change
        # what another one is scaled by.
        for shard, part in zip(self.shards, parts, strict=True):
            if shard.agree_on_writes(part, adopts=adopts):
                self._generation += 1
        for shard, part in zip(self.shards, parts, strict=True):
            if shard.contents is None:  # amaxes were reduced for a later one
                shard.agree_on_writes(part, adopts=adopts)
                self._generation += 1
        sharded.reshard_to_all_ranks()
        wants = sharded.wants()
        gather = self._gathers.get(wants)
        if gather is None:
            if not self._gathers:
                self._drop_old_plans()
            gather = self._gathers[wants] = Gather(self, wants)
        results = gather.begin(parts, self._generation)
        for shard, part, result in zip(self.shards, parts, results, strict=True):
            shard.prepared = part, result
        return gather

    def _enroll(self, parts: Sequence[Tensor]) -> None:
        """Add the weights that are converted now."""
        self._indices = [i for i, part in enumerate(parts) if isinstance(part, InterceptingTensor)]
        every = self._sharded.of_the_group()
        self.shards = [shard_of(every[index]) for index in self._indices]
        self._gathers.clear()
        for shard in self.shards:
            shard.gathers = self._gathers

    def _drop_old_plans(self) -> None:
        """Drop cached payloads of former recipes."""
        for shards, payload in list(self.payloads.items()):
            plans = [shard.plan for shard in shards]
            if any(old.plan is not plan for old, plan in zip(payload.sendings, plans, strict=True)):
                del self.payloads[shards]

    def forget(self, dead: weakref.ref[Tensor]) -> None:
        """Drop cached payloads of local shards that no longer exist: the model was moved or reloaded."""
        for shards, payload in list(self.payloads.items()):
            if any(of_weight.source is dead for of_weight in payload.weights):
                self.payloads.pop(shards, None)


def group_of(sharded: ShardedParam) -> WeightGroup:
    """Return the group of an FSDP2 parameter, created at the first call."""
    # An attribute of FSDP2's own record, as for ``shard_of``
    group: WeightGroup | None = getattr(sharded.group, "_hybridtensor_group", None)
    if group is None:
        group = sharded.group._hybridtensor_group = WeightGroup(sharded)  # type: ignore[attr-defined]
    return group

"""Weights of a group whose bytes are sent together: preparing this rank's payload, and unpacking all ranks'."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridtensor.distributed.fsdp.gathered_faces import GatheredFaces
from hybridtensor.distributed.fsdp.payload import (
    Payload,
    PayloadCast,
    Sending,
    Stretch,
    WeightPayload,
)
from hybridtensor.distributed.fsdp.sending import HookMetadata, HookResult, fill, gathered_state
from hybridtensor.distributed.fsdp.shard import Shard
from hybridtensor.distributed.fsdp.torch_compat import free_storage
from hybridtensor.distributed.fsdp.unpack import Copies, Received
from hybridtensor.linear.operands import Weight
from hybridtensor.subclasses import MasterWeight

if TYPE_CHECKING:
    from hybridtensor.distributed.fsdp.group import WeightGroup


class PreparedGather:
    """The payload of one kind of gather with views of it, and the buffers that receive all ranks' payloads."""

    def __init__(self, payload: Payload, bundle: Bundle) -> None:
        shards, wanted = self._shards, self._wanted = bundle.shards, bundle.wanted
        self._payload, self._names = payload, [sending.names for sending in bundle.sendings]
        num_ranks = shards[0].sharded.num_ranks
        self._stretches = payload.layout.stretches(self._names)
        if num_ranks == 1:  # FSDP2 forwards one tensor of each weight
            slots = [slot for one in self._stretches for slot in one.slots]
            self._stretches = [Stretch(tuple(slots))]
        sent = payload.sent(self._stretches)
        # With one rank FSDP2 reads ``all_gather_inputs[0]`` of every parameter: of those that send
        # nothing, too, there must be one.
        nothing = (sent[0].new_empty(0),) if num_ranks == 1 else ()
        self.buffers = [tensor.new_empty(num_ranks * tensor.numel()) for tensor in sent]
        # FSDP2 allocates their storage before it copies into them (``alloc_all_gather_outputs``).
        for buffer in self.buffers:
            free_storage(buffer)
        self.results: list[HookResult] = []
        for index, (shard, asked) in enumerate(zip(shards, wanted, strict=True)):
            sends = index == bundle.sender
            metadata = HookMetadata(asked, bundle, index, sends or index == len(shards) - 1)
            self.results.append((sent if sends else nothing, (shard, metadata)))
        self._copies: Copies | None = None
        self._of: tuple[object, ...] = ()

    def unpack(self, received: Sequence[Tensor]) -> None:
        """Write the received bytes into the faces of all weights."""
        of = (
            *(shard.faces for shard in self._shards),
            *(flat.untyped_storage()._cdata for flat in received),
        )
        # ``_cdata`` is private: the address of the storage object, which stays when FSDP2 frees and
        # allocates its memory.
        if self._copies is None or self._of != of:
            with torch.inference_mode(False):
                self._copies, self._of = self._new_copies(received), of
        self._copies.run()
        # After all copies, which fill the rowwise faces that are read here.
        for shard, (_, columnwise) in zip(self._shards, self._wanted, strict=True):
            if columnwise and shard.plan.derives_after_gather and not shard.plan.shares:
                shard.requantize(_known(shard))

    def _new_copies(self, received: Sequence[Tensor]) -> Copies:
        copies, faces = Copies(), [_known(shard) for shard in self._shards]
        for stretch, flat in zip(self._stretches, received, strict=True):
            for slot in stretch.slots:
                got = Received(
                    slot.name, slot.piece, flat.view(-1), slot.begin - stretch.begin, stretch.nbytes
                )
                index = slot.weight
                plan, tensors = self._shards[index].plan, faces[index].tensors
                copies.add_face(plan, got, tensors, self._wanted[index])
        for of_weight, gathered, names, wanted in zip(
            self._payload.weights, faces, self._names, self._wanted, strict=True
        ):
            gathered.add_alike(copies, of_weight.alike, names, wanted)
        return copies


def _known(shard: Shard) -> GatheredFaces:
    """Return the faces that a received payload contains."""
    if shard.faces is None:
        raise RuntimeError(
            f"fully_shard: no hook received the weight {shard.sharded.size}; please report this"
        )
    return shard.faces


class Bundle:
    """Weights whose bytes are sent together, in one kind of gather.

    One of them sends the bytes of all, and the last one unpacks them: FSDP2 calls the hooks of all weights before it
    sends anything, and has received everything before it calls the second hook of the first one.

    Args:
        group: The FSDP2 group of the weights, which caches their payloads.
        shards: The weights, in FSDP2's order.
        wanted: Of each, whether the rowwise face is wanted, and the columnwise one.
        caches: Whether what is sent can be sent again until a weight is written.

    Attributes:
        shards: See above.
        wanted: See above.
        sendings: How each weight is sent.
        sender: Index of the weight that sends the bytes of all.
    """

    def __init__(
        self,
        group: WeightGroup,
        shards: tuple[Shard, ...],
        wanted: Sequence[tuple[bool, bool]],
        caches: bool,
    ) -> None:
        self._group, self.shards, self.wanted, self._caches = group, shards, wanted, caches
        self.sendings = tuple(
            Sending(shard.plan, shard.plan.sends(*asked), shard.sharded.dtype)
            for shard, asked in zip(shards, wanted, strict=True)
        )
        first = shards[0].sharded
        self._device, self._is_offloaded = first.device, first.is_offloaded
        # A single rank's bytes are forwarded one weight after the other, each after its first hook
        self.sender = len(shards) - 1 if first.num_ranks == 1 else 0
        self._uncached: Payload | None = None
        self._payload: Payload | None = None
        self._received: tuple[Tensor, ...] = ()
        self._generation, self._may_cache = -1, False

    # -- before the gather

    def prepare(
        self, parts: Sequence[Weight], generation: int, recorded: bool
    ) -> list[HookResult] | None:
        """Quantize the local shards that changed since the last payload; return each weight's hook result, or None
        to copy it first."""
        if self._generation != generation:
            replayed = any(shard.replayed for shard in self.shards)
            self._generation, self._may_cache = generation, self._caches and not replayed
        caches = self._may_cache and not recorded
        # FSDP2 copies an offloaded shard to the device in each gather, and calls the hook of the
        # copy: only then is there something to quantize. On a mesh of CPUs the copy is the shard
        # itself.
        if caches and self._is_offloaded:
            caches = all(part.device == self._device for part in parts)
        payload = self._cached_payload() if caches else self._uncached_payload(recorded)
        self._payload, comes_later = payload, self._is_offloaded and not caches
        if not caches and not comes_later:
            self._quantize(payload, range(len(parts)), parts, caches=False)
        elif caches and payload.generation != generation:
            pairs = zip(self.shards, payload.weights, strict=True)
            old = [
                i
                for i, (shard, of_weight) in enumerate(pairs)
                if of_weight.contents is not shard.contents
            ]
            self._quantize(payload, old, parts, caches=True)
            payload.generation = generation
        gather: PreparedGather = payload.gathers[self]
        self.shards[self.sender].sharded.gather_into(gather.buffers)
        return None if comes_later else gather.results

    def send(self, index: int, tensor: Weight) -> HookResult:
        """Quantize a copy of one local shard, and return its ``fsdp_pre_all_gather`` result."""
        payload: Any = self._payload
        shard = self.shards[index]
        shard.order_amaxes()
        fill(payload.weights[index], tensor, shard)
        result: HookResult = payload.gathers[self].results[index]
        return result

    # -- after the gather

    def receive(self, index: int, outputs: tuple[Tensor, ...]) -> None:
        """Record one received weight; the last one unpacks the faces of all."""
        if index == self.sender:
            self._received = outputs
        payload = self._payload
        if index == len(self.shards) - 1 and payload is not None:
            gather = payload.gathers[self]
            with torch.no_grad():
                gather.unpack(self._received)
            self.shards[self.sender].sharded.gather_into([])
            # FSDP2 no longer knows these buffers: it would free them at the reshard only, which
            # with ``reshard_after_forward=False`` comes after backward.
            for tensor in self._received:
                free_storage(tensor)
            if payload is self._uncached:
                payload.release()
            self._payload, self._received = None, ()

    # -- what is sent

    def _uncached_payload(self, recorded: bool) -> Payload:
        """Return a payload for this gather alone, which is not cached."""
        if self._caches and not recorded:
            self._group.payloads.pop(self.shards, None)
        if self._uncached is None:
            self._uncached = self._new_payload(self.sendings)
        self._uncached.order()
        self._uncached.acquire()
        return self._uncached

    def _cached_payload(self) -> Payload:
        """Return the cached payload of these weights, with all faces requested so far, which one launch quantizes."""
        cached, sendings = self._group.payloads.get(self.shards), self.sendings
        if cached is not None and self not in cached.gathers:
            pairs = list(zip(sendings, cached.sendings, strict=True))
            if any(mine.plan is not old.plan or mine.dtype != old.dtype for mine, old in pairs):
                cached = None
            elif any(not set(mine.names) <= set(old.names) for mine, old in pairs):
                sendings, cached = tuple(mine.joined(old) for mine, old in pairs), None
        if cached is None:
            cached = self._group.payloads[self.shards] = self._new_payload(sendings)
        elif self not in cached.gathers:
            self._add_gather(cached)
        cached.order()
        return cached

    def _new_payload(self, sendings: tuple[Sending, ...]) -> Payload:
        with torch.inference_mode(False):
            payload = Payload(sendings, self._device)
        self._add_gather(payload)
        return payload

    def _add_gather(self, payload: Payload) -> None:
        with torch.inference_mode(False):
            payload.gathers[self] = PreparedGather(payload, self)

    def _quantize(
        self, payload: Payload, chosen: Sequence[int], parts: Sequence[Weight], *, caches: bool
    ) -> None:
        """Quantize some weights into the payload."""
        order, casts, values = None, [], []
        for index in chosen:
            shard, of_weight, part = self.shards[index], payload.weights[index], parts[index]
            common = getattr(part.record.layer, "common", None)
            if common is not None or shard.amaxes_order is not order:
                shard.order_amaxes()  # of all that are reduced together
                order = shard.amaxes_order
            if not caches or not isinstance(part, MasterWeight):
                fill(of_weight, part, shard)
                continue
            cast = self._payload_cast(shard, of_weight, part)
            if cast is not None:
                casts.append(cast)
                values.append(part.plain)
        if casts:
            # One launch for the group. With a payload per weight the host took 124 ms per step more than BF16's,
            # with one per group 88.
            payload.cast(casts, values)
        if caches:
            for index in chosen:
                payload.weights[index].contents = self.shards[index].contents

    def _payload_cast(
        self, shard: Shard, of_weight: WeightPayload, part: MasterWeight
    ) -> PayloadCast | None:
        """Return the cast of a weight into its cached payload, for one launch of several; None if it ran already."""
        state, plain = gathered_state(part), part.plain
        others = shard.amaxes, *(() if state is None else (*state[:3], state.common_amax))
        cast = of_weight.cached_cast(plain, others)
        if cast is None:
            cast = fill(of_weight, part, shard, runs=False)
            of_weight.cache_cast(cast, plain, others)
        # Weak, and watched: a cached payload must not keep the memory of a weight that was
        # replaced, and is dropped together with it.
        if of_weight.source is None or of_weight.source() is not plain:
            of_weight.source = weakref.ref(plain, self._group.forget)
        return cast

"""Metadata of one weight, shared by all its aliases and views."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import shared_cache

from hybridtensor.dtensor import local
from hybridtensor.ops.amaxes import RecordedAmax
from hybridtensor.ops.autograd import version_of
from hybridtensor.ops.captures import Stream
from hybridtensor.state import Context, LayerState, Section, StateTensors
from hybridtensor.subclasses.face_cache import FaceCache
from hybridtensor.subclasses.high_precision import HighPrecisionValues

_use_count: Callable[[int], int] = torch._C._storage_Use_Count


class Place(NamedTuple):
    """Where a module has a weight; the module weakly."""

    module: weakref.ref[nn.Module]
    name: str

    def has(self, record: WeightRecord) -> bool:
        """Return whether the weight that is there now has this record."""
        module = self.module()
        found = None if module is None else module._parameters.get(self.name)
        return found is not None and getattr(local(found), "record", None) is record


class Gathered(Protocol):
    """Interface of ``distributed.fsdp.shard.Shard``, which owns a gathered weight's faces."""

    sharded: Any  # what FSDP2 knows of the weight, for hybridtensor.distributed.fsdp alone

    @property
    def values(self) -> Tensor | None:
        """The high-precision values, if gathered."""

    def is_there(self, direction: str) -> bool:
        """Return whether a face is gathered now."""

    def require(self, direction: str) -> Any:
        """Return a face of the whole weight, gathering it again if necessary."""

    def mark_traced(self) -> None:
        """Record that a compiled graph holds the tensors of the faces."""


@dataclass(slots=True)
class _Holder:
    """A plain tensor inside a wrapper, weakly, with its version counter at the last use."""

    tensor: weakref.ref[Tensor]
    version: int


class ReadBy(NamedTuple):
    """The layers that a tensor was quantized for, and their quantizer."""

    weights: tuple[WeightRecord, ...]
    quantizer: object


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class WeightRecord:
    """Metadata of one weight, shared by its aliases and views.

    Attributes:
        layer: State of the weight's layer, or None; in a graph that is being compiled its tensors.
        values: High-precision values of a persistent weight, or None.
        shard: The ``distributed.fsdp.shard.Shard`` of a local shard, weakly, or None.
        gathered: Owner of the faces of a weight that FSDP2 gathered, or None.
        section: This rank's section of the layer under tensor parallelism; None is all of it.
        cut: The spec of the DTensor that the section was worked out for, and the section; None if it came otherwise.
        first: Number of this rank's first expert of a stack; None if unknown.
        is_new: How many factories, such as ``new_zeros``, made this of a weight one after the other; 0 if none, or once
            a layer was seen to have it. FSDP2 makes shards by one. See ``InterceptingTensor.is_of_no_layer``.
        is_copy: Whether this was made of another weight, and has the state of that one's layer, and no other layer was
            seen to have it since.
        is_of_graph: Whether a graph that is being compiled has this, or a compiled one returned it: the values of a
            persistent weight are unknown there.
        changes: Count of counted writes, and of moments at which an alias may have written: each invalidates faces.
        writes: Writes that handlers counted.
        written_on: Stream of the last write; None if unknown.
        compiled_writes: Writes of compiled code, each counted at least once.
        counted_writes: ``writes`` when writes of compiled code were counted last.
        is_held_elsewhere: Whether the memory had an alias when writes were counted last.
        is_interprocess: Whether processes share CUDA memory: it was sent to another one, or came from one.
        replayed: Whether a CUDA graph captured a write, whose replays are not counted.
        face_cache: The cached faces.
        context: Cached context of the weight; None if it was not requested, or for a stack.
        for_products: Cached context, recipe, and the context of faces that only products read.
        place: The ``Place`` where the weight was found last, or None.
        readers: The layers that an input was quantized for; None of any other tensor.
        amaxes: Record of such an input's amaxes, for the forward that reads it, or None.
    """

    layer: LayerState | StateTensors | None = None
    values: HighPrecisionValues | None = None
    # FSDP2's parameter owns the shard. A strong reference here would leak the model, because autograd's views refer to
    # tensors where Python's collector does not look.
    shard: weakref.ref[Any] | None = None
    gathered: Gathered | None = None
    section: Section | None = None
    cut: tuple[object, Section] | None = None
    first: int | None = None
    is_new: int = 0
    is_copy: bool = False
    is_of_graph: bool = False
    changes: int = 0
    writes: int = 0
    written_on: Stream | None = None
    compiled_writes: int = 0
    counted_writes: int = 0
    is_held_elsewhere: bool = False
    is_interprocess: bool = False
    replayed: bool = False
    face_cache: FaceCache = field(default_factory=FaceCache)
    context: Context | None = None
    for_products: tuple[Context, object, Context] | None = None
    place: Place | None = None
    readers: ReadBy | None = None
    amaxes: RecordedAmax = None
    _holders: dict[int, _Holder] = field(default_factory=dict)

    def with_values(self, values: HighPrecisionValues | None) -> WeightRecord:
        """Return a record of the same weight with other values, not shared with existing aliases."""
        made = WeightRecord(self.layer)
        made.values, made.shard, made.gathered = values, self.shard, self.gathered
        made.section, made.first = self.section, self.first
        made.is_new, made.is_copy = self.is_new, self.is_copy
        return made

    def successor(self) -> WeightRecord:
        """Return a record of the weight with other memory, not shared with existing aliases."""
        made = WeightRecord(self.layer)
        made.changes, made.writes = self.changes + 1, self.writes + 1
        made.section, made.first = self.section, self.first
        made.is_new, made.is_copy = self.is_new, self.is_copy
        return made

    def receive_weight(self) -> None:
        """Record that a collective wrote the layer's weight into memory that a factory made for it."""
        self.is_new = max(self.is_new - 1, 0)

    def mark_written(self, captured: bool) -> None:
        """Record a write, which invalidates faces, and may be ``captured`` in a CUDA graph."""
        self.changes += 1
        self.writes += 1
        self.face_cache.clear()
        self.replayed = self.replayed or captured

    def alias_for_others(self, plain: Tensor) -> Tensor:
        """Return an alias of ``plain`` for someone who may write it in ways that nothing counts."""
        # A tensor object of its own: whatever is made from it (``.data``, numpy, DLPack) keeps it alive, which
        # ``count_others`` detects.
        self.changes += 1
        # Whoever gets the alias may write on any stream.
        self.written_on = None
        return plain.detach()

    def add_holder(self, plain: Tensor) -> None:
        """Record that a wrapper holds ``plain``, the memory or a view of it."""
        key, holders = id(plain), self._holders
        if shared_cache and not holders and plain.is_cuda:  # later ones hold the same memory
            self.is_interprocess = self.is_interprocess or _was_received(plain)
        if key not in holders:
            # Of the plain tensor, not of its wrapper: ``swap_tensors``, which moves wrappers,
            # refuses a tensor that has weak references. The callback removes the entry, since an id comes again; it
            # holds the dictionary, not the record, which would live as long as the tensor.
            reference = weakref.ref(plain, lambda _: holders.pop(key, None))
            holders[key] = _Holder(reference, version_of(plain))

    def count_writes(self, plain: Tensor, version: int) -> None:
        """Count writes of ``plain`` by torch's version counter since the last call."""
        holder = self._holders[id(plain)]
        if holder.version != version:
            holder.version = version
            self.changes += 1

    def count_others(self, plain: Tensor, version: int) -> None:
        """Count what others wrote, or may have written, since the last use of ``plain``."""
        # Besides torch's count, each use while an alias exists counts as a write, and one more use after it: its holder
        # may have written in between.
        if self._holders[id(plain)].version != version:
            self.count_writes(plain, version)
        # Each living tensor over a storage counts once in the storage's use count, and the storage object that is asked
        # counts once more. ``torch._C._storage_Use_Count`` is private; ``tests/subclasses/test_record.py`` fails where
        # it counts otherwise. ``is_shared`` says whether other processes may hold it; of CUDA memory it is always true.
        storage = plain.untyped_storage()
        shared = (
            self.is_interprocess
            or _use_count(storage._cdata) > len(self._holders) + 1
            or (not plain.is_cuda and storage.is_shared())
        )
        if shared or self.is_held_elsewhere:
            self.changes += 1
            self.is_held_elsewhere = shared


def _was_received(plain: Tensor) -> bool:
    """Return whether memory came from another process."""
    # Private: by handle, what torch received
    known = plain.untyped_storage()._cdata
    return any(received.cdata == known for received in list(shared_cache.values()))

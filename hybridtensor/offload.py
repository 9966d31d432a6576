"""Move what blocks save for backward to host memory, block by block, while the next block computes.

Whole storages are copied, each once: FP8 bytes where a recipe saves FP8 bytes, and one face for all layers that share
it. On a GPU the copies run on a stream of their own: a block's memory is given back when the next block has ended, and
when backward enters a block, what the one before it needs is already on its way. On a CPU the copies are made at once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hybridtensor.arguments import require_flag, require_int, require_items, require_kind
from hybridtensor.dtensor import local
from hybridtensor.ops.library import outside_graphs, saved_tensors_hooks
from hybridtensor.subclasses import MasterWeight
from hybridtensor.subclasses.structure import flatten

__all__ = ["Traffic", "offload_activations"]

# Hooks inspect memory there
_not_traced = outside_graphs("offload_activations works between compiled graphs")


@dataclass
class Traffic:
    """Bytes that were copied.

    ::

        with ht.offload.offload_activations(model.blocks) as traffic:
            loss = model(batch).mean()
        print(traffic.to_host)
    """

    to_host: int = 0
    to_device: int = 0


@contextmanager
def offload_activations(
    blocks: Iterable[nn.Module],
    *,
    keep_last: int = 1,
    min_bytes: int = 1024,
    pin_memory: bool | None = None,
) -> Iterator[Traffic]:
    """Offload tensors that ``blocks`` save for backward to the host; the context encloses the model's forward.

    ::

        with ht.offload.offload_activations(model.blocks, keep_last=1):
            loss = model(batch).mean()
        loss.backward()

    Parameters, buffers and cached faces are not offloaded, and neither are tensors saved outside of blocks, tensor
    subclasses, and outputs that selective checkpointing inside of blocks keeps; inputs of checkpoints there are. A
    block that is called in a checkpoint, or under other hooks on saved tensors that begin inside of the context, is
    left to these. Gradients have the same bits.

    Args:
        blocks: Modules that run one after the other, for example ``model.blocks``; none inside of
            another. The blocks, modules inside of them, or the whole model may be compiled, but the
            whole model not with ``fullgraph=True``, because saved tensors are intercepted between graphs.
        keep_last: Number of last blocks that are not offloaded, since backward begins with them.
        min_bytes: Minimum size of an offloaded storage.
        pin_memory: Whether to page-lock host memory, which copies need to overlap with computation;
            None does so if the blocks are on a GPU.

    Returns:
        The bytes copied so far; backward adds to them.

    Raises:
        TypeError: If ``blocks`` are not modules, or a number has the wrong type.
        ValueError: If there are no blocks, a block occurs twice or inside of another, or a number is negative.
        RuntimeError: If another open context offloads the same blocks; in backward, if a tensor was
            changed in place after it was saved and before it was copied.
    """
    modules = _checked(blocks, keep_last, min_bytes)
    if pin_memory is not None:
        require_flag("offload_activations", pin_memory=pin_memory)
    offload = _Offload(min_bytes, pin_memory)
    hooks: list[RemovableHandle] = []
    _offloaded.append(modules)
    try:
        for block in modules[: max(0, len(modules) - keep_last)]:
            hooks.append(block.register_forward_pre_hook(offload.enter, with_kwargs=True))
            hooks.append(block.register_forward_hook(offload.leave, always_call=True))
        yield offload.traffic
    finally:
        for hook in hooks:
            hook.remove()
        _offloaded.remove(modules)
        offload.close()


def held_by(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that live as long as ``tensor``: its own, and a master weight's cached faces."""
    plain, _ = flatten(tensor)
    if isinstance(tensor, MasterWeight):
        for face in tensor.record.face_cache.faces():
            plain += face.tensors()
    return plain


class _Memory:
    """A saved storage: on the device, on the host, or both."""

    def __init__(self, tensor: Tensor) -> None:
        # torch's version counter tells of writes in place; a torch without it would have us copy
        # back what was saved before such a write, without an error
        self.device, self.version = tensor.device, tensor._version
        # While it lives, the number of no other storage is the same
        self.weak = StorageWeakRef(tensor.untyped_storage())
        self.source: Tensor | None = tensor.detach()  # until the copy has ended
        self.host: Tensor | None = None
        self.fetched: Tensor | None = None
        self.copied: tuple[torch.cuda.Stream, torch.cuda.Event] | None = (
            None  # computes here, after this copy
        )
        self.changed = False

    def wait(self) -> None:
        """Make the current stream wait for the last copy, so that memory may be freed."""
        if self.copied is not None:
            stream, event = self.copied
            stream.wait_event(event)

    # When this goes, its memory returns to the pool of the stream that computes, while a copy on the other one may
    # still use it.
    __del__ = wait

    def release(self) -> None:
        """Free the device storage after its copy to the host."""
        if self.source is not None and self.host is not None:
            self.wait()
            self.changed |= self.source._version != self.version
            self.source = None

    def storage(self) -> torch.UntypedStorage:
        """Return the storage, or its copy on the device."""
        if self.changed or (self.source is not None and self.source._version != self.version):
            raise RuntimeError(
                "offload_activations: a saved tensor was changed in place before it was copied; "
                "use the operator that is not in place"
            )
        there = self.source if self.source is not None else self.fetched
        if there is None:
            raise RuntimeError(
                "offload_activations: a saved tensor was given back and not fetched; please "
                "report this"
            )
        return there.untyped_storage()


@dataclass(eq=False)
class _Group:
    """What one call of a block saved; entries are weak, so that autograd owns the memory."""

    previous: _Group | None
    # Of its parameters, or else inputs. What is saved elsewhere, a number on the host for instance, stays there
    devices: set[torch.device]
    held: set[int]
    memories: list[weakref.ref[_Memory]] = field(default_factory=list)

    def alive(self) -> list[_Memory]:
        """Return the memory that autograd still needs."""
        return [memory for memory in (ref() for ref in self.memories) if memory is not None]


@dataclass
class _Saved:
    """Replacement of a saved tensor: its storage and its view of it."""

    memory: _Memory
    group: _Group
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Offload:
    """The groups of one context, and the copies between device and host."""

    def __init__(self, min_bytes: int, pin_memory: bool | None) -> None:
        self.traffic, self.min_bytes, self.pin_memory = Traffic(), min_bytes, pin_memory
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.lock = threading.RLock()  # autograd has a thread per device
        self.outside = saved_tensors_hooks(False)
        self.open: list[tuple[_Group, torch.autograd.graph.saved_tensors_hooks] | None] = []
        self.last: _Group | None = None
        self.fetched: list[_Group] = []  # what backward is at, and what is fetched ahead
        self.known: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()

    # -- forward

    @_not_traced
    def enter(self, block: nn.Module, args: object, kwargs: object) -> None:
        if saved_tensors_hooks(False) != self.outside:
            # A checkpoint around the block counts what it saves, and again when it runs the block in backward,
            # where these hooks may be gone
            self.open.append(None)
            return
        # FSDP2 gives the memory of gathered parameters back before ``leave`` could look at them
        there = [*block.parameters()] or tree_leaves((args, kwargs))
        devices = {tensor.device for tensor in there if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            devices.discard(torch.device("cpu"))  # that of a mask, or of lengths
        group = _Group(self.last, devices, _addresses(block))
        hooks = torch.autograd.graph.saved_tensors_hooks(
            functools.partial(self.pack, group), self.unpack
        )
        hooks.__enter__()
        self.open.append((group, hooks))

    @_not_traced
    def leave(self, block: nn.Module, args: object, output: object) -> None:
        """Start copying what the block saved, and free what the block before it saved."""
        # Copied now, not as each tensor is saved: by now it is known which of them a weight keeps anyway.
        entered = self.open.pop()
        if entered is None:
            return
        group, hooks = entered
        hooks.__exit__(None, None, None)
        self.send(group, _addresses(block))
        if self.last is not None:
            self.release(self.last)
        self.last = group

    def close(self) -> None:
        if self.last is not None:
            self.release(self.last)
        self.last = None

    @_not_traced
    def pack(self, group: _Group, tensor: Tensor) -> Tensor | _Saved:
        """Pack a saved tensor; small ones, and those that stay on the device anyway, are returned unchanged."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if tensor.device not in group.devices or storage.nbytes() < max(1, self.min_bytes):
            return tensor
        # Lazily conjugate or negative: the bytes are not its values. Nested: it has no shape.
        if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
            return tensor
        if storage.data_ptr() in group.held:
            return tensor
        # The private ``_cdata`` numbers storages: ``data_ptr`` may be that of another one by now,
        # and the Python object is made anew at each call. ``_Memory.weak`` keeps the number taken.
        memory = self.known.get(storage._cdata)
        if memory is None or memory.version != tensor._version:
            memory = self.known[storage._cdata] = _Memory(tensor)
        if all(ref() is not memory for ref in group.memories):
            group.memories.append(weakref.ref(memory))
        return _Saved(
            memory, group, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )

    def send(self, group: _Group, held: set[int]) -> None:
        """Copy to the host, except storages that a weight holds by now."""
        memories = [m for m in group.alive() if m.host is None and m.source is not None]
        for memory in memories:
            source = memory.source
            if source is None or source.untyped_storage().nbytes() == 0:
                continue
            if source.untyped_storage().data_ptr() in held:
                continue
            memory.host = self.copy(memory, _bytes_of(source), torch.device("cpu"))
            self.traffic.to_host += memory.host.nbytes

    def release(self, group: _Group) -> None:
        """Free device memory after the copies."""
        for memory in group.alive():
            memory.release()

    # -- backward

    @_not_traced
    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        """Return a saved tensor in backward; the first one of a block fetches the block and the previous one."""
        if not isinstance(saved, _Saved):
            return saved
        with self.lock:
            if not self.fetched or self.fetched[0] is not saved.group:
                self.come_to(saved.group)
            memory = saved.memory
            if memory.source is None:
                self.fetch([memory])
                memory.wait()
        empty = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return empty.set_(memory.storage(), saved.offset, saved.shape, saved.stride)

    def come_to(self, group: _Group) -> None:
        """Fetch a block and the one before it; release what only a second backward would need."""
        before, self.fetched = (
            self.fetched,
            [group] if group.previous is None else [group, group.previous],
        )
        needed = [memory for each in self.fetched for memory in each.alive()]
        for memory in (memory for each in before for memory in each.alive()):
            if all(memory is not other for other in needed):
                memory.wait()
                memory.fetched = None
        self.fetch(needed)

    def fetch(self, memories: list[_Memory]) -> None:
        """Copy to the device what is only on the host."""
        for memory in memories:
            if memory.host is not None and memory.source is None and memory.fetched is None:
                memory.fetched = self.copy(memory, memory.host, memory.device)
                self.traffic.to_device += memory.host.nbytes

    def copy(self, memory: _Memory, source: Tensor, target: torch.device) -> Tensor:
        """Copy bytes between host and device; on a GPU in a side stream after the current work."""
        device = memory.device
        if device.type != "cuda":
            return source.clone()
        pinned = target.type == "cpu" and self.pin_memory is not False
        made = torch.empty(source.shape, dtype=torch.uint8, device=target, pin_memory=pinned)
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        side, computing = self.streams[device], torch.cuda.current_stream(device)
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            made.copy_(source, non_blocking=True)
            memory.copied = computing, side.record_event()
        return made


def _checked(blocks: Iterable[nn.Module], keep_last: int, min_bytes: int) -> list[nn.Module]:
    who = "offload_activations"
    if isinstance(blocks, nn.Module) and not isinstance(blocks, (nn.ModuleList, nn.Sequential)):
        raise TypeError(
            f"{who}: several blocks are required, got one {type(blocks).__name__}; put it in a list"
        )
    modules = require_items(who, "a list of blocks", blocks, "give for example model.blocks")
    for module in modules:
        require_kind(who, "a module as block", module, nn.Module, "give for example model.blocks")
    if not modules:
        raise ValueError(f"{who}: blocks is empty; pass at least one module")
    below = [id(m) for block in modules for m in block.modules()]
    if any(below.count(id(block)) > 1 for block in modules):
        raise ValueError(
            f"{who}: a block is given twice, or is inside of another one; pass each once"
        )
    require_int(who, at_least=0, keep_last=keep_last, min_bytes=min_bytes)
    known = [block for others in _offloaded for block in others]
    if _is_inside(modules, known) or _is_inside(known, modules):
        raise RuntimeError(
            f"{who}: another open context offloads one of these blocks, or one inside of it; open one context "
            "around the model"
        )
    return modules


_offloaded: list[list[nn.Module]] = []  # the blocks of each open context


def _is_inside(blocks: list[nn.Module], others: list[nn.Module]) -> bool:
    below = {id(module) for other in others for module in other.modules()}
    return any(id(block) in below for block in blocks)


def _addresses(block: nn.Module) -> set[int]:
    """Return the addresses that parameters, buffers and cached faces use now."""
    tensors = [*block.parameters(), *block.buffers()]
    plain = [t for tensor in tensors for t in held_by(local(tensor))]
    return {t.untyped_storage().data_ptr() for t in plain} - {0}


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )

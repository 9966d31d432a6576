"""Where casts record amaxes: fp32 tensors ``[S]``, one number for each delayed scale of a layer.

The life of an amax in a step:

1. A forward takes zeros (``provisional``); casts of its input, of its weight and of its output's gradient record there.
2. Its backward commits them (``commit``); those of a forward that no backward follows are dropped. If gradients are
   enabled, but the layer and all before it are frozen, forward commits them (``commit_alone``), unless the layer has a
   backward in the same step, which only eager code knows.
3. ``fold`` takes the maximum of all that is committed and ``total``, for all layers at once: when somebody reads
   ``AmaxRecord.amax``, and in ``step_``; while a CUDA graph is captured, at the end of each backward.
4. ``step_`` reduces the totals over ranks, moves them into the layers' histories, and zeros them.

Casts of a compiled graph return their amaxes (``ReturnedAmaxes``), and its backward commits them into ``total`` at
once. A gather of FSDP2 runs before it is known whether a backward follows: its casts record elsewhere (``of_gathers``),
and the next gather after a write (``settle_gathers``) or ``step_`` counts them if one did.

A compiled graph reaches the record of a layer by its *address*, int64 ``[1]``. Autograd saves what a graph needs in
backward, and hooks on saved tensors may copy, pack or offload it: a number is the same in a copy, a record would be
another one. The memory of records is therefore never freed; it is used again once its layer is gone.
"""

from __future__ import annotations

import bisect
import collections
import functools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hybridtensor.ops.kernel_library import Launch, aligned_fp32, on_device
from hybridtensor.ops.library import backward_with_callbacks, define, implement, is_captured
from hybridtensor.ops.zeros import several_zeros, zeros

_CHUNK = 4096  # numbers that are allocated at once
_SPARE = 8
"""Zeros that a layer keeps for the forwards of the next step: what a bucket of weights was recorded in would add up."""
_MOST_PENDING = 256
"""Backwards of a step whose amaxes are kept apart: of some layers no step ends, as of a frozen model's."""


class ReturnedAmaxes:
    """The amaxes that the casts of one traced forward return: fp32 ``[S]`` each, zero at unused scales."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tensors: list[Tensor] = []


RecordedAmax = Tensor | ReturnedAmaxes | None
"""Where a cast recorded: fp32 ``[S]``, what a graph returns, or nothing."""


class AmaxRecord:
    """The amaxes of one layer in the step under way.

    Args:
        size: ``S``.
        device: Where it is.

    Attributes:
        total: fp32 ``[S]``, zeros at first: what was recorded, but for what is committed and not folded in yet.
        address: int64 ``[1]`` on the same device: where ``total`` is.
        of_inputs: What the layer's inputs of this step were measured into, one for each backward, or None where that
            is unknown; other layers that read the same input have the same.
        of_gathers: fp32 ``[S]``, the amaxes of this rank's part of a weight as FSDP2 gathered it last; they count if a
            backward follows on any rank.
        is_gathered: Whether a gather of this step recorded them.
        is_used: Whether a backward ran since, in eager code.
        used_in_graphs: fp32 ``[S]``, not 0 if one ran in compiled code.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._committed: dict[int, Tensor] = {}  # by their ids
        # Of forwards that no backward follows: amaxes, and what the input was measured into
        self._alone: list[tuple[Sequence[RecordedAmax], Tensor | None]] = []
        self.of_inputs: list[Tensor | None] = []
        self._spare: list[Tensor] = []  # zeros, for the forwards of the next step
        self.is_gathered = self.is_used = False
        begin = aligned_fp32(2 * size)  # of what gathers record
        with torch.inference_mode(False), torch.no_grad():
            if device.type == "meta":
                taken = torch.zeros(begin + size, dtype=torch.float32, device=device)
                self.address = nowhere(device)
            else:
                memory = _memory(_indexed(device))
                taken = memory.take(begin + size)
                self.address = torch.tensor([taken.data_ptr()], dtype=torch.int64, device=device)
                # Not at exit, when nobody takes memory any more.
                weakref.finalize(self, memory.give_back, taken).atexit = False
            # ``commit`` finds both by the address: one behind the other.
            self.total, self.used_in_graphs = taken[:size], taken[size : 2 * size]
            self.of_gathers, self._of_values = taken[begin : begin + size], taken[size:]

    @property
    def amax(self) -> Tensor:
        if self._committed:
            fold([self])
        return self.total

    def provisional(self) -> Tensor:
        """Allocate fp32 zeros ``[S]`` for the casts of one forward and its backward."""
        if self._spare and not is_captured():
            return self._spare.pop()
        # Out of sight of dispatch modes: what was spare in the first pass of selective checkpointing is none in its
        # second, which looks for the results of the same operators.
        with torch.inference_mode(False), _disable_current_modes():
            return zeros(len(self.total), self.total)

    def commit(self, *amaxes: RecordedAmax) -> None:
        """Commit the amaxes of a forward and its backward; they are folded in later, those of all layers at once."""
        if is_captured():
            _commit_captured(self, [amax for amax in amaxes if isinstance(amax, Tensor)])
            return
        for amax in amaxes:
            if isinstance(amax, Tensor) and amax is not self.total:
                self._committed[id(amax)] = amax
        if len(self._committed) >= _MOST_PENDING:
            fold([self])

    def commit_alone(self, amaxes: Sequence[RecordedAmax], of_input: Tensor | None) -> None:
        """Keep the amaxes of a forward that no backward follows until ``settle_alone``; ``of_input`` as for
        ``add_input``."""
        self.is_used = True
        if is_captured():  # now: a backward that runs may end after the capture
            _raise_total(self, [amax for amax in amaxes if isinstance(amax, Tensor)])
            return
        self._alone = [*self._alone[-_MOST_PENDING:], (amaxes, of_input)]

    def settle_alone(self, *, counts: bool) -> None:
        """Commit what ``commit_alone`` kept if it ``counts``, at the end of a step, or drop it."""
        alone, self._alone = self._alone, []
        for amaxes, of_input in alone if counts else ():
            self.commit(*amaxes)
            self.add_input(of_input)

    def for_gather(self) -> Tensor:
        """Return where the casts of a gather record amaxes, fp32 ``[S]``."""
        self.is_gathered = True
        return self.of_gathers

    def settle_gathers(self) -> None:
        """Commit the amaxes of the gathers so far if a backward ran, and drop them if not: other values come next."""
        if not self.is_gathered:
            return
        # Out of sight of dispatch modes, as in ``provisional``: only one pass of selective checkpointing may come here.
        with torch.inference_mode(False), torch.no_grad(), _disable_current_modes():
            used = self.used_in_graphs + int(self.is_used)
            counted = torch.where(used != 0, self.of_gathers, 0.0)
            forget_gathers([self])
            self.commit(counted)

    def add_input(self, amax: Tensor | None) -> None:
        """Record what a backward's input was measured into; None if that is unknown."""
        if len(self.of_inputs) >= _MOST_PENDING:
            self.of_inputs = [None]
        self.of_inputs.append(amax)


def fold(records: Sequence[AmaxRecord], *, ends_step: bool = False) -> None:
    """Fold committed amaxes into records of one device; ``ends_step`` allocates zeros for those of the next step."""
    if is_captured():  # of all backwards that run: one may run within another
        for commits in list(_CAPTURED.values()):
            commits.fold(records)
        return
    with torch.no_grad():
        folded = _fold({record: record._committed for record in records})
        # Not in the memory of those, which another layer may have, too, and fold in later.
        lacking = [record for record in folded if len(record._spare) < _SPARE]
        if ends_step and lacking:
            spare = several_zeros(
                [len(record.total) for record in lacking], lacking[0].total.device
            )
            for record, zeros in zip(lacking, spare, strict=True):
                record._spare.append(zeros)


def _fold(committed: Mapping[AmaxRecord, dict[int, Tensor]]) -> list[AmaxRecord]:
    """Fold amaxes, by their ids, into their records, and return those, once for each of their amaxes."""
    folded: list[AmaxRecord] = []
    while pending := [record for record, amaxes in committed.items() if amaxes]:
        measured = [committed[record].popitem()[1] for record in pending]
        # One launch for an amax of each layer, until none has any left.
        torch._foreach_maximum_([record.total for record in pending], measured)
        folded += pending
    return folded


class _CapturedCommits:
    """The amaxes that one backward commits while a CUDA graph is captured: the graph may end with the backward."""

    def __init__(self) -> None:
        self.by_record: dict[AmaxRecord, dict[int, Tensor]] = {}

    def fold(self, records: Iterable[AmaxRecord] | None = None) -> None:
        """Fold what was committed so far into some of the records, or into all."""
        every = self.by_record
        some = every if records is None else {one: every[one] for one in records if one in every}
        for record, amaxes in some.items():
            if record.total.is_cuda:
                stream = torch.cuda.current_stream(record.total.device)
                for amax in amaxes.values():
                    # Layers may have run on other streams, for which the engine made this one wait.
                    amax.record_stream(stream)
        with torch.no_grad():
            _fold(some)


# By the number of the backward. The engine owns them, since it calls ``fold`` at the end: those of a backward that
# raises die with it, as their memory does with the capture.
_CAPTURED: weakref.WeakValueDictionary[int, _CapturedCommits] = weakref.WeakValueDictionary()


def _raise_total(record: AmaxRecord, amaxes: Sequence[Tensor]) -> None:
    for amax in amaxes:
        torch.maximum(record.total, amax, out=record.total)


def _commit_captured(record: AmaxRecord, amaxes: Sequence[Tensor]) -> None:
    """Commit amaxes while a CUDA graph is captured: at the end of the backward, or now if nothing is called there."""
    backward = backward_with_callbacks()
    if backward == -1:
        _raise_total(record, amaxes)
        return
    commits = _CAPTURED.get(backward)
    if commits is None:
        commits = _CAPTURED[backward] = _CapturedCommits()
        # Private in torch, and what FSDP2 calls, too
        torch.autograd.Variable._execution_engine.queue_callback(commits.fold)
    commits.by_record.setdefault(record, {}).update((id(amax), amax) for amax in amaxes)


def forget_gathers(records: Sequence[AmaxRecord]) -> None:
    """Forget what gathers recorded, and that backwards ran."""
    found = [record._of_values for record in records if record.is_gathered]
    if found:
        torch._foreach_zero_(found)
    for record in records:
        record.is_gathered = record.is_used = False


class _Memory:
    """The memory of all records on one device, with its index."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._chunks: list[tuple[int, Tensor]] = []  # by address
        self._rest: Tensor | None = None
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._returned: collections.deque[Tensor] = collections.deque()

    def take(self, size: int) -> Tensor:
        """Return at least ``size`` fp32 zeros."""
        whole = aligned_fp32(size)
        with self._lock:
            self._sort_returned()
            free = self._free.get(whole)
            if free:
                return free.pop().zero_()
            rest = self._rest
            if rest is None or len(rest) < whole:
                size_of_chunk = max(whole, _CHUNK)
                rest = torch.zeros(size_of_chunk, dtype=torch.float32, device=self._device)
                self._chunks.append((rest.data_ptr(), rest))
                self._chunks.sort(key=lambda known: known[0])
            self._rest = rest[whole:]
            return rest[:whole]

    def give_back(self, taken: Tensor) -> None:
        """Let another layer reuse memory; without tensor operations and locks."""
        # The garbage collector may call it under any mode, and in a thread that is in ``take`` and has the lock.
        self._returned.append(taken)

    def _sort_returned(self) -> None:
        """Sort returned memory by size, under the lock."""
        while self._returned:
            taken = self._returned.popleft()
            self._free.setdefault(len(taken), []).append(taken)

    def at(self, address: int) -> Tensor:
        """Return the fp32 memory from an address on; raise RuntimeError if no record is there."""
        index = bisect.bisect_right([begin for begin, _ in self._chunks], address) - 1
        for begin, chunk in self._chunks[max(index, 0) : index + 1]:
            if address < begin + chunk.nbytes:
                return chunk[(address - begin) // chunk.itemsize :]
        raise RuntimeError(
            "step_: a compiled graph got an address where no layer records amaxes; hooks on saved tensors must "
            "give integers back as they were"
        )


@functools.cache
def _memory(device: torch.device) -> _Memory:
    return _Memory(device)


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@functools.cache
def nowhere(device: torch.device) -> Tensor:
    """Return the address 0, whose recorded amaxes are dropped."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def record_at(record: Tensor | None) -> Tensor | None:
    """Return the record that casts on a CPU write: the tensor, or the one at an address."""
    if record is None or record.dtype != torch.int64:
        return record
    address = int(record)
    return _memory(record.device).at(address) if address else None


def _commit_reference(address: Tensor, amaxes: list[Tensor], after: Tensor, size: int) -> Tensor:
    record = record_at(address)
    if record is not None:
        for amax in amaxes:
            torch.maximum(record[:size], amax, out=record[:size])
        record[size : 2 * size] = 1.0
    return address.new_empty(0, dtype=torch.float32)


def _commit_on_a_gpu(address: Tensor, amaxes: list[Tensor], after: Tensor, size: int) -> Tensor:
    with on_device(address.device):
        for amax in amaxes:
            _raise_launch(size, True, address.device)(address, amax.contiguous(), size)
        if not amaxes:
            _raise_launch(size, False, address.device)(address, address, size)
    return address.new_empty(0, dtype=torch.float32)


@functools.cache
def _raise_launch(size: int, has_amaxes: bool, device: torch.device) -> Launch:
    """Return the cached launch on a device, onto which its kernel is loaded."""
    blocks = -(-2 * size // 128)
    constants = {"BLOCK": 128, "HAS_AMAXES": has_amaxes}
    return Launch("delayed", "raise_kernel", blocks, options={"num_warps": 1}, **constants)


# The schema is silent about the write to the record, which is no tensor of the graph: what is returned has no
# elements, and what follows depends on it.
_COMMIT = define(
    "commit(Tensor address, Tensor[] amaxes, Tensor after, int size) -> Tensor",
    reference=_commit_reference,
    fake=lambda address, amaxes, after, size: address.new_empty(0, dtype=torch.float32),
)
implement("commit", _commit_on_a_gpu)


def commit(address: Tensor, amaxes: list[Tensor], after: Tensor, size: int) -> Tensor:
    """Raise the record at an address to amaxes, mark that a backward ran, and return an empty tensor for what has to
    come after.

    Args:
        address: int64 ``[1]``, of a record ``[S]``; 0 drops them.
        amaxes: fp32 ``[S]`` each, or none.
        after: What is computed before, in backward: a compiler that cuts the graph into forward and backward would
            do in forward what depends on nothing of backward.
        size: ``S``.
    """
    return _COMMIT(address, amaxes, after, size)

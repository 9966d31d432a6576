"""Ranks that do one thing together: all of them finish it, or all of them raise."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_group, require_timeout
from hybridtensor.printed import some

T = TypeVar("T")

Groups: TypeAlias = dict[tuple[datetime.timedelta, bool], dist.ProcessGroup]
"""Our own gloo groups of a world, by their timeout and whether a thread in the background uses them."""

Answer: TypeAlias = tuple[str, str, Any]
"""Kind and text of the error that a rank's work raised, each "" if none; and what it gave."""

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Groups] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]] = (
    weakref.WeakKeyDictionary()
)
_LOOK = datetime.timedelta(seconds=1)  # between two looks whether a rank has left
_MOMENT = 0.001  # seconds between two looks at a GPU
_KINDS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
}

TIMEOUT = datetime.timedelta(minutes=10)
PATIENCE = datetime.timedelta(seconds=30)  # for ranks that were at the same collective a moment ago


def patience() -> datetime.timedelta:
    """Wait until the collectives that this rank launched are over, and return how long the other ranks may take then.

    Python is ahead of a GPU: where gradients were just reduced, another rank may still compile or read its batch, for
    longer than one waits for a rank that does not come.
    """
    _finish_launched()
    return PATIENCE


def _finish_launched() -> None:
    """Wait until the GPU is done or a rank has left, for ``TIMEOUT`` at most; not while a CUDA graph is captured."""
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    if alone or not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
        return
    # The current stream waits for the collectives of gradients. ``torch.cuda.synchronize`` would wait for a rank that
    # has left, too, until NCCL's own timeout
    done, looked = torch.cuda.Event(), time.monotonic()
    deadline = looked + TIMEOUT.total_seconds()
    done.record()
    while not done.query() and time.monotonic() < deadline:
        time.sleep(_MOMENT)
        if time.monotonic() - looked > _LOOK.total_seconds():
            try:
                gone = bool(_who_left(range(dist.get_world_size())))
            except RuntimeError:  # the store is gone, and with it the rank that had it
                gone = True
            if gone:
                return  # who compares ranks raises, and says so
            looked = time.monotonic()


def _who_left(members: Iterable[int]) -> list[int]:
    """Return the ranks whose processes have ended."""
    store = dist.distributed_c10d._get_default_store()
    return [rank for rank in members if store.check([f"hybridtensor/left/{rank}"])]


class Ranks:
    """The ranks of a process group, or this process alone.

    All ranks of a world talk through a gloo group of their own, some of them through the group that is given.

    Args:
        who: Name of the operation, for errors.
        group: Process group of these ranks; None is all ranks.
        timeout: Longest wait for a rank.
        advice: What else to do if a rank does not come than to start again.
        in_background: Whether they talk in a thread in the background: what others say meanwhile is no answer to it.

    Attributes:
        rank: This rank, in the group.
        size: Number of ranks.
        members: Numbers of the group's ranks among all ranks, by which errors name them.
    """

    def __init__(
        self,
        who: str,
        group: dist.ProcessGroup | None,
        timeout: datetime.timedelta,
        advice: str = "",
        *,
        in_background: bool = False,
    ) -> None:
        require_group(who, group)
        require_timeout(who, timeout)
        self.who = who
        self.rank, self.size, self.members = 0, 1, [0]
        self._group: dist.ProcessGroup | None = None
        self._known: Groups = {}
        self._timeout, self._advice, self._kind = timeout, advice, (timeout, in_background)
        known = dist.is_available() and dist.is_initialized()
        # torch's, of one process that stands for all
        if known and dist.get_backend(group) != "fake":
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size == 1:
            return
        self.members = members = dist.get_process_group_ranks(group or dist.group.WORLD)
        if len(members) < dist.get_world_size():
            self._group = group
            # Here: the group waits for as long as its own timeout says.
            _meet(who, members, timeout, advice)
            return
        # The group stays for the next time: ending one while a rank still reads what another sent can lose it. A rank
        # that loses another one does end it, so that all others raise at once.
        self._known = _groups.setdefault(_world(), {})
        self._group = self._known.get(self._kind)
        if self._group is None:
            self._group = self._known[self._kind] = self._new_group(members)

    def _new_group(self, members: list[int]) -> dist.ProcessGroup:
        """Create the gloo group after every rank has arrived, so that a missing rank is reported by number."""
        _meet(self.who, members, self._timeout, self._advice)
        # gloo tries five times to reach a rank that is gone, each time for as long as its timeout.
        # All ranks are here, so that it is short while they connect; ``_set_pg_timeout`` is private
        # to torch, and a torch without it fails here.
        fifth = min(1.5 + 0.01 * self.size, max(self._timeout.total_seconds() / 5, 1.0))
        try:
            made: dist.ProcessGroup = dist.new_group(
                timeout=datetime.timedelta(seconds=fifth), backend="gloo"
            )
        except RuntimeError as error:
            self._lost(error)
        dist.distributed_c10d._set_pg_timeout(self._timeout, made)
        return made

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and return all results, which should be small; an exception is raised on every
        rank."""
        mine: Answer
        raised: BaseException | None = None
        try:
            mine = ("", "", work())
        except BaseException as error:  # the others wait for this rank, also when it is interrupted
            raised, mine = error, (type(error).__name__, str(error), None)
        answers: list[Answer] = [mine]
        if self.size > 1:
            answers = [mine] * self.size
            try:
                dist.all_gather_object(answers, mine, group=self._group)
            except RuntimeError as error:
                self._lost(raised or error)
        if raised is not None and not isinstance(raised, Exception):
            raise raised
        failed = [
            (rank, kind, text)
            for rank, (kind, text, _) in zip(self.members, answers, strict=True)
            if kind
        ]
        if failed:
            raise _KINDS.get(failed[0][1], RuntimeError)(self._summary(failed)) from raised
        return [result for _, _, result in answers]

    def each(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank and return this rank's result; only errors are sent."""
        done: list[T] = []
        self.gather(lambda: done.append(work()))
        return done[0]

    def first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the first rank and return its result on every rank."""
        results = self.gather(lambda: [work()] if self.rank == 0 else [])
        return results[0][0]

    def _summary(self, failed: list[tuple[int, str, str]]) -> str:
        texts: dict[str, list[int]] = {}
        for rank, kind, text in failed:
            known = kind in _KINDS or text.startswith("checkpoint.")
            texts.setdefault(text if known else f"{self.who}: {kind}: {text}", []).append(rank)
        if self.size == 1:
            return next(iter(texts))
        return "; ".join(
            f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in texts.items()
        )

    def _lost(self, error: BaseException) -> NoReturn:
        group = self._known.pop(self._kind, None)
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
        raise RuntimeError(
            f"{self.who}: rank {self.members[self.rank]} got no answer from one of the {self.size} ranks; start "
            f"again from the last intact step ({error})"
        ) from error


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks hold shards of a model, gathered or not."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    return any(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers()))


def together(
    who: str, model: nn.Module, timeout: datetime.timedelta
) -> Callable[[Callable[[], T]], T]:
    """Return a function that runs work on all ranks of a sharded model, or on this one alone."""
    if is_sharded(model):
        ranks = Ranks(who, None, timeout)
        if ranks.size > 1:
            return ranks.each
    return lambda work: work()


def _world() -> dist.ProcessGroup:
    """Return the process group of all ranks, which must be initialized."""
    if dist.group.WORLD is None:
        raise RuntimeError(
            "ranks: no process group is initialized; call torch.distributed.init_process_group"
        )
    return dist.group.WORLD


def _meet(who: str, members: list[int], timeout: datetime.timedelta, advice: str) -> None:
    """Wait until every rank of a group has arrived; raise RuntimeError with the number of a missing one."""
    # Private to torch: the store that ranks found each other by. Groups are made of it too, which
    # takes part after part and waits for each anew, and does not tell for whom.
    default, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    counts, key = _meetings.setdefault(_world(), {}), tuple(members)
    counts[key] = counts.get(key, 0) + 1  # all ranks count alike
    name = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    store = dist.distributed_c10d.PrefixStore(f"hybridtensor/{name}/{counts[key]}", default)
    deadline = time.monotonic() + timeout.total_seconds()
    missing, left = [f"{other}" for other in members], list[str]()
    try:
        store.set(f"{rank}", "here")
        while missing and not left and time.monotonic() < deadline:
            seconds = min(max(deadline - time.monotonic(), 0.001), _LOOK.total_seconds())
            with contextlib.suppress(RuntimeError):  # too late; or the store is gone: see below
                store.wait(missing, datetime.timedelta(seconds=seconds))
            missing = [other for other in missing if not store.check([other])]
            left = [str(other) for other in _who_left(map(int, missing))]
    except RuntimeError as error:  # the store is gone, and with it the rank that had it
        raise RuntimeError(
            f"{who}: rank {rank} lost the store of the process group; start again from the last "
            f"intact step ({error})"
        ) from error
    if missing:
        # Take back a meeting that did not come about, so that the next try of all is the same one.
        # Who was there stays recorded: others may be about to look, and would miss the wrong rank.
        counts[key] -= 1
        names = left or missing
        what = "ended before" if left else f"did not come within {timeout}"
        raise RuntimeError(
            f"{who}: rank{'s' if len(names) > 1 else ''} {', '.join(names)} {what}; start again "
            f"from the last intact step{advice and f', or {advice}'}"
        )


def _say_left() -> None:
    """Publish at exit that this process has left, for ranks that wait for it."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the store may have ended before
            store = dist.distributed_c10d._get_default_store()
            store.set(f"hybridtensor/left/{dist.get_rank()}", "left")


atexit.register(_say_left)


def require_alike(
    who: str,
    facts: Mapping[str, str],
    *,
    advice: str,
    groups: Iterable[dist.ProcessGroup | None] = (None,),
    timeout: datetime.timedelta = TIMEOUT,
    shown: Mapping[str, str] | None = None,
) -> None:
    """Raise RuntimeError on every rank unless all have the same facts, by name; ``advice`` ends the message, in which
    ``shown`` replaces names."""
    digest, found = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest(), ""
    for group in groups:
        ranks = Ranks(who, group, timeout, advice)
        if ranks.size == 1:
            continue
        # what was found along one dimension is for the ranks along the others, too
        answers = ranks.gather(lambda: (digest, found))  # noqa: B023  (called now)
        if len({other for other, _ in answers}) > 1:
            found = _difference(ranks.gather(lambda: dict(facts)), group, shown or {})
        else:
            found = next((text for _, text in answers if text), "")
    if found:
        raise RuntimeError(f"{who}: ranks differ in weights or recipes: {found}; {advice}")


def _difference(
    every: list[dict[str, str]], group: dist.ProcessGroup | None, shown: Mapping[str, str]
) -> str:
    """Describe in which facts the first rank and another one differ."""
    index = next(i for i, one in enumerate(every) if one != every[0])
    first, other = every[0], every[index]
    ranks = [i if group is None else dist.get_global_rank(group, i) for i in (0, index)]
    names = sorted(name for name in {*first, *other} if first.get(name) != other.get(name))
    found = [
        f"{shown.get(name, name)} is {first.get(name, 'absent')} on rank {ranks[0]}, "
        f"{other.get(name, 'absent')} on rank {ranks[1]}"
        for name in names
    ]
    return some(found, most=4)

"""Ranks that do one thing together: all of them finish it, or all of them raise."""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_group, require_timeout

T = TypeVar("T")

Groups: TypeAlias = dict[datetime.timedelta, dist.ProcessGroup]
"""Our own gloo groups of a world, by their timeout."""

Answer: TypeAlias = tuple[str, str, Any]
"""Kind and text of the error that a rank's work raised, each "" if none; and what it gave."""

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Groups] = weakref.WeakKeyDictionary()
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_KINDS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "TypeError": TypeError,
    "NotImplementedError": NotImplementedError,
}

TIMEOUT = datetime.timedelta(minutes=10)


class Ranks:
    """The ranks of a process group, or this process alone.

    All ranks talk through a gloo group of their own, which stays for the next time: ending one
    while a rank still reads what another sent can lose it. A rank that loses another one does end
    it, and so lets go of all others at once.

    Args:
        who: What they do, for errors.
        group: Process group, which they then talk through, with its own timeout; None is all ranks.
        timeout: How long to wait for a rank.

    Attributes:
        rank: This rank, in the group.
        size: How many they are.
    """

    def __init__(
        self, who: str, group: dist.ProcessGroup | None, timeout: datetime.timedelta
    ) -> None:
        require_group(who, group)
        require_timeout(who, timeout)
        self.who = who
        self.rank, self.size = 0, 1
        self._group: dist.ProcessGroup | None = None
        self._known: Groups = {}
        self._timeout = timeout
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size > 1:
            self._group = group
            if group is None and dist.group.WORLD is not None:
                self._known = _groups.setdefault(dist.group.WORLD, {})
                self._group = self._known.get(timeout)
                if self._group is None:
                    self._group = self._known[timeout] = self._new_group()

    def _new_group(self) -> dist.ProcessGroup:
        """Make the gloo group, once every rank has come: who is missing is then known by number."""
        _meet(self.who, self.rank, self.size, self._timeout)
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
        """Do ``work`` on every rank and return what it gave on each; small things, because they are
        sent.

        Raises:
            ValueError: If ``work`` raised one on the first rank that raised anything, on every
                rank.
            TypeError: Likewise.
            RuntimeError: If it raised anything else, or a rank is gone.
        """
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
        failed = [(rank, kind, text) for rank, (kind, text, _) in enumerate(answers) if kind]
        if failed:
            raise _KINDS.get(failed[0][1], RuntimeError)(self._summary(failed)) from raised
        return [result for _, _, result in answers]

    def each(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank and return what it gave on this one; nothing is sent but
        errors.
        """
        done: list[T] = []
        self.gather(lambda: done.append(work()))
        return done[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on the first rank and return what it gave, on every rank."""
        results = self.gather(lambda: [work()] if self.rank == 0 else [])
        return results[0][0]

    def _summary(self, failed: list[tuple[int, str, str]]) -> str:
        """Return one text of what the ranks that failed said."""
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
        group = self._known.pop(self._timeout, None)
        if group is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)
        raise RuntimeError(
            f"{self.who}: rank {self.rank} got no answer from one of the {self.size} ranks; start "
            f"again from the last intact step ({error})"
        ) from error


def _meet(who: str, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Wait until every rank is here.

    Raises:
        RuntimeError: If one does not come in time, with its number.
    """
    # Private to torch: the store that ranks found each other by. Groups are made of it too, which
    # takes part after part and waits for each anew, and does not tell for whom.
    store = dist.distributed_c10d.PrefixStore(
        f"hybridtensor/{_count_meeting()}", dist.distributed_c10d._get_default_store()
    )
    deadline = time.monotonic() + timeout.total_seconds()
    missing = [f"{other}" for other in range(size)]
    try:
        store.set(f"{rank}", "here")
        while missing and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # too late; or the store is gone: see below
                left = max(deadline - time.monotonic(), 0.001)
                store.wait(missing, datetime.timedelta(seconds=left))
            missing = [other for other in missing if not store.check([other])]
    except RuntimeError as error:  # the store is gone, and with it the rank that had it
        raise RuntimeError(
            f"{who}: rank {rank} lost the store of the process group; start again from the last "
            f"intact step ({error})"
        ) from error
    if missing:
        _forget_meeting()
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        raise RuntimeError(
            f"{who}: {ranks} did not come within {timeout}; start again from the last intact step"
        )


def _forget_meeting() -> None:
    """Take back a meeting that did not come about, so that the next try of all is the same one.

    Who was there stays noted: others may be about to look, and would miss the wrong rank.
    """
    if dist.group.WORLD is not None:
        _meetings[dist.group.WORLD] -= 1


def _count_meeting() -> int:
    """Return how many meetings there were in the present world: all ranks count alike."""
    world = dist.group.WORLD
    if world is None:
        return 0
    _meetings[world] = _meetings.get(world, 0) + 1
    return _meetings[world]


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks hold parts of a model, whether FSDP2 has gathered them now or not."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    return any(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers()))


def together(
    who: str, model: nn.Module, timeout: datetime.timedelta
) -> Callable[[Callable[[], T]], T]:
    """Return a function that does work: on all ranks of a sharded model alike, or else alone."""
    if is_sharded(model):
        ranks = Ranks(who, None, timeout)
        if ranks.size > 1:
            return ranks.each
    return lambda work: work()

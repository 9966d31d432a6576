"""The faces that are kept of a weight, and for how long.

A face lives as long as it is needed. In a step with one microbatch the rowwise one goes when forward
has used it; the columnwise one is made in backward, and goes when that has used it. Where a weight
is used again before it is written, by further microbatches, keeping both costs memory and saves
casts: what happened between the last two writes says so. A face that was made before a write is of
no use, and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops import Face
from hybridtensor.ops.amaxes import Notes

Amaxes = tuple[Tensor | None, Tensor | None]
"""What the rowwise and the columnwise face are scaled by, where that was measured for both."""
Place = tuple[object, ...]
"""Which view of a weight's memory faces are of."""


class Seen(NamedTuple):
    """Counts of the writes of a weight: a cached face is valid while they are the same.

    Attributes:
        writes: Writes by handlers of operators; torch's version counters of the plain tensor and of the weight.
        unseen: Writes of compiled code that one of the aliases found, and those that others may have made.
        scales: Version of the layer's state, with that of a common scale.
    """

    writes: tuple[int, int, int]
    unseen: tuple[int, int]
    scales: int | tuple[int | None, int] | None


class Stamp(NamedTuple):
    """What faces depend on beside the memory they were made from; faces with another stamp are old.

    Attributes:
        writes: Writes that handlers of operators counted.
        unseen: Writes of compiled code, and those that others may have made.
        state_version: Counter of changes of the layer's state, and of a common scale.
        config: The recipe.
        dtype: Dtype of faces in high precision.
    """

    writes: int
    unseen: tuple[int, int]
    state_version: int | tuple[int | None, int] | None
    config: object
    dtype: torch.dtype


class Kept(NamedTuple):
    """What is kept of one view of a weight's memory.

    Attributes:
        row: The rowwise face.
        column: The columnwise face.
        amaxes: What they are scaled by, where that was measured for both.
        noted: Where the amaxes of delayed scales were recorded when the faces were made; None for evaluation.
    """

    row: Face | None = None
    column: Face | None = None
    amaxes: Amaxes = (None, None)
    noted: Tensor | Notes | None = None


_NOTHING = Kept()


class KeptFaces:
    """The faces that are kept of one weight.

    Forwards of training count, but for those inside of a backward, which recompute. A rowwise face that evaluation uses
    more than once is kept until training goes on.
    """

    __slots__ = ("_backwards", "_evaluations", "_forwards", "_kept", "_last_forwards", "_stamp")

    def __init__(self) -> None:
        self._stamp: Stamp | None = None
        self._kept: dict[Place, Kept] = {}
        self._forwards = self._backwards = self._last_forwards = self._evaluations = 0

    def begin_use(self, plain: Tensor, stamp: Stamp, *, forward: bool, trained: bool) -> Kept:
        """Let go of what does not hold any more, count a forward, and return what is kept.

        Args:
            plain: The view of the weight's memory that is used.
            stamp: What faces depend on now.
            forward: Whether a forward uses the weight, not a backward.
            trained: Whether that is one of training.
        """
        if self._stamp != stamp:
            self._stamp = stamp
            self._kept.clear()
            if forward and self._forwards:  # the uses so far were those between two writes
                self._last_forwards, self._forwards, self._backwards = self._forwards, 0, 0
            self._evaluations = 0
        if forward and not trained:
            self._evaluations += 1
        elif forward and _task() == -1:  # inside of a backward it recomputes
            self._forwards, self._evaluations = self._forwards + 1, 0
        return self._kept.get(_place(plain), _NOTHING) if self._kept else _NOTHING

    def keep(self, plain: Tensor, stamp: Stamp, kept: Kept) -> None:
        """Keep what was made, unless something else came in between, in another thread."""
        if self._stamp == stamp:
            self._kept[_place(plain)] = kept

    def lifetime(self, policy: str) -> tuple[bool, bool]:
        """Return whether both faces outlast one use, so that one cast makes both, and whether they outlast the backward
        that uses them.

        Args:
            policy: ``keep_faces`` of the recipe. ``"auto"`` keeps them for a weight that more than one forward uses,
                since the last write or before it, and from recomputing to the backward that follows.
        """
        step = policy == "always" or (policy == "auto" and self._is_reused)
        return step or (policy == "auto" and _task() != -1), step

    def end_forward(self, policy: str, *, trained: bool) -> None:
        """Let go of what a forward has used and nothing will use again."""
        again = self._is_reused or (not trained and self._evaluations > 1)
        if policy == "never" or (policy == "auto" and not again):
            for place, kept in list(self._kept.items()):
                self._kept[place] = kept._replace(row=None)

    def end_backward(self, policy: str) -> None:
        """Let go of what a backward has used and nothing will use again.

        A step of several microbatches is over when as many backwards have run as forwards before the
        last write, if it has no more of them than that one.
        """
        self._backwards += 1
        forwards, last = self._forwards, self._last_forwards
        is_over = last > 1 and forwards <= last <= self._backwards
        if policy == "never" or (policy == "auto" and (is_over or not self._is_reused)):
            self._kept.clear()

    def clear(self) -> None:
        """Let go of everything: the weight was written."""
        self._kept.clear()

    def rowwise(self, plain: Tensor, stamp: Stamp) -> Face | None:
        """Return the rowwise face that is kept of ``plain`` and still holds, of whatever dtype; this
        is no use of it.
        """
        if self._stamp is None or self._stamp._replace(dtype=stamp.dtype) != stamp:
            return None
        row = self._kept.get(_place(plain), _NOTHING).row
        return None if row is None or row.format.values_of is not None else row

    def faces(self) -> list[Face]:
        """Return all faces that are kept."""
        found = (face for kept in self._kept.values() for face in (kept.row, kept.column))
        return [face for face in found if face is not None]

    @property
    def _is_reused(self) -> bool:
        return self._forwards > 1 or self._last_forwards > 1


def _place(plain: Tensor) -> Place:
    return plain.shape, plain.stride(), plain.storage_offset()


# The task of the autograd engine that runs now, -1 for none, in which a forward recomputes: private, and what FSDP2
# asks, too.
_task: Callable[[], int] = torch._C._current_graph_task_id

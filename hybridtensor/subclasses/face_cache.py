"""The cached faces of a weight, and their lifetime.

A write invalidates all faces, ``step_`` quantizes those that the next forward needs, and the uses between the last two
writes say how long faces are needed: with one microbatch a step, the columnwise one is quantized in backward and
released after it; with several, both stay, which costs memory and saves casts. What is cached after each event in the
third of equal steps, if the input has a gradient and ``keep_faces="auto"`` (R: rowwise, C: columnwise, -: none):

==============================  ===========================  ===========  ========
each step                       forwards and backwards       evaluations  step_
==============================  ===========================  ===========  ========
one microbatch                  ``- -``                                   ``R``
two microbatches                ``RC RC RC -``                            ``RC``
one microbatch, 1 evaluation    ``R R``                      ``-``        ``R``
one microbatch, 2 evaluations   ``R R``                      ``R R``      ``R``
==============================  ===========================  ===========  ========
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops import Face
from hybridtensor.ops.amaxes import RecordedAmax
from hybridtensor.ops.captures import Stream
from hybridtensor.ops.library import backward_that_runs
from hybridtensor.quantizers.plans import Amaxes

Place = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
"""Which view of a weight's memory faces are of."""


class Stamp(NamedTuple):
    """What faces depend on besides the memory they were made from: faces with another stamp are old.

    Attributes:
        changes: Count of writes, and of possible ones; see ``WeightRecord.changes``.
        scales: Version of the layer's scales, with that of a common scale if there is one; None without a layer.
        recipe: The config.
        dtype: Dtype of faces in high precision.
    """

    changes: int
    scales: int | tuple[int | None, int] | None
    recipe: object
    dtype: torch.dtype


class Seen(NamedTuple):
    """The state of a weight when it was used: the stamp of its faces then, and ``writes``, which changes with counted
    writes only."""

    stamp: Stamp
    writes: tuple[int, int, int]


class CachedFaces(NamedTuple):
    """The cached faces of one view of a weight's memory, with their amaxes."""

    row: Face | None = None
    column: Face | None = None
    amaxes: Amaxes = (None, None)
    amax_record: RecordedAmax = None


_NOTHING = CachedFaces()


class ForwardUse(NamedTuple):
    """How a forward uses a weight.

    Attributes:
        trained: Whether a gradient of anything is needed, so that it is a forward of training.
        backward_follows: Whether its backward will ask for the columnwise face.
    """

    trained: bool
    backward_follows: bool


EVALUATION = ForwardUse(trained=False, backward_follows=False)


@dataclass(eq=False, repr=False, slots=True)
class FaceCache:
    """The cached faces of one weight.

    Forwards of training count, but for those inside of a backward, which recompute. A rowwise face that evaluation uses
    more than once stays until training goes on; where each step evaluates as often, it stays for the step's forwards.
    Faces are valid on the CUDA stream that makes them: no other one waits for their casts. Those made in the capture of
    a CUDA graph are valid in it alone: each replay makes them again.

    Attributes:
        awaits_column: Whether a forward is over whose backward will ask for the columnwise face, which is to be made.
        stream: The stream, and capture, that made the cached faces; None if there never were any.
        last_use: How a forward used the weight last, or None if none did.
    """

    awaits_column: bool = False
    stream: Stream | None = None
    last_use: ForwardUse | None = None
    _stamp: Stamp | None = None
    # By stream, too: while one thread uses the cache, another one may store faces of its own. Replaced where it is
    # emptied: what a thread still puts into the former one is of no use to anybody.
    _views: dict[tuple[Place, Stream], CachedFaces] = field(default_factory=dict)
    # Forwards and backwards of training in this step, which is what lies between two writes, and forwards in the last
    # one that had any
    _forwards: int = 0
    _backwards: int = 0
    _last_forwards: int = 0
    # Evaluations in this step, and in the last one that had forwards of training
    _evaluated: int = 0
    _last_evaluated: int = 0
    _evaluations: int = 0  # since the last forward of training
    # Forwards and evaluations of a step, if the last two that had forwards had equally many and evaluated; else 0
    _expected: int = 0
    _used: bool = False  # in a forward since the last write

    def use(
        self, place: Place, stamp: Stamp, stream: Stream, forward: ForwardUse | None
    ) -> CachedFaces:
        """Invalidate old faces, count a ``forward``, and return the cached faces of view ``place``."""
        if self._stamp != stamp:
            self.begin(stamp, stream, forward=forward is not None)
        elif self.stream != stream:  # which waits for no cast of the other one
            self.stream = stream
            self._views = {}
            if isinstance(stream, tuple):  # uses outside of a capture say nothing of those in it
                self._forwards = self._backwards = self._evaluated = self._evaluations = 0
        if forward is not None:
            self._used = True
            # An evaluation between a write and training says nothing of what the next training needs.
            if forward.trained or not self._forwards:
                self.last_use = forward
            if not forward.trained:
                self._evaluations += 1
                self._evaluated += 1
            elif backward_that_runs() == -1:  # inside of a backward it recomputes
                self._forwards += 1
                self._evaluations = 0
        return self._views.get((place, stream), _NOTHING)

    def begin(self, stamp: Stamp, stream: Stream, *, forward: bool) -> None:
        """Release all faces and take another stamp or stream; a ``forward`` also ends the step before the write."""
        self._stamp, self.stream, self.awaits_column = stamp, stream, False
        self._views = {}
        if forward and self._forwards:  # the uses so far were those between two writes
            last = self._last_forwards, self._last_evaluated
            now = self._forwards, self._evaluated
            self._expected = sum(now) if now == last and self._evaluated else 0
            self._last_forwards, self._last_evaluated = now
            self._forwards = self._backwards = 0
        if forward:
            self._evaluated, self._used = 0, False
        self._evaluations = 0

    def is_old(self, stamp: Stamp, stream: Stream) -> bool:
        """Return whether faces are made with those of neighbours now: the weight was used and then written, or a
        capture has begun and nothing used the weight since the write."""
        if self._stamp != stamp:
            return self._used
        # A weight that was used since may be used in no more than one of several captures, each of a part of the model.
        return not self._used and self.stream != stream and isinstance(stream, tuple)

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the last computation with the weight, or None."""
        return None if self._stamp is None else self._stamp.dtype

    def store(self, place: Place, stamp: Stamp, faces: CachedFaces, stream: Stream) -> None:
        """Cache new faces of view ``place``, made on ``stream``, unless another thread changed the cache."""
        views = self._views  # before the comparison
        if self._stamp == stamp and self.stream == stream:
            views[place, stream] = faces
            if faces.column is not None:
                self.awaits_column = False

    def current(self, place: Place, stamp: Stamp, stream: Stream) -> CachedFaces | None:
        """Return the cached faces of a view, or None if another stamp or stream came last, without counting a use."""
        if self._stamp != stamp or self.stream != stream:
            return None
        return self._views.get((place, stream), _NOTHING)

    def lifetime(self, policy: str) -> tuple[bool, bool]:
        """Return whether faces stay cached after a forward (so that one cast makes both), and after a backward, by the
        recipe's ``keep_faces``."""
        if policy == "auto":
            # Faces of all weights that outlive their use were 2.4 of 19.8 GiB. Making the columnwise one in backward
            # costs one more read of the weight, 0.3 % of a step at most.
            reused = self._forwards > 1 or self._last_forwards > 1  # as with microbatches
            # A forward inside of a backward recomputes, and the backward behind it asks next: one cast makes both
            # faces.
            return reused or backward_that_runs() != -1, reused
        return policy == "always", policy == "always"

    def end_forward(self, policy: str, forward: ForwardUse) -> None:
        """Release what a forward used and nothing will use again."""
        awaited = self._forwards + self._evaluated < self._expected
        reused = self._forwards > 1 or self._last_forwards > 1
        again = awaited or reused or (not forward.trained and self._evaluations > 1)
        frees = policy == "never" or (policy == "auto" and not again)
        views = self._views
        lacks = not views
        for place, view in list(views.items()):  # another thread may store faces
            lacks = lacks or view.column is None
            if frees:
                views[place] = view._replace(row=None)
        # Where none is to be made, backward need not look through the bucket for others.
        self.awaits_column = lacks and (forward.backward_follows or self.awaits_column)

    def end_backward(self, policy: str) -> None:
        """Release what a backward used and nothing will use again."""
        # A step of several microbatches ends when as many backwards have run as forwards before the last write, if this
        # step has no more forwards than that one.
        self._backwards += 1
        self.awaits_column = False
        forwards, last = self._forwards, self._last_forwards
        reused, is_over = forwards > 1 or last > 1, last > 1 and forwards <= last <= self._backwards
        if policy == "always" or (policy == "auto" and reused and not is_over):
            return
        if policy == "auto" and self._forwards + self._evaluated < self._expected:
            views = self._views
            for place, view in list(views.items()):
                views[place] = view._replace(column=None)
        else:
            self._views = {}

    def clear(self) -> None:
        """Release everything, because the weight was written."""
        self._views = {}

    def rowwise(self, place: Place, stamp: Stamp, stream: Stream) -> Face | None:
        """Return the rowwise face of a view that is valid on ``stream``, in any dtype, without counting a use."""
        # Quantized faces do not depend on the dtype of those in high precision.
        if self._stamp is None or self._stamp[:-1] != stamp[:-1]:
            return None
        row = self._views.get((place, stream), _NOTHING).row
        return None if row is None or row.format.values_of is not None else row

    def faces(self) -> list[Face]:
        found = (face for view in list(self._views.values()) for face in (view.row, view.column))
        return [face for face in found if face is not None]

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluations use the weight in each step, too, as one before or after the forward of training."""
        return self._expected > 0


def place_of(plain: Tensor) -> Place:
    """Return a key that distinguishes views of one memory."""
    return plain.shape, plain.stride(), plain.storage_offset()

"""A columnwise face that several layers use in backward, and none of them owns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from hybridtensor.ops import Face


class SharedFace:
    """The columnwise face of an input: the first layer that asks in backward makes it for all that read it.

    Attributes:
        readers: How many layers will ask.
        waiting: How many have not yet.
        parts: What is being gathered for it, or None.
        face: The face, or None.
    """

    __slots__ = ("face", "parts", "readers", "waiting")

    def __init__(self) -> None:
        self.readers = self.waiting = 0
        self.parts: list[Tensor] | None = None
        self.face: Face | None = None

    def take(self, make: Callable[[], Face]) -> Face:
        """Return the face, which goes with the last layer that asks, or at the end of backward."""
        face = self.face
        if face is None:
            face, self.parts, self.waiting = make(), None, self.readers
            self.face = face
            if self.readers > 1 and _in_backward() != -1:
                _call_after_backward(self._clear)
        self.waiting -= 1
        if self.waiting <= 0:
            self._clear()
        return face

    def _clear(self) -> None:
        self.face = None


# Private in torch: which backward runs in this thread, and what FSDP2 and DDP end theirs by
_in_backward: Callable[[], int] = torch._C._current_graph_task_id
_call_after_backward: Callable[[Callable[[], None]], None] = (
    Variable._execution_engine.queue_callback
)

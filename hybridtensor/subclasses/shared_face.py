"""A columnwise face shared by several layers in backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from hybridtensor.ops import Face


class SharedFace:
    """The columnwise face of an input, made by the first of its layers that needs it in backward."""

    __slots__ = ("face", "parts", "readers", "waiting")

    def __init__(self) -> None:
        self.readers = self.waiting = 0
        self.parts: list[Tensor] | None = None
        self.face: Face | None = None

    def take(self, make: Callable[[], Face]) -> Face:
        """Return the face; it is released with the last layer, or at the end of backward."""
        face = self.face
        if face is None:
            face, self.parts, self.waiting = make(), None, self.readers
            self.face = face
            # A layer whose gradients nobody asked for never takes the face: the end of backward releases it then.
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

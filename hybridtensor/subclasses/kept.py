"""What a persistent weight knows of its values in high precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kept:
    """High-precision values beside the faces of a persistent weight; all aliases of the weight share one of these.

    Writes to the weight reach the values: the original until an optimizer takes it, then the optimizer's master, which
    is the optimizer's alone to keep alive, copy and save.

    Args:
        original: What the weight was made from.
        follows: Whether the faces are those that quantizing the values gives.
        whole: That of the weight which this one's weight is a slice of.

    Attributes:
        original: The same, until an optimizer takes it; or None.
        follows: The same.
        loaded: Whether the master was loaded and not stepped since: faces that are loaded too are those it gave.
    """

    __slots__ = ("_master", "_whole", "follows", "loaded", "original")

    def __init__(self, original: Tensor | None = None, follows: bool = False, whole: Kept | None = None) -> None:
        self.original, self.follows, self._whole = original, follows, whole
        self._master: weakref.ref[Tensor] | None = None
        self.loaded = False

    @property
    def values(self) -> Tensor | None:
        """The optimizer's master, or else the original, or None."""
        master = None if self._master is None else self._master()
        return self.original if master is None else master.detach()

    def give_to(self, master: Tensor, *, follows: bool, loaded: bool = False) -> None:
        """Let go of the original: from now on ``master`` has the values, for as long as its optimizer holds it."""
        self.original, self._master = None, weakref.ref(master)
        self.follows, self.loaded = follows, loaded

    def note_quantized(self, values: Tensor) -> None:
        """Take note that the weight was quantized from new values."""
        self._take(values.detach(), follows=True)
        self.loaded = False

    def note_copied(self, dequantize: Callable[[], Tensor], other: Kept | None = None) -> None:
        """Take note that other faces were copied into the weight's.

        Args:
            dequantize: Gives what they hold.
            other: That of the weight they were copied from, which may know more of them.
        """
        more = None if other is None else other.values
        if self.loaded or self.values is None:
            self._take(None, follows=False)
        elif other is None or more is None:
            self._take(dequantize(), follows=False)
        else:
            self._take(more, follows=other.follows)

    def let_go(self) -> None:
        """Let go of the original: someone else has better values, which the faces were made from."""
        self.original, self.follows = None, False

    def _take(self, values: Tensor | None, *, follows: bool) -> None:
        mine = self.values
        if mine is not None and values is not None and not is_same(mine, values):
            mine.copy_(values)
        self.follows = follows and mine is not None
        if self._whole is not None:
            self._whole.follows &= follows

    def of_slice(self, original: Tensor) -> Kept:
        """Return that of a slice, of which ``original`` is the same slice of the values."""
        return Kept(original, self.follows, self)

    def __reduce__(self) -> Any:
        return Kept, (self.original, self.follows and self.original is not None)


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same elements of the same memory."""
    if a is b:
        return True
    lie = [(t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
    return lie[0] == lie[1] and a.untyped_storage()._cdata == b.untyped_storage()._cdata


torch.serialization.add_safe_globals([Kept])

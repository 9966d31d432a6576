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
        original: What the weight was made from; its memory may be someone else's.
        follows: Whether the faces are those that quantizing the values gives.

    Attributes:
        loaded: Whether the master was loaded and not stepped since: faces that are loaded too are those it gave.
    """

    __slots__ = ("_follows", "_former", "_master", "_original", "_owned", "_part", "_whole", "loaded")

    def __init__(self, original: Tensor | None = None, follows: bool = False) -> None:
        self._original, self._follows = original, follows
        self._owned = self.loaded = False
        self._master: weakref.ref[Tensor] | None = None
        self._former: weakref.ref[Tensor] | None = None  # master of what this was copied from, until a write
        self._whole: Kept | None = None
        self._part: Callable[[Tensor], Tensor] = lambda values: values

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor | None:
        """The optimizer's master, or else the original, or None."""
        master = None if self._master is None else self._master()
        return self.original if master is None else master.detach()

    @property
    def original(self) -> Tensor | None:
        """What the weight was made from, until an optimizer takes it; or None."""
        if self._whole is None:
            return self._original
        values = self._whole.values
        return None if values is None else self._part(values)

    @property
    def follows(self) -> bool:
        """Whether the faces are those that quantizing the values gives."""
        return self._follows if self._whole is None else self._whole.follows

    # -- others like it -----------------------------------------------------------------------------------------------

    def view(self, part: Callable[[Tensor], Tensor]) -> Kept:
        """Return that of a view of the weight; ``part`` takes the same view of the values."""
        made = Kept()
        made._whole, made._part = self, part
        return made

    def copied(self, copy: Callable[[Tensor], Tensor], *, same: bool) -> Kept:
        """Return that of a copy of the weight.

        Args:
            copy: Makes the copy.
            same: Whether it has the same values.
        """
        original = self.original
        made = Kept(None if original is None else copy(original))
        made._owned = True
        if same:
            made._former = self._master or self._former
            made._follows = self.follows and original is not None and made._original.dtype == original.dtype  # type: ignore[union-attr]
        return made

    def moved(self) -> Kept:
        """Return this for a weight that gets other faces; aliases with the faces so far know of no values any more."""
        made = Kept(self.original, self.follows)
        made._owned, made._master, made._former, made.loaded = self._owned, self._master, self._former, self.loaded
        self._original = self._master = self._former = self._whole = None
        self._follows = False
        return made

    def __reduce__(self) -> Any:
        original = self.original
        return Kept, (original, self.follows and original is not None)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def give_to(self, master: Tensor, *, follows: bool, loaded: bool = False) -> None:
        """Let go of the original: from now on ``master`` has the values, for as long as its optimizer holds it."""
        self.let_go()
        self._master, self._former = weakref.ref(master), None
        self._follows, self.loaded = follows, loaded

    def let_go(self) -> None:
        """Let go of the original: someone else has better values, which the faces were made from."""
        if self._whole is not None:
            self._whole.let_go()
        self._original, self._follows, self._whole, self.loaded = None, False, None, False

    def is_of(self, master: Tensor) -> bool:
        """Whether ``master`` has the values."""
        return self._master is not None and self._master() is master

    def was_of(self, master: Tensor) -> bool:
        """Whether ``master`` had the values of what this is a copy of, which was not written since."""
        return self._former is not None and self._former() is master

    # -- writes -------------------------------------------------------------------------------------------------------

    def note_quantized(self, values: Tensor) -> None:
        """Take note that the weight was quantized from new values."""
        self._take(values.detach(), follows=True)
        self.loaded = False

    def note_copied(
        self, dequantize: Callable[[], Tensor], other: Kept | None = None, *, unchanged: bool = False
    ) -> None:
        """Take note that other faces were copied into the weight's.

        Args:
            dequantize: Gives what they hold.
            other: That of the weight they were copied from, which may know more of them.
            unchanged: Whether the faces were the same before.
        """
        if self.loaded:  # with the master: the same faces, or those that do not follow from it
            if unchanged:
                return
            self.loaded = False
            if not self.follows:
                return
        more = None if other is None else other.values
        if self.values is None:
            self._take(None, follows=False)
        elif other is None or more is None:
            self._take(dequantize(), follows=False)
        else:
            self._take(more, follows=other.follows)

    def note_loaded(self) -> None:
        """Take note that faces and master are loaded, whichever came first."""
        self.loaded = False
        self._set_follows(False)

    def _take(self, values: Tensor | None, *, follows: bool) -> None:
        mine = self.values
        if mine is not None and values is not None and not is_same(mine, values):
            self._make_own(torch.promote_types(mine.dtype, values.dtype))
            self.values.copy_(values)  # type: ignore[union-attr]
        self._former = None
        self._set_follows(follows and mine is not None)

    def _set_follows(self, follows: bool) -> None:
        if self._whole is not None:
            self._whole._set_follows(self.follows and follows)
        self._follows = follows

    def _make_own(self, dtype: torch.dtype) -> None:
        """Have an original in memory of its own that holds values of ``dtype``; a master is and does."""
        if self._whole is not None:
            self._whole._make_own(dtype)
        elif self._original is not None and not (self._owned and self._original.dtype == dtype):
            self._original, self._owned = self._original.to(dtype, copy=True), True


def is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same elements of the same memory."""
    if a is b:
        return True
    lie = [(t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
    return lie[0] == lie[1] and a.untyped_storage()._cdata == b.untyped_storage()._cdata


torch.serialization.add_safe_globals([Kept])

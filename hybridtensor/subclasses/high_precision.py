"""The high-precision values beside the faces of a persistent weight."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hybridtensor.ops.autograd import version_of

View = Callable[[Tensor], Tensor]
"""Takes of a whole tensor the part that a view of the weight is of the weight."""


def whole(values: Tensor) -> Tensor:
    """Return the tensor itself: the view of a whole weight."""
    return values


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class HighPrecisionValues:
    """High-precision values beside the faces of a persistent weight.

    Writes to the weight reach the values: the original until an optimizer takes it, then the
    optimizer's master, which is the optimizer's alone to keep alive, copy and save.

    ====================  ==================  =========  ==================  ==================
    event                 original            master     follows             rounded
    ====================  ==================  =========  ==================  ==================
    ``quantize_``         what it was given   none       yes                 no
    an optimizer made     none                its own    as before           no
    its step              none                as before  yes                 no
    values are written    the values          the same   yes                 no, if all of them
    faces are written     dequantized faces   the same   no                  with a master, or
                                                                             if theirs are lost
    clone, deep copy      a copy of it        none       with an original    no
    pickle                as before           none       with an original    no
    new faces, as of      goes along          goes       goes along          goes along
    ``set_config_``                           along
    ====================  ==================  =========  ==================  ==================

    The copy remembers the master, and its version: while neither is written, it is that master's weight if it is
    swapped in.

    Attributes:
        original: Tensor that the weight was made from, which may be aliased, until an optimizer takes it; or None.
        follows: Whether the faces are those that quantizing the values gives.
        loaded: Whether the master was loaded and not stepped since: faces that are loaded too are those it gave.
        rounded: Whether faces alone, as copies of the weight hold, were written into the master since its last step, or
            are what it began with although there had been values; without a master, whether faces were written whose
            values are lost.
    """

    # This object learns of every write. Version counters, compared at the next step, would say that there was a
    # write, not what was written.
    original: Tensor | None = None
    follows: bool = False
    _owned: bool = False  # whether the tensor has values of its own; see ``no_optimizer_saves``
    # Whether an optimizer had the values, of this or of what it is a copy of; see ``lost``
    _stepped: bool = False
    loaded: bool = False
    rounded: bool = False
    _master: weakref.ref[Tensor] | None = None
    # The master of what this was copied from, and its version then, until a write
    _former: tuple[weakref.ref[Tensor], int] | None = None

    @property
    def master(self) -> Tensor | None:
        """The optimizer's master, while it lives, or None."""
        return None if self._master is None else self._master()

    @property
    def current(self) -> Tensor | None:
        """The optimizer's master, or else the original, or None."""
        master = self.master
        return self.original if master is None else master.detach()

    @property
    def no_optimizer_saves(self) -> bool:
        """Whether a write, or a copy of the weight, gave it values of its own that no optimizer has."""
        return self._owned and self.original is not None

    @property
    def lost(self) -> bool:
        """Whether there were values, of an optimizer that is gone or of what this was copied from."""
        return self.current is None and self._stepped

    @property
    def is_rounded(self) -> bool:
        """Whether faces take the place of values that are lost, where no optimizer has others."""
        return self.lost or (self.rounded and self.master is None)

    # -- others like it

    def copied(
        self, copy: Callable[[Tensor], Tensor], view: View, *, same: bool
    ) -> HighPrecisionValues:
        """Return the values of a copy or view of the weight; ``same`` if the copy is equal."""
        values = self.original if view is whole else self.current
        original = None if values is None else view(values)
        made = HighPrecisionValues(None if original is None else copy(original))
        made._owned = True
        if same:
            master, made._stepped = self.master, self._stepped
            made._former = (
                self._former if master is None else (weakref.ref(master), version_of(master))
            )
            kept_dtype = (
                original is not None
                and made.original is not None
                and made.original.dtype == original.dtype
            )
            made.follows = self.follows and kept_dtype
        return made

    def moved(self) -> HighPrecisionValues:
        """Return the values for a weight with new faces; aliases of the old faces have none."""
        made = dataclasses.replace(self)
        self.original = self._master = self._former = None
        self.follows = self._stepped = False
        made.register()
        return made

    def replaced(
        self, values: Tensor, *, follows: bool, rounded: bool, lost: bool
    ) -> HighPrecisionValues:
        """Return the values of a weight replaced by others, which may be ``rounded`` to faces, because better ones are
        ``lost``; the master is updated, or RuntimeError if its shape differs."""
        master = self.master
        if master is None:
            made = HighPrecisionValues(values, follows)
            made.rounded = lost
            return made
        if master.shape != values.shape:
            raise RuntimeError(
                f"HybridTensor.data: an optimizer holds the master of this weight, of shape "
                f"{tuple(master.shape)}, and got values of {tuple(values.shape)}; make the "
                "optimizer anew"
            )
        made = self.moved()
        made._take(values, whole, follows=follows)
        made.loaded, made.rounded = False, rounded
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> HighPrecisionValues:
        made = self.copied(torch.clone, whole, same=True)
        made._owned = self._owned
        return made

    def __reduce__(self) -> tuple[type[HighPrecisionValues], tuple[Tensor | bool | None, ...]]:
        # Without the master: the optimizer that owns it is pickled by itself, and gives it again.
        follows = self.follows and self.original is not None
        return HighPrecisionValues, (self.original, follows, self._owned, self._stepped)

    # -- optimizers

    def set_master(self, master: Tensor, *, follows: bool, loaded: bool = False) -> None:
        """Let ``master`` hold the values while its optimizer lives, and release the original."""
        self.release_original()
        self._master, self._former, self._stepped = weakref.ref(master), None, True
        self.follows, self.loaded, self.rounded = follows, loaded, False
        self.register()

    def register(self) -> None:
        """Let ``values_in`` find this by its master, if it has one."""
        master = self.master
        if master is not None:
            _of_masters[id(master)] = self

    def keep_values(self) -> None:
        """Hold a copy of the values, because their master will have those of another weight."""
        current = self.current
        if current is not None:
            self.original, self._owned, self._master = current.clone(), True, None

    def release_original(self) -> None:
        """Release the original, because the faces were made from better values elsewhere."""
        self.original, self.follows, self.loaded = None, False, False

    def leave_values(self) -> None:
        """Release the original, as a master has the values of the faces: one of this weight, or one that was not
        loaded."""
        self.release_original()
        self._stepped = True

    def is_of(self, master: Tensor) -> bool:
        """Return whether ``master`` holds the values."""
        return self.master is master

    def was_of(self, master: Tensor) -> bool:
        """Return whether ``master`` holds the values that this was copied from, both unchanged since."""
        if self._former is None:
            return False
        former, version = self._former
        return former() is master and version_of(master) == version

    # -- writes

    def mark_quantized(self, values: Tensor, view: View = whole) -> None:
        """Record that the weight, or a view of it, was quantized from new values."""
        self._take(values.detach(), view, follows=True)
        self.loaded = False

    def mark_copied(
        self,
        dequantize: Callable[[], Tensor],
        view: View = whole,
        *,
        known: tuple[Tensor, bool] | None = None,
        unchanged: bool = False,
        lost: bool = False,
    ) -> None:
        """Record that other faces were copied into ``view``; ``known`` are their values and whether the faces follow
        from them, or their values are ``lost``."""
        if self.loaded:  # with the master: the same faces, or those that do not follow from it
            if unchanged:
                return
            self.loaded = False
            if not self.follows:
                return
        if known is not None:
            self._take(known[0], view, follows=known[1])
        elif self.current is None:
            self._take(None, view, follows=False)
            self._stepped = self._stepped or lost
        else:
            self._take(dequantize(), view, follows=False)
            self.rounded = self._master is not None or lost

    def mark_loaded(self) -> None:
        """Record that faces and master were loaded, in either order."""
        self.loaded = False
        self.follows = False

    def _take(self, values: Tensor | None, view: View, *, follows: bool) -> None:
        """Write known ``values`` into ``view`` of the present ones."""
        if self.current is None and values is not None and view is whole:
            # Known again: of a copy, or of a weight whose optimizer is gone
            values = self.original = values.clone()
            self._owned, self.rounded = True, False
        current = self.current
        mine = None if current is None else view(current)
        if (
            current is not None
            and mine is not None
            and values is not None
            and not is_same(mine, values)
        ):
            self._make_own(torch.promote_types(current.dtype, values.dtype))
            target = self.current
            if target is not None:
                view(target).copy_(values)
            if view is whole:
                self.rounded = False
        master = self.master
        if master is not None:
            increment_version(master)  # below the weight's dispatch autograd does not see writes
        elif view is whole:
            self._master, self._stepped = None, False
        self._former = None
        self.follows = follows and mine is not None and (view is whole or self.follows)

    def _make_own(self, dtype: torch.dtype) -> None:
        """Copy an original that is aliased or not in ``dtype``; a master is unchanged."""
        if self.original is not None and not (self._owned and self.original.dtype == dtype):
            self.original, self._owned = self.original.to(dtype, copy=True), True


_of_masters: weakref.WeakValueDictionary[int, HighPrecisionValues] = weakref.WeakValueDictionary()
"""The values that masters hold, by the masters' ids, which may be those of former ones: see ``is_of``."""


def values_in(master: Tensor) -> HighPrecisionValues | None:
    """Return the values of the weight that ``master`` holds, or None if that weight is gone."""
    found = _of_masters.get(id(master))
    return found if found is not None and found.is_of(master) else None


def is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same elements of the same memory."""
    if a is b:
        return True
    if (a.shape, a.stride(), a.storage_offset()) != (b.shape, b.stride(), b.storage_offset()):
        return False
    # ``_cdata`` is private: the address of the storage itself, which one without memory has too.
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)

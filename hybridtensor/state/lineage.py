"""Which layers have equal delayed scales of their inputs: those whose scales followed from the same inputs so far."""

from __future__ import annotations

import hashlib

from torch import Tensor

NOTHING = "nothing"  # what scales that begin followed from


class Lineage:
    """What the delayed scales of a layer's input followed from; nothing is known at first.

    It holds while only ``follow`` says what the scales are: torch counts writes of any other, such as of
    DistributedDataParallel, which broadcasts buffers in each forward by default.
    """

    __slots__ = ("_inputs", "_versions")

    def __init__(self) -> None:
        self._inputs: object | None = None
        self._versions: tuple[int, int] | None = None

    def inputs(self, scale: Tensor | None, history: Tensor | None) -> object | None:
        """Return what is equal where all inputs so far were the same, or None if that is not known.

        Args:
            scale: The layer's delayed scales.
            history: Their amax history.
        """
        if self._inputs is None or scale is None or history is None:
            return None
        return self._inputs if self._versions == (scale._version, history._version) else None

    def follow(self, inputs: object | None, scale: Tensor | None, history: Tensor | None) -> None:
        """Set what the scales, as they are now, followed from; None if unknown."""
        self._inputs = None if scale is None or history is None else inputs
        if scale is not None and history is not None:
            self._versions = scale._version, history._version


def digest(slots: tuple[str, ...], scale: Tensor | None, history: Tensor | None) -> str | None:
    """Return a digest of the scales and the history of a layer's input, or None if they are not there."""
    if scale is None or history is None or scale.is_meta or history.is_meta:
        return None
    own = [index for index, slot in enumerate(slots) if slot.startswith("input")]
    content = repr([scale[own].tolist(), history[own].tolist()])
    return hashlib.sha256(content.encode()).hexdigest()

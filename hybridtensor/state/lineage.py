"""Which layers have equal delayed scales of their inputs: those whose scales followed from the same inputs so far."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from torch import Tensor

NOTHING = "nothing"  # what scales that begin followed from


class Lineage(NamedTuple):
    """The inputs that a layer's input scales followed from, valid while the version counters of the scales are
    unchanged."""

    inputs: object | None = None
    versions: tuple[int, int] | None = None

    @classmethod
    def of(cls, inputs: object | None, scale: Tensor | None, history: Tensor | None) -> Lineage:
        """Return the lineage of scales and amax history as they are now."""
        if inputs is None or scale is None or history is None:
            return cls()
        if scale.is_inference() or history.is_inference():  # nobody counts their writes
            return cls()
        # Whoever else writes scales (a load, DistributedDataParallel when it wraps a model) is counted
        # by autograd, and ends the lineage.
        return cls(inputs, (scale._version, history._version))

    def inputs_of(self, scale: Tensor | None, history: Tensor | None) -> object | None:
        """Return ``inputs`` if the scales and history are unchanged."""
        if self.inputs is None or scale is None or history is None:
            return None
        if scale.is_inference() or history.is_inference():  # put there since
            return None
        return self.inputs if self.versions == (scale._version, history._version) else None


def digest(slots: tuple[str, ...], scale: Tensor | None, history: Tensor | None) -> str | None:
    """Return a digest of a layer's input scales and history, or None without them."""
    if scale is None or history is None or scale.is_meta or history.is_meta:
        return None
    # Reads the device, which only loading and unpickling do. Layers that were siblings when they
    # were saved find each other by equal content.
    own = [index for index, slot in enumerate(slots) if slot.startswith("input")]
    content = repr([scale[own].tolist(), history[own].tolist()])
    return hashlib.sha256(content.encode()).hexdigest()

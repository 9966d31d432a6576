"""Which numbers of rows kernels are compiled for early, so that batches of another length wait for no compiler."""

from __future__ import annotations

from collections.abc import Hashable

_ROWS = (512, 640, 576, 544, 528, 513)
"""Multiples of 512, 128, 64, 32 and 16, and of none: extents, strides and whole blocks that are compile-time constants,
or that Triton compiles kernels of their own for, divide one of them."""

_SEEN: dict[Hashable, int] = {}
_COMPILED = -1


def lengths_to_compile(kind: Hashable, rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to compile for now: all when a second one is seen of a kind of matrices, else none."""
    first = _SEEN.setdefault(kind, rows)
    if first in (rows, _COMPILED):
        return ()
    _SEEN[kind] = _COMPILED
    return _ROWS

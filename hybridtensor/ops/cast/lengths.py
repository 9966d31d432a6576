"""Which numbers of rows kernels are compiled for early, so that batches of another length wait for no compiler."""

from __future__ import annotations

from collections.abc import Hashable

_ROWS = (512, 640, 576, 544, 528, 516, 513)
"""Multiples of 512, 128, 64, 32, 16 and 4, and of none: of extents, strides and whole blocks that are compile-time
constants, or that Triton compiles kernels of their own for, all kinds. Amaxes of columns lie behind those of rows, at a
multiple of 16 bytes where 4 divides the rows."""

_SEEN: dict[Hashable, int] = {}
_COMPILED = -1


def lengths_to_compile(kind: Hashable, rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to compile for now: all when a second one is seen of a kind of matrices, else none."""
    first = _SEEN.setdefault(kind, rows)
    if first in (rows, _COMPILED):
        return ()
    _SEEN[kind] = _COMPILED
    return _ROWS

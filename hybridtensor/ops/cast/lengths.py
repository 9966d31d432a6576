"""Which numbers of rows kernels are compiled for early, so that batches of another length wait for no compiler."""

from __future__ import annotations

import math
from collections.abc import Hashable

_ROWS = {512: 64, 640: 64, 576: 64, 544: 32, 528: 16, 516: 4, 513: 1}
"""Numbers of rows, with what divides them, for which kernels differ: by compile-time constants of whole tiles and
blocks, or by what Triton makes of extents and strides that are multiples of 16. Amaxes of columns lie behind those of
rows, at a multiple of 16 bytes where 4 divides the rows."""

_SEEN: dict[Hashable, tuple[int, bool]] = {}
"""By kind of matrix: the least divisor of the lengths that were seen, and whether there were several."""


def few_like(extent: object) -> int:
    """Return a small extent for which the same kernels are compiled; for a symbol one of whole tiles."""
    most = next(iter(_ROWS))
    if type(extent) is not int:
        return most
    if extent <= most:
        return extent
    # Extents of tiles and blocks are powers of two, at most 512.
    return next(other for other in _ROWS if math.gcd(extent, most) % math.gcd(other, most) == 0)


def lengths_to_compile(kind: Hashable, rows: int) -> tuple[int, ...]:
    """Return the numbers of rows to compile for now, in which matrices of a kind vary.

    None as long as one number divides all lengths: where these are filled up to a multiple of 64, nothing else comes.
    """
    divisor = next(number for number in _ROWS.values() if rows % number == 0)
    least, several = _SEEN.setdefault(kind, (divisor, False))
    if divisor == least or (several and divisor > least):
        return ()
    _SEEN[kind] = now = min(divisor, least), True
    return tuple(
        other
        for other, of_other in _ROWS.items()
        if of_other >= now[0] and not (several and of_other >= least)
    )

"""Checks that cost time, for when something is wrong."""

from __future__ import annotations

from typing import Self

from hybridtensor.arguments import require_flag
from hybridtensor.ops import groups


class debug:  # noqa: N801  (used as a function, and as a context)
    """Turn checks on or off, from the call on; as a context, until it ends.

    ::

        ht.debug(offsets=True)
        with ht.debug(offsets=True):
            loss = model(tokens)

    Args:
        offsets: Whether products of experts check, on a GPU too, that offsets do not decrease and are
            not beyond the tokens (in sums over tokens: the rows that these are padded to); else
            ValueError. The host then waits for the device at every cast
            and product of experts, which a CUDA graph cannot capture. On a CPU it is always checked.

    Raises:
        TypeError: If it is not a bool.
    """

    def __init__(self, *, offsets: bool) -> None:
        require_flag("debug", offsets=offsets)
        self._before = groups.check_offsets(offsets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        groups.check_offsets(self._before)

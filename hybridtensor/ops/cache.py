"""A cache of what is worked out once for each kind of arguments."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """A dictionary that is emptied where it is full: an order by use would have to be kept at each use."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._most:
            self.clear()
        super().__setitem__(key, value)

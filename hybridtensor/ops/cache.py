"""Caches of what is worked out once for each kind of arguments."""

from __future__ import annotations

from typing import Generic, TypeVar

from hybridtensor.ops.library import is_captured

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


class LaunchTables(Generic[V]):
    """Prepared launches by key; a full cache drops all but those that a CUDA graph has captured.

    A captured kernel reads its table again in each replay, whose Python the graph skips: freed memory would be another
    tensor's by then. These tables are kept until the process ends, as nothing tells that a graph is gone.

    Args:
        most: How many launches are cached besides the captured ones.
    """

    def __init__(self, most: int) -> None:
        self._droppable: Cache[object, V] = Cache(most)
        self._captured: dict[object, V] = {}

    def __len__(self) -> int:
        return len(self._droppable) + len(self._captured)

    def get(self, key: object) -> V | None:
        """Return the launch of ``key``, or None; the caller launches it now."""
        found = self._droppable.get(key)
        if found is None:
            return self._captured.get(key)
        if is_captured():
            self._captured[key] = self._droppable.pop(key, found)
        return found

    def add(self, key: object, launch: V) -> V:
        """Cache and return a launch, which was prepared outside of a capture, as tables are copied from the host."""
        self._droppable[key] = launch
        return launch

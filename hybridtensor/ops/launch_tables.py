"""A cache of prepared launches that read tables on their device."""

from __future__ import annotations

from typing import Generic, TypeVar

from hybridtensor.ops.cache import Cache
from hybridtensor.ops.library import is_captured

T = TypeVar("T")


class LaunchTables(Generic[T]):
    """Prepared launches by key; a full cache drops all but those that a CUDA graph has captured.

    A captured kernel reads its table again in each replay, whose Python the graph skips: freed memory would be another
    tensor's by then. These tables are kept until the process ends, as nothing tells that a graph is gone.

    Args:
        most: How many launches are cached besides the captured ones.
    """

    def __init__(self, most: int) -> None:
        self._droppable: Cache[object, T] = Cache(most)
        self._captured: dict[object, T] = {}

    def __len__(self) -> int:
        return len(self._droppable) + len(self._captured)

    def get(self, key: object) -> T | None:
        """Return the launch of ``key``, or None; the caller launches it now."""
        found = self._droppable.get(key)
        if found is None:
            return self._captured.get(key)
        if is_captured():
            self._captured[key] = self._droppable.pop(key, found)
        return found

    def add(self, key: object, launch: T) -> T:
        """Cache and return a launch, which was prepared outside of a capture, as tables are copied from the host."""
        self._droppable[key] = launch
        return launch

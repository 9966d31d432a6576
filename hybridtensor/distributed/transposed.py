"""The transpose of a gathered weight: what FSDP2 gathers is the same, with the faces swapped."""

from __future__ import annotations

from typing import Any

from hybridtensor.distributed.plan import COLUMN, ROW
from hybridtensor.distributed.torch_compat import Sharded


class Transposed:
    """A ``Shard`` as the transpose of its gathered weight sees it: the faces are swapped."""

    def __init__(self, shard: Any) -> None:
        self.shard = shard

    @property
    def sharded(self) -> Sharded:
        """The parameter as FSDP2 holds it."""
        return self.shard.sharded  # type: ignore[no-any-return]

    def note_traced(self) -> None:
        """See ``Shard.note_traced``."""
        self.shard.note_traced()

    def transposed(self) -> Any:
        """Return the shard."""
        return self.shard

    @property
    def values(self) -> Any:
        """See ``Shard.values``."""
        return None if self.shard.values is None else self.shard.values.t()

    def is_there(self, direction: str) -> bool:
        """See ``Shard.is_there``."""
        return self.shard.is_there(COLUMN if direction == ROW else ROW)  # type: ignore[no-any-return]

    def require(self, direction: str) -> None:
        """See ``Shard.require``."""
        self.shard.require(COLUMN if direction == ROW else ROW)

"""Ranks that do one thing together with a model, where parts of it are on several."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridtensor.ranks import Ranks

T = TypeVar("T")


def is_sharded(model: nn.Module) -> bool:
    """Return whether ranks hold shards of a model, gathered or not."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    return any(isinstance(t, DTensor) for t in (*model.parameters(), *model.buffers()))


def together(
    who: str, model: nn.Module, timeout: datetime.timedelta
) -> Callable[[Callable[[], T]], T]:
    """Return a function that runs work on all ranks of a sharded model, or on this one alone."""
    if is_sharded(model):
        ranks = Ranks(who, None, timeout)
        if ranks.size > 1:
            return ranks.each
    return lambda work: work()

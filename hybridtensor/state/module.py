"""A module of a few buffers whose dtypes and contents matter, whatever is done to the model that it is a part of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor, nn


class StateModule(nn.Module):
    """A module whose buffers move with a model, but are neither cast nor sharded, and are reset off the meta device and
    by ``to_empty``."""

    def reset_parameters(self) -> None:
        """Initialize the buffers; torch calls it by this name for modules that leave the meta device."""
        raise NotImplementedError(
            f"{type(self).__name__}: reset_parameters() is missing; define it"
        )

    def set_placeholder(self, needed: bool, device: torch.device) -> None:
        """Register a buffer without elements that no state dict has, or remove it."""
        self._buffers.pop("placeholder", None)
        if needed:
            # DistributedDataParallel broadcasts buffers if there were any when it wrapped the model, and fails if none
            # are left.
            none = torch.empty(0, device=device)
            self.register_buffer("placeholder", none, persistent=False)

    def _move_others(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move what is no buffer to where ``fn`` moves tensors; nothing by default."""

    def materialize_(self, device: torch.device) -> None:
        """Allocate and reset buffers on the meta device."""
        if self._is_meta:
            self.to_empty(device=device)

    @property
    def _is_meta(self) -> bool:
        return any(buffer.is_meta for buffer in self.buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move, but stay in fp32 under ``model.bfloat16()``; buffers that leave the meta device are initialized."""
        before = dict(self._buffers)
        was_meta = self._is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None and moved.dtype != buffer.dtype:
                # The buffer before the cast, whose bits the cast dropped.
                self._buffers[name] = buffer.to(moved.device)
        self._move_others(fn)
        # ``to_empty`` of a model that has memory leaves nothing of it, either. Private in torch: a function of another
        # name would leave what lies in new memory.
        emptied = getattr(fn, "__qualname__", "").startswith("Module.to_empty.")
        if (was_meta or emptied) and not self._is_meta:
            # Memory that replaces the meta device holds nothing yet.
            self.reset_parameters()
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, but nothing to ``distribute_module``, which would shard the buffers as if it were a
        layer."""
        # distribute_module shards a layer by visiting all its modules: it would need a weight here, and turn the
        # buffers into DTensors. It asks the layer's generator, which asks this one. Graphs have no frames, and shard
        # nothing.
        walker = None if torch.compiler.is_dynamo_compiling() else sys._getframe(1).f_back
        if walker is None or walker.f_code.co_name != "distribute_module":
            yield from super().named_modules(memo, prefix, remove_duplicate)

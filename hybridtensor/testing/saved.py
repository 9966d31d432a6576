"""Count what autograd saves for backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybridtensor.arguments import require_items, require_module, require_tensor
from hybridtensor.offload import held_by
from hybridtensor.subclasses.structure import flatten


@dataclass
class SavedTensors:
    """Plain tensors that autograd saved, in order; ``tensors`` may repeat a storage, ``nbytes`` counts each once.

    ::

        with testing.saved_for_backward() as saved:
            model(batch)
        print(saved.nbytes(), [tensor.dtype for tensor in saved.tensors])
    """

    tensors: list[Tensor] = field(default_factory=list)

    def nbytes(self, *, without: Iterable[Tensor] = ()) -> int:
        """Return the bytes of the distinct storages, less those that hold one of ``without`` (or its cached faces)."""
        kept = require_items("SavedTensors.nbytes", "a list of tensors", without)
        for tensor in kept:
            require_tensor("SavedTensors.nbytes", tensor)
        excluded = {t.untyped_storage().data_ptr() for tensor in kept for t in held_by(tensor)}
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors
        }
        return sum(size for address, size in storages.items() if address not in excluded)


@contextmanager
def saved_for_backward() -> Iterator[SavedTensors]:
    """Record every tensor that autograd saves while the context is open.

    ::

        with testing.saved_for_backward() as saved:
            model(batch)
    """
    saved = SavedTensors()

    def pack(tensor: Tensor) -> Tensor:
        saved.tensors.extend(flatten(tensor)[0])
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@contextmanager
def saved_by(modules: Iterable[nn.Module]) -> Iterator[SavedTensors]:
    """Record what the forward passes of ``modules`` save while the context is open, and nothing else does.

    ::

        with testing.saved_by([model.blocks[0]]) as saved:
            model(batch)
    """
    blocks = require_items("saved_by", "a list of modules", modules)
    for module in blocks:
        require_module("saved_by", module)
    saved, opened = SavedTensors(), []

    def enter(module: nn.Module, args: object) -> None:
        context = saved_for_backward()
        opened.append((context, context.__enter__()))

    def leave(module: nn.Module, args: object, output: object) -> None:
        context, of_module = opened.pop()
        context.__exit__(None, None, None)
        saved.tensors.extend(of_module.tensors)

    hooks = []
    for module in blocks:
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield saved
    finally:
        for hook in hooks:
            hook.remove()

"""What the blocks of a model add to its residual stream, and in backward to the stream's gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from hybridtensor.layers import Layer
from hybridtensor.subclasses.op_table import Args, Kwargs


class Block:
    """What a block adds to the stream: sums of squares, float64."""

    def __init__(self) -> None:
        self.stream = self.added = self.gradient = self.gradient_added = 0.0
        self.came: Tensor | None = None

    def forward_share(self) -> float:
        """Return the share of the stream after the block that the block added; 1 where there is no stream."""
        return min(self.added / self.stream, 1.0) if self.stream else 1.0

    def backward_share(self) -> float:
        """Return the share of the gradient before the block that the block added."""
        return min(self.gradient_added / self.gradient, 1.0) if self.gradient else 1.0


def block_of(model: nn.Module, layer: Layer) -> nn.Module | None:
    """Return the outermost member of a list of modules that holds a layer: a block with a residual connection."""
    parent: nn.Module = model
    for name in layer.name.split("."):
        child = parent._modules.get(name)
        if child is None:
            return None
        if isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and (
            child is not layer.module or layer.is_stack
        ):
            return child
        parent = child
    return None


@contextlib.contextmanager
def measured_blocks(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, Block]]:
    """Measure blocks in hooks while the model runs."""
    blocks = {module: Block() for module in modules}
    with contextlib.ExitStack() as stack:
        for module, block in blocks.items():
            for hook in (
                module.register_forward_pre_hook(_coming(block), with_kwargs=True),
                module.register_forward_hook(_leaving(block)),
            ):
                stack.callback(hook.remove)
        yield blocks


def _coming(block: Block) -> Callable[..., None]:
    def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        block.came = given if given is not None and given.is_floating_point() else None

    return hook


def _leaving(block: Block) -> Callable[..., None]:
    """Return a forward hook that measures what a block adds to the stream, and to its gradient in backward."""

    def hook(module: nn.Module, args: Args, output: object) -> None:
        came, block.came = block.came, None
        left = output[0] if isinstance(output, (tuple, list)) else output
        if came is None or not isinstance(left, Tensor) or left.shape != came.shape:
            return  # no stream goes around it
        with torch.no_grad():
            block.added += float((left - came).float().square().sum())
            block.stream += float(left.float().square().sum())
        if not (left.requires_grad and came.requires_grad):
            return
        behind: list[Tensor] = []
        left.register_hook(lambda grad: behind.append(grad.detach()))

        def before(grad: Tensor) -> None:
            if behind:
                block.gradient_added += float((grad - behind[0]).float().square().sum())
                block.gradient += float(grad.float().square().sum())

        came.register_hook(before)

    return hook

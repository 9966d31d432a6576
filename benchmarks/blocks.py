"""Forward and backward of what opt-in functions fuse, over the same with modules as they are: a norm with the layers
behind it, and a gated MLP. Eager, shapes of Llama-3 8B, in turns in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, report, time_alternating
from torch import Tensor, nn

import hybridtensor as ht

SHAPES = {"cuda": (8192, 4096, 1024, 14336), "cpu": (64, 128, 64, 256)}  # tokens, features, keys, hidden
RECIPES = ["fp8", "fp8+pow2_scale", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]


class Projections(nn.Module):
    """A norm, and the three layers that read it."""

    def __init__(self, dim: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(dim, out, bias=False) for out in (dim, keys, keys))

    def forward(self, x: Tensor, how: str) -> list[Tensor]:
        """Return three outputs."""
        layers = (self.q, self.k, self.v)
        if how == "modules":
            y = self.norm(x)
        else:
            y = ht.rms_norm(x, self.norm.weight, self.norm.eps, into=layers if how == "into" else ())
        return [layer(y) for layer in layers]


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, dim: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.layers = [self.gate, self.up]

    def forward(self, x: Tensor, how: str) -> list[Tensor]:
        """Return the output."""
        outputs = [layer(x) for layer in self.layers]
        if how == "modules":
            gate, up = outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs
            return [self.down(F.silu(gate) * up)]
        into, of = (self.down, self.layers) if how == "into" else ((), ())
        return [self.down(ht.swiglu(*outputs, into=into, outputs_of=of))]


class PackedMLP(MLP):
    """The same with one layer that computes gate and up."""

    def __init__(self, dim: int, keys: int, hidden: int) -> None:
        super().__init__(dim, keys, hidden)
        del self.up
        self.gate = nn.Linear(dim, 2 * hidden, bias=False)
        self.layers = [self.gate]


def step(model: nn.Module, x: Tensor, grads: list[Tensor], how: str) -> None:
    """Run forward and backward."""
    x.grad = None
    for parameter in model.parameters():
        parameter.grad = None
    torch.autograd.backward(model(x, how), grads)


def measure(kind: Callable[..., nn.Module], recipe: str, device: str, repeats: int) -> dict[str, Any]:
    """Return one row."""
    tokens, *extents = SHAPES[torch.device(device).type]
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(*extents).bfloat16()
        x = torch.randn(tokens, extents[0], dtype=torch.bfloat16).requires_grad_()
    if recipe != "bf16":
        ht.quantize_(model, recipe, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    grads = [torch.randn_like(y) for y in model(x, "modules")]
    variants = {how: functools.partial(step, model, x, grads, how) for how in ("modules", "values", "into")}
    times = time_alternating(variants, device, repeats)
    ratios = {f"{how} over modules": times["modules"] / times[how] for how in ("values", "into")}
    return {
        "block": kind.__name__,
        "recipe": recipe,
        "modules ms": times["modules"],
        "into ms": times["into"],
        **ratios,
    }


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    rows = []
    for kind in (Projections, MLP, PackedMLP):
        for recipe in ("bf16", *RECIPES):
            rows.append(measure(kind, recipe, options.device, options.repeats))
            print(rows[-1], flush=True)
    report("blocks", rows, options)

"""Experts, forward and backward, over BF16's grouped product: single layers and a whole block, beside torchao.

Weights are quantized in every step, as after an optimizer's. Times are the device's, not the host's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, report, time_alternating
from torch import Tensor, nn

import hybridtensor as ht

# Tokens, out features, in features, experts
SHAPES = {
    "cuda": [
        (16384, 4096, 4096, 8),
        (32768, 2048, 7168, 8),
        (65536, 2048, 7168, 64),
        (32768, 2048, 7168, 64),
        (16384, 4096, 4096, 64),
    ],
    "cpu": [(256, 64, 64, 4)],
}
BLOCKS = {"cuda": [(16384, 4096, 4096, 8)], "cpu": [(64, 32, 32, 4)]}  # tokens, width, hidden, experts
RECIPES = ["fp8_rowwise", "fp8_rowwise+fast_accum", "fp8+e4m3_grad", "fp8", "fp8_block", "deepseek_v4_experts", "mxfp8"]
_TURN = 16


class Experts(nn.Module):
    """One weight for each expert, and the product of tokens that are sorted by expert."""

    def __init__(self, count: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, out_features, in_features) / in_features**0.5)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        return torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)


class Torchao(Experts):
    """The same by torchao's products in FP8 by row."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm

        return _to_fp8_rowwise_then_scaled_grouped_mm(
            x, self.weight.transpose(-2, -1), ends, pad_token_groups_for_grouped_mm=False
        )


class Block(nn.Module):
    """A mixture of experts: each token goes to one of them, through a SwiGLU."""

    def __init__(self, count: int, width: int, hidden: int, matmul: type[Experts] = Experts) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.w1, self.w3 = matmul(count, hidden, width), matmul(count, hidden, width)
        self.w2 = matmul(count, width, hidden)
        self.num_experts = count

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = (chosen[:, None] == torch.arange(self.num_experts, device=x.device)).sum(0)
        ends = counts.cumsum(0, dtype=torch.int32)
        tokens = x[order]
        y = self.w2(F.silu(self.w1(tokens, ends)) * self.w3(tokens, ends), ends)
        return torch.zeros_like(x).index_add(0, order, y * weight[order, None])


def offsets(tokens: int, experts: int, device: str, *, skewed: bool) -> Tensor:
    """Return where the tokens of each expert end: even, or in proportion to u^3 + 0.02 of a uniform u."""
    u = torch.rand(experts, generator=torch.Generator().manual_seed(0))
    share = u**3 + 0.02 if skewed else torch.ones(experts)
    sizes = (share / share.sum() * tokens / _TURN).round().int() * _TURN
    ends = sizes.cumsum(0).clamp(max=tokens)
    ends[-1] = tokens
    return ends.to(device, torch.int32)


def changed(module: nn.Module) -> None:
    """Change every weight of experts, as an optimizer step does."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() == 3:
                weight[0, 0, 0].add_(1e-3)
            weight.grad = None


def step(module: nn.Module, x: Tensor, g: Tensor, *ends: Tensor) -> Callable[[], None]:
    """Return forward and backward."""

    def run() -> None:
        changed(module)
        x.grad = None
        module(x, *ends).backward(g)

    return run


def measure_layers(shape: tuple[int, int, int, int], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe and kind of offsets for one shape."""
    tokens, out_features, in_features, count = shape
    with torch.device(device):
        plain = Experts(count, out_features, in_features).bfloat16()
        x = torch.randn(tokens, in_features, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(tokens, out_features, dtype=torch.bfloat16)
    layers: dict[str, nn.Module] = {"bf16 (plain)": plain}
    for name in RECIPES if count < 64 else RECIPES[:2]:
        layers[name] = ht.quantize_(copy.deepcopy(plain), name)
    if device.startswith("cuda"):
        layers["torchao rowwise"] = Torchao(1, 1, 1)
        layers["torchao rowwise"].weight = nn.Parameter(plain.weight.detach().clone())
    rows = []
    for skewed in (False, True):
        ends = offsets(tokens, count, device, skewed=skewed)
        variants = {name: step(layer, x, g, ends) for name, layer in layers.items()}
        times = time_alternating(variants, device, repeats)
        base = times["bf16 (plain)"]
        rows += [
            {
                "tokens x out x in, experts": f"{tokens}x{out_features}x{in_features}, {count}",
                "groups": "skewed" if skewed else "even",
                "recipe": name,
                "ms": ms,
                "speed over BF16": base / ms,
            }
            for name, ms in times.items()
        ]
    return rows


def peak_memory(as_run: Callable[..., nn.Module], module: nn.Module, x: Tensor, g: Tensor) -> float:
    """Return the MiB that a step of a copy takes at most, beyond its weights, once it has run before."""
    if x.device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    module = as_run(copy.deepcopy(module))
    before = torch.cuda.memory_allocated()
    run = step(module, x, g)
    run()
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_blocks(shape: tuple[int, int, int, int], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe for a whole block, eager and compiled."""
    torch._dynamo.reset()  # each shape compiles as in a process of its own
    tokens, width, hidden, count = shape
    with torch.device(device):
        plain = Block(count, width, hidden).bfloat16()
        x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        g = torch.randn(tokens, width, dtype=torch.bfloat16)
    made: dict[str, nn.Module] = {"bf16 (plain)": plain}
    for name in RECIPES[:3]:
        made[name] = ht.quantize_(copy.deepcopy(plain), name, filter_fn=lambda _, name: name != "router")
    rows = []
    for groups, as_run in (("eager", nn.Sequential), ("compiled", torch.compile)):
        peaks = {name: peak_memory(as_run, module, x, g) for name, module in made.items()}
        run = {name: step(as_run(m), x, g) for name, m in made.items()}
        times = time_alternating(run, device, repeats)
        base = times["bf16 (plain)"]
        rows += [
            {
                "tokens x out x in, experts": f"block {tokens}x{width}x{hidden}, {count}",
                "groups": groups,
                "recipe": name,
                "ms": ms,
                "speed over BF16": base / ms,
                "peak MiB": peaks[name],
            }
            for name, ms in times.items()
        ]
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    kind = torch.device(options.device).type
    rows = []
    for shape in BLOCKS[kind]:
        rows += measure_blocks(shape, options.device, options.repeats)
    for shape in SHAPES[kind]:
        rows += [{**row, "peak MiB": ""} for row in measure_layers(shape, options.device, options.repeats)]
        if kind == "cuda":
            torch.cuda.empty_cache()
    report("grouped", rows, options)

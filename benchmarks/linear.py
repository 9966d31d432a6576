"""Forward and backward of one bias-free linear, eager, against BF16 in the same run.

Beside torchao, eager and compiled, and TransformerEngine, where it is installed.

Weights are quantized in every step, as after an optimizer's. Times are the device's, not the host's.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from typing import Any

import te_peer
import torch
from common import arguments, report, time_alternating
from torch import nn

import hybridtensor as ht

SHAPES = {
    "cuda": [(8192, 8192, 8192), (16384, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (16384, 8192, 28672)],
    "cpu": [(2048, 512, 512), (2048, 1024, 512)],
}
RECIPES = [
    "fp8",
    "fp8+pow2_scale",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_block",
    "fp8_high_precision_backward",
    "fp8_dequantized_backward",
    "mxfp8",
    "mxfp4",
    "deepseek_v4_experts",
    "nvfp4",
    "nvfp4+four_over_six",
]


def step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], None]:
    """Return forward and backward of a layer, its weight changed before, as after an optimizer step."""

    def run() -> None:
        with torch.no_grad():
            layer.weight[0, 0].add_(1e-3)
        ht.step_(layer)
        layer.weight.grad = x.grad = None
        layer(x).backward(g)

    return run


def torchao_layers(plain: nn.Module) -> dict[str, nn.Module]:
    """Return torchao's float8 training layers, in eager mode and compiled, where the device can run them."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    made: dict[str, nn.Module] = {}
    for name in ("tensorwise", "rowwise"):
        config = Float8LinearConfig.from_recipe_name(name)
        made[f"torchao {name}"] = convert_to_float8_training(nn.Sequential(copy.deepcopy(plain)), config=config)[0]
        made[f"torchao {name}, compiled"] = torch.compile(copy.deepcopy(made[f"torchao {name}"]), dynamic=False)
    return made


def measure(shape: tuple[int, int, int], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe for one shape."""
    torch._dynamo.reset()  # each shape compiles as in a process of its own
    tokens, out_features, in_features = shape
    plain = nn.Linear(in_features, out_features, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, in_features, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, out_features, device=device, dtype=torch.bfloat16)
    layers: dict[str, nn.Module] = {"bf16 (plain)": plain}
    layers |= {name: ht.quantize_(copy.deepcopy(plain), name) for name in RECIPES}
    if device.startswith("cuda"):
        layers |= torchao_layers(plain) | te_peer.layers(plain)
    times = time_alternating({name: step(layer, x, g) for name, layer in layers.items()}, device, repeats)
    base = times["bf16 (plain)"]
    return [
        {"tokens x out x in": "x".join(map(str, shape)), "recipe": name, "ms": ms, "speed over BF16": base / ms}
        for name, ms in times.items()
    ]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    rows = []
    for shape in SHAPES[torch.device(options.device).type]:
        rows += measure(shape, options.device, options.repeats)
    for name in dict.fromkeys(row["recipe"] for row in rows):
        speeds = [row["speed over BF16"] for row in rows if row["recipe"] == name]
        mean = statistics.geometric_mean(speeds)
        rows.append({"tokens x out x in": "geometric mean", "recipe": name, "ms": "", "speed over BF16": mean})
    report("linear", rows, options)

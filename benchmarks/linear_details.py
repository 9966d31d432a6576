"""What the table of the linear leaves out: bias, several microbatches, few tokens, the host, where the time goes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from common import arguments, report, time_alternating
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import hybridtensor as ht

RECIPES = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]
SIZES = {"cuda": (16384, 14336, 4096), "cpu": (128, 128, 128)}  # tokens, out, in
TOKENS = {"cuda": [64, 512, 2048, 4096, 8192, 16384], "cpu": [32]}
TINY = (64, 256, 256)
MICROBATCHES = 4


def layers(size: tuple[int, int, int], device: str, *, bias: bool = False) -> dict[str, nn.Module]:
    """Return a plain layer and its converted copies."""
    plain = nn.Linear(size[2], size[1], bias=bias, device=device, dtype=torch.bfloat16)
    return {"bf16": plain} | {name: ht.quantize_(copy.deepcopy(plain), name) for name in RECIPES}


def step(layer: nn.Module, tokens: int, *, uses: int = 1, write: bool = True) -> Callable[[], None]:
    """Return ``uses`` times forward and backward, after one change of the weight if there is a ``write``."""
    weight: Tensor = layer.weight
    x = torch.randn(tokens, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
    g = torch.randn(tokens, weight.shape[0], device=weight.device, dtype=weight.dtype)

    def run() -> None:
        if write and isinstance(weight, ht.MasterWeight):
            weight.mark_written()
            ht.step_(layer)
        for _ in range(uses):
            weight.grad = x.grad = None
            layer(x).backward(g)

    return run


def speeds(what: str, steps: dict[str, Callable[[], None]], device: str, repeats: int) -> list[dict[str, Any]]:
    """Return device times over BF16's."""
    times = time_alternating(steps, device, repeats)
    return [row(what, name, ms, times["bf16"] / ms) for name, ms in times.items()]


def row(what: str, recipe: str, ms: float, over: float) -> dict[str, Any]:
    """Return one line of the table."""
    return {"what": what, "recipe": recipe, "ms": ms, "over BF16": over}


def with_host(function: Callable[[], None], device: str, count: int) -> float:
    """Return the best of five mean milliseconds of a step, host and device."""
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(count):
            function()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / count * 1e3)
    return best


def shares(name: str, function: Callable[[], None]) -> list[dict[str, Any]]:
    """Return what part of the device time goes where."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        function()
        torch.cuda.synchronize()
    parts = {"casts": 0.0, "products": 0.0, "other": 0.0}
    for event in recorded.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        ours = any(word in event.key for word in ("cast_kernel", "measure", "dequantize_kernel"))
        product = any(word in event.key.lower() for word in ("gemm", "nvjet", "cutlass", "sm90_xmma"))
        parts["casts" if ours else "products" if product else "other"] += event.self_device_time_total / 1e3
    return [row(f"time in {part}", name, ms, ms / sum(parts.values())) for part, ms in parts.items()]


def measure(device: str, repeats: int) -> list[dict[str, Any]]:
    """Return all rows."""
    kind = torch.device(device).type
    size = SIZES[kind]
    with_bias, plain = layers(size, device, bias=True), layers(size, device)
    rows = speeds("bias", {n: step(layer, size[0]) for n, layer in with_bias.items()}, device, repeats)
    several = {n: step(layer, size[0] // MICROBATCHES, uses=MICROBATCHES) for n, layer in plain.items()}
    rows += speeds(f"{MICROBATCHES} microbatches", several, device, repeats)
    for tokens in TOKENS[kind]:
        times = {n: with_host(step(layer, tokens), device, 10) for n, layer in plain.items()}
        rows += [row(f"{tokens} tokens, with the host", n, ms, times["bf16"] / ms) for n, ms in times.items()]
    tiny = {n: with_host(step(layer, TINY[0], write=False), device, 100) for n, layer in layers(TINY, device).items()}
    rows += [row("64x256x256, weight as before, with the host", n, ms, tiny["bf16"] / ms) for n, ms in tiny.items()]
    if kind == "cuda":
        rows += [part for n, layer in plain.items() for part in shares(n, step(layer, size[0]))]
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    report("linear_details", measure(options.device, options.repeats), options)

"""Host time of a training step of a small linear layer beyond plain BF16's: forward, backward, an optimizer that writes
the weight, and ``step_``; the queue is drained after each step.

``--recipes "TransformerEngine current"`` measures its layer, where it is installed. With ``--other PATH`` the package
at PATH is measured in turns with this one, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TOKENS, FEATURES = 64, 256
RECIPES = ["fp8", "fp8_rowwise", "fp8_block", "fp8_delayed", "mxfp8", "nvfp4"]


def medians_us(
    steps: dict[str, Callable[[], object]], drain: Callable[[], object], count: int, turns: int = 7
) -> dict[str, float]:
    """Return the median microseconds of each step and of draining the queue after it, in turns: a host is not as fast
    at all times. Each is the median over the turns of the medians of ``count`` steps.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):  # the first one warms up
        for name, step in steps.items():
            times = []
            for _ in range(count):
                start = time.perf_counter()
                step()
                drain()
                times.append(time.perf_counter() - start)
            if turn:
                found[name].append(statistics.median(times) * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


def measure(device: str, count: int, recipes: list[str]) -> dict[str, float]:
    """Return microseconds by recipe; ``bf16`` is the plain layer."""
    import te_peer
    import torch
    from torch import nn

    import hybridtensor as ht

    drain = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(TOKENS, FEATURES, device=device, dtype=torch.bfloat16)
    steps: dict[str, Callable[[], object]] = {}
    for recipe in ["bf16", *recipes]:
        layer: nn.Module = nn.Linear(FEATURES, FEATURES, bias=False, device=device, dtype=torch.bfloat16)
        if recipe in te_peer.RECIPES:
            layer = te_peer.Layer(layer, recipe)
        elif recipe != "bf16":
            ht.quantize_(layer, recipe)

        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        quantized = recipe != "bf16" and recipe not in te_peer.RECIPES

        def step(
            layer: nn.Module = layer, optimizer: torch.optim.Optimizer = optimizer, quantized: bool = quantized
        ) -> None:
            layer(x).backward(grad)
            optimizer.step()
            optimizer.zero_grad()
            x.grad = None
            if quantized:
                ht.step_(layer)

        steps[recipe] = step
    return medians_us(steps, drain, count)


def main() -> None:
    """Print a table: microseconds beyond BF16."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--other", type=Path, help="folder with another version of the package")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.device, options.count, options.recipes)))
        return
    here = Path(__file__).parent.parent
    folders = {"this": here} | ({} if options.other is None else {"other": options.other})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for _ in range(options.rounds):
        for name, folder in folders.items():
            command = [sys.executable, __file__, "--child", "--device", options.device]
            command += ["--count", str(options.count), "--recipes", *options.recipes]
            environment = {"PYTHONPATH": f"{folder.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
            done = subprocess.run(
                command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
            )
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, measured in runs.items():
        plain = statistics.median(run["bf16"] for run in measured)
        row = {"bf16": round(plain)}
        for recipe in options.recipes:
            row[recipe] = round(statistics.median(run[recipe] - run["bf16"] for run in measured))
        print(name, json.dumps(row))


if __name__ == "__main__":
    main()

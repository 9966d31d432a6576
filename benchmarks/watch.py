"""What watching costs: steps of Llama-3-8B-shaped blocks that are measured, over those that nobody watches.

In the steps between nothing runs that would not run without: their times differ by what measurements scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from common import arguments, report, time_alternating
from llama import Llama, Size

import hybridtensor as ht

BATCH = {"cuda": (2, 4096), "cpu": (1, 64)}
SIZES = {"cuda": Size(), "cpu": Size(1, 128, 384, 4, 2, 512)}
RECIPES = ["fp8", "fp8_rowwise", "mxfp8", "nvfp4"]
EVERY = 100


class Run:
    """A training run whose steps are measured or not, as asked."""

    def __init__(self, recipe: str, mode: str, device: str) -> None:
        torch.manual_seed(0)
        kind = torch.device(device).type
        with torch.device(device):
            self.model = Llama(SIZES[kind]).bfloat16()
        ht.quantize_(self.model.blocks, recipe)
        if mode == "compiled":
            for block in self.model.blocks:
                block.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.tokens = torch.randint(self.model.size.vocab, BATCH[kind], device=device)

    def step(self) -> None:
        """Train for one step."""
        self.model(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ht.step_(self.model)


def measure(recipe: str, mode: str, device: str, repeats: int) -> dict[str, Any]:
    """Return one row: milliseconds of a step, and how much longer a run takes that is watched."""
    run = Run(recipe, mode, device)
    plain = time_alternating({"step": run.step}, device, repeats)["step"]
    with ht.watch(run.model.blocks, every=10**9):
        run.step()  # the one that is measured
        between = time_alternating({"step": run.step}, device, repeats)["step"]
    with ht.watch(run.model.blocks, every=1):
        measured = time_alternating({"step": run.step}, device, repeats)["step"]
    again = time_alternating({"step": run.step}, device, repeats)["step"]
    plain = (plain + again) / 2
    row = {"mode": mode, "recipe": recipe, "ms": plain, "between / ms": between / plain}
    return row | {"measured / ms": measured / plain, f"overhead, one of {EVERY}": (measured / plain - 1) / EVERY}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    options.repeats = min(options.repeats, 10)
    modes = [("eager", recipe) for recipe in RECIPES] + [("compiled", "fp8")]
    rows = [measure(recipe, mode, options.device, options.repeats) for mode, recipe in modes]
    report("watch", rows, options)

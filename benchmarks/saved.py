"""Bytes saved for backward by linear layers of an MLP stack, against BF16 in the same run; and the peak of a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import arguments, report
from torch import Tensor, nn

import hybridtensor as ht
from hybridtensor.testing import saved_by

SIZES = {"cuda": (8, 4096, 14336, 8192), "cpu": (2, 128, 448, 512)}  # blocks, width, hidden, tokens
RECIPES = [None, "fp8", "fp8_rowwise", "fp8_rowwise_hp_grad_weight", "fp8_high_precision_backward",
           "fp8_dequantized_backward", "fp8+save_original_input"]  # fmt: skip


class Block(nn.Module):
    """Two linear layers with an activation that saves only its input."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[tokens, width]`` to the same."""
        return self.down(F.relu(self.up(x)))


def measure(recipe: str | None, device: str) -> dict[str, Any]:
    """Return the bytes that one forward pass saves, and the peak of forward and backward."""
    blocks, width, hidden, tokens = SIZES[torch.device(device).type]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, hidden) for _ in range(blocks))).to(device, torch.bfloat16)
    if recipe is not None:
        ht.quantize_(model, recipe)
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight[0, 0].add_(1e-3)  # as an optimizer does
                weight.grad = None
        x.grad = None
        model(x).sum().backward()

    step()
    step()  # what is used once between two writes is known from now on
    with saved_by(m for m in model.modules() if isinstance(m, nn.Linear)) as saved:
        model(x)
    linear = saved.nbytes(without=model.parameters())
    del saved
    step()
    step()
    peak = 0
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
    return {"recipe": recipe or "bf16 (plain)", "saved MB": linear / 1e6, "peak MB": peak / 1e6}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    rows = [measure(recipe, options.device) for recipe in RECIPES]
    for row in rows:
        row["saved, of BF16"] = row["saved MB"] / rows[0]["saved MB"]
    report("saved", rows, options)

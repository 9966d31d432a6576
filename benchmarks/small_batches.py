"""A training step of a Llama of 1.2 B in eager code with few tokens, against BF16, torchao and TransformerEngine.

The host takes the time there; ``floor`` is the least that it can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import te_peer
import torch
from common import arguments, report, time_alternating
from llama import Llama, Size

import hybridtensor as ht

SIZES = {"cuda": Size(16, 2048, 8192, 16, 16, 32768), "cpu": Size(1, 128, 384, 4, 2, 512)}
TOKENS = {"cuda": (2048, 8192), "cpu": (64,)}
RECIPES = ["fp8", "fp8_delayed", "fp8_block", "torchao tensorwise", *te_peer.names()]


def training(recipe: str, tokens: int, device: str) -> Callable[[], None]:
    """Return one training step."""
    torch.manual_seed(0)
    kind = torch.device(device).type
    with torch.device(device):
        model = Llama(SIZES[kind]).bfloat16()
    after: Callable[[], object] = lambda: None  # noqa: E731
    if recipe == "floor":
        import floor

        after = floor.convert(model.blocks)
    elif recipe in te_peer.RECIPES:
        te_peer.convert(model.blocks)
    elif recipe.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model.blocks, config=Float8LinearConfig.from_recipe_name(recipe.split()[1]))
    elif recipe != "bf16":
        ht.quantize_(model.blocks, recipe)
        after = lambda: ht.step_(model)  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device != "cpu")
    ids = torch.randint(model.size.vocab, (1, tokens), device=device)

    def step() -> None:
        if recipe in te_peer.RECIPES:
            with te_peer.autocast(recipe):
                loss = model(ids)
        else:
            loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()

    return step


def measure(tokens: int, device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe and way of autograd; BF16 takes turns with each: a host is not as fast at all times."""
    baseline, rows = training("bf16", tokens, device), []
    for recipe in RECIPES if device == "cpu" else ["floor", *RECIPES]:
        variants = {"bf16": baseline, recipe: training(recipe, tokens, device)}
        for thread in (True, False):  # of autograd, for the device
            with torch.autograd.set_multithreading_enabled(thread):
                times = time_alternating(variants, device, repeats, lead=1, count=2)
            row = {"tokens": tokens, "recipe": recipe, "device thread": thread, "bf16 ms": times["bf16"]}
            rows.append({**row, "ms": times[recipe], "speedup": times["bf16"] / times[recipe]})
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    options.repeats = min(options.repeats, 12)
    sizes = TOKENS[torch.device(options.device).type]
    report("small_batches", [r for tokens in sizes for r in measure(tokens, options.device, options.repeats)], options)

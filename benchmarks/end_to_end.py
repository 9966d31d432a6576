"""A training step of six Llama-3-8B blocks with embedding and head, against BF16 in the same mode; beside torchao, and
TransformerEngine where it is installed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import te_peer
import torch
from common import arguments, report, time_alternating
from llama import Llama, Size
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht

BATCH = {"cuda": (2, 4096), "cpu": (1, 64)}
SIZES = {"cuda": Size(), "cpu": Size(1, 128, 384, 4, 2, 512)}
OURS = ["fp8", "fp8+keep_faces", "fp8_delayed", "fp8_rowwise", "fp8_block"]
FUSED = ["bf16, fused", "fp8, fused", "fp8_delayed, fused"]
RECIPES = {
    "eager": [*OURS, *FUSED, "torchao tensorwise", *te_peer.names()],
    "compiled": [*OURS, *FUSED[:2], "torchao tensorwise", "torchao rowwise"],
}


def convert(model: Llama, recipe: str) -> bool:
    """Convert the blocks; return whether the recipe keeps state that ``step_`` advances."""
    if recipe in te_peer.RECIPES:
        te_peer.convert(model.blocks)
    elif recipe.startswith("torchao"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model.blocks, config=Float8LinearConfig.from_recipe_name(recipe.split()[1]))
    elif recipe != "bf16":
        ht.quantize_(model.blocks, recipe)
    return recipe.startswith("fp8_delayed")


ADAMW = functools.partial(torch.optim.AdamW, fused=True)


def training(
    recipe: str, mode: str, device: str, make_optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
) -> Callable[[], None]:
    """Return one training step.

    Args:
        recipe: See ``convert``; ``, fused`` behind it gives the blocks ``ht.rms_norm`` and ``ht.swiglu``.
        mode: ``eager``, ``compiled`` (by block) or ``checkpointed`` (by block).
        device: Where.
        make_optimizer: Called with parameters and ``lr``.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(SIZES[torch.device(device).type]).bfloat16()
    recipe, _, fused = recipe.partition(", ")
    stateful = convert(model, recipe)
    for block in model.blocks:
        if fused:
            block.fuse()
        if mode == "compiled":
            block.compile()
        elif mode == "checkpointed":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = make_optimizer(model.parameters(), lr=1e-5)
    tokens = torch.randint(model.size.vocab, BATCH[torch.device(device).type], device=device)

    around = functools.partial(te_peer.autocast, recipe) if recipe in te_peer.RECIPES else contextlib.nullcontext

    def step() -> None:
        with around():
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if stateful:
            ht.step_(model)

    return step


def measure(mode: str, device: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe; BF16 takes turns with each, as not all fit into memory together."""
    baseline, rows = training("bf16", mode, device), []
    for recipe in RECIPES[mode]:
        torch._dynamo.reset()  # users compile one recipe in a process
        variants = {"bf16": baseline, recipe: training(recipe, mode, device)}
        times = time_alternating(variants, device, repeats, lead=1, count=2)
        speedup = times["bf16"] / times[recipe]
        rows.append({"mode": mode, "recipe": recipe, "bf16 ms": times["bf16"], "ms": times[recipe], "speedup": speedup})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    options.repeats = min(options.repeats, 12)
    report("end_to_end", [r for mode in RECIPES for r in measure(mode, options.device, options.repeats)], options)

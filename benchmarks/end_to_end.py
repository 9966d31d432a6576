"""A training step of six Llama-3-8B blocks with embedding and head, against BF16 in the same mode; beside torchao, and
TransformerEngine where it is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
PACKED = ["fp8", "fp8_delayed", "fp8_block", *te_peer.names()]
RECIPES = {
    "eager": [*OURS, *FUSED, "torchao tensorwise", *te_peer.names()],
    "fused": [*FUSED[1:], *(f"{recipe}, fused, packed" for recipe in PACKED)],
    "compiled": [*OURS, *FUSED[:2], "torchao tensorwise", "torchao rowwise"],
}
"""By mode; ``fused`` is eager, too, by norms and activations of the library, or of a peer."""


def convert(model: Llama, recipe: str, fused: bool) -> bool:
    """Convert the blocks; return whether the recipe keeps state that ``step_`` advances."""
    if recipe in te_peer.RECIPES:
        (te_peer.fuse if fused else te_peer.convert)(model.blocks)
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
        recipe: See ``convert``; ``, fused`` behind it gives the blocks ``ht.rms_norm`` and ``ht.swiglu``, or those of a
            peer, and ``, packed`` layers that compute q, k and v together, and gate and up.
        mode: One of ``RECIPES``, ``compiled`` being by block, or ``checkpointed`` (by block).
        device: Where.
        make_optimizer: Called with parameters and ``lr``.
    """
    torch.manual_seed(0)
    recipe, *words = recipe.split(", ")
    fused = "fused" in words
    size = dataclasses.replace(SIZES[torch.device(device).type], packed="packed" in words)
    with torch.device(device):
        model = Llama(size).bfloat16()
    stateful = convert(model, recipe, fused)
    for block in model.blocks:
        if fused and recipe not in te_peer.RECIPES:
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
    for name, modes in (("end_to_end", ("eager", "compiled")), ("end_to_end_fused", ("fused",))):
        rows = [row for mode in modes for row in measure(mode, options.device, options.repeats)]
        report(name, rows, options)

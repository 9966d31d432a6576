"""Peak memory of whole training steps, against BF16 and torchao in the same run.

On several GPUs, with FSDP2: ``torchrun --nproc-per-node=2 benchmarks/memory.py``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import end_to_end
import fsdp
import torch
import torch.distributed as dist
from common import arguments, report

GIB = 2**30
STEPS = 3  # what is used once between two writes is known by then
RECIPES = {
    "eager": [*end_to_end.OURS, *end_to_end.FUSED],
    "compiled": end_to_end.RECIPES["compiled"],
    "checkpointed": ["fp8"],
    "eager, AdamW in 8 bits": ["fp8"],
}


def optimizer_of(mode: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes the optimizer of a mode."""
    if "8 bits" not in mode:
        return end_to_end.ADAMW
    from torchao.optim import AdamW8bit

    return AdamW8bit  # type: ignore[no-any-return]


def peak(step: Callable[[], None], device: str) -> dict[str, float]:
    """Return what is allocated before a step in steady state, and the most while it runs, in GiB."""
    for _ in range(STEPS - 1):
        step()
    if not device.startswith("cuda"):
        step()
        return {"before GiB": 0.0, "peak GiB": 0.0}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {"before GiB": before / GIB, "peak GiB": torch.cuda.max_memory_allocated() / GIB}


def measure(mode: str, device: str, *, sharded: bool) -> list[dict[str, Any]]:
    """Return one row per recipe; only one model is there at a time."""
    rows: list[dict[str, Any]] = []
    for recipe in ["bf16", *RECIPES[mode]]:
        torch._dynamo.reset()
        gc.collect()
        if sharded:
            step = fsdp.training(recipe, mode, torch.device(device).type)
        else:
            step = end_to_end.training(recipe, mode, device, optimizer_of(mode))
        rows.append({"mode": mode, "recipe": recipe, **peak(step, device)})
        del step
        rows[-1]["of BF16"] = rows[-1]["peak GiB"] / (rows[0]["peak GiB"] or 1.0)
        if not sharded or dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    sharded, kind = "LOCAL_RANK" in os.environ, torch.device(options.device).type
    if sharded:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    modes = list(RECIPES)[:2] if sharded else RECIPES
    rows = [row for mode in modes for row in measure(mode, options.device, sharded=sharded)]
    if not sharded:
        report("memory", rows, options)
    else:
        if dist.get_rank() == 0:
            report(f"memory_{dist.get_world_size()}_ranks", rows, options)
        dist.destroy_process_group()

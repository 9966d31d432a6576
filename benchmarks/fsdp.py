"""Training steps of a Llama-3-shaped model under FSDP2, against BF16 and torchao in the same run.

Start it with torchrun, one process per GPU: ``torchrun --nproc-per-node=2 benchmarks/fsdp.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from common import arguments, report, time_alternating
from llama import Llama, Size
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.profiler import ProfilerActivity, profile

import hybridtensor as ht

SIZES = {"cuda": (Size(layers=12), (2, 4096)), "cpu": (Size(1, 128, 384, 4, 2, 512), (1, 64))}
RECIPES = ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "torchao tensorwise"]
LEAD, STEPS = 2, 4  # one after the other, as in training: the host need not wait for the device after each
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def convert(model: Llama, recipe: str) -> None:
    """Convert the blocks."""
    if recipe == "torchao tensorwise":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model.blocks, config=config)
    elif recipe != "bf16":
        ht.quantize_(model.blocks, recipe)


def training(recipe: str, mode: str, kind: str) -> Callable[[], None]:
    """Return one training step of this rank."""
    torch.manual_seed(0)
    size, batch = SIZES[kind]
    with torch.device(kind):
        model = Llama(size)
    convert(model, recipe)
    for block in model.blocks:
        if mode == "compiled":
            block.compile()
        fully_shard(block, mp_policy=POLICY)
    fully_shard(model, mp_policy=POLICY)
    ht.distributed.expect_recompute_(model, False)  # of compiled code it cannot be found out
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(size.vocab, batch, device=kind)

    def step() -> None:
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe == "fp8_delayed":
            ht.step_(model)
        if recipe.startswith("torchao"):
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)

    return step


@contextmanager
def counted(gathered: list[int]) -> Iterator[None]:
    """Append the bytes that this rank has after each all-gather of FSDP2."""
    gather = DefaultAllGather.__call__

    def count(self: DefaultAllGather, output_tensor: Tensor, *args: Any, **options: Any) -> Any:
        gathered.append(output_tensor.nbytes)
        return gather(self, output_tensor, *args, **options)

    with patch.object(DefaultAllGather, "__call__", count):
        yield


def gathering(step: Callable[[], None], kind: str) -> dict[str, float]:
    """Return what all-gathers take in one step: MiB, and milliseconds on the device.

    A gather's kernel waits for the slowest rank; its shortest time on any rank is taken, which holds no waiting.
    """
    gathered: list[int] = []
    with counted(gathered):
        step()
    found = {"all-gather MiB": sum(gathered) / 2**20}
    if kind != "cuda":
        return found
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize()
    kernels = [e for e in recorded.events() if e.device_type == DeviceType.CUDA and "AllGather" in e.name]
    kernels.sort(key=lambda e: e.time_range.start)
    times = torch.tensor([e.time_range.elapsed_us() for e in kernels], device=kind)
    dist.all_reduce(times, dist.ReduceOp.MIN)
    return {**found, "all-gather ms": times.sum().item() / 1e3}


def measure(mode: str, kind: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe."""
    tokens = SIZES[kind][1][0] * SIZES[kind][1][1]
    baseline, rows = training("bf16", mode, kind), []
    for recipe in RECIPES:
        torch._dynamo.reset()  # users compile one recipe in a process
        step = training(recipe, mode, kind)
        times = time_alternating({"bf16": baseline, recipe: step}, kind, repeats, lead=LEAD, count=STEPS)
        if not rows:
            rows.append(row(mode, "bf16", times["bf16"], times["bf16"], tokens, gathering(baseline, kind)))
        rows.append(row(mode, recipe, times[recipe], times["bf16"], tokens, gathering(step, kind)))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return rows


def row(mode: str, recipe: str, ms: float, base: float, tokens: int, gather: dict[str, float]) -> dict[str, Any]:
    """Return one line of the table."""
    speed = {"tokens/s per rank": tokens / ms * 1e3, "over BF16": base / ms}
    return {"mode": mode, "recipe": recipe, "ms": ms, **speed, **gather}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    kind = torch.device(options.device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rows = [r for mode in ("eager", "compiled") for r in measure(mode, kind, min(options.repeats, 3))]
    if dist.get_rank() == 0:
        report(f"fsdp_{dist.get_world_size()}_ranks", rows, options)
    dist.destroy_process_group()

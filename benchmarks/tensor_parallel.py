"""Training steps of a Llama-3-shaped model, tensor and sequence parallel, against BF16 and torchao in the same run.

Start it with torchrun, one process per GPU: ``torchrun --nproc-per-node=2 benchmarks/tensor_parallel.py``. In the
environment ``MODES`` are some of eager, compiled and fused, and ``SEQUENCES`` how many of 4,096 tokens are in a batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as styles
from common import arguments, report, time_alternating
from llama import Llama, Size
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import hybridtensor as ht

SIZES = {
    "cuda": (Size(layers=4), (int(os.environ.get("SEQUENCES", "8")), 4096)),
    "cpu": (Size(1, 256, 512, 4, 2, 512), (1, 512)),
}
SEQUENCE = (1, 16384)  # what symmetric memory's operators take: tokens of ranks one after the other
RECIPES = {
    "eager": ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "torchao tensorwise"],
    "compiled": ["fp8", "fp8_rowwise", "torchao tensorwise"],
    "fused": ["fp8", "fp8 fused", "bf16 fused", "torchao tensorwise", "torchao tensorwise fused"],
}
LEAD, STEPS = 2, 4


def style(recipe: str) -> tuple[Any, Any, Any]:
    """Return what prepares inputs, and what cuts layers by columns and by rows."""
    if recipe == "bf16":
        return styles.PrepareModuleInput, styles.ColwiseParallel, styles.RowwiseParallel
    if recipe.startswith("torchao"):
        from torchao.float8 import float8_tensor_parallel as float8

        return float8.PrepareFloat8ModuleInput, float8.Float8ColwiseParallel, float8.Float8RowwiseParallel
    ours = ht.distributed
    return ours.PrepareModuleInput, ours.ColwiseParallel, ours.RowwiseParallel


def plan(block: nn.Module, recipe: str) -> dict[str, Any]:
    """Return the styles of a block: tokens are split outside of attention and MLP."""
    prepare, columns, rows = style(recipe)
    named = {"fwd_config_submodule_fqn": ""} if recipe.startswith("torchao") else {}

    def inputs(first: str, count: int) -> Any:
        options = {name: first for name in named}
        layouts, wanted = ((Shard(1), None), (Replicate(), None)) if count == 2 else ((Shard(1),), (Replicate(),))
        return prepare(input_layouts=layouts, desired_input_layouts=wanted, **options)

    return {
        "norm1": SequenceParallel(use_local_output=True), "norm2": SequenceParallel(use_local_output=True),
        "attention": inputs("q", 2), "mlp": inputs("gate_proj", 1),
        **{f"attention.{name}": columns() for name in "qkv"},
        "attention.out": rows(output_layouts=Shard(1)),
        "mlp.gate_proj": columns(), "mlp.up_proj": columns(), "mlp.down_proj": rows(output_layouts=Shard(1)),
    }  # fmt: skip


def convert(model: Llama, recipe: str) -> None:
    """Convert the blocks."""
    if recipe == "torchao tensorwise":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(model.blocks, config=Float8LinearConfig())
    elif recipe != "bf16":
        ht.quantize_(model.blocks, recipe)


def training(recipe: str, mode: str, kind: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Return one training step of this rank; a compiled one has run once."""
    torch.manual_seed(0)
    (size, batch), fused = SIZES[kind], recipe.endswith(" fused")
    batch = SEQUENCE if mode == "fused" and kind == "cuda" else batch
    recipe = recipe.removesuffix(" fused")
    with torch.device(kind):
        model = Llama(size).to(torch.bfloat16)
    convert(model, recipe)
    for block in model.blocks:
        parallelize_module(block, mesh, plan(block, recipe))
        if mode != "eager":
            block.compile()
    ends = {
        "embedding": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True),
        "norm": SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=kind == "cuda")
    tokens = distribute_tensor(torch.randint(size.vocab, batch, device=kind), mesh, [Replicate()])

    def step() -> None:
        with loss_parallel():
            loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    # torch's pass, which looks for gathers that products read, and products that are scattered
    with torch._inductor.config.patch(_micro_pipeline_tp=fused):
        step()
    return step


def loss_of(model: Llama, tokens: Any) -> Tensor:
    """Return the loss, of logits that are split over the vocabulary."""
    from llama import angles

    whole = tokens.to_local()
    turn = angles(whole.shape[1], model.size.dim // model.size.heads, whole.device)
    x = model.embedding(whole)
    for block in model.blocks:
        x = block(x, turn)
    logits = model.head(model.norm(x))[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank gives to gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func) and "coalesced" not in str(func):
            self.nbytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def gathering(step: Callable[[], None], mode: str, kind: str) -> dict[str, float]:
    """Return what gathers take in one step: MiB that a rank sends, and milliseconds on the device.

    A gather's kernel waits for the slowest rank; its shortest time on any rank is taken, which holds no waiting.
    """
    found = {"gathered MiB": float("nan"), "gathers ms": float("nan"), "reductions ms": float("nan")}
    if mode == "eager":
        with Sent() as sent:
            step()
        found["gathered MiB"] = sent.nbytes / 2**20
    if kind != "cuda":
        return found
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        step()
        torch.cuda.synchronize()
    for name, kernel in (("gathers ms", "AllGather"), ("reductions ms", "ReduceScatter")):
        events = [e for e in recorded.events() if e.device_type == DeviceType.CUDA and kernel in e.name]
        events.sort(key=lambda e: e.time_range.start)
        times = torch.tensor([e.time_range.elapsed_us() for e in events], device=kind)
        dist.all_reduce(times, dist.ReduceOp.MIN)
        found[name] = times.sum().item() / 1e3
    return found


def measure(mode: str, kind: str, repeats: int) -> list[dict[str, Any]]:
    """Return one row per recipe."""
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("tp",))
    if mode == "fused" and kind == "cuda":
        symmetric.enable_symm_mem_for_group(mesh.get_group().group_name)
    tokens = math.prod(SEQUENCE if mode == "fused" and kind == "cuda" else SIZES[kind][1])
    baseline, rows = training("bf16", mode, kind, mesh), []
    for recipe in RECIPES[mode]:
        torch._dynamo.reset()  # users compile one recipe in a process
        if kind == "cpu" and ("torchao" in recipe or "fused" in recipe):
            continue  # gloo gathers no FP8, symmetric memory is of GPUs
        step = training(recipe, mode, kind, mesh)
        times = time_alternating({"bf16": baseline, recipe: step}, kind, repeats, lead=LEAD, count=STEPS)
        if not rows:
            rows.append(row(mode, "bf16", times["bf16"], times["bf16"], tokens, gathering(baseline, mode, kind)))
        rows.append(row(mode, recipe, times[recipe], times["bf16"], tokens, gathering(step, mode, kind)))
        if dist.get_rank() == 0:
            print(rows[-1], flush=True)
    return rows


def row(mode: str, recipe: str, ms: float, base: float, tokens: int, gathers: dict[str, float]) -> dict[str, Any]:
    """Return one line of the table."""
    return {"mode": mode, "recipe": recipe, "ms": ms, "tokens/s": tokens / ms * 1e3, "over BF16": base / ms, **gathers}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0])
    kind = torch.device(options.device).type
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    modes = os.environ.get("MODES", "eager compiled fused").split()
    rows = [r for mode in modes for r in measure(mode, kind, min(options.repeats, 3))]
    if dist.get_rank() == 0:
        report(f"tensor_parallel_{dist.get_world_size()}_ranks", rows, options)
    dist.destroy_process_group()

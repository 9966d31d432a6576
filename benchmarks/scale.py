"""Training on many GPUs: tokens per second and GPU of layouts of ranks, against BF16 and torchao in the same run.

One run per number of GPUs, then a table: efficiency is tokens per second and GPU over those of the smallest run::

    for n in 1 2 4 8; do torchrun --nproc-per-node=$n benchmarks/scale.py; done
    python benchmarks/scale.py --table

Layouts: ``fsdp`` one mesh of all ranks; ``hsdp`` two replicas; ``fsdp tp`` two ranks for each tensor; ``pp fsdp`` two
stages of a pipeline; ``moe fsdp`` and ``moe ep fsdp`` experts, whole or two ranks for them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as styles
import torch.nn.functional as F
from common import RESULTS, report, time_alternating
from fsdp import LEAD, POLICY, STEPS, convert, gathering
from llama import Block, Llama, Size, angles
from tensor_parallel import plan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel, parallelize_module

import hybridtensor as ht

SIZES = {"cuda": (Size(layers=8), (2, 4096)), "cpu": (Size(2, 128, 384, 4, 2, 512), (2, 64))}
"""With AdamW twice on one GPU of 80 GB, beside BF16."""
EXPERTS = {"cuda": (64, 768, 8), "cpu": (4, 64, 2)}
"""How many there are, their hidden features, and to how many each token goes: those of Qwen3-MoE."""
EXPERT_BLOCKS = 2  # each has as many parameters as three others
RECIPES = ["fp8", "fp8_delayed", "fp8_rowwise", "torchao tensorwise"]
MICROBATCHES = 4


class Mixture(nn.Module):
    """A router and gated experts, in place of a block's MLP."""

    def __init__(self, size: Size, experts: tuple[int, int, int]) -> None:
        super().__init__()
        count, hidden, self.chosen = experts
        self.router = nn.Linear(size.dim, count, bias=False)
        self.experts = Experts(count, size.dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, T, D]``."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.chosen, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.router.out_features)
        rows = self.experts(flat[order // self.chosen], counts)
        weighted = rows * weights.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(flat).index_add(0, order // self.chosen, weighted).view_as(x)


class Experts(nn.Module):
    """Gated MLPs of which each row of the input has one."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = count
        self.gate, self.up = (nn.Parameter(torch.randn(count, hidden, dim) / dim**0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(count, dim, hidden) / hidden**0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Return ``[rows, D]`` of rows that are sorted by expert."""
        ends = counts.cumsum(0, dtype=torch.int32)
        gate, up = (torch._grouped_mm(x, w.transpose(-2, -1), offs=ends) for w in (self.gate, self.up))
        return torch._grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)


class MixtureBlock(Block):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, size: Size, experts: tuple[int, int, int]) -> None:
        super().__init__(size)
        self.mlp = Mixture(size, experts)  # type: ignore[assignment]

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return ``[B, T, D]``."""
        x = x + self.attention(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class Layout(NamedTuple):
    """How ranks are used.

    Attributes:
        ranks: The fewest that it needs.
        axes: Names of the mesh's dimensions; the first has half of the ranks or all, another one two.
        build: Returns a training step of this rank.
        recipes: That it is measured with.
    """

    ranks: int
    axes: tuple[str, ...]
    build: Callable[[str, str, DeviceMesh], Callable[[], None]]
    recipes: tuple[str, ...] = tuple(RECIPES)


def wrap(model: Llama, blocks: Iterable[nn.Module], mesh: DeviceMesh, kind: str, recipe: str) -> None:
    """Compile blocks on a GPU, and shard them and the rest of the model over a mesh."""
    for block in blocks:
        if kind == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    if not recipe.startswith(("bf16", "torchao")):
        ht.distributed.expect_recompute_(model, False)  # of compiled code it cannot be found out


def stepping(model: nn.Module, recipe: str, kind: str, backward: Callable[[], object]) -> Callable[[], None]:
    """Return a training step whose forward and backward is ``backward``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=kind == "cuda")

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe.startswith("torchao"):
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        elif recipe != "bf16":
            ht.step_(model)

    return step


def sharded(
    recipe: str, kind: str, mesh: DeviceMesh, experts: tuple[int, int, int] | None = None
) -> Callable[[], None]:
    """Train a model that FSDP2 shards over a mesh, of one dimension or of replicas and shards."""
    size, batch = SIZES[kind]
    with torch.device(kind):
        model = Llama(dataclasses.replace(size, layers=0) if experts else size)
        if experts:
            model.blocks = nn.ModuleList(MixtureBlock(size, experts) for _ in range(EXPERT_BLOCKS))
    convert(model, recipe)
    parallel = "ep" in (mesh.mesh_dim_names or ())
    for block in model.blocks if parallel else ():
        parallelize_module(block.mlp.experts, mesh["ep"], ht.distributed.ExpertParallel())
    if parallel and not recipe.startswith(("bf16", "torchao")):
        ht.set_mesh_(model, mesh)
    wrap(model, model.blocks, mesh["dp"] if parallel else mesh, kind, recipe)
    tokens = torch.randint(size.vocab, batch, device=kind)
    return stepping(model, recipe, kind, lambda: model(tokens).backward())


def of_experts(recipe: str, kind: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Train a model with experts."""
    return sharded(recipe, kind, mesh, EXPERTS[kind])


def tensor_parallel(recipe: str, kind: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Train a model whose layers and tokens two ranks share, sharded over the others."""
    size, batch = SIZES[kind]
    with torch.device(kind):
        model = Llama(size)
    convert(model, recipe)
    cut(model, recipe, mesh)
    wrap(model, model.blocks, mesh["dp"], kind, recipe)
    ids = torch.randint(size.vocab, batch, device=kind)
    return stepping(model, recipe, kind, lambda: backward_of_cut(model, ids, mesh))


def cut(model: Llama, recipe: str, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh["tp"]`` a part of each layer, and have the model return logits; see ``head``."""
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan(block, recipe))
    ends = {
        "embedding": styles.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True),
        "norm": SequenceParallel(),
        "head": styles.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], ends)
    if not recipe.startswith(("bf16", "torchao")):
        ht.set_mesh_(model, mesh)
    model.forward = functools.partial(head, model)  # type: ignore[method-assign]


def backward_of_cut(model: Llama, ids: Tensor, mesh: DeviceMesh) -> Tensor:
    """Run forward and backward of a model that was cut, and return the loss."""
    targets = distribute_tensor(ids[:, 1:].contiguous(), mesh["tp"], [Replicate()])
    with loss_parallel():
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
        loss.backward()
    return loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()


def head(model: Llama, ids: Tensor) -> Tensor:
    """Return the logits of all tokens but the last, split over the vocabulary."""
    turn = angles(ids.shape[1], model.size.dim // model.size.heads, ids.device)
    x = model.embedding(ids)
    for block in model.blocks:
        x = block(x, turn)
    logits: Tensor = model.head(model.norm(x))
    return logits[:, :-1]


class Stage(nn.Module):
    """The first or the second half of a model."""

    def __init__(self, model: Llama, index: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.size, self.blocks = model.size, model.blocks[index * half : (index + 1) * half]
        self.embedding = model.embedding if index == 0 else None
        self.norm, self.head = (model.norm, model.head) if index else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the second stage reads, or the logits."""
        x = x if self.embedding is None else self.embedding(x)
        turn = angles(x.shape[1], self.size.dim // self.size.heads, x.device)
        for block in self.blocks:
            x = block(x, turn)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipelined(recipe: str, kind: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Train a model in two stages, each sharded over half of the ranks."""
    size, (count, length) = SIZES[kind]
    with torch.device(kind):
        model = Llama(size)
    convert(model, recipe)
    index = mesh["pp"].get_local_rank()
    stage: Any = Stage(model, index)
    if not recipe.startswith(("bf16", "torchao")):
        ht.set_mesh_(stage, mesh)
    wrap(stage, stage.blocks, mesh["dp"], kind, recipe)
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    pipeline = PipelineStage(stage, index, 2, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(pipeline, MICROBATCHES, loss_fn=loss_of)
    ids = torch.randint(size.vocab, (2 * count * MICROBATCHES // 2, length), device=kind)  # of both stages' ranks

    def backward() -> None:
        schedule.step(*([ids] if index == 0 else []), **({"target": ids, "losses": []} if index else {}))

    return stepping(stage, recipe, kind, backward)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of predicting each next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


LAYOUTS = {
    "fsdp": Layout(1, ("dp",), sharded),
    "hsdp": Layout(4, ("dp_replicate", "dp_shard"), sharded, tuple(RECIPES[:3])),
    "fsdp tp": Layout(4, ("dp", "tp"), tensor_parallel, tuple(RECIPES[:3])),
    "pp fsdp": Layout(4, ("pp", "dp"), pipelined, tuple(RECIPES[:3])),
    "moe fsdp": Layout(1, ("dp",), of_experts, ("fp8_rowwise", "fp8_block")),
    "moe ep fsdp": Layout(4, ("dp", "ep"), of_experts, ("fp8_rowwise", "fp8_block")),
}
TOKENS = {"fsdp tp": 0.5, "pp fsdp": MICROBATCHES / 2}
"""Tokens of a step and rank, over those of the batch."""


def measure(name: str, kind: str, repeats: int, recipes: list[str]) -> list[dict[str, Any]]:
    """Return one row per recipe of a layout."""
    layout, ranks = LAYOUTS[name], dist.get_world_size()
    sizes = (ranks,) if len(layout.axes) == 1 else (ranks // 2, 2)
    if layout.axes[0] in ("pp", "dp_replicate"):
        sizes = sizes[::-1]
    mesh = init_device_mesh(kind, sizes, mesh_dim_names=layout.axes)
    tokens = SIZES[kind][1][0] * SIZES[kind][1][1] * TOKENS.get(name, 1)
    torch.manual_seed(0)
    baseline, rows = layout.build("bf16", kind, mesh), []
    for recipe in [recipe for recipe in layout.recipes if recipe in recipes]:
        if kind == "cpu" and recipe.startswith("torchao"):
            continue  # gloo gathers no FP8
        torch._dynamo.reset()  # users compile one recipe in a process
        gc.collect()  # the model of the recipe before
        step = layout.build(recipe, kind, mesh)
        times = time_alternating({"bf16": baseline, recipe: step}, kind, repeats, lead=LEAD, count=STEPS)
        for run, of in ((baseline, "bf16"), (step, recipe)):
            if of == "bf16" and rows:
                continue
            speed = {"tokens/s per GPU": tokens / times[of] * 1e3, "over BF16": times["bf16"] / times[of]}
            rows.append(
                {"layout": name, "ranks": ranks, "recipe": of, "ms": times[of], **speed, **gathering(run, kind)}
            )
            rows[-1]["peak GiB"] = peak(run) if kind == "cuda" else float("nan")
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
        del step, run
    return rows


def peak(step: Callable[[], None]) -> float:
    """Return the peak of memory in a step, in GiB, beyond what other models hold all the time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def table(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of all runs, with the efficiency of scaling.

    Raises:
        ValueError: If there are no results.
    """
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("scale_*_ranks_*.json")):
        rows += json.loads(path.read_text())["rows"]
    if not rows:
        raise ValueError(f"--table: no scale_*_ranks_*.json in {folder}; run this with torchrun first")
    rows.sort(key=lambda row: (list(LAYOUTS).index(row["layout"]), row["recipe"], row["ranks"]))
    for row in rows:
        first = next(r for r in rows if (r["layout"], r["recipe"]) == (row["layout"], row["recipe"]))
        row["efficiency"] = row["tokens/s per GPU"] / first["tokens/s per GPU"]
    return rows


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="separated by ','")
    parser.add_argument("--recipes", default=",".join([*RECIPES, "fp8_block"]), help="separated by ','")
    parser.add_argument("--table", action="store_true", help="measure nothing, put the results in --out together")
    return parser.parse_args()


def main() -> None:
    """Measure all layouts that fit the number of ranks."""
    asked = options()
    if asked.table:
        report("scale", table(asked.out), asked)
        return
    if asked.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    ranks, rows = dist.get_world_size(), []
    for name in asked.layouts.split(","):
        if ranks >= LAYOUTS[name].ranks:
            rows += measure(name, asked.device, asked.repeats, asked.recipes.split(","))
    if dist.get_rank() == 0:
        report(f"scale_{ranks}_ranks", rows, asked)
    dist.barrier()  # a rank that leaves closes connections that others still read from
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

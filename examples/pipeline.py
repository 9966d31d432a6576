"""Train a byte-level transformer on real text, its blocks spread over the stages of a pipeline.

    torchrun --nproc-per-node 2 examples/pipeline.py --recipe fp8_delayed
    torchrun --nproc-per-node 2 examples/pipeline.py --schedule ZBVZeroBubble --recipe nvfp4

On a CPU stages talk through gloo, on GPUs through NCCL. The losses are those of one rank that has all stages, whatever
the schedule. Zero bubble (ZBVZeroBubble, InterleavedZeroBubble, DualPipeV) needs torch 2.13.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from data import Bytes, load_text
from model import SIZES, Size, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

import hybridtensor as ht

LOOP, V = ("Interleaved1F1B", "InterleavedZeroBubble"), ("ZBVZeroBubble", "DualPipeV")
SCHEDULES = ("GPipe", "1F1B", *LOOP, *V)


class Stage(nn.Module):
    """Some blocks of a transformer; the first stage embeds bytes, the last one returns logits."""

    def __init__(self, model: Transformer, index: int, count: int) -> None:
        super().__init__()
        size = len(model.blocks) // count
        self.embed = model.embed if index == 0 else None
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.norm, self.lm_head = (model.norm, model.lm_head) if index == count - 1 else (None, None)
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map bytes ``[B, T]``, or what the stage before returned, ``[B, T, D]``, to what the next one reads."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, (self.cos, self.sin))
        return x if self.lm_head is None else self.lm_head(self.norm(x))


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """Return which stages a rank has: one, or two in a loop over the ranks, or there and back."""
    if schedule in LOOP:
        return [rank, rank + ranks]
    return [rank, 2 * ranks - 1 - rank] if schedule in V else [rank]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of a microbatch in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build(arguments: argparse.Namespace, size: Size, device: torch.device) -> dict[int, Stage]:
    """Return the stages of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(arguments.seed)  # every rank makes the same model, and keeps its stages
    model = Transformer(size)
    if arguments.recipe != "bf16":
        ht.quantize_(model, arguments.recipe)  # before it is taken apart: layers know their names
    indices = stages_of(rank, ranks, arguments.schedule)
    return {index: Stage(model, index, ranks * len(indices)).to(device) for index in indices}


def train(arguments: argparse.Namespace, size: Size, device: torch.device) -> list[float]:
    """Train, and return the losses, on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    modules = build(arguments, size, device)
    model = nn.ModuleList(modules.values())
    if arguments.recipe != "bf16":
        ht.set_mesh_(model, init_device_mesh(device.type, (ranks,), mesh_dim_names=("pp",)))
    count = ranks * len(modules)
    stages = [PipelineStage(module, index, count, device) for index, module in modules.items()]
    kind = get_schedule_class(arguments.schedule)
    of_one = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(stages[0] if of_one else stages, arguments.microbatches, loss_fn=loss_of)
    text = Bytes(
        load_text(arguments.data, without=arguments.out), context=size.context, batch=size.batch, seed=arguments.seed
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    losses, last = [], rank_of_last(ranks, arguments.schedule)
    for step in range(arguments.steps):
        tokens, targets = (part.to(device) for part in text.training_batch(step))
        found: list[Tensor] = []
        of_last = {"target": targets, "losses": found} if rank == last else {}
        schedule.step(*([tokens] if 0 in modules else []), **of_last)
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)  # on every rank, of its own stages
        mean = torch.stack(found).mean().detach() if found else torch.zeros((), device=device)
        dist.broadcast(mean, last)
        losses.append(mean.item())
        if rank == 0 and (step + 1) % max(arguments.steps // 10, 1) == 0:
            print(f"step {step + 1}/{arguments.steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


def rank_of_last(ranks: int, schedule: str) -> int:
    """Return the rank that has the last stage."""
    return 0 if schedule in V else ranks - 1


def main() -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="fp8", help="a name or spec of hybridtensor; bf16 trains plain products")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--data", type=Path, help="file or folder of text; default: Python's standard library")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--blocks", type=int, default=4, help="of the model, in equal parts for the stages")
    parser.add_argument("--microbatches", type=int, default=4, help="equal parts of a batch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/pipeline"), help="folder for losses")
    arguments = parser.parse_args()
    ranks, size = int(os.environ.get("WORLD_SIZE", "1")), SIZES[arguments.size]
    count = ranks * len(stages_of(0, ranks, arguments.schedule))
    if arguments.blocks % count or size.batch % arguments.microbatches:
        parser.error(
            "blocks that the stages divide, and a batch that the microbatches divide, are required, got "
            f"{arguments.blocks} blocks for {count} stages, a batch of {size.batch} for {arguments.microbatches}"
        )
    if arguments.schedule == "DualPipeV" and arguments.microbatches < count:
        parser.error(f"as many microbatches as stages are required, got {arguments.microbatches} for {count} stages")
    size = Size(size.dim, arguments.blocks, size.heads, size.context, size.batch, size.learning_rate)
    device = torch.device(arguments.device)
    torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    started = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **started)
    losses = train(arguments, size, device)
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "losses.txt").write_text("\n".join(f"{loss:.6f}" for loss in losses) + "\n")
        print(f"wrote {arguments.out / 'losses.txt'}")
    dist.barrier()  # a rank that leaves closes connections that others still read from
    dist.destroy_process_group()  # not after an error: it would wait for what other ranks still send
    return 0


if __name__ == "__main__":
    sys.exit(main())

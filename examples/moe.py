"""Train a byte-level mixture of experts on real text, on one rank or many; save, and go on from there.

    python examples/moe.py --recipe mxfp8
    torchrun --nproc-per-node 4 examples/moe.py --ep 2 --recipe mxfp8+rowwise_dequantized
    torchrun --nproc-per-node 2 examples/moe.py --ep 2 --resume

Every rank has a part of each batch. Experts are spread over ``--ep`` ranks; what remains of them, and all other
weights, FSDP2 shards over the rest. The losses are those of one rank, but for the order in which sums are added.
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
from model import SIZES, Transformer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import ExpertParallel, checkpoint

RECIPES = "a name or spec of hybridtensor; bf16 trains plain products"


class Experts(nn.Module):
    """A SwiGLU for each expert, of tokens sorted by expert: ``[T, D]`` to the same."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = count
        self.w1, self.w3 = (nn.Parameter(torch.randn(count, hidden, dim) * 0.02) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(count, dim, hidden) * 0.01)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """Multiply each token by the weights of its expert, whose tokens end at ``ends``, int32 ``[E]``."""
        gate = torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)
        up = torch._grouped_mm(x, self.w3.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(F.silu(gate) * up, self.w2.transpose(-2, -1), offs=ends)


class Mixture(nn.Module):
    """A router and experts: each token goes to two of them."""

    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, count, bias=False), Experts(count, dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, T, D]`` to the same."""
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).float().softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.experts.num_experts)
        y = self.experts(flat[order // 2], counts.cumsum(0, dtype=torch.int32))
        y = y * weights.flatten()[order, None].to(y.dtype)
        return torch.zeros_like(flat).index_add(0, order // 2, y).view_as(x)


def build(arguments: argparse.Namespace, mesh: DeviceMesh | None) -> nn.Module:
    """Return the model of this rank."""
    size = SIZES[arguments.size]
    torch.manual_seed(arguments.seed)
    model = Transformer(size)
    for block in model.blocks:
        block.mlp = Mixture(arguments.experts, size.dim, size.hidden)
    model = model.to(arguments.device)
    recipe = ht.recipes.by_type(linear=arguments.recipe, grouped_linear=arguments.experts_recipe or arguments.recipe)
    if {arguments.recipe, arguments.experts_recipe} - {None, "bf16"}:
        ht.quantize_(model, recipe)
    if mesh is None:
        return model
    world = mesh.size()
    for block in model.blocks:
        experts = block.mlp.experts
        parallelize_module(experts, mesh["ep"], ExpertParallel(ends=True))
        fully_shard(experts, mesh=mesh["dp"])
        fully_shard(block, mesh=mesh["dp", "ep"]._flatten("all") if world > 1 else mesh["dp"])
    fully_shard(model, mesh=mesh["all"] if world > 1 else mesh["dp"])
    return ht.set_mesh_(model, mesh)


def average_experts_(model: nn.Module, ranks: int) -> None:
    """Average gradients of experts over the ranks that they are spread over, whose tokens they saw together."""
    for block in model.blocks if ranks > 1 else ():
        for parameter in block.mlp.experts.parameters():
            parameter.grad /= ranks


def train(arguments: argparse.Namespace, mesh: DeviceMesh | None) -> list[float]:
    """Train, and return the losses over all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if mesh is not None else (0, 1)
    size = SIZES[arguments.size]
    text = Bytes(
        load_text(arguments.data, without=arguments.out), context=size.context, batch=size.batch, seed=arguments.seed
    )
    model = build(arguments, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.1)
    state, folder = {"model": model, "optimizer": optimizer}, arguments.out / "checkpoints"
    first = checkpoint.load(folder, state) if arguments.resume else 0
    losses = []
    for step in range(first, arguments.steps):
        batch = (part.chunk(ranks)[rank].to(arguments.device) for part in text.training_batch(step))
        loss = model(*batch)
        loss.backward()
        average_experts_(model, arguments.ep)
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        mean = loss.detach()
        if mesh is not None:
            dist.all_reduce(mean)
            mean /= ranks
        losses.append(mean.item())
        if rank == 0 and (step + 1) % max(arguments.steps // 10, 1) == 0:
            print(f"step {step + 1}/{arguments.steps}  loss {losses[-1]:.4f}", flush=True)
        if step + 1 == arguments.steps // 2 and not arguments.resume:
            checkpoint.save(folder, step + 1, state, overwrite=True)
    return losses


def main() -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipe", default="mxfp8+rowwise_dequantized", help=RECIPES)
    parser.add_argument("--experts-recipe", help="another one for experts")
    parser.add_argument("--data", type=Path, help="file or folder of text; default: Python's standard library")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ep", type=int, default=1, help="ranks that experts are spread over, under torchrun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/moe"), help="folder for checkpoints and losses")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    arguments = parser.parse_args()
    mesh, ranks = None, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % arguments.ep or SIZES[arguments.size].batch % ranks:
        parser.error(f"ranks that --ep and the batch divide are required, got {ranks} for --ep {arguments.ep}")
    if ranks > 1:
        if arguments.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(arguments.device, (ranks // arguments.ep, arguments.ep), mesh_dim_names=("dp", "ep"))
    torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
    losses = train(arguments, mesh)
    if mesh is None or dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = "resumed.txt" if arguments.resume else "losses.txt"
        (arguments.out / name).write_text("\n".join(f"{loss:.6f}" for loss in losses) + "\n")
        print(f"wrote {arguments.out / name}")
    if mesh is not None:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

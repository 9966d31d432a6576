"""What runs in each process of the NCCL tests: FSDP2 against an unsharded twin, on the same batch."""

import datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import hybridtensor as ht
from hybridtensor.dtensor import local

WIDTH, HIDDEN, TOKENS, STEPS = 256, 512, 256, 3


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def make(recipe):
    """Return a converted model in bf16 on this rank's GPU, the same on all."""
    torch.manual_seed(0)
    return ht.quantize_(nn.Sequential(Block(), Block()).to("cuda", torch.bfloat16), recipe)


def serve(rank, size, store, recipes, compiled):
    """Train every recipe sharded and whole, and compare; errors go to the parent process."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, size), rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=120), device_id=torch.device("cuda", rank),
    )  # fmt: skip
    mesh = init_device_mesh("cuda", (size,))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    try:
        for recipe in recipes:
            model, twin = make(recipe), make(recipe)
            for m in (model, twin):
                ht.set_data_parallel_group_(m, alone)  # every rank sees the whole batch, and draws for it alone
            if compiled:
                for block in model:
                    block.compile()
            for block in model:
                fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy())
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
            train(recipe, model, twin, exactly=not compiled)
    finally:
        dist.destroy_process_group()


def train(recipe, model, twin, *, exactly):
    """Take steps with both; the gradients of the shards are replaced by the twin's, which NCCL has rounded."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(STEPS):
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to("cuda", torch.bfloat16)
        losses = []
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss = m(x).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        if exactly and not losses[0].equal(losses[1]):
            raise AssertionError(f"{recipe}, step {step}: loss {losses[0].item()!r}, unsharded {losses[1].item()!r}")
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-2, atol=0, msg=lambda m: f"{recipe}: {m}")
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            expected = distribute_tensor(q.grad, p.grad.device_mesh, p.grad.placements)
            if exactly:
                torch.testing.assert_close(
                    local(p.grad), local(expected), rtol=2**-7, atol=1e-6, msg=lambda m, n=name: f"{recipe}, {n}: {m}"
                )
            local(p.grad).copy_(local(expected))
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.step()
            ht.step_(m)

"""Equal blocks share one compiled graph at Dynamo's default limits, also where their weights are on several ranks."""

import pytest
import tiers
import torch
import torch.nn.functional as F
from processes import here
from sharding import mesh_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.testing import random_tensor

NUM_BLOCKS = 12


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(64), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def run(model, seed):
    x = random_tensor(32, 64, seed=seed, device=here()).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    made = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    ht.step_(model)
    return made


def one_graph(rank, recipes, kind):
    for recipe in recipes:
        torch._dynamo.reset()
        mesh, models = mesh_of(rank, 2), []
        counter = CompileCounterWithBackend("aot_eager")
        for compiled in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))).to(here(), torch.bfloat16)
            if kind == "tp":
                plan = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
                for block in model:
                    parallelize_module(block, mesh, plan)
            ht.quantize_(model, recipe)
            for block in model:
                if compiled:
                    block.compile(fullgraph=True, backend=counter)
                if kind == "fsdp":
                    fully_shard(block, mesh=mesh)
            if kind == "fsdp":
                ht.distributed.expect_recompute_(fully_shard(model, mesh=mesh), False)
            models.append(model)
        for seed in range(2):
            for ours, expected in zip(run(models[0], seed), run(models[1], seed), strict=True):
                assert torch.equal(ours, expected), recipe
            for model in models:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.99)
        assert counter.frame_count == 1, f"{recipe}: {counter.frame_count}"


RECIPES = ["fp8_delayed", "fp8", "mxfp8", "fp8_rowwise", "fp8_block", "bf16"]


@pytest.mark.parametrize(("kind", "some"), [("fsdp", ["fp8_delayed", "fp8"]), ("tp", ["fp8_delayed", "mxfp8"])])
def test_equal_blocks_share_one_graph(two, kind, some):
    """With and without a state."""
    two.run(one_graph, RECIPES if tiers.LONG else some, kind)

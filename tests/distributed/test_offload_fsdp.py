"""Offloading under FSDP2, whose gathered weights have memory that comes and goes: no bit changes."""

import pytest
import torch
from processes import here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht
from hybridtensor.dtensor import local
from hybridtensor.offload import offload_activations

WIDTH, BLOCKS = 64, 3


class Block(nn.Module):
    """A residual MLP whose norm saves its gathered weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


def gradients(recipe, offloads, compiles):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).bfloat16()
    if recipe is not None:
        ht.quantize_(model, recipe)
    for block in model if compiles else ():
        block.compile(backend="aot_eager")
    mesh = init_device_mesh(here(), (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    x = torch.randn(128, WIDTH).bfloat16().requires_grad_()
    for _ in range(2):
        if offloads:
            with offload_activations(model, keep_last=0, min_bytes=0) as traffic:
                y = model(x)
            assert traffic.to_host > 0
        else:
            y = model(x)
        y.float().square().sum().backward()
    return [x.grad, *(local(p.grad) for p in model.parameters())]


def compare(rank, recipes, compiles):
    for recipe in recipes:
        pairs = zip(*(gradients(recipe, offloads, compiles) for offloads in (True, False)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), recipe


@pytest.mark.parametrize("compiles", [False, True])
def test_no_bit_changes_under_fsdp(compiles, two):
    two.run(compare, [None, "fp8", "mxfp8"], compiles)

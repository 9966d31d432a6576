"""Equal blocks share one compiled graph at Dynamo's default limits, whatever the recipe."""

import pytest
import tiers
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import hybridtensor as ht
from hybridtensor.testing import random_tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")
NUM_BLOCKS = 32 if tiers.LONG else 9  # more than the graphs that Dynamo makes of one function by default
FIRST = ["bf16", "fp8", "fp8_delayed", "mxfp8", "nvfp4"]


class Attention(nn.Module):
    """Siblings that share an input."""

    def __init__(self, width):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        return self.o(torch.sigmoid(self.q(x)) * self.k(x) + self.v(x))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block as models have them: modules with siblings in it, and siblings of its own."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.RMSNorm(width), Attention(width), MLP(width)
        self.side, self.skip = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y) + self.side(y) * torch.sigmoid(self.skip(y))
        return x + self.mlp(self.norm(x))


def blocks_of(recipe, count=NUM_BLOCKS, **options):
    torch.manual_seed(0)
    width = 128 if recipe == "quartet2" else 32  # whose rotations are of 128 elements
    blocks = nn.ModuleList(Block(width) for _ in range(count)).bfloat16()
    return ht.quantize_(blocks, recipe, **options)


def run(blocks, seed=0):
    width = blocks[0].side.in_features
    x = random_tensor(width, width, seed=seed).requires_grad_()
    y = x
    for block in blocks:
        y = block(y)
    y.square().mean().backward()
    made = [x.grad, *[p.grad for p in blocks.parameters()]]
    blocks.zero_grad()
    ht.step_(blocks)
    return made


@pytest.mark.parametrize("recipe", tiers.few(dict.fromkeys([*FIRST, *ht.recipes.RECIPES]), len(FIRST)))
def test_equal_blocks_share_one_graph(recipe):
    """Forward and backward, bitwise the eager blocks, over steps that write the weights."""
    compiled, eager = blocks_of(recipe), blocks_of(recipe)
    counter = CompileCounterWithBackend("aot_eager")
    for block in compiled:
        block.compile(fullgraph=True, backend=counter)
    counters.clear()
    for step in range(2):
        for ours, expected in zip(run(compiled, step), run(eager, step), strict=True):
            assert torch.equal(ours, expected)
        with torch.no_grad():
            for parameter in [*compiled.parameters(), *eager.parameters()]:
                parameter.mul_(0.99)
    assert counter.frame_count == 1
    assert torch._dynamo.config.recompile_limit < NUM_BLOCKS
    assert counters["aot_autograd"]["total"] == 1

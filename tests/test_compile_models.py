"""torch.compile on blocks of real models, with every recipe: one graph, no break, none per step, the eager results."""

import copy
import itertools

import llama
import model as demo
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hybridtensor as ht
from hybridtensor.testing import random_tensor

SIZE = demo.Size(dim=64, layers=1, heads=2, context=144, batch=2)


class DemoBlock(nn.Module):
    """A block of the demo's model with its rotary tables."""

    def __init__(self):
        super().__init__()
        self.block = demo.Block(SIZE)
        for name, table in zip(("cos", "sin"), demo.rotary_tables(SIZE.context, SIZE.dim // SIZE.heads), strict=True):
            self.register_buffer(name, table)

    def forward(self, x):
        return self.block(x, (self.cos[: x.shape[1]], self.sin[: x.shape[1]]))


BLOCKS = {"demo": DemoBlock, "llama": llama.Block}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Trainer:
    """A block and its optimizer."""

    def __init__(self, net, backend=None, **options):
        self.net = net
        self.counter = CompileCounterWithBackend(backend or "eager")
        self.forward = torch.compile(net, fullgraph=True, backend=self.counter, **options) if backend else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-10)

    def step(self, length, seed):
        """Train one step; return everything that it computed."""
        device = next(self.net.parameters()).device
        x, g = (random_tensor(2, length, SIZE.dim, device=device, seed=s) for s in (seed, seed + 100))
        x.requires_grad_()
        self.optimizer.zero_grad()
        y = self.forward(x)
        y.backward(g * 2.0**-10)
        result = [y.detach(), x.grad, *[p.grad.clone() for p in self.net.parameters()]]
        self.optimizer.step()
        ht.step_(self.net)
        return result + [b.clone() for b in self.net.buffers()]


def pair(block, recipe, device, backend="aot_eager", **options):
    """Return trainers of two equal blocks, the second compiled."""
    torch.manual_seed(0)
    net = ht.quantize_(BLOCKS[block]().to(device, torch.bfloat16), recipe)
    return Trainer(net), Trainer(copy.deepcopy(net), backend, **options)


def assert_equal_steps(eager, compiled, length, seed):
    for got, expected in zip(compiled.step(length, seed), eager.step(length, seed), strict=True):
        assert torch.equal(got, expected)
        assert expected.isfinite().all()


@pytest.mark.parametrize("recipe", ht.recipes.RECIPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_one_graph_per_recipe_and_none_per_step(block, recipe, device):
    """The second length makes the one graph for all lengths; weights and states change from step to step."""
    eager, compiled = pair(block, recipe, device)
    for seed, (length, graphs) in enumerate([(80, 1), (80, 1), (96, 2), (144, 2)]):
        assert_equal_steps(eager, compiled, length, seed)
        assert compiled.counter.frame_count == graphs

"""Compiled experts: a loop over them between graphs, and offsets that are counted in a graph."""

import pytest
import torch
import torch.nn.functional as F
from experts import Mixture
from torch import nn

import hybridtensor as ht


class Loop(nn.Module):
    """Runs the experts that got tokens one by one, as Transformers does with ``experts_implementation="eager"``."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.up = nn.Parameter(torch.randn(4, 128, 64) / 8)
        self.down = nn.Parameter(torch.randn(4, 64, 128) / 11)

    def forward(self, x):
        chosen = x[:, 0].abs().mul(10).long() % 4
        y = torch.zeros_like(x)
        for e in chosen.unique():
            rows = torch.where(chosen == e)[0]
            y = y.index_add(0, rows, F.linear(F.silu(F.linear(x[rows], self.up[e])), self.down[e]))
        return y


def steps(net, tokens):
    """Return outputs and gradients of a step for each number of tokens."""
    found = []
    for i, count in enumerate(tokens):
        x = torch.randn(count, 64, generator=torch.Generator().manual_seed(i)).bfloat16().requires_grad_()
        y = net(x)
        y.float().square().mean().backward()
        ht.step_(net)
        found += [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]
        net.zero_grad()
    return found


def make(model, recipe):
    torch.manual_seed(0)
    torch._dynamo.reset()
    return ht.quantize_(model().bfloat16(), recipe)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Dynamo, which says that the loop breaks the graph
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "mxfp8"])
def test_a_loop_over_experts_between_graphs(recipe):
    tokens = (24, 24, 17, 40)  # sizes become dynamic
    eager = steps(make(Loop, recipe), tokens)
    net = make(Loop, recipe)
    net.compile(backend="aot_eager")
    assert all(map(torch.equal, eager, steps(net, tokens)))


COUNTED = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)


@COUNTED
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed", "mxfp8"])
def test_offsets_of_a_count_in_one_graph(recipe):
    eager = steps(make(Mixture, recipe), (32, 32))
    net = make(Mixture, recipe)
    net.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, eager, steps(net, (32, 32))))


@COUNTED
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_too_few_offsets_of_a_count_in_one_graph(backend):
    net = make(Mixture, "fp8")
    net.experts.num_experts = 1  # one expert is left out if no token chose it
    with torch.no_grad():
        net.router.weight[3] = -100
        net.router.weight[:3] = torch.randn(3, 64).abs()
    x = torch.rand(32, 64).bfloat16()
    with pytest.raises(ValueError, match=r"grouped_mm: int32 offsets \[4\], one for each expert, are required"):
        net(x)
    net.compile(backend=backend, fullgraph=True)
    with pytest.raises(
        (AssertionError, RuntimeError), match=r"expected size 3==4|u0|shape '\[4\]' is invalid for input of size 3"
    ):
        net(x)

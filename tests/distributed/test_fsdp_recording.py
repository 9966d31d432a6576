"""Which gathers of FSDP2 count for delayed scales: those of a weight whose backward runs, as without sharding.

Ranks see the same tokens, so that the mean of their gradients is that of the unsharded twin, bit for bit.
"""

import copy

import pytest
import tiers
import torch
from processes import generator, here
from sharding import mesh_of
from tiers import covered
from torch import nn
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht

BACKEND = "inductor" if tiers.LONG else "aot_eager"  # when amaxes are recorded no backend decides


class Net(nn.Module):
    """Three layers; a forward may leave out the second one, or run it without a backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, second="runs"):
        x = self.layers[0](x)
        if second == "runs":
            x = self.layers[1](x)
        elif second == "has no backward":
            with torch.no_grad():
                self.layers[1](x)
        return self.layers[2](x)


def tokens(step):
    return torch.randn(32, 64, generator=generator(step)).to(here())


def evaluate(net, factor, mode=None):
    """Other values are in the weights for one forward, as those of an average."""
    change(net, factor)
    with mode or torch.no_grad():
        net(tokens(99))
    change(net, 1 / factor)


def change(net, factor):
    for module in (net, *net.layers):
        if hasattr(module, "reshard"):
            module.reshard()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(factor)


def frozen_first(net, optimizer, step):
    net(tokens(step)).square().mean().backward()
    optimizer.step()


def other_values_before(net, optimizer, step):
    evaluate(net, 4.0)
    net(tokens(step)).square().mean().backward()
    optimizer.step()


def other_values_after_backward(net, optimizer, step):
    net(tokens(step)).square().mean().backward()
    evaluate(net, 4.0)
    optimizer.step()


def other_values_twice(net, optimizer, step):
    other_values_before(net, optimizer, step)
    evaluate(net, 8.0)


def evaluated_after_the_write(net, optimizer, step):
    net(tokens(step)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        net(tokens(99))


def left_out(net, optimizer, step):
    """Each second step uses one layer less, and evaluates with all."""
    net(tokens(step), "is left out" if step % 2 else "runs").square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        net(tokens(99))


def microbatches(net, optimizer, step):
    for part in tokens(step).chunk(2):
        net(part).square().mean().backward()
        with torch.no_grad():
            net(tokens(99))
    optimizer.step()


def on_one_rank(net, optimizer, step):
    """The frozen layer in the middle has a backward on the second rank only."""
    rank = torch.distributed.get_rank()
    net(tokens(step), "runs" if rank else "has no backward").square().mean().backward()
    for layer in (net.layers[0], net.layers[2]):  # whose gradients differ
        for parameter in layer.parameters():
            parameter.grad = None
    optimizer.step()


def in_inference_mode(net, optimizer, step):
    net(tokens(step)).square().mean().backward()
    evaluate(net, 4.0, torch.inference_mode())
    net(tokens(step + 10)).square().mean().backward()
    optimizer.step()


def skipped(net, optimizer, step):
    """A step of other values is skipped, which a backward used."""
    change(net, 4.0)
    net(tokens(step)).square().mean().backward()
    optimizer.zero_grad()
    ht.step_(net, skipped=True)
    change(net, 1 / 4.0)
    net(tokens(step)).square().mean().backward()
    optimizer.step()


FROZEN = {frozen_first: 0, on_one_rank: 1}
PROGRAMS = [
    frozen_first, other_values_before, other_values_after_backward, other_values_twice, evaluated_after_the_write,
    left_out, microbatches, on_one_rank, in_inference_mode, skipped,
]  # fmt: skip
OF_WEIGHTS = ht.HybridConfig(
    input=ht.recipes.fp8().input, weight=ht.recipes.fp8_delayed().weight, grad_output=ht.recipes.fp8().grad_output
)
"""Weights alone have delayed scales."""


def trains_like_its_twin(rank, program, recipe, compiled):
    torch.manual_seed(0)
    net = ht.quantize_(Net().to(here()), recipe)
    if program in FROZEN:
        net.layers[FROZEN[program]].requires_grad_(False)
    twin = copy.deepcopy(net)
    for layer in net.layers:
        if compiled:
            layer.compile(backend=BACKEND)
        fully_shard(layer, mesh=mesh_of(rank, 2))
    fully_shard(net, mesh=mesh_of(rank, 2))
    for step in range(4):
        for m in (net, twin):
            optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.25)
            program(m, optimizer, step)
            optimizer.zero_grad()
            ht.step_(m)
        for (name, ours), other in zip(net.named_buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, other), (step, name, ours, other)


@pytest.mark.parametrize("program", PROGRAMS)
def test_scales_are_those_without_sharding(program, two):
    two.run(trains_like_its_twin, program, "fp8_delayed", False)


@pytest.mark.parametrize("program", [frozen_first, other_values_after_backward, left_out, skipped])
def test_of_weights_alone(program, two):
    two.run(trains_like_its_twin, program, OF_WEIGHTS, False)


@pytest.mark.parametrize(
    ("recipe", "program"), covered(["fp8_delayed", OF_WEIGHTS], [frozen_first, other_values_after_backward])
)
def test_of_compiled_layers(recipe, program, two):
    two.run(trains_like_its_twin, program, recipe, True)

"""Collectives on weights read and write their values, and count as writes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from processes import generator, here
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import hybridtensor as ht


def layer(seed, recipe="fp8", persistent=False, **options):
    torch.manual_seed(seed)
    made = nn.Linear(64, 64, bias=False, **options)
    return ht.quantize_(made, recipe, filter_fn=lambda *_: True, persistent=persistent, name="layer")


def inputs():
    return torch.randn(32, 64, generator=generator(5))


def values(seed):
    return layer(seed).weight.dequantize()


def allgathered(weight, rank):
    gathered = [torch.empty(64, 64) for _ in range(2)]
    dist.all_gather(gathered, weight)
    weight.copy_(sum(gathered))


# what torch 2.13 calls it, and what versions before do
all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
all_gather_of = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)

# what to do with a weight, and the values that all ranks then have
IN_PLACE = {
    "broadcast": (lambda w, rank: dist.broadcast(w, 1), lambda: values(1)),
    "broadcast of data": (lambda w, rank: dist.broadcast(w.data, 1), lambda: values(1)),
    "all_reduce": (lambda w, rank: dist.all_reduce(w), lambda: values(0) + values(1)),
    "scatter": (
        lambda w, rank: dist.scatter(w, [values(2), values(2)] if rank == 0 else None, src=0), lambda: values(2),
    ),
    "all_gather into": (
        lambda w, rank: all_gather_into(w, values(rank)[:32]),
        lambda: torch.cat([values(0)[:32], values(1)[:32]]),
    ),
    "all_gather of": (lambda w, rank: allgathered(w, rank), lambda: values(0) + values(1)),
    "functional all_reduce": (
        lambda w, rank: w.copy_(functional.all_reduce(w, "sum", dist.group.WORLD)), lambda: values(0) + values(1),
    ),
    "functional broadcast": (
        lambda w, rank: w.copy_(functional.broadcast(w, 1, dist.group.WORLD)), lambda: values(1),
    ),
    "functional all_reduce_": (
        lambda w, rank: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce_(w, "sum", dist.group.WORLD.group_name)
        ),
        lambda: values(0) + values(1),
    ),
    "functional all_reduce_coalesced_": (
        lambda w, rank: [
            torch.ops._c10d_functional.wait_tensor(part)
            for part in torch.ops._c10d_functional.all_reduce_coalesced_(
                [w[:32], w[32:]], "sum", dist.group.WORLD.group_name
            )
        ],
        lambda: values(0) + values(1),
    ),
}  # fmt: skip


def on_a_master(rank, name):
    act, expected = IN_PLACE[name]
    net = layer(rank)
    net(inputs())  # faces are kept
    with torch.no_grad():
        act(net.weight, rank)
    fresh = layer(7)
    fresh.weight.data.copy_(expected())
    assert torch.equal(net.weight.dequantize(), expected())
    assert torch.equal(net(inputs()), fresh(inputs()))


@pytest.mark.parametrize("name", IN_PLACE)
def test_master_weights(two, name):
    two.run(on_a_master, name)


def on_persistent(rank, recipe):
    """A broadcast gives all ranks the bytes of one; a reduction is of values."""
    net, theirs = layer(rank, recipe, persistent=True), layer(1, recipe, persistent=True)
    with torch.no_grad():
        dist.broadcast(net.weight, 1)
    assert torch.equal(net(inputs()), theirs(inputs()))
    net = layer(rank, recipe, persistent=True)
    with torch.no_grad():
        dist.all_reduce(net.weight)
    theirs.weight.data = values(0) + values(1)
    assert torch.equal(net(inputs()), theirs(inputs()))


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "fp8+high_precision", "fp8+dequantized"])
def test_persistent_weights(two, recipe):
    two.run(on_persistent, recipe)


def zero_redundancy(rank):
    """The optimizer of a part of the parameters steps them and broadcasts; with and without buckets of views."""
    for persistent in (False, True):
        nets = [nn.Sequential(*(layer(seed, "fp8", persistent) for seed in range(3))) for _ in range(2)]
        nets.append(nn.Sequential(*(layer(seed, "fp8", persistent) for seed in range(3))))
        options = {"foreach": False, "lr": 0.1}
        optimizers = [torch.optim.SGD(nets[0].parameters(), **options)]
        kinds = (False,) if persistent else (False, True)
        for net, as_view in zip(nets[1:], kinds, strict=False):
            optimizers.append(
                ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, parameters_as_bucket_view=as_view, **options)
            )
        for _ in range(3):
            outputs = []
            for net, optimizer in zip(nets, optimizers, strict=False):
                optimizer.zero_grad()
                outputs.append(net(inputs()))
                outputs[-1].square().mean().backward()
                optimizer.step()
            assert all(torch.equal(out, outputs[0]) for out in outputs[1:])
    assert here() in ("cpu", "cuda")


def test_zero_redundancy_optimizer(two):
    two.run(zero_redundancy)


def gathered_as_weight(rank):
    """A layer whose weight is what a functional collective returns, as in FSDP by parametrizations."""
    for recipe in ("fp8", "fp8_delayed", "mxfp8"):
        net, same = layer(7, recipe), layer(7, recipe)
        part = values(0)[32 * rank :][:32].requires_grad_()
        whole = all_gather_of(part, 0, dist.group.WORLD)
        assert type(whole) is functional.AsyncCollectiveTensor
        out = torch.func.functional_call(net, {"weight": whole}, (inputs(),))
        same.weight.data.copy_(values(0))
        expected = same(inputs())
        assert torch.equal(out, expected)
        out.square().mean().backward()
        expected.square().mean().backward()
        assert torch.equal(part.grad, 2 * same.weight.grad[32 * rank :][:32])  # a sum over two ranks


def test_a_gathered_tensor_as_the_weight(two):
    two.run(gathered_as_weight)

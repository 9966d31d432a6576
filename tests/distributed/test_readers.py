"""Functions that quantize for the layers that read them, where those are sharded. Oracle: the same returning values."""

import pytest
import torch
from processes import here
from sharding import mesh_of, whole
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.testing import random_tensor
from tests.test_readers import SPECS, pair

NAMES = ["fp8", "fp8_delayed", "fp8+pow2_scale"]


def step(model, x):
    """Train a step, and return the loss and all gradients."""
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(torch.ones_like(y))
    found = [y.detach(), x.grad, *(whole(p.grad) for p in model.parameters())]
    model.zero_grad()
    ht.step_(model)
    return found


def compare(rank, models, handed, steps=2):
    plain, fused = models
    for seed in range(steps):
        x = random_tensor(64, 128, seed=10 * seed + rank, device=here())
        assert all(map(torch.equal, step(fused, x), step(plain, x)))
    assert tuple(fused.handed) == handed


def under_fsdp2(rank, specs):
    for spec in specs:
        models = pair(spec, here())
        for model in models:
            fully_shard(model, mesh=mesh_of(rank, 2))
        compare(rank, models, SPECS[spec])


def test_under_fsdp2(two):
    """The layers of a block are there while its forward runs."""
    two.run(under_fsdp2, NAMES)


def by_layer(rank, specs):
    for spec in specs:
        models = pair(spec, here())
        for model in models:
            for layer in (model.gate_proj, model.up_proj, model.down_proj):
                fully_shard(layer, mesh=mesh_of(rank, 2))
        compare(rank, models, (False, False))


def test_layers_that_are_sharded_one_by_one_get_values(two):
    two.run(by_layer, NAMES[:1])


def tensor_parallel(rank, specs):
    for spec in specs:
        models = pair(spec, here())
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for model in models:
            parallelize_module(model, mesh_of(rank, 2), plan)
        plain, fused = models
        x = random_tensor(64, 128, device=here())
        assert all(map(torch.equal, step(fused, x), step(plain, x)))
        assert fused.handed == [False, False]


@pytest.mark.parametrize("spec", NAMES[:1])
def test_layers_of_several_ranks_get_values(two, spec):
    two.run(tensor_parallel, [spec])

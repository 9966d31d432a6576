"""A model that was made on the meta device, sharded and given memory is the one made directly."""

import copy

import pytest
import torch
from processes import generator, here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht
from hybridtensor.dtensor import local


def make(spec):
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64, bias=False))
    return ht.quantize_(nn.Sequential(*layers), spec)


def shard(model):
    mesh = init_device_mesh(here(), (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model):
    """Train a step; return what it leaves behind."""
    y = model(torch.randn(64, 64, generator=generator(0)))
    y.square().mean().backward()
    ht.step_(model)
    grads = [local(p.grad) for p in model.parameters()]
    states = [module for module in model.modules() if isinstance(module, ht.LayerState)]
    amaxes = [state.amax for state in states if state.amax is not None]
    return [y.detach(), *grads, *amaxes, *(b.clone() for b in model.buffers())]


def trains_as_one_made_directly(rank, spec, copied):
    expected = shard(make(spec))
    with torch.device("meta"):
        model = make(spec)
    model = copy.deepcopy(model) if copied else model
    assert all(p.is_meta for p in model.parameters())
    shard(model).to_empty(device=here())
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            mine.copy_(theirs)
    for found, wanted in zip(step(model), step(expected), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("spec", "copied"), [("fp8_delayed", False), ("nvfp4", True), ("fp8_delayed/nvfp4/nvfp4", False)]
)
def test_a_sharded_model_that_leaves_meta_trains_as_one_made_directly(two, spec, copied):
    two.run(trains_as_one_made_directly, spec, copied)

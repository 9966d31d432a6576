"""FullyShardedDataParallel, FSDP2's predecessor: works on flat parameters, and says where it does not."""

import copy
from types import SimpleNamespace

import pytest
import torch
from experts import Experts, offsets
from processes import here
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel

import hybridtensor as ht

pytestmark = pytest.mark.filterwarnings("ignore")


def model(recipe):
    torch.manual_seed(0)
    return ht.quantize_(nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)), recipe)


def shard(net, rank):
    return FullyShardedDataParallel(net, device_id=torch.device(here(), rank if here() == "cuda" else None))


def train_alike(nets, batch, steps):
    """Train two models, and compare their outputs bitwise."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in nets]
    for step in range(steps):
        inputs = batch(torch.Generator(here()).manual_seed(step))
        outputs = [m(*inputs) for m in nets]
        assert torch.equal(*outputs), step
        for m, out, optimizer in zip(nets, outputs, optimizers, strict=True):
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            ht.step_(m)


def trains_bitwise(rank, recipe):
    """A layer applies its recipe to the views of the flat parameter that stand at its weight."""
    train_alike((model(recipe), shard(model(recipe), rank)), lambda g: (torch.randn(32, 64, generator=g),), steps=3)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "fp8_delayed"])
def test_flat_parameters(two, recipe):
    two.run(trains_bitwise, recipe)


def experts_train(rank, recipe):
    """So do experts."""
    torch.manual_seed(0)
    ends, net = offsets((32, 60, 96, 160), here()), ht.quantize_(Experts(), recipe)
    sharded = shard(copy.deepcopy(net), rank)
    train_alike((net, sharded), lambda g: (torch.randn(160, 64, generator=g), ends), steps=2)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_flat_parameters_of_experts(two, recipe):
    two.run(experts_train, recipe)


def original_parameters(rank):
    with pytest.raises(NotImplementedError, match="pass use_orig_params=False, or use fully_shard"):
        FullyShardedDataParallel(model("fp8"), use_orig_params=True, device_id=torch.get_default_device())


def test_original_parameters_are_refused_when_wrapped(two):
    two.run(original_parameters)


def saves_state_alone(rank, folder):
    from hybridtensor.integrations.transformers import StepCallback

    net = shard(nn.Sequential(model("fp8_delayed"), checkpoint_wrapper(model("nvfp4"))), rank)
    checkpoint = folder / "checkpoint-1"
    checkpoint.mkdir(exist_ok=True)
    if rank == 0:  # Trainer asks every rank, of which one saves
        state = SimpleNamespace(global_step=1, is_world_process_zero=True)
        StepCallback().on_save(SimpleNamespace(output_dir=folder), state, None, model=net)
        saved = load_file(checkpoint / "quantization_state.safetensors")
    torch.distributed.barrier()
    expected = {name: value for name, value in net.state_dict().items() if "quantization_state" in name}
    if rank == 0:
        assert saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value.cpu()) for name, value in expected.items())


def test_the_callback_of_transformers_saves_state_on_one_rank(two, tmp_path):
    """Without gathering parameters, for which it would wait forever."""
    pytest.importorskip("transformers", reason="needs transformers: make test-integrations")
    two.run(saves_state_alone, tmp_path)

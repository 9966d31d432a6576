"""FSDP2 with persistent low-precision weights: the bytes that a rank keeps are what it sends."""

import itertools

import pytest
import tiers
import torch
from checkpointing import HELD
from processes import generator, here
from sharding import (
    RECIPES,
    Block,
    assert_faces_equal,
    batch,
    mesh_of,
    own,
    same_after_changes,
    same_bits,
    shard,
    split_like,
    training,
    whole,
)  # fmt: skip
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hybridtensor as ht
from hybridtensor.dtensor import local


def make(spec, width=64, hidden=128, blocks=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, hidden) for _ in range(blocks)))
    return ht.quantize_(model, spec, persistent=True)


def train(rank, model, twin, steps=2):
    optimizers = [ht.optim.MasterWeights(torch.optim.AdamW, m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in training(rank, model, twin, optimizers, steps=steps):
        pairs = zip(optimizers[0].masters().values(), optimizers[1].masters().values(), strict=True)
        assert all(same_bits(own(mine), split_like(theirs.detach(), mine)) for mine, theirs in pairs)
    for block, other in zip(model, twin, strict=True):
        block.unshard()
        for mine, theirs in ((block.up.weight, other.up.weight), (block.down.weight, other.down.weight)):
            assert_faces_equal(mine.rowwise, theirs.rowwise)
            assert_faces_equal(mine.columnwise, theirs.columnwise)
        block.reshard()


def trains_like_the_twin(rank, recipes, size, options):
    for recipe in recipes:
        model, twin = (make(recipe, blocks=1) for _ in range(2))
        train(rank, shard(model, mesh_of(rank, size), **options), twin, steps=2)


def test_every_recipe_trains_like_the_unsharded_model(two):
    kept = RECIPES if tiers.LONG else HELD
    cut = ("fp8_block", "deepseek_v4_experts")  # whose blocks of 128 rows two ranks share: refused
    two.run(
        trains_like_the_twin,
        [*(recipe for recipe in kept if recipe not in cut), "fp8+bf16_weight_values"],
        2,
        {},
    )


def test_one_rank(two):
    two.run(trains_like_the_twin, ["fp8_block", "nvfp4_1d_weight", "fp8_dequantized_backward"], 1, {})


def test_weights_that_stay_gathered(two):
    two.run(trains_like_the_twin, ["fp8", "fp8_rowwise"], 2, {"reshard_after_forward": False})


def writes_reach_both_faces(rank, apart):
    model = shard(make("nvfp4_dequantized_backward"), mesh_of(rank, 2))
    parts = [local(p) for p in model.parameters()]
    parts = [part for part in parts if isinstance(part, ht.HybridTensor)]
    for part in parts if apart else ():
        part.columnwise = ht.IdentityTensor(part.columnwise.source.clone())
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
    before = [part.rowwise.dequantize() for part in parts]
    model(batch(0)).square().mean().backward()
    optimizer.step()
    for part, old in zip(parts, before, strict=True):
        assert not torch.equal(part.rowwise.dequantize(), old)
        assert torch.equal(part.rowwise.dequantize(), part.columnwise.dequantize())
        assert apart == (part.rowwise.qdata.data_ptr() != part.columnwise.source.qdata.data_ptr())


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "two"])
def test_a_write_reaches_both_faces(two, apart):
    two.run(writes_reach_both_faces, apart)


def features(rank):
    """Replicas, recomputation, compiling, and a change of the recipe."""
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    train(rank, shard(make("fp8_rowwise"), mesh), make("fp8_rowwise"))
    for wrap in (checkpoint_wrapper, lambda block: torch.compile(block, backend="aot_eager")):
        model, twin = (make("fp8_rowwise", blocks=1) for _ in range(2))
        model[0] = fully_shard(wrap(model[0]), mesh=mesh_of(rank, 4))
        train(rank, fully_shard(model, mesh=mesh_of(rank, 4)), twin, steps=2)
    model, twin = shard(make("fp8"), mesh_of(rank, 4)), make("fp8")
    same_after_changes(model, twin, ("fp8_rowwise", "fp8_dequantized_backward", "nvfp4", "bf16"))
    with pytest.raises(ValueError, match="shards of 32 rows cut blocks of 128"):
        ht.set_config_(model, "fp8_block")
    with torch.no_grad():
        assert same_bits(model(batch(0)), twin(batch(0)))


def test_features(four):
    four.run(features)


def loads_values(rank):
    """Values of a plain checkpoint are quantized with the scales of the whole."""
    model, twin = shard(make("fp8"), mesh_of(rank, 2)), make("fp8")
    source = nn.Sequential(*(Block(64, 128) for _ in range(2)))
    twin.load_state_dict(source.state_dict())
    mesh, values = mesh_of(rank, 2), source.state_dict()
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in values.items()}
    model.load_state_dict(state)
    with torch.no_grad():
        assert same_bits(model(batch(0)), twin(batch(0)))


def writes_through_aliases(rank):
    values = torch.randn(64, 64, generator=generator(5)) * torch.arange(1.0, 65.0)[:, None]
    mesh = mesh_of(rank, 2)
    for recipe in ("fp8", "fp8_rowwise", "nvfp4"):
        twin = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe, persistent=True)[0].weight.detach()
        twin.copy_(values)
        ways = ("data", "detach", "state_dict", "to_local", "slice")
        for way, stepped in itertools.product(ways, (False, True)):
            model = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), recipe, persistent=True)
            weight = fully_shard(model, mesh=mesh)[0].weight
            aliases = {"data": weight.data, "detach": weight.detach(), "state_dict": model.state_dict()["0.weight"]}
            aliases |= {"to_local": weight.detach().to_local(), "slice": weight.detach().to_local()[:]}
            optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0) if stepped else None
            mine = distribute_tensor(values, mesh, [Shard(0)])
            aliases[way].copy_(mine if isinstance(aliases[way], DTensor) else mine.to_local())
            if optimizer is not None:  # its master is what was written
                assert same_bits(whole(optimizer.masters()[weight]), values)
                weight.grad = torch.zeros_like(weight)
                optimizer.step()
            model.unshard()
            assert_faces_equal(model[0].weight.rowwise, twin.rowwise)
            assert_faces_equal(model[0].weight.columnwise, twin.columnwise)
            model.reshard()
        with pytest.raises(NotImplementedError, match=r"a view of .*a persistent weight \(64, 64\) is written, whose"):
            weight.detach().to_local().t().copy_(mine.to_local().t())


def test_writes_through_aliases(two):
    """Their scales are those of the whole, too, and an optimizer goes on from them."""
    two.run(writes_through_aliases)


def two_optimizers(rank):
    layer = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), "fp8", persistent=True)
    model = fully_shard(layer, mesh=mesh_of(rank, 2))
    optimizers = [ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0) for _ in range(2)]
    values = whole(optimizers[0].masters()[model[0].weight]).clone()
    for optimizer in optimizers:
        model[0].weight.grad = torch.ones_like(model[0].weight)
        optimizer.step()
    assert same_bits(whole(optimizers[1].masters()[model[0].weight]), values - 1 - 1)


def test_two_optimizers_of_one_weight(two):
    two.run(two_optimizers)


def test_load_state_dict(two):
    two.run(loads_values)


def refused(rank):
    """At the wrap, on every rank."""
    for recipe, sizes, options in (
        ("fp8", {"hidden": 50}, {}),
        ("fp8", {"hidden": 2}, {}),
        ("fp8_block", {}, {}),
        ("mxfp8", {"hidden": 96}, {}),
        ("fp8", {}, {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}),
    ):
        with pytest.raises(
            ValueError, match=r"fully_shard: a persistent weight .* is cut|fewer rows than there are ranks"
        ):
            shard(make(recipe, **sizes), mesh_of(rank, 4), **options)


def test_weights_that_cannot_be_sharded_are_refused_at_the_wrap(four):
    four.run(refused)


def loaded_after_the_wrap(rank):
    """Nothing would reduce amaxes over the shards, and each rank read all faces by scales of its own."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
    fully_shard(model, mesh=mesh_of(rank, 2))
    model[0].weight = nn.Parameter(torch.zeros_like(model[0].weight, device=here()))
    with pytest.raises(TypeError, match="layer 0: FSDP2 shards its weight already; call quantize_ before"):
        ht.quantize_(model, "fp8", persistent=True)


def test_weights_that_are_loaded_into_shards_do_not_become_persistent(two):
    two.run(loaded_after_the_wrap)


def full_tensors(rank, spec, stepped):
    model, twin = shard(make(spec), mesh_of(rank, 2)), make(spec)
    if stepped:
        train(rank, model, twin, steps=1)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        found = mine.full_tensor()
        assert type(found) in (torch.Tensor, torch.nn.Parameter)
        if isinstance(theirs, ht.HybridTensor):
            # the original; after the optimizer that had better values, what the faces hold
            theirs = theirs.dequantize() if stepped else theirs.data * 1
        assert torch.equal(found, theirs)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("spec", ["mxfp8", "fp8"])
def test_full_tensor_gives_the_values(two, spec, stepped):
    two.run(full_tensors, spec, stepped)

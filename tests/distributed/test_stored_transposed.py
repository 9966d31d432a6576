"""Linear layers that store their weight ``[in, out]`` on two ranks: as values through FSDP2, whole under the rest."""

import pytest
import torch
from processes import here
from sharding import RECIPES, mesh_of, train
from tiers import in_turn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import hybridtensor as ht


class Stored(nn.Module):
    is_transposed = True

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 8), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def model_of(recipe, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(Stored(64, 128), nn.SiLU(), Stored(128, 64)).to(here(), dtype)
    return ht.quantize_(model, recipe, **options)


def like_unsharded(rank, recipe, dim):
    model, twin = model_of(recipe), model_of(recipe)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh_of(rank, 2), shard_placement_fn=lambda _: Shard(dim) if _.dim() == 2 else None)
    train(rank, fully_shard(model, mesh=mesh_of(rank, 2)), twin)
    row = ht.explain(model, show=False).gathers[0]
    assert row.forward == row.backward == "values, float32"
    assert ("stored [in, out]: a shard has a part of every output" in row.reason) == (dim == 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "dim"), in_turn(RECIPES, [0, 1, 0]))
def test_shards_train_as_the_whole(two, recipe, dim):
    two.run(like_unsharded, recipe, dim)


def refuse_persistent(rank):
    model = model_of("mxfp8", persistent=True)
    with pytest.raises(ValueError, match=r"\) of layer .* is cut inside a row or block: it is stored \[in, out\]"):
        fully_shard(model, mesh=mesh_of(rank, 2))


def test_persistent_weights_are_not_cut(two):
    two.run(refuse_persistent)


def refuse_parts(rank):
    mesh = mesh_of(rank, 2)

    def cut(layer, placement):
        for name, placements in (("weight", [placement]), ("bias", [Replicate()])):
            part = distribute_tensor(getattr(layer, name).detach(), mesh, placements)
            setattr(layer, name, nn.Parameter(part))

    plain = nn.Sequential(Stored(64, 128)).to(here())
    cut(plain[0], Shard(1))
    with pytest.raises(TypeError, match=r"layer 0: tensor parallelism shards a St"):
        ht.quantize_(plain, "fp8")
    model = ht.quantize_(nn.Sequential(Stored(64, 128)).to(here()), "fp8")
    cut(model[0], Shard(1))
    x = distribute_tensor(torch.randn(4, 64), mesh, [Replicate()])
    assert isinstance(model[0].weight, DTensor)
    with pytest.raises(NotImplementedError, match=r"tensor parallelism shards layer 0, a Stored with weight \[in"):
        model(x)


def test_parts_of_tensor_parallel_ranks_are_refused(two):
    two.run(refuse_parts)

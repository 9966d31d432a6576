"""FSDP2 with persistent low-precision weights: the bytes that a rank keeps are what it sends."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import hybridtensor as ht
from hybridtensor.distributed.torch_compat import local
from tests.distributed.test_fsdp import (
    RECIPES,
    Block,
    assert_faces_equal,
    batch,
    mesh_of,
    same_bits,
    same_draws,
    shard,
    split_like,
    whole,
)  # fmt: skip


def make(spec, width=64, hidden=128):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, hidden) for _ in range(2)))
    return ht.quantize_(model, spec, persistent=True)


def train(rank, model, twin, steps=3):
    same_draws(rank, model, twin)
    optimizers = [ht.optim.MasterWeights(torch.optim.AdamW, m.parameters(), lr=0.05) for m in (model, twin)]
    for step in range(steps):
        losses = []
        for m, o in zip((model, twin), optimizers, strict=True):
            o.zero_grad()
            loss = m(batch(step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        assert same_bits(*losses)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-6, atol=1e-9)
            local(p.grad).copy_(split_like(q.grad, p.grad))
        for m, o in zip((model, twin), optimizers, strict=True):
            o.step()
            ht.step_(m)
        pairs = zip(optimizers[0].masters().values(), optimizers[1].masters().values(), strict=True)
        assert all(same_bits(whole(mine), theirs.detach()) for mine, theirs in pairs)
    for block, other in zip(model, twin, strict=True):
        block.unshard()
        for mine, theirs in ((block.up.weight, other.up.weight), (block.down.weight, other.down.weight)):
            assert_faces_equal(mine.rowwise, theirs.rowwise)
            assert_faces_equal(mine.columnwise, theirs.columnwise)
        block.reshard()


def trains_like_the_twin(rank, recipes, size, options):
    for recipe in recipes:
        train(rank, shard(make(recipe), mesh_of(rank, size), **options), make(recipe))


def test_every_recipe_trains_like_the_unsharded_model(two):
    two.run(trains_like_the_twin, [recipe for recipe in RECIPES if recipe != "fp8_block"], 2, {})


def test_one_rank(two):
    two.run(trains_like_the_twin, ["fp8_block", "nvfp4_1d_weight", "fp8_dequantized_backward"], 1, {})


def test_weights_that_stay_gathered(two):
    two.run(trains_like_the_twin, ["fp8", "fp8_rowwise"], 2, {"reshard_after_forward": False})


def refused(rank):
    """At the wrap, on every rank."""
    for recipe, sizes, options in (
        ("fp8", {"hidden": 50}, {}),
        ("fp8", {"hidden": 2}, {}),
        ("fp8_block", {}, {}),
        ("mxfp8", {"hidden": 96}, {}),
        ("fp8", {}, {"shard_placement_fn": lambda p: Shard(1) if p.dim() == 2 else None}),
    ):
        with pytest.raises(ValueError, match=r"fully_shard: a persistent weight in parts|rows for every rank"):
            shard(make(recipe, **sizes), mesh_of(rank, 4), **options)


def test_weights_that_cannot_be_sharded_are_refused_at_the_wrap(four):
    four.run(refused)

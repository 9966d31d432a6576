"""Watching over ranks. Oracle: one rank that watches the unsharded model with the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
from processes import here
from sharding import batch, make, mesh_of, shard
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hybridtensor as ht

RECIPES = ["fp8_rowwise", "mxfp8", "mxfp8+dequantized"]  # whose scales do not go beyond a rank's tokens


def step(model, optimizer, x):
    # the mean over ranks of gradients of half a batch each is that of the batch
    model(x.to(here())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def watched(model, x, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)  # plain tensors beside DTensors
    with ht.watch(model, every=2) as found:
        for _ in range(steps):
            step(model, optimizer, x)
    return found.samples


def sums_up(mine, whole):
    """What ranks add up is what one rank finds, but where it has to be otherwise."""
    assert [sample.step for sample in mine] == [sample.step for sample in whole] == [0, 2]
    for sample, other in zip(mine, whole, strict=True):
        rows = {(row.layer.removeprefix("module."), row.operand): row.statistics for row in sample.faces}
        assert set(rows) <= {(row.layer, row.operand) for row in other.faces}
        for row in other.faces:
            # gradients are those of half a batch: larger by two
            if (row.layer, row.operand) not in rows or "grad" in row.operand or row.operand == "input.columnwise":
                continue
            found = rows[row.layer, row.operand]
            assert found["cur_amax"] == pytest.approx(row.statistics["cur_amax"], rel=1e-3)
            assert found["sqnr"] == pytest.approx(row.statistics["sqnr"], abs=0.02)
            assert found["underflows%"] == pytest.approx(row.statistics["underflows%"], abs=0.02)
        found = {(row.layer.removeprefix("module."), row.product): row.statistics for row in sample.products}
        assert len(found) == len(other.products)
        for row in other.products:
            assert found[row.layer, row.product]["cosine"] == pytest.approx(row.statistics["cosine"], abs=2e-4)


def under_fsdp(rank, recipe, dim, reshard):
    whole = make(recipe, width=128, hidden=256).to(here())
    model = shard(copy.deepcopy(whole), mesh_of(rank, 2), reshard_after_forward=reshard)
    x = batch(0, tokens=256, width=128)
    sums_up(watched(model, x.chunk(2)[rank]), watched(whole, x))


@pytest.mark.parametrize(("recipe", "reshard"), [(recipe, i % 2 == 0) for i, recipe in enumerate(RECIPES)])
def test_fsdp(two, recipe, reshard):
    two.run(under_fsdp, recipe, 0, reshard)


def under_ddp(rank, recipe):
    whole = make(recipe, width=128, hidden=256).to(here())
    model = DistributedDataParallel(copy.deepcopy(whole))
    x = batch(0, tokens=256, width=128)
    sums_up(watched(model, x.chunk(2)[rank]), watched(whole, x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_ddp(two, recipe):
    two.run(under_ddp, recipe)


def under_tensor_parallelism(rank):
    """Every rank's parts are measured as layers, and added up."""
    whole = make("mxfp8", width=128, hidden=256).to(here())
    model = copy.deepcopy(whole)
    for block in model:
        parallelize_module(block, mesh_of(rank, 2), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = batch(0, tokens=256, width=128)
    samples = watched(model, x)
    assert {row.layer for row in samples[0].faces} == {f"{i}.{name}" for i in range(2) for name in ("up", "down")}
    wanted = {(r.layer, r.operand): r.statistics for r in watched(whole, x)[0].faces}
    for row in samples[0].faces:
        if row.operand.startswith("weight"):
            assert row.statistics["sqnr"] == pytest.approx(wanted[row.layer, row.operand]["sqnr"], abs=0.05)


def test_tensor_parallelism(two):
    two.run(under_tensor_parallelism)


def stages(rank):
    """Ranks with other layers do not wait for each other."""
    model = make("fp8").to(here())[rank : rank + 1]
    samples = watched(nn.Sequential(*model), batch(0))
    assert len(samples) == 2
    named = nn.ModuleDict({f"stage{rank}": model[0]})
    optimizer = torch.optim.SGD(named.parameters(), lr=1e-2)
    with ht.watch(named, every=1) as found:
        named[f"stage{rank}"](batch(0).to(here())).sum().backward()
        optimizer.step()
    assert {row.layer for row in found.samples[0].faces} == {f"stage{rank}.up", f"stage{rank}.down"}


def test_stages(two):
    two.run(stages)


def only_one_rank_has_layers(rank):
    model = make("fp8").to(here()) if rank == 0 else nn.Linear(64, 64).to(here())
    samples = watched(model, batch(0))
    assert len(samples) == 2
    assert bool(samples[0].faces) == (rank == 0)
    with pytest.raises(ValueError, match="weights of this library is required, got none"), ht.watch(nn.Linear(4, 4)):
        pass
    broken = make("fp8").to(here())
    if rank == 1:
        broken[1].to("meta")
    match = "on one device" if rank == 1 else "another rank cannot watch: .*on one device"
    with pytest.raises((RuntimeError, NotImplementedError), match=match), ht.watch(broken):
        pass


def test_stages_without_layers(two):
    two.run(only_one_rank_has_layers)


def otherwise(rank):
    model = make("fp8").to(here())
    with (
        pytest.raises(RuntimeError, match="the same every, rows and steps are required on all ranks"),
        ht.watch(model, every=2 + rank),
    ):
        pass
    told = []
    with ht.watch(model, every=1, sinks=[told.append]):
        model(batch(rank).to(here())).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert len(told) == (1 if rank == 0 else 0)
    dist.barrier()


def test_ranks_that_watch_otherwise_and_sinks(two):
    two.run(otherwise)


def advice(rank):
    model = shard(ht.plain_(make("fp8").to(here())), mesh_of(rank, 2))
    with pytest.raises(NotImplementedError, match=r"a model that no ranks share is required, got 0\.up as a DTensor"):
        ht.advise(model, [batch(0)], loss=lambda m, x: m(x.to(here())).sum(), hardware="b200")


def test_sharded_models_are_not_advised(two):
    two.run(advice)

"""Under FSDP2: any number of ranks goes on, bit for bit, with what any number saved."""

import copy

import pytest
import tiers
import torch
import torch.distributed as dist
from checkpointing import ALL, HELD, STATES, bits
from processes import generator, here
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.dtensor import local
from hybridtensor.subclasses.structure import flatten

SIZES = (1, 2, 3, 4)


def make(persistent, mesh, seed=0, recipes=ALL):
    """Return one sharded layer of every recipe, and their optimizer."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({recipe: nn.Linear(32, 1536, bias=False) for recipe in recipes})
    for recipe in recipes:
        ht.quantize_(model[recipe], recipe, persistent=persistent, filter_fn=lambda *_: True)
        if mesh is not None:
            fully_shard(model[recipe], mesh=mesh)
    cls = ht.optim.MasterWeights if persistent else lambda c, p, **k: c(p, **k)
    return model, cls(torch.optim.AdamW, model.parameters(), lr=0.01)


def train(model, optimizer):
    x = torch.randn(32, 32, generator=generator(3))
    optimizer.zero_grad()
    for layer in model.values():
        layer(x).square().mean().backward()
    optimizer.step()
    ht.step_(model)


def parts(model, optimizer):
    """Return the bytes of what this rank holds."""
    held = [t for p in model.parameters() for t in flatten(local(p).detach())[0]]
    inner = getattr(optimizer, "inner", optimizer)
    held += [local(value) for state in inner.state.values() for value in state.values()]
    return [bits_of.contiguous().reshape(-1).view(torch.uint8).clone() for bits_of in held]


def same(a, b):
    """Whether bytes are the same; steps are counted on either device."""
    return len(a) == len(b) and all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


def matrix(rank, path, persistent, recipes, every_pair):
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    meshes = {size: DeviceMesh(here(), list(range(size))) for size in SIZES}
    for size in SIZES:  # what each number of ranks should have, from training on one, loaded and saved again
        if rank < size:
            model, optimizer = make(persistent, meshes[size], recipes=recipes)
            ht.set_data_parallel_group_(model, groups[size])
            if size == 1:
                train(model, optimizer)
            else:
                checkpoint.load(f"{path}/1", {"model": model, "optimizer": optimizer}, group=groups[size])
            checkpoint.save(f"{path}/{size}", size, {"model": model, "optimizer": optimizer}, group=groups[size])
        dist.barrier()
    for size in SIZES:
        if rank < size:
            found = []
            for saved in SIZES if every_pair else (SIZES[-1] + 1 - size,):
                model, optimizer = make(persistent, meshes[size], 1, recipes)
                state = {"model": model, "optimizer": optimizer}
                assert checkpoint.load(f"{path}/{saved}", state, group=groups[size]) == saved
                found.append(parts(model, optimizer))
            assert all(same(found[0], other) for other in found[1:])
    if rank == 0:
        whole, optimizer = make(persistent, None, 1, recipes)
        checkpoint.load(f"{path}/1", {"model": whole, "optimizer": optimizer}, group=groups[1])
        again, other = make(persistent, None, 2, recipes)
        checkpoint.load(f"{path}/4", {"model": again, "optimizer": other}, group=groups[1])
        assert bits(whole, optimizer) == bits(again, other)


@pytest.mark.parametrize(
    ("persistent", "recipes"),
    [(False, ALL if tiers.LONG else STATES), (True, ALL if tiers.LONG else HELD)],
    ids=["masters", "persistent"],
)
def test_reshard_every_recipe_bitwise(four, persistent, recipes, tmp_path):
    four.run(matrix, str(tmp_path / "run"), persistent, recipes, tiers.LONG)


def optimizer_states(rank, persistent):
    mesh = init_device_mesh(here(), (2,))
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=full)
        runs = [make(persistent, mesh, seed, STATES) for seed in (0, 1)]
        train(*runs[0])
        state = get_optimizer_state_dict(*runs[0], options=StateDictOptions(full_state_dict=full, cpu_offload=full))
        state = copy.deepcopy(state) if rank == 0 or not full else {}  # optimizers share what they load
        set_optimizer_state_dict(*runs[1], state, options=options)
        runs[1][0].load_state_dict(runs[0][0].state_dict())
        assert same(parts(*runs[1]), parts(*runs[0]))
        for run in runs:
            train(*run)
        assert same(parts(*runs[1]), parts(*runs[0]))


def models_from_one_rank(rank, persistent, recipes):
    """Before an optimizer has stepped: then a persistent weight's faces are those of its values and of its scales."""
    mesh = init_device_mesh(here(), (2,))
    for on_host in (False, True):
        runs = [make(persistent, mesh, seed, recipes) for seed in (0, 1)]
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        read = StateDictOptions(full_state_dict=True, cpu_offload=on_host)
        state = copy.deepcopy(get_model_state_dict(runs[0][0], options=read))
        set_model_state_dict(runs[1][0], state if rank == 0 else {}, options=options)
        assert same(parts(*runs[1]), parts(*runs[0]))


@pytest.mark.parametrize(("persistent", "recipes"), [(False, STATES), (True, HELD)], ids=["masters", "persistent"])
def test_models_that_one_rank_has_read(two, persistent, recipes):
    two.run(models_from_one_rank, persistent, recipes)


@pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
def test_states_of_optimizers_by_name(two, persistent):
    two.run(optimizer_states, persistent)


def replicas(rank, path, persistent, recipes):
    row = init_device_mesh(here(), (4,))
    square = init_device_mesh(here(), (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = make(persistent, row, recipes=recipes)
    train(model, optimizer)
    checkpoint.save(f"{path}/row", 1, {"model": model, "optimizer": optimizer})
    replicated = load(f"{path}/row", persistent, square, recipes)
    checkpoint.save(f"{path}/square", 1, replicated)
    assert same(parts(model, optimizer), parts(**load(f"{path}/square", persistent, row, recipes)))
    assert same(parts(**replicated), parts(**load(f"{path}/square", persistent, square, recipes)))
    alone = dist.new_group([rank], use_local_synchronization=True)
    wholes = [load(f"{path}/{name}", persistent, None, recipes, group=alone) for name in ("row", "square")]
    assert bits(*wholes[0].values()) == bits(*wholes[1].values())


def load(path, persistent, mesh, recipes, **options):
    """Return a model and its optimizer with what a folder holds, and other values before."""
    model, optimizer = make(persistent, mesh, 1, recipes)
    state = {"model": model, "optimizer": optimizer}
    assert checkpoint.load(path, state, **options) == 1
    return state


@pytest.mark.parametrize("persistent", [False, True], ids=["masters", "persistent"])
def test_with_and_without_replicas_of_shards(four, persistent, tmp_path):
    some = HELD if persistent else STATES
    four.run(replicas, str(tmp_path), persistent, ALL if tiers.LONG else some)

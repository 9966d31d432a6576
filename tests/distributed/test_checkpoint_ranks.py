"""Several ranks: any number of them loads what any number saved, and all of them fail together."""

import contextlib
import datetime
import os
import signal
import threading
import time
from unittest import mock

import pytest
import tiers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointing import ALL, HELD, STATES, bits, make, train
from processes import here, run
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.subclasses.structure import flatten

SIZES = (1, 2, 3, 4)


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def layers(persistent, rows, seed=0, recipes=ALL):
    """Return one layer of every recipe, and one without."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({recipe: nn.Linear(32, rows, bias=False) for recipe in (*recipes, "plain")})
    for recipe in recipes:
        ht.quantize_(model[recipe], recipe, persistent=persistent, filter_fn=lambda *_: True)
    return model


def cut(whole, rank, size, dim):
    """Return a rank's part of a tensor, as FSDP2 cuts it."""
    length = -(-whole.shape[dim] // size)
    start = min(rank * length, whole.shape[dim])
    return whole[start : start + length] if dim == 0 else whole[:, start : start + length]


def shard(model, rank, mesh, dim=0):
    """Make every weight a DTensor."""
    for layer in model.values():
        part = cut(layer.weight.detach(), rank, mesh.size(), dim)
        shape, stride = layer.weight.shape, layer.weight.stride()
        layer.weight = nn.Parameter(
            DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
        )
    return model


def parts(model, rank=0, size=1, dim=0):
    """Return the bytes of what a rank holds, or should hold of a whole model."""
    found = {}
    for name, layer in model.items():
        weight = local(layer.weight.detach())
        part = weight if isinstance(layer.weight, DTensor) else cut(weight, rank, size, dim)
        found[name] = [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in flatten(part)[0]]
    return found


def matrix(rank, path, persistent, rows, dim, every_pair):
    """Save on every number of ranks, load on every number what one of them, or each, has saved."""
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    meshes = {size: DeviceMesh(here(), list(range(size))) for size in SIZES}
    source = layers(persistent, rows)
    for size in SIZES:
        if rank < size:
            model = shard(layers(persistent, rows), rank, meshes[size], dim)
            checkpoint.save(f"{path}/{size}", size, {"model": model}, group=groups[size])
    dist.barrier()
    for size in SIZES:
        if rank < size:
            expected = parts(source, rank, size, dim)
            for saved in SIZES if every_pair else (SIZES[-1] + 1 - size,):
                model = shard(layers(persistent, rows, seed=1), rank, meshes[size], dim)
                assert parts(model) != expected
                assert checkpoint.load(f"{path}/{saved}", {"model": model}, group=groups[size]) == saved
                assert parts(model) == expected, (saved, size)
    if rank == 0:  # and a model that is not sharded at all
        whole = layers(persistent, rows, seed=1)
        checkpoint.load(f"{path}/4", {"model": whole}, group=groups[1])
        assert parts(whole) == parts(source)


@pytest.mark.parametrize(
    ("persistent", "rows", "dim"),
    [(False, 224, 0), (True, 1536, 0)],
    ids=["masters, uneven shards", "persistent"],
)
def test_reshard_every_recipe_bitwise(four, persistent, rows, dim, tmp_path):
    four.run(matrix, str(tmp_path / "run"), persistent, rows, dim, tiers.LONG)


def place(model, mesh, placements):
    """Make every weight a DTensor that lies on a mesh of two dimensions."""
    for layer in model.values():
        weight = part = layer.weight.detach()
        for placement, index, size in zip(placements, mesh.get_coordinate(), mesh.shape, strict=True):
            part = cut(part, index, size, placement.dim) if isinstance(placement, Shard) else part
        shape, stride = weight.shape, weight.stride()
        layer.weight = nn.Parameter(
            DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
        )
    return model


def meshes_of_two_dimensions(rank, path, kinds, persistent, rows, recipes):
    mesh = init_device_mesh(here(), (2, 2))
    for kind, placements in enumerate(kinds):
        checkpoint.save(f"{path}/{kind}", 1, {"model": place(layers(persistent, rows, 0, recipes), mesh, placements)})
    source = layers(persistent, rows, 0, recipes)
    for kind in range(len(kinds)):
        placements = kinds[kind - 1]  # another one
        model, expected = place(layers(persistent, rows, 1, recipes), mesh, placements), place(source, mesh, placements)
        assert parts(model) != parts(expected)
        checkpoint.load(f"{path}/{kind}", {"model": model})
        assert parts(model) == parts(expected), (kinds[kind], placements)
        source = layers(persistent, rows, 0, recipes)
        whole = layers(persistent, rows, 1, recipes)
        checkpoint.load(f"{path}/{kind}", {"model": whole})
        assert parts(whole) == parts(source)


@pytest.mark.parametrize(
    ("persistent", "rows", "kinds"),
    [
        (False, 256, [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()]]),
        (True, 1536, [[Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(0), Replicate()]]),
    ],
    ids=["masters", "persistent"],
)
def test_meshes_of_two_dimensions(persistent, rows, kinds, tmp_path, four):
    some = HELD if persistent else STATES
    four.run(meshes_of_two_dimensions, str(tmp_path), kinds, persistent, rows, ALL if tiers.LONG else some)


def tensor_parallel(recipe, shape, seed):
    """Return persistent layers that are cut over ranks, their optimizer, and one of its steps."""
    mesh = init_device_mesh(here(), shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():  # parts of other magnitudes
        model[0].weight[64:] *= 5
        model[2].weight[:, 64:] *= 7
    ht.quantize_(model, recipe, persistent=True)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if shape[0] > 1:
        fully_shard(model, mesh=mesh["dp"])
    ht.set_mesh_(model, mesh)
    optimizer = ht.optim.MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)

    def step():
        y = model(torch.linspace(-1, 1, 32 * 64).view(32, 64))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        return y.detach()

    return model, optimizer, step


def goes_on_in_parts(rank, path, recipe, shape):
    model, optimizer, step = tensor_parallel(recipe, shape, 0)
    step()
    checkpoint.save(path, 1, {"model": model, "optimizer": optimizer})
    expected = [step(), step()]
    model, optimizer, step = tensor_parallel(recipe, shape, 1)
    checkpoint.load(path, {"model": model, "optimizer": optimizer})
    assert all(map(torch.equal, [step(), step()], expected))


@pytest.mark.filterwarnings("ignore")  # torch's advice on strided shards
@pytest.mark.parametrize("shape", [(1, 4), (2, 2)], ids=["TP", "TP and FSDP2"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4+nearest"])
def test_persistent_tensor_parallel_training_goes_on(four, tmp_path, recipe, shape):
    four.run(goes_on_in_parts, str(tmp_path), recipe, shape)


def scales_of_parts(rank, path):
    """Without masters, faces that have no scale in common are refused; by ``dcp.save``, too."""
    model, _, step = tensor_parallel("fp8", (1, 2), 0)
    checkpoint.save(path, 1, {"model": model})  # quantized as a whole, and cut
    step()
    told = "scales of their own .*model.0.weight.rowwise.scale .rank 0 and rank 1 differ.*; save masters"
    with pytest.raises(ValueError, match=told):
        checkpoint.save(path, 2, {"model": model})
    planner = checkpoint.HybridSavePlanner()
    with pytest.raises(dcp.CheckpointException, match="only faces that have the scales of the whole can be stored"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/dcp", planner=planner)


def test_parts_with_scales_of_their_own_are_no_whole(two, tmp_path):
    two.run(scales_of_parts, str(tmp_path))


def state_dicts_of_shards(rank):
    """Sharded and full, and from rank 0 to all."""
    mesh = DeviceMesh(here(), [0, 1])
    source = layers(False, 96)
    model = shard(layers(False, 96), rank, mesh)
    state = get_model_state_dict(model)
    assert {(type(v), type(local(v))) for v in state.values() if isinstance(v, DTensor)} == {(DTensor, torch.Tensor)}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if rank == 0:
        plain = {name: t for name, t in source.state_dict().items() if name in full}
        assert all(type(full[name]) is torch.Tensor and torch.equal(full[name], t.cpu()) for name, t in plain.items())
    other = shard(layers(False, 96, seed=1), rank, mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, full if rank == 0 else {}, options=options)
    assert parts(other) == parts(source, rank, 2)


def replicas_and_backgrounds(rank, path):
    """What all ranks have alike is written once; the background has its own way to talk."""
    model, optimizer = make("fp8_delayed")
    train(model, optimizer, 0, 2)
    expected = bits(model, optimizer)
    state = {"model": nn.parallel.DistributedDataParallel(model), "optimizer": optimizer}
    saving = checkpoint.async_save(path, 2, state)
    train(model, optimizer, 2, 4)
    step = torch.ones(1)
    dist.all_reduce(step)  # while the background talks
    saving.result()
    other, other_optimizer = make("fp8_delayed", seed=1)
    assert checkpoint.load(path, {"model": other, "optimizer": other_optimizer}) == 2
    assert bits(other, other_optimizer) == expected
    metadata = checkpoint.SafeReader(f"{path}/step_00000002").read_metadata()
    assert len(metadata.state_dict_metadata["model.0.weight"].chunks) == 1


def compared_while_the_background_talks(rank, path):
    """The background waits for a slow disk of one rank, and all compare something else meanwhile."""
    state, compared, write = {"model": make("fp8")[0]}, threading.Event(), checkpoint.store.Writer.write_data

    def slow(*args):
        compared.wait()
        return write(*args)

    with mock.patch.object(checkpoint.store.Writer, "write_data", slow if rank else write):
        saving = checkpoint.async_save(path, 1, state)
        time.sleep(0 if rank else 0.5)  # its background asks what the other rank wrote
        checkpoint.check_replicas(state)
        compared.set()
        assert os.path.basename(saving.result()) == "step_00000001"


def misaligned(rank, path):
    """Shards that end inside a block cannot be stored by themselves; every rank says so."""
    mesh = DeviceMesh(here(), [0, 1])
    model = nn.ModuleDict({"a": ht.quantize_(nn.Linear(128, 96, bias=False), "mxfp8", persistent=True)})
    shape, stride = model["a"].weight.shape, model["a"].weight.stride()
    part = ht.quantize_(nn.Linear(128, 32, bias=False), "mxfp8", persistent=True).weight.detach()
    tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    model["a"].weight = nn.Parameter(tensor)
    with pytest.raises(ValueError, match=r"shards of 48 of 96 along dimension 0 cut blocks of 32"):
        checkpoint.save(path, 1, {"model": model})


def one_fails_all_raise(rank, path):
    model, _ = make("fp8")
    checkpoint.save(path, 1, {"model": model})
    full = mock.patch.object(checkpoint.store.Writer, "write_data", full_disk)
    with (
        full if rank == 1 else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match=r"checkpoint.save: OSError: .*No space left on device \(rank 1\)"),
    ):
        checkpoint.save(path, 2, {"model": model})
    dist.barrier()  # the first rank has tidied up
    assert os.listdir(path) == ["step_00000001"]
    if rank == 0:
        os.remove(f"{path}/step_00000001/.metadata")
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"step_00000001: .metadata is missing"):
        checkpoint.load(path, {"model": model})


def others_must_be_alike(rank, path):
    model, _ = make("fp8" if rank else "fp8_rowwise")
    with pytest.raises(ValueError, match=r"ranks \[1\] have other weights, recipes or entries than rank 0"):
        checkpoint.save(path, 1, {"model": model})
    model, _ = make("fp8")
    checkpoint.save(path, 1, {"model": model})
    other, _ = make("fp8" if rank else "mxfp8")
    with pytest.raises(ValueError, match=r"other recipes than the model.* \(rank 0\)"):
        checkpoint.load(path, {"model": other})


def full_disk(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "bodies",
    [
        (
            state_dicts_of_shards,
            replicas_and_backgrounds,
            compared_while_the_background_talks,
            misaligned,
            others_must_be_alike,
            one_fails_all_raise,
        )
    ],
    ids=lambda bodies: " ".join(body.__name__ for body in bodies),
)
def test_on_two_ranks(two, bodies, tmp_path):
    two.run(everything, bodies, str(tmp_path))


def everything(rank, bodies, path):
    for body in bodies:
        body(rank, *([] if body is state_dicts_of_shards else [f"{path}/{body.__name__}"]))


def dies(rank, path, victim):
    """A rank dies while it writes: the others raise at once, and the last good step is there."""
    model, optimizer = make("nvfp4")
    state = {"model": model, "optimizer": optimizer}
    checkpoint.save(path, 1, state)
    if rank == victim:
        checkpoint.store.Writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="got no answer from one of the 3 ranks"):
        checkpoint.save(path, 2, state, timeout=datetime.timedelta(minutes=10))
    assert time.monotonic() - started < 20
    assert checkpoint.latest(path) == 1
    os._exit(0)  # the group cannot be taken down in order any more


@pytest.mark.parametrize("victim", tiers.few([0, 1], 1))
def test_a_rank_that_dies_takes_nothing_along(victim, tmp_path, device):
    codes = [-signal.SIGKILL if rank == victim else 0 for rank in range(3)]
    run(dies, 3, tmp_path, str(tmp_path / "run"), victim, device=device, expected=codes)
    model, optimizer = make("nvfp4", seed=1)
    state = {"model": model, "optimizer": optimizer}
    assert checkpoint.load(tmp_path / "run", state) == 1
    checkpoint.save(tmp_path / "run", 2, state)
    assert sorted(os.listdir(tmp_path / "run")) == ["step_00000001", "step_00000002"]


def test_replicated_placements_of_a_face():
    """A tensor scale that all shards share is replicated; the rest follows the rows, wherever a face has them."""
    plain = checkpoint.plain
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        weight = ht.quantize_(nn.Linear(64, 32, bias=False), "nvfp4", persistent=True).weight.detach()
        mesh = DeviceMesh(here(), [0])
        whole = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        faces = plain({"w": whole})["w"]
        told = {(d, n): (t.placements[0], tuple(t.shape)) for d, of in faces.items() for n, t in of.items()}
        assert told == {
            ("rowwise", "qdata"): (Shard(0), (32, 32)), ("rowwise", "scale"): (Shard(0), (2, 4)),
            ("rowwise", "tensor_scale"): (Replicate(), (1, 1)),
            ("columnwise", "qdata"): (Shard(1), (64, 16)), ("columnwise", "scale"): (Shard(1), (4, 2)),
            ("columnwise", "tensor_scale"): (Replicate(), (1, 1)),
        }  # fmt: skip
    finally:
        dist.destroy_process_group()

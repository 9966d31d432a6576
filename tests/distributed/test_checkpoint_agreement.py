"""What ranks must have alike: where they have not, all of them are told so."""

import datetime
import os
import time

import pytest
import torch
import torch.distributed as dist
from checkpointing import bits, make, train
from processes import here, run
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, Shard

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.untrusted import reader


def save_arguments(rank, path):
    state = {"model": make("fp8")[0]}
    cases = [
        ((path, rank), {}, r"step=1 on rank 1, 0 on rank 0"),
        ((f"{path}/{rank}", 0), {}, r"directory='.*/1' on rank 1, '.*/0' on rank 0"),
        ((path, 0), {"faces": rank == 0}, "faces=False on rank 1, True on rank 0"),
        ((path, 0), {"overwrite": rank == 1}, "overwrite=True on rank 1, False on rank 0"),
        ((path, 0), {"check_replicas": rank == 1}, "check_replicas=True on rank 1, False on rank 0"),
    ]
    for call in (checkpoint.save, checkpoint.async_save):
        for where, options, told in cases:
            with pytest.raises(ValueError, match=f"ranks passed different arguments: {told}"):
                call(*where, state, **options)
    assert not os.path.exists(path)


def load_arguments(rank, path):
    model, _ = make("fp8")
    for step in (1, 2):
        checkpoint.save(path, step, {"model": model})
    other, _ = make("fp8", seed=1 + rank)
    before = bits(other)
    for where, options, told in (
        (path, {"step": 1 + rank}, "step=2 on rank 1, 1 on rank 0"),
        (f"{path}/{rank}", {}, "directory="),
        (path, {"any_recipe": rank == 1}, "any_recipe=True on rank 1, False on rank 0"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint.load: ranks passed different arguments: .*{told}"):
            checkpoint.load(where, {"model": other}, **options)
    assert bits(other) == before


def of_a_group(rank, path):
    """Errors name the ranks of a group by their numbers among all ranks."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model, _ = make("fp8_delayed")
    other = nn.Linear(2, 1 + rank)
    with pytest.raises(ValueError, match=r"step=2 on rank 2, 1 on rank 1;"):
        checkpoint.save(path, rank, {"model": model}, group=group)
    with pytest.raises(ValueError, match=r"o\.weight is \(2, 2\) .* on rank 1, \(3, 2\) .* on rank 2;"):
        checkpoint.save(path, 1, {"model": model, "o": other}, group=group)
    with pytest.raises(ValueError, match=r"ranks \[2\] have other weights, recipes or entries than rank 1;"):
        checkpoint.save(path, 1, {"model": make(["fp8", "mxfp8"][rank - 1])[0]}, group=group)
    with pytest.raises(TypeError, match=r"\(rank 2\)"):
        checkpoint.save(path, 1, {"model" if rank == 1 else 3: model}, group=group)
    with torch.no_grad():
        model[2].bias[3] += rank
    with pytest.raises(ValueError, match=r"model\.2\.bias \(rank 1 and rank 2 differ\)"):
        checkpoint.check_replicas({"model": model}, group=group)


def other_disks(rank, path):
    """The same path, and another folder there on each rank."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    os.makedirs(f"{path}/{rank}")
    os.chdir(f"{path}/{rank}")
    model, _ = make("fp8", seed=rank)
    for step in (1, 2 + rank):
        checkpoint.save("run", step, {"model": model}, group=alone)
    other, _ = make("fp8", seed=5)
    before = bits(other)
    with pytest.raises(RuntimeError, match=r"no intact checkpoint .*step_00000001: ranks \[1\] see another checkpoint"):
        checkpoint.load("run", {"model": other})
    assert bits(other) == before
    with pytest.raises(RuntimeError, match=r"what rank 1 wrote is not in .* on rank 0; all ranks must see one folder"):
        checkpoint.save("run", 9, {"model": model, "t": {f"of {rank}": torch.ones(1)}})
    os.chdir("/")


def shapes(rank, path):
    """A mix of ranks' layers would be no model at all."""

    def told(state, text, **options):
        with pytest.raises(ValueError, match=f"ranks have tensors of different shapes or dtypes: {text}"):
            checkpoint.save(path, 1, state, **options)

    wide = nn.Sequential(nn.Linear(32, 64 + 32 * rank, bias=False))
    told({"m": wide}, r"m\.0\.weight is \(64, 32\) of torch\.float32 on rank 0, \(96, 32\) of torch\.float32 on rank 1")
    told({"m": ht.quantize_(wide, "fp8")}, r"m\.0\.weight is ")
    told({"m": ht.quantize_(wide, "fp8", persistent=True)}, r"m\.0\.weight\.rowwise\.qdata is ")
    half = nn.Linear(4, 4).to(torch.float64 if rank else torch.float32)
    told({"m": half}, r"m\.weight is .* of torch\.float32 on rank 0, .* of torch\.float64 on rank 1; m\.bias")
    model = nn.BatchNorm1d(4)
    model.register_buffer("more", torch.ones(2 + rank))
    told({"m": model}, r"m\.more is \(2,\) .* on rank 0, \(3,\)")
    told({"d": {"x": [torch.ones(1 + rank)]}}, r"d\.x\.0 is \(1,\)")
    model, optimizer = make("fp8")
    train(model, optimizer, 0, 1)
    first = next(iter(optimizer.state.values()))
    first["exp_avg"] = first["exp_avg"].to(torch.bfloat16 if rank else torch.float32)
    told({"m": model, "o": optimizer}, r"o\.state\.0\.weight\.exp_avg is .*bfloat16 on rank 1")
    mesh = DeviceMesh(here(), [0, 1])
    part = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False, shape=(4 + rank, 2), stride=(2, 1))
    told({"d": {"x": part}}, r"d\.x is \(4, 2\).* on rank 0, \(5, 2\)")
    dist.barrier()  # the first rank has tidied up
    assert not os.path.exists(path)
    dist.barrier()
    own = {f"of {rank}": torch.ones(3 + rank), "n": 3}
    checkpoint.save(path, 1, {"d": own, "m": nn.Linear(2, 2)})  # under a name of its own, a rank may have what it likes


def replicas(rank, path):
    model, optimizer = make("fp8_delayed")
    train(model, optimizer, 0, 1)
    state = {"model": model, "optimizer": optimizer, "d": {"t": torch.ones(2), "n": rank}}
    checkpoint.check_replicas(state)
    checkpoint.save(path, 1, state, check_replicas=True)
    with torch.no_grad():
        model[2].bias[3] += rank
        optimizer.state[model[0].weight]["exp_avg"][0, 0] += rank
    text = (
        r"ranks have different values of what they replicate: model\.2\.bias \(rank 0 and rank 1 "
        r"differ\); optimizer\.state\.0\.weight\.exp_avg \(rank 0 and rank 1 differ\)"
    )
    for call in (
        lambda: checkpoint.check_replicas(state),
        lambda: checkpoint.save(path, 2, state, check_replicas=True),
        lambda: checkpoint.async_save(path, 2, state, check_replicas=True),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    dist.barrier()  # the first rank has tidied up
    assert os.listdir(path) == ["step_00000001"]
    dist.barrier()
    checkpoint.save(path, 3, state)


def fails_on_one(rank, path):
    """Reading, or taking what was read: on one rank, and so on all."""
    state = {"model": make("fp8")[0]}
    checkpoint.save(path, 1, state)
    state = {"model": make("fp8", seed=1)[0]}
    before = bits(state["model"])
    for holder, name in (
        (reader.SafeReader, "_read"),
        (checkpoint.restoration.Restoration, "finish"),
        (checkpoint.restoration.Restoration, "fill"),
        (checkpoint.planners.HybridLoadPlanner, "commit_tensor"),
        (state["model"], "load_state_dict"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(holder, name, broken)
            with pytest.raises(RuntimeError, match=r"OSError: .*Input/output error \(rank 1\)"):
                checkpoint.load(path, state)
        assert bits(state["model"]) == before


def fails_at_the_end_of_one(rank, path):
    """What the others have taken by then is taken back, too."""
    checkpoint.save(path, 1, {"d": {"n": 1, "t": torch.ones(1), "more": [1, {"a": 1}]}, "e": 1})
    inner = [2, {"a": 2}]
    state = {"d": {"n": 2, "t": torch.zeros(1), "more": inner}, "e": 2}
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(checkpoint.restoration.Restoration, "fill", broken)
        with pytest.raises(RuntimeError, match=r"Input/output error \(rank 1\)"):
            checkpoint.load(path, state)
    assert state == {"d": {"n": 2, "t": torch.zeros(1), "more": [2, {"a": 2}]}, "e": 2}
    assert state["d"]["more"] is inner
    checkpoint.load(path, state)
    assert state == {"d": {"n": 1, "t": torch.ones(1), "more": [1, {"a": 1}]}, "e": 1}


def comes_late(rank, path):
    """Who waited in vain can try again, once all are there."""
    state = {"model": make("fp8")[0]}
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 did not come within 0:00:01"):
            checkpoint.save(path, 1, state, timeout=datetime.timedelta(seconds=1))
    dist.barrier()
    checkpoint.save(path, 1, state, timeout=datetime.timedelta(seconds=4))


def broken(*args, **kwargs):
    raise OSError(5, "Input/output error")


def exports(rank, path):
    """Of a sharded model, what fails where the file is written fails everywhere."""
    mesh = DeviceMesh(here(), [0, 1])
    model = nn.Linear(4, 4, bias=False)
    weight = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    model.weight = nn.Parameter(weight)
    os.makedirs(path, exist_ok=True)
    with pytest.raises(RuntimeError, match=r"export_safetensors: .*nothing.* \(rank 0\)"):
        ht.export_safetensors(model, "/proc/nothing/model.safetensors")  # where no folder can be made
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            real = ht.export._in_high_precision
            patch.setattr(ht.export, "_in_high_precision", lambda *args: broken(real(*args)))
        with pytest.raises(RuntimeError, match=r"Input/output error \(rank 1\)"):
            ht.export_safetensors(model, f"{path}/model.safetensors")
    ht.export_safetensors(model, f"{path}/model.safetensors")
    assert list(ht.load_safetensors(f"{path}/model.safetensors")) == ["weight"]
    if rank == 0:  # of one that is not sharded, alone
        ht.export_safetensors(nn.Linear(2, 2), f"{path}/alone.safetensors")


def stages(rank, path):
    """Equal names in stages of a pipeline are those of other weights: each stage has a directory of its own."""
    groups = [dist.new_group([member]) for member in range(2)]
    stage, _ = make("fp8", seed=rank)
    pipelined = PipelineStage(stage, rank, 2, torch.empty(0).device)
    state = {"model": nn.ModuleList([pipelined.submod])}
    for call in (checkpoint.save, checkpoint.async_save):
        with pytest.raises(ValueError, match=r"one stage of a pipeline is required, got \[\[0\], \[1\]\] .*as group"):
            call(path, 0, state)
    assert not os.path.exists(path)
    dist.barrier()  # the other rank looked, too, before this one writes
    checkpoint.save(f"{path}/{rank}", 0, state, group=groups[rank])
    other, _ = make("fp8", seed=2)
    checkpoint.load(f"{path}/{rank}", {"model": nn.ModuleList([other])}, group=groups[rank])
    assert bits(other) == bits(stage)


BODIES = (
    stages,
    exports,
    save_arguments,
    load_arguments,
    other_disks,
    shapes,
    replicas,
    fails_on_one,
    fails_at_the_end_of_one,
    comes_late,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_two_ranks(two, body, tmp_path):
    two.run(body, str(tmp_path / "run"))


def test_of_a_group(three, tmp_path):
    three.run(of_a_group, str(tmp_path / "run"))


def replicas_on_a_mesh(rank):
    mesh = init_device_mesh(here(), (2, 2))
    row, column = mesh.get_coordinate()
    for placements, mine, changed, told in (
        ([Replicate(), Shard(0)], column, 3, r"d\.x \(rank 1 and rank 3 differ\)"),
        ([Shard(0), Replicate()], row, 3, r"d\.x \(rank 2 and rank 3 differ\)"),
        ([Replicate(), Replicate()], 0, 2, r"d\.x \(ranks 0, 1, 3 and rank 2 differ\)"),
    ):
        part = torch.full((4,), float(mine))
        state = {"d": {"x": DTensor.from_local(part, mesh, placements, run_check=False)}}
        checkpoint.check_replicas(state)
        part += rank == changed
        with pytest.raises(ValueError, match=told):
            checkpoint.check_replicas(state)
    shard = DTensor.from_local(torch.full((1,), float(rank)), mesh, [Shard(0), Shard(0)], run_check=False)
    checkpoint.check_replicas({"d": {"x": shard}})


def test_replicated_parts_of_shards_are_compared_along_their_dimension(four):
    four.run(replicas_on_a_mesh)


def dies_first(rank, path, when):
    """One rank is gone before the ranks' own group is made, or while it is."""
    state = {"model": make("fp8")[0]}
    dist.barrier()
    if rank == 1 and when == "before":
        os._exit(0)
    if rank == 1:
        dist.new_group = lambda *args, **kwargs: os._exit(0)
    started = time.monotonic()
    told = "rank 1 did not come within 0:00:03" if when == "before" else "got no answer from one of the 3 ranks"
    with pytest.raises(RuntimeError, match=told):
        checkpoint.save(path, 1, state, timeout=datetime.timedelta(seconds=3 if when == "before" else 600))
    assert time.monotonic() - started < 15  # 3 and 8 on a machine with nothing else to do
    os._exit(0)  # the group cannot be taken down in order any more


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_rank_that_is_gone_before_ranks_talk_ends_all(when, tmp_path):
    run(dies_first, 3, tmp_path, str(tmp_path / "run"), when)

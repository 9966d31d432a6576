"""What ranks must have alike, and at which step they are: every difference raises on every rank, within seconds."""

import atexit
import contextlib
import datetime
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as torch_styles
from torch.nn.parallel import DistributedDataParallel

import hybridtensor as ht
from hybridtensor import ranks
from hybridtensor.distributed import checkpoint
from hybridtensor.ranks import PATIENCE
from hybridtensor.state import contract

SECONDS = 15.0
SHORT = datetime.timedelta(seconds=2)


def make(recipe="fp8_delayed", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32, bias=False))
    return model if recipe is None else ht.quantize_(model, recipe, **options)


def batch():
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class RaisesSoon:
    """Like ``pytest.raises``, within seconds."""

    def __init__(self, match, kind=RuntimeError):
        self.raises, self.start = pytest.raises(kind, match=match), time.monotonic()

    def __enter__(self):
        return self.raises.__enter__()

    def __exit__(self, *error):
        assert time.monotonic() - self.start < SECONDS
        return self.raises.__exit__(*error)


def test_steps_that_differ_are_told_by_rank(monkeypatch):
    """Of a group of some ranks by their numbers among all, and of many ranks those that differ."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(20, 40)))
    counts = torch.tensor([[3.0] * 20, [4.0] * 18 + [3.0, 4.0]])
    with pytest.raises(
        RuntimeError, match="step_: rank 20 is at step of the optimizer 5, rank 38 is at step of the optimizer 4;"
    ):
        contract._require_same_steps(counts, object())


def frozen_on_one(rank):
    model = make()
    model[2].weight.requires_grad_(rank == 0)
    return model


DIFFERENT = {
    "another recipe": (lambda rank: make("fp8" if rank else "mxfp8"), r"0\.weight is mxfp8.* on rank 0, fp8.* on rank"),
    "persistent": (lambda rank: make("fp8", persistent=bool(rank)), r"in high precision.* on rank 0, .*persistent"),
    "frozen": (frozen_on_one, r"2\.weight is .*trained on rank 0, .*frozen on rank 1"),
    "partly plain": (lambda rank: make("fp8", keep_bf16=["2"] if rank else []), r"2\.weight is .* 0, absent on rank 1"),
}


def ddp(rank):
    """In the first step: DistributedDataParallel knows no recipes; of frozen weights it tells itself."""
    for what in ("another recipe", "partly plain"):
        made, match = DIFFERENT[what]
        model = made(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = DistributedDataParallel(model)
        parallel(batch()).sum().backward()
        with RaisesSoon(match):
            optimizer.step()


def mesh_(rank):
    """In ``set_mesh_``."""
    for made, match in DIFFERENT.values():
        with RaisesSoon(match):
            ht.set_mesh_(made(rank), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))


def torch_tensor_parallel(rank):
    """In the first step: torch's styles know no recipes."""
    model = make("fp8" if rank else "fp8_rowwise")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    styles = {"0": torch_styles.ColwiseParallel(), "2": torch_styles.RowwiseParallel()}
    torch_styles.parallelize_module(model, mesh, styles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch()).sum().backward()
    with RaisesSoon(r"0\.weight is fp8_rowwise .* on rank 0, fp8 .* on rank 1"):
        optimizer.step()


def own_tensor_parallel(rank):
    """When the styles are put on: gathers of other sizes would hang in the first forward."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mine in ("fp8_rowwise", None):
        model = make("fp8" if rank else mine)
        with RaisesSoon("ranks differ in weights or recipes: "):
            torch_styles.parallelize_module(model, mesh, {"0": ht.distributed.ColwiseParallel()})


def recipes_to_come(rank):
    """``set_config_`` compares its recipes before it changes anything."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fully_shard(make("fp8"), mesh=mesh)
    before = model[0].weight
    with RaisesSoon(r"set_config_: .*0 is mxfp8 .* on rank 0, nvfp4 .* on rank 1"):
        ht.set_config_(model, "nvfp4" if rank else "mxfp8")
    assert model[0].weight is before
    ht.set_config_(model, "mxfp8")


def plain_on_one_rank(rank):
    model = make(None if rank else "fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = DistributedDataParallel(model)
    parallel(batch()).sum().backward()
    if rank == 0:
        missing = "first step of Sequential: rank 1 did not come within 0:00:03; start again .*, or .* with set_mesh_"
        with RaisesSoon(missing):
            optimizer.step()
    else:
        time.sleep(7)  # the file that ranks meet by goes with a process that has ended


def set_config_on_one_rank(rank):
    model = DistributedDataParallel(make("fp8"))
    if rank == 0:
        with RaisesSoon(r"set_config_: rank 1 did not come within 0:00:03"):
            ht.set_config_(model, "mxfp8")


def trained(model, optimizer):
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def skipped_optimizer_step(rank):
    model = make()
    optimizer, parallel = torch.optim.SGD(model.parameters(), lr=0.1), DistributedDataParallel(model)
    trained(parallel, optimizer)
    ht.step_(model)
    parallel(batch()).sum().backward()
    if rank == 0:
        optimizer.step()
    with RaisesSoon(r"rank 0 is at step of the optimizer 3, rank 1 is at step of the optimizer 2"):
        ht.step_(model)


def step_once_more(rank):
    """What rank 1 does once more is compared with what rank 0 does next."""
    model = make()  # not wrapped: the next collective of rank 0 is that of step_, too
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, optimizer)
    ht.step_(model)
    if rank == 0:
        trained(model, optimizer)
    with RaisesSoon(r"rank 0 is at step of the optimizer 3, rank 1 is at step of the optimizer 2"):
        ht.step_(model)


def step_on_one_rank(rank):
    model = make()
    optimizer, parallel = torch.optim.SGD(model.parameters(), lr=0.1), DistributedDataParallel(model)
    trained(parallel, optimizer)
    ht.step_(model)
    trained(parallel, optimizer)
    if rank == 0:
        with RaisesSoon(r"step_: rank 0 is at step 2 and got no answer from one of 2 ranks in 3 s"):
            ht.step_(model)
    else:
        time.sleep(8)  # a rank that has ended is noticed at once


def watching_on_one_rank(rank):
    if rank == 0:
        with RaisesSoon("watch: rank 1 did not come within 0:00:03"):
            ht.watch(make("fp8")).__enter__()


def arguments_of_exports(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fully_shard(make("fp8"), mesh=mesh)
    for name, mine in {
        "dtype": [torch.float32, torch.bfloat16],
        "bucket_bytes": [1 << 20, 1 << 21],
        "ranks": ["all", "first"],
    }.items():
        with RaisesSoon(f"inference_tensors: ranks passed different arguments: .*{name}=", ValueError):
            list(ht.inference_tensors(model, **{name: mine[rank]}))


def time_of_exports(rank):
    """A rank that stops reading: the others wait as long as they said."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = fully_shard(make("fp8"), mesh=mesh)
    timeout = datetime.timedelta(seconds=3)
    tensors = iter(ht.inference_tensors(model, bucket_bytes=1, timeout=timeout))
    next(tensors)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 0 got no answer from one of the 2 ranks"):
            list(tensors)
        assert time.monotonic() - start < 8
    else:
        time.sleep(6)


BODIES = [
    ddp,
    mesh_,
    torch_tensor_parallel,
    own_tensor_parallel,
    recipes_to_come,
    skipped_optimizer_step,
    step_once_more,
    arguments_of_exports,
    time_of_exports,
]
LATE = [plain_on_one_rank, set_config_on_one_rank, step_on_one_rank, watching_on_one_rank]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_difference_raises_on_every_rank(two, body):
    if two.device != "cpu":
        pytest.skip("about gloo")
    two.run(body)


def impatient(rank, body):
    """Wait for 3 s where ranks wait for 30: that they do is what is tested, not for how long."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hybridtensor.") and hasattr(module, "PATIENCE"):
            module.PATIENCE = datetime.timedelta(seconds=3)
    body(rank)


def test_a_rank_that_does_not_come(tmp_path):
    """All at once: they wait."""
    assert datetime.timedelta(seconds=30) == PATIENCE
    for body in LATE:
        (tmp_path / body.__name__).mkdir()
    with ThreadPoolExecutor(len(LATE)) as pool:
        runs = [pool.submit(run, impatient, 2, tmp_path / body.__name__, body) for body in LATE]
    for one in runs:
        one.result()


def behind(rank):
    """Let Python of rank 0 be ahead of its device, which waits for what rank 1 launches."""
    model = make("fp8")
    optimizer, parallel = torch.optim.SGD(model.parameters(), lr=0.1), DistributedDataParallel(model)
    parallel(batch()).sum().backward()
    if rank == 0:
        store = dist.distributed_c10d._get_default_store()
        with mock.patch.object(ranks, "_finish_launched", side_effect=lambda: store.wait(["launched"])):
            optimizer.step()
    else:
        time.sleep(5)  # it compiles, longer than a rank is waited for
        dist.distributed_c10d._get_default_store().set("launched", "")
        optimizer.step()


def test_a_rank_whose_python_is_behind(tmp_path):
    run(impatient, 2, tmp_path, behind)


def ahead_of_the_device(rank):
    """A device that is busy for two looks, one that never ends because a rank has left, and a capture."""
    dist.barrier()
    gpu = {"is_initialized": True, "is_current_stream_capturing": False}
    with contextlib.ExitStack() as stack:
        for name, value in gpu.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=value))
        event = stack.enter_context(mock.patch.object(torch.cuda, "Event")).return_value
        event.query.side_effect = [False, False, True]
        assert ranks.patience() == PATIENCE
        assert event.query.call_count == 3
        if rank == 0:
            event.query = mock.Mock(return_value=False)
            dist.distributed_c10d._get_default_store().set("hybridtensor/left/1", "left")
            ranks.patience()
            assert event.query.call_count > 2
            with mock.patch.object(ranks, "_who_left", side_effect=RuntimeError):
                ranks.patience()
            with mock.patch.object(ranks, "_who_left", return_value=[]), mock.patch.object(ranks, "TIMEOUT", SHORT):
                ranks.patience()
            torch.cuda.is_current_stream_capturing.return_value = True
            event.query.reset_mock()
            ranks.patience()
            event.query.assert_not_called()


def test_python_waits_for_its_device(tmp_path):
    run(ahead_of_the_device, 2, tmp_path)


def leaves(rank):
    if rank == 0:
        with RaisesSoon("checkpoint.save: rank 1 ended before"):
            checkpoint.save("unused", 1, {"model": make("fp8")})
    else:
        atexit._run_exitfuncs()  # as Python does at its end; processes of a fork server skip it


def test_a_rank_that_has_ended(tmp_path):
    run(leaves, 2, tmp_path)

"""``quartet2`` and ``nvfp4+eden`` in experts on several ranks. Oracle: one process, bitwise."""

import functools

import pytest
import torch
import torch.distributed as dist
from experts import ENDS, EXPERTS, TOKENS, Experts, Stored, offsets
from processes import generator, here
from sharding import mesh_of, of_first_rank, own_group
from tiers import covered, few
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import ExpertParallel, checkpoint
from hybridtensor.dtensor import local

WIDTH, HIDDEN = 128, 256
RECIPES = ["quartet2", "nvfp4+eden"]


def plain(kind=Experts):
    torch.manual_seed(0)
    return kind(EXPERTS, WIDTH, HIDDEN).to(here())


def tokens(step, rank=0):
    return torch.randn(TOKENS, WIDTH, generator=generator(10 * step + rank)).to(here())


def steps(model, optimizer, *, count=3):
    """Train, first accumulating two gradients of one draw, with a step in between that leaves weights as they are."""
    found = []
    for step in range(count):
        for again in range(1 if step else 2):
            y = model(tokens(step, again), offsets(ENDS[step], here()))
            y.square().mean().backward()
        found += [y.detach(), *[local(p.grad).clone() for p in model.parameters()]]
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    return found


def quantized(rank, recipe, kind):
    """Return a model that draws as if the rank were alone."""
    model = ht.quantize_(plain(kind), recipe)
    ht.set_data_parallel_group_(model, own_group(rank))
    return model


def trained(model):
    return steps(model, torch.optim.SGD(model.parameters(), lr=1.0))


def one_process(recipe, kind):
    return trained(quantized(0, recipe, kind))


@functools.cache
def trained_alone(rank, recipe, kind):
    own_group(rank)  # which ranks create together
    return of_first_rank(rank, one_process, recipe, kind)


def sharded_like_one(rank, recipe, kind, dim, resharded):
    """All ranks have the same tokens, and draw as if they were alone."""
    expected, many = trained_alone(rank, recipe, kind), quantized(rank, recipe, kind)
    placed = fully_shard(
        many, mesh=mesh_of(rank, 2), shard_placement_fn=lambda _: Shard(dim), reshard_after_forward=resharded
    )
    found, size = trained(placed), len(list(many.parameters()))
    for i, (mine, whole) in enumerate(zip(found, expected, strict=True)):
        wanted = whole if i % (size + 1) == 0 else whole.chunk(2, dim)[rank]
        assert torch.equal(mine, wanted), i
    assert len(ht.explain(placed, show=False).gathers) == size


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("recipe", "kind", "dim", "resharded"), covered(RECIPES, [Experts, Stored], [0, 1], [True, False])
)
def test_fsdp2_trains_like_one_process(two, recipe, kind, dim, resharded):
    two.run(sharded_like_one, recipe, kind, dim, resharded)


SIZES = [(20, 0, 61, 47), (0, 108, 5, 15)]  # tokens of each expert that the two ranks routed: each pair gets 128


def together(per_rank):
    """Return rows of both ranks sorted by expert."""
    pieces = [t.split(n) for t, n in zip(per_rank, SIZES, strict=True)]
    return torch.cat([piece for expert in zip(*pieces, strict=True) for piece in expert])


def apart(rows, rank):
    """Undo ``together``."""
    pieces = rows.split([n for expert in zip(*SIZES, strict=True) for n in expert])
    return torch.cat(pieces[rank::2])


def experts_on_ranks(rank, recipe, persistent):
    mesh = init_device_mesh(here(), (2,), mesh_dim_names=("ep",))
    whole, mine = (ht.quantize_(plain().bfloat16(), recipe) for _ in range(2))
    parallelize_module(mine, mesh, ExpertParallel(ends=True))
    if persistent:
        ht.quantize_(mine, recipe, persistent=True)
    ht.set_data_parallel_group_(whole, own_group(rank))
    counts = torch.tensor(SIZES, device=here())
    for step in range(2):
        given = [torch.randn(sum(n), WIDTH, generator=generator(10 * step + r)).bfloat16() for r, n in enumerate(SIZES)]
        x, own = together(given).requires_grad_(), given[rank].clone().requires_grad_()
        grad = torch.randn(x.shape, generator=generator(100 + step)).bfloat16()
        y = whole(x, counts.sum(0).cumsum(0, dtype=torch.int32))
        out = mine(own, counts[rank].cumsum(0, dtype=torch.int32))
        assert torch.equal(out, apart(y, rank))
        y.backward(grad)
        out.backward(apart(grad, rank))
        assert torch.equal(own.grad, apart(x.grad, rank))
        for p, q in zip(mine.parameters(), whole.parameters(), strict=True):
            assert torch.equal(local(p.grad), q.grad.chunk(2)[rank])
            p.grad = q.grad = None
        for model in (whole, mine):
            ht.step_(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("recipe", "persistent"), [(RECIPES[0], False), (RECIPES[1], False), (RECIPES[0], True)])
def test_experts_on_ranks_draw_as_on_one(two, recipe, persistent):
    two.run(experts_on_ranks, recipe, persistent)


def goes_on(rank, folder, recipe):
    """Training state saved from two ranks goes on, bit for bit, on two and on one."""

    def build(sharded):
        model = ht.quantize_(plain(), recipe)
        ht.set_data_parallel_group_(model, own_group(rank))
        if sharded:
            fully_shard(model, mesh=mesh_of(rank, 2))
        return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    model, optimizer = build(True)
    steps(model, optimizer, count=2)
    checkpoint.save(folder, 2, {"model": model, "optimizer": optimizer})
    expected = steps(model, optimizer, count=2)
    for sharded in (True, False):
        other, its = build(sharded)
        checkpoint.load(folder, {"model": other, "optimizer": its})
        mine = steps(other, its, count=2)
        for got, wanted in zip(mine, expected, strict=True):
            if not sharded and got.shape != wanted.shape:
                got = got.chunk(2)[rank]
            assert torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", few(RECIPES, 1))
def test_training_goes_on_from_other_ranks(two, tmp_path, recipe):
    two.run(goes_on, str(tmp_path), recipe)


def with_both(rank):
    """Two by two ranks: experts over one dimension, their shards over the other, in graphs."""
    mesh = init_device_mesh(here(), (2, 2), mesh_dim_names=("dp", "ep"))
    model = ht.quantize_(plain(), "quartet2")
    parallelize_module(model, mesh["ep"], ExpertParallel(ends=True))
    fully_shard(model, mesh=mesh["dp"])
    ht.set_mesh_(model, mesh)
    one = plain()
    x = tokens(0, rank)
    ends = offsets(ENDS[0], here())
    for run in (model, torch.compile(model, backend="aot_eager")):
        y = run(x, ends)
        assert (y - one(x, ends)).norm() < 0.3 * y.norm()
        y.square().mean().backward()
        assert all(local(p.grad).isfinite().all() for p in model.parameters())
        dist.barrier()


@pytest.mark.filterwarnings("ignore")
def test_experts_and_shards_over_ranks(four):
    four.run(with_both)

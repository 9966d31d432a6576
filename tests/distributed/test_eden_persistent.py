"""FSDP2 with persistent weights whose columnwise face is made of the rowwise one, under signs of the step, after the
gather. Oracle: weights in high precision of one process, bitwise.
"""

import functools

import loops
import pytest
import torch
from experts import EXPERTS, Experts, offsets
from loops import optimizer_of, same
from processes import generator, here
from sharding import mesh_of, of_first_rank, own_group
from tiers import few, long
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hybridtensor as ht
from hybridtensor.distributed import checkpoint
from hybridtensor.dtensor import local
from hybridtensor.quantizers.base import CastQuantizer

WIDTH, HIDDEN, TOKENS = 128, 256, 160
ENDS = (5, 60, 60, 160)


class Stored(nn.Module):
    """Experts that are stored ``[E, in, out]``."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.is_transposed = EXPERTS, True
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 11)

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.up, offs=ends)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.experts, self.stored = Experts(EXPERTS, WIDTH, WIDTH), Stored()

    def forward(self, x):
        ends = offsets(ENDS, here())
        return self.last(self.stored(self.experts(self.first(x), ends), ends))


def build(rank, *, persistent=True, sharded=True, dim=0, resharded=True):
    """Return a model that draws as if each rank were alone, and its optimizer."""
    torch.manual_seed(0)
    model = ht.quantize_(Model().to(here()), "quartet2", persistent=persistent)
    ht.set_data_parallel_group_(model, own_group(rank))
    if sharded:
        options = {"mesh": mesh_of(rank, 2), "reshard_after_forward": resharded}
        if dim:
            options["shard_placement_fn"] = lambda p: Shard(dim) if p.dim() == 3 else None
        for part in (model.experts, model.stored, model):
            fully_shard(part, **options)
    return model, optimizer_of(model, persistent)


def tokens(number):
    return torch.randn(TOKENS, WIDTH, generator=generator(number)).to(here())


steps = functools.partial(loops.steps, batch=tokens, still=(1,), weights=False)


def one_process():
    return steps(*build(0, persistent=False, sharded=False))


@functools.cache
def of_one_process(rank):
    own_group(rank)  # which ranks create together
    return of_first_rank(rank, one_process)


def like_one_process(rank, resharded, compiled):
    expected = of_one_process(rank)
    model, optimizer = build(rank, resharded=resharded)
    kept = [local(p) for p in model.parameters() if isinstance(local(p), ht.HybridTensor)]
    assert len(kept) == 6
    assert all(None in (part.rowwise, part.columnwise) for part in kept)
    run = torch.compile(model, backend="aot_eager") if compiled else None
    assert same(steps(model, optimizer, run=run), expected)
    for row in ht.explain(model, show=False).gathers:
        assert (row.forward, row.backward, row.reason) == ("rowwise, nvfp4_max256", "rowwise, nvfp4_max256", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("resharded", "compiled"), few([(True, True), (False, False), (True, False)], 2))
def test_two_ranks_train_like_one_process(two, resharded, compiled):
    two.run(like_one_process, resharded, compiled)


def goes_on(rank, folder):
    model, optimizer = build(rank)
    steps(model, optimizer, count=2)
    checkpoint.save(folder, 2, {"model": model, "optimizer": optimizer})
    expected = steps(model, optimizer, first=2, count=2)
    for sharded in (True, False):
        other, its = build(rank, sharded=sharded)
        checkpoint.load(folder, {"model": other, "optimizer": its})
        assert same(steps(other, its, first=2, count=2), expected), sharded


@pytest.mark.filterwarnings("ignore")
def test_training_goes_on_from_other_ranks(two, tmp_path):
    two.run(goes_on, str(tmp_path))


def another_recipe(rank):
    """Adds the face to local shards, and drops it again."""
    model, optimizer = build(rank)
    other, its = build(rank, sharded=False)
    for recipe in ("mxfp8", "quartet2"):
        for one in (model, other):
            ht.set_config_(one, recipe)
        kept = [local(p) for p in model.parameters() if isinstance(local(p), ht.HybridTensor)]
        assert {None in (part.rowwise, part.columnwise) for part in kept} == {recipe == "quartet2"}
        assert same(steps(model, optimizer), steps(other, its))


@pytest.mark.filterwarnings("ignore")
@long("sharded weights; tests/test_eden_persistent.py has whole ones")
def test_another_recipe_adds_and_drops_the_face(two):
    two.run(another_recipe)


def once(rank):
    """Experts, too, whose faces need no amaxes of other ranks."""
    model, _ = build(rank)
    called, faces = [], CastQuantizer.faces
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CastQuantizer, "faces", lambda self, x, **options: called.append(x) or faces(self, x, **options))
        ht.set_config_(model, "mxfp8")
    assert len(called) == 6


@pytest.mark.filterwarnings("ignore")
def test_another_recipe_quantizes_each_weight_once(two):
    two.run(once)


def rounded_at_random(rank):
    """Each expert draws by its number among all of them."""
    quantizer, values = ht.NVFP4Quantizer(rounding="stochastic"), ht.IdentityQuantizer()
    config = ht.HybridConfig(input=values, weight=quantizer, grad_output=values)
    (model, optimizer), (other, its) = build(rank), build(rank, sharded=False)
    for one in (model, other):
        ht.set_config_(one, config)
    assert len(optimizer.masters()) == len(its.masters())  # they live as long as their optimizers
    for mine, whole in zip(model.experts.parameters(), other.experts.parameters(), strict=True):
        assert torch.equal(local(mine).dequantize(), whole.dequantize().chunk(2)[rank])


@pytest.mark.filterwarnings("ignore")
def test_another_recipe_draws_as_one_process(two):
    two.run(rounded_at_random)


def cut(rank):
    with pytest.raises(ValueError, match="is cut inside a row or block"):
        build(rank, dim=1)


def test_experts_are_not_cut(two):
    two.run(cut)


def with_tensor_parallel(rank):
    """As weights in high precision that are cut alike: each part draws as if those of all ranks were concatenated."""
    mesh, found = init_device_mesh(here(), (2,), mesh_dim_names=("tp",)), []
    for persistent in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)).to(here())
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ht.quantize_(model, "quartet2", persistent=persistent)
        ht.set_mesh_(model, mesh)
        for step in range(2):
            x = tokens(step).requires_grad_()
            y = model(x)
            y.square().mean().backward()
            found.append([y.detach(), x.grad, *[local(p.grad).clone() for p in model.parameters()]])
            model.zero_grad()
            ht.step_(model)
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    assert not torch.equal(found[0][1], found[1][1])


@pytest.mark.filterwarnings("ignore")
def test_tensor_parallel(two):
    two.run(with_tensor_parallel)


def saved_with_tensor_parallel(rank, folder):
    """Parts have scales of their own: masters are saved, and each part is quantized from its master again."""
    mesh, found = init_device_mesh(here(), (2,), mesh_dim_names=("tp",)), []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)).to(here())
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        ht.set_mesh_(ht.quantize_(model, "quartet2", persistent=True), mesh)
        optimizer = optimizer_of(model)
        state = {"model": model, "optimizer": optimizer}
        if seed == 0:
            loops.steps(model, optimizer, tokens, count=1, weights=False)
            checkpoint.save(folder, 1, state)
        else:
            checkpoint.load(folder, state)
        found.append([local(weight).dequantize() for weight in (model[0].weight, model[2].weight)])
        loops.steps(model, optimizer, tokens, count=1, first=1, weights=False)
        found[-1] += [local(master).clone() for master in optimizer.masters().values()]
    assert same(*found)


@pytest.mark.filterwarnings("ignore")
def test_tensor_parallel_parts_are_saved_as_masters(two, tmp_path):
    two.run(saved_with_tensor_parallel, tmp_path)

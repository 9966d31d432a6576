"""Stages of ``torch.distributed.pipelining``: losses, gradients and state are, bit for bit, those of one process that
runs the same stages one after the other on the same microbatches.

The process is told one thing about the pipeline, by which part of the batch each stage draws random numbers: the first
with a mesh of stages, and without one the number of the rank that has the stage. The order of microbatches decides
nothing but the order in which weight gradients are added up, where every schedule has that of the microbatches: those
of one step draw the same numbers, and amaxes are maxima.
"""

import functools
import itertools
import re

import pytest
import tiers
import torch
from processes import generator, here
from sharding import of_first_rank
from tiers import covered, few
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

import hybridtensor as ht
from hybridtensor.linear import two_parts
from hybridtensor.state import TrainingRanks
from hybridtensor.state.training import layer_states
from hybridtensor.subclasses import MasterWeight, observing

WIDTH, TOKENS, STEPS = 32, 16, 2


def of_loop(rank, ranks):
    return [rank, rank + ranks]


def of_v(rank, ranks):
    return [rank, 2 * ranks - 1 - rank]


SCHEDULES = {  # which stages a rank has
    "GPipe": lambda rank, ranks: [rank],
    "1F1B": lambda rank, ranks: [rank],
    "Interleaved1F1B": of_loop,
    "InterleavedZeroBubble": of_loop,
    "ZBVZeroBubble": of_v,
    "DualPipeV": of_v,
}
IN_TWO_PARTS = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
RECIPES = ["fp8", "fp8_delayed", "nvfp4"]
MESHES = ["mesh", "no mesh"]
NAMES = ["names of the whole", "equal names"]


class MLP(nn.Module):
    """Two layers that share the cast of their input, a norm, and a bias."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_proj, self.up = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate_proj(normed)) * self.up(normed))


def make(recipe, count, names):
    """Return ``count`` stages of unlike weights, quantized before they are taken apart, or each on its own."""
    torch.manual_seed(0)
    stages = [nn.Sequential(MLP(), nn.SiLU()) for _ in range(count)]
    with torch.no_grad():
        for i, stage in enumerate(stages):
            for p in stage.parameters():
                p.mul_(1 + i / 4)  # other amaxes in each
    if names == "equal names":
        return [ht.quantize_(stage, recipe) for stage in stages]
    return list(ht.quantize_(nn.Sequential(*stages), recipe))


def data(step, microbatches, part=0):
    """Return inputs and targets of a step, for one part of the batch."""
    x, target = torch.randn(2, TOKENS * microbatches, WIDTH, generator=generator(100 * part + step)) * 4
    return x, target


def loss_of(y, target):
    return (y - target).square().mean()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def found(stages):
    """Return gradients and state of stages, by the stage and name."""
    tensors = {}
    for index, stage in stages.items():
        tensors |= {(index, name): whole(p.grad).cpu().clone() for name, p in stage.named_parameters()}
        tensors |= {(index, name): b.cpu().clone() for name, b in stage.named_buffers()}
    return tensors


def assert_same(ours, theirs):
    """Check that tensors are those of the other dictionary, bit for bit."""
    for key, tensor in ours.items():
        assert torch.equal(tensor, theirs[key]), (key, tensor, theirs[key])


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@functools.cache
def one_process(recipe, parts, names, microbatches, batches=1):
    """Return losses, and what ``found`` returns, of each step in one process.

    Args:
        recipe: The recipe.
        parts: Which part of the batch each stage draws random numbers for, with one batch.
        names: See ``make``.
        microbatches: Of each batch.
        batches: How many ranks have a batch of their own, whose gradients are averaged.
    """
    stages, steps = make(recipe, len(parts), names), []
    model = nn.ModuleList(stages)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        grads, losses = [], []
        for batch in range(batches):
            for stage, part in zip(stages, parts, strict=True):
                for state in layer_states(stage):
                    state.ranks = TrainingRanks((), part + batch, named=True)
            model.zero_grad()
            for x, target in zip(*(t.chunk(microbatches) for t in data(step, microbatches, batch)), strict=True):
                for stage in stages:
                    x = stage(x)
                losses.append(loss_of(x, target))
                losses[-1].backward()
            grads.append([p.grad / microbatches for p in model.parameters()])
        for p, *parts_of_grad in zip(model.parameters(), *grads, strict=True):
            p.grad = sum(parts_of_grad) / batches
        optimizer.step()
        if layer_states(model):  # else it would wait for the other ranks
            ht.step_(model)
        steps.append((torch.stack(losses).detach().cpu(), found(dict(enumerate(stages)))))
    return steps


def computed_once(rank, *args):
    """Return what ``one_process`` does, on every rank."""
    return of_first_rank(rank, one_process, *args)


@functools.cache
def pipeline_mesh(*shape):
    return init_device_mesh(here(), shape, mesh_dim_names=("pp", "dp")[: len(shape)])


def pipelined(schedule, modules, count, microbatches, group=None):
    """Return a schedule of stages, by their index."""
    device = torch.empty(0).device
    stages = [PipelineStage(module, index, count, device, group=group) for index, module in modules.items()]
    kind = get_schedule_class(schedule)
    single = schedule in ("GPipe", "1F1B")
    return kind(stages[0] if single else stages, microbatches, loss_fn=loss_of)


BEFORE_TORCH_213 = "needs torch 2.13: before, a backward in two parts raises, as another test here shows"
in_two_parts = pytest.mark.skipif(two_parts._nodes_go(), reason=BEFORE_TORCH_213)


def require_torch_for(schedule):
    if schedule in IN_TWO_PARTS and two_parts._nodes_go():
        pytest.skip(BEFORE_TORCH_213)


def run_step(schedule, modules, count, step, microbatches, batch=0):
    """Run one step of a schedule, and return the losses, if this rank has the last stage."""
    x, target = data(step, microbatches, batch)
    losses = []
    last = {"target": target, "losses": losses} if count - 1 in modules else {}
    schedule.step(*([x] if 0 in modules else []), **last)
    return torch.stack(losses).detach().cpu() if losses else None


def trains(rank, ranks, schedule, recipe, mesh, names):
    """Train on every rank its stages, and compare with one process."""
    place, microbatches = SCHEDULES[schedule], 2 * ranks if schedule == "DualPipeV" else 4
    owners = {index: owner for owner in range(ranks) for index in place(owner, ranks)}
    count = len(owners)
    parts = tuple(0 if mesh == "mesh" else owners[index] for index in range(count))
    expected = computed_once(rank, recipe, parts, names, microbatches)
    every = make(recipe, count, names)
    modules = {index: every[index] for index in place(rank, ranks)}
    model = nn.ModuleList(modules.values())
    if mesh == "mesh":
        ht.set_mesh_(model, pipeline_mesh(ranks))
    optimizer = optimizer_of(model.parameters())
    runs = pipelined(schedule, modules, count, microbatches)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = run_step(runs, modules, count, step, microbatches)
        optimizer.step()
        ht.step_(model)
        assert losses is None or torch.equal(losses, expected[step][0]), (step, losses, expected[step][0])
        assert_same(found(modules), expected[step][1])


@pytest.mark.parametrize(("schedule", "recipe", "mesh", "names"), covered(list(SCHEDULES), RECIPES, MESHES, NAMES))
def test_two_ranks_train_as_one_process(schedule, recipe, mesh, names, two):
    require_torch_for(schedule)
    two.run(trains, 2, schedule, recipe, mesh, names)


FOUR = [
    ("1F1B", "fp8_delayed", "no mesh", "equal names"),
    ("GPipe", "nvfp4", "mesh", "names of the whole"),
    ("ZBVZeroBubble", "fp8", "no mesh", "names of the whole"),
]


@pytest.mark.parametrize(
    ("schedule", "recipe", "mesh", "names"),
    list(itertools.product(SCHEDULES, RECIPES, MESHES, NAMES)) if tiers.LONG else FOUR,
)
def test_four_ranks_train_as_one_process(schedule, recipe, mesh, names, four):
    require_torch_for(schedule)
    four.run(trains, 4, schedule, recipe, mesh, names)


def trains_in_a_wrapper(rank):
    """What the pipeline runs, as DDP or ``torch.compile`` wrap it, and what steps contain a stage, not each other."""
    recipe, microbatches = "fp8_delayed", 4
    expected = computed_once(rank, recipe, (0, 1), NAMES[1], microbatches)
    stage = make(recipe, 2, NAMES[1])[rank]
    model, wrapped = nn.ModuleList([stage]), {rank: nn.Sequential(stage)}
    optimizer = optimizer_of(model.parameters())
    runs = pipelined("1F1B", wrapped, 2, microbatches)
    for step in range(STEPS):
        optimizer.zero_grad()
        run_step(runs, wrapped, 2, step, microbatches)
        optimizer.step()
        ht.step_(model)
        assert_same(found({rank: stage}), expected[step][1])


def test_a_stage_in_a_wrapper_uses_its_own_amaxes(two):
    two.run(trains_in_a_wrapper)


def exports_a_stage(rank, folder):
    """The first rank alone would write, and the other stage would be in no file."""
    stage = make("fp8", 2, NAMES[1])[rank]
    runs = pipelined("1F1B", {rank: stage}, 2, 4)
    calls = {
        "export_safetensors": lambda: ht.export_safetensors(stage, f"{folder}/{rank}.safetensors"),
        "export_pretrained": lambda: ht.export_pretrained(stage, f"{folder}/{rank}"),
        "inference_tensors": lambda: list(ht.inference_tensors(stage, ranks="first")),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"{name}: Sequential is a stage of a pipeline"):
            call()
    assert dict(ht.inference_tensors(stage))
    del runs


def test_a_stage_is_not_exported_as_a_whole_model(two, tmp_path):
    two.run(exports_a_stage, str(tmp_path))
    assert not list(tmp_path.iterdir())


# -- several ranks with the same stage


def trains_parts(rank, schedule, recipe):
    """Two ranks of each stage have a batch each, and FSDP2 shards their weights."""
    mesh, microbatches = pipeline_mesh(2, 2), 4
    number, batch = rank // 2, rank % 2
    indices = SCHEDULES[schedule](number, 2)
    count = 2 * len(indices)
    expected = computed_once(rank, recipe, (0,) * count, NAMES[0], microbatches, 2)
    every = make(recipe, count, NAMES[0])
    modules = {index: fully_shard(every[index], mesh=mesh["dp"]) for index in indices}
    model = ht.set_mesh_(nn.ModuleList(modules.values()), mesh)
    optimizer = optimizer_of(model.parameters())
    runs = pipelined(schedule, modules, count, microbatches, mesh.get_group("pp"))
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = run_step(runs, modules, count, step, microbatches, batch)
        optimizer.step()
        ht.step_(model)
        mine = expected[step][0].chunk(2)[batch]
        assert losses is None or torch.equal(losses, mine), (step, losses, mine)
        assert_same(found(modules), expected[step][1])


SHARDED = [("InterleavedZeroBubble", "fp8_delayed"), ("1F1B", "fp8"), ("DualPipeV", "nvfp4"), ("GPipe", "fp8_delayed")]


@pytest.mark.parametrize(("schedule", "recipe"), few(SHARDED, 1))
def test_stages_that_fsdp2_shards_train_as_one_process(schedule, recipe, four):
    require_torch_for(schedule)
    four.run(trains_parts, schedule, recipe)


def stepped_without_a_mesh(rank):
    group = pipeline_mesh(2, 2).get_group("pp")
    module = make("fp8_delayed", 2, NAMES[1])[rank // 2]
    schedule = pipelined("GPipe", {rank // 2: module}, 2, 2, group)
    run_step(schedule, {rank // 2: module}, 2, 0, 2)
    with pytest.raises(
        RuntimeError, match=r"step_: 2 of 4 ranks run the pipeline of layer 0.gate_proj, and no mesh .*; call set_mesh_"
    ):
        ht.step_(module)


def test_ranks_with_the_same_stage_need_a_mesh(four):
    four.run(stepped_without_a_mesh)


# -- what a stage does besides


def recorded_in_one_step(rank):
    """Run a step without ``step_``: a stage runs forward once more than it has microbatches."""
    recipe, microbatches, calls = "fp8_delayed", 4, []
    modules = {rank: make(recipe, 2, NAMES[0])[rank]}
    modules[rank].register_forward_hook(lambda *_: calls.append(1))
    run_step(pipelined("1F1B", modules, 2, microbatches), modules, 2, 0, microbatches)
    assert len(calls) == microbatches + 1
    expected = make(recipe, 2, NAMES[0])
    for x, target in zip(*(t.chunk(microbatches) for t in data(0, microbatches)), strict=True):
        loss_of(expected[1](expected[0](x)), target).backward()
    for ours, theirs in zip(*(layer_states(m) for m in (modules[rank], expected[rank])), strict=True):
        assert torch.equal(ours.amax, theirs.amax), (ours.name, ours.amax, theirs.amax)


def test_shape_inference_records_no_amaxes(two):
    two.run(recorded_in_one_step)


def plain_and_delayed(rank):
    """Train one stage without state, and one with delayed scales, without a mesh."""
    modules = {rank: make("fp8_delayed" if rank else "bf16", 2, NAMES[1])[rank]}
    schedule = pipelined("GPipe", modules, 2, 2)
    for step in range(2):
        run_step(schedule, modules, 2, step, 2)
        ht.step_(modules[rank])
    assert rank == 0 or all(state.encode_scale.ne(1).all() for state in layer_states(modules[1]))


def test_a_stage_without_state_waits_for_none(two):
    two.run(plain_and_delayed)


# -- backward in two parts, as zero-bubble schedules run it


class Products:
    """An observer that notes which products run."""

    def __init__(self):
        self.found = []

    def observe_operand(self, *_):
        pass

    def observe_product(self, layer, gemm, *_):
        self.found.append(gemm)

    def taken(self):
        """Return the products since the last call."""
        found, self.found = self.found, []
        return found


@pytest.fixture
def products():
    seen = Products()
    observing.observers.append(seen)
    yield seen
    observing.observers.remove(seen)


def in_one(stage, y, grad, x):
    y.backward(grad)


def in_two(stage, y, grad, x, after_input=lambda: None):
    _, groups = stage_backward_input([y], [grad], [x], stage.parameters())
    after_input()
    stage_backward_weight(stage.parameters(), groups)


def backward_of(stage, run, microbatches=4, steps=2):
    """Run steps of microbatches by a kind of backward, and return what ``found`` does with the inputs' gradients."""
    tensors = {}
    for step in range(steps):
        stage.zero_grad()
        grads = []
        xs = [x.clone().requires_grad_() for x in data(step, microbatches)[0].chunk(microbatches)]
        for x, y in [(x, stage(x)) for x in xs]:
            run(stage, y, torch.full_like(y, 1e-3), x)
            grads.append(x.grad)
        ht.step_(stage)
        with torch.no_grad():
            torch._foreach_mul_(list(stage.parameters()), 1.01)
        tensors |= {(step, key): t for key, t in found({0: stage}).items()} | {(step, "x"): torch.stack(grads)}
    return tensors


TWO_PARTS = [
    "fp8",
    "fp8_delayed",
    "nvfp4",
    "fp8_delayed/fp8_delayed/mxfp8",
    "mxfp8+dequantized",
    "bf16/fp8/fp8_delayed",
]


@pytest.mark.parametrize("recipe", TWO_PARTS)
@in_two_parts
def test_backward_in_two_parts_gives_the_same(recipe):
    """Gradients and state are those of one backward."""
    ours, theirs = (backward_of(make(recipe, 1, NAMES[1])[0], run) for run in (in_two, in_one))
    assert ours.keys() == theirs.keys()
    assert_same(ours, theirs)


@in_two_parts
def test_each_part_of_backward_runs_its_own_products(products):
    stage = make("fp8_delayed", 1, NAMES[1])[0]
    x = data(0, 1)[0].requires_grad_()
    y, layers = stage(x), 3
    assert products.taken() == ["output"] * layers
    first = []
    in_two(stage, y, torch.ones_like(y), x, lambda: first.extend(products.taken()))
    assert first == ["grad_input"] * layers
    assert products.taken() == ["grad_weight"] * layers


@in_two_parts
def test_backward_in_two_parts_casts_weights_as_often(monkeypatch):
    """Faces that several microbatches use outlast the parts of each."""
    casts, cast = [], MasterWeight.quantized
    monkeypatch.setattr(MasterWeight, "quantized", lambda self, *a, **k: casts.append(1) or cast(self, *a, **k))
    counts = []
    for run in (in_one, in_two):
        backward_of(make("fp8", 1, NAMES[1])[0], run)
        counts.append(len(casts))
        casts.clear()
    assert counts[0] == counts[1]


def test_a_torch_that_frees_nodes_before_the_second_part_is_named(monkeypatch):
    """Up to torch 2.12 the second part of any autograd function fails inside of torch."""
    if not two_parts._nodes_go():
        monkeypatch.setattr(two_parts, "_nodes_go", lambda: True)
    stage = make("fp8", 1, NAMES[1])[0]
    x = data(0, 1)[0].requires_grad_()
    y = stage(x)
    grad_x = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]  # no pipeline: as ever
    in_one(stage, y, torch.ones_like(y), x)
    assert torch.equal(x.grad, grad_x)
    with pytest.raises(RuntimeError) as raised:  # torch 2.13 wraps what a backward raises
        in_two(stage, stage(x), torch.ones_like(y), x)
    error = raised.value.__cause__ or raised.value
    assert isinstance(error, NotImplementedError)
    assert re.search(r"linear: .* the backward of layer \d.*Interleaved1F1B, or torch 2.13", str(error))

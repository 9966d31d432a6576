"""Accelerate: state advances with the steps that the optimizer really takes, on one process, DDP and FSDP2.

Oracle: the same loop by hand on one process, over the whole batch.
"""

import copy
import os
import warnings

import processes
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hybridtensor as ht

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make test-integrations")
from hybridtensor.integrations.accelerate import prepare  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages
STEPS, MICROBATCHES = 4, 2


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its state for the whole process, and in its environment."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make(ranks=1):
    """Return a model, and an optimizer that undoes the mean over ranks: gradients are those of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.SiLU(), nn.Linear(64, 64, bias=False))
    return model, torch.optim.SGD(model.parameters(), lr=0.1 * ranks)


def batch(step, rank, ranks):
    whole = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
    return whole.chunk(ranks)[rank]


def loss_of(model, rows):
    return model(rows).square().sum() / 2048


def by_hand(recipe):
    model, optimizer = make()
    ht.quantize_(model, recipe)
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            rows = batch(MICROBATCHES * step + microbatch, 0, 1)
            (loss_of(model, rows) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
    return model


def accelerated(recipe, rank=0, ranks=1, **options):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICROBATCHES, **options)
    if options:  # Accelerate shards on accelerators only
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = options["fsdp_plugin"]
    model, optimizer = prepare(accelerator, *make(ranks), recipe=recipe)
    for step in range(MICROBATCHES * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch(step, rank, ranks)))
            optimizer.step()
            optimizer.zero_grad()
    return model


def values(parameter):
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return parameter.dequantize().detach() if ht.subclasses.is_converted(parameter) else parameter.detach()


def states(model):
    return [module for module in model.modules() if isinstance(module, ht.LayerState)]


def check(model, recipe, tolerance):
    """Compare with the loop by hand: what was learned, and the states, which count steps and not microbatches."""
    expected = by_hand(recipe)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (values(mine) - values(theirs)).norm() <= tolerance * values(theirs).norm()
    own, other = states(model), states(expected)
    assert len(own) == len(other)
    for mine, theirs in zip(own, other, strict=True):
        assert mine.name == theirs.name
        for a, b in zip(mine.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        if mine.rounding is not None:
            assert mine.rounding[1] == STEPS
    if recipe == "fp8_delayed":
        assert all((state.encode_scale != 1).all() for state in own)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_one_process_is_the_loop_by_hand(recipe):
    check(accelerated(recipe), recipe, tolerance=0.0)


@pytest.mark.parametrize("masters", [False, True], ids=["plain", "masters"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp8", "nvfp4"])
def test_saved_persistent_weights_train_on(recipe, masters, tmp_path):
    """Bit for bit, from the plain values in the files that ``save_state`` writes by default."""
    accelerator = accelerate.Accelerator(cpu=True)
    model = ht.quantize_(make()[0].bfloat16(), recipe, persistent=True)
    kind, options = torch.optim.AdamW, {"lr": 1e-2}
    optimizer = (
        ht.optim.MasterWeights(kind, model.parameters(), **options) if masters else kind(model.parameters(), **options)
    )
    ht.step_after(optimizer, model)
    model, optimizer = accelerator.prepare(model, optimizer)

    def train(steps, seed):
        torch.manual_seed(seed)
        for _ in range(steps):
            accelerator.backward(model(torch.randn(16, 64, dtype=torch.bfloat16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [weight.dequantize() for weight in model.parameters()]

    train(3, 0)
    accelerator.save_state(tmp_path)
    expected = train(3, 1)
    accelerator.load_state(tmp_path)
    assert all(map(torch.equal, train(3, 1), expected))


def on_two_ranks(rank, kind):
    warnings.simplefilter("ignore")  # of Accelerate
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # the group is there already
    for recipe in ("fp8", "fp8_delayed", "nvfp4"):
        plugin = {"fsdp_plugin": sharding(recipe == "fp8")} if kind == "fsdp2" else {}
        model = accelerated(recipe, rank, 2, **plugin)
        wrapped = {"ddp": nn.parallel.DistributedDataParallel, "fsdp2": torch.distributed.fsdp.FSDPModule}
        assert isinstance(model, wrapped[kind])
        # each rank measures its own part of an input, and draws for itself: as in any data parallel run
        check(model, recipe, tolerance=2**-5)


def sharding(on_one_rank):
    return accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
        cpu_ram_efficient_loading=on_one_rank,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks(kind, tmp_path):
    processes.run(on_two_ranks, 2, tmp_path, kind)


def test_loading_on_one_rank_is_refused_for_recipes_with_state():
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = sharding(True)
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(NotImplementedError, match="cpu_ram_efficient_loading=False is required"):
        prepare(accelerator, model, recipe="nvfp4")
    assert type(model[0].weight) is nn.Parameter


def test_one_model():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ValueError, match="one model is required, got 2"):
        prepare(accelerator, nn.Linear(4, 4), nn.Linear(4, 4), recipe="fp8")
    assert isinstance(prepare(accelerator, nn.Linear(16, 16), recipe="fp8").weight, ht.MasterWeight)
    with pytest.raises(TypeError, match="an Accelerator is required"):
        prepare(nn.Linear(4, 4), recipe="fp8")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_are_quantized(tmp_path, where, recipe, persistent):
    """Accelerate puts other parameters at each layer for its forward: the layer quantizes what it gets.

    Oracle: the same model that is not offloaded, bitwise; on disk persistent weights are what their faces hold.
    """
    model = ht.quantize_(make()[0], recipe, persistent=persistent)
    x, twin = batch(0, 0, 1), copy.deepcopy(model)
    with torch.no_grad():
        if where == "disk":
            for layer in twin if persistent else ():
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(layer.weight.dequantize())
            accelerate.disk_offload(model, tmp_path, execution_device="cpu")
        else:
            accelerate.cpu_offload(model, execution_device="cpu")
        assert model[0].weight.is_meta
        for _ in range(2):
            assert torch.equal(model(x), twin(x))


def test_an_iterator_of_names_keeps_these_layers_plain():
    """As with ``quantize_`` itself: the arguments are also looked at before they are passed on."""
    model = prepare(accelerate.Accelerator(cpu=True), make()[0], recipe="fp8", keep_bf16=iter(["0"]))
    by_hand = ht.quantize_(make()[0], "fp8", keep_bf16=iter(["0"]))
    assert [type(p) for p in model.parameters()] == [type(p) for p in by_hand.parameters()]
    assert type(model[0].weight) is nn.Parameter

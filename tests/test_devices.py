"""Models over two GPUs of one process, and on a GPU that is not the current one, train bitwise as on one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from experts import Experts
from torch import nn

import hybridtensor as ht
from hybridtensor.optim import MasterWeights
from hybridtensor.recipes import RECIPES
from hybridtensor.state.training import on_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
    pytest.mark.filterwarnings("default"),  # compiling for a GPU, torch warns of its own settings
]
WIDTH, TOKENS = 128, 96
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
ONE, SPREAD, OTHER = (FIRST, FIRST), (FIRST, SECOND), (SECOND, SECOND)
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one process")
FEW = ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]


def batch(step):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()


class Block(nn.Module):
    """A norm, three layers that read what it returns, one that reads theirs, and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=i == 3) for i in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x.to(self.norm.device)
        y = self.normed(x)
        x = x + self.out(self.q(y) * self.k(y) + self.v(y))
        return x + self.down(self.activated(self.gate(x), self.up(x)))

    def normed(self, x):
        return F.rms_norm(x, (WIDTH,), self.norm, 1e-5)

    def activated(self, gate, up):
        return F.relu(gate) * up


class Fused(Block):
    """The same with the norm and the activation of this package."""

    def normed(self, x):
        return ht.rms_norm(x, self.norm, 1e-5)

    def activated(self, gate, up):
        return ht.swiglu(gate, up)


class Routed(nn.Module):
    """Experts of tokens that are sorted."""

    def __init__(self):
        super().__init__()
        self.experts = Experts(4, WIDTH, WIDTH)

    def forward(self, x):
        x = x.to(self.experts.w1.device)
        return x + self.experts(x, torch.tensor([32, 32, 80, 96], dtype=torch.int32, device=x.device))


def model_of(recipe, devices, kind=Block, **options):
    """Return two blocks for each device, with the same values wherever they are."""
    torch.manual_seed(0)
    blocks = [kind().to(devices[i // 2], torch.bfloat16) for i in range(4)]
    return ht.quantize_(nn.Sequential(*blocks), recipe, **options)


def optimizer_of(model, persistent=False):
    if persistent:
        return MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, devices, optimizer=None, forward=None, steps=4, first=0):
    """Return the losses, and the parameters after some steps, on a CPU."""
    optimizer = optimizer or optimizer_of(model)
    losses = []
    for step in range(first, first + steps):
        x = batch(step).to(devices[0]).requires_grad_()
        loss = (forward or model)(x).float().square().mean()
        loss.backward()
        losses.append((loss.item(), x.grad.cpu()))
        optimizer.step()
        ht.step_(model)
        optimizer.zero_grad()
    return losses, [p.detach().cpu() for p in model.parameters()]


def plain_values(trained):
    losses, parameters = trained
    values = [p.dequantize() if isinstance(p, ht.HybridTensor) else p for p in parameters]
    return [loss for loss, _ in losses], [*(g for _, g in losses), *values]


def assert_same(mine, theirs):
    (losses, tensors), (other_losses, others) = plain_values(mine), plain_values(theirs)
    assert losses == other_losses
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@TWO
@pytest.mark.parametrize("devices", [SPREAD, OTHER], ids=["spread", "other"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_every_recipe(recipe, devices):
    assert_same(train(model_of(recipe, devices), devices), train(model_of(recipe, ONE), ONE))


@TWO
@pytest.mark.parametrize("kind", [Fused, Routed])
@pytest.mark.parametrize("devices", [SPREAD, OTHER], ids=["spread", "other"])
@pytest.mark.parametrize("recipe", FEW)
def test_fused_norms_and_activations_and_experts(recipe, devices, kind):
    mine, theirs = (model_of(recipe, where, kind) for where in (devices, ONE))
    assert_same(train(mine, devices), train(theirs, ONE))


@TWO
@pytest.mark.parametrize("devices", [SPREAD, OTHER], ids=["spread", "other"])
@pytest.mark.parametrize("recipe", FEW)
def test_persistent(recipe, devices):
    def run(where):
        model = model_of(recipe, where, persistent=True)
        return train(model, where, optimizer_of(model, persistent=True))

    assert_same(run(devices), run(ONE))


@TWO
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("devices", [SPREAD, OTHER], ids=["spread", "other"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_block", "nvfp4"])
def test_compiled_by_block(recipe, devices):
    def run(where):
        model = model_of(recipe, where)
        for block in model:
            block.compile(backend="aot_eager")
        return train(model, where)

    assert_same(run(devices), run(ONE))


class Layers(nn.Sequential):
    """Layers with nothing that Inductor could round differently."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 256, bias=False), nn.ReLU(), nn.Linear(256, WIDTH, bias=False))

    def forward(self, x):
        return super().forward(x.to(self[0].weight.device))


@TWO
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_block", "mxfp8"])
def test_inductor(recipe, whole):
    def run(where):
        torch._dynamo.reset()
        model = model_of(recipe, where, kind=Layers)
        for part in [model] if whole else model:
            part.compile(fullgraph=True)
        return train(model, where)

    here = train(model_of(recipe, ONE, kind=Layers), ONE)
    for where in (ONE, OTHER, SPREAD):
        assert_same(run(where), here)


@pytest.mark.parametrize("second", [pytest.param(SECOND, marks=TWO), torch.device("cpu")], ids=str)
@pytest.mark.parametrize("persistent", [False, True], ids=["master", "persistent"])
@pytest.mark.parametrize("recipe", FEW)
def test_a_part_that_moves_between_steps(recipe, persistent, second):
    """Its weights are no more cast with those that stay. Oracle: a model that is there when it gets the same state."""
    model, devices = model_of(recipe, ONE, persistent=persistent), (FIRST, second)
    train(model, ONE, optimizer_of(model, persistent), steps=2)
    model[2:].to(second)
    fresh = model_of(recipe, devices, persistent=persistent)
    fresh.load_state_dict(model.state_dict())
    mine, theirs = (train(net, devices, optimizer_of(net, persistent), first=2) for net in (model, fresh))
    assert_same(mine, theirs)


@TWO
@pytest.mark.parametrize("recipe", FEW)
def test_copies_and_state_dicts(recipe):
    model, whole = model_of(recipe, SPREAD), model_of(recipe, ONE)
    train(model, SPREAD), train(whole, ONE)
    expected = train(copy.deepcopy(whole), ONE, first=4)
    loaded = model_of(recipe, OTHER)
    loaded.load_state_dict(model.state_dict())
    assert_same(train(loaded, OTHER, first=4), expected)
    assert_same(train(copy.deepcopy(model), SPREAD, first=4), expected)


@TWO
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_block", "nvfp4"])
def test_checks_reports_and_exports(recipe, tmp_path):
    models = model_of(recipe, SPREAD), model_of(recipe, ONE)
    reports = [str(ht.check(model, batch(0).to(FIRST))) for model in models]
    assert reports[0] == reports[1]
    assert str(ht.explain(models[0])) == str(ht.explain(models[1]))
    files = []
    for i, model in enumerate(models):
        ht.distributed.checkpoint.save(tmp_path / f"run{i}", 1, {"model": model})
        if recipe != "fp8_delayed":
            ht.export_pretrained(model, tmp_path / f"out{i}")
            files.append(b"".join(p.read_bytes() for p in sorted((tmp_path / f"out{i}").glob("*.safetensors"))))
    assert files[:1] == files[1:]


@TWO
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_offloaded(recipe):
    def run(where):
        model = model_of(recipe, where)
        with ht.offload.offload_activations(model, min_bytes=1):
            return train(model, where)

    assert_same(run(SPREAD), run(ONE))


@TWO
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_watched(recipe):
    def run(where):
        model = model_of(recipe, where)
        with ht.watch(model, every=2) as watched:
            train(model, where)
        return [repr(sample.scalars()) for sample in watched.samples]

    assert run(OTHER) == run(ONE)


@TWO
def test_the_host_sees_flags_once_they_are_there():
    on_host(torch.ones(8, device=SECOND) > 0)  # the first pinned memory of a process may take longer than what follows
    with torch.cuda.device(SECOND):
        torch.cuda._sleep(10**9)  # half a second
        flags = torch.ones(8, device=SECOND)
    made, are_there = on_host(flags > 0)
    assert not are_there()
    torch.cuda.synchronize(SECOND)
    assert are_there()
    assert made.all()


@TWO
def test_watch_says_that_it_cannot():
    with (
        pytest.raises(NotImplementedError, match="watch: the model is on several devices"),
        ht.watch(model_of("fp8", SPREAD)),
    ):
        pass


@TWO
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "nvfp4"])
def test_a_scale_in_common_over_devices(recipe):
    groups = [("*.q", "*.k", "*.v")]
    mine, theirs = (model_of(recipe, where, common_scale=groups) for where in (SPREAD, ONE))
    assert_same(train(mine, SPREAD), train(theirs, ONE))


@TWO
@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_block", "nvfp4"])
def test_a_captured_step_on_the_other_device(recipe):
    def run(where):
        with torch.cuda.device(where[0]):
            model = model_of(recipe, where)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
            x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, device=where[0])

            def step():
                model(x).float().square().mean().backward()
                optimizer.step()
                ht.step_(model)
                optimizer.zero_grad(set_to_none=False)

            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for i in range(3):
                    x.copy_(batch(i))
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # The stream that torch captures on by default is of the device that is captured on first
            with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
                step()
        for i in range(3, 6):
            x.copy_(batch(i))
            graph.replay()
        return [p.detach().cpu() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(OTHER), run(ONE), strict=True))


@TWO
def test_data_parallel_raises():
    parallel = nn.DataParallel(model_of("fp8", ONE))
    with pytest.raises(ValueError, match=r"operands on one device are required.*in place of nn\.DataParallel"):
        parallel(batch(0).to(FIRST))

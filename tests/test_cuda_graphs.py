"""CUDA graphs, made by torch.compile or by hand: replays train as eager steps do, with other data and moving weights.

The models hold nothing that inductor could round differently, so that equality is of bits.
"""

import copy
import functools
import importlib
import sys
import time

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_trees

import hybridtensor as ht
from hybridtensor.ops import amaxes
from hybridtensor.ops.kernel_library import Launch
from hybridtensor.optim import MasterWeights
from hybridtensor.testing import random_tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device"),
    pytest.mark.filterwarnings("default"),  # compiling for a GPU, torch warns of its own settings
]
DEVICE, TOKENS, FEATURES = "cuda", 64, 128
FEW = ["fp8", "fp8_delayed", "fp8_block", "nvfp4"]


class Training:
    """A model with its optimizer, and input, output and gradient at fixed addresses."""

    def __init__(self, recipe, persistent=False, **compile_options):
        torch.manual_seed(0)
        layers = nn.Linear(FEATURES, 256, bias=False), nn.ReLU(), nn.Linear(256, FEATURES, bias=False)
        self.net = ht.quantize_(nn.Sequential(*layers).to(DEVICE, torch.bfloat16), recipe, persistent=persistent)
        self.forward = torch.compile(self.net, fullgraph=True, **compile_options) if compile_options else self.net
        options = {"lr": 1e-3, "capturable": DEVICE == "cuda"}
        parameters = list(self.net.parameters())
        self.optimizer = (
            MasterWeights(torch.optim.AdamW, parameters, **options)
            if persistent
            else torch.optim.AdamW(parameters, **options)
        )
        made = (torch.zeros(TOKENS, FEATURES, dtype=torch.bfloat16, device=DEVICE) for _ in range(4))
        self.x, self.g, self.y, self.dx = made
        self.x.requires_grad_()

    def fill(self, seed):
        """Put other data where the step reads it."""
        with torch.no_grad():
            for i, tensor in enumerate((self.x, self.g)):
                tensor.copy_(random_tensor(TOKENS, FEATURES, seed=seed + 100 * i))

    def step(self, tokens=TOKENS, microbatches=1, advance=True):
        """Train one step: with the first ``tokens``, in ``microbatches`` of equal size; ``advance`` calls ``step_``."""
        self.optimizer.zero_grad()
        self.x.grad = None
        for x, g, out in zip(*(t[:tokens].chunk(microbatches) for t in (self.x, self.g, self.y)), strict=True):
            y = self.forward(x)
            y.backward(g)
            with torch.no_grad():
                out.copy_(y)
        with torch.no_grad():
            self.dx.copy_(self.x.grad)  # a graph of another length has a gradient of its own
        self.optimizer.step()
        if advance:
            ht.step_(self.net)

    def results(self):
        """Return copies of what a step computed, weights and states among it."""
        states = [b for b in self.net.buffers()]
        weights = [p.detach().dequantize() for p in self.net.parameters()]
        return [t.clone() for t in (self.y, self.dx, *weights, *states)]


def warm_up(step):
    """Run three steps on the side, which allocate what is allocated once, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)


def capture(step, pool=None):
    """Return a graph of a step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph


def assert_equal(one, other):
    for a, b in zip(one.results(), other.results(), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "persistent"), [*((name, False) for name in ht.recipes.RECIPES), ("fp8", True), ("fp8_delayed", True)]
)
def test_replays_of_a_captured_step_equal_eager_steps(recipe, persistent):
    """Forward, backward, optimizer and ``step_`` are all in the graph."""
    eager, captured = Training(recipe, persistent), Training(recipe, persistent)
    for training in (eager, captured):
        training.fill(0)
    for _ in range(3):
        eager.step()
    warm_up(captured.step)
    graph = capture(captured.step)
    for seed in range(1, 5):
        eager.fill(seed)
        eager.step()
        captured.fill(seed)
        graph.replay()
        assert_equal(eager, captured)
        with torch.no_grad():  # no face that this keeps may be used after the next replay
            assert torch.equal(eager.net(eager.x), captured.net(captured.x))


@pytest.mark.parametrize("recipe", FEW)
def test_a_captured_step_may_have_microbatches(recipe):
    """Gradients add up, and amaxes of all microbatches count."""
    eager, captured = Training(recipe), Training(recipe)
    steps = [functools.partial(training.step, microbatches=2) for training in (eager, captured)]
    for training in (eager, captured):
        training.fill(0)
    for _ in range(3):
        steps[0]()
    warm_up(steps[1])
    graph = capture(steps[1])
    for seed in range(1, 4):
        eager.fill(seed)
        steps[0]()
        captured.fill(seed)
        graph.replay()
        assert_equal(eager, captured)


@pytest.mark.parametrize("recipe", FEW)
def test_a_capture_may_load_kernels(recipe):
    """The first launch of a kernel in a process is part of the graph."""
    layer = ht.quantize_(nn.Linear(384, 128, device=DEVICE, dtype=torch.bfloat16), recipe)
    x, g = (random_tensor(48, width, device=DEVICE, dtype=torch.bfloat16) for width in (384, 128))
    results = []

    def step():
        y = layer(x)
        results.append((y, *torch.autograd.grad(y, (x, layer.weight), g)))

    warm_up(lambda: x @ x.t())  # cuBLAS
    x.requires_grad_()
    modules = [module for name, module in sys.modules.items() if name.startswith("hybridtensor.kernels.")]
    loaded = [value.device_caches for m in modules for value in vars(m).values() if hasattr(value, "device_caches")]
    assert loaded
    for of_kernel in loaded:
        of_kernel.clear()
    graph = capture(step)
    graph.replay()
    step()
    for captured, eager in zip(*results, strict=True):
        assert torch.equal(captured, eager)


@pytest.mark.parametrize("recipe", FEW)
def test_graphs_of_several_lengths_train_one_model(recipe):
    """They share a pool of memory, and are replayed in any order, with eager steps in between."""
    eager, captured = Training(recipe), Training(recipe)
    lengths = TOKENS, TOKENS // 2
    for training in (eager, captured):
        training.fill(0)
    for tokens in lengths:
        for _ in range(3):
            eager.step(tokens)
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for tokens in lengths:
        warm_up(functools.partial(captured.step, tokens))
    for tokens in lengths:
        graphs[tokens] = capture(functools.partial(captured.step, tokens), pool)
    for seed, tokens in enumerate((TOKENS // 2, TOKENS, 16, TOKENS, TOKENS // 2, TOKENS // 2), 1):
        eager.fill(seed)
        eager.step(tokens)
        captured.fill(seed)
        if tokens in graphs:
            graphs[tokens].replay()
        else:
            captured.step(tokens)
        assert_equal(eager, captured)


@pytest.mark.parametrize("recipe", FEW)
def test_step_may_run_outside_of_the_graph(recipe):
    """As it must where ranks compare their steps, or where an amax that is not finite is to raise."""
    eager, captured = Training(recipe), Training(recipe)
    for training in (eager, captured):
        training.fill(0)
    for _ in range(3):
        eager.step()
    warm_up(captured.step)
    graph = capture(functools.partial(captured.step, advance=False))
    for seed in range(1, 5):
        eager.fill(seed)
        eager.step()
        captured.fill(seed)
        graph.replay()
        ht.step_(captured.net)
        assert_equal(eager, captured)


class Siblings(nn.Module):
    """Three layers of one input, and one of their sum."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x):
        x = x * 1.0  # which autograd records
        return self.out(self.q(x) + self.k(x) + self.v(x))


@pytest.mark.parametrize("recipe", FEW)
def test_layers_of_one_graph_share_casts(recipe, monkeypatch):
    """Of a captured step, as of an eager one, whose weights are cast one by one, too."""
    torch.manual_seed(0)
    model = ht.quantize_(Siblings().to(DEVICE, torch.bfloat16), recipe)
    x, g = (random_tensor(TOKENS, FEATURES, device=DEVICE, seed=seed) for seed in (0, 1))
    counted, start = [], Launch.start

    def count(self, *taken):
        counted.append(self)
        return start(self, *taken)

    def step():
        counted.clear()
        model(x).backward(g)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad = None
                parameter.mul_(1.0)

    x.requires_grad_()
    weight_operands = importlib.import_module("hybridtensor.linear.weight_operands")
    monkeypatch.setattr(weight_operands, "bucket_of", lambda weight: None)
    monkeypatch.setattr(Launch, "start", count)
    for _ in range(3):
        step()
    in_eager_code = len(counted)
    capture(step)
    assert len(counted) == in_eager_code


@pytest.mark.parametrize(("recipe", "commits"), [("fp8", False), ("fp8_delayed", True), ("fp8+keep_faces", False)])
def test_fills_and_commits_of_amaxes_do_not_grow_with_layers(recipe, commits):
    """Zeros for all layers are filled together, and what layers recorded is committed together."""
    x, g = (random_tensor(TOKENS, FEATURES, device=DEVICE, seed=seed) for seed in (0, 1))

    def fills_and_maxima(layers):
        chain = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(layers)))
        model = ht.quantize_(chain.to(DEVICE, torch.bfloat16), recipe)

        def step():
            model(x).backward(g)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0)

        warm_up(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            capture(step)
        found = {event.key: event.count for event in profile.key_averages()}
        return {name: found.get(f"aten::{name}", 0) for name in ("zero_", "fill_", "maximum", "_foreach_maximum_")}

    x.requires_grad_()
    of_few = fills_and_maxima(4)
    assert (of_few["_foreach_maximum_"] > 0) is commits
    assert fills_and_maxima(12) == of_few


def test_amaxes_of_a_capture_are_those_of_its_backwards():
    """Of forwards that a backward follows, on any stream; what runs after the graph has them."""
    eager, captured = Training("fp8_delayed"), Training("fp8_delayed")
    side = torch.cuda.Stream()

    def step(training):
        x, g = training.x.detach().requires_grad_(), training.g
        training.net(64 * x)  # no backward follows
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            training.net(4 * x).backward(g)
        torch.cuda.current_stream().wait_stream(side)
        training.net(x).backward(8 * g)

    for training in (eager, captured):
        training.fill(0)
        training.step()
        warm_up(functools.partial(step, training))
        ht.step_(training.net)
    graph = capture(functools.partial(step, captured))
    for seed in range(1, 4):
        for training in (eager, captured):
            training.fill(seed)
        step(eager)
        graph.replay()
        for training in (eager, captured):
            ht.step_(training.net)
        for of_eager, of_captured in zip(eager.net.buffers(), captured.net.buffers(), strict=True):
            assert torch.equal(of_eager, of_captured)


def test_a_backward_that_fails_in_a_capture_commits_nothing():
    eager, captured = Training("fp8_delayed"), Training("fp8_delayed")

    def stop(gradient):
        raise RuntimeError("stop")

    def fails():
        hidden = 64 * captured.x
        hidden.register_hook(stop)
        captured.net(hidden).backward(captured.g)

    for training in (eager, captured):
        training.fill(0)
        training.step()
    with pytest.raises(RuntimeError, match="stop"):
        capture(fails)
    end = time.monotonic() + 10
    while amaxes._CAPTURED and time.monotonic() < end:  # autograd's thread lets go of a backward after it has raised
        time.sleep(0.01)
    assert not amaxes._CAPTURED
    for training in (eager, captured):
        training.fill(1)
        training.step()
    assert_equal(eager, captured)


def test_graphs_share_no_faces():
    """Each makes its own of weights and inputs that are read in both: one may be replayed without the other."""
    torch.manual_seed(0)
    model = ht.quantize_(Siblings().to(DEVICE, torch.bfloat16), "fp8")
    x, graphs, outs = random_tensor(TOKENS, FEATURES, device=DEVICE).requires_grad_(), [], []

    def one_by_one(module, args):
        hidden = args[0] * 1.0
        for layer in (module.q, module.k, module.q):
            graphs.append(capture(lambda layer=layer: outs.append(layer(hidden))))
        hidden.data.copy_(random_tensor(TOKENS, FEATURES, device=DEVICE, seed=1))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(random_tensor(*parameter.shape, device=DEVICE, seed=2))
        for layer, graph, out in zip((module.q, module.k, module.q), reversed(graphs), reversed(outs), strict=True):
            graph.replay()
            assert torch.equal(out, layer(hidden.detach()))
        return args

    model(x)
    with model.register_forward_pre_hook(one_by_one):
        model(x)
    assert len(graphs) == 3


def test_a_common_scale_is_measured_in_a_capture_and_again_outside():
    """Nothing runs while a graph is captured: eager code measures what was written before by itself."""
    torch.manual_seed(0)
    plain = Siblings().to(DEVICE, torch.bfloat16)
    model = ht.quantize_(copy.deepcopy(plain), "fp8", common_scale=[("q", "k", "v")])
    x, g = (random_tensor(TOKENS, FEATURES, device=DEVICE, seed=seed) for seed in (0, 1))
    x.requires_grad_()
    for scale in (8.0, 1 / 64):
        with torch.no_grad():
            for p, twin in zip(model.parameters(), plain.parameters(), strict=True):
                p.mul_(scale)
                twin.mul_(scale)
        expected = ht.quantize_(copy.deepcopy(plain), "fp8", common_scale=[("q", "k", "v")])(x.detach())
        outs = []

        def step(outs=outs):
            outs.append(model(x))
            outs[0].backward(g)

        graph = capture(step)
        with torch.no_grad():
            assert torch.equal(model(x), expected)
        graph.replay()
        assert torch.equal(outs[0], expected)


def test_a_captured_forward_uses_no_face_from_outside_and_leaves_none():
    training = Training("fp8")
    training.fill(0)
    with torch.no_grad():
        training.net(training.x)  # compiles the kernels, and leaves faces
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = training.net(training.x)
        for seed in range(3):
            for parameter in training.net.parameters():
                parameter.copy_(random_tensor(*parameter.shape, seed=seed))
            graph.replay()
            assert torch.equal(y, training.net(training.x))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed", "fp8_block", "fp8_dequantized_backward", "mxfp8", "nvfp4"])
def test_reduce_overhead_equals_eager(recipe):
    """``step_`` and the optimizer run outside of the graphs, which see what they write."""
    torch._dynamo.reset()
    counters.clear()
    eager, compiled = Training(recipe), Training(recipe, mode="reduce-overhead")
    for seed in range(5):  # warms up, records, replays
        for training in (eager, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            training.fill(seed)
            training.step()
        assert_equal(eager, compiled)
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id >= 2, "forward and backward were not recorded"
    torch._dynamo.reset()

"""torch.compile on blocks of real models, with every recipe: one graph, no break, none per step, the eager results."""

import contextlib
import copy

import llama
import model as demo
import pytest
import tiers
import torch
from any_layer import ANY_LAYER
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

import hybridtensor as ht
from hybridtensor.testing import random_tensor

SIZE = demo.Size(dim=64, layers=1, heads=2, context=144, batch=2)


class DemoBlock(nn.Module):
    """A block of the demo's model with its rotary tables."""

    def __init__(self):
        super().__init__()
        self.block = demo.Block(SIZE)
        for name, table in zip(("cos", "sin"), demo.rotary_tables(SIZE.context, SIZE.dim // SIZE.heads), strict=True):
            self.register_buffer(name, table)

    def forward(self, x):
        return self.block(x, (self.cos[: x.shape[1]], self.sin[: x.shape[1]]))


# Of each way to make and keep faces one: torch.compile sees no difference between siblings and one wide layer but that
# they cast the same thing, which test_compile_graphs counts for every recipe.
FOR_SIBLINGS = [
    "nvfp4_row_scaled_fwd_mxfp8_bwd", "fp8_rowwise", "fp8_block", "fp8_delayed", "fp8_high_precision_backward",
    "fp8_dequantized_backward", "high_precision_fwd_mxfp8_bwd", "nvfp4", "mxfp8_fwd_nvfp4_bwd",
]  # fmt: skip
# A state, and blocks along tokens; test_compile compiles smaller models of every recipe, test_tokens
# layers for every number of tokens
SOME = ["fp8_delayed", "fp8_block"]
BLOCKS = {"demo": DemoBlock, "llama": llama.Block}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    gpu = torch.cuda.is_available()  # where other kernels add gradients up in any order
    with sdpa_kernel(SDPBackend.MATH) if gpu else contextlib.nullcontext():
        yield
    torch._dynamo.reset()


class Trainer:
    """A block and its optimizer."""

    def __init__(self, net, backend=None, **options):
        self.net = net
        self.counter = CompileCounterWithBackend(backend or "eager")
        self.forward = torch.compile(net, fullgraph=True, backend=self.counter, **options) if backend else net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-10)

    def step(self, length, seed):
        """Train one step; return everything that it computed."""
        device = next(self.net.parameters()).device
        x, g = (random_tensor(2, length, SIZE.dim, device=device, seed=s) for s in (seed, seed + 100))
        x.requires_grad_()
        self.optimizer.zero_grad()
        y = self.forward(x)
        y.backward(g * 2.0**-10)
        result = [y.detach(), x.grad, *[p.grad.clone() for p in self.net.parameters()]]
        self.optimizer.step()
        ht.step_(self.net)
        return result + [b.clone() for b in self.net.buffers()]


def pair(block, recipe, device, backend="aot_eager", **options):
    """Return trainers of two equal blocks, the second compiled."""
    torch.manual_seed(0)
    net = ht.quantize_(BLOCKS[block]().to(device, torch.bfloat16), recipe)
    return Trainer(net), Trainer(copy.deepcopy(net), backend, **options)


def assert_equal_steps(eager, compiled, length, seed):
    for got, expected in zip(compiled.step(length, seed), eager.step(length, seed), strict=True):
        assert torch.equal(got, expected)
        assert expected.isfinite().all()


def lengths(recipe):
    """Return lengths, half as many as tokens, of at least two blocks: torch makes a graph of its own for one."""
    return (80, 96, 144, 65) if recipe in ("fp8_block", "deepseek_v4_experts") else (32, 48, 80, 33)


@pytest.mark.parametrize("recipe", ANY_LAYER if tiers.LONG else SOME)
def test_one_graph_per_recipe_and_one_for_all_lengths(recipe, device):
    """The second length makes the graph for all lengths; weights and states change from step to step."""
    eager, compiled = pair("demo", recipe, device)
    for seed, (length, graphs) in enumerate(zip(lengths(recipe), (1, 2, 2, 2), strict=True)):
        assert_equal_steps(eager, compiled, length, seed)
        assert compiled.counter.frame_count == graphs


@pytest.mark.parametrize("recipe", tiers.few(FOR_SIBLINGS, 1))
def test_siblings_and_grouped_heads_of_any_length(recipe, device):
    eager, compiled = pair("llama", recipe, device, dynamic=True)
    for seed, length in enumerate(lengths(recipe)[1:]):
        assert_equal_steps(eager, compiled, length, seed)
    assert compiled.counter.frame_count == 1


@pytest.mark.parametrize("recipe", tiers.few(["fp8_delayed", "nvfp4", "fp8"], 2))
def test_siblings_and_grouped_heads_of_one_length(recipe, device):
    eager, compiled = pair("llama", recipe, device, dynamic=False)
    for seed in range(3):
        assert_equal_steps(eager, compiled, 16, seed)
    assert compiled.counter.frame_count == 1


def test_a_recipe_seen_before_is_not_compiled_again(device):
    """Also where a recipe brings a state and another one takes it away."""
    eager, compiled = pair("demo", "mxfp8", device)
    steps = [("mxfp8", 1), ("fp8_delayed", 2), ("mxfp8", 2), ("nvfp4", 3), ("fp8_delayed", 3), ("nvfp4", 3)]
    for seed, (recipe, graphs) in enumerate(steps):
        for trainer in (eager, compiled):
            ht.set_config_(trainer.net, recipe)
        for again in range(2):
            assert_equal_steps(eager, compiled, 16, 2 * seed + again)
        assert compiled.counter.frame_count == graphs, recipe


@tiers.long("Inductor compiles a model with its backward")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_inductor_differs_from_eager_by_half_of_what_quantizing_costs_at_most(recipe):
    """Inductor does not round between the operators that it fuses, so its results are not bitwise those of eager."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.RMSNorm(SIZE.dim), llama.SwiGLU(SIZE.dim, 2 * SIZE.dim)).bfloat16()
    net = ht.quantize_(copy.deepcopy(plain), recipe)
    count = 2 + len(list(plain.parameters()))  # without the state
    exact, eager, compiled = Trainer(plain), Trainer(net), Trainer(copy.deepcopy(net), "inductor")
    for seed in range(2):
        results = (trainer.step(64, seed)[:count] for trainer in (exact, eager, compiled))
        for truth, expected, got in zip(*results, strict=True):
            assert (got - expected).norm() < (expected - truth).norm() / 2
    assert compiled.counter.frame_count == 1

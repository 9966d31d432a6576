"""Graphs of Inductor call implementations in place of operators, and cast the weights of a region together."""

import functools
import re

import pytest
import tiers
import torch
from torch import nn
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._inductor.exc import InductorError
from torch._inductor.utils import run_and_get_code

import hybridtensor as ht
from hybridtensor.ops import inductor as lowering
from hybridtensor.ops.kernel_library import lasting
from hybridtensor.testing import random_tensor

# torch warns of its own settings for a GPU, and of gradients that it looks for itself
pytestmark = pytest.mark.filterwarnings("default")
RECIPES = ["fp8", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"]
MIXED = [
    "/".join((RECIPES[i], RECIPES[j], (*RECIPES, "bf16")[(i + j) % 7]))  # of each two products each two recipes
    for i in range(len(RECIPES))
    for j in range(len(RECIPES))
    if i != j
]
NAMES = ["measure_all_into", "quantize_all_into", "measure"]
FEW = RECIPES if tiers.LONG or torch.cuda.is_available() else ["fp8", "fp8_delayed"]


class Block(nn.Module):
    """Two layers that read one input, and one that reads both; nothing that Inductor could round otherwise."""

    def __init__(self, size):
        super().__init__()
        self.left, self.right = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.last = nn.Linear(2 * size, size, bias=False)

    def forward(self, x):
        """Return ``[M, size]``."""
        return self.last(torch.cat([self.left(x), self.right(x)], -1))


class ExpertBlock(nn.Module):
    """Two stacks of experts, a third of the tokens to each; nothing that Inductor could round otherwise."""

    def __init__(self, size):
        super().__init__()
        self.num_experts = 3
        self.up, self.down = (nn.Parameter(torch.randn(3, size, size) / 8) for _ in range(2))

    def forward(self, x):
        """Return ``[M, size]``."""
        ends = torch.arange(1, 4, dtype=torch.int32, device=x.device) * (x.shape[0] // 3)
        hidden = torch._grouped_mm(x, self.up.transpose(-2, -1), offs=ends)
        return torch._grouped_mm(hidden, self.down.transpose(-2, -1), offs=ends)


class ScoredBlock(Block):
    """A block with a score per token, whose weight kernels of lists cannot read."""

    def __init__(self, size):
        super().__init__(size)
        self.score = nn.Linear(size, 1, bias=False)

    def forward(self, x):
        """Return ``[M, size]``."""
        return super().forward(x) * self.score(x)


def train(recipe, device, backend, steps=2, grad=False, block=Block):
    """Return what the steps of two blocks, each compiled by itself, compute: outputs and gradients.

    Without ``grad`` of their input, the first block never reads two of its weights in backward.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(block(64), block(64)).to(device, torch.bfloat16)
    ht.quantize_(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for block in net:
        block.compile(backend=backend, fullgraph=True)
    found = []
    for seed in range(steps):
        y = net(random_tensor(32, 64, device=device, seed=seed).requires_grad_(grad))
        y.float().square().sum().backward()
        found += [y.detach(), *(p.grad for p in net.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(net)
    return found


def written(function):
    """Return what a function does, and the Python that Inductor wrote for its graphs, none of which is from a cache."""
    with torch._inductor.config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        return run_and_get_code(function)


@functools.cache
def codes_of(recipe, device, **options):
    """Return what steps compute, and the code of their graphs."""
    return written(functools.partial(train, recipe, device, "inductor", **options))


def calls(code, name):
    """Return the calls of an operator in a graph's code."""
    names = re.findall(rf"(\w+) = call_of\('{name}'", code)
    return [line for line in code.splitlines() if any(f"{own}(" in line for own in names)]


@pytest.mark.parametrize("block", [Block, ExpertBlock])
@pytest.mark.parametrize("recipe", FEW)
def test_bits_are_those_of_the_operators(recipe, block, device):
    expected = train(recipe, device, "aot_eager", block=block)
    found, codes = codes_of(recipe, device, block=block)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    assert codes
    for code in codes:
        called = [line.split("(")[0] for line in code.splitlines() if not line.lstrip().startswith(("#", "assert_"))]
        assert not any("torch.ops.hybridtensor" in line for line in called), "an operator goes through the dispatcher"
        assert "call_of(" in code


@pytest.mark.parametrize("recipe", MIXED if tiers.LONG or torch.cuda.is_available() else MIXED[:1])
def test_bits_of_products_with_formats_of_their_own(recipe, device):
    """Faces of one matrix are scaled by amaxes, delayed, in blocks or not at all: kernels measure what is needed."""
    expected = train(recipe, device, "aot_eager", steps=1, grad=True)
    for got, want in zip(train(recipe, device, "inductor", steps=1, grad=True), expected, strict=True):
        assert torch.equal(got, want)


def test_weights_of_a_region_are_measured_and_cast_together(device):
    _, codes = codes_of("fp8", device, grad=True)
    counts = [{name: len(calls(code, name)) for name in NAMES} for code in codes]
    # Backward has the amaxes of forward
    forward, backward = ({"measure_all_into": count, "quantize_all_into": 1} for count in (1, 0))
    assert counts == [{**forward, "measure": 0}, {**backward, "measure": 0}]


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise"])
def test_a_weight_that_lists_cannot_read_leaves_the_others_together(recipe, device):
    """It took all weights of its region along, which then were measured, copied and cast one by one."""
    _, codes = codes_of(recipe, device, grad=True, block=ScoredBlock)
    together = [call for code in codes for name in NAMES[:2] for call in calls(code, name)]
    assert len(together) == 3  # of forward and backward, which has the amaxes of forward
    assert [len(re.findall(r"primals_\d+", call.split("]")[0])) for call in together] == [3] * 3


def test_inputs_of_a_graph_that_are_no_weights_are_cast_one_by_one(device):
    """Two layers with delayed scales read what comes into the graph, at an address of its own in each call."""
    _, codes = codes_of("fp8_delayed", device)
    together = [call for code in codes for call in calls(code, "quantize_all_into")]
    inputs = [re.findall(r"primals_\d+", call.split("]")[0]) for call in together]
    assert together
    assert all(len(set(names)) == len(names) for names in inputs), "one call casts a tensor twice"


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_casts_write_into_memory_of_the_graph(recipe, device):
    """Inductor plans it, and checks no sizes and no alignment of it in each call."""
    _, codes = codes_of(recipe, device, grad=True)
    written = [call for code in codes for name in ("quantize_into", *NAMES[:2]) for call in calls(code, name)]
    assert written
    assert not any(" = " in call.split("(")[0] for call in written)
    assert not any(calls(code, "quantize") for code in codes)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_delayed"])
def test_graphs_of_several_devices_allocate_in_casts(recipe, device, monkeypatch):
    """Inductor would allocate on the device that is current; a second one is pretended here."""
    expected = train(recipe, device, "aot_eager", steps=1, grad=True)
    seen = torch._inductor.graph.GraphLowering.add_device_info
    monkeypatch.setattr(
        torch._inductor.graph.GraphLowering,
        "add_device_info",
        lambda self, device: (seen(self, device), self.device_idxs.update((0, 1)))[0],
    )
    found, codes = written(functools.partial(train, recipe, device, "inductor", steps=1, grad=True))
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)
    assert all(calls(code, "quantize") for code in codes)
    assert not any(calls(code, name) for code in codes for name in ("quantize_into", *NAMES[:2]))


@pytest.mark.parametrize(
    ("recipe", "tokens", "dynamic", "amaxes"),
    [
        ("fp8", 32, False, 32), ("fp8", 8192, False, 1), ("fp8", 32, True, 1), ("fp8_rowwise", 32, False, 32),
        ("fp8_rowwise", 8192, False, 8192), ("fp8_rowwise", 32, True, None),
    ],
)  # fmt: skip
def test_casts_get_amaxes_of_rows(recipe, tokens, dynamic, amaxes, device):
    """A launch would reduce them to one. Each program of the cast reads them, of many it takes as long. A scale per row
    follows from one of them."""
    seen = []

    def backend(graph, inputs):
        def compiled(traced, _):
            for node in traced.graph.nodes:
                is_cast = node.target == torch.ops.hybridtensor.quantize.default
                if is_cast and node.args[0].op != "placeholder":  # a weight
                    amax = node.args[6] if len(node.args) > 6 else None
                    seen.append(None if amax is None else amax.meta["val"])
            return make_boxed_func(traced)

        return aot_module_simplified(graph, inputs, fw_compiler=compiled)

    torch._dynamo.reset()
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device, torch.bfloat16)
    ht.quantize_(layers, recipe)
    compiled = torch.compile(layers, backend=backend, dynamic=dynamic)
    x = random_tensor(tokens, 64, device=device)
    with torch.no_grad():
        assert torch.equal(compiled(x), layers(x))
    dtype = torch.float32 if amaxes == 1 else torch.bfloat16
    found = [None if amax is None else (amax.shape[0], amax.dtype) for amax in seen]
    assert found == [None if amaxes is None else (amaxes, dtype)] * 2


def test_no_more_weights_are_cast_together_than_fit(device, monkeypatch):
    monkeypatch.setattr(lowering, "_MOST_ELEMENTS", 2 * 64 * 64)  # the two first, not the last one
    torch._dynamo.reset()
    block = ht.quantize_(Block(64).to(device, torch.bfloat16), "fp8")
    block.compile()
    _, (forward,) = written(functools.partial(block, random_tensor(32, 64, device=device)))
    assert len(calls(forward, "quantize_all_into")) == 1
    assert len(calls(forward, "quantize_into")) == 3  # the input, what the last layer reads, and its weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pools are the memory of a CUDA device")
def test_memory_that_lasts_is_of_no_graph():
    """As cudagraph trees have it: what the thread allocates is of a pool."""
    device = torch.device("cuda", torch.cuda.current_device())
    pool = torch.cuda.graph_pool_handle()
    torch._C._cuda_beginAllocateCurrentThreadToPool(device.index, pool)
    try:
        own = torch.zeros(1 << 22, device=device)
        kept = lasting(lambda: torch.zeros(1 << 22, device=device), device)
    finally:
        torch._C._cuda_endAllocateToPool(device.index, pool)
    segments = torch.cuda.memory_snapshot()
    pools = [
        segment["segment_pool_id"]
        for tensor in (own, kept)
        for segment in segments
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]
    ]
    assert pools[0] == pool
    assert pools[1] != pool


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_wrapper_in_cpp_is_refused_where_it_would_crash(recipe, fresh_compiler):
    """Of operators that return one tensor in a list; torch's own crash so, too."""
    model = ht.quantize_(nn.Sequential(nn.Linear(128, 128)).bfloat16(), recipe)
    run = torch.compile(model, options={"cpp_wrapper": True})
    with pytest.raises(InductorError, match=r"hybridtensor\..*a list of one tensor .* compile without it"):
        run(torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True))

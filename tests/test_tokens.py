"""Any number of tokens in every recipe: what blocks miss along the tokens is zero, and changes nothing.

Oracle: the layer on an input with rows of zeros below, cut. Magnitudes are from 1 to 2, so that sums of what is
quantized to few bits are exact in any order, and of more rows or longer sums no bit differs on a CPU.
"""

import copy

import pytest
import tiers
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import HybridConfig, recipes
from hybridtensor.testing import saved_for_backward

K, N = 64, 128
WHOLE = 256
TOKENS = (0, 1, 7, 17, 30, 33, 129)
SPECS = [
    "fp8/mxfp8/nvfp4", "nvfp4/fp8_block/mxfp8", "mxfp8/nvfp4/fp8_rowwise", "bf16/bf16/nvfp4", "fp8/fp8/mxfp8",
    "mxfp8+mx_two_d", "nvfp4+nearest", "nvfp4+no_hadamard", "nvfp4+row_scaled_input", "fp8_delayed/mxfp8/nvfp4",
    "nvfp4/mxfp8/nvfp4+one_d+rowwise_dequantized", "fp8_block/mxfp8/mxfp8+rowwise_dequantized",
    "mxfp8+dequantized", "mxfp8+high_precision", "mxfp8+save_original_input", "nvfp4+save_original_input",
    "fp8_block+fp32_scale",
]  # fmt: skip


def square(quantizer):
    """Return a recipe whose inputs and gradients have square blocks, too."""
    return HybridConfig(input=quantizer, weight=quantizer, grad_output=quantizer)


def mixed(of_input, of_grad):
    """Return a recipe whose grad_weight multiplies faces of two formats, whose blocks differ."""
    plain = ht.Float8Quantizer()
    return HybridConfig(
        input=ht.HybridQuantizer(plain, of_input), weight=plain, grad_output=ht.HybridQuantizer(plain, of_grad)
    )


NV, MX, ROW = ht.NVFP4Quantizer(), ht.MXFP8Quantizer(), ht.Float8Quantizer("row")
BLOCK, FP32_BLOCK = ht.Float8Quantizer("block"), ht.Float8Quantizer("block", pow2_scale=False)
CONFIGS = {
    "mx squares": square(ht.MXFP8Quantizer(two_d=True)),
    "nvfp4 squares": square(ht.NVFP4Quantizer(two_d=True)),
    "nvfp4 x mx": mixed(NV, MX),
    "mx x nvfp4": mixed(MX, NV),
    "mx x row": mixed(MX, ROW),
    "block x nvfp4": mixed(BLOCK, NV),
    "mx x fp32 block": mixed(MX, FP32_BLOCK),
    "mx x high precision": mixed(MX, ht.IdentityQuantizer()),
    "high precision x nvfp4": mixed(ht.IdentityQuantizer(), NV),
}
RECIPES = [*recipes.RECIPES, *SPECS, *CONFIGS]


def values(*shape, device, seed):
    """Return numbers of magnitudes from 1 to 2."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, shape, generator=generator) * 2.0 - 1
    return (signs * (1 + torch.rand(shape, generator=generator))).to(device, torch.bfloat16)


def layer(recipe, device="cpu"):
    model = nn.ModuleDict({"up": nn.Linear(K, N, dtype=torch.bfloat16, device=device)})
    with torch.no_grad():
        model["up"].weight.copy_(values(N, K, device=device, seed=7))
        model["up"].bias.copy_(values(N, device=device, seed=8))
    return ht.quantize_(model, CONFIGS.get(recipe, recipe))["up"]


def run(module, x, g, forward=None):
    """Return output, and gradients of input, weight and bias."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x) if forward is None else forward(x)
    y.backward(g)
    return y.detach(), x.grad, module.weight.grad, module.bias.grad


def tensors(tokens, device):
    return (values(tokens, extent, device=device, seed=tokens + seed) for extent, seed in ((K, 0), (N, 100)))


def assert_same(got, expected):
    """On a GPU, sums run in an order that depends on the shapes, and partly in fewer bits."""
    assert got.shape == expected.shape
    assert got.isfinite().all()
    if got.device.type == "cpu":
        assert torch.equal(got, expected)
    else:
        assert (got - expected).float().norm() <= 2.0**-7 * expected.float().norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_rows_of_zeros_change_nothing(recipe, device):
    """Delayed scales and the random counter move on alike."""
    if device == "cuda" and not tiers.LONG and RECIPES.index(recipe) % 3:
        pytest.skip("a third of the recipes on a GPU, whose kernels tests/ops compares; --long runs all")
    ours = layer(recipe, device)
    theirs = copy.deepcopy(ours)
    for tokens in TOKENS:
        x, g = tensors(tokens, device)
        got = run(ours, x, g)
        expected = run(theirs, *(F.pad(t, (0, 0, 0, WHOLE - tokens)) for t in (x, g)))
        for a, b, rows in zip(got, expected, (tokens, tokens, None, None), strict=True):
            assert_same(a, b[:rows])
        for module in (ours, theirs):
            ht.step_(module)
        for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
            assert torch.equal(a, b)


COMPILED = [*recipes.RECIPES, *CONFIGS, *SPECS][:: 1 if tiers.LONG else 6]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", COMPILED)
def test_one_graph_for_every_number_of_tokens(recipe, device):
    """Torch makes a graph of its own where an axis, here that of the blocks along the tokens, has one entry."""
    eager = layer(recipe, device)
    module, counter = copy.deepcopy(eager), CompileCounterWithBackend("aot_eager")
    forward = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for graphs, lengths in ((1, (161, 129, 256, 257)), (2, (7, 3, 15))):
        for tokens in lengths:
            x, g = tensors(tokens, device)
            for a, b in zip(run(module, x, g, forward), run(eager, x, g), strict=True):
                assert torch.equal(a, b)
            for either in (module, eager):
                ht.step_(either)
        assert counter.frame_count <= graphs


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_inductor_takes_any_number_of_tokens(recipe, device):
    eager = layer(recipe, device)
    module = copy.deepcopy(eager)
    forward = torch.compile(module, fullgraph=True, dynamic=True)
    for tokens in (17, 30):
        x, g = tensors(tokens, device)
        for a, b in zip(run(module, x, g, forward), run(eager, x, g), strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("recipe", RECIPES[:: 1 if tiers.LONG else 4])
def test_recomputation_and_saved_tensors_do_not_depend_on_the_number(recipe, device):
    """Whole steps are saved, as many tensors as of sizes that divide."""
    module, counts = layer(recipe, device), set()
    for tokens in (32, 30, 7):
        x, g = tensors(tokens, device)
        again = run(module, x, g, lambda x: checkpoint(module, x, use_reentrant=False))
        with saved_for_backward() as saved:
            direct = run(module, x, g)
        counts.add(len(saved.tensors))
        assert all(torch.equal(a, b) for a, b in zip(again, direct, strict=True))
    assert len(counts) == 1

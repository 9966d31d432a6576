"""What torch's counter of floating-point operations sees of a converted model: what it sees of the plain one."""

import copy
import functools

import pytest
import torch
from any_layer import ANY_LAYER
from tiers import few
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import hybridtensor as ht
from hybridtensor.testing import random_tensor

DIM, HIDDEN, TOKENS = 64, 96, 128
SPECS = ["mxfp8+save_original_input", "mxfp8+high_precision", "fp8/mxfp8/nvfp4", "nvfp4/bf16/fp8_block"]
RECIPES = [*ANY_LAYER, *SPECS]
PLAIN = ["blocks.0.plain", "blocks.1.plain"]


class Block(nn.Module):
    """Layers with and without a bias, of which one is left plain."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(DIM, HIDDEN), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM)
        self.plain = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.plain(self.down(self.up(x) * self.gate(x)))


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block() for _ in range(2)), recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def models(recipe, device="cpu", **options):
    """Return a plain model and a converted copy."""
    plain = Model(**options).to(device, torch.bfloat16)
    return plain, ht.quantize_(copy.deepcopy(plain), recipe, keep_bf16=PLAIN)


def counted(run, *arguments):
    """Return the result, and per module the operations that ran."""
    with FlopCounterMode(display=False) as counter:
        result = run(*arguments)
    return result, {module: sum(by_op.values()) for module, by_op in counter.get_flop_counts().items() if by_op}


def forward_and_backward(model, device):
    """Return what forward counts, and what backward does."""
    x = random_tensor(2, TOKENS // 2, DIM, device=device).requires_grad_()
    y, forward = counted(model, x)
    return forward, counted(y.sum().backward)[1], counted(lambda: model(x).sum().backward())[1]


@functools.cache
def expected_counts(recompute, device):
    """Return the same of a plain model."""
    return forward_and_backward(Model(recompute).to(device, torch.bfloat16), device)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_module_counts_as_the_plain_one(recipe, recompute, device):
    expected = expected_counts(recompute, device)
    assert forward_and_backward(models(recipe, device, recompute=recompute)[1], device) == expected
    per_token = 2 * (3 * DIM * HIDDEN + DIM * DIM)
    assert expected[0]["Global"] == 2 * TOKENS * per_token
    assert expected[2]["Model.blocks.0.up"] == (4 if recompute else 3) * TOKENS * 2 * DIM * HIDDEN


@pytest.mark.parametrize("recipe", ["fp8", "fp8_dequantized_backward", "nvfp4"])
def test_by_operator(recipe, device):
    """Products in high precision are torch's own; all others one operator, whatever they run inside."""
    model = ht.quantize_(nn.Sequential(nn.Linear(DIM, HIDDEN)).to(device, torch.bfloat16), recipe)
    x = random_tensor(TOKENS, DIM, device=device).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    one = 2 * TOKENS * DIM * HIDDEN
    ours, mm = torch.ops.hybridtensor.scaled_mm, torch.ops.aten.mm
    expected = {ours: one, mm: 2 * one} if "dequantized" in recipe else {ours: 3 * one}
    assert counter.get_flop_counts()["Global"] == expected


@pytest.mark.parametrize("recipe", ANY_LAYER)
def test_on_meta_tensors(recipe):
    """As Lightning counts: nothing is computed."""
    with torch.device("meta"):
        expected, got = (forward_and_backward(model, "meta") for model in models(recipe, "meta"))
    assert got == expected


@pytest.mark.parametrize("recipe", few(["mxfp8", "fp8", "nvfp4", "fp8_block", "fp8_delayed"], 2))
def test_persistent_weights_and_compiled_models(recipe, device):
    plain, converted = models(recipe, device)
    expected = forward_and_backward(plain, device)
    assert forward_and_backward(ht.quantize_(converted, recipe, keep_bf16=PLAIN, persistent=True), device) == expected
    plain, converted = models(recipe, device)
    for model in (plain, converted):
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
        model(random_tensor(2, TOKENS // 2, DIM, device=device)).sum().backward()
    assert forward_and_backward(converted, device) == forward_and_backward(plain, device)


@pytest.mark.parametrize(("tokens", "entries"), [(7, 32), (33, 64)])
def test_tokens_of_the_weights_gradient_count_in_whole_blocks(tokens, entries):
    model = ht.quantize_(nn.Linear(DIM, HIDDEN, dtype=torch.bfloat16), "mxfp8")
    y, forward = counted(model, random_tensor(tokens, DIM))
    assert forward["Global"] == 2 * tokens * DIM * HIDDEN
    assert counted(y.sum().backward)[1]["Global"] == 2 * entries * DIM * HIDDEN

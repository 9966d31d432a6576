"""Layers that read one input quantize it once. Oracle: the same layers, each with a copy of the input."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import siblings

SIZE = 128
RECIPES = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "fp8+high_precision", "fp8+dequantized", "mxfp8/fp8/bf16"]


class Attention(nn.Module):
    """Three siblings of different widths, one with a bias."""

    def __init__(self, recipe, dtype=torch.bfloat16, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, n * SIZE, bias=n == 2) for n in (1, 2, 3)).to(device, dtype)
        ht.quantize_(self, recipe)

    def forward(self, x, *, apart=False):
        outs = [layer(x.clone() if apart else x) for layer in self.layers]
        return sum(out.float().square().sum() for out in outs)


@pytest.fixture
def casts(monkeypatch):
    """Count what quantizers make of inputs: one entry per call that was not taken over."""
    made = []
    original = siblings.quantize_once

    def counted(input, weight, how, make):
        def noted():
            made.append(weight.shape)
            return make()

        return original(input, weight, how, noted)

    monkeypatch.setattr("hybridtensor.linear.quantize_once", counted)
    return made


def recorded(x):
    """Return the same values as a result of what autograd has recorded, as layers read them in training."""
    return x.detach().requires_grad_().view_as(x)


def step(model, x, **how):
    """Return the loss and all gradients."""
    x = x.detach().requires_grad_()
    loss = model(x.view_as(x), **how)
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return [loss.detach(), *grads]


def saved(model, x, **how):
    """Return the addresses of what is saved for backward."""
    addresses = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: addresses.append(t.data_ptr()) or t, lambda t: t):
        model(recorded(x), **how)
    return addresses


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_cast_and_the_same_bits(recipe, casts, device):
    model, x = Attention(recipe, device=device), torch.randn(4, 32, SIZE, dtype=torch.bfloat16, device=device)
    expected = step(model, x, apart=True)
    assert len(casts) == 3
    for got, value in zip(step(model, x), expected, strict=True):
        assert got.equal(value)
    assert len(casts) == 4
    step(model, x)
    assert len(casts) == 5  # the next pass quantizes again


def test_faces_are_saved_once(device):
    model, x = Attention("fp8", device=device), torch.randn(64, SIZE, dtype=torch.bfloat16, device=device)
    apart, together = saved(model, x, apart=True), saved(model, x)
    assert len(apart) == len(together)
    assert len(set(apart)) - len(set(together)) >= 2 * 2  # elements and scales of two siblings


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_what_belongs_to_a_layer_is_not_shared(recipe, casts):
    model, x = Attention(recipe), torch.randn(64, SIZE, dtype=torch.bfloat16)
    expected = step(copy.deepcopy(model), x, apart=True)
    for got, value in zip(step(copy.deepcopy(model), x), expected, strict=True):
        assert got.equal(value)
    if recipe == "fp8_delayed":
        assert not casts


def test_an_input_that_changed_is_quantized_again(casts):
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16)).clone()
    first, second, _ = model.layers
    first(x)
    x.mul_(3)
    assert second(x).equal(second(x.clone()))
    assert len(casts) == 3


WRITES = {
    "numpy": lambda x: x.view(torch.int16).numpy().__iadd__(128),  # times two
    "data": lambda x: x.data.mul_(2),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "training"])
@pytest.mark.parametrize("write", WRITES)
def test_writes_that_are_not_counted_are_seen(write, grad):
    """To a buffer of observations, as in reinforcement learning, that actor and critic read."""
    first, second, _ = Attention("fp8").layers
    x = torch.randn(64, SIZE, dtype=torch.bfloat16)
    with torch.set_grad_enabled(grad):
        first(x)
        WRITES[write](x)
        assert second(x).equal(second(x.clone()))


def test_a_weight_that_comes_again_quantizes_again():
    """As after the replay of a CUDA graph, which writes without being counted."""
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    layer = model.layers[0]
    layer(x)
    WRITES["data"](x)
    assert layer(x).equal(layer(x.clone()))


def test_recipe_dtype_and_faces_tell_apart(casts):
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    (a, other), b = Attention("fp8").layers[:2], Attention("fp8_rowwise").layers[0]
    assert a(x).equal(a(x.clone()))
    assert b(x).equal(b(x.clone()))
    assert len(casts) == 4
    other.weight.requires_grad_(False)
    other(x)  # without the columnwise face
    Attention("fp8").layers[1](x)
    assert len(casts) == 6


def test_autocast_shares_what_it_casts(casts):
    model, x = Attention("fp8", torch.float32), torch.randn(64, SIZE)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, x, apart=True)
        for got, value in zip(step(model, x), expected, strict=True):
            assert got.equal(value)
    assert len(casts) == 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, casts):
    model, x = Attention("fp8"), torch.randn(64, SIZE, dtype=torch.bfloat16)
    expected = step(model, x, apart=True)
    casts.clear()

    def run(x):
        return checkpoint(lambda x: model(x.view_as(x)), x, use_reentrant=reentrant)

    a = x.detach().requires_grad_()
    run(a).backward()
    assert a.grad.equal(expected[1])
    assert len(casts) == (3 if reentrant else 1) + 1  # forward, of which that one records nothing, and again


def test_nothing_outlives_the_input():
    layer, x = Attention("fp8").layers[0], recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    layer.requires_grad_(False)  # so that the result does not hold on to the face
    layer(x)
    face = weakref.ref(siblings._last.operands[0].data)
    assert face() is not None
    del x
    gc.collect()
    assert face() is None
    assert siblings._last.operands is None


def test_an_input_may_die_in_another_thread():
    layer, box = Attention("fp8").layers[0], [recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))]
    layer(box[0])
    assert siblings._last.operands is not None
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert siblings._last.operands is None


def test_threads_share_nothing(casts):
    first, second, _ = Attention("fp8").layers
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    first(x)
    thread = threading.Thread(target=lambda: second(x))
    thread.start()
    thread.join()
    assert len(casts) == 2


def test_inference_tensors_are_quantized_each_time(casts):
    """They have no version that would tell of a write."""
    first, second, _ = Attention("fp8").layers
    with torch.inference_mode():
        x = torch.randn(64, SIZE, dtype=torch.bfloat16)
        first(x), second(x)
    assert len(casts) == 2


def test_persistent_weights_share_too(casts):
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))).bfloat16()
    ht.quantize_(model, "fp8", persistent=True)
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    together = [layer(x) for layer in model]
    apart = [layer(x.clone()) for layer in model]
    assert all(a.equal(b) for a, b in zip(together, apart, strict=True))
    assert len(casts) == 3
    model[0](x), model[0](x)
    assert len(casts) == 5

"""Functions that quantize what they return for the layers that read it.

Oracle: the same functions returning values, which the layers then quantize themselves.
"""

import copy
import pickle

import pytest
import torch
from loops import same
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor.testing import random_tensor, saved_for_backward
from tests.test_values import without

SPECS = {
    **dict.fromkeys(("fp8", "fp8+pow2_scale"), (True, True)),
    **dict.fromkeys(("mxfp8", "mxfp8/bf16/mxfp8"), (False, False)),  # values, which casts make again
    "fp8_delayed": (True, True),
    # Faces in high precision are values; of the others casts gain nothing
    **dict.fromkeys(("fp8_high_precision_backward", "fp8_dequantized_backward", "bf16/mxfp8/fp8"), (False, False)),
    **dict.fromkeys(("fp8_rowwise", "fp8_block", "nvfp4", "nvfp4_row_scaled_fwd_mxfp8_bwd"), (False, False)),
}
"""Recipes, and whether the norm and the activation hand over faces."""
EPS = 1e-5


class MLP(nn.Module):
    """A gated MLP behind a norm, which hands over what its layers would quantize."""

    def __init__(self, hands_over=True):
        super().__init__()
        self.norm = nn.RMSNorm(128, eps=EPS)
        self.gate_proj, self.up_proj = (nn.Linear(128, 256, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(256, 128, bias=False)
        self.hands_over = hands_over
        self.handed = []

    def forward(self, x):
        first, last = ((self.gate_proj, self.up_proj), self.down_proj) if self.hands_over else ((), ())
        y = ht.rms_norm(x, self.norm.weight, self.norm.eps, into=first)
        z = ht.swiglu(self.gate_proj(y), self.up_proj(y), into=last)
        self.handed = [isinstance(t, ht.HybridTensor) for t in (y, z)]
        return x + self.down_proj(z)


def pair(spec, device, **options):
    """Return two converted models of the same weights: one hands over, one does not."""
    torch.manual_seed(0)
    plain = MLP(hands_over=False).to(device, torch.bfloat16)
    fused = copy.deepcopy(plain)
    fused.hands_over = True
    for model in (plain, fused):
        ht.quantize_(model, spec, **options)
    return plain, fused


def step(model, x):
    """Train a step, and return the loss and all gradients."""
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    y.backward(random_tensor(*y.shape, seed=9, device=y.device))
    found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    ht.step_(model)
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(64, 128), (2, 48, 128)], ids=["matrix", "batch"])
def test_bits_are_those_of_layers_that_quantize_themselves(spec, shape, device):
    plain, fused = pair(spec, device)
    for seed in range(3):  # delayed scales, hints and random draws go on
        x = random_tensor(*shape, seed=seed, device=device)
        assert same(step(fused, x), step(plain, x))
    assert tuple(fused.handed) == SPECS[spec]
    assert plain.handed == [False, False]


def test_weights_that_have_no_high_precision_copy(device):
    plain, fused = pair("fp8", device, persistent=True)
    x = random_tensor(64, 128, device=device)
    assert same(step(fused, x), step(plain, x))
    assert fused.handed == [True, True]


@pytest.mark.parametrize("shape", [(64, 128), (10, 128), (2, 5, 128), (2, 3, 7, 128)], ids=str)
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp8/bf16/mxfp8"])
def test_elements_that_the_device_multiplies_are_handed_over(spec, shape, device):
    """Also of tokens that fill no block, whose columnwise faces end in zeros."""
    with without():
        plain, fused = pair(spec, device)
        x = random_tensor(*shape, device=device)
        assert same(step(fused, x), step(plain, x))
        assert fused.handed == [True, True]


@pytest.mark.parametrize("shape", [(10, 128), (2, 5, 128)], ids=str)
def test_faces_that_end_in_zeros_are_those_values(shape, device):
    """Oracle: the faces of as many tokens as fill a block, of which the last are zeros."""
    layer = ht.quantize_(nn.Linear(128, 64).to(device, torch.bfloat16), "mxfp8")
    x = random_tensor(*shape, device=device)
    whole = torch.cat([x.reshape(10, 128), x.new_zeros(22, 128)])
    with without():
        made, other = (ht.rms_norm(t, into=layer) for t in (x, whole))
        for copied in (made, made.clone()):
            for name in ("rowwise", "columnwise"):
                values = getattr(copied, name).dequantize()
                assert values.shape == x.shape
                assert torch.equal(values.reshape(10, 128), getattr(other, name).dequantize()[:10])


def test_values_are_never_saved(device):
    saved = {}
    for name, model in zip(("plain", "fused"), pair("fp8", device), strict=True):
        x = random_tensor(64, 128, device=device).requires_grad_()
        with saved_for_backward() as found:
            model(x)
        saved[name] = found.nbytes()
    bf16 = 64 * 128 * 2
    assert saved["plain"] - saved["fused"] <= 8  # faces of either; values of what was normalized or gated of neither
    assert saved["fused"] < bf16 + 2 * 2 * bf16 + bf16 // 2 + bf16 + 2**10


@pytest.mark.parametrize("spec", ["fp8", "fp8+pow2_scale"])
def test_with_checkpoints(spec, device):
    plain, fused = pair(spec, device)
    x = random_tensor(64, 128, device=device)
    expected = step(plain, x)
    x = x.requires_grad_()
    y = checkpoint(fused, x, use_reentrant=False)
    y.backward(random_tensor(*y.shape, seed=9, device=y.device))
    assert fused.handed == [True, True]
    assert same([y.detach(), x.grad, *(p.grad for p in fused.parameters())], expected)


def test_a_reentrant_checkpoint_that_ends_in_it_says_so(device):
    layer = ht.quantize_(nn.Linear(128, 64, bias=False).to(device, torch.bfloat16), "fp8")
    x = random_tensor(32, 128, device=device).requires_grad_()
    y = checkpoint(lambda x: ht.rms_norm(x, into=layer), x, use_reentrant=True)
    with pytest.raises(
        ValueError, match=r"has no columnwise face.*compute it with gradients enabled, or leave into= out"
    ):
        layer(y).sum().backward()


def test_without_gradients(device):
    plain, fused = pair("fp8", device)
    x = random_tensor(64, 128, device=device)
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    assert fused.handed == [True, True]
    for model in (plain, fused):
        model.requires_grad_(False)
    assert same(*(step_of_frozen(model, x) for model in (plain, fused)))


def step_of_frozen(model, x):
    x = x.detach().requires_grad_()
    model(x).sum().backward()
    return [x.grad]


@pytest.mark.filterwarnings("default")
def test_in_graphs_values_go_on(device):
    """There a compiler fuses what it can; ``F.rms_norm`` rounds as its parts are computed."""
    plain, fused = pair("fp8", device)
    x = random_tensor(64, 128, device=device)
    compiled = [torch.compile(model, backend="aot_eager")(x) for model in (plain, fused)]
    assert torch.equal(*compiled)
    told = torch._dynamo.explain(fused)(x)  # a whole graph may be asked for: then more is captured
    assert (told.graph_count, told.graph_break_count) == (1, 0)
    torch._dynamo.reset()


def hooked(model):
    model.down_proj.register_forward_pre_hook(lambda module, args: (args[0].abs() * 0 + args[0],))


def hooked_behind(model):
    model.down_proj.register_forward_hook(lambda module, args, out: out + args[0].abs().max() * 0)


def other_recipe(model):
    ht.quantize_(model.up_proj, "mxfp8")
    ht.set_config_(model.down_proj, "fp8+save_original_input")


def plain_layers(model):
    ht.plain_(model)


class Wrapped(nn.Module):
    """A layer of another library around one of ours."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x * 1)


def wrapped(model):
    model.down_proj = Wrapped(model.down_proj)


CHANGES = {
    "hook": (hooked, (True, False)),
    "hook behind": (hooked_behind, (True, False)),
    "recipes": (other_recipe, (False, False)),
    "plain": (plain_layers, (False, False)),
    "wrapped": (wrapped, (True, False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_go_where_they_are_wanted(change, device):
    plain, fused = pair("fp8", device)
    change, handed = CHANGES[change]
    for model in (plain, fused):
        change(model)
    x = random_tensor(64, 128, device=device)
    assert same(step(fused, x), step(plain, x))
    assert tuple(fused.handed) == handed


def test_hooks_of_all_modules_want_values(device):
    plain, fused = pair("fp8", device)
    x = random_tensor(64, 128, device=device)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0].abs() * 0 + args[0],))
    try:
        assert same(step(fused, x), step(plain, x))
    finally:
        handle.remove()
    assert fused.handed == [False, False]


def test_amaxes_are_noted_where_anything_is_trained(device):
    """Of delayed scales: also for a bias alone."""
    noted = []
    for into in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(256, 64).to(device, torch.bfloat16)
        ht.quantize_(layer, "fp8_delayed")
        layer.weight.requires_grad_(False)
        gate, up = (random_tensor(32, 256, seed=i, device=device) for i in range(2))
        layer(ht.swiglu(gate, up, into=layer if into else ())).sum().backward()
        ht.step_(layer)
        noted.append([buffer.clone() for buffer in layer.buffers()])
    assert same(*noted)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("other", ["plain", "fp8_rowwise", "fp8", "product"])
def test_nobody_else_reads_it(other, view, device):
    """Not a router that stays plain, nor a layer of another recipe: they would compute with faces of the first."""
    mine, yours = (nn.Linear(128, 64, bias=False).to(device, torch.bfloat16) for _ in range(2))
    ht.quantize_(mine, "fp8")
    if other.startswith("fp8"):
        ht.quantize_(yours, other)
    x = random_tensor(2, 32, 128, device=device).requires_grad_()
    y = ht.rms_norm(x, into=mine)
    y = y.view(64, 128) if view else y
    mine(y).sum().backward()
    read = (lambda t: t @ yours.weight.t()) if other == "product" else yours
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        # the latter in inference mode
        told = "other layers than the one that reads it; name it|aten.matmul.default is not"
        with context, pytest.raises((ValueError, NotImplementedError), match=told):
            read(y)
    both = ht.rms_norm(x, into=(mine, yours))
    assert isinstance(both, ht.HybridTensor) == (other == "fp8")
    yours(both)


COPIES = {
    "clone": torch.clone, "a copy": copy.copy, "a deep copy": copy.deepcopy, "empty": torch.empty_like,
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_nobody_else_reads_a_copy(name, device):
    mine, yours = (nn.Linear(128, 64, bias=False).to(device, torch.bfloat16) for _ in range(2))
    ht.quantize_(mine, "fp8")
    ht.quantize_(yours, "fp8_rowwise")
    with torch.no_grad():
        y = ht.rms_norm(random_tensor(32, 128, device=device), into=mine)
        copied = COPIES[name](y)
        with pytest.raises(ValueError, match="for other layers than the one that reads it; name it in into="):
            yours(copied)
        if name in ("clone", "a deep copy"):  # of others it is not known for whom they were
            assert torch.equal(mine(copied), mine(y))


def test_plain_memory_takes_no_quantized_values(device):
    layer = ht.quantize_(nn.Linear(128, 64, bias=False).to(device, torch.bfloat16), "fp8")
    x, memory = random_tensor(32, 128, device=device), torch.zeros(64, 128, dtype=torch.bfloat16, device=device)
    y = ht.rms_norm(x, into=layer)

    def put():
        memory[:32] = y

    for write in (put, lambda: memory[32:].copy_(y)):
        with pytest.raises(ValueError, match=r"copy_: .* was quantized for other layers"):
            write()
    assert not memory.any()
    memory[:32] = y.dequantize()


@pytest.mark.parametrize("spec", ["bf16", "fp8_rowwise", "fp8+high_precision"])
def test_an_input_by_the_former_recipe_is_refused(spec, device):
    layer = ht.quantize_(nn.Linear(128, 64).to(device, torch.bfloat16), "fp8")
    x = random_tensor(32, 128, device=device)
    y = ht.rms_norm(x, into=layer)
    ht.set_config_(layer, spec)
    with pytest.raises(ValueError, match=r"HybridTensor.* was quantized before its layer got the recipe"):
        layer(y)
    assert torch.equal(layer(ht.rms_norm(x, into=layer)), layer(ht.rms_norm(x)))
    ht.set_config_(layer, "fp8+keep_faces")  # which quantizes inputs alike
    layer(y)


def test_autocast_and_who_watches_want_values(device):
    plain, fused = pair("fp8", device)
    x = random_tensor(64, 128, device=device)
    with torch.autocast(device, torch.bfloat16):
        assert same(step(fused, x), step(plain, x))
    assert fused.handed == [False, False]
    report = ht.check(fused, x, show=False)
    assert report
    assert fused.handed == [False, False]


@pytest.mark.parametrize("into", ["down", [3], torch.ones(2)], ids=str)
def test_wrong_use(into):
    x, wide = torch.ones(4, 8), torch.ones(2, 2**14 + 1)
    for call in (
        lambda: ht.swiglu(x, x, into=into),
        lambda: ht.rms_norm(x, into=into),
        lambda: ht.rms_norm(wide, into=into),
    ):
        with pytest.raises(TypeError, match="linear layers as into is required"):
            call()


class OwnForward(nn.Linear):
    """A linear layer with a forward of its own, which calls the function."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight) * 1


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("asked", ["weight", "weights", "weight and input", "input"])
@pytest.mark.parametrize("kind", ["into", "own forward"])
@pytest.mark.parametrize("accumulated", [False, True])
def test_gradients_of_weights_through_a_checkpoint(accumulated, kind, asked, persistent, device):
    """``torch.autograd.grad`` of weights runs the forward again, quantized. Oracle: without a checkpoint."""
    torch.manual_seed(0)
    model = MLP(hands_over=kind == "into")
    if kind == "own forward":
        model.gate_proj, model.down_proj = OwnForward(128, 256, bias=False), OwnForward(256, 128, bias=False)
    ht.quantize_(model.to(device, torch.bfloat16), "fp8", persistent=persistent)
    x = random_tensor(32, 128, device=device).requires_grad_()
    gate, down = model.gate_proj.weight, model.down_proj.weight
    inputs = {"weight": [gate], "weights": [down, gate], "weight and input": [gate, x], "input": [x]}[asked]
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        loss = run(x).float().square().sum()
        if accumulated:
            loss.backward(inputs=inputs, retain_graph=True)
            first = [t.grad.clone() for t in inputs]
        else:
            first = torch.autograd.grad(loss, inputs, retain_graph=True)
        loss.backward()
        found.append([*first, *(p.grad for p in model.parameters()), x.grad])
        model.zero_grad()
        x.grad = None
    assert same(*found)
    assert all(type(grad) is torch.Tensor for grad in found[0])


def test_gradients_of_weights_have_torchs_options_and_errors(device):
    layers = [ht.quantize_(nn.Linear(32, 32, bias=False).to(device, torch.bfloat16), "fp8") for _ in range(3)]
    used, unused, frozen = (layer.weight for layer in layers)
    frozen.requires_grad_(False)
    loss = layers[0](random_tensor(32, 32, device=device)).sum()

    def grad(*inputs, **options):
        return torch.autograd.grad(loss, inputs, retain_graph=True, **options)

    (expected,) = grad(used)
    assert expected.shape == used.shape
    assert grad(unused, used, allow_unused=True)[0] is None
    zeros, own = grad(unused, used, materialize_grads=True)
    assert type(zeros) is torch.Tensor
    assert not zeros.any()
    assert (zeros.shape, zeros.dtype, zeros.device) == (used.shape, used.dtype, used.device)
    assert torch.equal(own, expected)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        grad(unused)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad(frozen)
    assert torch.equal(torch.autograd.grad(used, used, torch.ones_like(expected))[0], torch.ones_like(expected))
    hooked = used.register_hook(lambda grad: grad * 2)
    assert torch.equal(grad(used)[0], expected * 2)
    hooked.remove()

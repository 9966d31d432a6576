"""Layers of one module that read one input quantize it once. Oracle: the same layers, each with a copy of the input."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from loops import same
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor.linear import sharing
from hybridtensor.quantizers import OneFormatQuantizer

SIZE = 128
RECIPES = ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", "fp8+high_precision", "fp8+dequantized", "mxfp8/fp8/bf16"]


class Attention(nn.Module):
    """Three siblings of different widths, one with a bias."""

    def __init__(self, recipe, dtype=torch.bfloat16, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, n * SIZE, bias=n == 2) for n in (1, 2, 3)).to(device, dtype)
        ht.quantize_(self, recipe)

    def forward(self, x, *, apart=False, between=None):
        outs = []
        for layer in self.layers:
            outs.append(layer(x.clone() if apart else x))
            if between is not None:
                between(x)
        return sum(out.float().square().sum() for out in outs)


@pytest.fixture
def casts(monkeypatch):
    """Count what quantizers make of inputs: one entry per call."""
    made = []

    def count(cls):
        original = cls.faces

        def counted(self, x, *, context, **how):
            if context.role == "input" and context.direction is None and how["rowwise"]:  # once per forward
                made.append(x.shape)
            return original(self, x, context=context, **how)

        monkeypatch.setattr(cls, "faces", counted)

    for cls in (OneFormatQuantizer, ht.HybridQuantizer, ht.IdentityQuantizer):
        count(cls)
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


RANDOM = ht.NVFP4Quantizer(rounding="stochastic")


@pytest.mark.parametrize(
    "input", [RANDOM, ht.HybridQuantizer(ht.DelayedFloat8Quantizer(), RANDOM)], ids=["all", "half"]
)
def test_random_numbers_of_a_layer_are_not_shared(input, casts):
    recipe = ht.HybridConfig(input, ht.NVFP4Quantizer(), ht.IdentityQuantizer())
    model, x = Attention(recipe), torch.randn(64, SIZE, dtype=torch.bfloat16)
    expected = step(copy.deepcopy(model), x, apart=True)
    for got, value in zip(step(copy.deepcopy(model), x), expected, strict=True):
        assert got.equal(value)
    assert len(casts) == 6


# -- delayed scales, which layers have in common as long as they read the same inputs

DELAYED = ["fp8_delayed", "fp8_delayed+dequantized", "fp8_delayed/fp8_delayed/bf16", "fp8_delayed/fp8/mxfp8"]


def x_of(seed, device="cpu"):
    x = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(seed))
    return (x * 2.0**seed).to(device, torch.bfloat16)


def trained(model, seeds, **how):
    """Return losses and gradients of steps, and the state after them."""
    found = []
    for seed in seeds:
        found += step(model, x_of(seed, model.layers[0].weight.device), **how)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.875)
        ht.step_(model)
    return [*found, *(value.clone() for layer in model.layers for value in layer.quantization_state.buffers())]


@pytest.mark.parametrize("recipe", DELAYED)
def test_delayed_scales_are_shared_from_step_to_step(recipe, casts, device):
    model = Attention(recipe, device=device)
    expected = trained(copy.deepcopy(model), range(4), apart=True)
    assert len(casts) == 4 * 3
    casts.clear()
    assert same(trained(model, range(4)), expected)
    assert len(casts) == 4


def test_microbatches_and_evaluation_share_delayed_scales(casts):
    model = Attention("fp8_delayed")

    def train(model, **how):
        found = []
        for seed in range(3):
            for part in range(2):
                found += step(model, x_of(2 * seed + part), **how)
            with torch.no_grad():
                found.append(model(x_of(9), **how))
            ht.step_(model, skipped=seed == 1)
        return found

    expected = train(copy.deepcopy(model), apart=True)
    casts.clear()
    assert same(train(model), expected)
    assert len(casts) == 3 * (2 + 3)  # evaluation records nothing, of which nothing is shared


def apart_once(model):
    """One step in which the second layer reads another input."""
    first, second, third = model.layers
    x, other = (x_of(seed).requires_grad_() for seed in (5, 6))
    (first(x.view_as(x)).sum() + second(other.view_as(other)).sum() + third(x.view_as(x)).sum()).backward()
    model.zero_grad()
    ht.step_(model)


def one_alone(model):
    """One step that only the third layer takes."""
    x = x_of(5).requires_grad_()
    model.layers[2](x).sum().backward()
    model.zero_grad()
    ht.step_(model)


def written(model):
    model.layers[1].quantization_state.encode_scale.mul_(2.0)


def loaded(model):
    state = model.state_dict()
    name = next(name for name in state if "layers.2" in name and name.endswith("encode_scale"))
    model.load_state_dict(state | {name: state[name] * 0.5})


def compiled(model):
    layer = model.layers[0]
    run = torch.compile(lambda x: torch.nn.functional.linear(x, layer.weight), backend="aot_eager")
    run(x_of(5).requires_grad_()).sum().backward()
    torch._dynamo.reset()
    model.zero_grad()
    ht.step_(model)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("differ", [apart_once, one_alone, written, loaded, compiled], ids=lambda f: f.__name__)
def test_layers_whose_scales_differ_share_no_longer(differ, casts):
    model = Attention("fp8_delayed")
    twin = copy.deepcopy(model)
    for one in (model, twin):
        trained(one, range(2), apart=one is twin)
        differ(one)
    casts.clear()
    assert same(trained(model, range(2, 4)), trained(twin, range(2, 4), apart=True))
    assert len(casts) > 2 + 2 * 3


def by_state_dict(model):
    made = Attention("fp8_delayed")
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), by_state_dict], ids=["copy", "pickle", "loaded"]
)
def test_copies_and_loaded_models_share_delayed_scales(way, casts):
    model = Attention("fp8_delayed")
    trained(model, range(2))
    made = way(model)
    casts.clear()
    assert same(trained(made, range(2, 4)), trained(model, range(2, 4), apart=True))
    assert len(casts) == 2 + 2 * 3


def test_siblings_that_are_stepped_one_by_one_have_their_amaxes():
    model = Attention("fp8_delayed")
    by_layer = copy.deepcopy(model)
    for one in (model, by_layer):
        step(one, x_of(0))
    ht.step_(model)
    for layer in by_layer.layers:
        ht.step_(layer)
    assert same(*(list(one.buffers()) for one in (by_layer, model)))


def test_memory_of_amaxes_does_not_grow():
    """What is recorded for all weights at once, and for several layers, comes back to one of them, or goes."""
    model = Attention("fp8_delayed")
    for seed in range(30):
        trained(model, [seed % 4])
    assert max(len(layer.quantization_state.record._spare) for layer in model.layers) <= 12


@contextlib.contextmanager
def within(model):
    """Do what a forward of ``model`` does around the calls of its layers."""
    sharing._enter(model, ())
    yield model.layers
    sharing._leave(model, (), None)


def test_an_input_that_changed_is_quantized_again(casts):
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16)).clone()
    with within(model) as (first, second, _):
        first(x)
        x.mul_(3)
        assert second(x).equal(second(x.clone()))
    assert len(casts) == 3


@pytest.mark.parametrize("other", [lambda x: 2 * x.data, lambda x: x.data.clone().mul_(2), lambda x: x.data.flip(0)])
def test_an_input_with_other_memory_is_quantized_again(other):
    """``x.data = y`` counts as no write. Oracle: the same layers with sharing turned off, bitwise."""
    found = []
    for share in (True, False):
        model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16)).clone()
        with torch.random.fork_rng(), within(model) as (first, second, _), ht.share_inputs(share):
            x.data = torch.arange(x.numel()).view(x.shape).to(x.dtype) / 100
            first(x)
            x.data = other(x)
            found.append(second(x))
    assert torch.equal(*found)


WRITES = {
    "numpy": lambda x: x.view(torch.int16).numpy().__iadd__(128),  # times two
    "data": lambda x: x.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_shared_outside_of_one_forward(write):
    """Writes that nothing counts are seen: to what a script hands to one layer, then to another."""
    first, second, _ = Attention("fp8").layers
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16)).clone()
    first(x)
    with torch.no_grad():
        WRITES[write](x.detach() if write == "numpy" else x)
    assert second(x).equal(second(x.clone()))


@pytest.mark.parametrize("write", WRITES)
def test_writes_to_what_autograd_did_not_record_are_seen(write):
    """To a buffer of observations, as in reinforcement learning, that actor and critic read."""
    model, x = Attention("fp8"), torch.randn(64, SIZE, dtype=torch.bfloat16)
    with within(model) as (first, second, _):
        first(x)
        WRITES[write](x)
        assert second(x).equal(second(x.clone()))


def test_sharing_can_be_turned_off(casts):
    """For a forward that writes what it computed behind autograd's back."""
    model, x = Attention("fp8"), torch.randn(64, SIZE, dtype=torch.bfloat16)
    x.requires_grad_()
    double = WRITES["data"]
    expected = model(x.view_as(x).clone(), apart=True, between=double)
    with ht.share_inputs(False):
        assert model(x.view_as(x).clone(), between=double).equal(expected)
        assert len(casts) == 6
    assert not model(x.view_as(x).clone(), between=double).equal(expected)  # what the switch is for
    assert len(casts) == 7
    ht.share_inputs(False)
    assert model(x.view_as(x).clone(), between=double).equal(expected)
    ht.share_inputs(True)
    with pytest.raises(TypeError, match="share_inputs: enabled is True or False, got 'no'"):
        ht.share_inputs("no")


def test_layers_of_another_module_share_nothing(casts):
    model, other = ht.quantize_(nn.ModuleList([Attention("fp8"), Attention("fp8")]), "fp8")
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    with within(model), within(other):
        model.layers[0](x), other.layers[0](x)
    model(x), other(x)
    assert len(casts) == 4


def test_a_module_inside_of_a_module_shares_its_own(casts):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.inner, self.up = nn.Linear(SIZE, SIZE), nn.Module(), nn.Linear(SIZE, SIZE)
            self.inner = nn.Sequential(nn.Linear(SIZE, SIZE))

        def forward(self, x):
            return self.gate(x) + self.inner(x) + self.up(x)

    block = ht.quantize_(Block().bfloat16(), "fp8")
    block(recorded(torch.randn(64, SIZE, dtype=torch.bfloat16)))
    assert len(casts) == 2  # gate and up; the one inside


def test_a_forward_that_raises_leaves_nothing_behind(casts):
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))

    def fail(x):
        raise KeyError

    with pytest.raises(KeyError):
        model(x, between=fail)
    assert sharing._thread.scope is None
    model.layers[1](x)
    assert len(casts) == 2


def test_a_forward_that_is_interrupted_ends_when_the_next_one_does(casts):
    """torch tells no hook of an interrupt."""
    inner, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))

    def interrupt(x):
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            inner(x, between=interrupt)
    assert sharing._thread.scope is not None
    inner(x)
    assert sharing._thread.scope is None
    casts.clear()
    inner.layers[1](x)
    inner.layers[2](x)
    assert len(casts) == 2, "layers that are called by themselves share nothing"


def test_copies_and_pickles_share_among_themselves(casts):
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        casts.clear()
        assert copied(x).equal(model(x))
        assert len(casts) == 2


def test_a_weight_that_comes_again_quantizes_again():
    """As after the replay of a CUDA graph, which writes without being counted."""
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    with within(model) as (layer, *_):
        layer(x)
        WRITES["data"](x)
        assert layer(x).equal(layer(x.clone()))


def test_recipe_dtype_and_faces_tell_apart(casts):
    x = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    model = Attention("fp8")
    ht.set_config_(model, FqnToConfig({"layers.1": "fp8_rowwise"}))
    with within(model) as (a, b, other):
        assert a(x).equal(a(x.clone()))
        assert b(x).equal(b(x.clone()))
        assert len(casts) == 4
        other.weight.requires_grad_(False)
        other(x)  # without the columnwise face
        assert len(casts) == 5


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


def test_nothing_outlives_the_input_or_the_forward():
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    model.requires_grad_(False)  # so that results do not hold on to the face
    with within(model) as (layer, *_):
        layer(x)
        face = weakref.ref(sharing._thread.scope.cast.faces[0].qdata)
        assert face() is not None
        del x
        gc.collect()
        assert face() is None
        kept = recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
        layer(kept)
        face = weakref.ref(sharing._thread.scope.cast.faces[0].qdata)
    gc.collect()
    assert face() is None


def test_an_input_may_die_in_another_thread():
    model, box = Attention("fp8"), [recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))]
    with within(model) as (layer, *_):
        layer(box[0])
        assert sharing._thread.scope.input is not None
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert sharing._thread.scope.input is None


def test_threads_share_nothing(casts):
    model, x = Attention("fp8"), recorded(torch.randn(64, SIZE, dtype=torch.bfloat16))
    with within(model) as (first, second, _):
        first(x)
        thread = threading.Thread(target=lambda: second(x))
        thread.start()
        thread.join()
    assert len(casts) == 2


def test_inference_tensors_are_quantized_each_time(casts):
    """They have no version that would tell of a write."""
    model = Attention("fp8")
    with torch.inference_mode():
        model(torch.randn(64, SIZE, dtype=torch.bfloat16))
    assert len(casts) == 3


def test_persistent_weights_share_too(casts):
    model = Attention("bf16")
    ht.quantize_(model, "fp8", persistent=True)
    x = torch.randn(64, SIZE, dtype=torch.bfloat16)
    expected = step(model, x, apart=True)
    for got, value in zip(step(model, x), expected, strict=True):
        assert (got is None and value is None) or got.equal(value)
    assert len(casts) == 4


def test_an_input_whose_cast_raised_is_cast_by_the_next_layer(monkeypatch):
    """Oracle: the layer on the same values, alone."""
    model, original = Attention("fp8"), OneFormatQuantizer.faces
    x = recorded(torch.randn(SIZE, SIZE, dtype=torch.bfloat16))
    expected = model.layers[1](x.clone())

    def fails(self, x, *, context, **how):
        if context.role == "input":
            monkeypatch.setattr(OneFormatQuantizer, "faces", original)
            raise RuntimeError("no memory")
        return original(self, x, context=context, **how)

    def forward(x):
        with pytest.raises(RuntimeError, match="no memory"):
            model.layers[0](x)
        return model.layers[1](x)

    monkeypatch.setattr(OneFormatQuantizer, "faces", fails)
    monkeypatch.setattr(model, "forward", forward)
    assert torch.equal(model(x), expected)

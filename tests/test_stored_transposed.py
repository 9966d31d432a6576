"""Linear layers that store their weight ``[in, out]``, as GPT-2's do: bitwise those of ``nn.Linear``."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from any_layer import ANY_LAYER
from saving import through_a_file
from tiers import in_turn
from torch import nn
from torch.nn.utils import parametrize

import hybridtensor as ht
from hybridtensor.subclasses import is_converted

RECIPES = sorted(ANY_LAYER)
IN, HIDDEN = 64, 128


class Stored(nn.Module):
    """A layer of somebody's own."""

    is_transposed = True

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class ByAddmm(Stored):
    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class ByLinear(Stored):
    """Says one thing and does another."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def conv1d(inputs, outputs):
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(outputs, inputs)


KINDS = [ByAddmm, Stored, conv1d]


def make(kind=ByAddmm, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(kind(IN, HIDDEN), nn.GELU(), kind(HIDDEN, IN))


class Biased(nn.Linear):
    """``nn.Linear`` that adds its bias as ``Stored`` does."""

    def forward(self, x):
        return F.linear(x, self.weight) + self.bias


def twin_of(model):
    """The same layers as ``nn.Linear``."""
    twin = copy.deepcopy(model)
    for name, layer in model.named_children():
        if hasattr(layer, "weight"):
            inputs, outputs = layer.weight.shape
            linear = (Biased if type(layer) is Stored else nn.Linear)(inputs, outputs)
            with torch.no_grad():
                linear.weight.copy_(layer.weight.t())
                linear.bias.copy_(layer.bias)
            setattr(twin, name, linear)
    return twin


def batch(step=0):
    return torch.randn(4, 16, IN, generator=torch.Generator().manual_seed(step))


def as_linear(values, like):
    """A weight, or its gradient, ``[out, in]``."""
    return values.t() if values.dim() == 2 and values.shape != like.shape else values


def step_of(model, step=0):
    x = batch(step).requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_alike(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(as_linear(mine, theirs), theirs)


def twins(recipe, kind=ByAddmm, **options):
    model = make(kind)
    twin = twin_of(model)
    return ht.quantize_(model, recipe, **options), ht.quantize_(twin, recipe, **options)


@pytest.mark.parametrize(("recipe", "kind", "persistent"), in_turn(RECIPES, KINDS, [False, True, False, True]))
def test_training_is_that_of_linear_layers(recipe, kind, persistent):
    model, twin = twins(recipe, kind, persistent=persistent)
    assert all(is_converted(layer.weight) for layer in (model[0], model[2]))
    make_one = ht.optim.MasterWeights if persistent else lambda cls, parameters, **kw: cls(parameters, **kw)
    optimizers = [make_one(torch.optim.SGD, m.parameters(), lr=0.1) for m in (model, twin)]
    for step in range(3):
        found, expected = ([t.clone() for t in step_of(m, step)] for m in (model, twin))
        assert_alike(found, expected)
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            ht.step_(m)


@pytest.mark.parametrize("kind", KINDS)
def test_high_precision_is_bitwise_the_plain_layer(kind):
    assert_alike(step_of(ht.quantize_(make(kind), "bf16")), step_of(make(kind)))


@pytest.mark.parametrize(("recipe", "kind"), in_turn(["fp8", "fp8_rowwise", "nvfp4", "bf16"], KINDS))
def test_gradients_lie_as_their_weights(recipe, kind):
    """Else autograd copies each one into the order of its parameter."""
    model, lie = ht.quantize_(make(kind), recipe), []
    for layer in (model[0], model[2]):
        layer.weight.register_hook(lambda grad: lie.append((grad.shape, grad.is_contiguous())))
    model(batch()).sum().backward()
    assert lie == [((HIDDEN, IN), True), ((IN, HIDDEN), True)]


E5M2_ROWS = ht.HybridConfig(*2 * [ht.Float8Quantizer("row")], ht.Float8Quantizer("row", "e5m2"))


@pytest.mark.parametrize("recipe", ["fp8", "fp8_rowwise", "fp8_block", "mxfp8", E5M2_ROWS], ids=str)
def test_matrix_units_get_the_operands_the_other_way_round(recipe, device):
    """The weight's gradient, ``input.T @ grad``: that of a linear layer, but for sums in another order on a GPU."""
    steps = []
    for model in twins(recipe):
        x = batch().to(device, torch.bfloat16)
        model.to(device, torch.bfloat16)(x).square().mean().backward()
        steps.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*steps, strict=True):
        difference = as_linear(mine, theirs) - theirs
        assert difference.norm() <= (2**-8 * theirs.norm() if device == "cuda" else 0)


def test_who_is_such_a_layer():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(IN, HIDDEN))

        def forward(self, x):
            return x @ self.weight

    message = (
        "what is no layer: weight .64, 128.: Own is no nn.Linear; if it multiplies by its weight, its class says "
        "is_transposed = False of a weight .out, in., or True"
    )
    with pytest.raises(ValueError, match=message):
        ht.quantize_(Own(), "fp8")
    Own.is_transposed = True
    model = ht.quantize_(Own(), "fp8")
    assert model.weight.is_transposed
    assert not ht.check(model, batch()).problems


class OwnLinear(nn.Module):
    """A library's own class, as PyTorch Geometric's, with the weight of ``nn.Linear``."""

    is_transposed = False

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Linear(inputs, outputs).parameters()

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(("recipe", "persistent"), in_turn(RECIPES, [False, True]))
def test_classes_that_say_so_are_layers_as_nn_linear_is(recipe, persistent):
    results = []
    for kind in (OwnLinear, nn.Linear):
        model = make(kind)
        optimizer = torch.optim.SGD(ht.quantize_(model, recipe, persistent=persistent).parameters(), lr=0.1)
        steps = []
        for _ in range(2):
            steps += step_of(model)
            if not persistent:
                optimizer.step()
            optimizer.zero_grad()
            ht.step_(model)
        assert [row.layer for row in ht.explain(model, show=False).layers] == ["0", "2"]
        results.append(steps)
    assert_alike(*results)


def test_a_product_of_the_other_layout_raises():
    model = ht.quantize_(nn.Sequential(ByLinear(IN, IN)), "fp8")
    with pytest.raises(ValueError, match=r"weight of layer 0 is stored \[in, out\], which x @ weight multiplies.*;"):
        model(batch())


def test_sizes_and_names():
    """Blocks are those of ``[out, in]``; errors, patterns and rows name the layer."""
    model = nn.ModuleDict({"c_attn": Stored(40, 96), "lm_head": Stored(64, 96)})
    with pytest.raises(ValueError, match=r"layer c_attn.*\b40\b"):
        ht.quantize_(model, "mxfp8")
    ht.quantize_(model, "fp8_rowwise")
    assert [(row.layer, row.shape, row.in_features) for row in ht.explain(model, show=False).layers] == [
        ("c_attn", (40, 96), 40)
    ]
    assert not is_converted(model["lm_head"].weight)


def test_recipes_change_and_layers_become_plain():
    model, twin = twins("fp8")
    for m in (model, twin):
        ht.set_config_(m, "mxfp8/nvfp4/fp8_rowwise")
    assert_alike(step_of(model), step_of(twin))
    plain = make()
    for parameter in (*model.parameters(), *twin.parameters()):
        parameter.grad = None
    assert_alike(step_of(ht.plain_(model)), step_of(plain))
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("persistent", [False, True])
def test_state_dicts_and_copies(persistent):
    model, other = (ht.quantize_(make(seed=s), "fp8_delayed", persistent=persistent) for s in (0, 1))
    step_of(model)
    ht.step_(model)
    other.load_state_dict(through_a_file(model.state_dict(), weights_only=True))
    with torch.no_grad():
        expected = model(batch())
        for one in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(one(batch()), expected)
        if not persistent:
            assigned = ht.quantize_(make(seed=1), "fp8_delayed")
            assigned.load_state_dict(model.state_dict(), assign=True)
            assert torch.equal(assigned(batch()), expected)


def test_tensors_at_the_weight():
    """For one call, or computed by a parametrization."""
    model, twin = twins("fp8_rowwise")
    values = {name: torch.randn_like(p.detach()) for name, p in make().named_parameters()}
    turned = {name: v.t().contiguous() if v.dim() == 2 else v for name, v in values.items()}
    called = [torch.func.functional_call(m, v, batch()) for m, v in ((model, values), (twin, turned))]
    assert torch.equal(*called)
    # the same values in the memory order of their transposes
    values = {name: v.t().contiguous().t() if v.dim() == 2 else v for name, v in values.items()}
    assert torch.equal(torch.func.functional_call(model, values, batch()), called[0])
    for m in (model, twin):
        ht.plain_(m)
        for layer in (m[0], m[2]):
            parametrize.register_parametrization(layer, "weight", Doubled())
        ht.quantize_(m, "fp8_rowwise")
    assert_alike(step_of(model), step_of(twin))
    assert not ht.check(model, batch()).problems


def test_a_product_of_the_other_layout_raises_with_another_tensor_at_the_weight():
    """Also where both layouts would give an output of the same shape."""
    layer = ht.quantize_(nn.Sequential(ByLinear(IN, IN)), "fp8_rowwise")
    values = {"0.weight": torch.randn(IN, IN)}
    with pytest.raises(ValueError, match=r"stored \[in, out\], which x @ weight multiplies, .* the other layout"):
        torch.func.functional_call(layer, values, batch())


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("persistent", [False, True])
def test_quantized_files_come_back(persistent, tmp_path):
    """With the face that the forward multiplies, whatever its direction in the file."""
    model = ht.quantize_(make(), "mxfp8", persistent=persistent)
    loaded = ht.load_safetensors(ht.export_safetensors(model, tmp_path / "model.safetensors", "quantized"))
    for name in ("0.weight", "2.weight"):
        weight = model.get_parameter(name).detach().t()
        row = weight.rowwise.dequantize() if persistent else ht.MXFP8Quantizer().quantize(weight.plain).dequantize()
        assert torch.equal(loaded[name].dequantize().t(), row)
    values = ht.load_safetensors(ht.export_safetensors(model, tmp_path / "values.safetensors", "fp32"))
    assert values["0.weight"].shape == (IN, HIDDEN)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_files_hold_weights_that_are_not_quantized(persistent, columnwise, tmp_path):
    """Of two faces in high precision, one is written: not the other one, if only that is asked for."""
    values = make().state_dict()
    model = ht.quantize_(make(), "bf16", persistent=persistent)
    path = ht.export_safetensors(model, tmp_path / "model.safetensors", "quantized", columnwise=columnwise)
    loaded = ht.load_safetensors(path)
    for name in ("0.weight", "2.weight"):
        assert torch.equal(loaded[name].dequantize(), values[name])


def test_engines_have_no_layout_for_it(tmp_path):
    with pytest.raises(NotImplementedError, match=r"got 0.weight of a ByAddmm with weight \[in, out\].*keep_bf16"):
        ht.export_pretrained(ht.quantize_(make(), "fp8_rowwise"), tmp_path / "folder")


def test_graphs_are_those_of_eager_layers():
    model = ht.quantize_(make(), "fp8_rowwise")
    expected = [t.clone() for t in step_of(model)]
    model.zero_grad()
    assert_alike(step_of(torch.compile(model, backend="aot_eager", fullgraph=True)), expected)


def test_common_scales():
    options = {"common_scale": [("0", "2")]}
    model, twin = twins("fp8", **options)
    assert_alike(step_of(model), step_of(twin))
    assert ht.explain(model, show=False).layers[0].common_scale == ("0", "2")


def test_watching_and_advising_see_the_same_numbers():
    model, twin = twins("mxfp8")
    found = []
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        with ht.watch(m, every=1) as watched:
            for step in range(3):
                step_of(m, step)
                optimizer.step()
                ht.step_(m)
                optimizer.zero_grad()
        found.append(watched.scalars())
    assert found[0]
    assert found[0] == pytest.approx(found[1], rel=1e-12, abs=0)  # sums of float64 in another order
    advised = [
        ht.advise(m, [batch()], hardware="h200", loss=lambda m, x: m(x).square().mean())
        for m in (make(), twin_of(make()))
    ]
    for mine, theirs in zip(*(one.table for one in advised), strict=True):
        assert (mine.layer, mine.gemm, mine.format) == (theirs.layer, theirs.gemm, theirs.format)
        assert mine.noise == pytest.approx(theirs.noise, rel=1e-5)
        assert mine.weight == pytest.approx(theirs.weight, rel=1e-3)

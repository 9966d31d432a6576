"""What factories (``new_zeros`` and others) make of a converted weight: adapters of it are plain, weights of layers are
not."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from saving import through_a_file
from tiers import covered
from torch import nn
from torch.func import functional_call

import hybridtensor as ht

FACTORIES = {
    "new_zeros": lambda w, *shape: w.new_zeros(shape), "new_empty": lambda w, *shape: w.new_empty(shape),
    "new_ones": lambda w, *shape: w.new_ones(shape), "new_full": lambda w, *shape: w.new_full(shape, 0.5),
    "new_empty_strided": lambda w, *shape: w.new_empty_strided(shape, (shape[1], 1)),
    "a part of empty_like": lambda w, *shape: torch.empty_like(w)[: shape[0], : shape[1]],
    "a copy": lambda w, *shape: copy.deepcopy(w.new_zeros(shape)),
}  # fmt: skip
RECIPES = ["bf16", "fp8", "fp8_delayed", "nvfp4"]
WIDTH, RANK, STEPS = 32, 16, 2


def add_adapter(module, w, make):
    """Give a module an adapter that is written by hand."""
    module.down, module.up = (nn.Parameter(make(w, *shape)) for shape in ((RANK, WIDTH), (WIDTH, RANK)))
    with torch.no_grad():
        for weight in (module.down, module.up):
            weight.copy_(torch.randn(weight.shape))
    module.down.data = module.down.data / 8


class Adapted(nn.Module):
    """A layer, and an adapter beside it."""

    def __init__(self, layer, make):
        super().__init__()
        self.layer = layer
        add_adapter(self, layer.weight, make)

    def forward(self, x):
        return self.layer(x) + F.linear(x @ self.down.t(), self.up)


class WithAdapter(nn.Linear):
    """A layer that has its adapter itself."""

    def forward(self, x):
        return super().forward(x) + F.linear(x @ self.down.t(), self.up)


class ExpertsWithAdapter(nn.Module):
    """A module of experts that has an adapter for all of them."""

    def __init__(self, width, features):
        super().__init__()
        self.num_experts = 2
        self.w1 = nn.Parameter(torch.randn(2, features, width) / 4)

    def forward(self, x):
        ends = torch.tensor([8, 16], dtype=torch.int32)
        y = F.grouped_mm(x.bfloat16(), self.w1.transpose(-2, -1).bfloat16(), offs=ends)
        return y + F.linear(x @ self.down.t(), self.up)


def adapted(kind, recipe, make):
    """Return a model of one layer with an adapter, and none of them converted but the layer."""
    if kind is Adapted:
        return Adapted(ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), recipe)[0], make)
    model = ht.quantize_(nn.Sequential(kind(WIDTH, WIDTH)), recipe)
    add_adapter(model[0], next(model.parameters()), make)
    return model


def trained(recipe, make, compiled=False, kind=Adapted):
    """Return losses, trained parameters, and the state of the layer."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = adapted(kind, recipe, make)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for _ in range(STEPS):
        loss = run(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        found.append(loss.detach())
    return [*found, *(ht.plain_(model).state_dict().values())]


@pytest.mark.parametrize(
    ("recipe", "factory", "compiled", "kind"),
    covered(RECIPES, list(FACTORIES), [False, True], [Adapted, WithAdapter, ExpertsWithAdapter]),
)
def test_an_adapter_made_of_the_weight_is_plain(recipe, factory, compiled, kind):
    """As one of ``torch.zeros``: its products, and the scales of the layer."""
    expected = trained(recipe, lambda w, *shape: torch.zeros(shape), compiled, kind)
    # Of experts a part of a stack is one, and a matrix is made of it
    make = FACTORIES[factory]
    if kind is ExpertsWithAdapter:
        make = lambda w, *shape: FACTORIES[factory](w[0], *shape)  # noqa: E731
    for got, value in zip(trained(recipe, make, compiled, kind), expected, strict=True):
        assert torch.equal(got, value)


E, N = 4, 16
PRODUCTS = {
    "einsum": lambda x, w: torch.einsum("etk,ekn->etn", x, w), "bmm": torch.bmm, "matmul": torch.matmul,
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([2], [1])), "inner": lambda x, w: torch.inner(x, w[0].t()),
    "grouped": lambda x, w: F.grouped_mm(x[0], w, offs=torch.tensor([2, 4, 4, 8], dtype=torch.int32)),
    "list": lambda x, w: torch.linalg.multi_dot([x[0], w[0], w[1].t()]), "left": lambda x, w: w[0].t() @ x[0].t(),
    "named": lambda x, w: F.linear(x, weight=w[0].t()), "addmm": lambda x, w: torch.addmm(x[0, :, :N], x[0], w[0]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "compiled"), covered(list(PRODUCTS), [False, True]))
def test_every_product_of_an_adapter_is_plain(name, compiled, fresh_compiler):
    layer = ht.quantize_(nn.Linear(WIDTH, WIDTH).bfloat16(), "fp8_delayed")
    x, product = torch.randn(E, 8, WIDTH, dtype=torch.bfloat16), PRODUCTS[name]
    run, found = torch.compile(product, backend="aot_eager") if compiled else product, []
    values = torch.randn(E, WIDTH, N)
    for multiply, made in ((product, torch.empty(E, WIDTH, N).bfloat16()), (run, layer.weight.new_empty(E, WIDTH, N))):
        weight = nn.Parameter(made)
        with torch.no_grad():
            weight.copy_(values)
        y = multiply(x, weight)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), weight.grad))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got, expected)
    assert layer.quantization_state.amax.eq(0).all()


@pytest.mark.parametrize("saved", [copy.deepcopy, functools.partial(through_a_file, weights_only=False)])
def test_a_copy_of_the_model_has_such_adapters_too(saved):
    model = Adapted(ht.quantize_(nn.Linear(WIDTH, WIDTH), "fp8"), FACTORIES["new_zeros"])
    x = torch.randn(16, WIDTH)
    other = saved(model)
    assert torch.equal(other(x), model(x))
    assert torch.equal(F.linear(x, other.down), F.linear(x, model.down.master))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["assigned", "to_empty", "data"])
def test_a_weight_of_a_layer_is_quantized(how, compiled):
    """Also where a factory made it of the layer's former weight."""
    model, other = (ht.quantize_(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "fp8") for _ in range(2))
    if how == "to_empty":
        model.to_empty(device="cpu")
    elif how == "assigned":
        model[0].weight = nn.Parameter(model[0].weight.new_empty(WIDTH, WIDTH))
    else:
        model[0].weight.data = model[0].weight.new_empty(WIDTH, WIDTH)
    model.load_state_dict(other.state_dict())
    x = torch.randn(16, WIDTH)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    assert torch.equal(run(x), other(x))
    assert not torch.equal(run(x), ht.plain_(copy.deepcopy(other))(x))


class Own(nn.Linear):
    """Has a forward of its own, in which products are intercepted."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Experts(nn.Module):
    """Experts with one stack of weights, half of the tokens to each."""

    def __init__(self, width, features):
        super().__init__()
        self.num_experts = 2
        self.w1 = nn.Parameter(torch.randn(2, features, width))

    def forward(self, x):
        return F.grouped_mm(x, self.w1.transpose(-2, -1), offs=torch.tensor([8, 16], dtype=torch.int32))


def converted(kind, recipe, width=WIDTH, features=WIDTH):
    layer = kind(width, features).bfloat16()
    return ht.quantize_(nn.ModuleDict({"layer": layer}), recipe)["layer"]


@pytest.mark.parametrize(
    ("kind", "how", "other_recipe", "compiled"),
    covered([nn.Linear, Own, Experts], ["assigned", "functional_call"], [False, True], [False, True]),
)
def test_what_a_layer_gets_of_another_ones_weight_is_quantized(kind, how, other_recipe, compiled, fresh_compiler):
    """As by its own weight with the same values; a graph would take it for an adapter's."""
    name = "w1" if kind is Experts else "weight"
    layer = converted(kind, "fp8")
    other = converted(kind, "fp8_rowwise" if other_recipe else "fp8", features=2 * WIDTH)
    made = getattr(other, name).new_empty(getattr(layer, name).shape)
    with torch.no_grad():
        made.copy_(torch.randn(made.shape))
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16)
    reference = converted(kind, "fp8_rowwise" if other_recipe else "fp8")
    with torch.no_grad():
        for own, value in zip(reference.parameters(), layer.parameters(), strict=True):
            own.copy_(value)
        getattr(reference, name).copy_(made)
    if how == "assigned":
        setattr(layer, name, nn.Parameter(made))
        call = layer
    else:
        call = lambda x: functional_call(layer, {name: made}, (x,))  # noqa: E731
    run = torch.compile(call, backend="aot_eager") if compiled else call
    for _ in range(2):
        assert torch.equal(run(x), reference(x))


def test_a_persistent_weight_makes_no_adapters():
    layer = ht.quantize_(nn.Linear(WIDTH, WIDTH), "fp8", persistent=True)
    down = nn.Parameter(layer.weight.new_zeros(RANK, WIDTH))
    with pytest.raises(NotImplementedError, match=r"made of a persistent weight by new_zeros.*torch\.zeros"):
        F.linear(torch.randn(16, WIDTH), down)
    assert type(layer.weight.new_ones(2)) is type(layer.weight.new_full((2,), 3.0)) is torch.Tensor


class Lora(nn.Module):
    """An adapter of two linear layers, which is not converted."""

    def __init__(self, layer, make):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for own in (self.down, self.up):
            own.weight = nn.Parameter(make(layer.weight, *own.weight.shape))
            nn.init.eye_(own.weight)


class ExpertsLora(nn.Module):
    """Experts, and an adapter that is a stack of matrices."""

    def __init__(self, experts, make):
        super().__init__()
        self.experts, self.num_experts = experts, 2
        self.down = nn.Parameter(make(experts.w1, 2, WIDTH, WIDTH))
        with torch.no_grad():
            self.down.copy_(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x):
        x = F.grouped_mm(x, self.down.transpose(-2, -1), offs=torch.tensor([8, 16], dtype=torch.int32))
        return self.experts(x)


MADE = [lambda w, *shape: torch.empty(shape, dtype=w.dtype), lambda w, *shape: w.new_empty(shape)]


@pytest.mark.parametrize("kind", [Lora, ExpertsLora])
def test_adapters_are_explained_and_exported_in_high_precision(kind, tmp_path):
    found = []
    for index, make in enumerate(MADE):
        torch.manual_seed(0)
        model = kind(converted(Experts if kind is ExpertsLora else nn.Linear, "fp8_block"), make)
        ht.export_safetensors(model, tmp_path / f"{index}", dtype="quantized")
        exported = dict(ht.inference_tensors(model)), load_file(tmp_path / f"{index}")
        found.append((str(ht.explain(model)), *exported))
    (said, *exports), (expected_said, *expected_exports) = found
    assert said == expected_said
    for tensors, expected in zip(exports, expected_exports, strict=True):
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype is expected[name].dtype
            assert torch.equal(tensor, expected[name])


def test_adapters_of_experts_stay_plain_with_another_recipe():
    x, found = torch.randn(16, WIDTH, dtype=torch.bfloat16), []
    for make in MADE:
        torch.manual_seed(0)
        model = ExpertsLora(converted(Experts, "fp8"), make)
        found.append(ht.set_config_(model, "mxfp8")(x))
    assert torch.equal(*found)

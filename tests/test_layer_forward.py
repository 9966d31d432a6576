"""A converted layer applies its recipe to whatever tensor stands at ``weight``; transforms raise."""

import copy
import functools
import gc
import inspect
import io
import pickle
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils as utils
from processes import call
from rich.console import Console
from saving import through_a_file
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode

import hybridtensor as ht

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))


def model(recipe=None, seed=0):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    return made if recipe is None else ht.quantize_(made, recipe)


def grads(parameters):
    return [p.grad for p in parameters]


@pytest.mark.parametrize(
    "recipe", ["fp8", "fp8_delayed", "mxfp8", "nvfp4", "fp8+dequantized", "fp8+save_original_input"]
)
def test_functional_call(recipe):
    """Bitwise the layers with these weights: outputs, gradients of what was put there, state."""
    ours, plain, same = model(recipe), model(seed=1), model(seed=1)
    ht.quantize_(same, recipe)
    for _ in range(2):
        expected, got = same(X), functional_call(ours, dict(plain.named_parameters()), X)
        assert torch.equal(got, expected)
        for out, net in ((expected, same), (got, plain)):
            net.zero_grad()
            out.square().sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(grads(plain.parameters()), grads(same.parameters()), strict=True))
        for net in (ours, same):
            ht.step_(net)
    assert torch.equal(functional_call(ours, ours.state_dict(), X), ours(X))
    assert not torch.equal(ours(X), same(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of an input that goes on after a graph break
def test_functional_call_in_a_compiled_function():
    ours, plain = model("fp8"), model(seed=1)
    call = torch.compile(lambda weights, x: functional_call(ours, weights, x), backend="aot_eager")
    expected = ht.quantize_(copy.deepcopy(plain), "fp8")(X)
    assert torch.equal(call(dict(plain.named_parameters()), X), expected)


class Registering(nn.Linear):
    """A layer that notes which of its parameters are read, as Pyro's do: what is not read is not trained."""

    def __getattr__(self, name):
        found = super().__getattr__(name)
        if isinstance(found, nn.Parameter):
            self.__dict__.setdefault("read", []).append(name)
        return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
@pytest.mark.parametrize("before", [True, False])
def test_a_class_that_overrides_reads_of_attributes_sees_those_of_the_weight(recipe, before):
    layer = (Registering if before else nn.Linear)(64, 64)
    ht.quantize_(layer, recipe)
    layer.__class__ = Registering  # as to_pyro_module_ does
    layer.__dict__.pop("read", None)
    layer(X)
    assert {"weight", "bias"} <= set(layer.read)


class Doubling(nn.Linear):
    """A layer that multiplies by more than its parameter."""

    @property
    def weight(self):
        return self._parameters["weight"] * 2


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
@pytest.mark.parametrize("before", [True, False])
def test_a_class_that_computes_its_weight_multiplies_by_what_it_computes(recipe, before):
    """Bitwise as a layer whose parameter is that: output and gradients; doubling rounds nothing."""
    layer, same = nn.Linear(64, 64), nn.Linear(64, 64)
    same.load_state_dict({"weight": 2 * layer.weight.detach(), "bias": layer.bias.detach()})
    ht.quantize_(same, recipe)
    layer.__class__ = Doubling if before else nn.Linear
    ht.quantize_(layer, recipe).__class__ = Doubling
    got, expected = layer(X), same(X)
    assert torch.equal(got, expected)
    for out in (got, expected):
        out.square().sum().backward()
    assert torch.equal(layer._parameters["weight"].grad, 2 * same.weight.grad)
    assert torch.equal(layer.bias.grad, same.bias.grad)
    assert torch.equal(torch.compile(layer, backend="eager")(X), expected)  # in eager code between graphs


class DoublingByItself(Doubling):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_that_computes_its_weight_anew_says_that_it_is_plain(before):
    layer = nn.Linear(64, 64)
    expected = F.linear(X, 2 * layer.weight, layer.bias)
    layer.__class__ = DoublingByItself if before else nn.Linear
    ht.quantize_(layer, "fp8").__class__ = DoublingByItself
    with pytest.warns(UserWarning, match=r"\(DoublingByItself\) runs unquantized: its forward"):
        assert torch.equal(layer(X), expected)


COMPUTED = {
    "weight_norm": utils.weight_norm, "spectral_norm": utils.spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm, "orthogonal": parametrizations.orthogonal,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_computed_weights(kind, order):
    """Before and after conversion: the layer computes bitwise as one with the computed values."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    steps = [lambda: ht.quantize_(layer, "fp8"), lambda: COMPUTED[kind](layer)]
    for act in steps if order == "after" else steps[::-1]:
        act()
    trained = [p for name, p in layer.named_parameters() if name != "bias"]
    for _ in range(2):
        layer.zero_grad()
        layer(X).square().sum().backward()
        assert all(p.grad is not None for p in trained)
        with torch.no_grad():
            for p in trained:
                p.add_(p.grad, alpha=-1e-4)
    layer.eval()
    out = layer(X)
    fresh = ht.quantize_(nn.Linear(64, 64), "fp8")
    fresh.weight.data, fresh.bias.data = layer.weight.detach().clone(), layer.bias.data
    assert type(layer.weight) is torch.Tensor
    assert torch.equal(out, fresh(X))
    assert not torch.equal(out, nn.functional.linear(X, layer.weight, layer.bias))


class HandingOn(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("function", [lambda w: w, torch.clone, lambda w: w.t().t()], ids=["same", "clone", "view"])
def test_a_parametrization_that_hands_the_weight_on(function, persistent):
    ours, same = (ht.quantize_(model(), "fp8_delayed", persistent=persistent) for _ in range(2))
    parametrize.register_parametrization(ours[0], "weight", HandingOn(function))
    for _ in range(2):
        outs = [net(X) for net in (ours, same)]
        assert torch.equal(*outs)
        for net, out in zip((ours, same), outs, strict=True):
            net.zero_grad()
            out.square().sum().backward()
            ht.step_(net)
        assert torch.equal(ours[0].parametrizations.weight.original.grad, same[0].weight.grad)


def test_a_weight_that_is_a_buffer():
    ours, same = model("fp8"), model("fp8")
    weight = ours[0].weight.detach().clone()
    del ours[0].weight
    ours[0].register_buffer("weight", weight)
    assert torch.equal(ours(X), same(X))


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8_delayed"])
def test_a_weight_that_torchao_quantized(recipe):
    """Not quantized twice: an error names the layer and what to call, after which the model is torchao's."""
    quantization = pytest.importorskip("torchao.quantization")
    ours, expected = model(recipe), model()
    for net in (ours, expected):
        quantization.quantize_(net, quantization.Int8WeightOnlyConfig())
    if recipe != "bf16":
        with pytest.raises(TypeError, match=r"weight of layer 0, got Int8Tensor.* call plain_ before"):
            ours(X)
        ours = ht.plain_(model(recipe))
        quantization.quantize_(ours, quantization.Int8WeightOnlyConfig())
    assert torch.equal(ours(X), expected(X))


def test_prune_and_remove():
    layer = ht.quantize_(nn.Linear(64, 64), "fp8")
    prune.l1_unstructured(layer, "weight", 0.5)
    layer(X)
    expected = layer.weight.detach().clone()
    prune.remove(layer, "weight")
    assert isinstance(layer.weight, ht.MasterWeight)
    assert torch.equal(layer.weight.dequantize(), expected)
    fresh = ht.quantize_(nn.Linear(64, 64), "fp8")
    fresh.weight.data, fresh.bias.data = expected, layer.bias.data
    assert torch.equal(layer(X), fresh(X))


def test_the_recipe_of_a_computed_weight_changes_and_is_copied():
    layer = parametrizations.weight_norm(nn.Linear(64, 64))
    ht.quantize_(layer, "fp8_delayed", name="layer")
    assert set(layer.quantization_state.slots) == {"input", "weight", "grad_output"}
    copied = copy.deepcopy(layer)
    ht.set_config_(layer, "mxfp8")
    fresh = ht.quantize_(nn.Linear(64, 64), "mxfp8")
    fresh.weight.data, fresh.bias.data = layer.weight.detach().clone(), layer.bias.data
    assert torch.equal(layer(X), fresh(X))
    copied(X).sum().backward()
    assert copied.quantization_state.amax.min() > 0
    assert layer.quantization_state.is_empty


def test_other_products_of_a_layer_are_its_own():
    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(64, 64)
            self.other = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return nn.functional.linear(x, self.weight) + nn.functional.linear(x, self.other)

    torch.manual_seed(0)
    layer = ht.quantize_(Adapted(), "fp8")
    weights = {"weight": layer.weight.dequantize().clone(), "other": layer.other.detach()}
    assert torch.equal(functional_call(layer, weights, X), layer(X))


def test_an_input_by_name():
    layer, weights = ht.quantize_(nn.Linear(64, 64), "fp8"), nn.Linear(64, 64)
    values = dict(weights.named_parameters())
    assert torch.equal(functional_call(layer, values, (), {"input": X}), functional_call(layer, values, X))


def test_an_input_that_is_quantized():
    layer, weights = ht.quantize_(nn.Linear(64, 64), "fp8"), nn.Linear(64, 64)
    quantized = layer.weight.config.input.quantize(X)
    values = dict(weights.named_parameters())
    assert torch.equal(functional_call(layer, values, quantized), functional_call(layer, values, X))


TRANSFORMS = {
    "an ensemble": lambda m, p: torch.vmap(lambda w: functional_call(m, w, X))(
        stack_module_state([model(seed=s) for s in range(2)])[0]
    ),
    "vmap": lambda m, p: torch.vmap(m)(X),
    "grad": lambda m, p: torch.func.grad(lambda w: functional_call(m, w, X).sum())(p),
    "jvp": lambda m, p: torch.func.jvp(m, (X,), (X,)),
    "jacrev": lambda m, p: torch.func.jacrev(m)(X),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_raise(name):
    with pytest.raises(NotImplementedError, match=r"no rule for torch\.func transforms"):
        TRANSFORMS[name](model("fp8"), dict(model().named_parameters()))


@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_differentiation_raises(trained):
    """Where nothing requires a gradient the tangent was None, which torch takes for zero."""
    net = model("fp8").requires_grad_(trained)
    with forward_ad.dual_level():
        net(X)  # nothing follows it
        with pytest.raises(NotImplementedError, match="no rule for forward-mode differentiation"):
            net(forward_ad.make_dual(X, torch.ones_like(X)))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_traces_of_torchscript_raise():
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.trace cannot record quantized products"):
        torch.jit.trace(model("fp8"), X)


def test_persistent_weights_are_parameters():
    layer = parametrizations.weight_norm(nn.Linear(64, 64))
    with pytest.raises(TypeError, match="its weight is a Tensor, not a Parameter; remove what computes it"):
        ht.quantize_(layer, "fp8", persistent=True)


@pytest.mark.parametrize(
    "multiply", [torch.matmul, lambda a, b: F.linear(a, b.t()), lambda a, b: F.linear(b.t(), a).t()]
)
def test_two_weights_are_multiplied_as_values(multiply):
    a, b = model("fp8")[0].weight, model("fp8", seed=1)[0].weight
    product = multiply(a, b)
    product.sum().backward()
    torch.testing.assert_close(product, a.dequantize() @ b.dequantize())
    torch.testing.assert_close(a.grad, torch.ones(64, 64) @ b.dequantize().t())


@pytest.mark.filterwarnings("ignore:.* should not be instantiated")  # torch's own, when it compiles
@pytest.mark.parametrize(("compiled", "persistent"), [(False, False), (True, False), (False, True)])
def test_a_weight_as_the_input_of_a_layer_is_quantized(compiled, persistent):
    """As a layer that projects a whole embedding does, whose weight is also that of a converted head."""
    ours, same = (ht.quantize_(model(), "fp8", persistent=persistent) for _ in range(2))
    layer = torch.compile(ours[0], backend="aot_eager", fullgraph=True) if compiled else ours[0]
    values = ours[2].weight.detach().dequantize().requires_grad_()
    layer(ours[2].weight).square().sum().backward()
    same[0](values).square().sum().backward()
    assert torch.equal(ours[2].weight.grad, values.grad)
    assert torch.equal(ours[0].weight.grad, same[0].weight.grad)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_weight_as_the_input_of_linear_is_multiplied_as_left_of_a_matrix(recipe):
    weight, other, bias = model(recipe)[0].weight, torch.randn(32, 64), torch.randn(32)
    product = F.linear(weight, other, bias)
    assert torch.equal(product, weight @ other.t() + bias)
    plain = weight.dequantize() @ other.t() + bias
    assert (recipe == "bf16") == torch.allclose(product, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("multiply", [lambda x, w: x @ w.t(), lambda x, w: torch.mm(x, mat2=w.t())])
def test_a_product_that_would_stay_plain_is_refused(multiply):
    class Own(nn.Linear):
        def forward(self, x):
            return multiply(x, self.weight)

    layer = ht.quantize_(Own(64, 64), "fp8")
    layer(X)
    with pytest.raises(
        NotImplementedError, match=r"Own\.forward multiplies its weight by another function than F\.linear"
    ):
        functional_call(layer, dict(nn.Linear(64, 64).named_parameters()), X)


OTHER_PRODUCTS = {
    "a part": lambda x, w: F.linear(x, w[:32]), "a view": lambda x, w: F.linear(x, w.view(64, 64)),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]), "einsum": lambda x, w: torch.einsum("tk,nk->tn", x, w),
    "baddbmm": lambda x, w: torch.baddbmm(torch.zeros(1, 1, 64), x[None], w.t()[None]),
    "inner": torch.inner, "method": lambda x, w: x.inner(w), "vector": lambda x, w: torch.mv(w, x[0]),
    "list": lambda x, w: torch.einsum("tk,nk->tn", [x, w]), "chain": lambda x, w: torch.linalg.multi_dot([x, w.t()]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])),
}  # fmt: skip


@pytest.mark.parametrize("how", OTHER_PRODUCTS)
def test_every_product_of_a_plain_tensor_at_a_weight_is_refused(how):
    """They ran in high precision, and nothing said so."""

    class Own(nn.Linear):
        def forward(self, x):
            return OTHER_PRODUCTS[how](x, self.weight)

    layer = ht.quantize_(Own(64, 64), "fp8")
    layer.weight = nn.Parameter(torch.randn(64, 64))
    with pytest.raises(
        NotImplementedError, match=r"Own\.forward multiplies its weight by another function than F\.linear"
    ):
        layer(X)


def test_other_products_in_the_forward_of_a_layer_stay():
    class Own(nn.Linear):
        def forward(self, x):
            return F.linear(torch.einsum("tk,nk->tn", x, OTHER), self.weight)

    layer = ht.quantize_(Own(64, 64), "fp8")
    layer.weight = nn.Parameter(torch.randn(64, 64))
    assert layer(X).shape == X.shape


OTHER = torch.eye(64)


def test_weights_in_one_storage_are_told_apart():
    """As flat parameters lie: one behind the other."""

    class Adapted(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight) + F.linear(x, self.other)

    flat = torch.randn(2, 64, 64)
    layer = ht.quantize_(Adapted(64, 64), "fp8")
    layer.weight, layer.other = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    difference = layer(X) - F.linear(X, flat[1])
    assert 0 < (difference - X @ flat[0].t()).norm() < 0.1 * difference.norm()


def test_converting_and_explaining_leave_parametrizations_as_they_are(caplog):
    """Power iterations of a spectral norm go on when a weight is read in training."""
    torch.manual_seed(0)
    model = nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(64, 64)) for _ in range(2)))
    before = [buffer.clone() for buffer in model.buffers()]
    resting = model[1].parametrizations.weight[0].eval()
    ht.explain(ht.quantize_(model, "fp8"), show=False)
    assert all(map(torch.equal, model.buffers(), before))
    assert [module for module in model.modules() if not module.training] == [resting]


def test_a_parametrized_layer_counts_as_quantized(caplog):
    model = ht.quantize_(nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 64))), "fp8")
    assert not [record for record in caplog.records if record.name == "hybridtensor"]  # no warning
    found = ht.check(model, X, strict=True)
    assert (found.problems, found.coverage.products) == ([], 1.0)
    plain = ht.quantize_(
        nn.Sequential(nn.Linear(64, 64), parametrizations.weight_norm(nn.Linear(64, 64))), "fp8", keep_bf16=["1"]
    )
    left = [matrix.name for matrix in ht.check(plain, X).coverage.plain]
    assert "1.parametrizations.weight.original1" in left


def test_weight_norm_of_a_persistent_weight_is_refused():
    """torch took the error of the norm for a parametrization without an inverse, and failed later."""
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64)), "fp8", persistent=True)
    with pytest.raises(
        TypeError, match=r"^weight_norm: a weight in high precision .* layer 0 that is persistent; call"
    ):
        parametrizations.weight_norm(model[0])
    assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]


# -- a layer's forward, which is the layer's own: copied, pickled, and under and over those of others


class Above:
    """A forward that a library puts over a layer's, as accelerate does: a function of the one before."""

    def __init__(self, layer):
        self.before = layer.forward
        layer.forward = self

    def __call__(self, x):
        return self.before(x) + 1


def twice(layer, x):
    return nn.Linear.forward(layer, x) * 2


def under(layer):
    """A bound method that a library gave the layer before it was converted."""
    layer.forward = types.MethodType(twice, layer)


def converted(kind):
    layer = nn.Linear(64, 64)
    if kind == "under":
        under(layer)
    ht.quantize_(layer, "fp8")
    if kind == "above":
        Above(layer)
    return layer


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m: through_a_file(m, weights_only=False),
}


@pytest.mark.parametrize("kind", ["alone", "above", "under"])
@pytest.mark.parametrize("how", COPIES)
def test_the_copy_of_a_layer_has_a_forward_of_its_own(how, kind):
    torch.manual_seed(0)
    layer = converted(kind)
    plain = F.linear(X, layer.weight.dequantize(), layer.bias)
    changed = {"alone": lambda y: y, "above": lambda y: y + 1, "under": lambda y: y * 2}[kind]
    expected = layer(X)
    fresh = ht.quantize_(nn.Linear(64, 64), "fp8")
    fresh.weight.data, fresh.bias.data = layer.weight.dequantize().clone(), layer.bias.data
    assert torch.equal(expected, changed(fresh(X)))
    made = COPIES[how](layer)
    assert torch.equal(made(X), expected)
    with torch.no_grad():
        made.weight.zero_()
        made.bias.zero_()
    assert torch.equal(made(X), changed(torch.zeros_like(plain)))
    assert torch.equal(layer(X), expected)
    values = {"weight": torch.zeros(64, 64), "bias": torch.zeros(64)}
    assert torch.equal(functional_call(layer, values, X), changed(torch.zeros_like(plain)))


@pytest.mark.parametrize("ask", [ht.explain, lambda m: ht.check(m, X), lambda m: ht.set_config_(m, "mxfp8")])
@pytest.mark.parametrize("kind", ["alone", "under"])
def test_a_shallow_copy_runs_the_original_and_is_refused(kind, ask):
    model = nn.Sequential(converted(kind))
    model.append(copy.copy(model[0]))
    with pytest.raises(ValueError, match=r"layer 1: .*got a shallow copy.*copy\.deepcopy"):
        ask(model)
    ask(copy.copy(model[:1]))


def test_a_layer_in_another_process():
    layer = converted("under")
    values = pickle.dumps(layer)  # torch's own reduction would share memory, which wrappers have none of
    assert call(unpickle_and_run, values) == layer(X).tolist()


def unpickle_and_run(values):
    return pickle.loads(values)(X).tolist()


@pytest.mark.parametrize("kind", ["alone", "above", "under"])
def test_plain_gives_the_former_forward_back(kind):
    layer = converted(kind)
    ht.plain_(layer)
    expected = nn.Linear.forward(layer, X)
    assert torch.equal(layer(X), {"alone": expected, "above": expected + 1, "under": expected * 2}[kind])
    if kind != "above":  # what is above calls ours, which has nothing to do any more
        assert ("forward" in layer.__dict__) == (kind == "under")


def test_modes_see_the_linear_that_a_layer_is():
    """A mode of torch functions, as torch's own for devices, or a library's that counts operations."""
    seen = []

    class Counting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    layer = converted("alone")
    expected = layer(X)
    with Counting():
        assert torch.equal(layer(X), expected)
    assert F.linear in seen


def test_the_type_and_signature_of_a_layer_stay():
    layer = converted("alone")
    assert type(layer) is nn.Linear
    assert str(inspect.signature(layer.forward)) == str(inspect.signature(nn.Linear(1, 1).forward))
    expected, forward = layer(X), layer.forward
    layer.forward = functools.update_wrapper(functools.partial(forward), forward)  # as accelerate's hooks are put
    assert torch.equal(copy.deepcopy(layer)(X), expected)


def test_the_signature_of_a_forward_under_ours_stays():
    def gated(x, *, gate: float = 1.0) -> torch.Tensor:
        return x * gate

    layer = nn.Linear(64, 64)
    layer.forward = gated
    ht.quantize_(layer, "fp8")
    assert str(inspect.signature(layer.forward)) == "(x, *, gate: float = 1.0) -> torch.Tensor"
    assert torch.equal(layer(X, gate=2.0), X * 2)
    under(other := nn.Linear(64, 64))
    ht.quantize_(other, "fp8")
    assert str(inspect.signature(other.forward)) == "(x)"


def test_a_forward_whose_layer_is_gone():
    forward = converted("alone").forward
    gc.collect()
    with pytest.raises(RuntimeError, match="forward: the layer that this is the forward of is gone"):
        forward(X)


def test_a_layer_is_freed_at_once():
    layer = converted("under")
    gone = weakref.ref(layer)
    layer(X)
    gc.disable()
    try:
        del layer.forward.__self__.inner  # a bound method of the layer is a cycle, as without us
        del layer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "fp8_block", "nvfp4"])
def test_an_overflow_may_be_finite_behind_a_product(recipe):
    """What the documentation says of loss scales in float16."""
    model = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)).half(), recipe)
    grad = torch.ones(32, 64).half()
    grad[3, 5] = torch.inf
    model(X.half()).backward(grad)
    assert model[0].weight.grad.isfinite().all()


def test_a_layer_is_exported_by_itself():
    layer = ht.quantize_(nn.Linear(64, 64), "fp8").eval()
    exported = torch.export.export(layer, (X,)).module()
    assert torch.equal(exported(X), layer(X))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_layers_converted_in_inference_mode_run_and_are_trained(recipe):
    with torch.inference_mode():
        converted = ht.quantize_(model(), recipe)  # of parameters that belong to inference
        assert converted(X).isfinite().all()
    trained, expected = model(), model(recipe)
    with torch.inference_mode():
        ht.quantize_(trained, recipe)
        assert torch.equal(trained(X), expected(X))
    for one in (trained, expected):
        one(X).square().mean().backward()
        ht.step_(one)
    assert all(map(torch.equal, grads(trained.parameters()), grads(expected.parameters())))


class Scaled(nn.Linear):
    """Reads its weight, and multiplies by what it made of it."""

    def forward(self, x):
        return F.linear(x, self.weight * 1.0, self.bias)


class Regularized(nn.Linear):
    """Reads its weight, and multiplies by it."""

    def forward(self, x):
        self.penalty = self.weight.norm()
        return F.linear(x, self.weight, self.bias)


def test_a_layer_that_only_reads_its_weight_warns_once():
    net = ht.quantize_(nn.Sequential(Regularized(64, 64), Scaled(64, 64)), "fp8")  # warnings are errors here
    with pytest.warns(UserWarning, match=r"layer 1 \(Scaled\) runs unquantized: its forward reads .*aten\.mul") as told:
        net(X).sum().backward()
    assert len(told) == 1
    assert told[0].filename.endswith("container.py")  # which called the layer
    net(X)
    again = copy.deepcopy(net[1])
    with pytest.warns(UserWarning, match="runs unquantized"):
        again(X)
    assert [row.own_forward for row in ht.explain(net, show=False).layers] == ["Regularized", "Scaled"]
    explained = io.StringIO()
    Console(file=explained, width=200).print(ht.explain(net, show=False))
    assert "only if its own forward multiplies by the weight itself: 1 (Scaled)" in explained.getvalue()


def test_a_layer_whose_first_forward_fails_warns_in_the_next_one():
    layer = ht.quantize_(Scaled(64, 64), "fp8", filter_fn=lambda *_: True)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(X[:, 1:])
    with pytest.warns(UserWarning, match=r"\(Scaled\) runs unquantized: its forward reads"):
        layer(X)

"""Experts apply their recipes to whatever tensors stand at the names of their weights."""

import contextlib
import copy
import pickle

import pytest
import torch
from experts import Experts, offsets
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

import hybridtensor as ht

NAMES = ("w1", "w3", "w2")
ENDS = (32, 60, 96, 160)


def tokens(seed=0):
    return torch.randn(160, 64, generator=torch.Generator().manual_seed(seed))


def experts(recipe=None, seed=0, **options):
    torch.manual_seed(seed)
    made = Experts()
    return made if recipe is None else ht.quantize_(made, recipe, **options)


def values(module):
    return {name: getattr(module, name).detach().clone().requires_grad_() for name in NAMES}


@pytest.mark.parametrize(
    ("recipe", "persistent"),
    [("fp8", False), ("fp8_delayed", False), ("mxfp8", False), ("nvfp4", True), ("fp8+dequantized", True)],
)
def test_functional_call(recipe, persistent):
    """Bitwise experts with these weights: outputs, gradients of what was put there, state."""
    ours, same, given = experts(recipe, persistent=persistent), experts(recipe, seed=1), values(experts(seed=1))
    for step in range(2):
        expected = same(tokens(step), offsets(ENDS))
        got = functional_call(ours, given, (tokens(step), offsets(ENDS)))
        assert torch.equal(got, expected)
        for out in (expected, got):
            out.square().sum().backward()
        assert all(torch.equal(given[name].grad, getattr(same, name).grad) for name in NAMES)
        for module in (ours, same):
            ht.step_(module)
    assert not torch.equal(ours(tokens(), offsets(ENDS)), same(tokens(), offsets(ENDS)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, of an input that goes on after a graph break
def test_functional_call_in_a_compiled_function():
    ours, given = experts("fp8"), values(experts(seed=1))
    call = torch.compile(lambda w, x, ends: functional_call(ours, w, (x, ends)), backend="aot_eager")
    assert torch.equal(call(given, tokens(), offsets(ENDS)), experts("fp8", seed=1)(tokens(), offsets(ENDS)))


def replaced(module):
    module.w1 = nn.Parameter(experts(seed=1).w1.detach())


def pruned(module):
    prune.l1_unstructured(module, "w1", 0.3)


@pytest.mark.parametrize(("change", "copied"), [(replaced, False), (replaced, True), (pruned, False)])
def test_a_weight_that_becomes_another_tensor(change, copied):
    ours, plain = experts("fp8"), experts()
    for module in (ours, plain):
        change(module)
    expected = experts()
    expected.w1 = nn.Parameter(plain.w1.detach().clone())
    ht.quantize_(expected, "fp8")
    if copied:
        ours = copy.deepcopy(pickle.loads(pickle.dumps(ours)))
    outputs = [module(tokens(), offsets(ENDS)) for module in (ours, expected)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.square().sum().backward()
    if change is replaced:
        assert torch.equal(ours.w1.grad, expected.w1.grad)
        ht.set_config_(ours, "mxfp8")
        assert torch.equal(ours(tokens(), offsets(ENDS)), ht.set_config_(expected, "mxfp8")(tokens(), offsets(ENDS)))


@pytest.mark.parametrize("later", [ht.quantize_, ht.set_config_])
@pytest.mark.parametrize(
    "change", [pruned, lambda m: nn.utils.weight_norm(m, "w1"), lambda m: nn.utils.spectral_norm(m, "w1")]
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_recipe_after_a_hook_computes_a_weight(change, later):
    """The tensor that is multiplied gets the recipe, under its own name."""
    ours = experts() if later is ht.quantize_ else experts("fp8")
    with torch.no_grad():  # a live graph would refuse quantize_
        change(ours.eval())
    later(ours, "mxfp8")
    got, expected = ours(tokens(), offsets(ENDS)), experts()
    expected.w1 = nn.Parameter(ours.w1.detach().clone())  # computed by now
    assert torch.equal(got, ht.quantize_(expected, "mxfp8")(tokens(), offsets(ENDS)))


def test_a_weight_that_becomes_a_buffer():
    ours = experts("fp8")
    del ours.w1
    ours.register_buffer("w1", experts().w1.detach())
    assert torch.equal(ours(tokens(), offsets(ENDS)), experts("fp8")(tokens(), offsets(ENDS)))
    assert type(ours.w1) is torch.Tensor


class WithoutGate(Experts):
    def forward(self, x, ends):
        return torch._grouped_mm(x, self.w1.transpose(-2, -1), offs=ends)


def test_an_attribute_that_is_none_is_passed_over():
    torch.manual_seed(0)
    ours = ht.quantize_(WithoutGate(), "fp8")
    expected = ours(tokens(), offsets(ENDS))
    ours.w1 = nn.Parameter(ours.w1.plain.detach().clone())
    del ours.w3
    ours.w3 = None
    assert torch.equal(ours(tokens(), offsets(ENDS)), expected)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("cached", [True, False])
def test_a_weight_that_a_parametrization_computes(cached):
    ours, same = experts(), experts()
    same.w1 = nn.Parameter(2 * same.w1.detach())
    for module in (ours, same):
        ht.quantize_(module, "fp8")
    parametrize.register_parametrization(ours, "w1", Doubled(), unsafe=True)
    with parametrize.cached() if cached else contextlib.nullcontext():
        got, expected = (module(tokens(), offsets(ENDS)) for module in (ours, same))
        assert type(ours.w1) is torch.Tensor
        assert torch.equal(ours.w1, same.w1)
    assert torch.equal(got, expected)
    for out in (got, expected):
        out.square().sum().backward()
    assert torch.equal(ours.parametrizations.w1.original.grad, 2 * same.w1.grad)
    assert torch.equal(ours.w2.grad, same.w2.grad)


@pytest.mark.parametrize("later", [ht.quantize_, ht.set_config_])
def test_a_recipe_after_a_parametrization(later):
    """The computed weight and those beside it get it."""
    ours, same = nn.ModuleDict({"experts": experts(), "head": nn.Linear(64, 64)}), experts()
    same.w1 = nn.Parameter(2 * same.w1.detach())
    if later is ht.set_config_:
        ht.quantize_(ours, "fp8")
    parametrize.register_parametrization(ours.experts, "w1", Doubled(), unsafe=True)
    later(ours, "fp8_delayed")
    ht.quantize_(same, "fp8_delayed")
    for step in range(3):
        got, expected = (module(tokens(step), offsets(ENDS)) for module in (ours.experts, same))
        assert torch.equal(got, expected)
        for module, out in ((ours, got), (same, expected)):
            out.square().sum().backward()
            ht.step_(module)
    assert torch.equal(ours.experts.parametrizations.w1.original.grad, 2 * same.w1.grad)


class Failing(nn.Module):
    def forward(self, x):
        raise ArithmeticError


def test_an_error_of_a_parametrization_leaves_the_cache_as_it_was():
    ours = experts("fp8")
    parametrize.register_parametrization(ours, "w1", Doubled(), unsafe=True)
    parametrize.register_parametrization(ours, "w3", nn.Identity(), unsafe=True)
    ours.parametrizations.w3[0] = Failing()
    with parametrize.cached():
        with pytest.raises(ArithmeticError):
            ours(tokens(), offsets(ENDS))
        assert type(ours.w1) is torch.Tensor


def test_what_no_recipe_applies_to_is_named():
    ours = experts("fp8")
    ours.w1 = nn.Parameter(torch.zeros(ours.w1.shape, dtype=torch.int8), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"Experts\.w1 is a Parameter of torch\.int8 in place of .* plain_"):
        ours(tokens(), offsets(ENDS))
    assert ours.w1.dtype == torch.int8


def test_plain_gives_the_former_forward_back():
    ours = experts("fp8")
    assert "forward" in vars(ours)
    ht.plain_(ours)
    assert "forward" not in vars(ours)
    assert torch.equal(ours(tokens(), offsets(ENDS)), experts()(tokens(), offsets(ENDS)))


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.vmap(f, randomness="different")])
def test_transforms_raise(transform):
    ours, given = experts("fp8"), {name: value.detach() for name, value in values(experts()).items()}
    with pytest.raises((NotImplementedError, RuntimeError)):
        transform(lambda x: functional_call(ours, given, (x, offsets(ENDS))).sum())(tokens())

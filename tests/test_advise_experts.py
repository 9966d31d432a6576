"""``advise`` on experts. Oracles: float64 products of what quantizers make of each expert's operands, and gradients of
the model in high precision.
"""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from experts import EXPERTS, TOKENS, WIDTH, Mixture, offsets, parts
from stacked import Stacked
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict

import hybridtensor as ht
from hybridtensor.subclasses.observing import observers
from tests.test_advise import assert_trains, loss

STACKS = [f"blocks.{i}.mixture.experts.{name}" for i in range(2) for name in ("w1", "w3", "w2")]
PLACE = "blocks.1.mixture.experts.w3"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mixer, self.mixture = nn.Linear(WIDTH, WIDTH), Mixture()

    def forward(self, x):
        x = x + torch.tanh(self.mixer(self.norm(x)))
        return x + self.mixture(self.other(x))


def model_of(place=None):
    torch.manual_seed(0)
    model = Stacked(Block, 2, WIDTH)
    if place is not None:
        with torch.no_grad():
            # of one expert: beside it all others of the expert round to few values, or to zero; its input is zero
            weight = model.get_parameter(place)
            weight[2, 5, 7] = 1e7 * weight.abs().max()
            model.blocks[1].other.weight[7] = 0.0
    return model


def batches(count=2):
    draws = torch.Generator().manual_seed(1)
    return [[torch.randn(96, WIDTH, generator=draws) for _ in range(2)] for _ in range(count)]


def advise(model, **options):
    return ht.advise(model, batches(), loss=loss, **{"hardware": "b200", **options})


@functools.cache
def advised(place=None, **options):
    """Return the advice for one of these models, which several tests look at."""
    return advise(model_of(place), **options)


def test_a_stack_with_an_outlier_in_one_expert_keeps_a_wider_format():
    budget = 5 * advised(budget="fp8").budget  # for which most products can be in NVFP4
    formats = {(row.layer, row.gemm): row.format for row in advised(PLACE, budget=budget).table}
    assert {formats[stack, "output"] for stack in STACKS if stack != PLACE} == {"nvfp4"}
    assert formats[PLACE, "output"] in ("fp8_rowwise", "mxfp8")
    same = {(row.layer, row.gemm): row.format for row in advised(budget=budget).table}
    assert same[PLACE, "output"] == "nvfp4"


def test_recipes_serialize_and_train():
    model, advice = model_of(), advised(budget="fp8")
    assert list(advice.specs) == [
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("mixer", "mixture.experts.w1", "mixture.experts.w3", "mixture.experts.w2")
    ]
    again = config_from_dict(config_to_dict(advice.recipe))
    assert dict(again.fqn_to_config) == dict(advice.recipe.fqn_to_config)
    ht.quantize_(model, again)
    for stack in STACKS:
        assert model.get_parameter(stack).config == ht.HybridConfig.parse(advice.specs[stack])
    assert_trains(model, batches(1)[0])


def test_within_the_budget_and_none_allowed():
    advice = advised(budget="mxfp8")
    assert advice.error <= advice.budget
    assert sum(row.share for row in advice.table) == pytest.approx(1)
    none = advise(model_of(), budget=0.0)
    assert {none.recipe.fqn_to_config[stack] for stack in STACKS} == {None}
    model = ht.quantize_(model_of(), none.recipe)
    assert type(model.get_parameter(PLACE)) is nn.Parameter


def test_the_error_is_about_that_of_the_gradients():
    """As for linear layers: the square root is the relative error of all gradients, within a factor of two."""

    def gradients(model):
        model.zero_grad()
        sum(loss(model, batch) for batch in batches()).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad.dim() == 3])

    model = model_of()
    for spec in ("fp8_rowwise", "mxfp8"):
        exact = gradients(copy.deepcopy(model))
        got = gradients(ht.quantize_(copy.deepcopy(model), spec))
        budget = advised(budget=spec).budget ** 0.5
        assert budget / 2 < (got - exact).norm() / exact.norm() < 2 * budget


def test_gradients_of_stacks_count_by_their_share():
    model, (batch,) = model_of(), batches(1)
    advice = ht.advise(model, [batch], loss=loss, hardware="b200")
    weights = {row.layer: row.weight for row in advice.table if row.gemm == "grad_weight"}
    loss(model, batch).backward()
    parameters = {name.removesuffix(".weight"): parameter for name, parameter in model.named_parameters()}
    squares = {layer: float(parameters[layer].grad.square().sum()) for layer in weights}
    assert {*STACKS} < set(weights)
    for layer, weight in weights.items():
        assert weight == pytest.approx(squares[layer] / sum(squares.values()), rel=1e-4), layer


# -- what is measured


class Stack(nn.Module):
    """One stack, multiplied in one of several ways."""

    def __init__(self, how="grouped", transposed=False):
        super().__init__()
        self.num_experts, self.is_transposed, self.how = EXPERTS, transposed, how
        self.w = nn.Parameter(torch.randn(EXPERTS, *((WIDTH, 96) if transposed else (96, WIDTH))) / 8)

    def forward(self, x, ends):
        weight = self.w.transpose(-2, -1) if self.is_transposed else self.w
        if self.how == "grouped":
            return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets(ends))
        if self.how == "batched":
            return torch.bmm(x.view(EXPERTS, -1, WIDTH), weight.transpose(-2, -1)).flatten(0, 1)
        if self.how == "looped":
            return torch.cat([F.linear(x[start:stop], weight[e]) for e, (start, stop) in enumerate(parts(ends))])
        return torch.einsum("etk,enk->etn", x.view(EXPERTS, -1, WIDTH), weight)


def of_stack(model, ends, x, grad, **options):
    """Products of one stack, by name."""

    def run(m, x):
        return (m(x, ends)[: ends[-1]] * grad[: ends[-1]]).sum()

    options = {"hardware": "b200", "budget": 1.0, **options}
    return {row.gemm: row for row in ht.advise(model, [x], loss=run, **options).table}


def relative(spec, gemm, operands):
    """Noise over signal of a product, of all experts, in float64."""
    config, signal, noise = ht.HybridConfig.parse(spec), 0.0, 0.0
    for own in operands:
        exact, got = [], []
        for role, direction in (gemm.left, gemm.right):
            held = getattr(config, role).quantize(own[role])
            values = getattr(held, direction).dequantize().double()
            turn = direction == "columnwise"
            exact.append(own[role].double().t() if turn else own[role].double())
            got.append(values.t() if turn else values)
        wanted = exact[0] @ exact[1].t()
        signal += float(wanted.square().sum())
        noise += float((got[0] @ got[1].t() - wanted).square().sum())
    return noise / signal


@pytest.mark.parametrize("ends", [(32, 96, 96, 160), (64, 64, 96, 128)], ids=str)
def test_noise_is_that_of_float64(ends):
    """Of whole blocks, so that each quantizer can be asked alone."""
    torch.manual_seed(0)
    model, x, grad = Stack(), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 96)
    x[ends[-1] :] = float("nan")  # of no expert
    found = of_stack(
        model, ends, x.requires_grad_(), grad, formats=["bf16", "fp8", "fp8_rowwise", "fp8_block", "mxfp8"]
    )
    of_experts = [
        {"input": x[start:stop].detach(), "weight": model.w[e].detach(), "grad_output": grad[start:stop]}
        for e, (start, stop) in enumerate(parts(ends))
        if start < stop
    ]
    for gemm in ht.recipes.spec.GEMMS:
        row = found[gemm.name]
        assert row.layer == "w"
        for spec in ("fp8", "fp8_rowwise", "fp8_block", "mxfp8"):
            assert row.noise[spec] == pytest.approx(relative(spec, gemm, of_experts), rel=1e-3), (gemm.name, spec)
        assert row.noise["bf16"] == 0
        assert row.share == pytest.approx(1 / 3)


def test_operations_are_counted_by_tokens():
    """Beside a linear layer of as many weights as one expert has: tokens of no expert are no operations."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.stack = nn.Linear(WIDTH, 96, bias=False), Stack()

        def forward(self, x, ends):
            return self.linear(x) + self.stack(x, ends)

    x, ends = torch.randn(TOKENS, WIDTH), (10, 30, 30, 40)
    # what torch's product leaves in rows of no expert is whatever was in memory, sometimes NaN
    advice = ht.advise(Both(), [x], loss=lambda m, x: m(x, ends)[:40].square().sum(), hardware="b200", budget=1.0)
    shares = {(row.layer, row.gemm): row.share for row in advice.table}
    assert shares["stack.w", "output"] / shares["linear", "output"] == pytest.approx(40 / TOKENS)
    assert shares["stack.w", "grad_weight"] / shares["linear", "grad_weight"] == pytest.approx(40 / TOKENS)
    assert shares["stack.w", "grad_input"] == 0  # nobody asks for it


@pytest.mark.parametrize("how", ["batched", "looped", "stored the other way", "converted", "persistent"])
def test_other_ways_to_multiply_are_measured_alike(how):
    ends = (40, 80, 120, 160)
    torch.manual_seed(0)
    model, x, grad = Stack(), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 96)
    formats = ["bf16", "fp8", "mxfp8"]
    wanted = of_stack(model, ends, x.clone().requires_grad_(), grad, formats=formats)
    other = Stack(how if how in ("batched", "looped") else "grouped", how.startswith("stored"))
    with torch.no_grad():
        other.w.copy_(model.w.transpose(-2, -1) if other.is_transposed else model.w)
    if how in ("converted", "persistent"):
        other = ht.quantize_(other, "bf16", persistent=how == "persistent")
    found = of_stack(other, ends, x.clone().requires_grad_(), grad, formats=formats)
    for gemm, row in wanted.items():
        assert found[gemm].noise == pytest.approx(row.noise, rel=1e-6)
        assert found[gemm].share == pytest.approx(row.share)
        assert found[gemm].weight == pytest.approx(row.weight)


def test_frozen_experts():
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": Stack(), "second": nn.Linear(96, 64)})
    model["first"].requires_grad_(False)

    def run(m, x):
        return m["second"](m["first"](x, (40, 40, 80, 160))).square().sum()

    advice = ht.advise(model, [torch.randn(TOKENS, WIDTH)], loss=run, hardware="b200", budget=1.0)
    shares = {(row.layer, row.gemm): row.share for row in advice.table}
    assert shares["first.w", "output"] == pytest.approx(shares["second", "output"])
    assert shares["first.w", "grad_input"] == shares["first.w", "grad_weight"] == 0
    assert all(row.noise["mxfp8"] for row in advice.table if row.gemm == "output")


def test_models_are_as_before():
    model = model_of()
    loss(model, batches()[0]).backward()
    parameters, grads = dict(model.named_parameters()), [p.grad.clone() for p in model.parameters()]
    plain = advise(model)
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert list(dict(model.named_parameters())) == list(parameters)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    assert not observers
    assert not [name for name, _ in model.named_modules() if "quantization_state" in name]
    model.zero_grad()
    ht.quantize_(model, "bf16")
    assert [row.layer for row in advise(model).table] == [row.layer for row in plain.table]


def test_experts_that_are_multiplied_otherwise():
    model = Stack("einsum")
    weight = model.w
    with pytest.raises(NotImplementedError, match=r"F\.grouped_mm for experts"):
        of_stack(model, (40, 80, 120, 160), torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 96).view(4, 40, 96))
    assert model.w is weight
    assert not observers

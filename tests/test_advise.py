"""``advise``: a recipe for each layer. Oracles: gradients of the model in high precision, exhaustive search."""

import functools
import itertools
import math
import random

import pytest
import torch
from stacked import Stacked
from tiers import few
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor import costs
from hybridtensor.advising.advise import _spec
from hybridtensor.advising.choosing import FormatOption, cheapest, curve, frontier
from hybridtensor.advising.measuring import Product

PLACES = ["blocks.0.up", "blocks.2.down", "blocks.3.up"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.o = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        x = x + self.o(torch.tanh(self.q(self.norm(x))))
        return x + self.down(nn.functional.gelu(self.up(self.other(x))))


def model_of(place=None):
    torch.manual_seed(0)
    model = Stacked(Block, 4, 64)
    if place is not None:
        with torch.no_grad():
            weight = model.get_submodule(place).weight
            weight[5, 7] = 40 * weight.abs().max()  # beside it, all others round to few values
    return model


def batches(count=2):
    draws = torch.Generator().manual_seed(1)
    return [[torch.randn(128, 64, generator=draws) for _ in range(2)] for _ in range(count)]


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


@functools.cache
def advised(place=None, **options):
    """Return the advice for one of these models, which several tests look at."""
    return advise(model_of(place), **options)


@functools.cache
def exact(place):
    return gradients(model_of(place))


def gradients(model):
    model.zero_grad()
    sum(loss(model, batch) for batch in batches()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def error(place, recipe):
    got = gradients(ht.quantize_(model_of(place), recipe))
    return float((got - exact(place)).norm() / exact(place).norm())


def advise(model, **options):
    return ht.advise(model, batches(), loss=loss, **{"hardware": "b200", **options})


@pytest.mark.parametrize("place", few(PLACES, 2))
def test_a_layer_with_outliers_keeps_a_wider_format(place):
    budget = 8 * advised(place, budget="fp8").budget  # for which most products can be in NVFP4
    formats = {(row.layer, row.gemm): row.format for row in advised(place, budget=budget).table}
    large = [(layer, "output") for layer, gemm in formats if gemm == "output" and layer.endswith(("up", "down"))]
    assert {formats[product] for product in large if product[0] != place} == {"nvfp4"}
    assert formats[place, "output"] != "nvfp4"
    same = {(row.layer, row.gemm): row.format for row in advised(budget=budget).table}
    assert same[place, "output"] == "nvfp4"


@pytest.mark.parametrize("place", few([None, *PLACES], 2))
def test_errors_are_those_of_gradients(place):
    """Of recipes that are the same everywhere, and of the advised one, within a third; before noise in outputs and in
    gradients of inputs was run through the model, they were up to twice as large.
    """
    advice = advised(place, budget="fp8")
    for point in advice.curve:
        if point.name not in ("", "bf16"):
            found = error(place, advice.recipe if point.name == "advised" else point.name)
            assert 0.67 < found / point.error**0.5 < 1.2, point.name


def test_the_table_names_the_layers_of_each_recipe():
    """Without a gradient of the input, the first layer has another recipe than the last one: both are numbers."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    advice = ht.advise(model, batches(), loss=loss, hardware="h200", budget="fp8", formats=["bf16", "fp8"])
    assert advice.specs == {"0": "fp8/bf16/fp8", "2": "fp8"}
    lines = [" ".join(line.split()) for line in str(advice).splitlines()]
    assert {"fp8/bf16/fp8 0", "fp8 2"} <= set(lines)


def test_layers_with_one_weight_get_one_recipe():
    """``quantize_`` refuses others, which the two would get each for itself."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.mid, self.b = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.relu(self.mid(torch.relu(self.a(x) * 50)))) * 0.01

    for budget in (1e-3, 3e-3, 1e-2):
        advice = ht.advise(Tied(), batches(), loss=loss, hardware="b200", budget=budget)
        assert advice.specs["a"] == advice.specs["b"]
        assert advice.error == pytest.approx(sum(row.weight * row.noise[row.format] for row in advice.table))
        assert advice.error <= budget
        ht.quantize_(Tied(), advice.recipe)


def test_layers_may_be_called_by_keyword_and_in_reentrant_checkpoints():
    class Chain(nn.Module):
        def __init__(self, call):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second, self.call = nn.Linear(64, 64), nn.Linear(64, 64), call

        def forward(self, x):
            return self.call(self.second, self.call(self.first, x))

    def weights(call):
        found = ht.advise(Chain(call), batches(), loss=loss, hardware="b200", budget="fp8")
        return [row.weight for row in found.table]

    expected = weights(lambda module, x: module(x))
    assert min(expected[1::3][1:]) > 0
    assert weights(lambda module, x: module(input=x)) == expected
    again = weights(lambda module, x: checkpoint(module, x, use_reentrant=True) if x.requires_grad else module(x))
    assert len(again) == len(expected)


def test_a_model_that_draws_is_measured_by_the_same_draws():
    """Another dropout would count as an error a hundred times that of FP8."""
    drops = nn.Sequential(nn.Dropout(0.3), model_of())
    state = torch.get_rng_state()
    assert advise(drops).budget < 3 * advised().budget
    assert torch.equal(torch.get_rng_state(), state)


def test_less_error_than_random_recipes_of_equal_cost():
    place = "blocks.2.down"
    advice = advised(place, budget="fp8")
    mine, draws = error(place, advice.recipe), random.Random(0)
    alike = {}
    for i, row in enumerate(advice.table):
        alike.setdefault(row.share, []).append(i)
    for _ in range(20):
        formats = [row.format for row in advice.table]
        for places in alike.values():
            drawn = [formats[i] for i in places]
            draws.shuffle(drawn)
            for i, fmt in zip(places, drawn, strict=True):
                formats[i] = fmt
        rules = {}
        for i in range(0, len(formats), 3):
            spec = "/".join(formats[i : i + 3])
            rules[advice.table[i].layer] = None if spec == "bf16/bf16/bf16" else ht.HybridConfig.parse(spec)
        assert error(place, FqnToConfig(rules)) > mine


@pytest.mark.parametrize(
    ("formats", "spec"),
    [
        (("nvfp4", "nvfp4", "nvfp4"), "nvfp4"),
        (("nvfp4+eden", "nvfp4+eden", "nvfp4+eden"), "nvfp4+eden"),
        (("nvfp4", "nvfp4+eden", "nvfp4+eden"), "nvfp4+eden"),
        (("mxfp8", "nvfp4+eden", "bf16"), "mxfp8/nvfp4/bf16+eden"),
        (("nvfp4+eden", "bf16", "bf16"), "nvfp4/bf16/bf16"),
        (("nvfp4+four_over_six", "nvfp4+eden", "bf16"), "nvfp4/nvfp4/bf16+four_over_six+eden"),
    ],
)
def test_modifiers_of_a_product_are_those_of_the_layer_where_they_change_something(formats, spec):
    assert _spec(list(formats)) == spec
    ht.HybridConfig.parse(spec)


@pytest.mark.parametrize("budget", ["fp8", "fp8_rowwise", "mxfp8"])
def test_within_the_budget_and_cheaper(budget):
    advice = advised(budget=budget)
    uniform = next(point for point in advice.curve if point.name == budget)
    assert advice.budget == uniform.error
    assert advice.error <= uniform.error
    assert advice.cost < uniform.cost
    assert advice.cost >= 0.25
    assert advice.error == pytest.approx(sum(row.weight * row.noise[row.format] for row in advice.table))
    prices = {"bf16": 1.0, "fp8": 0.5, "fp8_rowwise": 0.5, "fp8_block": 1.0, "mxfp8": 0.5, "nvfp4": 0.25}
    assert advice.cost == pytest.approx(sum(row.share * prices[row.format] for row in advice.table))
    assert sum(row.share for row in advice.table) == pytest.approx(1)


def test_what_is_emulated_never_pays():
    advice = advise(model_of(), hardware="h200", budget="nvfp4")
    assert {row.format for row in advice.table} <= {"bf16", "fp8", "fp8_rowwise", "fp8_block"}
    uniform = costs.table("h200").cost(ht.HybridConfig.parse("fp8").formats(ht.recipes.spec.GEMMS[0]))
    assert advice.cost <= uniform * (1 + 1e-9)  # the sum of its products' shares is rounded


def test_no_error_allowed_and_none_possible():
    advice = advise(model_of(), budget=0.0)
    assert advice.error == 0
    measured = {row.format for row in advice.table if row.weight}
    assert measured == {"bf16"}  # what counts for nothing may be anything
    with pytest.raises(ValueError, match=r"a budget of at least .* is required with fp8, nvfp4, got 1e-09"):
        advise(model_of(), budget=1e-9, formats=("fp8", "nvfp4"))


def assert_trains(model, batch):
    """Five steps lower the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        losses.append(loss(model, batch))
        losses[-1].backward()
        optimizer.step()
        ht.step_(model)
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_recipes_serialize_and_train():
    model, advice = model_of("blocks.0.up"), advised("blocks.0.up", budget="fp8")
    again = config_from_dict(config_to_dict(advice.recipe))
    assert dict(again.fqn_to_config) == dict(advice.recipe.fqn_to_config)
    ht.quantize_(model, again)
    assert_trains(model, batches(1)[0])
    assert advice.specs.keys() == {f"blocks.{i}.{name}" for i in range(4) for name in ("q", "o", "up", "down")}


def test_models_are_as_before_and_may_have_the_recipe_bf16():
    model = model_of()
    loss(model, batches()[0]).backward()
    grads = [p.grad.clone() for p in model.parameters()]
    plain = advise(model)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    assert not [hook for m in model.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]
    ht.quantize_(model, "bf16")
    converted = advise(model)
    assert converted.table == plain.table


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("spec", ["mxfp8", "bf16/bf16/fp8"])
def test_models_that_are_quantized_are_refused(spec, persistent):
    """Their gradients have noise, and persistent weights are those of a format already: all errors would be wrong."""
    model = ht.quantize_(model_of(), spec, persistent=persistent)
    wanted = rf"^advise: a model in high precision is required, got blocks\.0\.q with the recipe {spec}; make it plain"
    with pytest.raises(ValueError, match=wanted):
        advise(model)


def test_models_without_values_or_of_other_dtypes():
    with pytest.raises(ValueError, match=r"^advise: the weight of blocks\.0\.q is on the meta device, without values"):
        advise(model_of().to("meta"))
    with pytest.raises(TypeError, match=r"^advise: the weight of blocks\.0\.q: bfloat16, .* got torch\.float64; cast"):
        advise(model_of().double())
    with pytest.raises(
        ValueError, match=r"^advise: the weight of <root> is of a lazy layer that never ran; run the model"
    ):
        ht.advise(nn.LazyLinear(4), batches(), loss=loss, hardware="b200")
    with pytest.raises(TypeError, match=r"^advise: a loss of one real number is required, got .*complex64"):
        ht.advise(model_of(), batches(), loss=lambda m, b: loss(m, b) + 0j, hardware="b200")


def test_buffers_are_as_before():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    before = [buffer.clone() for buffer in model.buffers()]
    ht.advise(model, [torch.randn(64, 64)], loss=lambda m, x: m(x).square().mean(), hardware="b200")
    assert all(map(torch.equal, before, model.buffers()))


def test_frozen_layers_and_products_that_never_run():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    advice = ht.advise(model, [torch.randn(64, 64)], loss=lambda m, x: m(x).square().mean(), hardware="b200")
    shares = {(row.layer, row.gemm): (row.share, row.weight) for row in advice.table}
    third = pytest.approx(1 / 3)
    assert shares["0", "grad_input"][0] == shares["0", "grad_weight"][0] == shares["1", "grad_input"][0] == 0
    assert shares["0", "output"][0] == shares["1", "output"][0] == shares["1", "grad_weight"][0] == third
    assert shares["1", "grad_weight"][1] == 1


def test_a_layer_whose_output_the_loss_does_not_depend_on():
    """Its input has a gradient, by another layer; its output has none."""
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("first", "unused", "last")})

    def loss(model, x):
        hidden = model["first"](x).relu()
        model["unused"](hidden)
        return model["last"](hidden).square().mean()

    advice = ht.advise(model, [torch.randn(64, 64)], loss=loss, hardware="b200")
    assert not any(row.share for row in advice.table if row.layer == "unused" and row.gemm != "output")


def test_layers_that_formats_do_not_fit_and_tokens_that_are_no_whole_blocks():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    options = {"loss": lambda m, x: m(x).square().mean(), "hardware": "b200", "budget": 1.0}
    advice = ht.advise(model, [torch.randn(33, 64)], **options)
    assert advice.specs["0"].startswith("nvfp4/")
    assert "nvfp4" not in advice.specs["1"]
    ht.quantize_(model, advice.recipe)
    with pytest.raises(ValueError, match=r"layer .* fits none of nvfp4"):
        ht.advise(nn.Linear(64, 10), [torch.randn(32, 64)], formats=["nvfp4"], **options)


def test_compiled_models_have_the_names_of_plain_ones():
    model = model_of()
    advice = advise(torch.compile(model))
    ht.quantize_(model, advice.recipe)


def test_tables_are_shown(capsys):
    from rich.console import Console

    Console(width=200).print(advised())
    shown = capsys.readouterr().out
    assert "Advised for b200 (published" in shown
    for word in ("advised", "nvfp4", "time / BF16", "share of error"):
        assert word in shown


# -- choosing


def test_the_curve_falls_and_meets_exhaustive_search():
    draws = random.Random(3)
    products = [
        [
            FormatOption(f, c * size, e * draws.uniform(0.2, 5))
            for f, c, e in (("a", 4, 0.0), ("b", 2, 1.0), ("c", 1, 9.0))
        ]
        for size in (draws.uniform(0.5, 2) for _ in range(6))
    ]
    steps = curve(products)
    assert [s.cost for s in steps] == sorted(s.cost for s in steps)
    assert [s.error for s in steps] == sorted((s.error for s in steps), reverse=True)
    every = [(sum(o.cost for o in made), sum(o.error for o in made)) for made in itertools.product(*products)]
    for step in steps:  # on the convex hull: nothing has less error for less cost
        assert not [one for one in every if one[0] < step.cost - 1e-9 and one[1] < step.error - 1e-9]
    for budget in (0.0, 3.0, 10.0, 40.0, 1e9):
        found, best = cheapest(products, steps, budget), min(cost for cost, error in every if error <= budget)
        assert found.error <= budget + 1e-12
        assert found.cost <= 1.1 * best  # greedy: within a tenth here, exact where the hull is
    assert cheapest(products, steps, -1.0) is None


def test_a_product_that_a_format_overflows_has_an_infinite_error_whatever_depends_on_it():
    product = Product("layer", "grad_input", 1.0, 0.0, {"fp8": math.inf, "mxfp8": 0.5})
    assert [product.error(fmt) for fmt in product.noise] == [math.inf, 0.0]


def test_options_that_are_not_worth_it_are_left_out():
    options = [
        FormatOption("a", 1, 5.0),
        FormatOption("b", 1, 4.0),
        FormatOption("c", 2, 4.0),
        FormatOption("d", 2, 3.9),
        FormatOption("e", 4, 0.0),
    ]
    assert [option.fmt for option in frontier(options)] == ["b", "e"]


def test_an_infinite_error_leaves_the_other_options_in():
    """Whatever removes it has an infinite gain; among the rest the hull is that without the option."""
    finite = [FormatOption(*one) for one in (("b", 2, 9.0), ("c", 3, 4.0), ("d", 4, 3.9), ("e", 5, 0.0))]
    overflows = [FormatOption("a", 1, math.inf), FormatOption("worse", 1.5, math.inf)]
    assert frontier(overflows + finite) == [overflows[0], *frontier(finite)]
    steps = curve([overflows + finite, finite])
    assert [step.error for step in steps if step.error < math.inf] == [18.0, 13.0, 8.0, 4.0, 0.0]
    assert cheapest([overflows + finite, finite], steps, 13.0) == (5, 13.0, ("c", "b"))


# -- wrong use


@pytest.mark.parametrize(
    ("error", "options", "match"),
    [
        (ValueError, {"budget": "fp9"}, "fp9"),
        (ValueError, {"budget": -1.0}, "budget"),
        (ValueError, {"budget": "fp8_delayed"}, "without delayed scales"),
        (ValueError, {"formats": ["fp8_delayed"]}, "without delayed scales"),
        (ValueError, {"formats": ["bf16/fp8/fp8"]}, "one format for all products"),
        (ValueError, {"formats": []}, "formats is empty"),
        (TypeError, {"formats": 3}, "a list of specs"),
        (ValueError, {"hardware": "h1000"}, "h200"),
        (ValueError, {"hardware": "a100"}, r"known: h200, h100, b200; .* costs\.measure\(\)"),
        (TypeError, {"hardware": 3}, "hardware"),
        (TypeError, {"loss": 3}, "a function as loss"),
    ],
)
def test_wrong_arguments(error, options, match):
    with pytest.raises(error, match=match):
        ht.advise(model_of(), batches(), **{"loss": loss, "hardware": "b200", **options})


def test_batches_without_a_signal():
    """Where there is nothing to be wrong about, the cheapest format is as good as any."""
    zeros, model = torch.zeros(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for bias in (False, True):  # with a bias the second layer has something to multiply
        net = nn.Sequential(nn.Linear(64, 64, bias=bias), nn.Linear(64, 64))
        with pytest.raises(ValueError, match=r"the products of 0(, 1)? are all zeros;"):
            ht.advise(net, [zeros], loss=lambda m, x: m(x).square().mean(), hardware="b200")
    with pytest.raises(ValueError, match="the gradients of every layer are zero"):
        ht.advise(model, [torch.randn(64, 64)], loss=lambda m, x: 0 * m(x).sum(), hardware="b200")
    one = ht.advise(model, [zeros, torch.randn(64, 64)], loss=lambda m, x: m(x).square().mean(), hardware="b200")
    assert set(one.specs) == {"0", "1"}


def test_wrong_models_and_batches():
    with pytest.raises(ValueError, match="at least one batch"):
        ht.advise(model_of(), [], loss=loss, hardware="b200")
    with pytest.raises(TypeError, match="a loss of one real number"):
        ht.advise(model_of(), [torch.ones(16, 64)], hardware="b200")
    with pytest.raises(ValueError, match="no linear layer of the model ran"):
        ht.advise(nn.Sequential(nn.LayerNorm(64)), [torch.ones(16, 64)], loss=lambda m, b: m(b).sum(), hardware="b200")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no GPU to measure costs on; pass hardware as one of h200, h100, b200"):
            ht.advise(model_of(), batches(), loss=loss)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value):
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"advise: the loss is (nan|inf); give batches like"):
        ht.advise(net, [torch.randn(8, 32)], hardware="h100", loss=lambda m, x: m(x).square().mean() * value)


def test_gradients_that_are_not_finite():
    """The slope of a root at zero is infinite, and times zero no number, though the loss is one."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with pytest.raises(ValueError, match="advise: the gradients of 0, 1 are not finite; give batches and a loss"):
        ht.advise(
            net,
            [torch.randn(64, 64)],
            hardware="h100",
            loss=lambda m, x: m(x).square().mean() + (0 * m(x).sum()).sqrt(),
        )


def test_the_loss_of_a_model_may_be_an_entry_of_what_it_returns():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model_of(None)

        def forward(self, x, target):
            output = self.inner(x)
            return {"loss": (output - target).square().mean(), "logits": output}

    named = [dict(zip(("x", "target"), batch, strict=True)) for batch in batches()]
    found = ht.advise(Net(), named, hardware="b200", budget=0.25)
    assert found.error == advise(model_of(None), budget=0.25).error

"""The benchmark of ``advise``, at its smallest: what it compares, and that what it writes is trained by."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from little_text import benchmarks_hold_out_little, write_text
from scripts import called
from torch import nn

import hybridtensor as ht
from hybridtensor import costs
from hybridtensor.recipes.spec import GEMMS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--device", "cpu", "--model", "tiny", "--min-mb", "0", "--max-mb", "1"]
FEW = ["--warm", "10", "--batches", "1", "--rows", "1", "--random", "3"]


@pytest.fixture(scope="module", autouse=True)
def _benchmarks():
    with benchmarks_hold_out_little():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The folder of one whole benchmark."""
    folder = tmp_path_factory.mktemp("advise")
    places = ["--text", folder / "text", "--assignments", folder / "recipes", "--out", folder]
    with pytest.MonkeyPatch.context() as patched:
        assert called(BENCHMARKS / "advise.py", [*TINY, *FEW, "--data", text, *places], patched) == 0
    return folder


@pytest.fixture(scope="module")
def record(whole):
    return json.loads((whole / "advise_cpu.json").read_text())


def model():
    from losses.training import MODELS, plain_model

    return plain_model(MODELS["tiny"], 0, "cpu")


def batch():
    return tuple(torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(i)) for i in (0, 1))


def advise(plain, **options):
    from losses.training import loss_of

    return ht.advise(plain, [batch()], loss=loss_of, hardware="b200", **options)


def assignment(whole, name):
    from losses.recipes import read_assignment

    return read_assignment(whole / "recipes" / f"{name}.json").fqn_to_config


def formats(assigned):
    """Return the format of each product, by layer and product."""
    specs = {layer: "bf16" if config is None else str(config) for layer, config in assigned.items()}
    words = {layer: 3 * [spec] if "/" not in spec else spec.split("/") for layer, spec in specs.items()}
    return {(layer, gemm.name): word for layer, of in words.items() for gemm, word in zip(GEMMS, of, strict=True)}


def cost(assigned):
    """Return the cost of an assignment for the model: the sizes of its layers are those of their weights."""
    sizes = {name: m.weight.numel() for name, m in model().named_modules() if isinstance(m, nn.Linear)}
    prices = {"bf16": 1.0, "fp8": 0.5, "fp8_rowwise": 0.5, "fp8_block": 1.0, "mxfp8": 0.5, "nvfp4": 0.25}
    chosen = formats(assigned)
    total = sum(sizes[layer] for layer, _ in chosen)
    return sum(sizes[layer] * prices[word] for (layer, _), word in chosen.items()) / total


def test_a_row_for_each_recipe(record):
    rows = {row["recipe"]: row for row in record["rows"]}
    kinds = ("best", "median", "worst")
    assert list(rows) == [
        "bf16", "fp8", "fp8_rowwise", "mxfp8", "nvfp4", "advised, 0.5", "advised, 0.375",
        *(f"random, 0.5, {kind} of 3" for kind in kinds),
    ]  # fmt: skip
    assert [rows[name]["cost"] for name in ("bf16", "fp8", "mxfp8", "nvfp4")] == [1, 0.5, 0.5, 0.25]
    columns = [column for column in record["rows"][0] if column.endswith("%")]
    assert len(columns) == 2 + 3, "predicted, measured, and measured with an outlier in each of three layers"
    for column in columns:
        of_random = [rows[f"random, 0.5, {kind} of 3"][column] for kind in kinds]
        assert rows["bf16"][column] < rows["fp8"][column] < rows["nvfp4"][column]
        if column != "predicted error %":
            assert of_random == sorted(of_random)
    assert record["random gradient errors %"] == [
        rows[f"random, 0.5, {kind} of 3"]["gradient error %"] for kind in kinds
    ]
    assert record["costs measured"] is None, "there is no GPU"


def test_what_is_written_has_the_cost_that_is_told(whole, record):
    rows = {row["recipe"]: row for row in record["rows"]}
    for target in ("0.5", "0.375"):
        told = rows[f"advised, {target}"]["cost"]
        assert float(target) - 0.04 < told < float(target) + 1e-9
        assert cost(assignment(whole, f"advised_{target}")) == pytest.approx(told)
    assert cost(assignment(whole, "random_0.5")) == pytest.approx(rows["advised, 0.5"]["cost"])
    mine, other = (formats(assignment(whole, name)) for name in ("advised_0.5", "random_0.5"))
    assert mine != other
    assert Counter(mine.values()) == Counter(other.values())


def test_outliers_are_told_with_the_formats_of_their_layer(whole, record):
    assert len(record["outliers"]) == 3 * 2
    places = {one["layer"] for one in record["outliers"]}
    assert {column for row in record["rows"] for column in row if "outlier" in column} == {
        f"outlier in {place} %" for place in places
    }
    bits = {"bf16": 16, "nvfp4": 4}
    for one in record["outliers"]:
        assert one["without"] == formats(assignment(whole, f"advised_{one['cost']:g}"))[one["layer"], "output"]
        assert one["wider"] == (bits.get(one["with"], 8) > bits.get(one["without"], 8))
    assert any(one["wider"] for one in record["outliers"])


def test_the_convergence_benchmark_trains_by_it(whole, text, tmp_path, monkeypatch):
    recipes = whole / "recipes"
    named = f"fp8,advised={recipes / 'advised_0.5.json'},random={recipes / 'random_0.5.json'}"
    given = [*TINY, "--steps", "4", "--seeds", "1", "--recipes", named, "--data", text, "--name", "advise_losses"]
    places = ["--out", tmp_path / "out", "--results", tmp_path, "--plot", tmp_path / "losses.png"]
    assert called(BENCHMARKS / "convergence.py", [*given, *places], monkeypatch) == 0
    rows = {row["recipe"]: row for row in json.loads((tmp_path / "advise_losses_cpu.json").read_text())["rows"]}
    assert list(rows) == ["bf16", "fp8", "advised", "random"]
    assert rows["advised"]["loss"] != rows["random"]["loss"]


# -- parts


def test_random_recipes_have_exactly_the_cost_of_the_advised_one():
    from assignments import recipe_of, shuffled

    table = advise(model(), budget="fp8").table
    draws, seen = random.Random(0), set()
    for _ in range(5):
        drawn = shuffled(table, draws)
        seen.add(tuple(drawn))
        for share in {row.share for row in table}:
            alike = [i for i, row in enumerate(table) if row.share == share]
            assert Counter(drawn[i] for i in alike) == Counter(table[i].format for i in alike)
        of_layers = formats(recipe_of(table, drawn).fqn_to_config)
        assert [of_layers[row.layer, row.gemm] for row in table] == drawn
    assert len(seen) == 5


def test_the_advice_at_a_cost_is_the_best_of_the_curve():
    from assignments import advised_at, predicted, uniform_cost

    plain = model()
    found = advised_at([0.5], lambda **options: advise(plain, **options))[0.5]
    curve = advise(plain, budget="fp8").curve
    least = min(point.error for point in curve if not point.name and point.cost <= 0.5)
    assert found.cost <= 0.5
    assert found.error == pytest.approx(least, rel=0.02)  # random rounding differs from one advice to the next
    assert predicted(found.table, [row.format for row in found.table]) == pytest.approx(found.error)
    assert uniform_cost("mxfp8", costs.table("b200")) == 0.5
    with pytest.raises(ValueError, match=r"--costs: at least 0.25 is required, got 0.2"):
        advised_at([0.2], lambda **options: advise(plain, **options))


def test_outliers_are_taken_out_again():
    from assignments import planted

    plain = model()
    weight = plain.blocks[1].mlp.up.weight
    before = weight.detach().clone()
    with planted(plain, "blocks.1.mlp.up"):
        assert float(weight.detach().abs().max()) == pytest.approx(16 * float(before.norm()))
        assert int((weight != before).sum()) == 1
    assert torch.equal(weight, before)


def test_errors_of_gradients_are_those_of_all_parameters_together():
    from assignments import gradient_error, gradients

    plain, given = model(), batch()
    exact = [grad.clone() for grad in gradients(plain, given, exact=True)]
    converted = ht.quantize_(model(), "nvfp4_dequantized_backward")
    got = torch.cat([grad.flatten() for grad in gradients(converted, given)])
    truth = torch.cat([grad.flatten() for grad in exact])
    expected = 100 * float((got - truth).norm() / truth.norm())
    assert gradient_error(plain, "nvfp4_dequantized_backward", given, exact) == pytest.approx(expected, rel=1e-4)
    assert 0 < gradient_error(plain, None, given, exact) < expected
    assert type(plain.blocks[0].mlp.up.weight) is nn.Parameter, "it stays as it is"


def test_outliers_go_where_they_can_be_seen():
    from assignments import advised_at, bits, places

    plain = model()
    advice = advised_at([0.375], lambda **options: advise(plain, **options))[0.375]
    outputs = {row.layer: bits(row.format) for row in advice.table if row.gemm == "output"}
    assert set(outputs.values()) == {4, 8}
    found = places(advice)
    assert len(set(found)) == 3
    assert {outputs[place] for place in found} == {4}
    assert len(set(places(advise(plain, budget=0.0)))) == 3

"""What products cost, and where the figures come from."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridtensor as ht
from hybridtensor import costs
from hybridtensor.ops.native_mm import native_kind
from hybridtensor.recipes.spec import GEMMS, WORDS

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
PEAK = {"bf16": 2.25, "fp8": 4.5, "fp8_rowwise": 4.5, "mxfp8": 4.5, "nvfp4": 9.0}  # PFLOPS of a B200, dense

EMULATED = {"mxfp4"}  # on every device


def formats(word):
    return ht.HybridConfig.parse(word).formats(GEMMS[0])


@pytest.mark.parametrize(("name", "results"), [("h200", "nvidia_h200"), ("h100", "nvidia_h100_80gb_hbm3")])
def test_the_table_of_a_hopper_is_what_was_measured_on_one(name, results):
    rows = json.loads((RESULTS / f"linear_{results}.json").read_text())["rows"]
    measured = {r["recipe"]: r["speed over BF16"] for r in rows if r["tokens x out x in"] == "geometric mean"}
    for row in costs.table(name).rows:
        speed = measured[{"bf16": "bf16 (plain)", "mixed": "mxfp8"}.get(row.word, row.word)]
        assert row.time == round(1 / speed, 3), row
        assert f"linear_{results}.json" in row.source
    sizes = {r["tokens x out x in"] for r in rows} - {"geometric mean"}
    smallest = min(int(extent) for size in sizes for extent in size.split("x")[1:])
    assert costs.table(name).least_features == smallest


def test_the_table_of_the_b200_is_its_peak_rates():
    for row in costs.table("b200").rows:
        assert row.time == (PEAK["bf16"] / PEAK[row.word] if row.native else 1.0), row
        assert "2.25" in row.source


@pytest.mark.parametrize(("name", "capability"), [("h200", (9, 0)), ("h100", (9, 0)), ("b200", (10, 0))])
def test_what_is_native_is_what_products_run_natively(name, capability):
    for word in WORDS.keys() - EMULATED:
        kind = native_kind(*formats(word))
        row = costs.table(name).row(formats(word))
        assert row.native == (kind is None or kind.first <= capability < kind.end), word


@pytest.mark.parametrize("word", WORDS)
def test_every_product_of_a_word_is_of_its_kind(word):
    config = ht.HybridConfig.parse(word)
    expected = {"fp8_delayed": "fp8", **dict.fromkeys(EMULATED, "mixed")}.get(word, word)
    assert {costs.word_of(config.formats(gemm)) for gemm in GEMMS} == {expected}


def test_a_choice_of_scales_costs_nothing_in_a_product():
    """Nor in bytes: what is stored is NVFP4."""
    plain, chosen = (ht.HybridConfig.parse(spec) for spec in ("nvfp4", "nvfp4+four_over_six"))
    for gemm in GEMMS:
        assert costs.word_of(chosen.formats(gemm)) == "nvfp4"
        for ours, theirs in zip(chosen.formats(gemm), plain.formats(gemm), strict=True):
            assert ours.bytes_per_row(1024) == theirs.bytes_per_row(1024)
    layers = [ht.quantize_(nn.Linear(256, 256), spec) for spec in ("nvfp4", "nvfp4+four_over_six")]
    totals = [ht.explain(layer, show=False).rows[0].saved_bytes_per_token for layer in layers]
    assert totals[0] == totals[1]


def test_formats_that_no_hardware_multiplies_are_mixed():
    left, right = formats("fp8")[0], formats("mxfp8")[0]
    assert costs.word_of((left, right)) == "mixed"
    assert costs.cost((left, right), "b200") == 1.0
    assert costs.cost((left, right)) > 1.0


def test_what_is_emulated_never_pays():
    for name in costs.TABLES:
        assert all(row.time >= 1.0 for row in costs.table(name).rows if not row.native)


def test_an_own_table_is_used():
    own = costs.CostTable("own", "cpu", "measured", True, (costs.Row("fp8", 0.25, True, "a test"),))
    assert costs.cost(formats("fp8"), own) == 0.25
    with pytest.raises(ValueError, match="a row for nvfp4 is required, got own with fp8"):
        own.cost(formats("nvfp4"))


def test_an_unknown_origin_names_the_argument():
    with pytest.raises(ValueError, match="CostTable: unknown how 'guessed'"):
        costs.CostTable("own", "cpu", "guessed", True, ())


def test_a_table_is_measured(device):
    generators = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    found = costs.measure(device, tokens=128, out_features=128, in_features=256, repeats=2)
    after = [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]
    assert all(map(torch.equal, generators, after))  # as advise(hardware=None) promises
    assert [row.word for row in found.rows] == list(costs.KNOWN)
    assert found.rows[0].time == 1.0
    assert all(row.time > 0 for row in found.rows)
    assert found.how == "measured"
    for row in found.rows[1:-1]:
        backend = ht.ops.select_backend(*formats(row.word), torch.bfloat16, torch.device(device))
        assert row.native == (backend.name == "native"), row
        assert "128 x 128 x 256" in row.source


def test_a_device_that_computes_is_required():
    with pytest.raises(ValueError, match="a device that computes is required, got meta"):
        costs.measure("meta")
    with pytest.raises(ValueError, match="a multiple of 128 is required as tokens, got 100"):
        costs.measure("cpu", tokens=100)


def test_a_table_in_capitals_is_recognized():
    with pytest.raises(ValueError, match="unknown table of costs 'B200'; did you mean 'b200'"):
        costs.table("B200")


@pytest.mark.parametrize("device", ["a100", "", 3])
def test_a_table_that_is_not_there_is_measured(device):
    told = r"unknown table of costs .*known: h200, h100, b200; .*costs\.measure\(\) makes"
    with pytest.raises(ValueError, match=told):
        costs.table(device)

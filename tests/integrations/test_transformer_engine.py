"""TransformerEngine's quantizers for a config of ours: which they are, with a stand-in of its classes.

Oracle: its own factories, which ``tests/frameworks/test_transformer_engine.py`` compares where it is installed.
"""

import importlib
import sys
from collections import OrderedDict

import pytest
import te_stand_in as te

import hybridtensor as ht
from hybridtensor import recipes
from hybridtensor.torchao_compat import FqnToConfig


@pytest.fixture
def qfactory(monkeypatch):
    te.install(monkeypatch)
    module = importlib.import_module("hybridtensor.integrations.transformer_engine")
    yield module.qfactory
    del sys.modules["hybridtensor.integrations.transformer_engine"]


def made(factory, kind="linear", name=""):
    """Return what a factory makes of the three operands of a layer, as text."""
    roles = (te.QuantizerRole(kind, operand, name) for operand in ("input", "weight", "grad_output"))
    return [repr(factory(role)) for role in roles]


E4 = "Float8CurrentScalingQuantizer(dtype=kFloat8E4M3, pow2=False)"
E5 = "Float8CurrentScalingQuantizer(dtype=kFloat8E5M2, pow2=False)"
MX = "MXFP8Quantizer(dtype=kFloat8E4M3, two_d=False)"
HP = "IdentityQuantizer()"


def nv(rht=False, two_d=False, random=False, rows=False):
    return f"NVFP4Quantizer(rht={rht}, two_d={two_d}, random={random}, rows={rows})"


def hybrid(row, column, source):
    return f"HybridQuantizer(row={row}, column={column}, source={source})"


def block(dim):
    return f"Float8BlockQuantizer(dtype=kFloat8E4M3, pow2=True, dim={dim})"


OF_ROW = "rowwise_dequantized"
EXPECTED = {  # what its factories of the same names return
    "bf16": [HP, HP, HP],
    "fp8": [E4, E4, E5],
    "fp8_block": [block(1), block(2), block(1)],
    "mxfp8": [MX, MX, MX],
    "nvfp4": [nv(rht=True), nv(two_d=True), nv(rht=True, random=True)],
    "nvfp4_1d_weight": [nv(rht=True), hybrid(nv(), nv(), OF_ROW), nv(rht=True, random=True)],
    "mxfp8_fwd_nvfp4_bwd": [
        hybrid(MX, nv(rht=True), "original"), hybrid(MX, nv(), OF_ROW), nv(rht=True, random=True)
    ],
    "high_precision_fwd_mxfp8_bwd": [hybrid(HP, MX, "original"), hybrid(HP, MX, "original"), MX],
    "mxfp8_dequantized_backward": [hybrid(MX, HP, OF_ROW), hybrid(MX, HP, OF_ROW), HP],
    "nvfp4_row_scaled_fwd_mxfp8_bwd": [hybrid(nv(rows=True), MX, OF_ROW), hybrid(nv(), MX, OF_ROW), MX],
    "nvfp4_row_scaled_fwd_high_precision_bwd": [hybrid(nv(rows=True), HP, OF_ROW), hybrid(nv(), HP, OF_ROW), HP],
    "fp8_high_precision_backward": [hybrid(E4, HP, "original"), hybrid(E4, HP, "original"), HP],
}  # fmt: skip


@pytest.mark.parametrize("recipe", list(EXPECTED))
@pytest.mark.parametrize("kind", ["linear", "grouped_linear"])
def test_recipes_are_its_own_quantizers(recipe, kind, qfactory):
    assert made(qfactory(recipe), kind) == EXPECTED[recipe]


def test_four_over_six_is_its_own(qfactory):
    chosen = nv(two_d=True)[:-1] + ", most=256, error=MAE)"
    assert made(qfactory("nvfp4+four_over_six_weight"))[1] == chosen
    spec = "nvfp4+no_hadamard+four_over_six_input+four_over_six_mse+four_over_six_448"
    assert made(qfactory(spec))[0] == nv()[:-1] + ", most=448, error=MSE)"


UNKNOWN_THERE = {
    "quartet2": "rounding='eden'",
    "deepseek_v4_experts": "got mxfp4; use mxfp8",
    "gpt_oss_experts": "got mxfp4; use mxfp8",
}


def test_every_recipe_is_made_or_refused(qfactory):
    for name in recipes.RECIPES:
        if "rowwise" in name:
            with pytest.raises(NotImplementedError, match="one per row; use fp8"):
                qfactory(name)
        elif name in UNKNOWN_THERE:
            with pytest.raises(NotImplementedError, match=UNKNOWN_THERE[name]):
                qfactory(name)
        else:
            assert len(made(qfactory(name))) == 3


def test_delayed_scaling_is_a_request(qfactory):
    factory = qfactory(recipes.fp8_delayed(margin=1, history_length=4, algorithm="most_recent"))
    for operand in ("input", "weight", "grad_output"):
        asked = factory(te.QuantizerRole("linear", operand, "up"))
        assert asked == te.DelayedScalingRequest(te.Format.HYBRID, 1, 4, "most_recent")
    asked = qfactory("fp8_delayed+e4m3_grad")(te.QuantizerRole("linear", "grad_output", ""))
    assert asked.fp8_format is te.Format.E4M3


def test_quantizers_are_made_anew_each_time(qfactory):
    factory, role = qfactory("mxfp8"), te.QuantizerRole("linear", "input", "")
    assert factory(role) is not factory(role)


@pytest.mark.parametrize(
    "role", [None, te.QuantizerRole(), te.QuantizerRole("dpa", "qkv", ""), te.QuantizerRole("linear", "output", "")]
)
def test_other_operands_stay_in_high_precision(role, qfactory):
    assert repr(qfactory("fp8")(role)) == HP


def test_layers_by_name(qfactory):
    rules = OrderedDict({"up": "mxfp8", "re:.*down": ht.HybridConfig.parse("nvfp4"), "router": None})
    factory = qfactory(FqnToConfig(rules))
    assert made(factory, name="up") == EXPECTED["mxfp8"]
    assert made(factory, name="blocks.0.down") == EXPECTED["nvfp4"]
    assert made(factory, name="router") == made(factory, name="other") == EXPECTED["bf16"]


NV, Q8, D8 = ht.NVFP4Quantizer, ht.Float8Quantizer, ht.DelayedFloat8Quantizer
REFUSED = {
    "mxfp8/fp8_rowwise/bf16": "scale per tensor or block in weight.columnwise",
    "fp8_rowwise": "one per row; use fp8, fp8_block or mxfp8",
    "fp8+fast_accum": "got fast_accum; drop it",
    "mxfp8+bf16_weight_values": "got bf16_weight_values; give its layers bf16 weights",
    "fp8/bf16/fp8": "a rowwise face of the same format beside grad_output.columnwise is required",
    "fp8_delayed/fp8/fp8": "delayed scaling of one direction; use fp8 there",
    ht.HybridConfig(*[NV(hadamard=True)] * 3): "rotation of columnwise faces only in input.rowwise",
    ht.HybridConfig(NV(row_scaled=True), NV(), NV()): "rows scaled in the forward only, in input.columnwise",
    "mxfp4": "another format in input.rowwise is required by TransformerEngine, got mxfp4; use mxfp8 or nvfp4",
    "nvfp4+four_over_six": "four_over_six without rotation in input.columnwise is required",
    ht.HybridConfig(*[NV(rounding="eden")] * 3): "rounding of elements in input.rowwise is required .*rounding='eden'",
    ht.HybridConfig(NV(scale_max=256), NV(), NV()): "block scales than up to 448 in input.rowwise .*scale_max=256",
    ht.HybridConfig(
        ht.MXFP8Quantizer(), NV(), NV()
    ): "in output are required by TransformerEngine, got mxfp8_e4m3 by nvfp4",
    ht.HybridConfig(Q8(dtype="e5m2"), Q8(), Q8(dtype="e5m2")): "an E4M3 operand in grad_weight",
    ht.HybridConfig(*[Q8(granularity="block", block="128x128")] * 3): "a 1x128 operand in output",
    ht.HybridConfig(D8(dtype="e5m2"), D8(), D8()): "delayed scaling to E4M3 in input.rowwise",
}


@pytest.mark.parametrize("recipe", list(REFUSED), ids=str)
def test_what_it_cannot_do_is_refused_before_training(recipe, qfactory):
    with pytest.raises(NotImplementedError, match=REFUSED[recipe]):
        qfactory(recipe)


def test_wrong_kinds(qfactory):
    with pytest.raises(TypeError, match="HybridConfig or FqnToConfig is required, got 3"):
        qfactory(3)
    with pytest.raises(ValueError, match="unknown format"):
        qfactory("fp9")

"""Configs: strings, equality, serialization, validation."""

import copy
import inspect
import itertools
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchao.core.config import config_from_dict, config_to_dict

import hybridtensor as ht
from hybridtensor import (
    Float8Quantizer,
    HybridConfig,
    HybridQuantizer,
    IdentityQuantizer,
    Quantizer,
    QuantizerRole,
    formats,
    recipes,
)
from hybridtensor.linear import products
from hybridtensor.recipes import named
from hybridtensor.recipes import spec as tables
from hybridtensor.recipes.config import _spec_of
from hybridtensor.recipes.factory import from_factory
from hybridtensor.recipes.named import TABLE
from hybridtensor.recipes.spec import GEMMS

WORDS = ("bf16", "fp8", "fp8_rowwise")
MODIFIERS = ("", "+high_precision", "+dequantized", "+save_original_input")
SPECS = [*WORDS, *("/".join(words) for words in itertools.product(WORDS, WORDS, WORDS) if len(set(words)) > 1)]
SPECS += ["fp8:bf16", "bf16:fp8/fp8_rowwise/fp8:fp8_rowwise"]
E4M3, E5M2 = Float8Quantizer(), Float8Quantizer(dtype="e5m2")
UNSPELLABLE = HybridConfig(input=E4M3, weight=Float8Quantizer(pow2_scale=True), grad_output=E4M3)
CONFIGS = [HybridConfig.parse(s) for s in ("fp8", "fp8/bf16/fp8_rowwise", "fp8+dequantized", "fp8+high_precision")]
CONFIGS += [
    UNSPELLABLE,
    HybridConfig.parse("fp8_rowwise+save_original_input"),
    HybridConfig.parse("fp8_rowwise+save_original_input+fast_accum"),
    HybridConfig.parse("fp8+fast_accum"),
    HybridConfig.parse("nvfp4+dequantized+bf16_weight_values"),
    HybridConfig.parse("fp8+fast_accum+bf16_weight_values"),
]


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("spec", SPECS)
def test_str_parses_back_to_an_equal_config(spec, modifier):
    output, *backward = spec.split("/")
    if modifier in ("+high_precision", "+dequantized") and backward not in ([], [output, output], ["bf16", "bf16"]):
        with pytest.raises(ValueError, match="replaces the formats of grad_input and grad_weight, got"):
            HybridConfig.parse(spec + modifier)
        return
    config = HybridConfig.parse(spec + modifier)
    assert HybridConfig.parse(str(config)) == config
    if not modifier.startswith(("+high", "+deq")):
        assert str(config) == spec + modifier


@pytest.mark.parametrize("formats", ["fp8:bf16", "mxfp8:bf16", "fp8:bf16/nvfp4:fp8/nvfp4"])
def test_a_modifier_that_one_of_its_roles_has_no_use_for_is_printed(formats):
    """A weight in high precision has no columnwise face that could be quantized from the rowwise one."""
    config = HybridConfig.parse(formats + "+rowwise_dequantized")
    assert config != HybridConfig.parse(formats)
    assert str(config) == formats + "+rowwise_dequantized"


def test_operands_of_a_product_may_have_formats_of_their_own():
    """In the order in which products are written: the input, or the gradient, is on the left."""
    config = HybridConfig.parse("fp8:mxfp8/fp8_rowwise:bf16/mxfp8:fp8")
    assert config.input == HybridQuantizer(E4M3, E4M3).simplified()
    assert config.weight == HybridQuantizer(ht.MXFP8Quantizer(), ht.IdentityQuantizer())
    assert config.grad_output == HybridQuantizer(Float8Quantizer("row"), ht.MXFP8Quantizer())
    assert HybridConfig.by_gemm(output="fp8:mxfp8", grad_input="fp8_rowwise:bf16", grad_weight="mxfp8:fp8") == config
    assert str(HybridConfig.parse("fp8:fp8/bf16:bf16/mxfp8:mxfp8")) == "fp8/bf16/mxfp8"


def test_a_config_without_spec_prints_its_constructor():
    assert str(UNSPELLABLE).startswith("HybridConfig(input=Float8Quantizer(")


def test_a_spec_is_written_however_many_modifiers_it_needs():
    """Every modifier that changes something at once; before, three were the most that were found."""
    spec = "fp8/mxfp8/nvfp4+pow2_scale+mx_two_d+mx_e5m2_grad+nearest+no_hadamard+rowwise_dequantized_weight"
    assert str(HybridConfig.parse(spec)) == spec


@pytest.mark.parametrize(
    "config",
    [
        HybridConfig(E4M3, Float8Quantizer(pow2_scale=True), E4M3),  # one of two scales is rounded
        HybridConfig(E4M3, E4M3, Float8Quantizer("block", "e5m2")),  # no word has E5M2 blocks
        HybridConfig(HybridQuantizer(E4M3, E4M3, "rowwise_dequantized"), E4M3, E5M2),  # no modifier of the input only
        recipes.nvfp4(seed=1),
        recipes.fp8_delayed(margin=1),
    ],
    ids=["scale", "element", "source", "seed", "margin"],
)
def test_what_no_spec_says_is_printed_in_full(config):
    assert str(config) == repr(config)


def test_printing_builds_a_config_per_modifier_and_searches_nothing(monkeypatch):
    built = []
    check = HybridConfig.__post_init__
    monkeypatch.setattr(HybridConfig, "__post_init__", lambda self: (built.append(self), check(self))[1])
    for spec, most in (("fp8/nvfp4/mxfp8+mx_e5m2_grad+one_d", 3), ("nvfp4", 1)):
        config = HybridConfig.parse(spec)
        _spec_of.cache_clear()
        built.clear()
        assert str(config) == spec
        assert len(built) == most
    built.clear()
    assert str(UNSPELLABLE).startswith("HybridConfig(")
    assert len(built) <= 3


def test_words_give_each_role_its_quantizer():
    config = HybridConfig.parse("fp8")
    assert config == HybridConfig(input=E4M3, weight=E4M3, grad_output=E5M2)
    mixed = HybridConfig.parse("fp8/fp8_rowwise/bf16")
    row = Float8Quantizer(granularity="row")
    assert mixed.input == HybridQuantizer(E4M3, IdentityQuantizer())
    assert mixed.weight == HybridQuantizer(E4M3, row)
    assert mixed.grad_output == HybridQuantizer(row, IdentityQuantizer())


def test_by_gemm_pairs_the_operands_of_each_product():
    config = HybridConfig.by_gemm(output="fp8", grad_input=Float8Quantizer(granularity="row"), grad_weight="bf16")
    names = [[fmt.name for fmt in config.formats(gemm)] for gemm in GEMMS]
    assert names == [["fp8_e4m3_tensor"] * 2, ["fp8_e4m3_row"] * 2, ["identity"] * 2]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
class TestValues:
    def test_equality_hash_pickle_copy(self, config):
        for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
            assert again == config
            assert hash(again) == hash(config)
            assert again.fingerprint() == config.fingerprint()

    def test_json_through_torchao(self, config):
        text = json.dumps(config_to_dict(config))
        again = config_from_dict(json.loads(text))
        assert type(again) is HybridConfig
        assert again == config

    def test_torch_load_with_weights_only(self, config, tmp_path):
        torch.save(config, tmp_path / "config.pt")
        assert torch.load(tmp_path / "config.pt", weights_only=True) == config


def test_fingerprints_differ_between_configs_and_agree_between_processes():
    prints = [config.fingerprint() for config in CONFIGS]
    assert len(set(prints)) == len(CONFIGS)
    program = "import hybridtensor as ht; print(ht.HybridConfig.parse('fp8/bf16/fp8_rowwise').fingerprint())"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"},
    )
    assert run.stdout.strip() == prints[1]


def test_a_fingerprint_is_stable_across_versions():
    """Checkpoints carry it: a change here makes old checkpoints foreign, so it must be on purpose."""
    assert HybridConfig.parse("fp8").fingerprint() == "a23dd8570e43b321"


class TestOverrides:
    def test_high_precision(self):
        config = HybridConfig(input=E4M3, weight=E4M3, grad_output=E5M2, backward_override="high_precision")
        original = HybridQuantizer(E4M3, IdentityQuantizer(), "original")
        assert (config.input, config.weight, config.grad_output) == (original, original, IdentityQuantizer())
        assert config.save_original_input

    def test_dequantized(self):
        config = HybridConfig(input=E4M3, weight=E4M3, grad_output=E5M2, backward_override="dequantized")
        seen = HybridQuantizer(E4M3, IdentityQuantizer(), "rowwise_dequantized")
        assert (config.input, config.weight, config.grad_output) == (seen, seen, IdentityQuantizer())
        assert not config.save_original_input

    def test_dequantized_forbids_the_original_input(self):
        with pytest.raises(ValueError, match="must not use; drop one"):
            HybridConfig.parse("fp8+dequantized+save_original_input")

    def test_a_quantizer_that_cannot_repeat_itself_vetoes_with_one_warning(self):
        class Dice(Quantizer):
            repeatable = False
            rowwise_format = columnwise_format = formats.IDENTITY

            def faces(self, x, *, rowwise, columnwise, dtype):
                raise NotImplementedError

        for quantizer in (Dice(), HybridQuantizer(E4M3, Dice())):
            with pytest.warns(UserWarning, match="repeats itself") as record:
                config = HybridConfig(input=quantizer, weight=E4M3, grad_output=E4M3, save_original_input=True)
            assert len(record) == 1
            assert not config.save_original_input


class TestBadInput:
    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("fp9", "unknown format 'fp9'; did you mean 'fp8'"),
            ("fp8_rowise", "did you mean 'fp8_rowwise'"),
            ("NVFP4", "unknown format 'NVFP4'; did you mean 'nvfp4'"),
            ("fp8+Pow2_Scale", "unknown modifier 'Pow2_Scale'; did you mean 'pow2_scale'"),
            ("fp8/bf16", "one format, or three"),
            ("fp8+dequantised", "unknown modifier 'dequantised'; did you mean 'dequantized'"),
            ("fp8+dequantized+high_precision", "one backward_override is possible"),
            ("", "unknown format ''"),
            ("fp8:", "unknown format ''"),
            ("fp8:fp9/bf16/bf16", "unknown format 'fp9'; did you mean 'fp8'"),
            ("fp8:mxfp8:bf16", "'fp8:mxfp8:bf16' has 3 formats, but a product has two operands; give one for both"),
        ],
    )
    def test_specs(self, spec, message):
        with pytest.raises(ValueError, match=message):
            HybridConfig.parse(spec)

    def test_kinds(self):
        with pytest.raises(TypeError, match="a string is required, got 8"):
            HybridConfig.parse(8)
        with pytest.raises(TypeError, match="a quantizer is required for weight, got 'fp8'"):
            HybridConfig(input=E4M3, weight="fp8", grad_output=E4M3)
        with pytest.raises(ValueError, match="did you mean 'dequantized'"):
            HybridConfig(input=E4M3, weight=E4M3, grad_output=E4M3, backward_override="dequantize")

    def test_products_that_are_not_defined_name_product_and_operands(self):
        class Rotated(Quantizer):
            rowwise_format = columnwise_format = formats.Format("t", torch.float8_e4m3fn, 448.0, hadamard=True)

            def faces(self, x, *, rowwise, columnwise, dtype):
                raise NotImplementedError

        both = HybridQuantizer(E4M3, Rotated())
        with pytest.raises(
            ValueError,
            match=r"grad_weight multiplies grad_output\.columnwise by input\.columnwise: .* got fp8_e5m2_tensor and t;",
        ):
            HybridConfig(input=both, weight=E4M3, grad_output=E5M2)
        HybridConfig(input=both, weight=E4M3, grad_output=HybridQuantizer(E5M2, Rotated()))

    def test_factories(self):
        with pytest.raises(TypeError, match=r"returned None for QuantizerRole.*tensor_type='input', name='a\.b'"):
            from_factory(lambda role: None, "a.b")

        def broken(role: QuantizerRole) -> Quantizer:
            raise KeyError("no such role")

        with pytest.raises(RuntimeError, match=r"raised for QuantizerRole\(module_type='linear'.*no such role"):
            from_factory(broken, "")


def operand_in_table(config, role, direction):
    """Return how the table of recipes writes a face."""
    quantizer = getattr(config, role)
    of_rowwise = getattr(quantizer, "columnwise_source", "") == "rowwise_dequantized" and direction == "columnwise"
    plain = getattr(quantizer, direction, quantizer)
    fmt = plain.rowwise_format
    letters = {"identity": "HP", "fp8_e4m3": "E4", "fp8_e5m2": "E5", "mxfp8": "MX", "mxfp4": "M4", "nvfp4": "NV"}
    word = next(letters[start] for start in letters if fmt.name.startswith(start))
    random = "e" if fmt.drawn_signs else "~" if plain.stochastic else ""
    marks = (
        random + ("r" if fmt.tensor_block == (1, None) else "") + ("6" if getattr(plain, "four_over_six", None) else "")
    )
    return word + marks + ("'" if of_rowwise and not fmt.is_identity else "")


class TestRecipes:
    def test_functions_are_those_of_the_table_in_its_order(self):
        assert list(recipes.RECIPES) == [row.name for row in TABLE]
        for name, function in recipes.RECIPES.items():
            assert getattr(recipes, name) is function
            assert function.__name__ == name

    @pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
    def test_is_what_its_spec_means_and_says_so(self, row):
        recipe = recipes.RECIPES[row.name]
        assert recipe() == recipes.from_name(row.name) == HybridConfig.parse(row.spec)
        assert str(recipe()) == row.spec
        promise, _, example, *options, spec, source = recipe.__doc__.split("\n\n")
        assert (promise, spec, source) == (row.promise, f"Spec: ``{row.spec}``.", f"Source: {row.source}")
        assert example == f'    ht.quantize_(model, "{row.name}")  # or ht.recipes.{row.name}()'
        taken = inspect.signature(recipe).parameters
        assert bool(options) == bool(taken)

    def test_options_reach_the_quantizers_that_they_are_for(self):
        fp8 = recipes.fp8(pow2_scale=True)
        assert fp8 == HybridConfig.parse("fp8+pow2_scale")
        assert recipes.fp8_rowwise(pow2_scale=True) == HybridConfig.parse("fp8_rowwise+pow2_scale")
        assert recipes.fp8_block(pow2_scale=False) == HybridConfig.parse("fp8_block+fp32_scale")
        assert recipes.fp8_delayed(algorithm="most_recent") == HybridConfig.parse("fp8_delayed+most_recent")
        delayed = recipes.fp8_delayed(margin=2, history_length=7)
        rules = delayed.delayed_rules().values()
        assert {(rule.margin, rule.history_length) for rule in rules} == {(2, 7)}
        for recipe in (recipes.nvfp4, recipes.nvfp4_1d_weight, recipes.mxfp8_fwd_nvfp4_bwd):
            drawn = recipe(seed=5)
            assert (drawn.input, drawn.weight) == (recipe().input, recipe().weight)
            assert {q.seed for q in (drawn.grad_output.rowwise, drawn.grad_output.columnwise)} == {5}
        rotated = recipes.quartet2(seed=5)
        assert {rotated.input.columnwise.seed, rotated.weight.columnwise.seed, rotated.grad_output.seed} == {5}
        assert (rotated.input.rowwise, rotated.weight.rowwise) == (recipes.quartet2().input.rowwise,) * 2

    def test_an_option_of_the_wrong_kind_is_refused(self):
        with pytest.raises(TypeError, match="pow2_scale"):
            recipes.fp8(pow2_scale="yes")
        with pytest.raises(TypeError):
            recipes.mxfp8(seed=1)

    def test_the_table_tells_the_formats(self):
        for name in recipes.RECIPES:
            row = next(line for line in named.__doc__.splitlines() if line.startswith(f"| ``{name}``"))
            cells = [cell.strip() for cell in row.split("|")[2:5]]
            config = recipes.from_name(name)
            made = []
            for gemm in GEMMS:
                left, right = (operand_in_table(config, *operand) for operand in gemm[1:])
                made.append(f"{left} {'h' if config.formats(gemm)[0].hadamard else 'x'} {right}")
            assert cells == made

    def test_an_unknown_name_lists_specs_and_recipes(self):
        with pytest.raises(ValueError, match="did you mean 'fp8_dequantized_backward'"):
            recipes.from_name("fp8_dequantised_backward")


def test_a_hybrid_of_one_quantizer_is_that_quantizer():
    twice = HybridQuantizer(E4M3, E4M3)
    assert HybridConfig(input=twice, weight=twice, grad_output=twice) == HybridConfig(E4M3, E4M3, E4M3)
    nothing = HybridQuantizer(IdentityQuantizer(), E4M3, "rowwise_dequantized")
    assert HybridConfig(nothing, E4M3, E4M3) == HybridConfig(HybridQuantizer(IdentityQuantizer(), E4M3), E4M3, E4M3)


def test_save_original_input_is_true_or_false():
    with pytest.raises(TypeError, match="save_original_input is True or False, got 'yes'"):
        HybridConfig(E4M3, E4M3, E4M3, save_original_input="yes")


def test_fast_accum_is_for_backward_in_fp8():
    for spec in ("mxfp8", "fp8_block", "bf16", "fp8/bf16/bf16", "fp8/mxfp8/nvfp4", "fp8+dequantized"):
        with pytest.raises(ValueError, match="fast_accum is for products of backward in FP8 per tensor or per row"):
            HybridConfig.parse(f"{spec}+fast_accum")
    for spec in ("fp8", "fp8_delayed", "fp8/mxfp8/fp8_rowwise", "fp8+e4m3_grad"):
        config = HybridConfig.parse(f"{spec}+fast_accum")
        assert config.fast_accum
        assert config.fingerprint() != HybridConfig.parse(spec).fingerprint()
    with pytest.raises(TypeError, match="fast_accum is True or False, got 1"):
        HybridConfig(E4M3, E4M3, E4M3, fast_accum=1)


@pytest.mark.parametrize("fast", [True, False])
def test_which_products_may_accumulate_fast(fast, monkeypatch):
    """The forward's always, those of backward on request."""
    asked = []

    def product(*operands, fast_accum=False, **options):
        asked.append(fast_accum)
        return multiply(*operands, fast_accum=fast_accum, **options)

    multiply = products.ops.product
    monkeypatch.setattr(products.ops, "product", product)
    layer = ht.quantize_(nn.Linear(32, 32), "fp8+fast_accum" if fast else "fp8")
    layer(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert asked == [True, fast, fast]


@pytest.mark.parametrize(("word", "policy"), [("keep_faces", "always"), ("free_faces", "never")])
def test_how_long_faces_live_is_in_the_spec(word, policy):
    config = HybridConfig.parse(f"fp8_rowwise+{word}")
    assert config.keep_faces == policy
    assert str(config) == f"fp8_rowwise+{word}"
    assert config != HybridConfig.parse("fp8_rowwise")
    assert config.fingerprint() != HybridConfig.parse("fp8_rowwise").fingerprint()
    assert (
        HybridConfig.by_gemm(output="fp8", grad_input="fp8", grad_weight="fp8", keep_faces=policy).keep_faces == policy
    )


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("bf16+keep_faces", "keep_faces is for weights that are quantized, got none"),
        ("fp8+keep_faces+free_faces", "one keep_faces is possible, got several"),
    ],
)
def test_how_long_faces_live_where_that_means_nothing(spec, told):
    with pytest.raises(ValueError, match=told):
        HybridConfig.parse(spec)


def test_an_unknown_word_of_how_long_faces_live():
    with pytest.raises(ValueError, match="unknown keep_faces 'ever'; did you mean 'never'"):
        HybridConfig(E4M3, E4M3, E4M3, keep_faces="ever")


@pytest.mark.parametrize("table", [recipes.RECIPES, tables.WORDS, tables.MODIFIERS, tables.POLICIES, tables.FLAGS])
def test_tables_of_recipes_cannot_be_written(table):
    """A format named as a recipe would never be reached, nor would the functions of recipes be others."""
    with pytest.raises(TypeError, match="does not support item assignment"):
        table["quartet2"] = next(iter(table.values()))

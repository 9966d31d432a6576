"""Every recipe and every format word in a linear layer: the three products, and what each of them depends on.

Oracle: float64 products of the operands, decoded by ml_dtypes, within the derived bound.
"""

import copy
import re

import pytest
import torch
from tiers import covered, in_turn
from torch import nn
from torch.utils.checkpoint import checkpoint

import hybridtensor as ht
from hybridtensor import Context, HybridConfig, recipes
from hybridtensor.recipe_table import TABLE
from hybridtensor.recipes import spec as specs
from hybridtensor.testing import exact_values, product_bound, random_tensor, saved_by

HOPPER_ACCUMULATE = 2.0**-13
FP8_WORDS = ("fp8", "fp8_rowwise", "fp8_delayed")
WORDS = ("bf16", "fp8", "fp8_block", "mxfp8", "nvfp4")
MIXES = ["/".join(words) for words in covered(WORDS, WORDS, WORDS)]
OPTIONS = [
    "fp8+pow2_scale", "fp8_block+fp32_scale", "fp8_delayed+most_recent", "mxfp8+mx_two_d", "mxfp8+mx_e5m2_grad",
    "fp8+e4m3_grad", "fp8_delayed+e4m3_grad",
    "nvfp4+one_d", "nvfp4+nearest", "nvfp4+no_hadamard", "nvfp4+one_d+nearest+no_hadamard", "nvfp4+row_scaled_input",
    "nvfp4+four_over_six", "nvfp4+one_d+four_over_six_weight+four_over_six_mse+four_over_six_448",
    "mxfp4", "mxfp4+mx_two_d+mx_even", "mxfp4+nearest+no_hadamard", "mxfp4/mxfp8/nvfp4+mx_floor+rowwise_dequantized",
    "mxfp4+dequantized", "fp8/mxfp4/mxfp4",
    "nvfp4/mxfp8/mxfp8+one_d+row_scaled_input+four_over_six_input+rowwise_dequantized",
    "nvfp4/fp8_block/mxfp8+rowwise_dequantized", "fp8_delayed/mxfp8/nvfp4", "mxfp8/fp8_delayed/fp8_delayed",
    "fp8_block+save_original_input", "mxfp8+high_precision", "fp8_delayed+dequantized", "nvfp4+save_original_input",
]  # fmt: skip
NAMED = sorted({*recipes.RECIPES, *OPTIONS})
K, N, TOKENS = 64, 128, 256  # whole blocks, and more tokens than one of 128


def layer(recipe, *, device="cpu", persistent=False, name="up", dtype=torch.bfloat16, bias=False):
    """Return a model of one converted layer called ``name``, and its plain weight."""
    plain = random_tensor(N, K, seed=7, dtype=dtype, device=device)
    model = nn.ModuleDict({name: nn.Linear(K, N, bias=bias, dtype=dtype, device=device)})
    with torch.no_grad():
        model[name].weight.copy_(plain)
    return ht.quantize_(model, recipe, persistent=persistent)[name], plain


def operands(device="cpu", dtype=torch.bfloat16):
    """Return input and gradient. What the tokens of one lack in magnitude, those of the other have: all matter, and
    small ones are rounded otherwise in a large block than in a small one."""
    spread = torch.exp2(-(torch.arange(TOKENS, device=device) // 16).float()).view(4, -1, 1)
    x, g = (random_tensor(4, TOKENS // 4, n, device=device, seed=seed) for n, seed in ((K, 1), (N, 2)))
    return (x * spread).to(dtype), (g / spread).to(dtype)


def run(module, x, g):
    """Return output, grad_input and grad_weight."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(g)
    return y.detach(), x.grad, module.weight.grad


def faces_used(module, x, w, g):
    """Return, per product, the exact values of both operands as matrices ready to multiply."""
    config = module.weight.config
    made = {}
    for role, values in (("input", x), ("weight", w), ("grad_output", g)):
        context = Context(role, module.weight.state, record=False)
        made[role] = getattr(config, role).quantize(values, context=context)

    def matrix(role, direction):
        face = getattr(made[role], direction)
        values = exact_values(face)
        return values.t() if direction == "columnwise" and not isinstance(face, ht.IdentityTensor) else values

    return (
        (matrix("input", "rowwise"), matrix("weight", "rowwise").t()),
        (matrix("grad_output", "rowwise"), matrix("weight", "columnwise")),
        (matrix("grad_output", "columnwise").t(), matrix("input", "columnwise")),
    )


@pytest.mark.parametrize(("recipe", "persistent"), in_turn([*NAMED, *MIXES], [False, True]), ids=str)
def test_three_products_against_float64(recipe, persistent, device):
    module, weight = layer(recipe, device=device, persistent=persistent)
    x, g = operands(device)
    got = run(module, x, g)
    accumulate = 2.0**-24 if device == "cpu" else HOPPER_ACCUMULATE
    for result, (left, right) in zip(got, faces_used(module, x, weight, g), strict=True):
        bound = product_bound(left, right, torch.bfloat16, accumulate=accumulate)
        error = (result.reshape(left.shape[0], -1).double() - left @ right).abs()
        assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("spec", MIXES)
def test_each_product_depends_only_on_its_own_pair_of_faces(spec, device):
    """With one product changed to another format, the other two are bitwise what they were."""
    x, g = operands(device)
    words = spec.split("/")
    before = run(layer(spec, device=device)[0], x, g)
    for changed in range(3):
        other = [w if i != changed else WORDS[(WORDS.index(w) + 1) % len(WORDS)] for i, w in enumerate(words)]
        after = run(layer("/".join(other), device=device)[0], x, g)
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [i != changed for i in range(3)]


@pytest.mark.parametrize("word", [w for w in (*WORDS, *FP8_WORDS) if w != "bf16"] + ["mxfp4"])
def test_a_hybrid_of_one_format_is_the_plain_format(word, device):
    x, g = operands(device)
    config = HybridConfig.parse(word)
    roles = {}
    for role in ("input", "weight", "grad_output"):
        q = getattr(config, role)
        row, column = (q.rowwise, q.columnwise) if isinstance(q, ht.HybridQuantizer) else (q, q)
        roles[role] = ht.HybridQuantizer(row, column)
    for a, b in zip(
        run(layer(config, device=device)[0], x, g), run(layer(HybridConfig(**roles), device=device)[0], x, g),
        strict=True,
    ):  # fmt: skip
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", NAMED)
class TestEveryRecipe:
    def test_is_a_value_that_survives_text(self, recipe):
        config = recipes.from_name(recipe)
        assert recipes.from_name(str(config)) == config if "(" not in str(config) else True
        assert copy.deepcopy(config) == config
        from torchao.core.config import config_from_dict, config_to_dict

        assert config_from_dict(config_to_dict(config)) == config
        assert config_from_dict(config_to_dict(config)).fingerprint() == config.fingerprint()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_activation_checkpointing_changes_no_bit(self, recipe, reentrant, device):
        module, _ = layer(recipe, device=device)
        x, g = operands(device)
        expected = run(module, x, g)
        leaf = x.clone().requires_grad_()
        module.zero_grad()
        y = checkpoint(module, leaf, use_reentrant=reentrant)
        y.backward(g)
        for got, value in zip((y.detach(), leaf.grad, module.weight.grad), expected, strict=True):
            assert torch.equal(got, value)

    def test_save_on_cpu_changes_no_bit(self, recipe, device):
        module, _ = layer(recipe, device=device)
        x, g = operands(device)
        expected = run(module, x, g)
        with torch.autograd.graph.save_on_cpu():
            got = run(module, x, g)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)

    def test_frozen_operands_do_not_change_the_others(self, recipe, device):
        module, _ = layer(recipe, device=device)
        x, g = operands(device)
        y, grad_input, grad_weight = run(module, x, g)
        module.weight.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(g)
        assert torch.equal(out, y)
        assert torch.equal(leaf.grad, grad_input)
        module.weight.requires_grad_(True)
        module.zero_grad()
        module(x).backward(g)
        assert torch.equal(module.weight.grad, grad_weight)

    def test_what_is_saved_is_what_explain_says(self, recipe):
        module, _ = layer(recipe)
        x, g = operands()
        run(module, x, g)  # fills the weight's cache
        leaf = x.clone().requires_grad_()
        with saved_by([module]) as saved:
            module(leaf)
        told = ht.explain(nn.ModuleDict({"up": module}), show=False).rows[-1].saved_bytes_per_token * TOKENS
        # scales shared by all tokens are not counted there: one per tensor or per column, 4 bytes each
        assert told <= saved.nbytes(without=[module.weight]) <= told + 4 * (K + 1)

    def test_wrong_sizes_are_named_at_conversion_or_first_use(self, recipe):
        config = recipes.from_name(recipe)
        sizes = nn.ModuleDict({"odd": nn.Linear(40, 56)})
        ragged = all(f.ragged for role in ("input", "weight", "grad_output") for f in formats_of(config, role))
        if ragged:
            ht.quantize_(sizes, recipe)
            return
        with pytest.raises(
            ValueError, match=r"quantize_: layer odd, (input|weight|grad_output): the \w+ face in \w+ needs"
        ):
            ht.quantize_(sizes, recipe)
        assert type(sizes["odd"].weight) is nn.Parameter


def formats_of(config, role):
    quantizer = getattr(config, role)
    return quantizer.rowwise_format, quantizer.columnwise_format


def test_rotation_on_one_side_only_is_refused_when_the_config_is_built():
    rotated = ht.HybridQuantizer(ht.NVFP4Quantizer(), ht.NVFP4Quantizer(hadamard=True))
    with pytest.raises(
        ValueError, match=r"grad_weight multiplies grad_output\.columnwise by input\.columnwise: .*basis"
    ):
        HybridConfig(input=rotated, weight=ht.NVFP4Quantizer(), grad_output=ht.NVFP4Quantizer())
    with pytest.raises(ValueError, match=r"output multiplies input\.rowwise by weight\.rowwise"):
        HybridConfig(input=ht.NVFP4Quantizer(hadamard=True), weight=ht.NVFP4Quantizer(), grad_output=rotated)


def test_random_rounding_and_save_original_input_contradict_each_other():
    random = ht.NVFP4Quantizer(rounding="stochastic")
    with pytest.raises(ValueError, match=r"save_original_input promises the bits .* rounded at random"):
        HybridConfig(input=random, weight=ht.NVFP4Quantizer(), grad_output=random, save_original_input=True)
    row_only = ht.HybridQuantizer(random, ht.MXFP8Quantizer())  # the columnwise face repeats itself
    config = HybridConfig(
        input=row_only, weight=ht.MXFP8Quantizer(), grad_output=ht.MXFP8Quantizer(), save_original_input=True
    )
    assert config.save_original_input
    delayed = ht.DelayedFloat8Quantizer()
    with pytest.warns(UserWarning, match="the quantized input is saved instead"):
        config = HybridConfig(input=delayed, weight=delayed, grad_output=delayed, save_original_input=True)
    assert not config.save_original_input


def test_modifiers_that_change_nothing_are_mistakes():
    for spec in (
        "mxfp8+nearest", "fp8+fp32_scale", "bf16+rowwise_dequantized+one_d", "bf16+rowwise_dequantized",
        "nvfp4+dequantized+nearest", "fp8+pow2_scale+fp32_scale", "nvfp4+nearest+nearest", "nvfp4+four_over_six_mse",
        "nvfp4+four_over_six+four_over_six_weight", "fp8+high_precision+save_original_input",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="changes nothing in"):
            HybridConfig.parse(spec)


@pytest.mark.parametrize("read", [recipes.from_name, HybridConfig.parse])
@pytest.mark.parametrize("text", ["{}+pow2_scale", "fp8/{}/bf16", "{}:bf16"])
def test_a_recipe_is_no_part_of_a_spec(read, text):
    for row in TABLE:
        if row.name not in specs.WORDS:
            advice = re.escape(f"got the recipe {row.name!r}, which is used alone (recipes.from_name); to change it, ")
            with pytest.raises(ValueError, match=f"{advice}start from its spec, {re.escape(repr(row.spec))}$"):
                read(text.format(row.name))


def test_the_docstring_of_parse_names_every_word():
    said = re.findall(r"``(\w+)``", HybridConfig.parse.__doc__)
    assert {*specs.WORDS, *specs.MODIFIERS, *specs.POLICIES} <= {*said}


class TestSchedule:
    def test_switches_by_step(self):
        plan = recipes.schedule({0: "nvfp4", 9: "bf16/nvfp4/nvfp4"})
        assert plan.at(0) == plan.at(8) == recipes.nvfp4()
        assert plan.at(9) == plan.at(1000) == HybridConfig.parse("bf16/nvfp4/nvfp4")
        module, _ = layer("nvfp4")
        x, g = operands()
        for step in (8, 9):
            ht.set_config_(module, plan.at(step))
            expected = run(layer(plan.at(step))[0], x, g)
            for a, b in zip(run(module, x, g), expected, strict=True):
                assert torch.equal(a, b)

    def test_state_stays_where_both_recipes_have_it(self):
        module, _ = layer("nvfp4")
        ht.step_(module)
        counter = module.quantization_state.rounding
        ht.set_config_(module, "bf16/nvfp4/nvfp4")
        assert module.quantization_state.rounding is counter
        assert counter.tolist()[1] == 1
        ht.set_config_(module, "mxfp8")
        assert list(module.state_dict()) == ["weight"]
        assert module.weight.layer.is_empty

    def test_bad_input(self):
        for starts in ({}, {5: "fp8"}, {0: "fp8", -1: "bf16"}, {0: "fp8", 0.5: "bf16"}):
            with pytest.raises(ValueError, match="steps from 0 on, 0 among them, are required"):
                recipes.schedule(starts)
        with pytest.raises(ValueError, match="unknown format 'fp9'"):
            recipes.schedule({0: "fp9"})
        with pytest.raises(ValueError, match="0 or more is required as step, got -1"):
            recipes.schedule({0: "fp8"}).at(-1)


class TestKeepBf16:
    def model(self):
        return nn.ModuleDict({
            "blocks": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(K, N), "down": nn.Linear(N, K)}) for _ in range(4)),
            "lm_head": nn.Linear(K, N),
        })  # fmt: skip

    @pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
    def test_first_and_last_blocks_stay_plain(self, recipe):
        model = self.model()
        ht.quantize_(model, recipe, keep_bf16=recipes.edge_blocks(model, first=1, last=2))
        converted = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and isinstance(
            m.weight, ht.MasterWeight)]  # fmt: skip
        assert converted == ["blocks.1.up", "blocks.1.down"]
        ht.set_config_(model, "fp8")  # only what was converted changes
        assert type(model["blocks"][0]["up"].weight) is nn.Parameter

    def test_blocks_are_counted_where_each_has_more_experts(self):
        blocks = [nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(K, N) for _ in range(8))}) for _ in range(4)]
        model = nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(K, N)]), "layers": nn.ModuleList(blocks)})
        assert recipes.edge_blocks(model) == ["layers.0", "layers.3"]

    def test_names_must_match(self):
        with pytest.raises(
            ValueError, match=r"keep_bf16 must name a layer, got 'block\.0'; layers to convert are: blocks"
        ):
            ht.quantize_(self.model(), "fp8", keep_bf16=["block.0"])
        with pytest.raises(TypeError, match="keep_bf16 is a list of names"):
            ht.quantize_(self.model(), "fp8", keep_bf16="blocks.0.*")
        with pytest.raises(ValueError, match=r"the recipe matches no layer, or keep_bf16 .*; layers are"):
            ht.quantize_(self.model(), "fp8", keep_bf16=["blocks.*"])

    def test_edge_blocks_needs_blocks(self):
        with pytest.raises(ValueError, match=r"the model has no nn\.ModuleList of blocks"):
            recipes.edge_blocks(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="fewer blocks than the 4 of 'blocks' are required, got first=2, last=2"):
            recipes.edge_blocks(self.model(), first=2, last=2)
        with pytest.raises(ValueError, match="fewer blocks than the 4 of 'ModuleList' are required, got first=3"):
            recipes.edge_blocks(self.model()["blocks"], first=3)

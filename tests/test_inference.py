"""Weights as inference engines load them.

Oracles: the readers of transformers and of compressed-tensors (``helpers/readers.py``) for the bytes; a
quantized copy of the weight for the values.
"""

import copy
import itertools

import pytest
import torch
from experts import Experts
from inference_models import BF16_VALUES, FAMILIES, WEIGHTS, recipe, values_of
from readers import read
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from transformers import AutoModelForCausalLM

import hybridtensor as ht
from hybridtensor.testing import random_tensor


def model(layout="ct_fp8_row", persistent=False, config=None):
    made = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 128, bias=False)).bfloat16()
    with torch.no_grad():  # scales that differ between and within rows: a permuted one shows
        for layer in (made[0], made[2]):
            rows, columns = (torch.arange(n) for n in layer.weight.shape)
            layer.weight.mul_(2.0 ** ((rows[:, None] // 16 * 5 + columns // 16 * 3) % 7).bfloat16())
    return ht.quantize_(made, config or recipe(layout), persistent=persistent)


def expected(quantized, name, dtype=torch.float32):
    """Return the values that the forward multiplies of a weight."""
    weight = quantized.get_parameter(name)
    return values_of(weight.dequantize(), weight.config.weight, dtype)


@pytest.mark.parametrize("layout", WEIGHTS)
def test_readers_see_the_values_that_the_forward_multiplies(layout):
    quantized = model(layout)
    tensors = dict(ht.inference_tensors(quantized, layout))
    got = read(tensors, ht.inference_config(quantized, layout))
    dtype = torch.bfloat16 if layout in BF16_VALUES else torch.float32
    for name in ("0.weight", "2.weight"):
        wanted = expected(quantized, name, dtype)
        if layout == "ct_nvfp4":  # three multiplications in another order: one rounding of bf16
            assert ((got[name].double() - wanted.double()).abs() <= wanted.double().abs() * 2**-8).all()
        else:
            assert torch.equal(got[name].to(dtype), wanted)
    assert torch.equal(tensors["0.bias"], quantized[0].bias)


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize(("chosen", "most"), [(None, 2688), ("mae", 1536)])
def test_the_bytes_of_nvfp4(two_d, chosen, most):
    """Codes and block scales are those of the face; the global scale is 2688 / amax, with four over six 1536 / amax,
    rounded once to fp32.
    """
    quantizer = ht.NVFP4Quantizer(two_d=two_d, four_over_six=chosen)
    config = ht.HybridConfig(*[quantizer] * 3)
    quantized = model(config=config)
    tensors = dict(ht.inference_tensors(quantized))
    face = config.weight.quantize(quantized[0].weight.dequantize(), columnwise=False).rowwise
    assert torch.equal(tensors["0.weight_packed"], face.qdata)
    scale = face.scale.float().repeat_interleave(16 if two_d else 1, 0)
    assert torch.equal(tensors["0.weight_scale"].float(), scale)
    amax = quantized[0].weight.dequantize().abs().max().double()
    assert tensors["0.weight_global_scale"].double() == (most / amax).float().double()


@pytest.mark.parametrize("options", [{"two_d": True}, {"scale_rounding": "even"}, {}], ids=str)
def test_the_bytes_of_mxfp4(options):
    """Codes are those of the face, exponents once for each row; compressed-tensors gives the values back."""
    config = ht.HybridConfig(ht.IdentityQuantizer(), ht.MXFP4Quantizer(**options), ht.IdentityQuantizer())
    quantized = model(config=config)
    tensors, said = dict(ht.inference_tensors(quantized)), ht.inference_config(quantized)
    face = config.weight.quantize(quantized[0].weight.dequantize(), columnwise=False).rowwise
    assert torch.equal(tensors["0.weight_packed"], face.qdata)
    scale = face.scale.view(torch.uint8).repeat_interleave(32 if "two_d" in options else 1, 0)
    assert torch.equal(tensors["0.weight_scale"], scale)
    assert said["format"] == "mxfp4-pack-quantized"
    got = read(tensors, said)
    assert torch.equal(got["0.weight"].float(), face.dequantize().float())


@pytest.mark.parametrize("two_d", [False, True])
def test_squares_of_mxfp8_are_rows_of_blocks(two_d):
    quantized = model(config=ht.HybridConfig(*[ht.MXFP8Quantizer(two_d=two_d)] * 3))
    got = read(dict(ht.inference_tensors(quantized)), ht.inference_config(quantized))
    assert torch.equal(got["2.weight"].bfloat16(), expected(quantized, "2.weight", torch.bfloat16))


@pytest.mark.parametrize("layout", WEIGHTS)
def test_values_at_the_edges(layout):
    """Zeros, tiny and huge values, blocks of zeros. Within a rounding of the largest bf16, readers give Inf where
    ``dequantize`` saturates.
    """
    edges = torch.tensor([0.0, -0.0, 2**-126, 2**-133, 448.0, -448.0, 1e-3, 1e38, -1e-30, 6.0])
    weight = edges.repeat(384 * 256 // len(edges) + 1)[: 384 * 256].view(384, 256).bfloat16()
    weight[128:256] = 0
    if layout in ("ct_fp8_tensor", "ct_nvfp4"):
        weight = weight.clamp(-448, 448)
    quantized = model(layout)
    with torch.no_grad():
        quantized[0].weight.copy_(weight)
    got = read(dict(ht.inference_tensors(quantized, layout)), ht.inference_config(quantized, layout))["0.weight"]
    dtype = torch.bfloat16 if layout in BF16_VALUES else torch.float32
    wanted = expected(quantized, "0.weight", dtype).double()
    if layout == "ct_nvfp4":
        assert ((got.double() - wanted).abs() <= wanted.abs() * 2**-8 + 2**-133).all()
    else:
        assert torch.equal(got.to(dtype).double(), wanted)


@pytest.mark.parametrize(
    "spec", ["fp8", "fp8_rowwise", "mxfp8", "nvfp4", "fp8_delayed", "fp8/bf16/mxfp8", "fp8+dequantized"]
)
@pytest.mark.parametrize("persistent", [False, True])
def test_master_persistent_delayed_and_hybrid_weights(spec, persistent):
    """The rowwise face counts; delayed ones have the scale of the state."""
    quantized = model(config=ht.HybridConfig.parse(spec), persistent=persistent)
    x = random_tensor(32, 256)
    quantized(x).sum().backward()
    ht.step_(quantized)
    tensors = dict(ht.inference_tensors(quantized))
    weight = quantized[2].weight
    face = weight.rowwise.face if persistent else weight.faces(rowwise=True, columnwise=False, dtype=weight.dtype)[0]
    elements = tensors["2.weight_packed" if spec == "nvfp4" else "2.weight"]
    assert torch.equal(elements.view(torch.uint8), face.qdata.view(torch.uint8))
    got = read(tensors, ht.inference_config(quantized))
    assert got.keys() == {"0.weight", "0.bias", "2.weight"}


def test_what_the_next_forward_takes_is_not_changed():
    """Exporting takes note of nothing: neither of faces as used, nor of amaxes."""
    models = []
    for exports in (False, True):
        torch.manual_seed(0)
        one = model(config=ht.HybridConfig.parse("fp8_delayed"))
        for step in range(3):
            one(random_tensor(16, 256, seed=step)).sum().backward()
            if exports:
                list(ht.inference_tensors(one))
            with torch.no_grad():
                for p in one.parameters():
                    p.mul_(4)
            if exports:
                list(ht.inference_tensors(one))
            with torch.no_grad():
                for p in one.parameters():
                    p.mul_(0.125)
            ht.step_(one)
        models.append(one.state_dict())
    assert models[0].keys() == models[1].keys()
    for a, b in zip(models[0].values(), models[1].values(), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_tensors_share_the_memory_of_faces():
    quantized = model("ct_fp8_row", persistent=True)
    tensors = dict(ht.inference_tensors(quantized))
    assert tensors["0.weight"].data_ptr() == quantized[0].weight.rowwise.qdata.data_ptr()
    master = model("ct_fp8_row")
    for _ in range(2):  # a weight that is used again before it is written keeps its faces
        master(random_tensor(4, 256)).sum().backward()
    (face,) = master[0].weight.record.face_cache.faces()
    assert dict(ht.inference_tensors(master))["0.weight"].data_ptr() == face.qdata.data_ptr()


def test_tied_weights_come_once():
    quantized = model()
    quantized.append(nn.Linear(256, 384))
    quantized[3].weight = quantized[0].weight
    names = [name for name, _ in ht.inference_tensors(quantized)]
    assert names.count("0.weight") == 1
    assert "3.weight" not in names


def test_a_quantized_embedding_is_refused():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(128, 256), nn.Linear(256, 128, bias=False)
            self.out.weight = self.embed.weight

    tied = ht.quantize_(Tied(), "fp8")
    with pytest.raises(ValueError, match=r"embed reads the values of embed\.weight, which linear layers quantize"):
        ht.inference_tensors(tied)
    left_alone = Tied()
    assert [name for name, _ in ht.inference_tensors(left_alone)] == ["embed.weight"]


@pytest.mark.parametrize("layout", ["ct_fp8_row", "ct_fp8_tensor", "ct_mxfp8", "hf_fp8", "ct_nvfp4", "ct_mxfp4"])
@pytest.mark.parametrize("stored", ["separate", "stacked"])
def test_experts(layout, stored):
    made = ht.quantize_(Experts(3, 128, 256).bfloat16(), recipe(layout))
    tensors = dict(ht.inference_tensors(made, experts=stored))
    if stored == "stacked":
        packed = {"ct_nvfp4": "w2"}.get(layout, "w2")
        assert tensors[packed].shape[0] == 3
        assert all(not name.startswith("0") for name in tensors)
        return
    got = read(tensors, ht.inference_config(made, layout))
    for e, name in itertools.product(range(3), ("w1", "w2", "w3")):
        dtype = torch.bfloat16 if layout in BF16_VALUES else torch.float32
        stack = getattr(made, name)
        wanted = values_of(stack.dequantize()[e].contiguous(), stack.config.weight, dtype)
        values = got[f"{e}.{name}.weight"]
        assert ((values.double() - wanted.double()).abs() <= wanted.double().abs() * 2**-8).all()
        assert layout == "ct_nvfp4" or torch.equal(values.to(dtype), wanted)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("stored", ["separate", "stacked"])
def test_biases_of_experts_are_stored_as_their_matrices(stored, quantized, tmp_path):
    """Those of experts in high precision stay with the stack, which no checkpoint has matrix by matrix."""

    def made(seed):
        torch.manual_seed(seed)
        experts = Experts(3, 128, 256)
        experts.w1_bias, experts.w4_bias = (nn.Parameter(torch.randn(3, 256)) for _ in range(2))
        return ht.quantize_(nn.ModuleDict({"e": experts}), "fp8_rowwise", persistent=True) if quantized else experts

    one, other = made(0), made(1)
    tensors = dict(ht.inference_tensors(one, experts=stored, dtype=torch.float32))
    bias = one["e"].w1_bias if quantized else one.w1_bias
    if quantized and stored == "separate":
        assert "e.w1_bias" not in tensors
        assert all(torch.equal(tensors[f"e.{e}.w1.bias"], bias[e]) for e in range(3))
        assert "e.w4_bias" in tensors  # there is no w4
        save_file({**tensors, "e.1.w1.bias": torch.ones(1)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"e\.1\.w1\.bias of \[256\] is required, got \[1\]"):
            ht.load_pretrained(made(1), tmp_path)
    else:
        assert torch.equal(tensors["e.w1_bias" if quantized else "w1_bias"], bias)
    folder = ht.export_pretrained(one, tmp_path / "out", experts=stored, dtype=torch.float32)
    ht.load_pretrained(other, folder)
    assert torch.equal(other["e"].w1_bias if quantized else other.w1_bias, bias)


@pytest.mark.parametrize("layout", ["hf_fp8", "ct_fp8_row", "ct_mxfp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_names_of_their_checkpoints(family, layout):
    """Oracle of names and values: the checkpoint that transformers saves, quantized matrix by matrix."""
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family])).bfloat16()
    quantized = ht.quantize_(copy.deepcopy(plain), recipe(layout))
    from transformers.core_model_loading import revert_weight_conversion

    stored = revert_weight_conversion(plain, {name: p.detach() for name, p in plain.named_parameters()})
    config = ht.inference_config(quantized, layout)
    got = read(dict(ht.inference_tensors(quantized, layout)), config)
    assert got.keys() == stored.keys()
    dtype = torch.bfloat16 if layout in BF16_VALUES else torch.float32
    ignored = config.get("ignore", config.get("modules_to_not_convert"))
    quantizer, count = recipe(layout).weight, 0
    for name, weight in stored.items():
        if weight.dim() == 2 and "embed" not in name and name.removesuffix(".weight") not in ignored:
            assert torch.equal(got[name].to(dtype), values_of(weight.contiguous(), quantizer, dtype)), name
            count += 1
        else:
            assert torch.equal(got[name], weight)
    assert count >= 14


class TestWhatIsRefused:
    def test_a_recipe_without_layout(self):
        bad = {
            "1x128": ht.Float8Quantizer("block", block="1x128"),
            "e5m2": ht.Float8Quantizer(dtype="e5m2"),
            "row_scaled": ht.NVFP4Quantizer(row_scaled=True),
            "hadamard": ht.NVFP4Quantizer(hadamard=True),
        }
        for weight in bad.values():
            others = ht.Float8Quantizer("block", block="1x128") if weight is not bad["hadamard"] else weight
            quantized = model(config=ht.HybridConfig(others, weight, others))
            with pytest.raises(ValueError, match=r"0\.weight: a face that a layout holds .* train the layer with"):
                ht.inference_tensors(quantized)
            with pytest.raises(ValueError, match=r"0\.weight: a face .* is required by layout 'ct_mxfp8'"):
                ht.inference_tensors(quantized, "ct_mxfp8")

    @pytest.mark.parametrize("size", [(192, 256), (200, 256), (136, 128), (256, 192)])
    def test_shapes_that_readers_get_wrong(self, size):
        config = ht.HybridConfig(*[ht.Float8Quantizer("block", block="128x128")] * 3)
        quantized = ht.quantize_(nn.Sequential(nn.Linear(size[1], size[0], bias=False)), config)
        for layout in ("hf_fp8", "hf_fp8_ue8m0"):
            with pytest.raises(ValueError, match=r"0\.weight: whole blocks of 128x128 are required .* ct_fp8_block"):
                ht.inference_tensors(quantized, layout)
        got = read(dict(ht.inference_tensors(quantized)), ht.inference_config(quantized))["0.weight"]
        assert torch.equal(got, expected(quantized, "0.weight"))

    def test_power_of_two_exponents_of_other_scales(self):
        with pytest.raises(ValueError, match="fp8_e4m3_128x128 is required by layout 'hf_fp8_ue8m0'"):
            ht.inference_tensors(model("hf_fp8"), "hf_fp8_ue8m0")

    def test_unknown_words(self):
        with pytest.raises(ValueError, match="unknown layout 'hf_fp'; did you mean 'hf_fp8'"):
            ht.inference_tensors(model(), "hf_fp")
        with pytest.raises(ValueError, match="experts"):
            ht.inference_tensors(model(), experts="split")
        with pytest.raises(ValueError, match="ranks"):
            ht.inference_tensors(model(), ranks="second")

    def test_parts_of_experts_that_share_a_block(self):
        config = copy.deepcopy(FAMILIES["mixtral"])
        config.intermediate_size = 192  # gate and up together are three blocks of rows
        made = ht.quantize_(AutoModelForCausalLM.from_config(config), recipe("ct_fp8_block"))
        with pytest.raises(ValueError, match=r"gate_up_proj: weight_scale.* blocks of 128 that belong to two"):
            list(ht.inference_tensors(made, "ct_fp8_block"))

    def test_names_that_collide(self):
        made = nn.Module()
        made.experts = Experts(2, 128, 128)
        made.experts.add_module("0", nn.Module())
        made.experts.get_submodule("0").w1 = nn.Linear(128, 128)
        ht.quantize_(made, "fp8")
        with pytest.raises(ValueError, match=r"one tensor for each name .* a second 'experts.0.w1.weight'"):
            list(ht.inference_tensors(made))


def test_mixed_recipes_are_groups_of_one_configuration():
    """Each layer has a layout of its own: compressed-tensors reads all of them."""
    made = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(5)))
    words = ["fp8", "fp8_rowwise", "mxfp8", "nvfp4+one_d", "bf16"]
    for i, word in enumerate(words):
        ht.quantize_(made, word, filter_fn=lambda _, name, i=i: name == str(i))
    config = ht.inference_config(made)
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["4"]
    assert len(config["config_groups"]) == 4
    got = read(dict(ht.inference_tensors(made)), config)
    for name in ("0.weight", "1.weight", "2.weight"):
        assert torch.equal(got[name].bfloat16(), expected(made, name, torch.bfloat16))
    assert torch.equal(got["4.weight"], made[4].weight.dequantize().bfloat16())


def test_a_plain_model_needs_no_configuration():
    assert ht.inference_config(nn.Linear(4, 4)) == {}
    assert [name for name, _ in ht.inference_tensors(nn.Linear(4, 4))] == ["weight", "bias"]


def test_auto_goes_by_the_rule_for_inputs_too():
    """Engines quantize inputs per 1x128 for Hugging Face's layouts, whatever the recipe does."""
    squares, blocks = WEIGHTS["hf_fp8_ue8m0"], ht.Float8Quantizer("block")
    fp32_blocks = ht.Float8Quantizer("block", pow2_scale=False)
    for inputs, weight, layout in (
        (blocks, squares, "hf_fp8_ue8m0"),
        (fp32_blocks, squares, "hf_fp8"),
        (blocks, WEIGHTS["hf_fp8"], "hf_fp8"),
        (ht.IdentityQuantizer(), squares, "ct_fp8_block"),
        (ht.Float8Quantizer("row"), squares, "ct_fp8_block"),
    ):
        made = model(config=ht.HybridConfig(inputs, weight, inputs))
        assert ht.inference_config(made) == ht.inference_config(made, layout)


def test_experts_that_stay_plain_are_named():
    made = nn.ModuleDict({"a": Experts(2, 128, 128), "b": Experts(2, 128, 128)})
    ht.quantize_(made, "fp8", filter_fn=lambda _, name: name.startswith("a."))
    ignored = ht.inference_config(made)["ignore"]
    assert ignored == [f"b.{e}.{name}" for e in range(2) for name in ("w1", "w2", "w3")]


@pytest.mark.parametrize("spec", ["fp8", "fp8_rowwise", "nvfp4+one_d"])
def test_stacks_that_checkpoints_only_rename(spec):
    """Every expert keeps its scales."""
    from transformers import GraniteMoeConfig

    config = GraniteMoeConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                              num_key_value_heads=1, num_local_experts=4, vocab_size=64)  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ht.quantize_(made, spec)
    tensors = dict(ht.inference_tensors(made))
    stacks = {name: t for name, t in tensors.items() if "input_linear" in name}
    assert stacks
    assert all(tensor.shape[0] == 4 for tensor in stacks.values())


def test_adapters_are_refused():
    made = model()
    made[0].base_layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"layers without adapters are required, got 0 .* merge_and_unload"):
        ht.inference_tensors(made)


def test_compiled_models_have_the_names_of_what_they_compile():
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES["mixtral"]), dtype=torch.bfloat16)
    made = ht.quantize_(plain, "mxfp8")
    compiled = torch.compile(made)
    assert [n for n, _ in ht.inference_tensors(compiled)] == [n for n, _ in ht.inference_tensors(made)]


def test_weights_that_quantize_did_not_make_are_refused():
    made = [parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64)]
    model = ht.quantize_(nn.Sequential(*made), "fp8")
    for got in ("one that a parametrization computes; call remove_parametrizations", "a Parameter that took its place"):
        with pytest.raises(ValueError, match=rf"0\.weight: a weight that quantize_ made is required, got {got}"):
            ht.inference_tensors(model)
        if parametrize.is_parametrized(model[0]):
            parametrize.remove_parametrizations(model[0], "weight")
    ht.quantize_(model, "fp8")
    assert {"0.weight", "0.weight_scale"} <= dict(ht.inference_tensors(model)).keys()
    model[0].weight = nn.Parameter(torch.ones(64, 64))
    assert "0.weight_scale" not in dict(ht.inference_tensors(ht.set_config_(model, "bf16")))

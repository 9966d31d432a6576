"""Experts in MXFP4 as checkpoints of gpt-oss have them, and of DeepSeek V4; and MXFP4 as NVFP4.

Oracles: the reader of transformers, on the bytes that were written and on any others; ``from_pretrained``; for
NVFP4 float64, and compressed-tensors.
"""

import copy
import json

import pytest
import torch
from inference_models import values_of
from readers import read
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config, GptOssConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import hybridtensor as ht
from hybridtensor.__main__ import main

SMALL = GptOssConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=64, num_local_experts=3, num_experts_per_tok=2,
)  # fmt: skip
STACKS = [f"model.layers.{i}.mlp.experts.{name}" for i in range(2) for name in ("gate_up_proj", "down_proj")]
PLAIN = ht.IdentityQuantizer()


def is_stack(module, name):
    return name.rpartition(".")[2] in ("gate_up_proj", "down_proj")


def gpt_oss(seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(SMALL), dtype=torch.bfloat16).eval()


def quantized(seed=0, persistent=False, filter_fn=is_stack, **options):
    config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(**options), PLAIN)
    return ht.quantize_(gpt_oss(seed), config, filter_fn=filter_fn, persistent=persistent)


def values(model, name):
    """Return the values of a stack that the forward multiplies, as the model stores it."""
    weight = model.get_parameter(name)
    if isinstance(weight, ht.HybridTensor):
        return weight.columnwise.dequantize()
    if not isinstance(weight, ht.MasterWeight):
        return weight.detach()
    each = [values_of(one.t().contiguous(), weight.config.weight, torch.bfloat16) for one in weight.dequantize()]
    return torch.stack(each).transpose(1, 2)


def decoded(tensors, name):
    return convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])


class Stored(nn.Module):
    """A stack as gpt-oss stores it, ``[E, K, N]``."""

    def __init__(self, width=64):
        super().__init__()
        self.num_experts, self.is_transposed = 3, True
        self.w1 = nn.Parameter(torch.randn(3, width, 32).bfloat16())


def stored(width=64, **others):
    groups = width // 32
    tensors = {
        "w1_blocks": torch.randint(256, (3, 32, groups, 16), dtype=torch.uint8),
        "w1_scales": torch.randint(200, (3, 32, groups), dtype=torch.uint8),
    }
    return {name: one for name, one in {**tensors, **others}.items() if one is not None}


@pytest.mark.parametrize("options", [{}, {"two_d": True}, {"scale_rounding": "floor"}, {"persistent": True}], ids=str)
def test_what_is_written_is_what_transformers_reads(options, tmp_path):
    model = quantized(**options)
    folder = ht.export_pretrained(model, tmp_path / "out", "hf_mxfp4")
    tensors = load_file(folder / "model.safetensors")
    plain = {name for name, _ in gpt_oss().named_parameters()} - set(STACKS)
    assert tensors.keys() == plain | {f"{name}{half}" for name in STACKS for half in ("_blocks", "_scales")}
    for name in STACKS:
        rows, contracted = (192, 64) if "gate_up" in name else (64, 96)
        assert tensors[f"{name}_blocks"].shape == (3, rows, contracted // 32, 16)
        assert tensors[f"{name}_scales"].shape == (3, rows, contracted // 32)
        assert torch.equal(decoded(tensors, name), values(model, name))


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it(tmp_path):
    """Its reader of whole folders dequantizes where no kernels are."""
    model = quantized()
    folder = ht.export_pretrained(model, tmp_path / "out")
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "mxfp4"
    assert "lm_head" in said["modules_to_not_convert"]
    assert not any("experts" in name for name in said["modules_to_not_convert"])
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = gpt_oss()
    with torch.no_grad():
        for name in STACKS:
            expected.get_parameter(name).copy_(values(model, name))
    for (name, mine), theirs in zip(loaded.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    x = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, expected(x).logits)


@pytest.mark.parametrize("kind", ["plain", "master", "persistent"])
def test_it_comes_back(kind, tmp_path):
    model = quantized(persistent=True)
    folder = ht.export_pretrained(model, tmp_path / "out")
    other = gpt_oss(1) if kind == "plain" else quantized(1, persistent=kind == "persistent")
    ht.load_pretrained(other, folder)
    for name, own in model.named_parameters():
        got = other.get_parameter(name)
        if kind == "persistent" and name in STACKS:
            for mine, theirs in zip(own.columnwise.face.tensors(), got.columnwise.face.tensors(), strict=True):
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
        elif name in STACKS:
            assert torch.equal(got.dequantize() if kind == "master" else got, values(model, name)), name
        else:
            assert torch.equal(got, own), name


@pytest.mark.parametrize("persistent", [False, True])
def test_any_bytes_are_loaded_as_transformers_reads_them(persistent, tmp_path):
    """All codes under all exponents of which bfloat16 holds all values, subnormal ones too; and they go out again."""
    tensors = stored()
    tensors["w1_blocks"] = torch.arange(3 * 32 * 2 * 16).view(3, 32, 2, 16).to(torch.uint8)
    tensors["w1_scales"] = (torch.arange(3 * 32 * 2) % 253).view(3, 32, 2).to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Stored()
    if persistent:
        config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(), PLAIN)
        ht.quantize_(model, config, persistent=True)
    ht.load_pretrained(model, tmp_path)
    exponents = tensors["w1_scales"].double() - 127
    exact = decoded({**tensors, "w1_scales": torch.full_like(tensors["w1_scales"], 127)}, "w1").double()
    exact *= exponents.exp2().repeat_interleave(32, 2).transpose(1, 2)
    assert torch.equal(values(model, "w1").double(), exact)
    normal = exact.abs() >= 2.0**-126
    assert torch.equal(values(model, "w1")[normal], decoded(tensors, "w1")[normal])
    if persistent:
        sent = dict(ht.inference_tensors(model, "hf_mxfp4"))
        assert all(torch.equal(sent[name], tensors[name]) for name in tensors)


NAN = torch.full((3, 32, 2), 127, dtype=torch.uint8)
NAN[1, 5, 1] = 255
BAD = {
    "no scales": (r"w1_blocks with w1_scales are required.* got \['w1_blocks'\]", {"w1_scales": None}),
    "no blocks": (r"w1_blocks with w1_scales are required.* got \['w1_scales'\]", {"w1_blocks": None}),
    "values besides": (r"and nothing besides, got \['w1', 'w1_b", {"w1": torch.ones(3, 64, 32)}),
    "int8": ("uint8 blocks .* got torch.int8", {"w1_blocks": torch.ones(3, 32, 2, 16, dtype=torch.int8)}),
    "scales that are numbers": ("with torch.float32", {"w1_scales": torch.ones(3, 32, 2)}),
    "flat": (r"uint8 blocks .* got torch.uint8 \[3, 32, 32\]", {"w1_blocks": torch.ones(3, 32, 32, dtype=torch.uint8)}),
    "blocks of 16": ("uint8 blocks", {"w1_blocks": torch.ones(3, 32, 2, 8, dtype=torch.uint8)}),
    "fewer scales": ("uint8 blocks", {"w1_scales": torch.ones(3, 32, 1, dtype=torch.uint8)}),
    "NaN": ("finite scales above zero are required, got 1 others of", {"w1_scales": NAN}),
    "infinite values": ("exponents up to 252 are required.* got 254", {"w1_scales": torch.full_like(NAN, 254)}),
    "fewer experts": ("w1 of 3 experts is required", {name: one[:2] for name, one in stored().items()}),
    "other rows": (r"w1 of \[32, 64\] is required, got \[16, 64\]", {n: one[:, :16] for n, one in stored().items()}),
    "wider": (r"w1 of \[32, 64\] is required, got \[32, 96\]", stored(96)),
}


@pytest.mark.parametrize("name", BAD)
def test_tensors_that_cannot_be_experts(name, tmp_path):
    said, changed = BAD[name]
    save_file({n: one.contiguous() for n, one in stored(**changed).items()}, tmp_path / "model.safetensors")
    model = Stored()
    before = model.w1.detach().clone()
    with pytest.raises(ValueError, match=rf"{said}.* from model\.safetensors in"):
        ht.load_pretrained(model, tmp_path)
    assert torch.equal(model.w1, before)


def test_an_engine_computes_what_was_trained():
    model, x = quantized(), {"input_ids": torch.arange(12)[None]}
    for layout in ("hf_mxfp4", "ct_mxfp4", "auto"):
        found = ht.mismatch(model, x, layout)
        assert {layer.layouts for layer in found.layers} == {layout.replace("auto", "hf_mxfp4")}
        assert all(layer.value == 0 and layer.activation == "none" for layer in found.layers)
        assert found.kl == 0
    planted = dict(ht.inference_tensors(model, "hf_mxfp4", experts="stacked"))
    planted[f"{STACKS[0]}_blocks"] = planted[f"{STACKS[0]}_blocks"] ^ 1
    assert ht.mismatch(model, x, "hf_mxfp4", tensors=planted.items()).layers[0].value > 0


def test_stacks_in_one_tensor_come_back_from_compressed_tensors(tmp_path):
    config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(), PLAIN)
    one, other = (ht.quantize_(Stored(), config, persistent=True) for _ in range(2))
    ht.load_pretrained(other, ht.export_pretrained(one, tmp_path / "out", "ct_mxfp4", experts="stacked"))
    assert torch.equal(values(one, "w1"), values(other, "w1"))


class TestWhatIsRefused:
    def test_linear_layers(self):
        model = quantized(filter_fn=lambda module, name: is_stack(module, name) or name.endswith("o_proj"))
        with pytest.raises(ValueError, match=r"o_proj\.weight: a stack of experts .* layouts that hold it: ct_mxfp4"):
            ht.inference_tensors(model, "hf_mxfp4")
        assert ht.inference_config(model)["format"] == "mxfp4-pack-quantized"

    def test_stacks_that_are_stored_the_other_way(self):
        class Stacks(nn.Module):
            num_experts, is_transposed = 3, False

            def __init__(self):
                super().__init__()
                self.w1 = nn.Parameter(torch.randn(3, 32, 64))

        model = ht.quantize_(Stacks(), "mxfp4")
        with pytest.raises(ValueError, match=r"w1: a stack of experts \[E, K, N\] is required"):
            ht.inference_tensors(model, "hf_mxfp4")

    def test_modules_with_one_stack_in_high_precision(self):
        model = quantized(filter_fn=lambda _, name: name.endswith("gate_up_proj"))
        with pytest.raises(ValueError, match=r"all stacks of model\.layers\.0\.mlp\.experts in MXFP4 are required"):
            ht.inference_tensors(model, "hf_mxfp4")

    def test_other_formats(self):
        model = ht.quantize_(gpt_oss(), "fp8_rowwise", filter_fn=is_stack)
        with pytest.raises(ValueError, match="a face of mxfp4 or mxfp4_32x32 is required by layout 'hf_mxfp4'"):
            ht.inference_tensors(model, "hf_mxfp4")


def test_experts_in_high_precision_are_named_by_their_module():
    model = quantized(filter_fn=lambda module, name: is_stack(module, name) and "layers.0" in name)
    plain = ht.inference_config(model, "hf_mxfp4")["modules_to_not_convert"]
    assert [name for name in plain if "experts" in name] == ["model.layers.1.mlp.experts"]


@pytest.mark.filterwarnings("ignore")
def test_the_command_quantizes_experts_alone(tmp_path):
    plain = gpt_oss()
    plain.save_pretrained(tmp_path / "plain")
    command = ["export", str(tmp_path / "plain"), str(tmp_path / "out"), "--recipe", "mxfp4", "--layout", "hf_mxfp4"]
    assert main(command) == 0
    tensors, model = load_file(tmp_path / "out" / "model.safetensors"), quantized()
    assert all(torch.equal(decoded(tensors, name), values(model, name)) for name in STACKS)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[name], plain.get_parameter(name))


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def with_exponents(low, high):
    """Return a layer with a weight in MXFP4: all codes under exponents from low to high, and a block of zeros."""
    exponents = torch.linspace(low, high, 64).round()
    weight = E2M1.float().repeat(64, 4) * exponents.exp2()[:, None]
    weight[7, :16], weight[7, 16:32] = 0.0, -0.0
    config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(), PLAIN)
    made = ht.quantize_(nn.Sequential(nn.Linear(64, 64, bias=False)), config, persistent=True)
    with torch.no_grad():
        made[0].weight.copy_(weight)
    assert torch.equal(made[0].weight.rowwise.dequantize(torch.float32), weight)
    return made, weight


@pytest.mark.parametrize(
    ("low", "high", "level"),
    [(-17, 0, 8), (-8, -8, 8), (-12, -4, 8), (-18, -1, 9), (-3, 14, -6), (-125, -110, 116), (106, 122, -114)],
)
def test_nvfp4_has_the_values_of_mxfp4(low, high, level, tmp_path):
    """Codes, scales of blocks and the global scale, decoded in float64 and by compressed-tensors; and they are loaded
    again.
    """
    model, weight = with_exponents(low, high)
    folder = ht.export_pretrained(model, tmp_path / "out", "ct_nvfp4")
    tensors = load_file(folder / "model.safetensors")
    assert tensors["0.weight_global_scale"].tolist() == [2.0**level]
    packed = tensors["0.weight_packed"]
    assert torch.equal(packed, model[0].weight.rowwise.qdata)
    elements = E2M1[torch.stack([packed & 15, packed >> 4], 2).flatten(1).long()]
    scale = tensors["0.weight_scale"].double().repeat_interleave(16, 1)
    assert torch.equal(elements * scale / tensors["0.weight_global_scale"].double(), weight.double())
    if abs(level) < 100:  # its reader has bfloat16 between
        got = read(tensors, ht.inference_config(model, "ct_nvfp4"))["0.weight"]
        assert torch.equal(got.float(), weight)
    back = ht.load_pretrained(nn.Sequential(nn.Linear(64, 64, bias=False)), folder)
    assert torch.equal(back[0].weight, weight)


@pytest.mark.parametrize(("low", "high"), [(-18, 0), (-125, 0), (120, 124)])
def test_exponents_that_nvfp4_has_not(low, high):
    model, _ = with_exponents(low, high)
    said = rf": 0\.weight: exponents within 17 of each other.* got {low} to {high}; .*'ct_mxfp4'"
    with pytest.raises(ValueError, match="^inference_tensors" + said):
        list(ht.inference_tensors(model, "ct_nvfp4"))
    with pytest.raises(ValueError, match="^mismatch" + said):
        ht.mismatch(model, torch.ones(1, 64), "ct_nvfp4")


def test_squares_of_mxfp4_as_nvfp4(tmp_path):
    config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(two_d=True), PLAIN)
    weight = torch.randn(96, 64) * torch.tensor([2.0**-9, 1, 8]).repeat_interleave(32)[:, None]
    made = nn.Sequential(nn.Linear(64, 96, bias=False))
    made[0].weight.data = weight
    ht.quantize_(made, config, persistent=True)
    back = nn.Sequential(nn.Linear(64, 96, bias=False))
    ht.load_pretrained(back, ht.export_pretrained(made, tmp_path / "out", "ct_nvfp4"))
    assert torch.equal(back[0].weight, made[0].weight.rowwise.dequantize(torch.float32))


@pytest.mark.parametrize("options", [{}, {"two_d": True}], ids=str)
def test_experts_in_mxfp4_are_stored_as_nvfp4(options, tmp_path):
    model = quantized(persistent=True, **options)
    back = ht.load_pretrained(gpt_oss(1), ht.export_pretrained(model, tmp_path / "out", "ct_nvfp4"))
    assert all(torch.equal(values(back, name), values(model, name)) for name in STACKS)
    found = ht.mismatch(model, {"input_ids": torch.arange(12)[None]}, "ct_nvfp4")
    assert all(layer.value == 0 for layer in found.layers)


DEEPSEEK = DeepseekV4Config(
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
    head_dim=32, vocab_size=64, n_routed_experts=3, num_experts_per_tok=2, q_lora_rank=32, o_lora_rank=16, o_groups=2,
    n_shared_experts=1,
)  # fmt: skip


def deepseek(seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(DEEPSEEK), dtype=torch.bfloat16).eval()


def of_deepseek():
    """Return a checkpoint with the names that transformers knows, experts in MXFP4 and all else in bfloat16."""
    model, tensors = deepseek(), {}
    plain = revert_weight_conversion(model, {name: p.detach() for name, p in model.state_dict().items()})
    for name, value in plain.items():
        tensors[name] = value.contiguous()
        if ".ffn.experts." in name:
            rows, columns = value.shape
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            exponents = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)
            tensors[name.removesuffix("weight") + "scale"] = exponents.view(torch.float8_e8m0fnu)
    return tensors


@pytest.mark.parametrize("kind", ["plain", "master", "persistent"])
def test_experts_of_deepseek_v4(kind, tmp_path):
    """Oracle: what transformers' reader makes of each matrix."""
    tensors, model = of_deepseek(), deepseek(1)
    save_file(tensors, tmp_path / "model.safetensors")
    method = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"expert_dtype": "fp4", "quantization_config": method}))
    config = ht.HybridConfig(PLAIN, ht.MXFP4Quantizer(), PLAIN)
    if kind != "plain":
        ht.quantize_(model, config, filter_fn=is_stack, persistent=kind == "persistent")
    ht.load_pretrained(model, tmp_path)

    def matrix(expert, name):
        own = f"model.layers.0.ffn.experts.{expert}.{name}"
        return Fp8Dequantize(None)._dequantize_one(tensors[f"{own}.weight"], tensors[f"{own}.scale"], torch.bfloat16)

    for e in range(3):
        expected = {"gate_up_proj": torch.cat([matrix(e, "w1"), matrix(e, "w3")]), "down_proj": matrix(e, "w2")}
        for name, wanted in expected.items():
            stack = model.get_parameter(f"model.layers.0.mlp.experts.{name}")
            got = stack.rowwise.dequantize() if kind == "persistent" else stack
            assert torch.equal((got.dequantize() if kind == "master" else got)[e], wanted)
    assert torch.equal(model.lm_head.weight, tensors["head.weight"])


E8M0 = torch.float8_e8m0fnu
BAD_MATRICES = {
    "NaN": ("finite scales above zero", torch.full((32, 2), 255, dtype=torch.uint8).view(E8M0)),
    "infinite": ("exponents up to 252", torch.full((32, 2), 253, dtype=torch.uint8).view(E8M0)),
    "blocks of 64": ("weight_packed of whole blocks of 32", torch.ones(32, 1).to(E8M0)),
    "a scale for all": ("weight_packed of whole blocks of 32", torch.ones(1, 1).to(E8M0)),
    "int8 of integers": ("elements in float8_e4m3fn are required, got torch.int8", torch.ones(32, 1)),
}


@pytest.mark.parametrize("name", BAD_MATRICES)
def test_scales_that_experts_of_deepseek_cannot_have(name, tmp_path):
    said, scale = BAD_MATRICES[name]
    save_file({"0.weight": torch.ones(32, 32, dtype=torch.int8), "0.scale": scale}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"0\.weight: .*{said}.* from model\.safetensors"):
        ht.load_pretrained(nn.Sequential(nn.Linear(64, 32, bias=False)), tmp_path)

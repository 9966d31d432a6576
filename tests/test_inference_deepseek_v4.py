"""DeepSeek V4's checkpoints, as they are released: FP8 in blocks of 128x128, experts in MXFP4.

Oracles: the names, dtypes and shapes of the released files; numpy on the bytes; the reader of transformers, what it
makes room for where it has kernels, and ``from_pretrained``.
"""

import copy
import json
import re

import numpy as np
import pytest
import torch
from experts import Experts, Mixture
from inference_models import values_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV4Config
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

import hybridtensor as ht
from hybridtensor.__main__ import main
from hybridtensor.testing import random_tensor

LAYOUT = "hf_deepseek_v4"
SMALL = DeepseekV4Config(
    hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
    head_dim=64, vocab_size=128, n_routed_experts=3, num_experts_per_tok=2, q_lora_rank=128, o_lora_rank=64, o_groups=2,
    n_shared_experts=1, index_n_heads=2, index_head_dim=64, index_topk=4, num_hash_layers=1,
    layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
)  # fmt: skip
PLAIN = ["*.compressor.kv_proj", "*.compressor.gate_proj", "*.indexer.kv_proj", "*.indexer.gate_proj", "*.weights_proj"]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
# Of layer 1 of a released file: the sizes are those of SMALL.
FP8 = {
    "attn.wq_a": (128, 256), "attn.wq_b": (256, 128), "attn.wkv": (64, 256), "attn.wo_a": (128, 128),
    "attn.wo_b": (256, 128), "attn.indexer.wq_b": (128, 128), "ffn.shared_experts.w1": (128, 256),
    "ffn.shared_experts.w2": (256, 128), "ffn.shared_experts.w3": (128, 256),
}  # fmt: skip
FP4 = {f"ffn.experts.{e}.{w}": (256, 128) if w == "w2" else (128, 256) for e in range(3) for w in ("w1", "w2", "w3")}
REST = [
    "attn.attn_sink", "attn.q_norm.weight", "attn.kv_norm.weight", "attn_norm.weight", "ffn_norm.weight",
    "attn.compressor.ape", "attn.compressor.norm.weight", "attn.compressor.wgate.weight", "attn.compressor.wkv.weight",
    "attn.indexer.compressor.ape", "attn.indexer.compressor.norm.weight", "attn.indexer.compressor.wgate.weight",
    "attn.indexer.compressor.wkv.weight", "attn.indexer.weights_proj.weight", "ffn.gate.weight", "ffn.gate.bias",
    *(f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")),
]  # fmt: skip
WHOLE = ["embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale"]
TRANSFORMERS = {
    "embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight", "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base", "hc_head_scale": "hc_head.hc_scale",
}  # fmt: skip
OWN = {
    "self_attn.q_a_proj": "attn.wq_a", "self_attn.kv_proj": "attn.wkv", "self_attn.o_a_proj": "attn.wo_a",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
}  # fmt: skip
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def plain(seed=0, **config):
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(SMALL), dtype=torch.bfloat16).eval()
    vars(made.config).update(config)
    with torch.no_grad():  # scales that differ between and within rows: a permuted one shows
        for name, p in made.named_parameters():
            if p.dim() >= 2 and "hc" not in name:
                rows, columns = (torch.arange(n) for n in p.shape[-2:])
                p.mul_(2.0 ** ((rows[:, None] // 64 * 5 + columns // 32 * 3) % 7 - 3).bfloat16())
    return made


def mixed(linear="fp8_block", experts="deepseek_v4_experts"):
    return ht.recipes.by_type(linear=linear, grouped_linear=experts)


def quantized(seed=0, persistent=False, recipe=None, keep=PLAIN, **config):
    return ht.quantize_(plain(seed, **config), recipe or mixed(), keep_bf16=keep, persistent=persistent)


def values(model, name):
    """Return the values that the forward multiplies."""
    weight = model.get_parameter(name)
    if isinstance(weight, ht.HybridTensor):
        return weight.rowwise.dequantize(torch.float32)
    if not isinstance(weight, ht.MasterWeight):
        return weight.detach().float()
    whole = weight.dequantize()
    each = [
        values_of(one.contiguous(), weight.config.weight, torch.float32) for one in whole.view(-1, *whole.shape[-2:])
    ]
    return torch.stack(each).view(whole.shape)


def decoded(weight, scale):
    """Return the values of two tensors of a released file, fp64, as numpy has their bytes."""
    powers = np.exp2(scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    if weight.dtype == torch.int8:
        codes = weight.numpy().view(np.uint8)
        return E2M1[np.stack([codes & 15, codes >> 4], 2).reshape(len(codes), -1)] * powers.repeat(32, 1)
    bits = weight.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    magnitude = np.where(exponent, (8 + mantissa) * np.exp2(exponent - 10.0), mantissa * 2.0**-9)
    spread = powers.repeat(128, 0).repeat(128, 1)[: len(bits), : bits.shape[1]]
    return np.where(bits >> 7, -magnitude, magnitude) * spread


@pytest.mark.parametrize("persistent", [False, True])
def test_names_dtypes_and_shapes_of_released_files(persistent):
    tensors = dict(ht.inference_tensors(quantized(persistent=persistent), LAYOUT))
    expected = {f"layers.1.{name}" for name in REST} | set(WHOLE)
    for name, (rows, columns) in FP8.items():
        weight, scale = (tensors[f"layers.1.{name}.{of}"] for of in ("weight", "scale"))
        assert (weight.dtype, weight.shape) == (E4M3, (rows, columns))
        assert (scale.dtype, scale.shape) == (E8M0, (-(-rows // 128), columns // 128))
        expected |= {f"layers.1.{name}.{of}" for of in ("weight", "scale")}
    for name, (rows, columns) in FP4.items():
        weight, scale = (tensors[f"layers.1.{name}.{of}"] for of in ("weight", "scale"))
        assert (weight.dtype, weight.shape) == (torch.int8, (rows, columns // 2))
        assert (scale.dtype, scale.shape) == (E8M0, (rows, columns // 32))
        expected |= {f"layers.1.{name}.{of}" for of in ("weight", "scale")}
    assert {name for name in tensors if not name.startswith("layers.0.")} == expected
    for name in (*(f"layers.1.{name}" for name in REST), *WHOLE):
        in_fp32 = name.endswith(("attn_sink", "ape", "gate.bias")) or "hc_" in name
        assert tensors[name].dtype == (torch.float32 if in_fp32 else torch.bfloat16), name
    assert "layers.0.ffn.gate.tid2eid" in tensors


@pytest.mark.parametrize("experts", ["deepseek_v4_experts", ht.HybridConfig(*[ht.MXFP4Quantizer(two_d=True)] * 3)])
def test_bytes_are_the_values_that_the_forward_multiplies(experts):
    model = quantized(recipe=mixed(experts=experts))
    tensors = dict(ht.inference_tensors(model, LAYOUT))
    read = {}
    for name in (f"layers.{i}.{name}" for i in range(2) for name in (*FP8, *FP4)):
        if f"{name}.scale" in tensors:  # one layer has no indexer
            pair = tensors[f"{name}.weight"], tensors[f"{name}.scale"]
            read[name] = decoded(*pair)
            theirs = Fp8Dequantize(None)._dequantize_one(*pair, torch.float32)
            assert np.array_equal(theirs.double().numpy(), read[name])
    assert len(read) == 2 * len({**FP8, **FP4}) - 1
    for i in range(2):
        for own, stored in OWN.items():
            wanted = values(model, f"model.layers.{i}.{own}.weight")
            assert np.array_equal(read[f"layers.{i}.{stored}"], wanted.double().numpy())
        both, down = (values(model, f"model.layers.{i}.mlp.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        for e in range(3):
            of = [read[f"layers.{i}.ffn.experts.{e}.{name}"] for name in ("w1", "w3", "w2")]
            assert np.array_equal(np.concatenate(of[:2]), both[e].double().numpy())
            assert np.array_equal(of[2], down[e].double().numpy())


def test_the_configuration_of_released_files(tmp_path):
    """As DeepSeek has it, with the dtype of experts where transformers has it, too, and names of what is plain."""
    model = quantized(expert_dtype="fp8")
    assert ht.inference_config(model) == ht.inference_config(model, LAYOUT)
    config = json.loads((ht.export_pretrained(model, tmp_path / "out", LAYOUT) / "config.json").read_text())
    said = config["quantization_config"]
    left = said.pop("modules_to_not_convert")
    assert said == {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128], "expert_dtype": "fp4",
    }  # fmt: skip
    assert config["expert_dtype"] == "fp4"
    assert {name for name in left if "layers.1" in name} == {
        f"layers.1.{name.removesuffix('.weight')}"
        for name in REST
        if re.search(r"(wkv|wgate|weights_proj|gate)\.w", name)
    }
    other = ht.quantize_(plain(expert_dtype="fp4"), "fp8_block")
    written = ht.export_pretrained(other, tmp_path / "fp8", "hf_fp8_ue8m0") / "config.json"
    assert json.loads(written.read_text())["expert_dtype"] == "fp8"


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it(tmp_path):
    """Its reader of whole folders dequantizes where no kernels are, and where it is asked to."""
    model = quantized()
    folder = ht.export_pretrained(model, tmp_path / "out", LAYOUT)
    asked = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if torch.cuda.is_available() else {}
    loaded, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True, **asked)
    assert not any(told.values())
    for name, mine in loaded.named_parameters():
        assert torch.equal(mine.float(), values(model, name).bfloat16().float()), name


def with_kernels(model, said):
    """Return the parameters that transformers makes room for where it has kernels, by their names and none's values."""
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**said), pre_quantized=True)
    quantizer._normalize_modules_to_not_convert(model)
    kept = quantizer.get_modules_to_not_convert(
        model, quantizer.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
    )
    return replace_with_fp8_linear(model, kept, quantizer.quantization_config).state_dict()


@pytest.mark.parametrize("alone", [False, True])
def test_transformers_makes_room_for_it(alone):
    """With kernels: the same dtypes and sizes, also where the experts of a layer stay in high precision."""
    model = quantized(keep=[*PLAIN, *(["model.layers.0.mlp.experts"] if alone else [])])
    room = with_kernels(plain(), ht.inference_config(model, LAYOUT))
    tensors = dict(ht.inference_tensors(model, LAYOUT, experts="stacked"))
    assert (room["model.layers.0.mlp.experts.down_proj"].dtype == torch.int8) is not alone
    for name, tensor in room.items():
        stored = re.sub(r"weight_scale_inv$", "scale", name)
        assert tensors[stored].shape == tensor.shape, name
        assert tensor.dtype == tensors[stored].dtype or tensors[stored].dtype == torch.float32, name


@pytest.mark.parametrize("kind", ["plain", "master", "persistent"])
@pytest.mark.parametrize("experts", ["separate", "stacked"])
def test_it_comes_back(kind, experts, tmp_path):
    model = quantized(persistent=True)
    folder = ht.export_pretrained(model, tmp_path / "out", LAYOUT, experts=experts)
    back = ht.load_pretrained(plain(1) if kind == "plain" else quantized(1, kind == "persistent"), folder)
    for name, own in model.named_parameters():
        got = back.get_parameter(name)
        if kind == "persistent" and isinstance(own, ht.HybridTensor):
            assert got.rowwise.format is own.rowwise.format
            for side in ("rowwise", "columnwise"):
                mine, theirs = (getattr(weight, side).face.tensors() for weight in (own, got))
                for one, other in zip(mine, theirs, strict=True):
                    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
        else:
            held = got.dequantize() if isinstance(got, ht.MasterWeight) else got
            assert torch.equal(held.float(), values(model, name)), name
    if kind == "persistent":
        again = dict(ht.inference_tensors(back, LAYOUT, experts=experts))
        for name, tensor in load_file(folder / "model.safetensors").items():
            assert torch.equal(again[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("released", [True, False])
def test_any_bytes_under_either_names(released, tmp_path):
    """Names of released files, and those that transformers saves; all bytes of experts go out again."""
    model = quantized(persistent=True)
    tensors = {name: t.clone() for name, t in ht.inference_tensors(model, LAYOUT)}
    torch.manual_seed(7)
    for name in tensors:
        if ".ffn.experts." in name:
            low, high = (-128, 128) if name.endswith("weight") else (100, 140)
            made = torch.randint(low, high, tensors[name].shape).to(torch.int8 if low < 0 else torch.uint8)
            tensors[name] = made.view(tensors[name].dtype)
    saved = tensors
    if not released:
        own = revert_weight_conversion(plain(), {name: p.detach() for name, p in plain().state_dict().items()})
        assert not any(name.startswith("layers.") for name in own)
        saved = {f"model.{name}" if name.startswith("layers.") else name: t for name, t in tensors.items()}
        saved = {name.replace(".attn.kv_norm", ".attn.norm"): t for name, t in saved.items()}
        for was, name in TRANSFORMERS.items():
            saved[f"model.{name}"] = saved.pop(was)
        assert own.keys() <= saved.keys()
    save_file(saved, tmp_path / "model.safetensors")
    back = ht.load_pretrained(quantized(1, persistent=True), tmp_path)
    for name, tensor in ht.inference_tensors(back, LAYOUT):
        assert torch.equal(tensor.contiguous().view(torch.uint8), tensors[name].view(torch.uint8)), name


def test_an_engine_computes_what_was_trained():
    model, x = quantized(), {"input_ids": torch.arange(12)[None], "use_cache": False}
    found = ht.mismatch(model, x, LAYOUT)
    assert found.kl == found.value == 0
    for layer in found.layers:  # groups in one call, or one by one: their sums may be in another order
        assert layer.bits <= (1 if layer.layer.endswith("o_a_proj") else 0), layer
    assert {layer.layouts for layer in found.layers} == {LAYOUT}
    assert {"model.layers.0.mlp.experts", "model.layers.1.self_attn.o_a_proj"} <= {one.layer for one in found.layers}
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.self_attn.o_a_proj.weight"):
        planted = {n: t.clone() for n, t in ht.inference_tensors(model, LAYOUT, experts="stacked")}
        planted[name].view(torch.uint8)[..., 0] ^= 1
        worse = ht.mismatch(model, x, LAYOUT, tensors=planted.items()).layers
        assert [one.layer for one in worse if one.bits > 1] == [name.removesuffix(".down_proj").removesuffix(".weight")]


class Held(Experts):
    """Stacks that are stored ``[E, K, N]``."""

    is_transposed = True


@pytest.mark.parametrize("of", [Experts, Held])
@pytest.mark.parametrize("experts", ["separate", "stacked"])
def test_models_that_are_nobodys(of, experts, tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"up": nn.Linear(128, 256), "experts": of(3, 128, 128)}).bfloat16()
        return ht.quantize_(model, mixed(), persistent=True)

    one, other = made(0), made(1)
    tensors = dict(ht.inference_tensors(one, experts=experts))
    names = {"up.weight", "up.scale", "up.bias"}
    if experts == "separate":
        names |= {
            f"experts.{e}.{w}.{part}" for e in range(3) for w in ("w1", "w2", "w3") for part in ("weight", "scale")
        }
    else:
        names |= {f"experts.{w}{part}" for w in ("w1", "w2", "w3") for part in ("", "_scale_inv")}
    assert tensors.keys() == names
    ht.load_pretrained(other, ht.export_pretrained(one, tmp_path / "out", experts=experts))
    for name, tensor in ht.inference_tensors(other, LAYOUT, experts=experts):
        assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name


class TestWhatIsRefused:
    def refuse(self, said, model, layout=LAYOUT):
        for call in (ht.inference_tensors, ht.inference_config):
            with pytest.raises(ValueError, match=said):
                call(model, layout)

    def test_linear_layers_in_mxfp4(self):
        said = (
            r"q_a_proj\.weight: a stack of experts is required by layout 'hf_deepseek_v4', which has nothing else in "
            r"mxfp4, .* keep_bf16, or layouts that hold it: ct_mxfp4, ct_nvfp4"
        )
        self.refuse(said, quantized(recipe=mixed("deepseek_v4_experts")))

    def test_experts_in_fp8(self):
        said = (
            r"gate_up_proj: a face of mxfp4 or mxfp4_32x32 is required of experts by layout 'hf_deepseek_v4', got "
            r"fp8_e4m3_128x128; give them such weights, or layouts that hold it: hf_fp8, hf_fp8_ue8m0, ct_fp8_block"
        )
        self.refuse(said, quantized(recipe=mixed(experts="fp8_block")))

    @pytest.mark.parametrize(
        "linear",
        [
            "fp8_rowwise",
            "mxfp8",
            ht.HybridConfig(*[ht.Float8Quantizer("block", block="128x128", pow2_scale=False)] * 3),
        ],
    )
    def test_other_formats(self, linear):
        said = r"q_a_proj\.weight: a face of fp8_e4m3_128x128 or mxfp4 .* is required by layout 'hf_deepseek_v4'"
        self.refuse(said, quantized(recipe=mixed(linear)))

    def test_shapes_that_readers_get_wrong(self):
        model = ht.quantize_(nn.Sequential(nn.Linear(256, 192)), "fp8_block")
        self.refuse(r"0\.weight: whole blocks of 128x128 are required .* ct_fp8_block", model)
        rows = ht.quantize_(Mixture(3, 160, 96), mixed())  # blocks of 32 are never cut
        assert dict(ht.inference_tensors(rows, LAYOUT))["experts.0.w1.weight"].shape == (96, 80)

    def test_modules_with_one_stack_in_high_precision(self):
        said = (
            r"all stacks of model\.layers\.0\.mlp\.experts in MXFP4 are required by layout 'hf_deepseek_v4', got .*up_p"
        )
        self.refuse(said, quantized(keep=[*PLAIN, "*.0.mlp.experts.gate_up_proj"]))

    def test_layers_that_checkpoints_have_in_high_precision(self):
        said = r"layers\.0\.self_attn\.compressor\.kv_proj\.weight: a weight in high precision is required .* keep_bf16"
        self.refuse(said, quantized(keep=PLAIN[1:]))
        self.refuse(said, quantized(keep=PLAIN[1:]), "auto")
        assert ht.inference_config(ht.quantize_(plain(), "fp8_block"))["quant_method"] == "fp8"


@pytest.mark.filterwarnings("ignore")
def test_the_command(tmp_path):
    plain().save_pretrained(tmp_path / "plain")
    command = ["export", str(tmp_path / "plain"), str(tmp_path / "out"), "--layout", LAYOUT, "--recipe", "fp8_block"]
    assert main([*command, "--experts-recipe", "deepseek_v4_experts", "--keep-bf16", *PLAIN]) == 0
    expected = dict(ht.inference_tensors(quantized(), LAYOUT))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def test_groups_of_a_layer_are_compared():
    """Matrices that a layer cuts by rows and multiplies in one call. One scale for all rows is none of training's."""

    class Grouped(nn.Linear):
        def forward(self, x):
            weight = self.weight.view(2, -1, self.in_features).transpose(1, 2)
            return torch.bmm(x.unflatten(0, (2, -1)), weight)

    fp32_blocks, fp32_squares = (
        ht.Float8Quantizer("block", block=block, pow2_scale=False) for block in ("1x128", "128x128")
    )
    in_fp32 = ht.HybridConfig(fp32_blocks, fp32_squares, fp32_blocks)
    for recipe in ("fp8_block", "fp8_rowwise", "mxfp8", in_fp32):
        layer = Grouped(256, 256, bias=False).bfloat16()
        with torch.no_grad():
            layer.weight[128:] *= 3
        model = ht.quantize_(nn.Sequential(layer), recipe)
        assert ht.mismatch(model, random_tensor(64, 256)).is_zero, recipe

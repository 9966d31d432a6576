"""How far an engine is from training.

Oracle: where the engine's rule for inputs is the recipe's, nothing may differ; a planted difference must be found.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from experts import Mixture
from torch import nn

import hybridtensor as ht
from hybridtensor.testing import random_tensor

SQUARES = ht.Float8Quantizer("block", block="128x128")
FP32_SQUARES = ht.Float8Quantizer("block", block="128x128", pow2_scale=False)
BLOCKS, FP32_BLOCKS = ht.Float8Quantizer("block"), ht.Float8Quantizer("block", pow2_scale=False)
SAME = {
    "ct_fp8_tensor": "fp8",
    "ct_fp8_row": "fp8_rowwise",
    "ct_mxfp8": "mxfp8",
    "ct_mxfp4": ht.HybridConfig(ht.MXFP8Quantizer(), ht.MXFP4Quantizer(), ht.MXFP8Quantizer()),
    "hf_fp8": ht.HybridConfig(FP32_BLOCKS, FP32_SQUARES, FP32_BLOCKS),
    "hf_fp8_ue8m0": ht.HybridConfig(BLOCKS, SQUARES, BLOCKS),
    "ct_fp8_block": ht.HybridConfig(FP32_BLOCKS, FP32_SQUARES, FP32_BLOCKS),
}


def mlp(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 128, bias=False)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", SAME)
def test_nothing_differs_where_the_rules_are_one(layout, dtype):
    model = ht.quantize_(mlp(dtype), SAME[layout])
    found = ht.mismatch(model, random_tensor(40, 256, dtype=dtype), layout)
    assert found.is_zero
    assert found.kl == found.k3 == 0
    assert found.ratio == (1.0, 1.0)
    assert found.effective == pytest.approx(1)
    assert [layer.layer for layer in found.layers] == ["0", "2"]
    assert {layer.layouts for layer in found.layers} == {layout}


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_weights_and_weights_alone(persistent):
    """Inputs in high precision: the engine multiplies weights alone."""
    config = ht.HybridConfig(ht.IdentityQuantizer(), ht.Float8Quantizer("row"), ht.IdentityQuantizer())
    model = ht.quantize_(mlp(), config, persistent=persistent)
    found = ht.mismatch(model, random_tensor(40, 256))
    assert found.is_zero
    assert {layer.activation for layer in found.layers} == {"none"}


def test_nvfp4_is_within_the_order_of_its_scales():
    """Three factors in fp32, in another order, then one rounding to bf16: one unit in its last place."""
    model = ht.quantize_(mlp(), "nvfp4+one_d")
    found = ht.mismatch(model, random_tensor(40, 256))
    assert max(layer.bits for layer in found.layers) <= 1
    assert max(layer.share for layer in found.layers) < 0.05


def test_in_inference_mode():
    model, x = ht.quantize_(mlp(), "fp8_block"), random_tensor(40, 256)
    expected = ht.mismatch(model, x).layers
    with torch.inference_mode():
        assert ht.mismatch(model, x).layers == expected


def test_experts_are_compared():
    torch.manual_seed(0)
    model = ht.quantize_(Mixture(count=4, width=64, hidden=128).bfloat16(), "mxfp8")
    found = ht.mismatch(model, random_tensor(40, 64))
    assert found.is_zero
    assert [layer.layer for layer in found.layers] == ["experts"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_whole_models(family):
    AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM  # noqa: N806
    from inference_models import FAMILIES

    plain = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[family]), dtype=torch.bfloat16)
    model = ht.quantize_(plain, "mxfp8")
    batch = {"input_ids": torch.arange(24).view(2, 12), "use_cache": False}
    assert ht.mismatch(model, batch).is_zero
    other = ht.mismatch(model, batch, activation="token")
    assert not other.is_zero
    assert other.kl > 0
    assert other.ratio[0] < 1 < other.ratio[1]
    assert 0.5 < other.effective < 1


@pytest.mark.parametrize("layout", [*SAME, "ct_nvfp4"])
def test_a_planted_bit_is_found(layout):
    model = ht.quantize_(mlp(), SAME.get(layout, "nvfp4+one_d"))
    x = random_tensor(40, 256)
    before = ht.mismatch(model, x, layout)
    for name in [name for name, _ in ht.inference_tensors(model, layout) if name.startswith("2.")]:
        tensors = {n: t.clone() for n, t in ht.inference_tensors(model, layout)}
        flat = tensors[name].view(-1).view(torch.uint8)
        flat[len(flat) // 2 - 1 if tensors[name].numel() > 1 else 2] ^= 0x10
        found = ht.mismatch(model, x, layout, tensors=tensors.items())
        assert found.layers[0] == before.layers[0]
        assert found.layers[1].bits > before.layers[1].bits, name
        assert found.value > before.value


def test_what_an_engine_has_in_high_precision_is_the_engines():
    """A bias and a norm of an earlier step: the model's own were used in their place, so that nothing differed."""
    model = ht.quantize_(nn.Sequential(mlp(), nn.LayerNorm(128, dtype=torch.bfloat16)), "fp8")
    x = random_tensor(40, 256)
    tensors = {n: t.clone() for n, t in ht.inference_tensors(model)}
    assert ht.mismatch(model, x, tensors=tensors.items()).is_zero
    model[1].weight.data.mul_(2)
    assert ht.mismatch(model, x, tensors=tensors.items()).value > 1
    assert "1.bias" in tensors
    del tensors["1.weight"]
    assert ht.mismatch(model, x, tensors=tensors.items()).is_zero
    tensors["0.0.bias"] += 1
    assert ht.mismatch(model, x, tensors=tensors.items()).layers[0].bits > 0
    tensors["0.0.bias"] = tensors["0.0.bias"][:4]
    with pytest.raises(ValueError, match=r"0\.0\.bias of \[384\] is required among the tensors, got \[4\]"):
        ht.mismatch(model, x, tensors=tensors.items())


def test_another_rule_than_the_recipes():
    model = ht.quantize_(mlp(), "fp8")
    for rule in ("token", "1x128", "1x32", "1x16"):
        found = ht.mismatch(model, random_tensor(40, 256), activation=rule)
        assert found.layers[0].bits > 0
    assert ht.mismatch(model, random_tensor(40, 256), activation="tensor").is_zero


def test_neither_the_model_nor_its_state_changes():
    model = ht.quantize_(mlp(), "fp8_delayed").train()
    model(random_tensor(40, 256)).sum().backward()
    before = {n: torch.as_tensor(t).clone() for n, t in model.state_dict().items()}
    ht.mismatch(model, random_tensor(40, 256, seed=1) * 100, activation="tensor")
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(torch.as_tensor(after[n]), t) for n, t in before.items())


def test_both_begin_with_the_buffers_and_random_numbers_that_the_model_has():
    """Which it has afterwards, too: routers count tokens in evaluation as well."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls * torch.rand(1)

    model = ht.quantize_(Counting().to(torch.bfloat16), "fp8")
    state = torch.get_rng_state()
    assert ht.mismatch(model, random_tensor(40, 64), activation="tensor").is_zero
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_values_of_the_engine_are_not_those_of_the_model():
    """What is left of converted weights in the engine's model is NaN."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.up(x) + self.up.weight.sum()

    model = ht.quantize_(Reads().bfloat16(), "mxfp8")
    with pytest.raises(ValueError, match="finite outputs are required, got NaN or Inf of the engine"):
        ht.mismatch(model, random_tensor(8, 64))


class TestWhatIsRefused:
    def test_rules_and_outputs(self):
        model = ht.quantize_(mlp(), "mxfp8")
        with pytest.raises(ValueError, match="activation"):
            ht.mismatch(model, random_tensor(4, 256), activation="row")
        config = ht.HybridConfig(ht.Float8Quantizer(dtype="e5m2"), ht.Float8Quantizer(), ht.Float8Quantizer())
        with pytest.raises(
            ValueError, match=r"0\.weight: inputs that an engine quantizes alike .* got fp8_e5m2_tensor"
        ):
            ht.mismatch(ht.quantize_(mlp(), config), random_tensor(4, 256))

        class Dictionary(nn.Sequential):
            def forward(self, x):
                return {"y": super().forward(x)}

        with pytest.raises(ValueError, match="a tensor of logits is required as the model's output, got dict"):
            ht.mismatch(ht.quantize_(Dictionary(nn.Linear(32, 32)), "mxfp8"), torch.randn(2, 32))

    def test_tensors_that_are_missing(self):
        model = ht.quantize_(mlp(), "mxfp8")
        tensors = dict(ht.inference_tensors(model))
        del tensors["2.weight_scale"]
        with pytest.raises(ValueError, match=r"elements and scales of 2\.weight are required among the tensors"):
            ht.mismatch(model, random_tensor(4, 256), tensors=tensors.items())


def test_its_table():
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(ht.mismatch(ht.quantize_(mlp(), "mxfp8"), random_tensor(40, 256)))
    text = console.export_text()
    assert "ct_mxfp8" in text
    assert "KL 0" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares products of a GPU")
@pytest.mark.parametrize("layout", ["ct_fp8_tensor", "ct_fp8_row", "ct_mxfp8"])
def test_on_a_gpu(layout):
    """Matrix units add in another order and with fewer bits: a unit in the last place of bf16 of the largest output."""
    model, x = ht.quantize_(mlp(), SAME[layout]).cuda(), random_tensor(40, 256, device="cuda")
    found = ht.mismatch(model, x, layout)
    for layer, y in zip(found.layers, (model[0](x), model(x)), strict=True):
        assert layer.value <= 2**-7 * y.abs().max()


def test_modes_stay_what_they_were():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Dropout())
    ht.quantize_(model, "mxfp8").train()
    model[1].eval()
    ht.mismatch(model, random_tensor(8, 64, dtype=torch.float32))
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_wrapped_layers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = ht.quantize_(mlp(), "mxfp8")
    model[0] = checkpoint_wrapper(model[0])
    assert ht.mismatch(model, random_tensor(8, 256)).is_zero


def test_hugging_faces_layouts_quantize_inputs_by_their_own_rule():
    config = ht.HybridConfig(ht.IdentityQuantizer(), SQUARES, ht.IdentityQuantizer())
    model = ht.quantize_(mlp(), config)
    assert ht.mismatch(model, random_tensor(40, 256)).is_zero
    found = ht.mismatch(model, random_tensor(40, 256), "hf_fp8")
    assert found.layers[0].activation == "fp8_e4m3_1x128_fp32_scale"
    assert not found.is_zero


def test_weights_in_one_memory():
    """Views of one flat parameter are weights of their own."""
    model = mlp()
    flat = torch.randn(384 * 256 + 128 * 384).bfloat16() / 16
    model[0].weight.data, model[2].weight.data = flat[: 384 * 256].view(384, 256), flat[384 * 256 :].view(128, 384)
    assert ht.mismatch(ht.quantize_(model, "mxfp8"), random_tensor(8, 256)).is_zero


def trained(net, width=256, steps=3):
    """Train with delayed scales on small inputs."""
    ht.quantize_(net, "fp8_delayed")
    for step in range(steps):
        net(random_tensor(40, width, seed=step, dtype=next(net.parameters()).dtype)).square().mean().backward()
        ht.step_(net)
    return net


@pytest.mark.parametrize("layout", ["auto", "ct_fp8_row"])
def test_static_scales_of_inputs(layout):
    """With the scales of training the engine is at one with it, also where inputs saturate, but for the last bit of a
    reciprocal of a reciprocal; without them it measures.
    """
    model = trained(mlp())
    x = 8.0 * random_tensor(40, 256, dtype=torch.bfloat16, seed=9)
    for static in ({"static_inputs": True}, {"tensors": stacked(model, layout)}):
        found = ht.mismatch(model, x, layout, **static)
        assert {layer.activation for layer in found.layers} == {"fp8_e4m3_tensor, static"}
        assert max(layer.value for layer in found.layers) < 0.05
    assert max(layer.value for layer in ht.mismatch(model, x, layout).layers) > 1
    assert {layer.activation for layer in ht.mismatch(model, x, layout).layers} == {"fp8_e4m3_tensor"}


def stacked(model, layout="auto"):
    return ht.inference_tensors(model, layout, experts="stacked", static_inputs=True)


def test_static_scales_of_experts():
    model = trained(Mixture(), 64)
    x = random_tensor(40, 64, dtype=torch.float32)
    found = ht.mismatch(model, x, static_inputs=True)
    assert {layer.activation for layer in found.layers} == {"fp8_e4m3_tensor, static"}
    (one,) = (found.layers,)
    assert max(layer.value for layer in one) < max(layer.value for layer in ht.mismatch(model, x).layers)


def test_static_scales_that_are_wrong():
    model = trained(mlp())
    tensors = dict(stacked(model))
    with pytest.raises(ValueError, match=r"mismatch: 0\.input_scale: finite scales above zero are required"):
        ht.mismatch(model, random_tensor(4, 256), tensors=(tensors | {"0.input_scale": torch.zeros(1)}).items())
    with pytest.raises(ValueError, match=r"mismatch: 0\.input_scale of 1 scales is required, got \[2\]"):
        ht.mismatch(model, random_tensor(4, 256), tensors=(tensors | {"0.input_scale": torch.ones(2)}).items())
    with pytest.raises(ValueError, match="static_inputs without tensors"):
        ht.mismatch(model, random_tensor(4, 256), static_inputs=True, tensors=tensors.items())
    with pytest.raises(ValueError, match="static_inputs requires a layer with delayed scales"):
        ht.mismatch(ht.quantize_(mlp(), "fp8"), random_tensor(4, 256), static_inputs=True)


class Halves(nn.Linear):
    """Multiplies by the rows of its weight in two products, as attention with one weight for q, k and v does."""

    def forward(self, x):
        return F.linear(x, self.weight[:32]) - x @ self.weight[32:].t()


class Chunks(nn.Module):
    """Experts whose gate and up projections are rows of one matrix."""

    def __init__(self):
        super().__init__()
        self.num_experts = 3
        self.w13 = nn.Parameter(torch.randn(3, 64, 256) / 16)

    def forward(self, x):
        pairs = (expert.chunk(2) for expert in self.w13)
        return sum(F.linear(x, gate) * F.linear(x, up) for gate, up in pairs)


class Columns(nn.Linear):
    def forward(self, x):
        return F.linear(x[:, :128], self.weight[:, :128])


@pytest.mark.parametrize("make", [lambda: Halves(256, 64, bias=False), Chunks], ids=["matrix", "experts"])
def test_products_with_rows_of_a_weight(make):
    """Whose scales are of rows: rows alone have another scale per tensor than all of them."""
    torch.manual_seed(0)
    model = ht.quantize_(nn.Sequential(make()).bfloat16(), "fp8_rowwise")
    assert ht.mismatch(model, random_tensor(40, 256, dtype=torch.bfloat16)).is_zero


def test_products_with_columns_of_a_weight():
    model = ht.quantize_(nn.Sequential(Columns(256, 64)), "fp8_rowwise")
    with pytest.raises(NotImplementedError, match=r"whole rows of one, are required, got \[64, 128\] of \[64, 256\]"):
        ht.mismatch(model, torch.randn(40, 256))


def test_outputs_that_are_written_later():
    """As an activation writes them, in place."""
    model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(inplace=True), nn.Linear(384, 128))
    assert ht.mismatch(ht.quantize_(model, "fp8_rowwise"), torch.randn(40, 256)).is_zero


def test_outputs_that_are_no_values():
    """As the numbers of the experts that a router chose, beside the outputs."""

    class WithNumbers(nn.Linear):
        def forward(self, x):
            return super().forward(x), torch.arange(len(x))

    found = ht.mismatch(ht.quantize_(nn.Sequential(WithNumbers(256, 128)), "fp8_rowwise"), torch.randn(40, 256))
    assert found.is_zero


def test_a_single_position_and_none():
    model = ht.quantize_(mlp(), "fp8_rowwise")
    x = random_tensor(1, 256)
    one, whole = ht.mismatch(model, x[0]), ht.mismatch(model, x)
    assert (one.value, one.kl, one.is_zero) == (whole.value, whole.kl, True)
    with pytest.raises(ValueError, match=r"mismatch: logits of one position at least are required, got \[0, 128\]"):
        ht.mismatch(model, x[:0])

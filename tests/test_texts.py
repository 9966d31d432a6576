"""Texts that people read, word by word: tables, errors of the front door, and recipes as text.

``EXPECTTEST_ACCEPT=1`` writes what is said now into this file; then read the difference.
"""

import io
import textwrap

import pytest
import torch
from rich.console import Console
from torch import nn

import hybridtensor as ht
from hybridtensor import HybridConfig, recipes

expecttest = pytest.importorskip("expecttest", reason="the texts are compared by it")
equals = expecttest.assert_expected_inline


def model():
    return nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64, bias=False), "router": nn.Linear(64, 4)})


def printed(explanation):
    """Return what is printed of an explanation, without spaces at the ends of lines and empty ones, in ASCII."""
    console = Console(file=io.StringIO(), width=80)
    console.print(explanation)
    lines = [line.rstrip() for line in console.file.getvalue().replace("─", "-").splitlines()]
    return "\n".join(line for line in lines if line)


def test_explain():
    converted = ht.quantize_(model(), "nvfp4_fwd_mxfp8_bwd", keep_bf16=["down"])
    equals(
        printed(ht.explain(converted, show=False)),
        """\
Quantized layers: nvfp4/mxfp8/mxfp8+one_d+rowwise_dequantized
layer   weight   saved B/token
------------------------------
up      128x64              66
product       left operand             right operand           backend
-----------------------------------------------------------------------
output        input.rowwise            weight.rowwise          emulated
              nvfp4                    nvfp4
grad_input    grad_output.rowwise      weight.columnwise       emulated
              mxfp8_e4m3               mxfp8_e4m3 of rowwise
grad_weight   grad_output.columnwise   input.columnwise        emulated
              mxfp8_e4m3               mxfp8_e4m3 of rowwise
emulated: no matrix units for these formats on cpu
Left in high precision
layer    why
-----------------------------------------------------------------------
down     not converted
router   a router: small, and its rounding flips which expert is chosen
In total
format   parameters   FLOPs
---------------------------
bf16          51.2%   50.8%
mxfp8          0.0%   32.8%
nvfp4         48.8%   16.4%
Inputs kept for backward: 0.1 kB per token, 0.26 of plain layers' 0.3 (float32)
Quantized: 48.8% of the parameters, 49.2% of the multiplications of a token that
meets every matrix once""",
    )


def test_explain_before_conversion():
    equals(
        printed(ht.explain(model(), show=False)),
        """\
Left in high precision
layer    why
-----------------------------------------------------------------------
up       not converted
down     the same
router   a router: small, and its rounding flips which expert is chosen
Quantized: 0.0% of the parameters, 0.0% of the multiplications of a token that
meets every matrix once""",
    )


def folded(*texts):
    """Return texts one below the other, in lines of this file's width."""
    return "\n".join(textwrap.fill(str(text), 110, subsequent_indent="  ", break_on_hyphens=False) for text in texts)


def errors(*calls):
    """Return what calls raise, and say."""
    told = []
    for call in calls:
        with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
            call()
        told.append(f"{type(raised.value).__name__}: {raised.value}")
    return folded(*told)


class NoQuantizer:
    """A factory without a quantizer."""

    def __call__(self, role):
        return None

    def __repr__(self):
        return "NoQuantizer()"


def test_errors_of_quantize_():
    equals(
        errors(
            lambda: ht.quantize_("model", "fp8"),
            lambda: ht.quantize_(model(), "fp9"),
            lambda: ht.quantize_(model(), 3),
            lambda: ht.quantize_(nn.LayerNorm(4), "fp8"),
            lambda: ht.quantize_(model(), "fp8", keep_bf16="up"),
            lambda: ht.quantize_(model(), "fp8", keep_bf16=["sideways"]),
            lambda: ht.quantize_(nn.Linear(48, 64), "mxfp8"),
            lambda: ht.quantize_(model().double(), "fp8"),
            lambda: ht.quantize_(ht.quantize_(model(), "fp8", persistent=True), "fp8"),
            lambda: ht.quantize_(model(), NoQuantizer()),
        ),
        """\
TypeError: quantize_: a module is required, got str
ValueError: HybridConfig: unknown format 'fp9'; did you mean 'fp8'? known: bf16, fp8, fp8_rowwise, fp8_block,
  fp8_delayed, mxfp8, mxfp4, nvfp4; or a recipe: did you mean 'fp8'? known: bf16, fp8, fp8_delayed,
  fp8_rowwise, fp8_rowwise_hp_grad_weight, fp8_block, fp8_high_precision_backward, fp8_dequantized_backward,
  mxfp8, mxfp8_dequantized_backward, high_precision_fwd_mxfp8_bwd, nvfp4, nvfp4_1d_weight,
  nvfp4_dequantized_backward, mxfp8_fwd_nvfp4_bwd, nvfp4_fwd_mxfp8_bwd, nvfp4_row_scaled_fwd_mxfp8_bwd,
  nvfp4_row_scaled_fwd_high_precision_bwd, quartet2, deepseek_v4_experts, gpt_oss_experts
TypeError: quantize_: a recipe name, HybridConfig, FqnToConfig, recipes.by_type or factory is required, got 3;
  HybridConfig(input=, weight=, grad_output=) makes a config of quantizers
ValueError: quantize_: the model has no linear layers, but modules whose parameters are of LayerNorm; pass a
  model that has nn.Linear (or a class derived of it), or experts with num_experts
TypeError: quantize_: keep_bf16 is a list of names, got the string 'up'; put it in a list
ValueError: quantize_: keep_bf16 must name a layer, got 'sideways'; layers to convert are: up, down
ValueError: quantize_: layer <root>, input: the rowwise face in mxfp8_e4m3 needs a multiple of 32 along the
  contraction axis, got 48 of [0, 48]; pad the tensor, or use another format for this product
TypeError: quantize_: layer up: its weight is in torch.float64, not bfloat16, float16 or float32; cast it, or
  leave the layer out of quantize_ (keep_bf16)
ValueError: quantize_: layer up: the weight is persistent and has no high-precision value; pass
  persistent=True
TypeError: quantizer factory: a quantizer is required, NoQuantizer() returned None for
  QuantizerRole(module_type='linear', tensor_type='input', name='up'); return IdentityQuantizer() for high
  precision""",
    )


def test_errors_of_set_config_():
    equals(
        errors(lambda: ht.set_config_(model(), "fp8"), lambda: ht.set_config_(None, "fp8")),
        """\
ValueError: set_config_: the model has no quantized weights; call quantize_ first
TypeError: set_config_: a module is required, got NoneType""",
    )


def test_errors_of_recipes():
    equals(
        errors(
            lambda: HybridConfig.parse("fp8/fp8"),
            lambda: HybridConfig.parse("fp8+hadamard"),
            lambda: HybridConfig.parse("fp8+dequantized+high_precision"),
            lambda: HybridConfig.parse("fp8/mxfp8/bf16+dequantized"),
            lambda: HybridConfig.parse("mxfp8+pow2_scale"),
            lambda: HybridConfig.parse(8),
            lambda: recipes.from_name("nvfp4_1d_weight+nearest"),
            lambda: recipes.from_name("nvpf4"),
            lambda: HybridConfig(input="fp8", weight=ht.Float8Quantizer(), grad_output=ht.Float8Quantizer()),
            lambda: recipes.schedule({100: "fp8"}),
        ),
        """\
ValueError: HybridConfig.parse: one format, or three for output/grad_input/grad_weight, are required, got
  'fp8/fp8'
ValueError: HybridConfig.parse: unknown modifier 'hadamard'; did you mean 'no_hadamard'? known:
  high_precision, dequantized, save_original_input, fast_accum, bf16_weight_values, keep_faces, free_faces,
  pow2_scale, fp32_scale, e4m3_grad, most_recent, mx_two_d, mx_e5m2_grad, mx_even, mx_floor, one_d, nearest,
  no_hadamard, row_scaled_input, four_over_six_weight, four_over_six_input, four_over_six, four_over_six_mse,
  four_over_six_448, eden, rowwise_dequantized, rowwise_dequantized_weight
ValueError: HybridConfig.parse: one backward_override is possible, got several in
  'fp8+dequantized+high_precision'
ValueError: HybridConfig.parse: a backward override replaces the formats of grad_input and grad_weight, got
  'fp8/mxfp8/bf16+dequantized'; name the format of output only
ValueError: HybridConfig.parse: 'pow2_scale' changes nothing in 'mxfp8+pow2_scale'; drop it
TypeError: HybridConfig.parse: a string is required, got 8
ValueError: HybridConfig: a format is required, got the recipe 'nvfp4_1d_weight', which is used alone
  (recipes.from_name); to change it, start from its spec, 'nvfp4+one_d+rowwise_dequantized_weight'
ValueError: HybridConfig: unknown format 'nvpf4'; did you mean 'nvfp4'? known: bf16, fp8, fp8_rowwise,
  fp8_block, fp8_delayed, mxfp8, mxfp4, nvfp4; or a recipe: did you mean 'nvfp4'? known: bf16, fp8,
  fp8_delayed, fp8_rowwise, fp8_rowwise_hp_grad_weight, fp8_block, fp8_high_precision_backward,
  fp8_dequantized_backward, mxfp8, mxfp8_dequantized_backward, high_precision_fwd_mxfp8_bwd, nvfp4,
  nvfp4_1d_weight, nvfp4_dequantized_backward, mxfp8_fwd_nvfp4_bwd, nvfp4_fwd_mxfp8_bwd,
  nvfp4_row_scaled_fwd_mxfp8_bwd, nvfp4_row_scaled_fwd_high_precision_bwd, quartet2, deepseek_v4_experts,
  gpt_oss_experts
TypeError: HybridConfig: a quantizer is required for input, got 'fp8'; use IdentityQuantizer() for high
  precision
ValueError: schedule: steps from 0 on, 0 among them, are required, got [100]""",
    )


def test_errors_of_a_forward():
    converted = ht.quantize_(nn.Linear(64, 32), "fp8")
    equals(
        errors(
            lambda: converted(torch.zeros(4, 48)),
            lambda: converted(torch.zeros(4, 64, dtype=torch.int32)),
            lambda: converted(torch.zeros(4, 64, dtype=torch.bfloat16)),
            lambda: converted(torch.zeros(4, 64, device="meta")),
        ),
        """\
ValueError: linear: an input whose last dimension has 64 features is required, got shape (4, 48) for a weight
  (32, 64)
TypeError: linear: a floating-point input is required, got torch.int32; cast it
ValueError: linear: one dtype is required, got input in torch.bfloat16 for a weight in torch.float32; cast
  one, or use torch.autocast
ValueError: linear: operands on one device are required, got input on meta and a weight on cpu; move them, or
  train by DistributedDataParallel in place of nn.DataParallel""",
    )


def test_errors_of_weights():
    layer = ht.quantize_(nn.Linear(64, 32, bias=False), "fp8")
    persistent = ht.quantize_(nn.Linear(64, 32, bias=False), "fp8", persistent=True)
    with torch.no_grad():
        equals(
            errors(
                lambda: persistent.weight.t_(),
                lambda: persistent.weight.abs(),
                lambda: persistent.weight.share_memory_(),
                lambda: torch.fft.fft(layer.weight),
            ),
            """\
NotImplementedError: HybridTensor: aten.t_.default is not an operation of this class; call dequantize() first,
  step a weight through hybridtensor.optim.MasterWeights, or leave out the into= or outputs_of= that made it
NotImplementedError: HybridTensor: aten.abs.default would compute with the values of a weight that is
  persistent, of which there are quantized faces only; multiply it by F.linear, read its data, call quantize_
  without persistent=True, or leave the layer out of quantize_ (keep_bf16)
NotImplementedError: HybridTensor: share_memory_() cannot share a tensor of several storages; send the state
  dict, or share a model with master weights: quantize_ without persistent=True
NotImplementedError: MasterWeight: aten._fft_r2c.default is not an operation of this class; leave the layer
  out of quantize_ (keep_bf16), or, where no gradient is needed, operate on dequantize()""",
        )


def test_specs_of_named_recipes():
    equals(
        "\n".join(f"{name}: {recipe()}" for name, recipe in recipes.RECIPES.items()),
        """\
bf16: bf16
fp8: fp8
fp8_delayed: fp8_delayed
fp8_rowwise: fp8_rowwise
fp8_rowwise_hp_grad_weight: fp8_rowwise/fp8_rowwise/bf16
fp8_block: fp8_block
fp8_high_precision_backward: fp8+high_precision
fp8_dequantized_backward: fp8+dequantized
mxfp8: mxfp8
mxfp8_dequantized_backward: mxfp8+dequantized
high_precision_fwd_mxfp8_bwd: bf16/mxfp8/mxfp8
nvfp4: nvfp4
nvfp4_1d_weight: nvfp4+one_d+rowwise_dequantized_weight
nvfp4_dequantized_backward: nvfp4+dequantized
mxfp8_fwd_nvfp4_bwd: mxfp8/nvfp4/nvfp4+one_d+rowwise_dequantized_weight
nvfp4_fwd_mxfp8_bwd: nvfp4/mxfp8/mxfp8+one_d+rowwise_dequantized
nvfp4_row_scaled_fwd_mxfp8_bwd: nvfp4/mxfp8/mxfp8+one_d+row_scaled_input+rowwise_dequantized
nvfp4_row_scaled_fwd_high_precision_bwd: nvfp4+one_d+row_scaled_input+dequantized
quartet2: nvfp4+one_d+four_over_six+four_over_six_mse+eden+rowwise_dequantized
deepseek_v4_experts: fp8_block:mxfp4/fp8_block/fp8_block+rowwise_dequantized_weight
gpt_oss_experts: bf16:mxfp4+dequantized""",
    )


def test_a_config_that_no_spec_says():
    config = HybridConfig(
        input=ht.Float8Quantizer("row"), weight=ht.MXFP8Quantizer(), grad_output=ht.NVFP4Quantizer(seed=1)
    )
    equals(
        folded(config),
        """\
HybridConfig(input=Float8Quantizer(granularity='row', dtype='e4m3', pow2_scale=False, block=None),
  weight=MXFP8Quantizer(dtype='e4m3', two_d=False), grad_output=NVFP4Quantizer(row_scaled=False, two_d=False,
  hadamard=False, rounding='nearest', seed=1, four_over_six=None, scale_max=448), backward_override=None,
  save_original_input=False, fast_accum=False, bf16_weight_values=False, keep_faces='auto')""",
    )


def test_weights_and_states_as_text():
    layer = ht.quantize_(nn.Linear(64, 32, bias=False), "fp8_delayed")
    persistent = ht.quantize_(nn.Linear(64, 32, bias=False), "mxfp8", persistent=True)
    lines = [layer.weight, persistent.weight, persistent.weight.rowwise, layer.quantization_state]
    equals(
        folded(*map(repr, lines)),
        """\
MasterWeight(fp8_delayed, shape=(32, 64), dtype=torch.float32, device=cpu)
HybridTensor(rowwise=mxfp8_e4m3, columnwise=mxfp8_e4m3, shape=(32, 64), dtype=torch.float32, device=cpu)
QuantizedTensor(mxfp8_e4m3, rowwise, shape=(32, 64), dtype=torch.float32, device=cpu)
LayerState(input: DelayedRule(largest=448.0, margin=0, history_length=1024, algorithm='max'), weight:
  DelayedRule(largest=448.0, margin=0, history_length=1024, algorithm='max'), grad_output:
  DelayedRule(largest=57344.0, margin=0, history_length=1024, algorithm='max'))""",
    )

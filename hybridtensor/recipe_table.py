"""The table of recipes that have names: what each stands for, and where it comes from."""

from __future__ import annotations

from typing import NamedTuple


class RecipeRow(NamedTuple):
    """A named recipe.

    Attributes:
        name: Name for ``from_name`` and ``quantize_``.
        spec: Spec that it stands for.
        source: Where it comes from.
        promise: Description in a sentence.
    """

    name: str
    spec: str
    source: str
    promise: str


TABLE = (
    RecipeRow(
        "bf16",
        "bf16",
        "none; the plain model.",
        "Quantize nothing: bitwise the plain model.",
    ),
    RecipeRow(
        "fp8",
        "fp8",
        'Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3; the '
        "default of TransformerEngine's Float8CurrentScaling.",
        "FP8 with one current scale per tensor: E4M3 forward, E5M2 gradients.",
    ),
    RecipeRow(
        "fp8_delayed",
        "fp8_delayed",
        "TransformerEngine's DelayedScaling, with its defaults.",
        "FP8 with one scale per tensor that follows from past steps: E4M3 forward, E5M2 gradients. "
        "Call ``step_(model)`` after every ``optimizer.step()``.",
    ),
    RecipeRow(
        "fp8_rowwise",
        "fp8_rowwise",
        "torchao's float8 recipe ``rowwise``, after FBGEMM's rowwise product; torchao rounds scales "
        "to powers of two, as ``fp8_rowwise+pow2_scale`` does.",
        "FP8 E4M3 with one scale per row of each operand along its contraction axis.",
    ),
    RecipeRow(
        "fp8_rowwise_hp_grad_weight",
        "fp8_rowwise/fp8_rowwise/bf16",
        "torchao's float8 recipe ``rowwise_with_gw_hp``, which also scales the weight per tensor in "
        "grad_input, and rounds scales to powers of two: "
        "``fp8_rowwise/fp8_rowwise:fp8/bf16+pow2_scale``.",
        "FP8 per row, with the weight's gradient in high precision.",
    ),
    RecipeRow(
        "fp8_block",
        "fp8_block",
        'DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2; '
        "TransformerEngine's Float8BlockScaling, whose scales are powers of two.",
        "FP8 E4M3 with one scale per 128 values of inputs and gradients, and per 128x128 of "
        "weights.",
    ),
    RecipeRow(
        "fp8_high_precision_backward",
        "fp8+high_precision",
        'TransformerEngine\'s ``backward_override="high_precision"``.',
        "FP8 forward; backward in high precision, of the original operands.",
    ),
    RecipeRow(
        "fp8_dequantized_backward",
        "fp8+dequantized",
        'TransformerEngine\'s ``backward_override="dequantized"``.',
        "FP8 forward; backward in high precision, of the forward's dequantized operands. The "
        "gradient is exactly that of the quantized forward (straight through the rounding), which "
        "reinforcement learning needs when the sampler runs the same quantized forward.",
    ),
    RecipeRow(
        "mxfp8",
        "mxfp8",
        'Mishra et al., "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027; '
        "TransformerEngine's MXFP8BlockScaling.",
        "MXFP8 E4M3 for everything.",
    ),
    RecipeRow(
        "mxfp8_dequantized_backward",
        "mxfp8+dequantized",
        "TransformerEngine's quantizer factory ``mxfp8_fwd_high_precision_bwd``.",
        "MXFP8 forward; backward in high precision, of the forward's dequantized operands.",
    ),
    RecipeRow(
        "high_precision_fwd_mxfp8_bwd",
        "bf16/mxfp8/mxfp8",
        "TransformerEngine's quantizer factory ``high_precision_fwd_mxfp8_bwd``.",
        "High-precision forward; backward in MXFP8.",
    ),
    RecipeRow(
        "nvfp4",
        "nvfp4",
        'NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149 (which keeps '
        "about 15 % of the layers in BF16: see ``edge_blocks``); TransformerEngine's "
        "NVFP4BlockScaling.",
        "NVFP4 for everything: 16x16 weights, rotated operands of the weight's gradient, gradients "
        "rounded at random. Call ``step_(model)`` after every ``optimizer.step()``: it moves the "
        "random rounding on.",
    ),
    RecipeRow(
        "nvfp4_1d_weight",
        "nvfp4+one_d+rowwise_dequantized_weight",
        "TransformerEngine's quantizer factory ``nvfp4_1d_weight``.",
        "NVFP4 for everything, with 1-D weights whose columnwise face is quantized from the "
        "rowwise one.",
    ),
    RecipeRow(
        "nvfp4_dequantized_backward",
        "nvfp4+dequantized",
        'TransformerEngine\'s NVFP4BlockScaling with ``backward_override="dequantized"``.',
        "NVFP4 forward with 16x16 weights; backward in high precision, of the forward's dequantized operands.",
    ),
    RecipeRow(
        "mxfp8_fwd_nvfp4_bwd",
        "mxfp8/nvfp4/nvfp4+one_d+rowwise_dequantized_weight",
        "TransformerEngine's quantizer factory ``mxfp8_fwd_nvfp4_bwd``.",
        "MXFP8 forward; backward in NVFP4, with the rotation and random rounding of ``nvfp4``.",
    ),
    RecipeRow(
        "nvfp4_fwd_mxfp8_bwd",
        "nvfp4/mxfp8/mxfp8+one_d+rowwise_dequantized",
        "as ``nvfp4_row_scaled_fwd_mxfp8_bwd``, with one scale per tensor.",
        "NVFP4 forward; backward in MXFP8, of the forward's dequantized operands.",
    ),
    RecipeRow(
        "nvfp4_row_scaled_fwd_mxfp8_bwd",
        "nvfp4/mxfp8/mxfp8+one_d+row_scaled_input+rowwise_dequantized",
        'Cursor, "Composer 2 Technical Report", arXiv 2603.24477; TransformerEngine\'s quantizer '
        "factory ``nvfp4_row_scaled_fwd_mxfp8_bwd``.",
        "NVFP4 forward with an fp32 scale per token; backward in MXFP8, of the forward's dequantized operands.",
    ),
    RecipeRow(
        "nvfp4_row_scaled_fwd_high_precision_bwd",
        "nvfp4+one_d+row_scaled_input+dequantized",
        "TransformerEngine's quantizer factory ``nvfp4_row_scaled_fwd_high_precision_bwd``.",
        "NVFP4 forward with an fp32 scale per token; backward in high precision, of the forward's "
        "dequantized operands.",
    ),
    RecipeRow(
        "quartet2",
        "nvfp4+one_d+four_over_six+four_over_six_mse+eden+rowwise_dequantized",
        'Panferov et al., "Quartet II", arXiv 2601.22813.',
        "NVFP4 for everything: four over six forward; backward of the forward's dequantized operands, "
        "rounded through their scales under random rotations of 128. Call ``step_(model)`` "
        "after every ``optimizer.step()``: it moves rotations and rounding on.",
    ),
    RecipeRow(
        "deepseek_v4_experts",
        "fp8_block:mxfp4/fp8_block/fp8_block+rowwise_dequantized_weight",
        "the experts of DeepSeek-V4, whose weights are MXFP4 and whose activations FP8 in blocks.",
        "MXFP4 weights with FP8 activations in blocks forward; backward in FP8 blocks, of the forward's "
        "dequantized weight. For experts, beside ``fp8_block`` for other layers: see ``by_type``.",
    ),
    RecipeRow(
        "gpt_oss_experts",
        "bf16:mxfp4+dequantized",
        "the experts of gpt-oss, whose weights are MXFP4 and whose activations BF16.",
        "MXFP4 weights with high-precision activations; backward in high precision, of the forward's "
        "dequantized weight.",
    ),
)

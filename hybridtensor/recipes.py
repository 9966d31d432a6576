"""Named recipes: functions that return a config, each with its source.

Formats per product (*left* x *right* operand; E4 = FP8 E4M3, E5 = FP8 E5M2, MX = MXFP8 E4M3, NV = NVFP4, HP = high
precision; the weight is the right operand of the first two products, the input of the third):

| recipe                               | output    | grad_input | grad_weight | scales                                 |
|--------------------------------------|-----------|------------|-------------|----------------------------------------|
| ``bf16``                             | HP x HP   | HP x HP    | HP x HP     |                                        |
| ``fp8``                              | E4 x E4   | E5 x E4    | E5 x E4     | per tensor                             |
| ``fp8_delayed``                      | E4 x E4   | E5 x E4    | E5 x E4     | per tensor, of past steps              |
| ``fp8_rowwise``                      | E4 x E4   | E4 x E4    | E4 x E4     | per row                                |
| ``fp8_rowwise_hp_grad_weight``       | E4 x E4   | E4 x E4    | HP x HP     | per row                                |
| ``fp8_block``                        | E4 x E4   | E4 x E4    | E4 x E4     | 1x128, weights 128x128                 |
| ``fp8_high_precision_backward``      | E4 x E4   | HP x HP    | HP x HP     | per tensor                             |
| ``fp8_dequantized_backward``         | E4 x E4   | HP x HP    | HP x HP     | per tensor                             |
| ``mxfp8``                            | MX x MX   | MX x MX    | MX x MX     | 1x32                                   |
| ``mxfp8_dequantized_backward``       | MX x MX   | HP x HP    | HP x HP     | 1x32                                   |
| ``high_precision_fwd_mxfp8_bwd``     | HP x HP   | MX x MX    | MX x MX     | 1x32                                   |
| ``nvfp4``                            | NV x NV   | NV~ x NV   | NV~ h NV    | 1x16, weights 16x16                    |
| ``nvfp4_1d_weight``                  | NV x NV   | NV~ x NV'  | NV~ h NV    | 1x16                                   |
| ``nvfp4_dequantized_backward``       | NV x NV   | HP x HP    | HP x HP     | 1x16, weights 16x16                    |
| ``mxfp8_fwd_nvfp4_bwd``              | MX x MX   | NV~ x NV'  | NV~ h NV    | 1x32, 1x16                             |
| ``nvfp4_fwd_mxfp8_bwd``              | NV x NV   | MX x MX'   | MX x MX'    | 1x16, 1x32                             |
| ``nvfp4_row_scaled_fwd_mxfp8_bwd``   | NVr x NV  | MX x MX'   | MX x MX'    | 1x16, input under one per row; 1x32    |

``~``: rounded stochastically. ``h``: both operands under the Hadamard rotation. ``'``: made from what the forward saw,
quantized a second time. ``r``: an fp32 scale per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from hybridtensor.config import HybridConfig
from hybridtensor.formats import nearest
from hybridtensor.quantizers import (
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

_OF_ROWWISE = "rowwise_dequantized"


def bf16() -> HybridConfig:
    """Quantize nothing: bitwise the plain model."""
    return HybridConfig(input=IdentityQuantizer(), weight=IdentityQuantizer(), grad_output=IdentityQuantizer())


def fp8(*, pow2_scale: bool = False) -> HybridConfig:
    """FP8 with one current scale per tensor: E4M3 forward, E5M2 gradients.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3; the default of
    TransformerEngine's Float8CurrentScaling.
    """
    e4m3 = Float8Quantizer(dtype="e4m3", pow2_scale=pow2_scale)
    return HybridConfig(input=e4m3, weight=e4m3, grad_output=Float8Quantizer(dtype="e5m2", pow2_scale=pow2_scale))


def fp8_delayed(*, margin: int = 0, history_length: int = 1024, algorithm: str = "max") -> HybridConfig:
    """FP8 with one scale per tensor that follows from past steps: E4M3 forward, E5M2 gradients.

    Call ``step_(model)`` after every ``optimizer.step()``.

    Source: TransformerEngine's DelayedScaling, with its defaults.
    """
    e4m3 = DelayedFloat8Quantizer("e4m3", margin, history_length, algorithm)
    e5m2 = DelayedFloat8Quantizer("e5m2", margin, history_length, algorithm)
    return HybridConfig(input=e4m3, weight=e4m3, grad_output=e5m2)


def fp8_rowwise(*, pow2_scale: bool = False) -> HybridConfig:
    """FP8 E4M3 with one scale per row of each operand along its contraction axis.

    Source: torchao's float8 recipe ``rowwise``, after FBGEMM's rowwise product.
    """
    row = Float8Quantizer(granularity="row", pow2_scale=pow2_scale)
    return HybridConfig(input=row, weight=row, grad_output=row)


def fp8_rowwise_hp_grad_weight() -> HybridConfig:
    """FP8 per row, with the weight's gradient in high precision.

    Source: torchao's float8 recipe ``rowwise_with_gw_hp``.
    """
    return HybridConfig.by_gemm(output="fp8_rowwise", grad_input="fp8_rowwise", grad_weight="bf16")


def fp8_block(*, pow2_scale: bool = True) -> HybridConfig:
    """FP8 E4M3 with one scale per 128 values of inputs and gradients, and per 128x128 of weights.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2; TransformerEngine's
    Float8BlockScaling, whose scales are powers of two.
    """
    vector = Float8Quantizer(granularity="block", block="1x128", pow2_scale=pow2_scale)
    square = Float8Quantizer(granularity="block", block="128x128", pow2_scale=pow2_scale)
    return HybridConfig(input=vector, weight=square, grad_output=vector)


def fp8_high_precision_backward() -> HybridConfig:
    """FP8 forward; backward in high precision, of the original operands.

    Source: TransformerEngine's ``backward_override="high_precision"``.
    """
    e4m3 = Float8Quantizer()
    return HybridConfig(input=e4m3, weight=e4m3, grad_output=e4m3, backward_override="high_precision")


def fp8_dequantized_backward() -> HybridConfig:
    """FP8 forward; backward in high precision, of the operands as the forward saw them.

    The gradient is exactly that of the quantized forward (straight through the rounding), which reinforcement
    learning needs when the sampler runs the same quantized forward.

    Source: TransformerEngine's ``backward_override="dequantized"``.
    """
    e4m3 = Float8Quantizer()
    return HybridConfig(input=e4m3, weight=e4m3, grad_output=e4m3, backward_override="dequantized")


def mxfp8() -> HybridConfig:
    """MXFP8 E4M3 for everything.

    Source: Mishra et al., "Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027; TransformerEngine's
    MXFP8BlockScaling.
    """
    return HybridConfig(input=MXFP8Quantizer(), weight=MXFP8Quantizer(), grad_output=MXFP8Quantizer())


def mxfp8_dequantized_backward() -> HybridConfig:
    """MXFP8 forward; backward in high precision, of the operands as the forward saw them.

    Source: TransformerEngine's quantizer factory ``mxfp8_fwd_high_precision_bwd``.
    """
    return HybridConfig(
        input=MXFP8Quantizer(), weight=MXFP8Quantizer(), grad_output=MXFP8Quantizer(), backward_override="dequantized"
    )


def high_precision_fwd_mxfp8_bwd() -> HybridConfig:
    """High-precision forward; backward in MXFP8.

    Source: TransformerEngine's quantizer factory ``high_precision_fwd_mxfp8_bwd``.
    """
    return HybridConfig.by_gemm(output="bf16", grad_input="mxfp8", grad_weight="mxfp8")


def _nvfp4_input() -> HybridQuantizer:
    return HybridQuantizer(NVFP4Quantizer(), NVFP4Quantizer(hadamard=True))


def _nvfp4_grad_output(seed: int) -> HybridQuantizer:
    row = NVFP4Quantizer(rounding="stochastic", seed=seed)
    return HybridQuantizer(row, NVFP4Quantizer(rounding="stochastic", seed=seed, hadamard=True))


def nvfp4(*, seed: int = 0) -> HybridConfig:
    """NVFP4 for everything: 16x16 weights, rotated operands of the weight's gradient, gradients rounded at random.

    Call ``step_(model)`` after every ``optimizer.step()``: it moves the random rounding on.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149 (which keeps about 15 % of the
    layers in BF16: see ``edge_blocks``); TransformerEngine's NVFP4BlockScaling.
    """
    return HybridConfig(input=_nvfp4_input(), weight=NVFP4Quantizer(two_d=True), grad_output=_nvfp4_grad_output(seed))


def nvfp4_1d_weight(*, seed: int = 0) -> HybridConfig:
    """NVFP4 for everything, with 1-D weights whose columnwise face is quantized from the rowwise one.

    Source: TransformerEngine's quantizer factory ``nvfp4_1d_weight``.
    """
    weight = HybridQuantizer(NVFP4Quantizer(), NVFP4Quantizer(), _OF_ROWWISE)
    return HybridConfig(input=_nvfp4_input(), weight=weight, grad_output=_nvfp4_grad_output(seed))


def nvfp4_dequantized_backward() -> HybridConfig:
    """NVFP4 forward with 16x16 weights; backward in high precision, of the operands as the forward saw them.

    Source: TransformerEngine's NVFP4BlockScaling with ``backward_override="dequantized"``.
    """
    row, square = NVFP4Quantizer(), NVFP4Quantizer(two_d=True)
    return HybridConfig(input=row, weight=square, grad_output=row, backward_override="dequantized")


def mxfp8_fwd_nvfp4_bwd(*, seed: int = 0) -> HybridConfig:
    """MXFP8 forward; backward in NVFP4, with the rotation and random rounding of ``nvfp4``.

    Source: TransformerEngine's quantizer factory ``mxfp8_fwd_nvfp4_bwd``.
    """
    return HybridConfig(
        input=HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(hadamard=True)),
        weight=HybridQuantizer(MXFP8Quantizer(), NVFP4Quantizer(), _OF_ROWWISE),
        grad_output=_nvfp4_grad_output(seed),
    )


def nvfp4_fwd_mxfp8_bwd() -> HybridConfig:
    """NVFP4 forward; backward in MXFP8, of the operands as the forward saw them.

    Source: as ``nvfp4_row_scaled_fwd_mxfp8_bwd``, with one scale per tensor.
    """
    operand = HybridQuantizer(NVFP4Quantizer(), MXFP8Quantizer(), _OF_ROWWISE)
    return HybridConfig(input=operand, weight=operand, grad_output=MXFP8Quantizer())


def nvfp4_row_scaled_fwd_mxfp8_bwd() -> HybridConfig:
    """NVFP4 forward with an fp32 scale per token; backward in MXFP8, of the operands as the forward saw them.

    Source: Cursor, "Composer 2 Technical Report", arXiv 2603.24477; TransformerEngine's quantizer factory
    ``nvfp4_row_scaled_fwd_mxfp8_bwd``.
    """
    return HybridConfig(
        input=HybridQuantizer(NVFP4Quantizer(row_scaled=True), MXFP8Quantizer(), _OF_ROWWISE),
        weight=HybridQuantizer(NVFP4Quantizer(), MXFP8Quantizer(), _OF_ROWWISE),
        grad_output=MXFP8Quantizer(),
    )


RECIPES: dict[str, Callable[[], HybridConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        bf16,
        fp8,
        fp8_delayed,
        fp8_rowwise,
        fp8_rowwise_hp_grad_weight,
        fp8_block,
        fp8_high_precision_backward,
        fp8_dequantized_backward,
        mxfp8,
        mxfp8_dequantized_backward,
        high_precision_fwd_mxfp8_bwd,
        nvfp4,
        nvfp4_1d_weight,
        nvfp4_dequantized_backward,
        mxfp8_fwd_nvfp4_bwd,
        nvfp4_fwd_mxfp8_bwd,
        nvfp4_row_scaled_fwd_mxfp8_bwd,
    )
}


def from_name(name: str) -> HybridConfig:
    """Return the recipe called ``name``, or the config that ``HybridConfig.parse`` makes of it.

    Raises:
        ValueError: If it is neither, with the nearest known name.
    """
    if name in RECIPES:
        return RECIPES[name]()
    try:
        return HybridConfig.parse(name)
    except ValueError as error:
        hint = "" if "+" in name else f"; or a recipe: {nearest(name, RECIPES)}"
        recipe = name.partition("+")[0]
        if f"unknown format {recipe!r}" in str(error) and recipe in RECIPES:
            hint = f"; or the recipe {recipe!r}, which takes no modifiers"
        raise ValueError(f"{error}{hint}") from None


def edge_blocks(model: nn.Module, *, first: int = 1, last: int = 1) -> list[str]:
    """Return the names of the first and last blocks of ``model``, for ``quantize_(keep_bf16=...)``.

    Args:
        model: A model whose blocks are in one ``nn.ModuleList``: its longest.
        first: Blocks at the beginning.
        last: Blocks at the end.

    Raises:
        ValueError: If there is no such list, or it has not more blocks than that.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError("edge_blocks: a model with an nn.ModuleList of blocks is required, got none; name the layers")
    name, blocks = max(lists, key=lambda item: len(item[1]))
    if min(first, last) < 0 or first + last >= len(blocks):
        raise ValueError(
            f"edge_blocks: fewer blocks than the {len(blocks)} of {name!r} are required, got first={first}, last={last}"
        )
    chosen = itertools.chain(range(first), range(len(blocks) - last, len(blocks)))
    return [f"{name}.{index}" if name else str(index) for index in chosen]


@dataclass(frozen=True)
class Schedule:
    """Which recipe a run uses from which step on; made by ``schedule``.

    Attributes:
        starts: First step of each recipe, ascending from 0.
        configs: The recipes.
    """

    starts: tuple[int, ...]
    configs: tuple[HybridConfig, ...]

    def at(self, step: int) -> HybridConfig:
        """Return the recipe of a step.

        Raises:
            ValueError: If the step is negative.
        """
        if step < 0:
            raise ValueError(f"Schedule.at: a step of at least 0 is required, got {step}")
        return [config for start, config in zip(self.starts, self.configs, strict=True) if start <= step][-1]


def schedule(recipes: Mapping[int, str | HybridConfig]) -> Schedule:
    """Return a schedule from ``{first step: recipe}``; hand ``schedule.at(step)`` to ``set_config_`` every step.

    NVFP4, then a BF16 forward with NVFP4 gradients for the last tenth::

        plan = ht.recipes.schedule({0: "nvfp4", int(0.9 * steps): "bf16/nvfp4/nvfp4"})
        for step in range(steps):
            ht.set_config_(model, plan.at(step))  # costs nothing where nothing changes

    Raises:
        ValueError: If no recipe starts at step 0, or a step is not a number from 0 on.
    """
    bad = [step for step in recipes if not isinstance(step, int) or isinstance(step, bool) or step < 0]
    if bad or 0 not in recipes:
        raise ValueError(f"schedule: steps from 0 on, 0 among them, are required, got {list(recipes)}")
    starts = tuple(sorted(recipes))
    configs = (recipes[start] for start in starts)
    return Schedule(starts, tuple(from_name(c) if isinstance(c, str) else c for c in configs))

"""Named recipes: functions that return a config, each with its source.

Formats per product (E4 = FP8 E4M3, E5 = FP8 E5M2, HP = high precision; *gradient operand* x *other operand*):

| recipe                       | output  | grad_input | grad_weight | scales     |
|------------------------------|---------|------------|-------------|------------|
| ``bf16``                     | HP x HP | HP x HP    | HP x HP     |            |
| ``fp8``                      | E4 x E4 | E5 x E4    | E5 x E4     | per tensor |
| ``fp8_rowwise``              | E4 x E4 | E4 x E4    | E4 x E4     | per row    |
| ``fp8_rowwise_hp_grad_weight`` | E4 x E4 | E4 x E4  | HP x HP     | per row    |
| ``fp8_high_precision_backward`` | E4 x E4 | HP x HP | HP x HP     | per tensor |
| ``fp8_dequantized_backward`` | E4 x E4 | HP x HP    | HP x HP     | per tensor |
"""

from __future__ import annotations

from collections.abc import Callable

from hybridtensor.config import HybridConfig
from hybridtensor.formats import nearest
from hybridtensor.quantizers import Float8Quantizer, IdentityQuantizer


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


RECIPES: dict[str, Callable[[], HybridConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        bf16,
        fp8,
        fp8_rowwise,
        fp8_rowwise_hp_grad_weight,
        fp8_high_precision_backward,
        fp8_dequantized_backward,
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
        raise ValueError(f"{error}; or a recipe: {nearest(name, RECIPES)}") from None

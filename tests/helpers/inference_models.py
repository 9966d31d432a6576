"""Recipes for each layout of inference engines, and small models of the families that people export."""

from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

import hybridtensor as ht

WEIGHTS = {
    "ct_fp8_tensor": ht.Float8Quantizer(),
    "ct_fp8_row": ht.Float8Quantizer("row"),
    "ct_fp8_block": ht.Float8Quantizer("block", block="128x128"),
    "hf_fp8": ht.Float8Quantizer("block", block="128x128", pow2_scale=False),
    "hf_fp8_ue8m0": ht.Float8Quantizer("block", block="128x128"),
    "ct_mxfp8": ht.MXFP8Quantizer(),
    "ct_mxfp4": ht.MXFP4Quantizer(),
    "ct_nvfp4": ht.NVFP4Quantizer(),
}
BF16_VALUES = ("ct_mxfp8", "ct_mxfp4", "ct_nvfp4")  # of whose readers


def recipe(layout, **options):
    """Return a config whose weight has the format of a layout."""
    inputs = ht.Float8Quantizer("block", block="1x128") if "fp8" in layout and "mx" not in layout else None
    weight = WEIGHTS[layout]
    if layout in ("ct_fp8_tensor", "ct_fp8_row"):
        inputs = weight
    inputs = inputs or weight
    return ht.HybridConfig(inputs, weight, inputs, **options)


def values_of(weight, quantizer, dtype):
    return quantizer.quantize(weight, columnwise=False).rowwise.dequantize(dtype)


FAMILIES = {
    "llama": LlamaConfig(hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=512),
    "mixtral": MixtralConfig(hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=512, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=384, num_hidden_layers=2, num_experts=4,
                                num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                vocab_size=512, intermediate_size=384),
}  # fmt: skip

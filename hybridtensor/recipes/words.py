"""Names of recipes as a type, so that editors offer them."""

from typing import Literal

RecipeName = Literal[
    "bf16",
    "fp8",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_rowwise_hp_grad_weight",
    "fp8_block",
    "fp8_high_precision_backward",
    "fp8_dequantized_backward",
    "mxfp8",
    "mxfp8_dequantized_backward",
    "high_precision_fwd_mxfp8_bwd",
    "nvfp4",
    "nvfp4_1d_weight",
    "nvfp4_dequantized_backward",
    "mxfp8_fwd_nvfp4_bwd",
    "nvfp4_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_high_precision_bwd",
    "quartet2",
    "deepseek_v4_experts",
    "gpt_oss_experts",
]
"""The names of ``recipes.RECIPES``. Wherever one is taken, other specs are, too: ``RecipeName | str``."""

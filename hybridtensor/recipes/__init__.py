"""Named recipes, the specs and configs behind them, and schedules of recipes.

``named`` has the table of formats per product.
"""

from hybridtensor.recipes.kinds import by_type
from hybridtensor.recipes.named import (
    RECIPES,
    bf16,
    deepseek_v4_experts,
    fp8,
    fp8_block,
    fp8_delayed,
    fp8_dequantized_backward,
    fp8_high_precision_backward,
    fp8_rowwise,
    fp8_rowwise_hp_grad_weight,
    from_name,
    gpt_oss_experts,
    high_precision_fwd_mxfp8_bwd,
    mxfp8,
    mxfp8_dequantized_backward,
    mxfp8_fwd_nvfp4_bwd,
    nvfp4,
    nvfp4_1d_weight,
    nvfp4_dequantized_backward,
    nvfp4_fwd_mxfp8_bwd,
    nvfp4_row_scaled_fwd_high_precision_bwd,
    nvfp4_row_scaled_fwd_mxfp8_bwd,
    quartet2,
)
from hybridtensor.recipes.schedule import Schedule, edge_blocks, schedule

__all__ = [
    "RECIPES",
    "Schedule",
    "bf16",
    "by_type",
    "deepseek_v4_experts",
    "edge_blocks",
    "fp8",
    "fp8_block",
    "fp8_delayed",
    "fp8_dequantized_backward",
    "fp8_high_precision_backward",
    "fp8_rowwise",
    "fp8_rowwise_hp_grad_weight",
    "from_name",
    "gpt_oss_experts",
    "high_precision_fwd_mxfp8_bwd",
    "mxfp8",
    "mxfp8_dequantized_backward",
    "mxfp8_fwd_nvfp4_bwd",
    "nvfp4",
    "nvfp4_1d_weight",
    "nvfp4_dequantized_backward",
    "nvfp4_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_high_precision_bwd",
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
    "quartet2",
    "schedule",
]

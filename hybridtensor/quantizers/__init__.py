"""Quantizers: frozen, compared by value; one file per family of formats."""

from hybridtensor.quantizers.base import OneFormatQuantizer, Quantizer
from hybridtensor.quantizers.float8 import DelayedFloat8Quantizer, Float8Quantizer
from hybridtensor.quantizers.hybrid import HybridQuantizer, IdentityQuantizer
from hybridtensor.quantizers.mxfp4 import MXFP4Quantizer
from hybridtensor.quantizers.mxfp8 import MXFP8Quantizer
from hybridtensor.quantizers.nvfp4 import NVFP4Quantizer
from hybridtensor.quantizers.plans import CastPlan, cast_plan, tokens

__all__ = [
    "CastPlan",
    "DelayedFloat8Quantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP4Quantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "OneFormatQuantizer",
    "Quantizer",
    "cast_plan",
    "tokens",
]

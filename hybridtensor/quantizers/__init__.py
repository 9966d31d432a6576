"""Quantizers: frozen, compared by value; one file per family of formats."""

from hybridtensor.quantizers.base import OneFormatQuantizer, Quantizer, tokens
from hybridtensor.quantizers.float8 import DelayedFloat8Quantizer, Float8Quantizer
from hybridtensor.quantizers.hybrid import HybridQuantizer, IdentityQuantizer
from hybridtensor.quantizers.mxfp8 import MXFP8Quantizer
from hybridtensor.quantizers.nvfp4 import NVFP4Quantizer

__all__ = [
    "DelayedFloat8Quantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "OneFormatQuantizer",
    "Quantizer",
    "tokens",
]

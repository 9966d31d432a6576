"""Operators: one file each, with schema, eager reference (the definition), fake and checked public function."""

from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.float8_quantize import float8_quantize
from hybridtensor.ops.scaled_mm import Backend, scaled_mm, select_backend

__all__ = ["Backend", "dequantize", "float8_quantize", "scaled_mm", "select_backend"]

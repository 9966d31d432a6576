"""Operators: one file each, with schema, eager reference (the definition), fake and checked public function."""

from hybridtensor.ops.cast import Cast, Casts, Hint, can_hold
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.float8_cast import float8_cast
from hybridtensor.ops.float8_quantize import float8_quantize
from hybridtensor.ops.mx_quantize import mx_quantize
from hybridtensor.ops.nvfp4_quantize import nvfp4_quantize
from hybridtensor.ops.operand import Held, Operand
from hybridtensor.ops.quantize import measure, measurer, quantize, quantize_into, writer
from hybridtensor.ops.scaled_mm import Backend, product, scaled_mm, select_backend
from hybridtensor.ops.transpose import transpose

__all__ = [
    "Backend",
    "Cast",
    "Casts",
    "Held",
    "Hint",
    "Operand",
    "can_hold",
    "dequantize",
    "float8_cast",
    "float8_quantize",
    "measure",
    "measurer",
    "mx_quantize",
    "nvfp4_quantize",
    "product",
    "quantize",
    "quantize_into",
    "scaled_mm",
    "select_backend",
    "transpose",
    "writer",
]

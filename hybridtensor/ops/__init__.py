"""Operators on faces: casting, dequantizing, transposing, multiplying; ``ops/references`` defines them."""

from hybridtensor.ops.cast import (
    NO_INPUTS,
    Cast,
    CastInputs,
    CastRequest,
    Faces,
    Hint,
    PreparedCast,
    PreparedList,
    can_hold,
    measure_all,
    prepare,
    quantize,
    quantize_all,
    quantize_into,
)
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.face import Face, FaceKind, Groups, columnwise_of, empty_face, high_precision
from hybridtensor.ops.grouped_cast import measure_stack, quantize_groups
from hybridtensor.ops.order import after
from hybridtensor.ops.product import product
from hybridtensor.ops.scaled_mm import (
    Backend,
    multiplies_values,
    rowwise_values,
    scaled_mm,
    select_backend,
)
from hybridtensor.ops.transpose import transpose

__all__ = [
    "NO_INPUTS",
    "Backend",
    "Cast",
    "CastInputs",
    "CastRequest",
    "Face",
    "FaceKind",
    "Faces",
    "Groups",
    "Hint",
    "PreparedCast",
    "PreparedList",
    "after",
    "can_hold",
    "columnwise_of",
    "dequantize",
    "empty_face",
    "high_precision",
    "measure_all",
    "measure_stack",
    "multiplies_values",
    "prepare",
    "product",
    "quantize",
    "quantize_all",
    "quantize_groups",
    "quantize_into",
    "rowwise_values",
    "scaled_mm",
    "select_backend",
    "transpose",
]

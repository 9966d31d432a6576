"""Operators on faces: casting, dequantizing, transposing, multiplying. ``ops/references`` defines
them on every device.
"""

from hybridtensor.ops.cast import (
    NO_INPUTS,
    Cast,
    CastInputs,
    CastRequest,
    Faces,
    Hint,
    PreparedCast,
    can_hold,
    prepare,
    quantize,
    quantize_into,
)
from hybridtensor.ops.dequantize import dequantize
from hybridtensor.ops.face import Face, FaceKind, columnwise_of, empty_face, high_precision
from hybridtensor.ops.order import after
from hybridtensor.ops.scaled_mm import Backend, product, rowwise_values, scaled_mm, select_backend
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
    "Hint",
    "PreparedCast",
    "after",
    "can_hold",
    "columnwise_of",
    "dequantize",
    "empty_face",
    "high_precision",
    "prepare",
    "product",
    "quantize",
    "quantize_into",
    "rowwise_values",
    "scaled_mm",
    "select_backend",
    "transpose",
]

"""The faces that a layer multiplies by, as tensors that can be compared and dequantized."""

from hybridtensor.subclasses.quantizing import face_tensors


def tensor_faces(weight, *, dtype, rowwise=True, columnwise=True):
    """Return the rowwise and the columnwise face of a weight as tensors; None where one was not asked for."""
    return face_tensors(weight.faces(rowwise=rowwise, columnwise=columnwise, dtype=dtype), weight.shape, dtype)

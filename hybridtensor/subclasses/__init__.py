"""The tensor classes; what they answer to aten operators is in ``operators``."""

from typing import TypeGuard

from hybridtensor.subclasses import operators, quantizing  # noqa: F401  (fill the tables, and add methods to quantizers)
from hybridtensor.subclasses.faces import FaceTensor
from hybridtensor.subclasses.hybrid_tensor import HybridTensor
from hybridtensor.subclasses.identity_tensor import IdentityTensor
from hybridtensor.subclasses.master_tensor import MasterWeight
from hybridtensor.subclasses.op_table import OpTable
from hybridtensor.subclasses.quantized_tensor import QuantizedTensor

__all__ = [
    "FaceTensor",
    "HybridTensor",
    "IdentityTensor",
    "MasterWeight",
    "OpTable",
    "QuantizedTensor",
    "is_converted",
]


def is_converted(weight: object) -> TypeGuard[MasterWeight | HybridTensor]:
    """Return whether a tensor is a master or a persistent weight; of a DTensor ask its local part."""
    return isinstance(weight, (MasterWeight, HybridTensor))

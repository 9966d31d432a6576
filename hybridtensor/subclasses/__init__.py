"""The tensor classes; each has its operators in the ``_ops`` file beside it."""

from hybridtensor.subclasses import hybrid_ops, identity_ops, master_ops, quantized_ops, quantizing  # noqa: F401  (fill the tables)
from hybridtensor.subclasses.hybrid_tensor import FaceTensor, HybridTensor
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
]

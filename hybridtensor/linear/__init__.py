"""The linear layer: its operands, its three products, and the torch functions that lead to it."""

from hybridtensor.linear import interception  # noqa: F401  (registers the torch functions)
from hybridtensor.linear.function import linear
from hybridtensor.linear.input_operands import SavedInput, input_operand
from hybridtensor.linear.operands import Needs, Operand
from hybridtensor.linear.products import Backward, Gradients, output
from hybridtensor.linear.sharing import share_inputs
from hybridtensor.linear.weight_operands import GatheredWeight, weight_operand

__all__ = [
    "Backward",
    "GatheredWeight",
    "Gradients",
    "Needs",
    "Operand",
    "SavedInput",
    "input_operand",
    "linear",
    "output",
    "share_inputs",
    "weight_operand",
]

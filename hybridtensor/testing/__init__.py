"""Test tools for code that uses this library: inputs, an independent oracle, error budgets, saved bytes.

Needs the ``testing`` extra (``pip install "hybridtensor[testing]"``).
"""

from hybridtensor.testing.budgets import product_bound
from hybridtensor.testing.inputs import EDGE_VALUES, edge_tensor, random_tensor
from hybridtensor.testing.oracles import float8_oracle
from hybridtensor.testing.saved import SavedTensors, saved_by, saved_for_backward

__all__ = [
    "EDGE_VALUES",
    "SavedTensors",
    "edge_tensor",
    "float8_oracle",
    "product_bound",
    "random_tensor",
    "saved_by",
    "saved_for_backward",
]

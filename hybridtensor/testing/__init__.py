"""Test tools for code that uses this library: inputs, an independent oracle, error budgets, saved bytes.

Needs the ``testing`` extra (``pip install "hybridtensor[testing]"``).
"""

from hybridtensor.testing.budgets import product_bound
from hybridtensor.testing.exact import exact_values
from hybridtensor.testing.inputs import EDGE_VALUES, edge_tensor, random_tensor
from hybridtensor.testing.oracles import decode_oracle, float8_oracle, mx_oracle, nvfp4_oracle
from hybridtensor.testing.saved import SavedTensors, saved_by, saved_for_backward

__all__ = [
    "EDGE_VALUES",
    "SavedTensors",
    "decode_oracle",
    "edge_tensor",
    "exact_values",
    "float8_oracle",
    "mx_oracle",
    "nvfp4_oracle",
    "product_bound",
    "random_tensor",
    "saved_by",
    "saved_for_backward",
]

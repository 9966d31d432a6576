"""Which aten operators each tensor class answers, and how: one file per class, and what they share.

Importing this package fills the tables of the classes.
"""

from hybridtensor.subclasses.operators import hybrid, hybrid_values, identity, master, quantized

__all__ = ["hybrid", "hybrid_values", "identity", "master", "quantized"]

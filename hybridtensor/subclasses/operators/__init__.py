"""The handlers of aten operators for each tensor class: one file per class, and what they share.

Importing this package fills the tables of the classes.
"""

from hybridtensor.subclasses.operators import hybrid, hybrid_values, identity, master, quantized

__all__ = ["hybrid", "hybrid_values", "identity", "master", "quantized"]

"""Which aten operators each tensor class answers, and how: one file per class, and what they share.

Importing this package fills the tables of the classes.
"""

from hybridtensor.subclasses.operators import hybrid, identity, master, quantized

__all__ = ["hybrid", "identity", "master", "quantized"]

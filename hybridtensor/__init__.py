"""Low-precision training in PyTorch where each matrix product may have its own number format."""

from hybridtensor import distributed, formats, linear, optim, recipes
from hybridtensor.config import HybridConfig, QuantizerRole
from hybridtensor.convert import quantize_, set_config_
from hybridtensor.explain import explain
from hybridtensor.quantizers import Float8Quantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from hybridtensor.subclasses import HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.version import __version__

__all__ = [
    "Float8Quantizer",
    "HybridConfig",
    "HybridQuantizer",
    "HybridTensor",
    "IdentityQuantizer",
    "IdentityTensor",
    "MasterWeight",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "__version__",
    "distributed",
    "explain",
    "formats",
    "linear",
    "optim",
    "quantize_",
    "recipes",
    "set_config_",
]

"""Out to inference: weights as engines load them, and the function that they then compute."""

from hybridtensor.inference.config import inference_config
from hybridtensor.inference.files import export_pretrained
from hybridtensor.inference.layouts import LAYOUTS
from hybridtensor.inference.loading import load_pretrained
from hybridtensor.inference.mismatch import LayerMismatch, Mismatch, mismatch
from hybridtensor.inference.tensors import inference_tensors

__all__ = [
    "LAYOUTS",
    "LayerMismatch",
    "Mismatch",
    "export_pretrained",
    "inference_config",
    "inference_tensors",
    "load_pretrained",
    "mismatch",
]

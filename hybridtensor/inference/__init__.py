"""Out to inference: weights as engines load them, and the function that they then compute."""

from hybridtensor.inference.config import inference_config
from hybridtensor.inference.tensors import inference_tensors

__all__ = ["inference_config", "inference_tensors"]

"""Values of exported weights, as the libraries read them that inference engines load with; nothing of
this library is used.
"""

import re
import warnings

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize


def read(tensors, config, dtype=torch.float32):
    """Return the values of every weight and other tensor, by the name of its parameter.

    Args:
        tensors: Names to tensors of ``inference_tensors``.
        config: Of ``inference_config``.
        dtype: In which Hugging Face's reader gives values; compressed-tensors' chooses its own.
    """
    if config["quant_method"] == "fp8":
        return _by_hugging_face(tensors, config, dtype)
    return _by_compressed_tensors(tensors, QuantizationConfig.model_validate(config))


def _by_hugging_face(tensors, config, dtype):
    reader, found = Fp8Dequantize(None), {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if not name.endswith("_scale_inv"):
            found[name] = tensor if scale is None else reader._dequantize_one(tensor, scale, dtype)
            module = name.removesuffix(".weight")
            assert (scale is None) == (
                module in config["modules_to_not_convert"] or tensor.dim() < 2 or "embed" in name
            )
    return found


def _by_compressed_tensors(tensors, config):
    found, left = {}, dict(tensors)
    for scheme in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        for module in sorted({name.rpartition(".")[0] for name in tensors if name.endswith("weight_scale")}):
            if module in config.ignore or not _is_of(scheme, module):
                continue
            parts = {name: left.pop(f"{module}.{name}") for name in _PARTS if f"{module}.{name}" in left}
            with warnings.catch_warnings(action="ignore"):
                found[f"{module}.weight"] = compressor.decompress(parts, scheme)["weight"]
    return found | left


_PARTS = ("weight", "weight_packed", "weight_scale", "weight_global_scale")


def _is_of(scheme, module):
    targets = scheme.targets
    return "Linear" in targets or any(
        re.match(one.removeprefix("re:"), module) if one.startswith("re:") else one == module for one in targets
    )

"""The public names of ``hybridtensor``, and all that importing them registers."""

import hybridtensor.former_names
import hybridtensor.graph_caches  # noqa: F401  so that graphs on disk are of this version
from hybridtensor import costs, distributed, formats, linear, offload, optim, recipes
from hybridtensor.activations import rms_norm, swiglu
from hybridtensor.advising import advise
from hybridtensor.check import check
from hybridtensor.convert import quantize_, set_config_
from hybridtensor.debug import debug
from hybridtensor.explain import explain
from hybridtensor.export import export_safetensors, load_safetensors
from hybridtensor.inference import (
    export_pretrained,
    inference_config,
    inference_tensors,
    load_pretrained,
    mismatch,
)
from hybridtensor.linear import share_inputs
from hybridtensor.mesh import set_data_parallel_group_, set_mesh_
from hybridtensor.plain import plain_, plain_state_dict
from hybridtensor.quantizers import (
    DelayedFloat8Quantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP4Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from hybridtensor.recipes.config import HybridConfig, QuantizerRole
from hybridtensor.state import Context, LayerState
from hybridtensor.state.recording import without_recording
from hybridtensor.state.step import step_, step_after
from hybridtensor.subclasses import HybridTensor, IdentityTensor, MasterWeight, QuantizedTensor
from hybridtensor.version import __version__
from hybridtensor.watching import report, watch

__all__ = [
    "Context",
    "DelayedFloat8Quantizer",
    "Float8Quantizer",
    "HybridConfig",
    "HybridQuantizer",
    "HybridTensor",
    "IdentityQuantizer",
    "IdentityTensor",
    "LayerState",
    "MXFP4Quantizer",
    "MXFP8Quantizer",
    "MasterWeight",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRole",
    "__version__",
    "advise",
    "check",
    "costs",
    "debug",
    "distributed",
    "explain",
    "export_pretrained",
    "export_safetensors",
    "formats",
    "inference_config",
    "inference_tensors",
    "linear",
    "load_pretrained",
    "load_safetensors",
    "mismatch",
    "offload",
    "optim",
    "plain_",
    "plain_state_dict",
    "quantize_",
    "recipes",
    "report",
    "rms_norm",
    "set_config_",
    "set_data_parallel_group_",
    "set_mesh_",
    "share_inputs",
    "step_",
    "step_after",
    "swiglu",
    "watch",
    "without_recording",
]

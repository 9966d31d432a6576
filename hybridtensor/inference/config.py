"""What ``config.json`` says of the weights that ``inference_tensors`` gives."""

from __future__ import annotations

from typing import Any

from torch import nn

from hybridtensor import formats
from hybridtensor.arguments import require_flag, require_module
from hybridtensor.formats import Format
from hybridtensor.inference.input_scales import check_inputs
from hybridtensor.inference.layouts import AUTO, Settings, require_layout
from hybridtensor.inference.names import Names
from hybridtensor.inference.weights import Exported, exported, names_of
from hybridtensor.layers import layers_of

_DYNAMIC: Settings = {"type": "float", "symmetric": True, "dynamic": True}
_E4M3, _U8 = "torch.float8_e4m3fn", "torch.uint8"
_INPUTS: dict[Format, Settings] = {
    formats.FP8_E4M3_TENSOR: {"num_bits": 8, "strategy": "tensor"},
    formats.FP8_E4M3_ROW: {"num_bits": 8, "strategy": "token"},
    formats.FP8_E4M3_1X128: {"num_bits": 8, "strategy": "group", "group_size": 128},
    formats.FP8_E4M3_1X128_FP32_SCALE: {"num_bits": 8, "strategy": "group", "group_size": 128},
    formats.MXFP8_E4M3: {
        "num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": _U8, "zp_dtype": _U8,
    },
    formats.NVFP4: {
        "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": _E4M3, "zp_dtype": _E4M3,
    },
}  # fmt: skip


def inference_config(
    model: nn.Module,
    layout: str = AUTO,
    *,
    experts: str = "separate",
    static_inputs: bool = False,
) -> dict[str, Any]:
    """Return the ``quantization_config`` of ``config.json`` for what ``inference_tensors`` gives.

    ::

        json.dumps({"quantization_config": ht.inference_config(model)})

    Inputs are quantized as the recipe's forward does, where engines have that rule; else they stay in high precision.

    Args:
        model: Any model, of which all ranks may ask.
        layout: See ``inference_tensors``.
        experts: See ``inference_tensors``.
        static_inputs: See ``inference_tensors``.

    Returns:
        Plain dictionaries, lists, numbers and strings; empty where nothing is quantized.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If no layout holds a weight, or not the one that was named.
    """
    who = "inference_config"
    require_module(who, model)
    require_layout(who, layout)
    require_flag(who, static_inputs=static_inputs)
    found = exported(who, model, layout)
    if static_inputs:
        check_inputs(who, found)
    names = names_of(who, model, experts, found)
    quantized = [one for one in found if one.layout is not None]
    if not quantized:
        return {}
    first = quantized[0].layout
    whole = first is not None and bool(first.of_experts)
    plain = _plain_modules(model, found, names, whole_stacks=whole)
    if first is not None and not first.stored_as:
        return {**first.settings, "modules_to_not_convert": plain}
    return _compressed_tensors(quantized, names, plain, static_inputs)


def _plain_modules(
    model: nn.Module, found: list[Exported], names: Names, *, whole_stacks: bool
) -> list[str]:
    """Return the names of modules that multiply by a matrix that is not quantized: linear layers, routers, and
    experts, together (``whole_stacks``) or one by one.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    stacks = {id(layer.weight) for layer in layers_of(model) if layer.is_stack}
    plain = []
    for one in found:
        of_matrix = one.name.rpartition(".")[2] == "weight" and one.value.dim() == 2
        if one.layout is None and of_matrix and id(one.value) not in embeddings:
            plain += names.of_module(one.name)
        elif one.layout is None and id(one.value) in stacks:
            own = [one.name.rpartition(".")[0]]
            plain += own if whole_stacks else names.of_module(one.name, one.value)
    return sorted({stored.removesuffix(".weight") for stored in plain})


def _compressed_tensors(
    quantized: list[Exported], names: Names, plain: list[str], static_inputs: bool
) -> Settings:
    """Return the configuration of compressed-tensors: a group of layers for each way that weights and inputs are
    stored.
    """
    groups: list[tuple[Settings, list[str]]] = []
    for one in quantized:
        if one.layout is None:
            continue
        scheme = {
            "weights": one.layout.settings,
            "input_activations": _inputs(one, static_inputs),
            "output_activations": None,
            "format": one.layout.stored_as,
        }
        known = next((targets for of, targets in groups if of == scheme), None)
        if known is None:
            groups.append((scheme, known := []))
        known += [stored.removesuffix(".weight") for stored in names.of_module(one.name, one.value)]
    alone = len(groups) == 1
    stored_as = {scheme["format"] for scheme, _ in groups}
    return {
        "quant_method": "compressed-tensors",
        # What compressed-tensors calls several formats in one model; each group then names its own.
        "format": stored_as.pop() if len(stored_as) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": plain,
        "config_groups": {
            f"group_{i}": {**scheme, "targets": ["Linear"] if alone else targets}
            for i, (scheme, targets) in enumerate(groups)
        },
    }


def _inputs(one: Exported, static: bool) -> Settings | None:
    """Return how engines quantize a layer's inputs, or None where they have no such rule."""
    fmt = one.part.recipe.input.rowwise_format
    rule = _INPUTS.get(fmt)
    if rule is None:
        return None
    return {**_DYNAMIC, **rule, "dynamic": not static or one.input_scales is None}

"""Scales of inputs that delayed scaling has learned, stored beside a weight for engines that do not measure inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridtensor.inference.names import Names
from hybridtensor.inference.stored import Tensors, require_scales
from hybridtensor.inference.weights import Exported, input_slots
from hybridtensor.layers import Layer
from hybridtensor.state import LayerState

SUFFIX = "input_scale"


def check_inputs(who: str, found: list[Exported]) -> None:
    """Raise ValueError unless a layer has a scale of inputs to export, and all of these were measured."""
    delayed = [one for one in found if one.input_scales is not None]
    if not delayed:
        raise ValueError(
            f"{who}: static_inputs requires a layer with delayed scales of inputs in layout 'ct_fp8_tensor' or "
            "'ct_fp8_row', got none; train with 'fp8_delayed', or leave static_inputs out"
        )
    for one in delayed:
        layer: Any = one.layer
        state = layer.recipe.state
        if not bool(state.amax_history[input_slots(state)].any()):
            raise ValueError(
                f"{who}: static_inputs requires scales that follow from inputs, got none measured of {one.name}; run "
                "steps of training first"
            )


def scales_beside(
    who: str, name: str, tensors: Mapping[str, Tensor], experts: int | None
) -> tuple[Tensor, ...] | None:
    """Return the scales of inputs that are stored beside a weight, fp32 ``[1]`` each, one for each expert; None if
    there are none.

    Args:
        who: Begins messages.
        name: Of the weight.
        tensors: By name, stacks of experts as one each.
        experts: How many a stack has; None of a matrix.

    Raises:
        ValueError: If there are others than one for each matrix, or they are no numbers above zero.
    """
    key = name.removesuffix("weight") + SUFFIX if experts is None else f"{name}_{SUFFIX}"
    if key not in tensors:
        return None
    scale, count = tensors[key], 1 if experts is None else experts
    require_scales(key, scale, who)
    if scale.numel() != count:
        raise ValueError(
            f"{who}: {key} of {count} scales is required, got {list(scale.shape)}; pass what inference_tensors gives"
        )
    return scale.float().reshape(count, 1).unbind(0)


def stored_inputs(
    stored: Tensors, names: Names, name: str, value: Tensor, layer: Layer | None
) -> Iterator[tuple[LayerState, dict[str, Tensor]]]:
    """Yield the state of a layer's quantizers, and its content with the scales of inputs that a folder has.

    Args:
        stored: The tensors of the folder.
        names: Of these.
        name: Of the weight.
        value: The weight.
        layer: Whose it is. One that measures its inputs takes no scales.

    Raises:
        ValueError: If scales are missing or no numbers above zero, or parts of one expert have several.
    """
    recipe = None if layer is None else layer.recipe
    slots = [] if recipe is None else input_slots(recipe.state)
    if recipe is None or layer is None or not slots:
        return
    scales: dict[int, Tensor] = {}
    for key, expert, scale in _found(stored, names, name, value, layer):
        require_scales(key, scale)
        if scale.numel() != 1 or scale.item() != scales.setdefault(expert, scale).item():
            raise ValueError(
                f"load_pretrained: {key}: one scale of inputs per layer, or expert, is required, got others"
            )
    if scales and sorted(scales) != list(range(len(slots))):
        raise ValueError(
            f"load_pretrained: {name}: {len(slots)} scales of inputs are required, got {len(scales)}"
        )
    if scales:
        every = torch.cat([scales[expert].reshape(1) for expert in range(len(slots))])
        content = recipe.state.state_dict()
        encode = content["encode_scale"].clone()
        # Files have dequantization scales, whose reciprocals are encode scales
        encode[slots] = every.float().reciprocal().to(encode.device)
        yield recipe.state, {**content, "encode_scale": encode}


def _found(
    stored: Tensors, names: Names, name: str, value: Tensor, layer: Layer
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, expert (0 of a linear layer) and tensor of the scales of inputs beside a weight."""
    experts = {names.of_module(name)[0]: 0} if not layer.is_stack else {}
    if layer.is_stack:
        rows, _ = layer.size(tuple(value.shape))
        renamed = names.of_stack(name, value.shape[0], rows) or name
        for whole in {f"{name}_{SUFFIX}", f"{renamed}_{SUFFIX}"}:
            if whole in stored:
                scales = stored[whole].unbind(0)
                yield from ((whole, expert, one) for expert, one in enumerate(scales))
                return
        places = names.places(name, value.shape[0], rows)
        experts = {own: int(place[0]) // rows for own, place in places.items()}
    for own, expert in experts.items():
        key = own.removesuffix("weight") + SUFFIX
        if key in stored:
            yield key, expert, stored[key]

"""Whether a plan of ``quantize_`` can be carried out, asked before anything changes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.distributed.fsdp.torch_compat import params_of
from hybridtensor.dtensor import local
from hybridtensor.layers import Layer, layers_of, weights_of_absent_layers
from hybridtensor.recipes.config import KEEP_FACES, HybridConfig
from hybridtensor.selection import Plan, coverage
from hybridtensor.state import LayerState
from hybridtensor.subclasses import HybridTensor, MasterWeight, is_converted
from hybridtensor.swap import require_swappable

_SHOWN = 3  # matrices in an error


def check_plan(plan: Plan, model: nn.Module, root: str, persistent: bool) -> None:
    """Raise if nothing is to be converted, or something cannot be."""
    layers = list(layers_of(model, root))
    if not plan:
        raise _nothing(model, layers)
    check_tied("quantize_", plan, layers)
    for layer, config in plan:
        check_weight(layer, persistent)
        check_persistent(layer, config, persistent)
    _check_all_sizes(plan)


def _nothing(model: nn.Module, layers: list[Layer]) -> ValueError:
    """Return the error of a plan without layers, listing what the model has instead."""
    layers, own = (
        [layer for layer in each if not layer.is_stack or layer.why_skipped() is None]
        for each in (layers, layers_of(model))
    )
    known = {layer.parameter_name for layer in own}
    left = [matrix for matrix in coverage(model).plain if matrix.name not in known]
    others = [f"{matrix.name} {list(matrix.shape)}: {matrix.why}" for matrix in left]
    shown = f"; what is no layer: {', '.join(others[:_SHOWN])}" if others else ""
    if layers:
        names = ", ".join(layer.name or "<root>" for layer in layers)
        return ValueError(
            "quantize_: the recipe matches no layer, or keep_bf16 and filter_fn leave out each that it matches; "
            f"layers are: {names}{shown}"
        )
    owners = [module for module in model.modules() if module._parameters]
    classes = ", ".join(sorted({type(module).__name__ for module in owners}))
    got = f"whose parameters are of {classes}" if classes else "without parameters"
    return ValueError(
        f"quantize_: the model has no linear layers, but modules {got}{shown}; pass a model that has nn.Linear "
        "(or a class derived of it), or experts with num_experts"
    )


def check_tied(who: str, plan: Plan, layers: Iterable[Layer]) -> None:
    """Raise ValueError unless layers that share a weight get one recipe; ``who`` begins the message."""
    configs = {layer.name: config for layer, config in plan}
    holders: dict[int, list[str]] = {}
    for layer in layers:
        if isinstance(layer.weight, nn.Parameter):
            holders.setdefault(id(layer.weight), []).append(layer.name)
    for names in holders.values():
        given = [configs.get(name) for name in names]
        if any(config != given[0] for config in given):
            shown = ", ".join(
                f"{config or 'none'} for {name}" for name, config in zip(names, given, strict=True)
            )
            raise ValueError(
                f"{who}: layers that hold one weight would get different recipes: {shown}; choose all of them, "
                "or none, or give each a weight of its own"
            )


def check_layers(model: nn.Module, plan: Plan, layers: list[Layer]) -> None:
    """Raise ValueError unless all of a model's weights get another recipe by their layers, tied ones the same."""
    check_tied("set_config_", plan, layers)
    for absent in weights_of_absent_layers(model, layers):
        raise ValueError(
            f"set_config_: {absent.name} is the weight of a converted layer that is not in the model, and would keep "
            "its recipe; keep the layer as a child of the module that uses its weight, or replace layers before "
            "quantize_"
        )


def check_weight(layer: Layer, persistent: bool) -> None:
    """Raise unless the weight of a layer can be converted: TypeError, ValueError, or RuntimeError if something
    refers to it."""
    where, weight = f"quantize_: layer {layer.name or '<root>'}", layer.weight
    if not isinstance(weight, nn.Parameter) and (persistent or type(weight) is not Tensor):
        kind = "a Parameter" if persistent else "a Parameter or a plain tensor"
        raise TypeError(
            f"{where}: its weight is a {type(weight).__name__}, not {kind}; remove what computes it"
        )
    if isinstance(weight, nn.UninitializedParameter):
        raise TypeError(
            f"{where}: its weight is not initialized, as a lazy layer's before its first forward; run the model once"
        )
    part = part_of(weight)
    if isinstance(part, HybridTensor) and not persistent:
        raise ValueError(
            f"{where}: the weight is persistent and has no high-precision value; pass persistent=True"
        )
    stays = isinstance(part, HybridTensor) or (isinstance(part, MasterWeight) and not persistent)
    # A model that was sharded empty and then loaded has another parameter in that place
    place = (layer.module, layer.parameter)
    held = [
        sharded.holds(weight) or (persistent and place in sharded.places)
        for sharded in params_of(layer.module)
    ]
    if not stays and any(held):
        raise TypeError(
            f"{where}: FSDP2 shards its weight already; call quantize_ before fully_shard"
        )
    if (
        layer.transposed
        and not layer.is_stack
        and isinstance(weight, DTensor)
        and not params_of(layer.module)
    ):
        raise TypeError(
            f"{where}: tensor parallelism shards a {type(layer.module).__name__} with weight [in, out]; leave "
            "it whole, or leave it out of quantize_ (keep_bf16)"
        )
    if not is_converted(part) and type(part) not in (nn.Parameter, Tensor):
        raise TypeError(
            f"{where}: its weight is a {type(part).__name__}, not a plain Parameter; quantize the model first"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"{where}: its weight is in {weight.dtype}, not bfloat16, float16 or float32; cast it, or leave "
            "the layer out of quantize_ (keep_bf16)"
        )
    taken = getattr(layer.module, layer.state_name, None)
    if taken is not None and not isinstance(taken, LayerState):
        raise ValueError(
            f"{where}: its attribute {layer.state_name} is a {type(taken).__name__}, where the state of "
            "quantizers belongs; rename it"
        )
    if isinstance(weight, nn.Parameter) and not stays:
        require_swappable(where, weight)
        if not persistent:
            _check_strides(where, layer, part)


def _check_strides(where: str, layer: Layer, part: Tensor) -> None:
    """Raise ValueError for a layer whose products say by their strides how its weight is stored, if they would say it
    wrongly."""
    known_by_strides = layer.is_stack or layer.transposed
    if known_by_strides and 1 not in part.shape[-2:] and part.stride(-1) != 1:
        raise ValueError(
            f"{where}: a weight with contiguous rows is required, got strides {part.stride()} for shape "
            f"{list(part.shape)}; assign {layer.parameter}.data = {layer.parameter}.data.contiguous() first"
        )


def _check_all_sizes(plan: Plan) -> None:
    """Raise ValueError if layers do not consist of whole blocks, naming those to leave out."""
    found = {}
    for layer, config in plan:
        try:
            check_sizes(layer, config)
        except ValueError as error:
            if not layer.name:
                raise
            found[layer.name] = str(error).partition(";")[0]
    if found:
        raise ValueError(
            f"{next(iter(found.values()))}; leave it in high precision by keep_bf16={list(found)}, which names every "
            "such layer, or give it another format or size"
        )


def check_persistent(
    layer: Layer, config: HybridConfig, persistent: bool, who: str = "quantize_"
) -> None:
    """Raise if a persistent weight cannot have a recipe: ValueError for cached faces, which it has none of,
    NotImplementedError for signs drawn per step, whose faces it would have from another step."""
    if not persistent:
        return
    where, quantizer = f"{who}: layer {layer.name or '<root>'}", config.weight
    if config.keep_faces != KEEP_FACES[0]:
        raise ValueError(
            f"{where}: keep_faces is for weights in high precision, got a persistent weight, whose faces are the "
            "weight; drop one"
        )
    drawn = [
        direction
        for direction in ("rowwise", "columnwise")
        if getattr(quantizer, f"{direction}_format").drawn_signs
    ]
    if drawn and not (drawn == ["columnwise"] and quantizer.draws_from_rowwise):
        raise NotImplementedError(
            f"{where}: rounding='eden' in the {' and '.join(drawn)} face of a "
            "persistent weight is for columnwise faces that are made of the rowwise one; add "
            "+rowwise_dequantized_weight, or use rounding='stochastic' for it"
        )


def check_sizes(layer: Layer, config: HybridConfig, who: str = "quantize_") -> None:
    """Raise ValueError unless a layer, or its local shard under tensor parallelism, consists of whole blocks."""
    where, weight = f"{who}: layer {layer.name or '<root>'}", layer.weight
    size: tuple[int, ...] = tuple(weight.shape)
    if isinstance(weight, DTensor):
        # FSDP2 gathers its parts before they are multiplied: what counts is the matrix that it
        # gathers, whole or a part of tensor parallelism.
        held = [
            sharded.size for sharded in params_of(layer.module) if sharded.tensor is part_of(weight)
        ]
        size = held[0] if held else tuple(local(weight).shape)
        if size != tuple(weight.shape):
            where += f" (a part {list(size)} of {list(weight.shape)} on this rank)"
    config.check_sizes(*layer.size(size), where)

"""Put recipes on models: ``quantize_``, ``set_config_``, and the handler behind torchao's own
``quantize_``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_flag, require_function, require_module, require_text
from hybridtensor.distributed.fsdp.hooks import let_go, part_of, remake_, sharded_as
from hybridtensor.distributed.fsdp.torch_compat import locate
from hybridtensor.dtensor import local, with_local
from hybridtensor.linear.layer_forward import recipe_of, set_recipe
from hybridtensor.linear.sharing import share_between_layers_of
from hybridtensor.linear.tensor_parallel import section_of
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import Filter, Plan, Recipe, choose, coverage, linear_modules
from hybridtensor.state import LayerState
from hybridtensor.state.watch import watch
from hybridtensor.state_dicts import give_plain_values_, keep_recipe_
from hybridtensor.subclasses import HybridTensor, MasterWeight, is_converted
from hybridtensor.subclasses.quantizing import persistent_weight, quantize
from hybridtensor.swap import swap
from hybridtensor.torchao_compat import FqnToConfig, register_quantize_module_handler

_logger = logging.getLogger("hybridtensor")


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    *,
    filter_fn: Filter | None = None,
    keep_bf16: Iterable[str] = (),
    persistent: bool = False,
    name: str | None = None,
) -> nn.Module:
    """Swap the weights of the linear layers of ``model``, in place, for weights that quantize their
    products.

    Modules, parameter objects, names and ``requires_grad`` stay; tied weights stay tied; optimizers
    made before keep working. Calling it again changes the recipe. By default the output head,
    routers and gates are left alone (``explain(model)`` says which and why). What is left plain is
    logged (logger ``hybridtensor``): as a warning, if a large matrix is no linear layer's, such as
    stacked experts.

    Args:
        model: Any module; its linear layers are found at every depth, the root included.
        recipe: A name or spec (``"fp8"``, ``"fp8/fp8_rowwise/bf16"``, ``"fp8+dequantized"``; see
            ``HybridConfig.parse`` and ``recipes``), a ``HybridConfig``, a factory
            ``QuantizerRole -> Quantizer``, or torchao's ``FqnToConfig`` from names and ``re:``
            patterns to any of the first two (None leaves a layer alone).
        filter_fn: ``(module, name) -> bool``, which linear layers to convert, instead of the
            default.
        keep_bf16: Names of layers, or of modules that hold them, to leave alone, whatever chose
            them; also patterns (``"blocks.?.mlp"``). ``recipes.edge_blocks`` gives the first and
            last blocks.
        persistent: Keep only the quantized faces (``HybridTensor`` parameters), no high-precision
            weight. A trainable one holds on to its original until ``optim.MasterWeights`` takes it.
        name: What ``model`` is called in a larger model, such as ``"blocks.0.mlp"``. All names
            begin with it, so that a model converted part by part is the one converted whole: random
            rounding draws by a layer's name. A layer that is ``model`` itself and has no name draws
            its key from torch's generator, if it rounds at random; ranks that share the layer seed
            alike, or give the name.

    Returns:
        ``model``.

    Raises:
        ValueError: If a word is unknown, nothing matches, a layer's sizes do not fit a format, or
            weights would have to turn from persistent to not.
        TypeError: If an argument is of the wrong kind, or a weight is not a floating-point
            parameter.
    """
    require_module("quantize_", model)
    require_flag("quantize_", persistent=persistent)
    require_function("quantize_", "filter_fn", filter_fn)
    root = _checked_name(name)
    plan = choose(model, recipe, filter_fn, keep_bf16=keep_bf16, root=root)
    _check_plan(plan, model, root, persistent)  # before anything changes
    for layer, module, config in plan:
        _convert(layer, module, config, persistent)
    _share_inputs(model, plan, root)
    watch(model)
    _give_plain_values_to_all(model)
    _tell_what_is_left(model)
    return model


def _give_plain_values_to_all(model: nn.Module) -> None:
    """Have every holder of a converted weight save it plain: an embedding may be tied to a layer."""
    for owner in model.modules():
        if any(is_converted(parameter) for parameter in owner._parameters.values()):
            give_plain_values_(owner)


def _tell_what_is_left(model: nn.Module) -> None:
    """Log how much is quantized, and every large matrix that is not: a warning, where nobody decided
    so.
    """
    found = coverage(model)
    left = "".join(f"\n  {m.name} {list(m.shape)}: {m.why}" for m in found.plain)
    level = logging.INFO if all(m.deliberate for m in found.plain) else logging.WARNING
    _logger.log(level, "quantize_: %s%s%s", found, left and "; left in high precision:", left)


def _check_plan(plan: Plan, model: nn.Module, root: str, persistent: bool) -> None:
    """Raise if nothing is to be converted, or something cannot be."""
    if not plan:
        names = ", ".join(layer or "<root>" for layer, _ in linear_modules(model, root)) or "none"
        raise ValueError(
            f"quantize_: a recipe that matches a layer is required, got none; linear layers are: {names}"
        )
    for layer, module, config in plan:
        _check_weight(layer, module, persistent)
        _check_sizes(layer, module, config)


def _share_inputs(model: nn.Module, plan: Plan, root: str) -> None:
    """Let layers that one module calls share what they quantize an input to; see
    ``linear.sharing``.
    """
    converted = {id(module) for _, module, _ in plan}
    for name, caller in model.named_modules(prefix=root):
        if isinstance(caller, (nn.ModuleList, nn.ModuleDict)):
            continue
        layers = [layer for layer in _called_by(caller) if id(layer) in converted]
        for layer in layers:
            recipe = recipe_of(layer)
            if recipe is not None:
                recipe.state.parent = name
        if len(layers) > 1:
            share_between_layers_of(caller, name)


def _called_by(caller: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers that a module calls itself: lists and dictionaries of modules have no
    forward.
    """
    for child in caller.children():
        if isinstance(child, nn.Linear):
            yield child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_by(child)


def set_config_(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Change the recipe of every weight that ``quantize_`` converted; optimizer state is untouched.

    The next use quantizes by the new recipe (and recompiles once). The faces of persistent weights
    are made again, from the masters of ``optim.MasterWeights`` or else from what they hold.

    Args:
        model: A model that went through ``quantize_``.
        recipe: As for ``quantize_``.

    Raises:
        ValueError: If the model has no converted weight, or the recipe matches none of them.
    """
    require_module("set_config_", model)
    converted = {
        id(module)
        for _, module in linear_modules(model)
        if is_converted(part_of(module.weight)) or recipe_of(module) is not None
    }
    chosen = None if isinstance(recipe, FqnToConfig) else lambda module, _: id(module) in converted
    plan = [step for step in choose(model, recipe, chosen) if id(step[1]) in converted]
    if not plan:
        raise ValueError(
            "set_config_: a model with weights of this library is required, got none; call quantize_ first"
        )
    for name, module, config in plan:
        _check_sizes(name, module, config)
        part = part_of(module.weight)
        if isinstance(part, HybridTensor):
            sharded_as(part, config)
    for name, module, config in plan:
        if isinstance(module.weight, nn.Parameter):
            let_go(module.weight)
        _convert(name, module, config, isinstance(part_of(module.weight), HybridTensor))
    watch(model)
    return model


def _checked_name(name: str | None) -> str:
    """Return the prefix of all names, ``""`` for none."""
    if name is None:
        return ""
    require_text("quantize_", name=name)
    if not all(name.split(".")):
        raise ValueError(
            f"quantize_: a name without empty parts is required, got {name!r}; "
            "give what named_modules() calls the module"
        )
    return name


def _check_weight(name: str, module: nn.Linear, persistent: bool) -> None:
    where, weight = f"quantize_: layer {name or '<root>'}", module.weight
    if not isinstance(weight, nn.Parameter) and (persistent or type(weight) is not Tensor):
        kind = "a Parameter" if persistent else "a Parameter, or a plain tensor,"
        raise TypeError(
            f"{where}: {kind} is required as weight, got {type(weight).__name__}; remove what computes it"
        )
    if isinstance(part_of(weight), HybridTensor) and not persistent:
        raise ValueError(
            f"{where}: the weight is persistent and has no high-precision value; pass persistent=True"
        )
    if isinstance(weight, DTensor) and locate(module) and not is_converted(part_of(weight)):
        raise TypeError(
            f"{where}: a plain Parameter is required, got one that FSDP2 shards; call quantize_ "
            "before fully_shard"
        )
    part = part_of(weight)
    if not is_converted(part) and type(part) not in (nn.Parameter, Tensor):
        raise TypeError(
            f"{where}: a plain Parameter is required, got {type(part).__name__}; quantize the model first"
        )
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"{where}: a bfloat16, float16 or float32 weight is required, got {weight.dtype}; cast the model"
        )


def _check_sizes(name: str, module: nn.Linear, config: HybridConfig) -> None:
    """Raise ValueError if a layer, or what tensor parallelism leaves of it to a rank, is not of
    whole blocks.
    """
    who, weight = f"quantize_: layer {name or '<root>'}", module.weight
    size: tuple[int, ...] = tuple(weight.shape)
    if isinstance(weight, DTensor):
        held = [sharded.size for sharded in locate(module) if sharded.tensor is part_of(weight)]
        size = held[0] if held else tuple(local(weight).shape)
        if size != tuple(weight.shape):
            who += f" (a part {list(size)} of {list(weight.shape)} on this rank)"
    config.check_sizes(size[0], size[1], who)


def _convert(name: str, module: nn.Linear, config: HybridConfig, persistent: bool) -> None:
    """Give the weight of a layer, nameless if called ``""``, the config and the state it needs.

    The Parameter object stays the same.
    """
    weight: Any = part_of(module.weight)
    layer = _attach_state(name, module, config)
    set_recipe(module, config, layer)
    if not isinstance(module.weight, nn.Parameter):
        return  # computed by a parametrization, say: see ``linear.layer_forward``
    if isinstance(weight, MasterWeight) and not persistent:
        weight.config = config
    elif isinstance(weight, HybridTensor):
        if weight.config != config:
            _requantize(weight, config)
    else:
        section = section_of(module.weight) if isinstance(module.weight, DTensor) else None
        values = weight.plain if isinstance(weight, MasterWeight) else weight.data
        new: Any = MasterWeight(values, config)
        if persistent:
            new = persistent_weight(values, config, module.weight.requires_grad, layer, section)
        new.layer, new.record.section = layer, section
        swap("quantize_", module.weight, with_local(module.weight, new))
    keep_recipe_(module)
    give_plain_values_(module)


def _attach_state(name: str, module: nn.Linear, config: HybridConfig) -> LayerState:
    """Return the layer's state, with what the recipe needs, and make it part of the module if it
    holds anything.
    """
    weight: Any = part_of(module.weight)
    recipe = recipe_of(module)
    known = weight.layer if is_converted(weight) else recipe and recipe.state
    layer = known if isinstance(known, LayerState) else LayerState(name or None)
    if name:
        layer.take_name(name)
    layer.require(config.delayed_rules(), stochastic=config.stochastic, device=weight.device)
    if not layer.is_empty:
        module.quantization_state = layer
    elif hasattr(module, "quantization_state"):
        del module.quantization_state
    return layer


def _requantize(weight: HybridTensor, config: HybridConfig) -> None:
    """Replace the faces of a persistent weight by those of another recipe."""
    current = weight.high_precision.current
    values = weight.dequantize() if current is None else current
    if not remake_(weight, values, config):
        made = quantize(config.weight, values, dtype=weight.dtype, context=weight.context)
        weight.rowwise, weight.columnwise, weight.config = made.rowwise, made.columnwise, config
    weight.record = weight.record.with_values(
        weight.high_precision.moved()
    )  # aliases hold the faces so far
    weight.high_precision.note_quantized(values)


@register_quantize_module_handler(HybridConfig)  # type: ignore[untyped-decorator]
def _torchao_handler(
    module: nn.Module, config: HybridConfig, *, parameter_name: str = "weight"
) -> nn.Module:
    """Convert one module for ``torchao.quantization.quantize_``."""
    if not isinstance(module, nn.Linear) or parameter_name != "weight":
        raise TypeError(
            f"quantize_: HybridConfig converts the weight of linear layers, got {parameter_name} of "
            f"{type(module).__name__}; choose linear layers with filter_fn"
        )
    _check_weight(type(module).__name__, module, isinstance(module.weight, HybridTensor))
    _check_sizes(type(module).__name__, module, config)
    _convert("", module, config, isinstance(module.weight, HybridTensor))
    watch(module)
    return module

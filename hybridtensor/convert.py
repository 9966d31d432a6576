"""Put recipes on models: ``quantize_``, ``set_config_``, and the handler behind torchao's own ``quantize_``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TypedDict

from torch import nn
from torch.distributed.tensor import DTensor

from hybridtensor.arguments import require_flag, require_function, require_module, require_text
from hybridtensor.common_scales import (
    Siblings,
    check_common_scales,
    common_scales,
    common_scales_of,
    forget_common_scales,
    local_part,
    measure_common_scales,
)
from hybridtensor.distributed.checkpoint.undo import Undo, of_parts
from hybridtensor.distributed.fsdp.hooks import part_of, remake_, reshard, sharded_as
from hybridtensor.dtensor import with_local
from hybridtensor.fitting import (
    check_layers,
    check_persistent,
    check_plan,
    check_sizes,
    check_weight,
)
from hybridtensor.layers import Layer, layers_of
from hybridtensor.linear.grouped import first_expert
from hybridtensor.linear.interception import intercept_others
from hybridtensor.linear.kinds import is_linear
from hybridtensor.linear.operands import Weight
from hybridtensor.linear.sharing import share_between_layers_of
from hybridtensor.linear.tensor_parallel import section_of
from hybridtensor.linear.weight_buckets import bucket_weights
from hybridtensor.masters import high_precision_values, watch_plain_optimizers
from hybridtensor.ranks import patience, require_alike
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.selection import (
    Filter,
    Plan,
    Recipe,
    choose,
    coverage,
    keeping,
    mark_left_alone,
    with_layouts,
)
from hybridtensor.state import LayerState
from hybridtensor.state.contract import ADVICE, groups_of
from hybridtensor.state.missing_step import detect_missing_step
from hybridtensor.state_dicts import give_plain_values_, keep_recipe_
from hybridtensor.subclasses import HybridTensor, MasterWeight, is_converted
from hybridtensor.subclasses.common_scale import CommonScale
from hybridtensor.subclasses.quantizing import persistent_weight, quantize_weight, refresh_all_
from hybridtensor.swap import apply_in_place_, swap
from hybridtensor.torchao_compat import FqnToConfig, register_quantize_module_handler
from hybridtensor.undo import all_or_nothing

_logger = logging.getLogger("hybridtensor")


class Options(TypedDict, total=False):
    """The arguments of ``quantize_`` by name, for functions that pass them on."""

    filter_fn: Filter | None
    keep_bf16: Iterable[str]
    persistent: bool
    name: str | None
    transposed: Iterable[str]
    common_scale: Iterable[Siblings]
    keep_faces: str | None


def quantize_(
    model: nn.Module,
    recipe: Recipe,
    *,
    filter_fn: Filter | None = None,
    keep_bf16: Iterable[str] = (),
    persistent: bool = False,
    name: str | None = None,
    transposed: Iterable[str] = (),
    common_scale: Iterable[Siblings] = (),
    keep_faces: str | None = None,
) -> nn.Module:
    """Replace the weights of linear layers and experts of ``model``, in place, by weights whose products are quantized.

    ::

        model = ht.quantize_(model, "nvfp4", keep_bf16=ht.recipes.edge_blocks(model))
        optimizer = torch.optim.AdamW(model.parameters())
        ht.step_after(optimizer, model)

    Modules, parameter objects, names and ``requires_grad`` do not change, tied weights stay tied, and existing
    optimizers keep working. A second call changes the recipe. The output head (``lm_head``, or what the model returns
    as ``get_output_embeddings()``), routers, their gates (a ``gate`` narrower than its input), layers inside of these
    and ``shared_expert_gate`` stay plain by default; ``explain(model)`` says why, and the logger ``hybridtensor`` lists
    them. Three-dimensional parameters are experts' weights if their first extent is their module's ``num_experts`` (of
    all ranks, or of this one). Linear layers of other classes than ``nn.Linear`` and GPT-2's say ``is_transposed``.

    Args:
        model: Any module; its layers are found at every depth, the root included.
        recipe: A name or spec (``"fp8"``; see ``HybridConfig.parse`` and ``recipes``), a ``HybridConfig``, a factory
            ``QuantizerRole -> Quantizer``, ``recipes.by_type``, or torchao's ``FqnToConfig`` from names and ``re:``
            patterns to any of the first two (None leaves a layer alone).
        filter_fn: ``(module, name) -> bool``, instead of the default choice; for experts with the parameter's name.
        keep_bf16: Names or patterns (``"blocks.?.mlp"``) of layers, or modules that contain some, to leave plain,
            whatever else chooses them. ``recipes.edge_blocks`` returns the first and last blocks.
        persistent: Store only the quantized faces (``HybridTensor`` parameters), no high-precision weight. A trainable
            one keeps its original values until ``optim.MasterWeights`` takes them.
        name: Name of ``model`` in a larger one: stochastic rounding draws by full names. The key of a layer without a
            name comes from torch's generator: seed all ranks that share it alike.
        transposed: Names or patterns of experts' parameters that are stored ``[E, in, out]``, for modules that show it
            neither by ``is_transposed`` nor by ``hidden_size``; all others are ``[E, out, in]``.
        common_scale: Groups of patterns, ``("*.q_proj", "*.k_proj")``, of layers whose weights share one scale per
            tensor, as engines that fuse them need. ``*`` and ``?`` stand for the same text in all names of a group.
        keep_faces: ``"auto"``, ``"always"`` or ``"never"``: how long faces are cached. None: as ``HybridConfig`` says.

    Returns:
        ``model``.

    Raises:
        ValueError: If a word is unknown, no layer matches, ``keep_bf16`` names a quantized one, sizes do not fit a
            format, persistent weights would become masters, layers cannot share a scale, or a weight gets two recipes.
        TypeError: If an argument is of the wrong kind, or a weight is not a floating-point parameter.
        RuntimeError: If a graph saved a weight, or a weak reference is to it. Every error leaves the model unchanged.
    """
    root = _checked(model, filter_fn, persistent, name)
    plan = choose(model, recipe, filter_fn, keep_bf16=keep_bf16, root=root)
    plan = keeping(with_layouts(plan, transposed), keep_faces)
    check_plan(plan, model, root, persistent)  # before anything changes
    _carry_out(model, plan, root, persistent, common_scales(plan, common_scale))
    return model


def _carry_out(
    model: nn.Module, plan: Plan, root: str, persistent: bool, scales: dict[nn.Module, CommonScale]
) -> None:
    """Convert the layers of a plan, and update everything that belongs to the whole model."""
    reshard(layer.weight for layer, _ in plan)
    with all_or_nothing(model, [layer for layer, _ in plan]) as undo:
        _convert_all(plan, persistent, scales, undo, forget_common_scales(plan))
        mark_left_alone(layers_of(model, root), plan)
        _share_inputs(model, plan, root)
        _give_plain_values_to_all(model)
    intercept_others()
    detect_missing_step(model)
    bucket_weights(model)
    _tell_what_is_left(model)


def _convert_all(
    plan: Plan,
    persistent: bool,
    scales: dict[nn.Module, CommonScale],
    undo: list[Undo],
    others: Iterable[nn.Module] = (),
) -> None:
    """Convert the layers of a plan; ``undo`` collects functions that revert what ``all_or_nothing`` does not."""
    changed = dict.fromkeys([*scales, *others])
    # Read before anything changes; requantized at the end, once the layers have their new common scales.
    parts = {m: part for m in changed if isinstance(part := local_part(m), HybridTensor)}
    converted = {module: high_precision_values(part) for module, part in parts.items()}
    undo += of_parts(parts.values())
    if persistent:
        measure_common_scales(scales, [step for step in plan if step[0].module not in converted])
    for layer, config in plan:
        _convert(layer, config, persistent, undo, scales.get(layer.module))
    refresh_all_([(local_part(module), values) for module, values in converted.items()])


def _give_plain_values_to_all(model: nn.Module) -> None:
    """Add state dict hooks to every module that holds a converted weight, also an embedding tied to a layer."""
    for owner in model.modules():
        if any(is_converted(parameter) for parameter in owner._parameters.values()):
            give_plain_values_(owner)
            apply_in_place_(owner)


def _tell_what_is_left(model: nn.Module) -> None:
    """Log how much is quantized, and every large matrix that is not (a warning where nobody chose that)."""
    found = coverage(model)
    left = "".join(f"\n  {m.name} {list(m.shape)}: {m.why}" for m in found.plain)
    level = logging.INFO if all(m.deliberate for m in found.plain) else logging.WARNING
    _logger.log(level, "quantize_: %s%s%s", found, left and "; left in high precision:", left)


def _share_inputs(model: nn.Module, plan: Plan, root: str) -> None:
    """Let layers that one module calls share the quantized input; see ``linear.sharing``."""
    converted: dict[int, list[Layer]] = {}
    for layer, _ in plan:
        converted.setdefault(id(layer.module), []).append(layer)
    for name, caller in model.named_modules(prefix=root):
        if isinstance(caller, (nn.ModuleList, nn.ModuleDict)):
            continue
        called = [caller, *_called_by(caller)] if not is_linear(caller) else []
        layers = [layer for module in called for layer in converted.get(id(module), ())]
        for layer in layers:
            recipe = layer.recipe
            if recipe is not None:
                recipe.state.parent = name
        if len(layers) > 1:
            share_between_layers_of(caller, name)


def _called_by(caller: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers that a module calls itself, also through lists and dictionaries of modules, which have
    no forward."""
    for child in caller.children():
        if is_linear(child):
            yield child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called_by(child)


def set_config_(model: nn.Module, recipe: Recipe) -> nn.Module:
    """Change the recipe of every weight that ``quantize_`` converted; optimizer state is untouched.

    ::

        ht.set_config_(model, "bf16/nvfp4/nvfp4")  # BF16 forward from now on

    The next forward quantizes with the new recipe (and recompiles once). Persistent weights are requantized from the
    masters of ``optim.MasterWeights``, without these from the original values, or else from their dequantized faces.

    Args:
        model: A model that went through ``quantize_``.
        recipe: As for ``quantize_``.

    Raises:
        ValueError: If the model has no converted weight, the recipe matches none of them, layers with a tied weight
            would get two recipes, or a module has the weight of a converted layer that is not in the model.
    """
    who = "set_config_"
    require_module(who, model)
    layers = [layer for layer in layers_of(model) if layer.recipe is not None]
    if not layers:
        raise ValueError("set_config_: the model has no quantized weights; call quantize_ first")
    converted = [layer.name for layer in layers]
    chosen = None if isinstance(recipe, FqnToConfig) else lambda _, name: name in converted
    plan = [step for step in choose(model, recipe, chosen, who=who) if step[0].name in converted]
    if not plan:
        names = ", ".join(name or "<root>" for name in converted)
        raise ValueError(
            f"set_config_: the recipe matches no converted layer; converted layers are: {names}"
        )
    check_common_scales(plan)
    check_layers(model, plan, layers)
    for layer, config in plan:
        check_sizes(layer, config, who)
        part = part_of(layer.weight)
        check_persistent(layer, config, isinstance(part, HybridTensor), who)
        if isinstance(part, HybridTensor):
            sharded_as(part, config)
    recipes = {layer.name: f"{config} ({config.fingerprint()[:8]})" for layer, config in plan}
    # Before anything changes: this raises on all ranks or on none.
    require_alike(who, recipes, advice=ADVICE, groups=groups_of(model), timeout=patience())
    reshard(layer.weight for layer, _ in plan)
    with all_or_nothing(model, [layer for layer, _ in plan]) as undo:
        for persistent in (False, True):
            of_kind = [
                step
                for step in plan
                if isinstance(part_of(step[0].weight), HybridTensor) == persistent
            ]
            _convert_all(of_kind, persistent, common_scales_of(of_kind), undo)
    detect_missing_step(model)
    bucket_weights(model)
    return model


def _checked(model: object, filter_fn: object, persistent: object, name: str | None) -> str:
    """Return the name of the model, ``""`` if none was given; raise for arguments of the wrong kind."""
    require_module("quantize_", model)
    require_flag("quantize_", persistent=persistent)
    require_function("quantize_", "filter_fn", filter_fn)
    if name is None:
        return ""
    require_text("quantize_", name=name)
    if not all(name.split(".")):
        raise ValueError(
            f"quantize_: a name without empty parts is required, got {name!r}; "
            "give what named_modules() calls the module"
        )
    return name


def _convert(
    layer: Layer,
    config: HybridConfig,
    persistent: bool,
    undo: list[Undo],
    scale: CommonScale | None = None,
) -> None:
    """Give a layer's weight its config and state, keeping the Parameter object; ``undo`` collects what reverts it."""
    module, weight = layer.module, part_of(layer.weight)
    state = _attach_state(layer, config)
    state.common = state.common if scale is None else scale
    layer.set_recipe(config, state)
    if not isinstance(layer.weight, nn.Parameter):
        return  # computed by a parametrization, say: see ``linear.layer_forward``
    if isinstance(weight, MasterWeight) and not persistent:
        weight.config = config
    elif isinstance(weight, HybridTensor):
        if weight.config != config:
            _requantize(weight, config)
    else:
        section, dims = None, layer.parallel_dims()
        first = weight.record.first if isinstance(weight, MasterWeight) else None
        if dims and isinstance(layer.weight, DTensor):
            if not layer.is_stack:
                section = section_of(layer.weight, dims)
            elif first is None:
                first = first_expert(layer.weight, dims)
        values = weight.plain if isinstance(weight, MasterWeight) else weight.data
        new: Weight = MasterWeight(values, config)
        if persistent:
            trainable = layer.weight.requires_grad
            new = persistent_weight(values, config, trainable, state, section, first)
            watch_plain_optimizers()
        new.layer, new.record.section, new.record.first = state, section, first
        undo.append(swap("quantize_", layer.weight, with_local(layer.weight, new)))
    keep_recipe_(module)
    give_plain_values_(module)
    apply_in_place_(module)


def _attach_state(layer: Layer, config: HybridConfig) -> LayerState:
    """Create or extend the layer's state, and register it as a submodule once it holds tensors."""
    weight = part_of(layer.weight)
    name = layer.state_name
    state = layer.state or LayerState(layer.name or None)
    if is_converted(weight):
        weight.layer = state  # one that came from another layer goes by this one's
    if layer.name:
        state.take_name(layer.name)
    rules = config.delayed_rules()
    if layer.is_stack or layer.transposed:
        state.transposed = layer.transposed
    if layer.is_stack:
        rules = {
            f"{slot}[{i}]": rule
            for slot, rule in rules.items()
            for i in range(layer.weight.shape[0])
        }
    state.require(rules, stochastic=config.stochastic_roles, device=weight.device)
    state.set_placeholder(state.is_empty and hasattr(layer.module, name), weight.device)
    if not state.is_empty:
        setattr(layer.module, name, state)
    return state


def _requantize(weight: HybridTensor, config: HybridConfig) -> None:
    values, known = high_precision_values(weight), weight.record.values
    if not remake_(weight, values, config):
        made = quantize_weight(config, values, weight.context, weight.layer, weight.dtype)
        weight.rowwise, weight.columnwise, weight.config = made.rowwise, made.columnwise, config
    # Existing aliases keep the former faces
    weight.record = weight.record.with_values(None if known is None else known.moved())
    if weight.known_values is not None:  # else these are those of the former faces
        weight.high_precision.mark_quantized(values)


@register_quantize_module_handler(HybridConfig)  # type: ignore[untyped-decorator]
def _torchao_handler(
    module: nn.Module, config: HybridConfig, *, parameter_name: str = "weight"
) -> nn.Module:
    """Convert one module for ``torchao.quantization.quantize_``."""
    found = [layer for layer in layers_of(module) if layer.module is module]
    chosen = [layer for layer in found if layer.parameter == parameter_name]
    if not chosen:
        raise TypeError(
            f"quantize_: HybridConfig converts weights of linear layers and experts, got {parameter_name} of "
            f"{type(module).__name__}; choose such layers with filter_fn"
        )
    layer = chosen[0]._replace(name="")
    persistent = isinstance(part_of(layer.weight), HybridTensor)
    named = layer._replace(name=type(module).__name__)
    check_weight(named, persistent)
    check_persistent(named, config, persistent)
    check_sizes(named, config)
    with all_or_nothing(module, [layer]) as undo:
        _convert(layer, config, persistent, undo)
    intercept_others()
    detect_missing_step(module)
    bucket_weights(module)
    return module

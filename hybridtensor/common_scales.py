"""Which layers' weights have a common scale: what ``quantize_(common_scale=...)`` names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

from hybridtensor.arguments import require_items, require_text
from hybridtensor.distributed.fsdp.hooks import part_of
from hybridtensor.layers import Layer
from hybridtensor.linear.layer_forward import recipe_of
from hybridtensor.masters import high_precision_values
from hybridtensor.recipes.config import HybridConfig, weight_values
from hybridtensor.selection import Plan
from hybridtensor.subclasses.common_scale import CommonScale, measures_tensor

Siblings: TypeAlias = Iterable[str]
"""Patterns of names, one per layer of a common scale; what stands for ``*`` and ``?`` is equal in all."""

_WHO = "quantize_: common_scale"


def common_scales(plan: Plan, groups: Iterable[Siblings]) -> dict[nn.Module, CommonScale]:
    """Return the common scale of each layer that has one; raise ValueError for patterns that name no complete
    siblings."""
    found: dict[nn.Module, CommonScale] = {}
    for patterns in require_items(_WHO, "a list of lists of patterns", groups):
        names = require_items(_WHO, "a list of patterns for each common scale", patterns)
        for siblings in _siblings(plan, names):
            check_alike(siblings)
            scale = CommonScale(layer.module for layer, _ in siblings)
            for layer, _ in siblings:
                if layer.module in found:
                    raise ValueError(f"{_WHO}: layer {layer.name} is in two groups; name it in one")
                found[layer.module] = scale
    return found


def _siblings(plan: Plan, patterns: list[str]) -> list[Plan]:
    """Return the layers of each common scale, in the order of their patterns."""
    for pattern in patterns:
        require_text(_WHO, **{"a pattern": pattern})
    if len(patterns) < 2:
        raise ValueError(f"{_WHO}: patterns of at least two layers are required, got {patterns}")
    matching = [_matching(plan, pattern) for pattern in patterns]
    keys = dict.fromkeys(key for matches in matching for key in matches)
    for key in keys:
        absent = [
            pattern
            for pattern, matches in zip(patterns, matching, strict=True)
            if key not in matches
        ]
        if absent:
            layer = next(matches[key][0] for matches in matching if key in matches)
            raise ValueError(
                f"{_WHO}: a layer to convert for each of {patterns} is required, got {layer.name} without one for "
                f"{absent}; wildcards stand for the same text in all patterns"
            )
    made = [[matches[key] for matches in matching] for key in keys]
    for siblings in made:
        if len({layer.module for layer, _ in siblings}) < len(patterns):
            raise ValueError(
                f"{_WHO}: another layer for each of {patterns} is required, got one for several"
            )
    return made


def _matching(plan: Plan, pattern: str) -> dict[tuple[str, ...], tuple[Layer, HybridConfig]]:
    """Return the layers that a pattern matches, by the text that its wildcards match."""
    # Not ``fnmatch``, which does not say what wildcards stand for: that is the key by which
    # siblings find each other.
    parts = (
        {"*": "(.*)", "?": "(.)"}.get(part, re.escape(part))
        for part in re.split(r"([*?])", pattern)
    )
    expression = re.compile("".join(parts))
    found = {
        match.groups(): (layer, config)
        for layer, config in plan
        if (match := expression.fullmatch(layer.name)) is not None
    }
    if not found:
        names = ", ".join(layer.name or "<root>" for layer, _ in plan)
        raise ValueError(
            f"{_WHO}: patterns of layers to convert are required, got {pattern!r}; these are: {names}"
        )
    return found


def check_alike(siblings: Plan) -> None:
    """Raise ValueError unless layers can have a common scale: linear, one weight recipe, rowwise scales per tensor."""
    first, config = siblings[0]
    for layer, other in siblings:
        if layer.is_stack:
            raise ValueError(
                f"{_WHO}: the experts {layer.name} have a scale each; keep what engines fuse in one stack "
                "(gate_up_proj)"
            )
        if other.weight != config.weight or other.bf16_weight_values != config.bf16_weight_values:
            raise ValueError(
                f"{_WHO}: one recipe for the weights of {first.name} and {layer.name} is required, got {config} "
                f"and {other}"
            )
    if len({layer.weight.dtype for layer, _ in siblings}) > 1:
        raise ValueError(
            f"{_WHO}: the weights of {first.name} and its siblings have different dtypes; cast them to one"
        )
    fmt = config.weight.rowwise_format
    if (None, None) not in (fmt.block, fmt.tensor_block) or fmt.is_identity or fmt.hadamard:
        raise ValueError(
            f"{_WHO}: weights with a scale per tensor are required, got {first.name} with {fmt}, whose scales engines "
            "keep as they are; leave its siblings out"
        )


def check_common_scales(plan: Plan) -> None:
    """Raise ValueError where another recipe would give layers of one common scale different recipes."""
    new = {layer.module: config for layer, config in plan}
    for layer, config in plan:
        scale = None if layer.recipe is None else layer.recipe.state.common
        for module in scale.modules if isinstance(scale, CommonScale) else ():
            recipe = None if module is None else recipe_of(module)
            if module is None or recipe is None:
                continue
            other = new.get(module, recipe.config)
            if (other.weight, other.bf16_weight_values) != (
                config.weight,
                config.bf16_weight_values,
            ):
                raise ValueError(
                    f"set_config_: one recipe for the weights of {layer.name} and {recipe.state.name} is required, "
                    f"which have a common scale, got {config} and {other}"
                )


def common_scales_of(plan: Plan) -> dict[nn.Module, CommonScale]:
    """Return the common scales that layers have now."""
    known = (
        (layer, None if layer.recipe is None else layer.recipe.state.common) for layer, _ in plan
    )
    return {layer.module: scale for layer, scale in known if isinstance(scale, CommonScale)}


def forget_common_scales(plan: Plan) -> list[nn.Module]:
    """Restore separate scales of layers, also of those that shared one with a layer of the plan; return all."""
    scales = [layer.recipe.state.common for layer, _ in plan if layer.recipe is not None]
    modules = [m for scale in scales if scale is not None for m in scale.modules if m is not None]
    for module in modules:
        recipe = recipe_of(module)
        if recipe is not None:
            recipe.state.common = None
    return modules


def measure_common_scales(scales: dict[nn.Module, CommonScale], plan: Plan) -> None:
    """Set common scales from the amaxes of the weights that a plan is about to quantize."""
    configs = {layer.module: config for layer, config in plan}
    for scale in dict.fromkeys(scales.values()):
        modules = [module for module in scale.modules if module in configs]
        if modules and measures_tensor(configs[modules[0]].weight):
            parts = [(configs[m], local_part(m)) for m in modules if m is not None]
            scale.measure([weight_values(of, high_precision_values(part)) for of, part in parts])


def local_part(module: nn.Module) -> Any:
    """Return the weight of a linear layer, or its local shard."""
    return part_of(module.weight)  # type: ignore[arg-type]

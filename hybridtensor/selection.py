"""Which layers of a model get which recipe."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn
from torch.nn.utils import parametrize

from hybridtensor import recipes
from hybridtensor.arguments import require_choice, require_items, require_text, shown
from hybridtensor.dtensor import local
from hybridtensor.formats import Format
from hybridtensor.layers import SKIPPED_NAMES, Layer, is_of_no_layer, layers_of
from hybridtensor.linear.layer_forward import recipe_of
from hybridtensor.quantizers import IdentityQuantizer, Quantizer
from hybridtensor.recipes.config import KEEP_FACES, HybridConfig, QuantizerRole
from hybridtensor.recipes.factory import from_factory
from hybridtensor.recipes.kinds import ByType
from hybridtensor.recipes.spec import GEMMS, Gemm
from hybridtensor.recipes.words import RecipeName
from hybridtensor.subclasses import is_converted
from hybridtensor.torchao_compat import FqnToConfig


class ByName(Protocol):
    """Type of torchao's ``FqnToConfig``, which has no annotations."""

    fqn_to_config: Mapping[str, object]


Factory = Callable[[QuantizerRole], Quantizer]
Recipe: TypeAlias = RecipeName | str | HybridConfig | ByName | ByType | Factory
Filter = Callable[[nn.Module, str], bool]

Plan = list[tuple[Layer, HybridConfig]]
"""Layers and their recipes."""


def choose(
    model: nn.Module,
    recipe: Recipe,
    filter_fn: Filter | None = None,
    *,
    keep_bf16: Iterable[str] = (),
    root: str = "",
    who: str = "quantize_",
) -> Plan:
    """Return the layers that a recipe applies to, with arguments as for ``quantize_``; ``root`` is the model's name,
    ``who`` begins errors."""
    if filter_fn is not None and isinstance(recipe, FqnToConfig):
        raise ValueError(
            f"{who}: FqnToConfig selects layers itself, got a filter_fn too; give one of them"
        )
    plan = list(_plan(model, recipe, filter_fn, root, who))
    return _without(plan, keep_bf16, list(layers_of(model, root)))


def _plan(
    model: nn.Module, recipe: Recipe, filter_fn: Filter | None, root: str, who: str
) -> Iterator[tuple[Layer, HybridConfig]]:
    if isinstance(recipe, FqnToConfig):
        yield from _plan_by_name(model, recipe, root, who)
        return
    config_for = _config_source(recipe, who)
    for layer in layers_of(model, root):
        skipped = layer.why_skipped() if filter_fn is None else None
        if skipped is None and (filter_fn is None or filter_fn(layer.module, layer.name)):
            config = config_for(layer)
            if config is not None:
                yield layer, config


def _without(plan: Plan, patterns: Iterable[str], every: list[Layer]) -> Plan:
    """Return the plan without the layers that ``patterns`` match; each pattern must match one, and none a layer that an
    earlier call quantized."""
    if isinstance(patterns, str):
        raise TypeError(
            f"quantize_: keep_bf16 is a list of names, got the string {patterns!r}; put it in a list"
        )
    for pattern in require_items("quantize_", "a list of names as keep_bf16", patterns):
        require_text("quantize_", **{"a name in keep_bf16": pattern})
        kept = [layer for layer in every if _is_named(layer.name, pattern)]
        if not kept:
            names = ", ".join(layer.name or "<root>" for layer, _ in plan) or "none"
            raise ValueError(
                f"quantize_: keep_bf16 must name a layer, got {pattern!r}; layers to convert are: {names}"
            )
        for layer in kept:
            _require_plain(layer)
        plan = [step for step in plan if not _is_named(step[0].name, pattern)]
    return plan


def _require_plain(layer: Layer) -> None:
    """Raise ValueError for a layer to keep in high precision that is quantized."""
    now = layer.recipe
    if now is not None and any(is_quantized(now.config.formats(gemm)) for gemm in GEMMS):
        raise ValueError(
            f"quantize_: keep_bf16 must name layers in high precision, got {layer.name or '<root>'}, which has the "
            f"recipe {now.config}; make it plain first (plain_), or give it the recipe bf16 (set_config_)"
        )


def _is_named(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a layer, or a module that contains it."""
    return any(fnmatch.fnmatchcase(name, p) for p in (pattern, f"{pattern}.*"))


_LEFT_ALONE = "_hybridtensor_left_alone"


def with_layouts(plan: Plan, patterns: Iterable[str]) -> Plan:
    """Return the plan with the experts that ``patterns`` match marked as transposed; each must match one."""
    for pattern in require_items("quantize_", "a list of names as transposed", patterns):
        require_text("quantize_", **{"a name in transposed": pattern})
        named = [
            layer
            for layer, _ in plan
            if layer.is_stack and fnmatch.fnmatchcase(layer.name, pattern)
        ]
        if not named:
            stacks = ", ".join(layer.name for layer, _ in plan if layer.is_stack) or "none"
            raise ValueError(
                f"quantize_: transposed must name experts, got {pattern!r}; experts to convert are: {stacks}"
            )
        plan = [
            (layer._replace(transposed=True) if layer in named else layer, config)
            for layer, config in plan
        ]
    return plan


def keeping(plan: Plan, keep_faces: str | None) -> Plan:
    """Return the plan with ``keep_faces`` set in recipes that quantize weights; None changes nothing."""
    if keep_faces is None:
        return plan
    require_choice("quantize_", "keep_faces", keep_faces, KEEP_FACES)
    return [
        (layer, config)
        if config.weight == IdentityQuantizer()
        else (layer, dataclasses.replace(config, keep_faces=keep_faces))
        for layer, config in plan
    ]


def mark_left_alone(layers: Iterable[Layer], plan: Plan) -> None:
    """Record on modules which convertible ``layers`` the caller left out of the plan."""
    chosen = {layer.name for layer, _ in plan}
    for layer in layers:
        if layer.name not in chosen and layer.why_skipped() is None:
            known = layer.module.__dict__.get(_LEFT_ALONE, frozenset())
            layer.module.__dict__[_LEFT_ALONE] = known | {layer.parameter}


def forget_left_alone(module: nn.Module) -> None:
    """Forget which layers the caller left out."""
    module.__dict__.pop(_LEFT_ALONE, None)


def is_left_alone(layer: Layer) -> bool:
    """Return whether the caller of ``quantize_`` left out a layer."""
    return layer.parameter in layer.module.__dict__.get(_LEFT_ALONE, ())


def _config_source(recipe: Recipe, who: str) -> Callable[[Layer], HybridConfig | None]:
    """Return a function from a layer to its config, for any recipe but ``FqnToConfig``."""
    if isinstance(recipe, (str, HybridConfig)):
        config = recipes.from_name(recipe) if isinstance(recipe, str) else recipe
        return lambda layer: config
    if isinstance(recipe, ByType):
        return lambda layer: getattr(recipe, layer.kind)
    for name, function in recipes.RECIPES.items():
        if recipe is function:
            raise TypeError(
                f"{who}: a recipe is required, got the function recipes.{name}, which makes one; call it"
            )
    if callable(recipe) and not isinstance(recipe, (type, Quantizer, nn.Module)):
        factory: Factory = recipe
        return lambda layer: _of_factory(factory, layer, who)
    raise TypeError(
        f"{who}: a recipe name, HybridConfig, FqnToConfig, recipes.by_type or factory is required, "
        f"got {shown(recipe)}; HybridConfig(input=, weight=, grad_output=) makes a config of quantizers"
    )


def _of_factory(factory: Factory, layer: Layer, who: str) -> HybridConfig:
    """Call a factory, once per expert; raise ValueError if experts of one stack get different recipes."""
    if not layer.is_stack:
        return from_factory(factory, layer.name)
    count = layer.weight.shape[0]
    made = [from_factory(factory, f"{layer.name}[{i}]", layer.kind) for i in range(count)]
    for i, config in enumerate(made):
        if config != made[0]:
            raise ValueError(
                f"{who}: one recipe for all experts of {layer.name} is required, got {made[0]} for "
                f"{layer.name}[0] and {config} for {layer.name}[{i}]; give experts of other recipes "
                "a stack of their own"
            )
    return made[0]


def _plan_by_name(
    model: nn.Module, recipe: FqnToConfig, root: str, who: str
) -> Iterator[tuple[Layer, HybridConfig]]:
    """Apply torchao's precedence: parameter name, module name, parameter pattern, module pattern, ``_default``."""
    rules: dict[str, object] = dict(recipe.fqn_to_config)
    used = set()
    for layer in layers_of(model, root):
        matches = matching(rules, layer.parameter_name, layer.name, who=who)
        if not matches and "_default" in rules and layer.why_skipped() is None:
            matches = ["_default"]
        used.update(matches)
        rule = rules[matches[0]] if matches else None
        if rule is not None:
            if not isinstance(rule, (str, HybridConfig)):
                raise TypeError(
                    f"{who}: FqnToConfig must name a HybridConfig or None, got {shown(rule)} for {matches[0]}"
                )
            yield layer, recipes.from_name(rule) if isinstance(rule, str) else rule
    unused = [key for key in rules if key not in used and key != "_default"]
    if unused:
        raise ValueError(
            f"{who}: FqnToConfig keys must match a layer, got {', '.join(unused)} matching none"
        )


def matching(rules: Iterable[str], *names: str, who: str = "quantize_") -> list[str]:
    """Return the matching keys of ``FqnToConfig``, by precedence."""
    keys = list(rules)
    patterns = {key: _pattern(key, who) for key in keys if key.startswith("re:")}
    # In the order of ``names``, from the parameter to the module, not in that of the rules: so
    # torchao resolves them.
    exact = [name for name in names if name in keys and name not in patterns]
    return exact + [key for name in names for key, p in patterns.items() if p.fullmatch(name)]


@functools.cache
def _pattern(key: str, who: str) -> re.Pattern[str]:
    """Compile the regular expression after ``re:``; raise ValueError if it is invalid."""
    try:
        return re.compile(key[3:])
    except re.error as error:
        raise ValueError(
            f"{who}: a regular expression is required after 're:' in FqnToConfig, got {key!r}: "
            f"{error}"
        ) from None


class PlainMatrix(NamedTuple):
    """A large matrix left in high precision; ``deliberate`` if by ``quantize_``'s defaults or its caller."""

    name: str
    shape: tuple[int, ...]
    why: str
    deliberate: bool


class Coverage(NamedTuple):
    """How much of a model is quantized: of parameters, and of products of a training step."""

    parameters: float
    products: float
    plain: tuple[PlainMatrix, ...]

    def __str__(self) -> str:
        return (
            f"quantized: {self.parameters:.1%} of the parameters, {self.products:.1%} of the "
            "multiplications of a token that meets every matrix once"
        )


# Biases of experts, and embeddings of positions, are matrices, too
_ADDED = re.compile(r"bias$|(^|(?<!rel)_)pos(ition(al|s)?)?_?emb(ed(ding)?s?)?(_|$)")
_LARGE = 1000  # a matrix with this part of the parameters, or more


def products_of(*, is_frozen: bool) -> tuple[Gemm, ...]:
    """Return the products of a training step with a weight: of a frozen one no ``grad_weight`` runs."""
    return tuple(gemm for gemm in GEMMS if not is_frozen or gemm.name != "grad_weight")


def is_frozen(weight: Tensor) -> bool:
    """Return whether a weight is a parameter that asks for no gradient."""
    return isinstance(weight, nn.Parameter) and not weight.requires_grad


def coverage(model: nn.Module) -> Coverage:
    """Return the quantized share of a model, and the large plain matrices."""
    sizes: dict[int, int] = {}
    matrices: dict[int, tuple[nn.Parameter, HybridConfig | None, PlainMatrix]] = {}
    layers = list(layers_of(model))
    stacks = {id(layer.weight): layer for layer in layers if layer.is_stack}
    linears = {layer.module: layer for layer in layers if not layer.is_stack}
    parametrized = _parametrized(model)
    for path, holder in model.named_modules():
        owner, module = parametrized.get(holder, (path, holder))
        for name, parameter in holder._parameters.items():
            if parameter is None or nn.parameter.is_lazy(parameter):  # the latter has no size yet
                continue
            sizes[id(parameter)] = parameter.numel()
            lookup = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            if parameter.dim() >= 2 and not lookup and _ADDED.search(name) is None:
                full = f"{path}.{name}" if path else name
                layer = stacks.get(id(parameter)) or linears.get(module)
                why = _why_plain(owner, module, layer, name, tuple(parameter.shape))
                left = PlainMatrix(full, tuple(parameter.shape), *why)
                config = _config_of(module, name, parameter)
                matrices.setdefault(id(parameter), (parameter, config, left))
    total = sum(sizes.values())
    parameters = products = every = 0
    for parameter, config, _ in matrices.values():
        # A weight takes part in products of equally many multiplications.
        gemms, size = products_of(is_frozen=is_frozen(parameter)), parameter.numel()
        every += size * len(gemms)
        if config is not None:
            low = [is_quantized(config.formats(gemm)) for gemm in gemms]
            parameters += size * low[0]
            products += size * sum(low)
    plain = [
        m for p, config, m in matrices.values() if config is None and p.numel() * _LARGE >= total
    ]
    return Coverage(parameters / max(total, 1), products / max(every, 1), tuple(plain))


def is_quantized(formats: tuple[Format, Format]) -> bool:
    """Return whether a product has at least one operand that is not in high precision."""
    return not all(fmt.is_identity for fmt in formats)


def _config_of(module: nn.Module, name: str, parameter: Tensor) -> HybridConfig | None:
    part = local(parameter)
    if is_converted(part):
        return None if is_of_no_layer(part) else part.config
    # Of a layer that is pruned or parametrized the weight is computed; its adapters have names of their own
    recipe = recipe_of(module) if name.startswith(("weight", "original")) else None
    return None if recipe is None else recipe.config


def _parametrized(model: nn.Module) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Return the owners of parametrized weights, by name and as modules."""
    return {
        module.parametrizations["weight"]: (name, module)
        for name, module in model.named_modules()
        if parametrize.is_parametrized(module, "weight")
    }


def _why_plain(
    name: str, module: nn.Module, layer: Layer | None, matrix_name: str, shape: tuple[int, ...]
) -> tuple[str, bool]:
    """Return why a matrix is not quantized, and whether that was decided deliberately."""
    if layer is not None:
        reason = layer.why_skipped()
        if layer.is_stack:
            return reason or "not chosen", reason is None
        by_name = reason == SKIPPED_NAMES["gate"]  # a large one is hardly a router's
        return reason or "not chosen", not by_name
    router = SKIPPED_NAMES.get(name.rpartition(".")[2])
    if router is not None:
        return router, True
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention computes with its weight below autograd", False
    if matrix_name == "weight" and len(shape) == 2:
        advice = (
            "; if it multiplies by its weight, its class says is_transposed = False of a weight [out, in], or True of "
            "one [in, out]"
        )
        return f"{type(module).__name__} is no nn.Linear{advice}", False
    return f"{type(module).__name__} is no nn.Linear", False

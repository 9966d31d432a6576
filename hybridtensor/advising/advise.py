"""Choose a recipe for each layer of a model: the cheapest one that makes no more error than asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hybridtensor import costs
from hybridtensor.advising.choosing import FormatOption, Step, cheapest, curve
from hybridtensor.advising.measuring import Batch, Product, measure
from hybridtensor.arguments import (
    own_loss,
    require_function,
    require_items,
    require_loss,
    require_module,
    require_number,
    require_text,
    wrong,
)
from hybridtensor.costs import CostTable
from hybridtensor.explanation.folding import in_short
from hybridtensor.printed import Printed, add_row, named_table
from hybridtensor.recipes.config import HybridConfig
from hybridtensor.recipes.spec import GEMMS
from hybridtensor.torchao_compat import FqnToConfig

if TYPE_CHECKING:
    from rich.console import Group

PLAIN = "bf16"
FORMATS = (PLAIN, "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")
_SHOWN = 12


@dataclass(frozen=True)
class AdvisedProduct:
    """One product of one layer, and what was chosen for it.

    Attributes:
        layer: Fully qualified name; of experts, that of their stack.
        gemm: ``output``, ``grad_input`` or ``grad_weight``.
        format: The spec of its format.
        noise: Relative squared error of the product, by spec.
        weight: What this noise counts by in the error of a recipe; see ``hybridtensor.advising.measuring``.
        share: Share in the operations of all products.
    """

    layer: str
    gemm: str
    format: str
    noise: dict[str, float]
    weight: float
    share: float


class CurvePoint(NamedTuple):
    """A recipe by cost and error.

    Attributes:
        cost: Time of all products over that in BF16, by the table of costs.
        error: See ``hybridtensor.advising.measuring``.
        name: ``advised``, or the spec that all layers have; "" between.
    """

    cost: float
    error: float
    name: str


@dataclass(frozen=True, repr=False)
class Advice(Printed):
    """The recipe that ``advise`` found, with its error, cost and alternatives.

    Attributes:
        recipe: A config for each layer, for ``quantize_``; None leaves a layer in high precision.
        cost: Time of all products over that in BF16, by the table of costs.
        error: Error of the recipe; see ``hybridtensor.advising.measuring``.
        budget: The error that was allowed.
        table: The products, in the order of the forward.
        curve: Error over cost: what can be had, and the recipes that are the same everywhere.
        hardware: The table of costs.
    """

    recipe: FqnToConfig
    cost: float
    error: float
    budget: float
    table: tuple[AdvisedProduct, ...]
    curve: tuple[CurvePoint, ...]
    hardware: CostTable

    @property
    def specs(self) -> dict[str, str]:
        """The spec of each layer."""
        return {layer: _spec([row.format for row in rows]) for layer, rows in _by_layer(self.table)}

    def __rich__(self) -> Group:
        from rich.console import Group

        chosen = named_table("recipe", "layers", title=f"Advised for {self.hardware}")
        by_spec: dict[str, list[str]] = {}
        for layer, spec in self.specs.items():
            by_spec.setdefault(spec, []).append(layer)
        for spec, layers in sorted(by_spec.items(), key=lambda one: -len(one[1])):
            add_row(chosen, spec, in_short(layers, self.specs))
        points = named_table("everywhere", "time / BF16", "error")
        for point in sorted((p for p in self.curve if p.name), key=lambda p: p.cost):
            add_row(points, point.name, f"{point.cost:.3f}", f"{point.error:.3g}")
        worst = named_table("costs most", "product", "format", "share of error")
        rows = sorted(self.table, key=lambda row: -row.weight * row.noise[row.format])
        for row in rows[: min(_SHOWN, len(rows))]:
            share = row.weight * row.noise[row.format] / self.error if self.error else 0.0
            add_row(worst, row.layer, row.gemm, row.format, f"{share:.1%}")
        return Group(chosen, points, worst)


def advise(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    formats: Iterable[str] = FORMATS,
    budget: str | float = "fp8",
    hardware: str | CostTable | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> Advice:
    """Measure what each format does to each product of a model, and choose a recipe for each layer: the
    cheapest one whose error is within the budget.

    The model runs as it is, once per batch, forward and backward; gradients, buffers and torch's generators
    are as before afterwards. Layers that ``quantize_`` would leave alone are left alone. Of experts all that have
    tokens are measured, one after the other; a stack has one recipe.

    ::

        advice = ht.advise(model, batches, budget="fp8", hardware="b200", loss=lambda m, b: m(b).loss)
        ht.quantize_(model, advice.recipe)

    Args:
        model: In high precision, or with the recipe ``bf16``: the noise of others would count, too.
        batches: A few batches like those of training.
        formats: Specs of which each product may have one, without state (delayed scales).
        budget: The error that is allowed: that of a spec everywhere, or a number of the same measure.
        hardware: The name of a table of costs (``"h200"``, ``"h100"``, ``"b200"``), or a table; None measures the
            present GPU.
        loss: ``(model, batch)`` to a scalar. By default the model is called with the batch (a dictionary gives
            its arguments) and returns it, or something that has it as an attribute or entry ``loss``.

    Raises:
        TypeError: If an argument is of the wrong kind, the loss no real scalar, or a weight not bf16, fp16 or fp32.
        ValueError: If there is no batch, a layer is quantized or on the meta device, no layer ran, products or
            gradients are all zeros, a spec is unknown or has state, the budget cannot be met, there is no GPU to
            measure, or no table of the hardware.
        NotImplementedError: If the model is sharded, or multiplies experts in ways that are not intercepted.
    """
    require_module("advise", model)
    require_function("advise", "loss", loss)
    given = require_items("advise", "a list of batches", batches)
    if not given:
        raise ValueError("advise: batches is empty; pass at least one batch")
    specs = _checked_formats(formats)
    if isinstance(budget, str):
        _config("budget", budget)
    else:
        require_number("advise", budget=budget)
    prices = _prices(hardware)
    measured = list(dict.fromkeys([*specs, *([budget] if isinstance(budget, str) else [])]))
    products = measure(model, given, measured, _checked(loss or _default_loss))
    if not products:
        raise ValueError(
            "advise: no linear layer of the model ran; explain(model) lists those that can be quantized"
        )
    allowed = float(budget) if not isinstance(budget, str) else _error_of(products, budget)
    options = _options(products, specs, prices)
    steps = curve(options)
    best = _within(allowed, options, steps, specs)
    return _advice(products, specs, best, allowed, steps, options, prices)


def _within(
    allowed: float, options: list[list[FormatOption]], steps: list[Step], specs: list[str]
) -> Step:
    """Return the cheapest choice whose error is at most ``allowed``; raise ValueError if there is none."""
    best = cheapest(options, steps, allowed)
    if best is None:
        raise ValueError(
            f"advise: a budget of at least {steps[-1].error:.3g} is required with {', '.join(specs)}, got "
            f"{allowed:.3g}; allow {PLAIN!r}, too"
        )
    return best


def _checked_formats(formats: Iterable[str]) -> list[str]:
    specs = require_items("advise", "a list of specs as formats", formats)
    if not specs:
        raise ValueError("advise: formats is empty; pass at least one spec")
    for spec in specs:
        _config("format", spec)
    return list(dict.fromkeys(specs))


def _config(what: str, spec: object) -> HybridConfig:
    """Return the recipe of a spec; raise ValueError if it has state, or products of several formats."""
    require_text("advise", **{f"a {what}": spec})
    config = HybridConfig.parse(str(spec))
    if "/" in str(spec):
        raise ValueError(f"advise: one format for all products is required as {what}, got {spec!r}")
    if config.delayed_rules():
        raise ValueError(
            f"advise: a {what} without delayed scales is required, got {spec!r}, which knows none yet"
        )
    return config


def _prices(hardware: object) -> CostTable:
    if isinstance(hardware, CostTable):
        return hardware
    if hardware is None:
        if not torch.cuda.is_available():
            known = ", ".join(costs.TABLES)
            raise ValueError(
                f"advise: there is no GPU to measure costs on; pass hardware as one of {known}"
            )
        return costs.measure("cuda")
    if not isinstance(hardware, str):
        raise wrong(
            "advise", "the name of a table of costs, a CostTable or None as hardware", hardware
        )
    return costs.table(hardware)


def _default_loss(model: nn.Module, batch: object) -> object:
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    return out if isinstance(out, Tensor) else own_loss(out)


def _checked(loss: Callable[[nn.Module, Batch], object]) -> Callable[[nn.Module, Batch], Tensor]:
    """Return a function that returns a loss, which is one number."""

    def run(model: nn.Module, batch: Batch) -> Tensor:
        return require_loss("advise", loss(model, batch), "pass loss, which returns one")

    return run


def _together(products: list[Product]) -> dict[tuple[str, str], list[Product]]:
    """Return the products that get one format: those of layers with one weight, which have one recipe."""
    groups: dict[tuple[str, str], list[Product]] = {}
    for p in products:
        groups.setdefault(_group_of(p), []).append(p)
    return groups


def _group_of(product: Product) -> tuple[str, str]:
    owner = product.layer if product.tied_to is None else product.tied_to
    return owner, product.gemm


def _options(
    products: list[Product], specs: list[str], prices: CostTable
) -> list[list[FormatOption]]:
    """List the formats that fit each group of products, each with its error and its share of the cost of all."""
    every = sum(product.operations for product in products)
    gemms = {gemm.name: gemm for gemm in GEMMS}
    cost = {
        (spec, name): prices.cost(HybridConfig.parse(spec).formats(gemm))
        for spec in specs
        for name, gemm in gemms.items()
    }
    made = []
    for (layer, gemm), group in _together(products).items():
        fitting = [spec for spec in specs if all(spec in p.noise for p in group)]
        if not fitting:
            raise ValueError(
                f"advise: layer {layer} fits none of {', '.join(specs)}; allow {PLAIN}, too"
            )
        share = sum(p.operations for p in group) / every
        made.append(
            [
                FormatOption(spec, cost[spec, gemm] * share, sum(p.error(spec) for p in group))
                for spec in fitting
            ]
        )
    return made


def _error_of(products: list[Product], spec: str) -> float:
    """Return the error of one spec for all layers; layers that it does not fit stay in high precision."""
    return sum(p.error(spec) for p in products if spec in p.noise)


def _advice(
    products: list[Product],
    specs: list[str],
    best: Step,
    allowed: float,
    steps: list[Step],
    options: list[list[FormatOption]],
    prices: CostTable,
) -> Advice:
    every = sum(product.operations for product in products)
    formats = dict(zip(_together(products), best.choice, strict=True))
    table = tuple(
        AdvisedProduct(
            p.layer, p.gemm, formats[_group_of(p)], p.noise, p.weight, p.operations / every
        )
        for p in products
    )
    points = [CurvePoint(step.cost, step.error, "") for step in steps]
    for spec in specs:
        known = [{option.fmt: option for option in of_product} for of_product in options]
        chosen = [of_product.get(spec, of_product.get(PLAIN)) for of_product in known]
        if None not in chosen:
            total = [option for option in chosen if option is not None]
            points.append(CurvePoint(sum(o.cost for o in total), sum(o.error for o in total), spec))
    points.append(CurvePoint(best.cost, best.error, "advised"))
    recipe = {
        layer: None
        if all(row.format == PLAIN for row in rows)
        else HybridConfig.parse(_spec([r.format for r in rows]))
        for layer, rows in _by_layer(table)
    }
    found = FqnToConfig(recipe)
    return Advice(found, best.cost, best.error, allowed, table, tuple(points), prices)


def _by_layer(table: Iterable[AdvisedProduct]) -> list[tuple[str, list[AdvisedProduct]]]:
    return [
        (layer, list(rows)) for layer, rows in itertools.groupby(table, key=lambda row: row.layer)
    ]


def _spec(formats: list[str]) -> str:
    """Return the spec of a layer whose three products have these formats, with the modifiers that all formats
    accept."""
    if len(set(formats)) == 1:
        return formats[0]
    parts = [fmt.split("+") for fmt in formats]
    words = [part[0] for part in parts]
    spec = words[0] if len(set(words)) == 1 else "/".join(words)
    for modifier in dict.fromkeys(itertools.chain.from_iterable(part[1:] for part in parts)):
        wider = f"{spec}+{modifier}"
        spec = wider if _is_spec(wider) else spec
    return spec


def _is_spec(text: str) -> bool:
    try:
        HybridConfig.parse(text)
    except ValueError:
        return False
    return True

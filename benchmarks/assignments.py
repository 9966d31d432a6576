"""Recipes that differ from layer to layer: what was advised, others of the same cost, and what they do to gradients."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from losses.training import loss_of
from torch import Tensor, nn
from torchao.quantization import FqnToConfig

import hybridtensor as ht
from hybridtensor import HybridConfig
from hybridtensor.advising import Advice, AdvisedProduct
from hybridtensor.costs import CostTable
from hybridtensor.recipes.spec import GEMMS

BITS = {"bf16": 16, "nvfp4": 4}  # others have 8
OUTLIER = 16.0  # times the norm of the layer's weight
MARGINS = (1.001, 1.01, 1.1, 2.0)  # to the last nobody comes

Batch = tuple[Tensor, Tensor]


def bits(fmt: str) -> int:
    """Return how many bits the elements of a format have."""
    return BITS.get(fmt, 8)


def uniform_cost(spec: str, prices: CostTable) -> float:
    """Return what a format costs that all products have."""
    config = HybridConfig.parse(spec)
    return sum(prices.cost(config.formats(gemm)) for gemm in GEMMS) / len(GEMMS)


def advised_at(wanted: Sequence[float], advise: Callable[..., Advice]) -> dict[float, Advice]:
    """Return, for some costs, the advice of least error that costs at most as much.

    The curve of a first advice has the error of each cost, and another one allows this error, and a little more: what
    is measured on a GPU may differ by its last bits from one time to the next.

    Args:
        wanted: Costs over BF16.
        advise: Takes a budget.

    Raises:
        ValueError: If nothing costs so little.
    """
    curve = [point for point in advise(budget="fp8").curve if not point.name]
    made = {}
    for cost in wanted:
        errors = [point.error for point in curve if point.cost <= cost + 1e-9]
        if not errors:
            raise ValueError(f"--costs: at least {min(point.cost for point in curve):.3g} is required, got {cost:g}")
        tried = (advise(budget=margin * min(errors)) for margin in MARGINS)
        made[cost] = next(one for one in tried if one.cost <= cost + 1e-9)
    return made


def shuffled(table: Sequence[AdvisedProduct], draws: random.Random) -> list[str]:
    """Return the formats of a table, in another order among products of one share: of exactly equal cost."""
    formats = [row.format for row in table]
    alike: dict[float, list[int]] = {}
    for i, row in enumerate(table):
        alike.setdefault(row.share, []).append(i)
    for places in alike.values():
        drawn = [formats[i] for i in places]
        draws.shuffle(drawn)
        for i, fmt in zip(places, drawn, strict=True):
            formats[i] = fmt
    return formats


def predicted(table: Sequence[AdvisedProduct], formats: Sequence[str]) -> float:
    """Return the error of formats, as ``advise`` has it."""
    return sum(row.weight * row.noise[fmt] for row, fmt in zip(table, formats, strict=True))


def recipe_of(table: Sequence[AdvisedProduct], formats: Sequence[str]) -> FqnToConfig:
    """Return the recipe that gives formats to the products of a table."""
    of_layers: dict[str, list[str]] = {}
    for row, fmt in zip(table, formats, strict=True):
        of_layers.setdefault(row.layer, []).append(fmt)
    plain = {"bf16"}
    rules = {name: None if set(of) == plain else HybridConfig.parse("/".join(of)) for name, of in of_layers.items()}
    return FqnToConfig(rules)


@contextlib.contextmanager
def planted(model: nn.Module, place: str | None) -> Iterator[nn.Module]:
    """Have one weight of a layer be an outlier meanwhile, so large that it matters in a layer of any size; without a
    layer, none.
    """
    if place is None:
        yield model
        return
    weight = model.get_submodule(place).weight
    before = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[5, 7] = OUTLIER * weight.norm()
        yield model
    finally:
        with torch.no_grad():
            weight.copy_(before)


def places(advice: Advice, count: int = 3) -> list[str]:
    """Return layers to plant outliers in, far from each other: of those whose output is multiplied in four bits, which
    alone can become wider by that, if there are enough.
    """
    outputs = [row for row in advice.table if row.gemm == "output"]
    narrow = [row.layer for row in outputs if bits(row.format) == 4]
    found = narrow if len(narrow) >= count else [row.layer for row in outputs]
    return [found[i * (len(found) - 1) // max(1, count - 1)] for i in range(count)]


def gradients(model: nn.Module, batch: Batch, *, exact: bool = False) -> list[Tensor]:
    """Return the gradients of all parameters, of a model that computes in BF16, or ``exact``: in fp32."""
    model.zero_grad()
    loss = model(*batch) if exact else loss_of(model, batch)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def gradient_error(model: nn.Module, recipe: Any, batch: Batch, exact: Sequence[Tensor]) -> float:
    """Return by how many percent the gradient by a recipe is off, over all parameters.

    Args:
        model: In high precision; it stays as it is.
        recipe: As ``quantize_`` takes it; None for the plain model.
        batch: Of which.
        exact: What the gradient should be.
    """
    copied = copy.deepcopy(model)
    if recipe is not None:
        ht.quantize_(copied, recipe)
    got = gradients(copied, batch)
    off = torch.stack([(a - b).square().sum() for a, b in zip(got, exact, strict=True)]).sum()
    return 100 * float((off / torch.stack([b.square().sum() for b in exact]).sum()).sqrt())

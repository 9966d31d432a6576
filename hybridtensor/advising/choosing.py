"""The cheapest formats of all products whose errors add up to no more than a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Choice = tuple[str, ...]
"""A format for each product."""


class FormatOption(NamedTuple):
    """A format of one product (a spec), its cost, and its contribution to the error."""

    fmt: str
    cost: float
    error: float


class Step(NamedTuple):
    """A point of the curve: cost and error of all products, and the format chosen for each."""

    cost: float
    error: float
    choice: Choice


def frontier(options: Sequence[FormatOption]) -> list[FormatOption]:
    """Return the lower convex hull of cost and error, cheapest first."""
    hull: list[FormatOption] = []
    for option in sorted(options, key=lambda one: (one.cost, one.error)):
        if hull and option.error >= hull[-1].error:  # as of all others of equal cost
            continue
        while len(hull) > 1 and _gain(hull[-1], option) >= _gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _gain(before: FormatOption, after: FormatOption) -> float:
    return (before.error - after.error) / (after.cost - before.cost)


def curve(products: Sequence[Sequence[FormatOption]]) -> list[Step]:
    """Return choices from the cheapest to the most exact: each step changes the product that removes most error per
    cost."""
    hulls = [frontier(options) for options in products]
    changes = [
        (-_gain(hull[level - 1], hull[level]), product, level)
        for product, hull in enumerate(hulls)
        for level in range(1, len(hull))
    ]
    chosen = [hull[0] for hull in hulls]
    steps = [_step(chosen)]
    # Within a product gains fall, so that levels come in order
    for _, product, level in sorted(changes):
        chosen[product] = hulls[product][level]
        steps.append(_step(chosen))
    return steps


def _step(chosen: Sequence[FormatOption]) -> Step:
    return Step(
        sum(o.cost for o in chosen), sum(o.error for o in chosen), tuple(o.fmt for o in chosen)
    )


def cheapest(
    products: Sequence[Sequence[FormatOption]], steps: Sequence[Step], budget: float
) -> Step | None:
    """Return the cheapest choice found with an error of at most ``budget``, or None: a point of the curve, refined
    greedily."""
    first = next((step for step in steps if step.error <= budget), None)
    if first is None:
        return None
    by_name: list[Mapping[str, FormatOption]] = [
        {option.fmt: option for option in options} for options in products
    ]
    chosen = [known[fmt] for known, fmt in zip(by_name, first.choice, strict=True)]
    left = budget - sum(option.error for option in chosen)
    # The hull leaves out choices between its points: what is left of the budget is spent where the
    # least error saves the most cost.
    cheaper = sorted(
        (
            ((option.error - mine.error) / (mine.cost - option.cost), product, option)
            for product, mine in enumerate(chosen)
            for option in products[product]
            if option.cost < mine.cost
        ),
        key=lambda one: one[:2],
    )
    for _, product, option in cheaper:
        extra = option.error - chosen[product].error
        if option.cost < chosen[product].cost and extra <= left:
            chosen[product] = option
            left -= extra
    return _step(chosen)

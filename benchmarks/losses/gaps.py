"""What differences of losses are worth: how far recipes are above BF16, and how well that is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from losses.files import Record
from losses.recipes import BASELINE, REPLICAS

GOAL = 0.08  # percent: the standard error of a gap that tells recipes apart

Figure = Callable[[Record], float]


def last_tenth(record: Record) -> float:
    """Return the mean training loss over the last tenth of the steps."""
    count = max(1, len(record["losses"]) // 10)
    return float(sum(record["losses"][-count:]) / count)


def held_out(record: Record) -> float:
    """Return the loss on held-out text."""
    return float(record["validation"])


def gradient_norm(record: Record) -> float:
    """Return the mean norm of the gradient over the last tenth of the steps, before clipping."""
    count = max(1, len(record["norms"]) // 10)
    return float(sum(record["norms"][-count:]) / count)


def recipe_of(record: Record) -> str:
    """Return what a run was trained by: disturbed replicas are more runs by BF16."""
    return BASELINE if record["recipe"] in REPLICAS else str(record["recipe"])


class Gap(NamedTuple):
    """How far a recipe is above BF16.

    Attributes:
        percent: By least squares over all runs; NaN if a run of the recipe is no number.
        error: Its standard error in scatters of one run.
        of_runs: The gap of each run, without what all runs of its seed have in common, percent.
    """

    percent: float = math.nan
    error: float = math.nan
    of_runs: tuple[float, ...] = ()


class Fit(NamedTuple):
    """A figure of all runs as a product of what the recipe makes of it, what the seed does, and chance.

    Runs of a seed share weights and batches. What is left to chance is mostly how far training runs drift apart that
    once differed by a rounding, which is alike for all recipes, so that its size is known from all of them.

    Attributes:
        base: The figure of BF16, geometric mean over seeds.
        gaps: By recipe.
        scatter: Standard deviation of what is left to chance in one run, percent; NaN if it cannot be told.
        freedom: Degrees of freedom that it is known with.
    """

    base: float
    gaps: dict[str, Gap]
    scatter: float
    freedom: int


def fit(records: Sequence[Record], figure: Figure = last_tenth) -> Fit:
    """Return what runs say of recipes: of seeds of which BF16 is finished, those whose figure is a number."""
    known = [record for record in records if math.isfinite(figure(record))]
    seeds = sorted({record["seed"] for record in known if record["recipe"] == BASELINE})
    known = [record for record in known if record["seed"] in seeds]
    recipes = list(dict.fromkeys([BASELINE, *map(recipe_of, known)]))
    rows = [(recipes.index(recipe_of(record)), len(recipes) + seeds.index(record["seed"])) for record in known]
    terms = torch.zeros(len(known), len(recipes) + len(seeds), dtype=torch.float64)
    terms[torch.arange(len(known))[:, None], torch.tensor(rows, dtype=torch.long).reshape(-1, 2)] = 1
    logs = torch.tensor([math.log(figure(record)) for record in known], dtype=torch.float64)
    inverse = terms.pinverse()
    found = inverse @ logs
    chance = logs - terms @ found
    made = dict.fromkeys(map(recipe_of, records), Gap())
    diverged = {recipe_of(record) for record in records if not math.isfinite(figure(record))} - {BASELINE}
    for at, recipe in enumerate(recipes if seeds else ()):
        if recipe not in diverged:
            above = found[at] - found[0]
            own = terms[:, at] == 1
            error = float((inverse[at] - inverse[0]).norm())
            made[recipe] = Gap(_percent(above), error, tuple(map(_percent, above + chance[own])))
    freedom = len(known) - (len(recipes) + len(seeds) - 1)
    scatter = 100 * math.sqrt(float(chance.square().sum()) / freedom) if seeds and freedom else math.nan
    return Fit(float((found[0] + found[len(recipes) :].mean()).exp()), made, scatter, freedom)


def _percent(log: Tensor) -> float:
    """Return by how many percent a number is above 1."""
    return 100 * math.expm1(float(log))


class Estimate(NamedTuple):
    """A gap, in percent.

    Attributes:
        mean: Over seeds.
        error: Its standard error; None where chance cannot be told from recipes.
        low: Lower end of the 95 % interval.
        high: Upper end.
        more: Seeds that are missing for a standard error of ``GOAL``, each with all the runs that there are of a seed.
    """

    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None
    more: int | None = None


def estimate(gap: Gap, found: Fit) -> Estimate:
    """Return what is known of a gap."""
    error = gap.error * found.scatter
    if not math.isfinite(error):
        return Estimate(gap.percent)
    half, seeds = t_quantile(found.freedom) * error, len(gap.of_runs)
    more = max(0, math.ceil(seeds * (error / GOAL) ** 2) - seeds)
    return Estimate(gap.percent, error, gap.percent - half, gap.percent + half, more)


def verdict(found: Estimate, allowed: float) -> str:
    """Return ``within`` or ``above`` the allowance, where the whole interval is, else ``open``; a loss that is not a
    number is above.
    """
    if math.isnan(found.mean):
        return "above"
    if found.low is None or found.high is None:
        return "open"
    return "within" if found.high <= allowed else "above" if found.low > allowed else "open"


_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 97.5 %, of 1 to 30 degrees of freedom."""


def t_quantile(freedom: int) -> float:
    """Return how many standard errors a 95 % interval reaches to each side."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    return 1.95996 + 2.3723 / freedom + 2.8225 / freedom**2  # the first terms of its expansion


def _speed(own: Sequence[Record], records: Sequence[Record]) -> float | None:
    """Return tokens per second of the fastest run on a device that ran the baseline; None if there is none."""
    known = {record["environment"]["device"] for record in records if recipe_of(record) == BASELINE}
    speeds = [r["tokens_per_second"] for r in own if r["environment"]["device"] in known]
    return max(speeds, default=None)


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row per recipe, in the order of the records."""
    seeds = {record["seed"] for record in records if record["recipe"] == BASELINE}
    records = [record for record in records if record["seed"] in seeds]
    on_text, on_held_out, of_norms = fit(records), fit(records, held_out), fit(records, gradient_norm)
    made = []
    for recipe, gap in on_text.gaps.items():
        own = [record for record in records if recipe_of(record) == recipe]
        is_base, allowed = recipe == BASELINE, own[0]["allowed %"]
        found = Estimate(gap.percent) if is_base else estimate(gap, on_text)
        made.append(
            {
                "recipe": recipe,
                "runs": len(own),
                "loss": on_text.base * (1 + gap.percent / 100),
                "gap %": found.mean,
                "noise %": found.error,
                "low %": found.low,
                "high %": found.high,
                "validation gap %": on_held_out.gaps[recipe].percent,
                "gradient norm gap %": of_norms.gaps[recipe].percent,
                "allowed %": allowed,
                "verdict": "within" if is_base else verdict(found, allowed),
                "more seeds": found.more,
                "tokens/s": _speed(own, records),
                "gaps %": gap.of_runs,
            }
        )
    return made

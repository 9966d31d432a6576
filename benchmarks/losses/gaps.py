"""What differences of losses are worth: gaps to BF16 of the same seed, and how far they scatter over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from losses.files import Record
from losses.recipes import BASELINE, DISTURBED

ENOUGH = 5  # seeds, from which on a recipe's own scatter counts
GOAL = 0.08  # percent: the standard error of a mean gap that tells recipes apart

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


class Gap(NamedTuple):
    """How far a run is above BF16 of its seed.

    Attributes:
        percent: Above the mean of the runs that stand for BF16.
        base_runs: How many these are. They scatter, too, and are common to all recipes of the seed.
    """

    percent: float
    base_runs: int = 1

    @property
    def variance(self) -> float:
        """In variances of one run."""
        return 1 + 1 / self.base_runs


def gaps(records: Sequence[Record], figure: Figure = last_tenth) -> dict[str, list[Gap]]:
    """Return the gaps of each recipe, of seeds of which BF16 is finished. What stands for BF16 is the mean of it and
    its disturbed replica, where there is one; for these two it is BF16 itself.
    """
    plain, replicas = (
        {record["seed"]: figure(record) for record in records if record["recipe"] == name}
        for name in (BASELINE, DISTURBED)
    )
    found: dict[str, list[Gap]] = {}
    for record in sorted(records, key=lambda one: one["seed"]):
        recipe, seed = record["recipe"], record["seed"]
        if seed not in plain:
            continue
        base = [plain[seed]]
        if recipe not in (BASELINE, DISTURBED) and math.isfinite(replicas.get(seed, math.nan)):
            base.append(replicas[seed])
        percent = 100 * (figure(record) / statistics.fmean(base) - 1)
        found.setdefault(recipe, []).append(Gap(percent, len(base)))
    return found


def mean_of(of_one: Sequence[Gap]) -> float:
    """Return the mean gap, percent."""
    return statistics.fmean(gap.percent for gap in of_one)


def _variance(of_one: Sequence[Gap]) -> float:
    """Return the mean variance of gaps, in variances of one run."""
    return statistics.fmean(gap.variance for gap in of_one)


class Scatter(NamedTuple):
    """How far single runs are from where all runs by their recipe would be on average.

    Attributes:
        deviation: Standard deviation, percent.
        freedom: Degrees of freedom that it is known with.
    """

    deviation: float
    freedom: int


def scatter(of_one: Sequence[Gap]) -> Scatter | None:
    """Return the scatter of runs by one recipe, None of a single one; NaN, if a gap is no number."""
    if len(of_one) < 2:
        return None
    percents = [gap.percent for gap in of_one]
    finite = all(map(math.isfinite, percents))  # statistics raises for what is not
    deviation = statistics.stdev(percents) / math.sqrt(_variance(of_one)) if finite else math.nan
    return Scatter(deviation, len(of_one) - 1)


def pooled(found: Mapping[str, Sequence[Gap]]) -> Scatter | None:
    """Return the scatter that all recipes have in common, None if none has several seeds.

    What scatters is mostly how far training runs drift apart that once differed by a rounding, which is alike for all.
    Gaps of one seed share BF16 runs, so that it is known less well than its degrees of freedom say: of nine recipes
    with two seeds or three some 4, not 11. Intervals of 95 % then hold 93 %.
    """
    of_each = [scatter(of_one) for name, of_one in found.items() if name != BASELINE]
    known = [one for one in of_each if one is not None and math.isfinite(one.deviation)]
    freedom = sum(one.freedom for one in known)
    if not freedom:
        return None
    return Scatter(math.sqrt(sum(one.freedom * one.deviation**2 for one in known) / freedom), freedom)


class Estimate(NamedTuple):
    """A mean gap, in percent.

    Attributes:
        mean: Over seeds.
        error: Its standard error; None where no recipe has several seeds.
        low: Lower end of the 95 % interval.
        high: Upper end.
        more: Seeds that are missing for a standard error of ``GOAL``.
    """

    mean: float
    error: float | None = None
    low: float | None = None
    high: float | None = None
    more: int | None = None


def estimate(of_one: Sequence[Gap], common: Scatter | None) -> Estimate:
    """Return what the gaps of one recipe say, by their own scatter or, of a few, by the common one."""
    mean, count = mean_of(of_one), len(of_one)
    own = scatter(of_one)
    used = own if own is not None and count >= ENOUGH else common
    if used is None:
        return Estimate(mean)
    of_gap = used.deviation * math.sqrt(_variance(of_one))
    error = of_gap / math.sqrt(count)
    half = t_quantile(used.freedom) * error
    needed = math.ceil((of_gap / GOAL) ** 2) if math.isfinite(error) else None
    return Estimate(mean, error, mean - half, mean + half, None if needed is None else max(0, needed - count))


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


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row per recipe, in the order of the records."""
    seeds = {record["seed"] for record in records if record["recipe"] == BASELINE}
    records = [record for record in records if record["seed"] in seeds]
    on_text, on_held_out, of_norms = gaps(records), gaps(records, held_out), gaps(records, gradient_norm)
    common = pooled(on_text)
    made = []
    for recipe in dict.fromkeys(record["recipe"] for record in records):
        own = [record for record in records if record["recipe"] == recipe]
        is_base, allowed = recipe == BASELINE, own[0]["allowed %"]
        found = Estimate(0.0) if is_base else estimate(on_text[recipe], common)
        made.append(
            {
                "recipe": recipe,
                "seeds": len(own),
                "loss": statistics.fmean(map(last_tenth, own)),
                "gap %": found.mean,
                "noise %": found.error,
                "low %": found.low,
                "high %": found.high,
                "validation gap %": mean_of(on_held_out[recipe]),
                "gradient norm gap %": mean_of(of_norms[recipe]),
                "allowed %": allowed,
                "verdict": "within" if is_base else verdict(found, allowed),
                "more seeds": found.more,
                "tokens/s": statistics.fmean(record["tokens_per_second"] for record in own),
                "gaps %": [gap.percent for gap in on_text[recipe]],
            }
        )
    return made

r"""Advise a recipe for each layer of the 114 M model that ``convergence.py`` trains, and see whether it is good advice.

The model is trained in BF16 for a while, so that gradients mean something. ``ht.advise`` then chooses recipes that
cost, by the figures of a B200, what FP8 costs everywhere (0.5 of BF16), and less. Each is compared with recipes that
are the same everywhere, and with random ones of exactly the same cost (the same formats, given to other products of the
same size), by the error of the gradient of one batch over all parameters. All this is done again with an outlier in the
weight of one layer, for three layers.

Gradients are compared with those that the model computes in fp32 altogether: BF16 then has an error of its own, in the
table, which says how much of the others is not the recipe's. An error against BF16's gradient would hide that, and have
BF16's noise in it twice.

What was advised, and the random recipe whose error is the median, are written as files that ``convergence.py`` trains
by; the second command, given again, does what was left::

    R=runs/advise; python benchmarks/advise.py && python benchmarks/convergence.py --minutes 8 --min-mb 300 \
      --recipes fp8,fp8_rowwise,advised=$R/advised_0.5.json,random=$R/random_0.5.json --others ""
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from assignments import (
    Batch,
    advised_at,
    bits,
    gradient_error,
    gradients,
    places,
    planted,
    predicted,
    recipe_of,
    shuffled,
    uniform_cost,
)
from common import RESULTS, report
from losses.recipes import BASELINE, candidate
from losses.text import write_text
from losses.training import MODELS, Plan, Trainer, loss_of
from torch import nn
from torchao.core.config import config_to_dict

import hybridtensor as ht
from hybridtensor import costs
from hybridtensor.advising import FORMATS, Advice

ROOT = Path(__file__).parent.parent
HARDWARE = "b200"


class Found(NamedTuple):
    """What was found of a model.

    Attributes:
        advice: By cost.
        errors: Of the gradient in percent, by recipe.
        drawn: Formats and error of each random recipe.
    """

    advice: dict[float, Advice]
    errors: dict[str, float]
    drawn: list[tuple[list[str], float]]


class Study:
    """A trained model, and what it is advised by.

    Args:
        model: In high precision, eager.
        batches: Of which the first is that of gradients.
        options: Of the command line.
    """

    def __init__(self, model: nn.Module, batches: list[Batch], options: argparse.Namespace) -> None:
        self.model, self.batches, self.options = model, batches, options
        prices = costs.table(HARDWARE)
        every = {spec: uniform_cost(spec, prices) for spec in FORMATS}
        self.uniform = {spec: cost for spec, cost in every.items() if cost <= max(options.costs)}

    def advise(self, **options: Any) -> Advice:
        """Return the advice for the model as it is."""
        torch.manual_seed(0)  # what rounds at random does so alike in every advice
        return ht.advise(self.model, self.batches, loss=loss_of, **{"hardware": HARDWARE, **options})

    def at(self, place: str | None) -> Found:
        """Advise, and measure errors, with an outlier in the layer ``place``, or without."""
        with planted(self.model, place):
            advice = advised_at(self.options.costs, self.advise)
            exact = gradients(copy.deepcopy(self.model), self.batches[0], exact=True)

            def error(recipe: Any) -> float:
                return gradient_error(self.model, recipe, self.batches[0], exact)

            errors = {BASELINE: error(None)} | {spec: error(spec) for spec in self.uniform}
            errors |= {f"advised, {cost:g}": error(one.recipe) for cost, one in advice.items()}
            return Found(advice, errors, self._draw(advice[self.options.costs[0]], error))

    def _draw(self, advice: Advice, error: Callable[[Any], float]) -> list[tuple[list[str], float]]:
        """Return random recipes of the same cost as an advised one, by rising error."""
        draws, drawn = random.Random(0), []
        for _ in range(self.options.random):
            formats = shuffled(advice.table, draws)
            drawn.append((formats, error(recipe_of(advice.table, formats))))
        return sorted(drawn, key=lambda one: one[1])

    def measured_costs(self) -> dict[str, Any] | None:
        """Return the table of costs that ``advise`` measures of the present GPU, None without one."""
        if self.options.device != "cuda":
            return None
        return dataclasses.asdict(self.advise(hardware=None).hardware)


def rows(study: Study, plain: Found, with_outlier: dict[str, Found]) -> list[dict[str, Any]]:
    """Return a row per recipe: what it costs, the error that was predicted, and those of gradients."""
    first = study.options.costs[0]
    table = plain.advice[first].table
    count = len(plain.drawn)
    made: list[tuple[str, float, float, Callable[[Found], float]]] = [
        (BASELINE, 1.0, 0.0, lambda found: found.errors[BASELINE])
    ]
    for spec, cost in study.uniform.items():
        made.append((spec, cost, predicted(table, [spec] * len(table)), lambda found, spec=spec: found.errors[spec]))
    for cost, advice in plain.advice.items():
        name = f"advised, {cost:g}"
        made.append((name, advice.cost, advice.error, lambda found, name=name: found.errors[name]))
    for name, i in (("best", 0), ("median", count // 2), ("worst", count - 1)):
        told, cost = f"random, {first:g}, {name} of {count}", plain.advice[first].cost
        made.append((told, cost, predicted(table, plain.drawn[i][0]), lambda found, i=i: found.drawn[i][1]))
    return [
        {"recipe": name, "cost": cost, "predicted error %": 100 * squared**0.5, "gradient error %": of(plain)}
        | {f"outlier in {place} %": of(found) for place, found in with_outlier.items()}
        for name, cost, squared, of in made
    ]


def widths(plain: Found, with_outlier: dict[str, Found]) -> list[dict[str, Any]]:
    """Return, by layer with an outlier and cost, the format of its output without and with it."""
    made = []
    for place, found in with_outlier.items():
        for cost in plain.advice:
            without, beside = (_output_format(one.advice[cost], place) for one in (plain, found))
            wider = bits(beside) > bits(without)
            made.append({"layer": place, "cost": cost, "without": without, "with": beside, "wider": wider})
    return made


def _output_format(advice: Advice, layer: str) -> str:
    return next(row.format for row in advice.table if (row.layer, row.gemm) == (layer, "output"))


def write_assignments(plain: Found, folder: Path) -> None:
    """Write what was advised, and the random recipe of median error."""
    folder.mkdir(parents=True, exist_ok=True)
    recipes = {f"advised_{cost:g}": advice.recipe for cost, advice in plain.advice.items()}
    cost, advice = next(iter(plain.advice.items()))
    formats, _ = plain.drawn[len(plain.drawn) // 2]
    recipes[f"random_{cost:g}"] = recipe_of(advice.table, formats)
    for name, recipe in recipes.items():
        (folder / f"{name}.json").write_text(json.dumps(config_to_dict(recipe)) + "\n")


def trained(options: argparse.Namespace, text: str) -> tuple[nn.Module, list[Batch], float]:
    """Return a model after some steps in BF16, eager, batches that it has not seen, and its last loss."""
    plan = Plan(options.model, options.warm, options.tokens, False, text)  # compiling takes longer than so few steps
    trainer, plain = Trainer(plan, options.text, options.device), candidate(BASELINE)
    loss = trainer.train(plain, 0).losses[-1]
    batches = [
        (x[: options.rows], y[: options.rows]) for x, y in trainer.train_text.draw(options.warm + 1, options.batches)
    ]
    return copy.deepcopy(trainer.model(plain)), batches, loss


def parse() -> argparse.Namespace:
    """Read the command line."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="113M", choices=MODELS)
    parser.add_argument("--warm", type=int, default=200, help="steps in BF16 before")
    parser.add_argument("--tokens", type=int, help="of such a step; default: 8192, or fewer for a small model")
    parser.add_argument("--batches", type=int, default=2, help="that are advised by")
    parser.add_argument("--rows", type=int, default=32, help="of each of these batches")
    parser.add_argument("--random", type=int, default=20, help="recipes of the same cost")
    parser.add_argument("--costs", default="0.5,0.375", help="to advise for; random recipes are of the first")
    parser.add_argument("--data", type=Path, help="file or folder; by default the source files of Python packages")
    parser.add_argument("--min-mb", type=float, default=100)
    parser.add_argument("--max-mb", type=float, default=400)
    parser.add_argument("--text", type=Path, default=ROOT / "runs" / "convergence", help="folder for the text")
    parser.add_argument("--assignments", type=Path, default=ROOT / "runs" / "advise", help="folder for recipes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args()
    if options.random < 1 or options.batches < 1 or options.rows < 1 or options.warm < 1:
        parser.error("--random, --batches, --rows, --warm: at least 1 is required")
    size = MODELS[options.model]
    options.tokens = options.tokens or min(size.batch * size.context, 8192)
    options.costs = [float(cost) for cost in options.costs.split(",")]
    return options


def main() -> int:
    """Train, advise, measure, report."""
    options, began = parse(), time.perf_counter()

    def say(line: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {line}", flush=True)

    text = write_text(options.data, options.text, options.min_mb, options.max_mb)
    say("the text is written")
    model, batches, loss = trained(options, text)
    say(f"trained to a loss of {loss:.3f}")
    study = Study(model, batches, options)
    plain = study.at(None)
    write_assignments(plain, options.assignments)
    say("advised and compared")
    with_outlier = {place: study.at(place) for place in places(plain.advice[min(options.costs)])}
    say("the same with outliers")
    wider = widths(plain, with_outlier)
    for one in wider:
        said = "wider" if one["wider"] else "not wider"
        say(f"outlier in {one['layer']}, cost {one['cost']:g}: {one['without']} -> {one['with']}, {said}")
    more = {
        "loss": loss,
        "outliers": wider,
        "random gradient errors %": [error for _, error in plain.drawn],
        "formats": {f"{cost:g}": advice.specs for cost, advice in plain.advice.items()},
        "curve": [point._asdict() for point in plain.advice[options.costs[0]].curve],
        "costs measured": study.measured_costs(),
    }
    report("advise", rows(study, plain, with_outlier), options, **more)
    say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())

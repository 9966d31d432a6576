"""Telling finished runs: a table, a file of results, a plot."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import hybridtensor as ht
from losses.files import Record
from losses.gaps import GOAL, fit, recipe_of, rows
from losses.recipes import BASELINE, REPLICAS, VARIANTS
from losses.training import Plan

NOT_SHOWN = ("gaps %",)


def report(records: Sequence[Record], plan: Plan, name: str, results: Path, picture: Path) -> None:
    """Print the table; write the JSON and the plot.

    Args:
        records: Finished runs of the plan, of BF16 among them.
        plan: What they share.
        name: Of the results.
        results: Folder for the JSON file.
        picture: File of the plot.
    """
    records = in_order(records)
    made, first = rows(records), records[0]
    where = first["environment"]
    told = f"{plan.steps} steps of {plan.tokens:,} tokens, {first['parameters'] / 1e6:.0f} M parameters"
    console = Console(width=160)
    console.print(table(made, f"{told}, {where['device']}"))
    console.print(f"noise: standard error of the gap; low, high: 95 % interval; more seeds: for a noise of {GOAL} %")
    console.print("tokens/s: of the fastest run")
    others = {record["environment"]["device"] for record in records} - {where["device"]}
    if others:
        console.print(f"some of these runs were on {', '.join(sorted(others))}")
    suffix = "cpu" if first["device"] == "cpu" else where["device"].replace(" ", "_").lower()
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}_{suffix}.json").write_text(json.dumps(results_of(records, made, plan), indent=1) + "\n")
    plot(records, picture)


def in_order(records: Sequence[Record]) -> list[Record]:
    """Return runs by recipe, BF16 first, and seed."""
    known = [BASELINE, *ht.recipes.RECIPES, *VARIANTS]
    rank = {name: i for i, name in enumerate(dict.fromkeys(known))}
    return sorted(records, key=lambda one: (rank.get(one["recipe"], len(rank)), one["recipe"], one["seed"]))


def results_of(records: Sequence[Record], made: list[dict[str, Any]], plan: Plan) -> dict[str, Any]:
    """Return what the file of results holds."""
    first, found = records[0], fit(records)
    return {
        "environment": first["environment"],
        "plan": dataclasses.asdict(plan),
        "size": dataclasses.asdict(plan.size),
        "parameters": first["parameters"],
        "text bytes": first["text bytes"],
        "scatter of one run %": found.scatter if math.isfinite(found.scatter) else None,
        "degrees of freedom": found.freedom,
        "rows": made,
        "specs": {record["recipe"]: record["spec"] for record in records},
        "curves": {f"{record['recipe']}-{record['seed']}": smooth(record["losses"]) for record in records},
    }


def table(made: list[dict[str, Any]], title: str) -> Table:
    """Return the table of all rows."""
    shown = [header for header in made[0] if header not in NOT_SHOWN]
    told = Table(title=title)
    for header in shown:
        told.add_column(header, justify="left" if header == "recipe" else "right", overflow="fold")
    for row in made:
        told.add_row(*(cell(header, row[header]) for header in shown))
    return told


def cell(header: str, value: Any) -> str:
    """Return a value as the table shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:+.2f}" if "%" in header else f"{value:,.0f}" if value > 1000 else f"{value:.4g}"
    return str(value)


def losses_of_bf16(records: Sequence[Record]) -> dict[int, list[float]]:
    """Return the losses of BF16 by seed: the means with its disturbed replicas, where there are such."""
    plain = {record["seed"] for record in records if record["recipe"] == BASELINE}
    runs: dict[int, list[list[float]]] = {}
    for record in records:
        if recipe_of(record) == BASELINE and record["seed"] in plain:
            runs.setdefault(record["seed"], []).append(record["losses"])
    return {seed: [statistics.fmean(at) for at in zip(*of_seed, strict=True)] for seed, of_seed in runs.items()}


def smooth(losses: Sequence[float], points: int = 150) -> list[float]:
    """Return the means of about ``points`` windows."""
    window = max(1, len(losses) // points)
    return [round(sum(losses[i : i + window]) / window, 5) for i in range(0, len(losses) - window + 1, window)]


def draw_order(axes: Any, made: list[dict[str, Any]]) -> None:
    """Draw the gaps of recipes one below the other, the smallest first, and what is allowed."""
    shown = sorted((row for row in made if row["recipe"] != BASELINE), key=lambda row: -row["gap %"])
    for place, row in enumerate(shown):
        color = "tab:orange" if row["allowed %"] > 0.5 else "tab:blue"
        if row["low %"] is not None:
            axes.plot([row["low %"], row["high %"]], [place, place], color=color, linewidth=2)
        axes.plot(row["gap %"], place, "o", color=color)
        axes.plot(row["validation gap %"], place, "x", color="gray")
        axes.plot([row["allowed %"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_yticks(range(len(shown)), [f"{row['recipe']} ({row['runs']})" for row in shown], fontsize=7)
    axes.set(xlabel="above BF16 (%), with the 95 % interval; x: held-out text; |: allowed; (runs)")


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the losses of the first seed, how far each recipe is from BF16 while it trains, the mean over seeds, and in
    the end, with the 95 % interval.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, above, order) = plt.subplots(3, figsize=(10, 15), layout="constrained", height_ratios=[2, 3, 3])
    base = {seed: smooth(losses, 50) for seed, losses in losses_of_bf16(records).items()}
    first = min(base)
    steps = [(i + 1) * len(records[0]["losses"]) / len(base[first]) for i in range(len(base[first]))]
    colors = itertools.cycle(plt.get_cmap("tab20").colors)  # type: ignore[attr-defined]
    for recipe in dict.fromkeys(r["recipe"] for r in records if r["recipe"] != BASELINE):
        curves = {r["seed"]: smooth(r["losses"], 50) for r in records if r["recipe"] == recipe and r["seed"] in base}
        percent = [[100 * (a / b - 1) for a, b in zip(of, base[s], strict=True)] for s, of in curves.items()]
        color = "lightgray" if recipe in REPLICAS else next(colors)
        above.plot(steps, [statistics.fmean(at) for at in zip(*percent, strict=True)], color=color, label=recipe)
        if first in curves:
            losses.plot(steps, curves[first], color=color, linewidth=1)
    losses.plot(steps, base[first], color="black", linewidth=1.5, label=BASELINE)
    losses.set(ylabel="training loss (nats per byte)", yscale="log")
    losses.legend()
    above.set(xlabel="step", ylabel="above BF16 of the same seed (%), mean over seeds", ylim=(-2, 4))
    above.axhline(0, color="black", linewidth=1)
    if above.get_legend_handles_labels()[1]:
        above.legend(fontsize=7, ncols=2)
    draw_order(order, rows(records))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)

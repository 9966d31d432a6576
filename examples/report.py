"""Show what the runs gave: a table, a plot, a file."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from rich import box
from rich.table import Table
from training import BASELINE, Plan, Result

import hybridtensor as ht

mpl.use("Agg")
from matplotlib import pyplot as plt


def gap(result: Result, baseline: Result) -> float:
    """Return how far the validation loss is above the baseline's, in percent."""
    return 100 * (result.validation[-1][1] / baseline.validation[-1][1] - 1)


def table(results: list[Result], device: str) -> Table:
    """Return the closing table; *saved* is bytes kept for backward, over BF16's."""
    baseline = results[0]
    title = f"Validation loss (nats per byte) on {device}; bytes saved for backward"
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("recipe", no_wrap=True)
    for header in ("loss", "gap to BF16", "linear inputs", "all saved", "tokens/s"):
        shown.add_column(header, justify="right", min_width=min(len(header), 8))
    for r in results:
        shown.add_row(
            r.recipe,
            f"{r.validation[-1][1]:.4f}",
            "" if r is baseline else f"{gap(r, baseline):+.2f} %",
            f"{r.linear_input_bytes / baseline.linear_input_bytes:.2f}x",
            f"{r.activation_bytes / baseline.activation_bytes:.2f}x",
            f"{r.tokens_per_second:,.0f}",
        )
    return shown


def plot(results: list[Result], path: Path) -> None:
    """Draw the loss curves, and how far each is from BF16's: training smoothed, validation as dots."""
    figure, (losses, gaps) = plt.subplots(2, figsize=(8, 7), layout="constrained", sharex=True, height_ratios=[3, 2])
    baseline = results[0]
    for r in results:
        steps = range(1, len(r.losses) + 1)
        (line,) = losses.plot(steps, smooth(r.losses), label=r.recipe, linewidth=1.2)
        losses.plot(*zip(*r.validation, strict=True), "o", color=line.get_color(), markersize=4)
        percent = [100 * (a / b - 1) for a, b in zip(smooth(r.losses), smooth(baseline.losses), strict=True)]
        gaps.plot(steps, percent, color=line.get_color(), linewidth=1.2)
        dots = [(s, 100 * (a / b - 1)) for (s, a), (_, b) in zip(r.validation, baseline.validation, strict=True)]
        gaps.plot(*zip(*dots, strict=True), "o", color=line.get_color(), markersize=4)
    losses.set(ylabel="nats per byte", title="Loss: training (lines, smoothed) and validation (dots)")
    gaps.set(xlabel="step", ylabel="above BF16, %")
    losses.legend()
    for axes in (losses, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def smooth(losses: list[float]) -> list[float]:
    """Return an exponential average over about ten steps."""
    averaged, average = [], losses[0]
    for loss in losses:
        average += 0.1 * (loss - average)
        averaged.append(average)
    return averaged


def versions() -> dict[str, str]:
    """Return what the numbers depend on."""
    return {
        "hybridtensor": ht.__version__,
        "torch": torch.__version__,
        "torchao": importlib.metadata.version("torchao"),
        "python": platform.python_version(),
    }


def write_json(
    results: list[Result], plan: Plan, options: dict[str, Any], device: str, resumed: dict[str, bool], path: Path
) -> None:
    """Write everything; ``options`` are those of the command line."""
    baseline = results[0]
    record = {
        "options": options,
        "plan": dataclasses.asdict(plan),
        "device": device,
        "versions": versions(),
        "results": [
            {
                **dataclasses.asdict(r),
                "gap_percent": None if r.recipe == BASELINE else gap(r, baseline),
                "resumed_bitwise": resumed.get(r.recipe),
            }
            for r in results
        ],
    }
    path.write_text(json.dumps(record, indent=1))

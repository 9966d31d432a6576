"""Timing and reporting for all benchmarks: variants alternate in one process, medians of device events, ratios."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_HEAD_START = 8_000_000  # cycles, some 4.5 milliseconds
RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.Namespace:
    """Read the command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser.parse_args()


def time_alternating(
    variants: dict[str, Callable[[], Any]], device: str, repeats: int, *, lead: int = 0, count: int = 1
) -> dict[str, float]:
    """Return the median milliseconds of each variant; they take turns, so that drift meets all alike.

    Args:
        variants: What is called, by name.
        device: Where it runs.
        repeats: How many times are taken.
        lead: How many calls are not timed, right before those that are: the host is then as far ahead of the device
            as it gets, as in the middle of training.
        count: How many calls are timed as one, without waiting between them.
    """
    for function in variants.values():
        for _ in range(3):
            function()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, function in variants.items():
            times[name].append(_time_once(function, device, lead, count))
    return {name: statistics.median(values) for name, values in times.items()}


def _time_once(function: Callable[[], Any], device: str, lead: int, count: int) -> float:
    if not device.startswith("cuda"):
        begin = time.perf_counter()
        for _ in range(count):
            function()
        return 1e3 * (time.perf_counter() - begin) / count
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START)  # what is measured is the device: the host gets ahead of it
    for _ in range(lead):
        function()
    start.record()
    for _ in range(count):
        function()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / count


def environment(device: str) -> dict[str, str]:
    """Return what the numbers depend on."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else platform.processor() or platform.machine()
    versions = {p: importlib.metadata.version(p) for p in ("torch", "torchao")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {"device": name, **versions, "commit": commit or "unknown"}


def report(name: str, rows: list[dict[str, Any]], options: argparse.Namespace, **more: Any) -> None:
    """Print one table and write ``<name>_<device>.json``, with ``more`` in it."""
    where = environment(options.device)
    table = Table(title=f"{name} on {where['device']}, torch {where['torch']}, torchao {where['torchao']}")
    for header in rows[0]:
        table.add_column(header)
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = "cpu" if options.device == "cpu" else where["device"].replace(" ", "_").lower()
    path = options.out / f"{name}_{suffix}.json"
    path.write_text(json.dumps({"environment": where, "rows": rows, **more}, indent=1) + "\n")

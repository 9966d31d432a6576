"""Finished runs: a small file each, which may come from another machine."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from losses.training import Outcome, Plan

Record = dict[str, Any]
"""A finished run, as its file has it."""


def record_of(outcome: Outcome, plan: Plan, **known: Any) -> Record:
    """Return what a file says of a run: losses to five digits, norms to four."""
    return {
        **known,
        "plan": dataclasses.asdict(plan),
        "losses": [round(loss, 5) for loss in outcome.losses],
        "norms": [float(f"{norm:.4g}") for norm in outcome.norms],
        "validation": outcome.validation,
        "set up seconds": round(outcome.set_up_seconds, 2),
        "seconds": round(outcome.seconds, 2),
        "tokens_per_second": outcome.tokens_per_second,
    }


def path_of(folder: Path, recipe: str, seed: int, plan: Plan) -> Path:
    """Return the file of one run; runs of other plans may lie beside it."""
    return folder / f"{re.sub('[^A-Za-z0-9_]', '-', recipe)}-{seed}-{plan.digest}.json"


def write(record: Record, folder: Path) -> None:
    """Write the file of a run; one that is killed meanwhile leaves no half a file."""
    path = path_of(folder, record["recipe"], record["seed"], Plan(**record["plan"]))
    path.with_suffix(".partial").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    path.with_suffix(".partial").replace(path)


def read(folders: Iterable[Path]) -> list[Record]:
    """Return all finished runs in some folders, those of the first folder first."""
    found = [json.loads(path.read_text()) for folder in folders for path in sorted(folder.glob("*.json"))]
    return [record for record in found if isinstance(record, dict) and "losses" in record]


def of_plan(records: Iterable[Record], plan: Plan, fingerprints: dict[str, str]) -> list[Record]:
    """Return the runs that belong to a plan, one for each recipe and seed, the first.

    Args:
        records: Finished runs.
        plan: Which.
        fingerprints: Of recipes as they are today; runs by what they were before do not count.

    Raises:
        ValueError: If runs of one name are by several recipes, and none is today's.
    """
    kept: dict[tuple[str, int], Record] = {}
    known = dict(fingerprints)
    for record in records:
        name, fingerprint = record["recipe"], record["fingerprint"]
        if record["plan"] != dataclasses.asdict(plan) or fingerprints.get(name, fingerprint) != fingerprint:
            continue
        if known.setdefault(name, fingerprint) != fingerprint:
            raise ValueError(f"--recipes: {name}=FILE is required, to tell runs by several recipes of this name apart")
        kept.setdefault((name, record["seed"]), record)
    return list(kept.values())


def common_plan(records: Iterable[Record]) -> Plan | None:
    """Return the plan that most runs share, None if there is no run."""
    plans = [json.dumps(record["plan"], sort_keys=True) for record in records]
    return Plan(**json.loads(max(plans, key=plans.count))) if plans else None

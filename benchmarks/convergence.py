"""Train a byte-level transformer on real source text by every recipe, and compare the losses with BF16.

Figure of merit: the training loss over the last tenth of the steps, above BF16 from the same seed, that is with the
same initial weights and the same batches, in percent. What runs of a seed have in common is taken out by least squares;
what is left scatters alike in all runs, from which the standard error of each recipe follows. ``bf16_disturbed`` and
``bf16_disturbed_again`` are BF16 with initial weights that differ by a millionth: more runs by BF16, which all recipes
are compared with.

All is done in rounds, one seed of all recipes after the other, by one process for each GPU (or several, ``--per-gpu``)
that compiles each recipe once. A finished run is a small file in ``--out`` and is not repeated, so that a benchmark may
be done in pieces, also on several machines that have the same text::

    python benchmarks/convergence.py --minutes 8                        # what can be finished in eight minutes
    cp runs/convergence/*.json benchmarks/results/convergence/          # kept, for the next machine
    python benchmarks/convergence.py --minutes 8 --runs benchmarks/results/convergence
    python benchmarks/convergence.py --report --runs benchmarks/results/convergence  # writes results; trains nothing
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment
from losses import files
from losses.recipes import BASELINE, VARIANTS, Candidate, candidate, fingerprints
from losses.report import report
from losses.text import sizes, write_text
from losses.training import MODELS, Plan, plain_model
from losses.work import Job, drop_claims, failures, in_rounds, work

import hybridtensor as ht

ROOT = Path(__file__).parent.parent
WANTED = ("fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4", "nvfp4_row_scaled_fwd_mxfp8_bwd", *VARIANTS)
RESERVE = 30  # seconds of ``--minutes`` for what is before the clock starts, and for the report


def parse() -> argparse.Namespace:
    """Read and check the command line."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=lines)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on one GPU")
    parser.add_argument("--model", default="113M", choices=MODELS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, help="of a step; default: by model")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="the blocks; default: on a GPU")
    parser.add_argument("--recipes", help="names, specs, variants, or NAME=FILE of an assignment; comma-separated")
    parser.add_argument(
        "--others", help="recipes that come after those; default: all others, if --recipes is not given"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of BF16 and --recipes")
    parser.add_argument("--other-seeds", type=int, default=1, help="of --others")
    parser.add_argument("--data", type=Path, help="file or folder; by default the source files of Python packages")
    parser.add_argument("--min-mb", type=float, default=100)
    parser.add_argument("--max-mb", type=float, default=400)
    parser.add_argument("--minutes", type=float, help="end within so many, with what can be finished")
    parser.add_argument("--report", action="store_true", help="train nothing, tell what is finished")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "convergence", help="folder of the single runs")
    parser.add_argument("--runs", type=Path, action="append", default=[], help="other folders of finished runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--name", default="convergence", help="of the JSON file")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "convergence.png")
    parser.add_argument("--worker", nargs=2, metavar=("TEXT", "UNTIL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    options.error = parser.error
    return options


def check(options: argparse.Namespace) -> None:
    """Fill in defaults.

    Raises:
        ValueError: If a value makes no sense.
    """
    least = {"steps": 1, "seeds": 1, "other_seeds": 1, "gpus": 1, "per_gpu": 1, "minutes": 0, "tokens": 1}
    for name, value in least.items():
        given = getattr(options, name)
        if given is not None and given < value:
            raise ValueError(f"--{name.replace('_', '-')}: at least {value} is required, got {given}")
    size = MODELS[options.model]
    options.tokens = options.tokens or size.batch * size.context
    if options.tokens % size.context:
        raise ValueError(f"--tokens: a multiple of {size.context} is required, got {options.tokens}")
    if options.compile is None:
        options.compile = options.device == "cuda"
    given = [name for name in ht.recipes.RECIPES if name not in WANTED] if options.recipes is None else []
    options.recipes = candidates(WANTED if options.recipes is None else options.recipes.split(","))
    options.others = candidates(given if options.others is None else options.others.split(","))


def candidates(names: Iterable[str]) -> list[Candidate]:
    """Return what is named, but the baseline.

    Raises:
        ValueError: If there is no such recipe.
    """
    return [candidate(name) for name in dict.fromkeys(names) if name not in ("", BASELINE)]


def job_of(options: argparse.Namespace, plan: Plan, until: float) -> Job:
    """Return what there is to do."""
    known = {one.name: one for one in (candidate(BASELINE), *options.recipes, *options.others)}
    model = plain_model(plan.size, 0, "meta")
    today = {name: one.fingerprint(model, plan.steps) for name, one in known.items()}
    shared = {
        "device": options.device,
        "environment": environment(options.device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "text bytes": sizes(options.out),
    }
    about: dict[str, dict[str, Any]] = {}
    for name, one in known.items():
        allowed = one.allowance(model, plan.steps)
        about[name] = {"spec": one.spec, "fingerprint": today[name], "allowed %": allowed, **shared}
    first, then = ([one.name for one in some] for some in (options.recipes, options.others))
    runs = in_rounds(first, options.seeds, then, options.other_seeds)
    return Job(plan, known, today, runs, options.out, tuple(options.runs), until, about)


def plan_of(options: argparse.Namespace, text: str) -> Plan:
    """Return the plan that the command line gives."""
    return Plan(options.model, options.steps, options.tokens, options.compile, text)


def run_all(job: Job, options: argparse.Namespace) -> list[str]:
    """Do all runs that fit, here, or in a process for each place on a GPU; return what failed."""
    places = [gpu for _ in range(options.per_gpu) for gpu in range(options.gpus)]
    if len(places) == 1:
        work(job, options.device, say)
        return failures(options.out)
    command = [sys.executable, *(f"-W{word}" for word in sys.warnoptions), *sys.argv]
    command += ["--worker", job.plan.text, str(job.until)]
    processes = []
    for gpu in places:
        own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if options.device == "cuda" else {}
        processes.append(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | own))
    broken = [process for process in processes if process.wait()]
    return failures(options.out) + [f"a process ended with {process.returncode}" for process in broken]


def say(line: str) -> None:
    """Print a line now."""
    print(line, flush=True)


def main() -> int:
    """Do one benchmark, or a process of it."""
    options = parse()
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own use of what it deprecated
    if options.worker:
        text, until = options.worker
        work(job_of(options, plan_of(options, text), float(until)), options.device, say)
        return 0
    try:
        what = finished(options) if options.report else prepared(options)
    except ValueError as error:
        options.error(str(error))
    return train_all(what, options) if isinstance(what, Job) else tell(*what, options)


def finished(options: argparse.Namespace) -> tuple[list[files.Record], Plan]:
    """Return what is finished of the plan that most finished runs have.

    Raises:
        ValueError: If nothing is, or runs by several recipes have one name.
    """
    found = files.read([options.out, *options.runs])
    plan = files.common_plan(found)
    if plan is None:
        raise ValueError(f"--report: finished runs in {options.out} or --runs are required, got none")
    today = fingerprints({record["recipe"] for record in found}, plain_model(plan.size, 0, "meta"), plan.steps)
    return files.of_plan(found, plan, today), plan


def prepared(options: argparse.Namespace) -> Job:
    """Write the text, and return what there is to do.

    Raises:
        ValueError: If there is too little text, the model cannot have a recipe, or as for ``finished``.
    """
    until = time.time() + 60 * options.minutes - RESERVE if options.minutes is not None else float("inf")
    text = write_text(options.data, options.out, options.min_mb, options.max_mb)
    drop_claims(options.out)
    job = job_of(options, plan_of(options, text), until)
    say(f"{len(job.finished())} runs are finished, {len(job.waiting(job.finished()))} are left to do")
    return job


def train_all(job: Job, options: argparse.Namespace) -> int:
    """Do all runs that fit, and tell what is finished."""
    failed = run_all(job, options)
    records = job.finished()
    tell(records, job.plan, options)
    say(f"{len(job.waiting(records))} runs are left to do")
    for line in failed:
        say(f"failed: {line}")
    return 1 if failed else 0


def tell(records: list[files.Record], plan: Plan, options: argparse.Namespace) -> int:
    """Tell finished runs, if there is one to compare with."""
    if any(record["recipe"] == BASELINE for record in records):
        report(records, plan, options.name, options.results, options.plot)
        return 0
    say("no run of bf16 is finished: nothing to compare with")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Train a byte-level transformer on real text in BF16 and by quantized recipes, side by side.

Shows live progress, then a table, loss curves and a JSON file; saves every run in the middle, and at the end resumes
from there in a new process to show that the losses are bitwise the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from data import Bytes, load_text
from model import SIZES
from ranks import Degrees, become_ranks, check_ranks, is_started, joined, without_rank
from report import plot, table, write_json
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from training import BASELINE, Plan, Result, Run

import hybridtensor as ht

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: reproducible cuBLAS
DEFAULT_RECIPES = [BASELINE, "fp8", "fp8_rowwise", "fp8_dequantized_backward"]
RESUMED_STEPS = 20
WATCHED_STEPS = 8


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; bad values end with one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--recipes", nargs="+", default=DEFAULT_RECIPES, help="recipe names or specs; bf16 always runs")
    parser.add_argument("--data", type=Path, help="file or folder of text; default: Python's standard library")
    parser.add_argument("--size", choices=SIZES, help="model size; default: small on a CPU, medium on a GPU")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, help="peak learning rate; default: by size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for plots, numbers, checkpoints")
    parser.add_argument("--fsdp", type=int, metavar="N", help="shard the model over N ranks (FSDP2), which this starts")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="cut each layer over N ranks (tensor and sequence parallel)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the runs in --out for some steps, on any number of ranks"
    )
    arguments = parser.parse_args(argv)
    names = [name for given in arguments.recipes for name in given.split(",") if name]
    arguments.recipes = [BASELINE, *dict.fromkeys(name for name in names if name != BASELINE)]
    try:
        check_values(arguments)
        arguments.size = arguments.size or ("medium" if arguments.device.startswith("cuda") else "small")
        size = SIZES[arguments.size]
        check_checkpoints(arguments)
        check_ranks(degrees(arguments), torch.device(arguments.device), size)
        text = load_text(arguments.data, without=arguments.out)
        arguments.text = Bytes(text, context=size.context, batch=size.batch, seed=arguments.seed)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        parser.error(str(error).splitlines()[0])
    return arguments


def degrees(arguments: argparse.Namespace) -> Degrees:
    """Return how many ranks the model is spread over."""
    return Degrees(arguments.fsdp, arguments.tp)


def check_values(arguments: argparse.Namespace) -> None:
    """Raise for a recipe that is unknown, a number out of range, or a device that is not there."""
    for name in arguments.recipes:
        ht.recipes.from_name(name)
    if arguments.steps < 2:
        raise ValueError(f"--steps: at least 2 are required, got {arguments.steps}")
    if not 0 <= arguments.seed < 2**32:
        raise ValueError(f"--seed: a number from 0 to 2**32 - 1 is required, got {arguments.seed}")
    if arguments.lr is not None and not 0 < arguments.lr < float("inf"):
        raise ValueError(f"--lr: a positive number is required, got {arguments.lr}")
    device = torch.device(arguments.device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: cpu or cuda is required, got {arguments.device}")
    torch.empty(0, device=device)


def check_checkpoints(arguments: argparse.Namespace) -> None:
    """Raise where there is nothing to resume from."""
    missing = [name for name in arguments.recipes if not checkpoint_of(arguments.out, name).is_dir()]
    if arguments.resume and missing:
        raise ValueError(
            f"--resume: checkpoints of all --recipes are required, got none of {', '.join(missing)} in "
            f"{arguments.out}; run without --resume first"
        )


def progress_bar(console: Console) -> Progress:
    """Return the live display; where there is no terminal, lines are printed instead."""
    return Progress(
        TextColumn("{task.description:>26}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"), TextColumn("{task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


def train(recipe: str, plan: Plan, data: Bytes, checkpoint: Path, progress: Progress) -> Result:
    """Train by one recipe, saving in the middle."""
    run, middle = Run(recipe, plan, data, measure=True), plan.steps // 2
    watched = watching(run, plan)
    task = progress.add_task(recipe, total=plan.steps, loss=float("nan"), rate=0.0)

    def report(step: int, loss: float, rate: float) -> None:
        progress.update(task, completed=step + 1, loss=loss, rate=rate)
        if watched is not None:
            watched.note(loss, step=step)
        run.result.tokens_per_second = rate
        if progress.disable and (step + 1) % max(1, plan.steps // 10) == 0:
            line = f"{recipe:>26}  step {step + 1}/{plan.steps}  loss {loss:.4f}  {rate:,.0f} tokens/s"
            progress.console.print(line, soft_wrap=True)

    with watched or contextlib.nullcontext():
        run.train(0, middle, report)
        run.save(checkpoint, middle)
        run.validate(middle)
        run.train(middle, plan.steps, report)
        run.validate(plan.steps)
    if watched is not None and plan.rank.number == 0:
        page = ht.report(watched, checkpoint.parent.parent / f"{checkpoint.name}.html")
        progress.console.print(f"{recipe:>26}  wrote {page}: what the formats did", soft_wrap=True)
    return run.result


def watching(run: Run, plan: Plan) -> ht.watch | None:
    """Return what watches a run, in a few of its steps; None where nothing is quantized, or in compiled code, which
    would run eagerly in these steps, and not resume bitwise.
    """
    if run.result.recipe == BASELINE or plan.compile:
        return None
    return ht.watch(run.model, every=max(1, plan.steps // WATCHED_STEPS))


def resume(recipes: list[str], plan: Plan, data: Bytes, out: Path, console: Console) -> None:
    """Continue every run from its checkpoint for some steps, and write its weights and losses."""
    resumed = {}
    for recipe in recipes:
        run = Run(recipe, plan, data)
        first = run.load(checkpoint_of(out, recipe))
        weights = run.digest()
        run.train(first, min(first + RESUMED_STEPS, plan.steps), lambda step, loss, rate: None)
        resumed[recipe] = {"weights": weights, "losses": [loss.hex() for loss in run.result.losses]}
        last, loss = first + len(run.result.losses), run.result.losses[-1]
        console.print(f"{recipe:>26}  resumed at step {first}, loss {loss:.4f} at step {last}", soft_wrap=True)
    if plan.rank.number == 0:
        (out / "resumed.json").write_text(json.dumps(resumed))
        console.print(f"wrote {out / 'resumed.json'}", soft_wrap=True)


def check_resume(results: list[Result], plan: Plan, out: Path, console: Console) -> dict[str, bool]:
    """Resume in a new process and compare its losses with those of the uninterrupted runs, bit for bit."""
    filters = [f"-W{option}" for option in sys.warnoptions]
    again = [sys.executable, *filters, *sys.argv, "--resume"]
    subprocess.run(again, check=True, env=without_rank(), stdout=subprocess.DEVNULL)
    resumed = json.loads((out / "resumed.json").read_text())
    same = {}
    for r in results:
        losses, first = resumed[r.recipe]["losses"], plan.steps // 2
        expected = r.losses[first : first + len(losses)]
        same[r.recipe] = losses == [loss.hex() for loss in expected] and not any(map(math.isnan, expected))
        same[r.recipe] &= resumed[r.recipe]["weights"] == r.saved_weights
        verdict = "bitwise the same" if same[r.recipe] else "[bold red]DIFFERENT[/]"
        line = f"{r.recipe:>26}  resumed at step {first} in a new process: {len(losses)} losses {verdict}"
        console.print(line, soft_wrap=True)
    return same


def checkpoint_of(out: Path, recipe: str) -> Path:
    """Return the folder of a recipe's checkpoint."""
    return out / "checkpoints" / recipe.replace("/", "-")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options as JSON can hold them."""
    options = {name: value for name, value in vars(arguments).items() if name not in ("text", "resume")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


def main() -> int:
    """Run the demo."""
    arguments = parse_arguments()
    ranks = degrees(arguments)
    if ranks.size is not None and not is_started():
        become_ranks(ranks.size)
    out, size = arguments.out, SIZES[arguments.size]
    if arguments.compile:
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own use of what it deprecated
    torch.autograd.set_multithreading_enabled(False)  # a process has one GPU: no second thread competes with Python
    torch.use_deterministic_algorithms(True)  # so that a resumed run can be compared bit for bit
    torch.utils.deterministic.fill_uninitialized_memory = False
    with joined(ranks, arguments.device) as (rank, own):
        console = Console(quiet=rank.number > 0)
        rate = arguments.lr or size.learning_rate
        plan = Plan(size, arguments.steps, arguments.seed, own, rate, arguments.compile, rank)
        if arguments.resume:
            resume(arguments.recipes, plan, arguments.text, out, console)
            return 0
        results = train_all(arguments, plan, console)
    return finish(results, arguments, plan, console) if rank.number == 0 else 0


def train_all(arguments: argparse.Namespace, plan: Plan, console: Console) -> list[Result]:
    """Train by every recipe."""
    out, text = arguments.out, arguments.text
    if plan.rank.number == 0:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    total, ranks = len(text.train) + len(text.validation), f", {plan.rank.size} ranks" if plan.rank.sharded else ""
    line = f"{total / 1e6:.1f} MB of text, {plan.steps} steps of {plan.size} on {device_name(plan)}{ranks}"
    console.print(line, soft_wrap=True)
    with progress_bar(console) as progress:
        return [train(recipe, plan, text, checkpoint_of(out, recipe), progress) for recipe in arguments.recipes]


def finish(results: list[Result], arguments: argparse.Namespace, plan: Plan, console: Console) -> int:
    """Check that the runs resume, and show and write what they gave."""
    out, device = arguments.out, device_name(plan)
    resumed = check_resume(results, plan, out, console)
    console.print(table(results, device))
    plot(results, out / "losses.png")
    write_json(results, plan, options_of(arguments), device, resumed, out / "results.json")
    console.print(f"wrote {out / 'losses.png'}, {out / 'results.json'} and {out / 'checkpoints'}", soft_wrap=True)
    return 0 if all(resumed.values()) else 1


def device_name(plan: Plan) -> str:
    """Return what the runs run on."""
    on_gpu = plan.device.startswith("cuda")
    return torch.cuda.get_device_name(plan.device) if on_gpu else platform.processor() or "CPU"


if __name__ == "__main__":
    sys.exit(main())

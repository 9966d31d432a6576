"""Train a byte-level transformer on real source text by every recipe, and compare the losses with BF16.

One process per run, several at a time on every GPU; a finished run writes its own file and is not repeated, so that an
interrupted benchmark continues. Figure of merit: the training loss over the last tenth of the steps, against BF16 from
the same seed, that is with the same initial weights and the same batches.

How far runs drift apart for no reason is measured too: by recipes that run with several seeds, and by BF16 runs whose
initial weights differ by a millionth.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import math
import os
import site
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hybridtensor as ht
from hybridtensor.recipes.spec import GEMMS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from model import SIZES, Size, Transformer  # noqa: E402

BASELINE = "bf16"
MODELS = {"tiny": SIZES["tiny"], "113M": Size(dim=1536, layers=4, heads=24, context=256, batch=16, learning_rate=5e-4)}
SOURCES = {".py", ".pyi", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".js", ".ts", ".rst", ".md", ".cmake"}
WARM_UP, VALIDATION_BATCHES = 100, 64
VALIDATION_EVERY = 20  # one file in so many is held out


class Run(NamedTuple):
    """One training run; a replica has a number, and initial weights that differ from the original's by a millionth."""

    recipe: str
    seed: int
    replica: int = 0

    def __str__(self) -> str:
        return f"{self.recipe.replace('/', '-')}-{self.seed}" + (f"-replica{self.replica}" if self.replica else "")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What two runs must share to be compared."""

    model: str
    steps: int
    text: str  # digest

    def rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to a tenth."""
        peak, warm_up = MODELS[self.model].learning_rate, min(WARM_UP, self.steps // 4 + 1)
        if step < warm_up:
            return peak * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return peak * (0.55 + 0.45 * math.cos(math.pi * progress))


# -- text -----------------------------------------------------------------------------------------------------------


def source_files(data: Path | None) -> Iterator[Path]:
    """Yield the files below ``data``, or the source files of the Python packages on this machine, in order."""
    if data is not None:
        yield from [data] if data.is_file() else sorted(f for f in data.rglob("*") if f.is_file())
        return
    paths = sysconfig.get_paths()
    folders = dict.fromkeys([*(paths[name] for name in ("purelib", "platlib", "stdlib")), *site.getsitepackages()])
    for folder in folders:
        yield from sorted(f for f in Path(folder).rglob("*") if f.suffix in SOURCES and f.is_file())


def write_text(data: Path | None, out: Path, min_mb: float, max_mb: float) -> str:
    """Write all text, no file twice, as ``train.bin`` and ``validation.bin``, and return its digest.

    Raises:
        ValueError: If there is less than ``min_mb``.
    """
    seen: set[bytes] = set()
    size, digest = 0, hashlib.blake2b(digest_size=8)
    with (out / "train.bin").open("wb") as train, (out / "validation.bin").open("wb") as validation:
        for file in source_files(data):
            content = file.read_bytes()
            key = hashlib.blake2b(content).digest()
            if key in seen or not content:
                continue
            seen.add(key)
            (validation if len(seen) % VALIDATION_EVERY == 2 else train).write(content)
            digest.update(key)
            size += len(content)
            if size >= max_mb * 1e6:
                break
    if size < min_mb * 1e6:
        raise ValueError(f"--data: at least {min_mb:g} MB of text are required, got {size / 1e6:.1f} MB")
    return digest.hexdigest()


class Text:
    """Batches from a file of bytes that lies on the device."""

    def __init__(self, path: Path, size: Size, device: str) -> None:
        count = path.stat().st_size
        self.size, self.device = size, device
        if count <= size.context + 1:
            raise ValueError(f"--data: more than {size.context + 1} bytes are required in {path.name}, got {count}")
        self.bytes = torch.from_file(str(path), size=count, dtype=torch.uint8).to(device)

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, ``[B, T]`` each, drawn by ``seed``."""
        last = len(self.bytes) - self.size.context - 1
        starts = torch.randint(last, (self.size.batch, 1), generator=torch.Generator().manual_seed(seed))
        rows = self.bytes[starts.to(self.device) + torch.arange(self.size.context + 1, device=self.device)].long()
        return rows[:, :-1], rows[:, 1:]


# -- one run --------------------------------------------------------------------------------------------------------


def train(run: Run, plan: Plan, out: Path, device: str) -> dict[str, Any]:
    """Train once; return losses, validation loss and speed."""
    recipe, seed, replica = run
    size = MODELS[plan.model]
    train_text, validation_text = (Text(out / f"{name}.bin", size, device) for name in ("train", "validation"))
    torch.manual_seed(seed)
    model = Transformer(size)
    if replica:
        disturb(model, replica)
    model.to(device)
    if recipe != BASELINE:
        ht.quantize_(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = torch.zeros(plan.steps, device=device)
    started = time.perf_counter()
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        loss = loss_of(model, train_text.batch(seed * 1_000_003 + step), device)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ht.step_(model)
        losses[step] = loss.detach()
    values = losses.tolist()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        held_out = [loss_of(model, validation_text.batch(-1 - i), device).item() for i in range(VALIDATION_BATCHES)]
    return {
        "recipe": recipe,
        "seed": seed,
        "replica": replica,
        "spec": str(ht.recipes.from_name(recipe)),
        "fingerprint": ht.recipes.from_name(recipe).fingerprint(),
        "plan": dataclasses.asdict(plan),
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": values,
        "validation": sum(held_out) / len(held_out),
        "seconds": seconds,
        "tokens_per_second": plan.steps * size.batch * size.context / seconds,
    }


@torch.no_grad()
def disturb(model: nn.Module, seed: int) -> None:
    """Change every weight by about a millionth of itself."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
    """Return the loss in nats per byte, computed in bfloat16 from fp32 weights."""
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        loss: Tensor = model(*batch)
    return loss


# -- all runs -------------------------------------------------------------------------------------------------------


def path_of(out: Path, run: Run) -> Path:
    """Return the file of one run."""
    return out / f"{run}.json"


def is_done(out: Path, run: Run, plan: Plan) -> bool:
    """Whether a run has been finished, under this plan and with what the recipe is today."""
    path = path_of(out, run)
    if not path.exists():
        return False
    done = json.loads(path.read_text())
    fingerprint = ht.recipes.from_name(run.recipe).fingerprint()
    return (done["plan"], done["fingerprint"]) == (dataclasses.asdict(plan), fingerprint)


def run_all(runs: list[Run], plan: Plan, options: argparse.Namespace, console: Console) -> list[str]:
    """Run what is missing, ``per_gpu`` at a time on each GPU; return the runs that failed."""
    slots = [gpu for _ in range(options.per_gpu) for gpu in range(options.gpus)]
    waiting = [run for run in runs if not is_done(options.out, run, plan)]
    waiting.sort(key=lambda run: cost(run.recipe), reverse=True)
    active: dict[subprocess.Popen[bytes], tuple[int, Run]] = {}
    failed = []
    while waiting or active:
        while waiting and slots:
            run, gpu = waiting.pop(0), slots.pop(0)
            active[start(run, gpu, plan, options)] = gpu, run
        time.sleep(0.2)
        for process in [p for p in active if p.poll() is not None]:
            gpu, run = active.pop(process)
            slots.insert(0, gpu)
            if process.returncode:
                failed.append(f"{run}: see {path_of(options.out, run).with_suffix('.log')}")
            console.print(f"{run!s:>40}  {'FAILED' if process.returncode else 'done'}", soft_wrap=True)
    return failed


def cost(recipe: str) -> int:
    """Return a number that grows with the work of a run: those that take longest start first."""
    config = ht.recipes.from_name(recipe)
    return sum(fmt.elements_per_byte for gemm in GEMMS for fmt in config.formats(gemm)) + 10 * config.stochastic


def start(run: Run, gpu: int, plan: Plan, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start one run as a process of its own, on one GPU."""
    command = [sys.executable, __file__, "--worker", json.dumps([run, dataclasses.asdict(plan)])]
    command += ["--out", str(options.out), "--device", options.device]
    environ = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if options.device == "cuda" else {})
    with path_of(options.out, run).with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, env=environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def work(options: argparse.Namespace) -> None:
    """Do one run and write its file."""
    fields, plan = json.loads(options.worker)
    run = Run(*fields)
    result = train(run, Plan(**plan), options.out, options.device)
    path = path_of(options.out, run)
    path.with_suffix(".partial").write_text(json.dumps(result))
    path.with_suffix(".partial").replace(path)  # a run that is killed leaves no half a file


# -- report ---------------------------------------------------------------------------------------------------------


def last_tenth(run: dict[str, Any]) -> float:
    """Return the mean training loss over the last tenth of the steps."""
    count = max(1, len(run["losses"]) // 10)
    return float(sum(run["losses"][-count:]) / count)


def allowance(recipe: str) -> float:
    """Return the percentage by which a recipe's loss may exceed BF16's: 1 with a product in FP4, else 0.25."""
    config = ht.recipes.from_name(recipe)
    elements = {fmt.element for gemm in GEMMS for fmt in config.formats(gemm)}
    return 1.0 if torch.float4_e2m1fn_x2 in elements else 0.25


def gap(run: dict[str, Any], baselines: dict[int, dict[str, Any]], figure: Any = last_tenth) -> float:
    """Return by how many percent a run is above BF16 of its seed."""
    return 100 * (figure(run) / figure(baselines[run["seed"]]) - 1)  # type: ignore[no-any-return]


def noise(runs: list[dict[str, Any]], baselines: dict[int, dict[str, Any]]) -> float | None:
    """Return the standard deviation of a run's gap, in percent: pooled over the recipes that ran with several seeds."""
    variances = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs if run["recipe"] != BASELINE):
        gaps = [gap(run, baselines) for run in runs if run["recipe"] == recipe]
        if len(gaps) > 1:
            variances.append(statistics.variance(gaps))
    return math.sqrt(statistics.mean(variances)) if variances else None


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per recipe: its gap to BF16 of the same seed, averaged over seeds, and what that is worth."""
    baselines = {run["seed"]: run for run in runs if run["recipe"] == BASELINE and not run["replica"]}
    runs = [run for run in runs if not run["replica"] and run["seed"] in baselines]
    of_one = noise(runs, baselines)
    rows = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        own = [run for run in runs if run["recipe"] == recipe]
        gaps, allowed = [gap(run, baselines) for run in own], allowance(recipe)
        error = None if of_one is None or recipe == BASELINE else of_one / math.sqrt(len(own))
        average = statistics.mean(gaps)
        rows.append(
            {
                "recipe": recipe,
                "seeds": len(own),
                "loss": statistics.mean(map(last_tenth, own)),
                "gap %": average,
                "noise %": error,
                "validation gap %": statistics.mean(gap(run, baselines, lambda r: r["validation"]) for run in own),
                "allowed %": allowed,
                "verdict": verdict(average, allowed, error),
                "tokens/s": statistics.mean(run["tokens_per_second"] for run in own),
                "gaps %": gaps,
            }
        )
    return rows


def verdict(average: float, allowed: float, error: float | None) -> str:
    """Return ``within``, ``noise`` where the excess is below two standard deviations, else ``above``."""
    if average <= allowed:
        return "within"
    return "noise" if error is not None and average - 2 * error <= allowed else "above"


def report(runs: list[dict[str, Any]], plan: Plan, options: argparse.Namespace, console: Console) -> None:
    """Print the table; write the JSON and the plot."""
    rows, where = summarize(runs), environment(options.device)
    baselines = {run["seed"]: run for run in runs if run["recipe"] == BASELINE and not run["replica"]}
    of_seeds = [last_tenth(run) for run in baselines.values()]
    replicas = [gap(run, baselines) for run in runs if run["replica"]]
    table = Table(title=f"{plan.steps} steps of {runs[0]['parameters'] / 1e6:.0f} M parameters on {where['device']}")
    shown = [header for header in rows[0] if header != "gaps %"]
    for header in shown:
        table.add_column(header, justify="left" if header == "recipe" else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(header, row[header]) for header in shown))
    console.print(table)
    console.print(f"BF16's seeds lie {100 * (max(of_seeds) / min(of_seeds) - 1):.2f} % apart")
    console.print(f"BF16's replicas: {', '.join(f'{value:+.2f} %' for value in replicas) or 'none'}")
    suffix = "cpu" if options.device == "cpu" else where["device"].replace(" ", "_").lower()
    texts = {name: (options.out / f"{name}.bin").stat().st_size for name in ("train", "validation")}
    record = {
        "environment": where,
        "plan": dataclasses.asdict(plan),
        "size": dataclasses.asdict(MODELS[plan.model]),
        "parameters": runs[0]["parameters"],
        "text bytes": texts,
        "losses of seeds": of_seeds,
        "gaps of replicas %": replicas,
        "noise of one run %": noise([r for r in runs if not r["replica"]], baselines),
        "rows": rows,
        "curves": {str(Run(r["recipe"], r["seed"], r["replica"])): smooth(r["losses"]) for r in runs},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"convergence_{suffix}.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(runs, options.plot)


def cell(header: str, value: Any) -> str:
    """Return a value as the table shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:+.2f}" if "%" in header else f"{value:,.0f}" if value > 1000 else f"{value:.4g}"
    return str(value)


def smooth(losses: list[float], points: int = 150) -> list[float]:
    """Return the means of about ``points`` windows."""
    window = max(1, len(losses) // points)
    return [round(sum(losses[i : i + window]) / window, 5) for i in range(0, len(losses) - window + 1, window)]


def plot(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses, and below how far each is from BF16 of the same seed; the band is BF16's own seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, gaps) = plt.subplots(2, figsize=(10, 10), layout="constrained", height_ratios=[2, 3])
    baselines = {r["seed"]: smooth(r["losses"], 50) for r in runs if r["recipe"] == BASELINE and not r["replica"]}
    colors = itertools.cycle(plt.get_cmap("tab20").colors)  # type: ignore[attr-defined]
    steps = [(i + 1) * len(runs[0]["losses"]) / len(baselines[0]) for i in range(len(baselines[0]))]
    for run in runs:
        curve, base = smooth(run["losses"], 50), baselines[run["seed"]]
        percent = [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)]
        if run["replica"]:
            label = "bf16, weights changed by a millionth" if run["replica"] == 1 else None
            gaps.plot(steps, percent, color="lightgray", linewidth=3, zorder=0, label=label)
        elif run["recipe"] != BASELINE and run["seed"] == 0:
            color = next(colors)
            losses.plot(steps, curve, color=color, linewidth=1)
            gaps.plot(steps, percent, color=color, linewidth=1.2, label=run["recipe"])
    losses.plot(steps, baselines[0], color="black", linewidth=1.5, label=BASELINE)
    losses.set(ylabel="training loss (nats per byte)", yscale="log")
    losses.legend()
    gaps.set(xlabel="step", ylabel="above BF16 of the same seed (%)", ylim=(-2, 4))
    gaps.axhline(0, color="black", linewidth=1)
    gaps.legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


# -- command line ---------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--per-gpu", type=int, default=1, help="runs at a time on one GPU")
    parser.add_argument("--model", default="113M", choices=MODELS)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=3, help="of BF16")
    parser.add_argument("--recipe-seeds", type=int, default=1, help="of every other recipe")
    parser.add_argument("--replicas", type=int, default=8, help="BF16 runs that differ by a millionth")
    parser.add_argument("--repeat", default="", help="recipes to run with all seeds of BF16, comma-separated")
    parser.add_argument("--recipes", default=",".join(ht.recipes.RECIPES), help="names or specs, comma-separated")
    parser.add_argument("--data", type=Path, help="file or folder; by default the source files of Python packages")
    parser.add_argument("--min-mb", type=float, default=100)
    parser.add_argument("--max-mb", type=float, default=400)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "convergence", help="folder of the single runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "convergence.png")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        options.recipes = [name for name in dict.fromkeys(options.recipes.split(",")) if name and name != BASELINE]
        options.repeat = [name for name in options.repeat.split(",") if name]
        for name in (*options.recipes, *options.repeat):
            ht.recipes.from_name(name)
        for name, least in (
            ("steps", 1),
            ("seeds", 1),
            ("recipe_seeds", 1),
            ("gpus", 1),
            ("per_gpu", 1),
            ("replicas", 0),
        ):
            if getattr(options, name) < least:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option}: at least {least} is required, got {getattr(options, name)}")
    except ValueError as error:
        parser.error(str(error))
    options.error = parser.error
    return options


def all_runs(options: argparse.Namespace) -> list[Run]:
    """Return what there is to run."""
    runs = [Run(BASELINE, seed) for seed in range(options.seeds)]
    runs += [Run(BASELINE, 0, replica) for replica in range(1, options.replicas + 1)]
    for name in options.recipes:
        seeds = options.seeds if name in options.repeat else min(options.recipe_seeds, options.seeds)
        runs += [Run(name, seed) for seed in range(seeds)]
    return runs


def main() -> int:
    """Do one run, or all and the report."""
    options = parse()
    if options.worker:
        work(options)
        return 0
    console = Console(width=140)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        digest = write_text(options.data, options.out, options.min_mb, options.max_mb)
    except ValueError as error:
        options.error(str(error))
    plan = Plan(options.model, options.steps, digest)
    runs = all_runs(options)
    failed = run_all(runs, plan, options, console)
    done = [json.loads(path_of(options.out, run).read_text()) for run in runs if is_done(options.out, run, plan)]
    if any(Run(r["recipe"], r["seed"], r["replica"]) == Run(BASELINE, 0) for r in done):
        report(done, plan, options, console)
    for line in failed:
        console.print(f"failed: {line}", soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

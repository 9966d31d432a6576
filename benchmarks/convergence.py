"""Train a byte-level transformer on real source text by every recipe, and compare the losses with BF16.

One process per run, several at a time on every GPU; a finished run writes its own file and is not repeated, so that an
interrupted benchmark continues. Figure of merit: the training loss over the last tenth of the steps, against BF16 from
the same seed, that is with the same initial weights and the same batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hybridtensor as ht

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from model import SIZES, Size, Transformer  # noqa: E402

BASELINE = "bf16"
MODELS = {"tiny": SIZES["tiny"], "113M": Size(dim=1536, layers=4, heads=24, context=256, batch=16, learning_rate=5e-4)}
SOURCES = {".py", ".pyi", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".js", ".ts", ".rst", ".md", ".cmake"}
WARM_UP, VALIDATION_BATCHES = 100, 64
VALIDATION_EVERY = 20  # one file in so many is held out


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


def train(recipe: str, seed: int, plan: Plan, out: Path, device: str) -> dict[str, Any]:
    """Train once; return losses, validation loss and speed."""
    size = MODELS[plan.model]
    train_text, validation_text = (Text(out / f"{name}.bin", size, device) for name in ("train", "validation"))
    torch.manual_seed(seed)
    model = Transformer(size).to(device)
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
        "spec": str(ht.recipes.from_name(recipe)),
        "fingerprint": ht.recipes.from_name(recipe).fingerprint(),
        "plan": dataclasses.asdict(plan),
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": values,
        "validation": sum(held_out) / len(held_out),
        "seconds": seconds,
        "tokens_per_second": plan.steps * size.batch * size.context / seconds,
    }


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], device: str) -> Tensor:
    """Return the loss in nats per byte, computed in bfloat16 from fp32 weights."""
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        loss: Tensor = model(*batch)
    return loss


# -- all runs -------------------------------------------------------------------------------------------------------


def path_of(out: Path, recipe: str, seed: int) -> Path:
    """Return the file of one run."""
    return out / f"{recipe.replace('/', '-')}-{seed}.json"


def is_done(path: Path, plan: Plan) -> bool:
    """Whether a run has been finished under this plan."""
    return path.exists() and json.loads(path.read_text())["plan"] == dataclasses.asdict(plan)


def run_all(runs: list[tuple[str, int]], plan: Plan, options: argparse.Namespace, console: Console) -> list[str]:
    """Run what is missing, ``per_gpu`` at a time on each GPU; return the runs that failed."""
    slots = [gpu for _ in range(options.per_gpu) for gpu in range(options.gpus)]
    waiting = [run for run in runs if not is_done(path_of(options.out, *run), plan)]
    waiting.sort(key=lambda run: cost(run[0]), reverse=True)
    active: dict[subprocess.Popen[bytes], tuple[int, tuple[str, int]]] = {}
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
                failed.append(f"{run[0]}, seed {run[1]}: see {path_of(options.out, *run).with_suffix('.log')}")
            console.print(f"{run[0]:>32} seed {run[1]}  {'FAILED' if process.returncode else 'done'}", soft_wrap=True)
    return failed


def cost(recipe: str) -> int:
    """Return a number that grows with the work of a run: those that take longest start first."""
    config = ht.recipes.from_name(recipe)
    return (
        sum(fmt.elements_per_byte for gemm in ht.config.GEMMS for fmt in config.formats(gemm)) + 10 * config.stochastic
    )


def start(run: tuple[str, int], gpu: int, plan: Plan, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start one run as a process of its own, on one GPU."""
    recipe, seed = run
    command = [sys.executable, __file__, "--worker", json.dumps([recipe, seed, dataclasses.asdict(plan)])]
    command += ["--out", str(options.out), "--device", options.device]
    environ = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if options.device == "cuda" else {})
    with path_of(options.out, recipe, seed).with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, env=environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def work(options: argparse.Namespace) -> None:
    """Do one run and write its file."""
    recipe, seed, plan = json.loads(options.worker)
    result = train(recipe, seed, Plan(**plan), options.out, options.device)
    path_of(options.out, recipe, seed).write_text(json.dumps(result))


# -- report ---------------------------------------------------------------------------------------------------------


def last_tenth(run: dict[str, Any]) -> float:
    """Return the mean training loss over the last tenth of the steps."""
    count = max(1, len(run["losses"]) // 10)
    return float(sum(run["losses"][-count:]) / count)


def allowance(recipe: str) -> float:
    """Return the percentage by which a recipe's loss may exceed BF16's: 1 with a product in FP4, else 0.25."""
    config = ht.recipes.from_name(recipe)
    elements = {fmt.element for gemm in ht.config.GEMMS for fmt in config.formats(gemm)}
    return 1.0 if torch.float4_e2m1fn_x2 in elements else 0.25


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per run: loss, gaps to BF16 of the same seed and to the mean of its seeds, verdict."""
    baselines = {run["seed"]: run for run in runs if run["recipe"] == BASELINE}
    mean = sum(map(last_tenth, baselines.values())) / len(baselines)
    rows = []
    for run in runs:
        base = baselines[run["seed"]]
        gap = 100 * (last_tenth(run) / last_tenth(base) - 1)
        allowed = allowance(run["recipe"])
        rows.append(
            {
                "recipe": run["recipe"],
                "seed": run["seed"],
                "loss, last tenth": last_tenth(run),
                "gap %": gap,
                "gap to mean %": 100 * (last_tenth(run) / mean - 1),
                "validation": run["validation"],
                "validation gap %": 100 * (run["validation"] / base["validation"] - 1),
                "allowed %": allowed,
                "within": gap <= allowed,
                "tokens/s": run["tokens_per_second"],
            }
        )
    return rows


def report(runs: list[dict[str, Any]], plan: Plan, options: argparse.Namespace, console: Console) -> None:
    """Print the table; write the JSON and the plot."""
    rows, where = summarize(runs), environment(options.device)
    of_baseline = [row["loss, last tenth"] for row in rows if row["recipe"] == BASELINE]
    spread = 100 * (max(of_baseline) / min(of_baseline) - 1)
    table = Table(title=f"{plan.steps} steps of {runs[0]['parameters'] / 1e6:.0f} M parameters on {where['device']}")
    for header in rows[0]:
        table.add_column(header, justify="left" if header == "recipe" else "right")
    for row in rows:
        table.add_row(*(f"{v:+.3f}" if "gap" in k else f"{v:.4g}" if isinstance(v, float) else str(v)
                        for k, v in row.items()))  # fmt: skip
    console.print(table)
    console.print(f"BF16's seeds lie {spread:.2f} % apart")
    suffix = "cpu" if options.device == "cpu" else where["device"].replace(" ", "_").lower()
    texts = {name: (options.out / f"{name}.bin").stat().st_size for name in ("train", "validation")}
    record = {
        "environment": where,
        "plan": dataclasses.asdict(plan),
        "size": dataclasses.asdict(MODELS[plan.model]),
        "text bytes": texts,
        "baseline spread %": spread,
        "rows": rows,
        "curves": {f"{run['recipe']}-{run['seed']}": smooth(run["losses"]) for run in runs},
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / f"convergence_{suffix}.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(runs, options.plot)


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
    baselines = {run["seed"]: smooth(run["losses"], 50) for run in runs if run["recipe"] == BASELINE}
    colors = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for color, run in enumerate(r for r in runs if r["recipe"] != BASELINE):
        curve, base = smooth(run["losses"], 50), baselines[run["seed"]]
        steps = [i * len(run["losses"]) / len(curve) for i in range(1, len(curve) + 1)]
        losses.plot(steps, curve, color=colors[color % 20], linewidth=1)
        gap = [100 * (a / b - 1) for a, b in zip(curve, base, strict=True)]
        gaps.plot(steps, gap, color=colors[color % 20], linewidth=1.2, label=run["recipe"])
    steps = [i * len(runs[0]["losses"]) / len(baselines[0]) for i in range(1, len(baselines[0]) + 1)]
    losses.plot(steps, baselines[0], color="black", linewidth=1.5, label=BASELINE)
    losses.set(ylabel="training loss (nats per byte)", yscale="log")
    losses.legend()
    gaps.set(xlabel="step", ylabel="above BF16 of the same seed (%)", ylim=(-1, 4))
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
    parser.add_argument("--seeds", type=int, default=3, help="BF16 runs; every other recipe runs with seed 0")
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
        options.recipes = [name for name in options.recipes.split(",") if name and name != BASELINE]
        for name in options.recipes:
            ht.recipes.from_name(name)
        for name in ("steps", "seeds", "gpus", "per_gpu"):
            if getattr(options, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: at least 1 is required, got {getattr(options, name)}")
    except ValueError as error:
        parser.error(str(error))
    options.error = parser.error
    return options


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
    runs = [(BASELINE, seed) for seed in range(options.seeds)] + [(name, 0) for name in options.recipes]
    failed = run_all(runs, plan, options, console)
    done = [
        json.loads(path_of(options.out, *run).read_text()) for run in runs if is_done(path_of(options.out, *run), plan)
    ]
    if any(run["recipe"] == BASELINE and run["seed"] == 0 for run in done):
        report(done, plan, options, console)
    for line in failed:
        console.print(f"failed: {line}", soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

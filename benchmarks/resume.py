"""A training run that is killed at random and resumed on other numbers of GPUs, against one that nobody disturbs.

Every process of the run is killed (SIGKILL) after a step that is drawn, and the next number of ranks goes on from the
newest checkpoint. On one number of ranks all losses are bitwise those of the undisturbed run; on others sums have
another order. Beside it what checkpoints take, of the recipe and of BF16::

    python benchmarks/resume.py --ranks 8,4,2 --steps 1000 --kills 12
    python benchmarks/resume.py --ranks 8,4,2 --steps 1000 --kills 12 --tensor-parallel
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, report
from fsdp import convert
from llama import Llama, Size
from scale import backward_of_cut, cut, wrap
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import hybridtensor as ht
from hybridtensor.distributed import checkpoint

SIZES = {"cuda": (Size(layers=4, dim=2048, hidden=5632, heads=16), 1024), "cpu": (Size(2, 64, 128, 2, 2, 256), 32)}
SEQUENCES = 8  # of a batch, for all ranks together


def train(recipe: str, kind: str, steps: int, every: int, folder: Path, tensor_parallel: bool) -> None:
    """Train from the newest checkpoint in ``folder`` on, as one of several ranks."""
    size, length = SIZES[kind]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = (ranks // 2, 2) if tensor_parallel else (ranks, 1)
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    with torch.device(kind):
        model = Llama(size)
    convert(model, recipe)
    if tensor_parallel:
        cut(model, recipe, mesh)
    elif recipe != "bf16":
        ht.set_mesh_(model, mesh)
    wrap(model, (), mesh["dp"], kind, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    state, first = {"model": model, "optimizer": optimizer}, 0
    if any(folder.glob("step*")):
        first = checkpoint.load(folder, state)
    for step in range(first, steps):
        drawn = torch.Generator().manual_seed(step)
        batch = torch.randint(size.vocab, (SEQUENCES, length), generator=drawn)
        ids = batch.chunk(shape[0])[mesh["dp"].get_local_rank()].to(kind)
        loss = backward_of_cut(model, ids, mesh) if tensor_parallel else backward(model, ids)
        optimizer.step()
        optimizer.zero_grad()
        if recipe != "bf16":
            ht.step_(model)
        dist.all_reduce(loss, dist.ReduceOp.SUM)
        seconds = 0.0
        if (step + 1) % every == 0:
            begin = time.perf_counter()
            checkpoint.save(folder, step + 1, state)
            seconds = time.perf_counter() - begin
        if rank == 0:
            line = {"step": step, "loss": (loss / ranks).item().hex(), "ranks": ranks, "seconds": seconds}
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


def backward(model: Llama, ids: Tensor) -> Tensor:
    """Run forward and backward, and return the loss."""
    loss = model(ids)
    loss.backward()
    return loss.detach()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return what was written of each step, in the order of time."""
    path = folder / "losses.jsonl"
    whole = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in whole if line.endswith("\n")]


def start(ranks: int, recipe: str, folder: Path, asked: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run of ``ranks`` processes, which leave their numbers in ``folder``: torchrun's end does not end them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__]
    command += ["--worker", str(folder), "--recipe", recipe, "--device", asked.device, "--steps", str(asked.steps)]
    command += ["--every", str(asked.every), *(["--tensor-parallel"] if asked.tensor_parallel else [])]
    shutil.rmtree(folder / "ranks", ignore_errors=True)
    (folder / "ranks").mkdir()
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the end of a run.

    Raises:
        RuntimeError: If it failed.
    """
    if process.wait():
        tail = (folder / "log.txt").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"resume: the run in {folder} ended with {process.returncode}; its last words: {tail}")


def killed(ranks: list[int], folder: Path, asked: argparse.Namespace) -> int:
    """Train to the end, killed ``asked.kills`` times, and return in how many steps that took."""
    folder.mkdir(parents=True)
    drawn, last = random.Random(asked.seed), asked.steps - 1
    numbers = itertools.cycle(ranks)
    for _ in range(asked.kills):
        done = len(lines_of(folder))
        wanted = done + drawn.randint(1, max(1, 2 * asked.steps // (asked.kills + 1)))
        process = start(next(numbers), asked.recipe, folder, asked)
        while process.poll() is None and len(lines_of(folder)) < wanted:
            time.sleep(0.01)
        if process.poll() is not None:
            finish(process, folder)
            break
        for pid in [process.pid, *(int(path.name) for path in (folder / "ranks").iterdir())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # in a checkpoint, too, if it is there just then
        process.wait()
    if max((line["step"] for line in lines_of(folder)), default=-1) < last:
        finish(start(next(numbers), asked.recipe, folder, asked), folder)
    return len(lines_of(folder))


def undisturbed(name: str, ranks: int, recipe: str, folder: Path, asked: argparse.Namespace) -> dict[int, float]:
    """Train to the end, and return the loss of each step."""
    (folder / name).mkdir(parents=True)
    finish(start(ranks, recipe, folder / name, asked), folder / name)
    return losses_of(folder / name)


def losses_of(folder: Path) -> dict[int, float]:
    """Return the last loss of each step."""
    return {line["step"]: float.fromhex(line["loss"]) for line in lines_of(folder)}


def checkpoints_of(folder: Path) -> dict[str, float]:
    """Return the median seconds of a checkpoint, and its MiB."""
    seconds = sorted(line["seconds"] for line in lines_of(folder) if line["seconds"])
    newest = max(folder.glob("step*"), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    return {"checkpoint s": seconds[len(seconds) // 2], "checkpoint MiB": size / 2**20}


def compare(asked: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one row per run.

    Raises:
        RuntimeError: If a run has no loss of a step, or on one number of ranks another one.
    """
    ranks = [int(number) for number in asked.ranks.split(",")]
    straight = undisturbed("straight", ranks[0], asked.recipe, folder, asked)
    rows = [{"run": "undisturbed", "recipe": asked.recipe, "ranks": str(ranks[0]), "steps": len(straight)}]
    rows[0] |= {"bitwise": len(straight), "largest difference %": 0.0, **checkpoints_of(folder / "straight")}
    runs = [("killed", [ranks[0]]), ("killed, other ranks", ranks)]
    for name, numbers in runs[: len(ranks)]:
        place = folder / name.replace(", ", "-").replace(" ", "-")
        taken, found = killed(numbers, place, asked), losses_of(place)
        if found.keys() != straight.keys():
            raise RuntimeError(f"resume: {asked.steps} losses of {name} are missing or too many: {sorted(found)[-3:]}")
        same = sum(found[step] == loss for step, loss in straight.items())
        apart = max(abs(found[step] / loss - 1) for step, loss in straight.items())
        if numbers == [ranks[0]] and same < asked.steps:
            raise RuntimeError(f"resume: {asked.steps - same} losses of {asked.steps} differ on {ranks[0]} ranks")
        row = {"run": name, "recipe": asked.recipe, "ranks": ",".join(map(str, numbers)), "steps": taken}
        rows.append(row | {"bitwise": same, "largest difference %": 100 * apart, **checkpoints_of(place)})
    for number in ranks[1:]:  # what the order of sums alone does
        other = undisturbed(f"straight-{number}", number, asked.recipe, folder, asked)
        row = {"run": "undisturbed", "recipe": asked.recipe, "ranks": str(number), "steps": len(other)}
        apart = max(abs(other[step] / loss - 1) for step, loss in straight.items())
        same = sum(other[step] == loss for step, loss in straight.items())
        of = checkpoints_of(folder / f"straight-{number}")
        rows.append(row | {"bitwise": same, "largest difference %": 100 * apart, **of})
    plain = undisturbed("bf16", ranks[0], "bf16", folder, asked)
    row = {"run": "undisturbed", "recipe": "bf16", "ranks": str(ranks[0]), "steps": len(plain)}
    rows.append(row | {"bitwise": "", "largest difference %": "", **checkpoints_of(folder / "bf16")})
    return rows


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", default="8,4,2", help="in turn, from kill to kill")
    parser.add_argument("--recipe", default="fp8_delayed")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=25, help="steps from checkpoint to checkpoint")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor-parallel", action="store_true", help="two ranks for each layer")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Compare runs, or be a rank of one."""
    asked = options()
    if asked.worker is None:
        with tempfile.TemporaryDirectory() as folder:
            name = "resume_tp" if asked.tensor_parallel else "resume"
            report(name, compare(asked, Path(folder)), asked)
        return
    (asked.worker / "ranks" / str(os.getpid())).touch()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts: reproducible cuBLAS
    torch.use_deterministic_algorithms(True)
    if asked.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if asked.device == "cuda" else "gloo")
    train(asked.recipe, asked.device, asked.steps, asked.every, asked.worker, asked.tensor_parallel)
    dist.barrier()  # a rank that leaves closes connections that others still read from
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

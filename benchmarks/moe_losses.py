"""Losses of a small mixture of experts on real text, 300 steps of ``examples/moe.py`` for each recipe, beside BF16."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import arguments, report

EXAMPLE = Path(__file__).parent.parent / "examples" / "moe.py"
# Recipe of linear layers, of experts
RUNS = {
    "bf16": ("bf16", "bf16"),
    "bf16, other seed": ("bf16", "bf16"),
    "fp8_rowwise": ("fp8_rowwise", "fp8_rowwise"),
    "fp8_block": ("fp8_block", "fp8_block"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4"),
    "mxfp8, experts nvfp4_row_scaled_fwd_mxfp8_bwd": ("mxfp8", "nvfp4_row_scaled_fwd_mxfp8_bwd"),
}
LAST = 50


def start(name: str, folder: Path, device: str, steps: int) -> subprocess.Popen[bytes]:
    """Start the run of a recipe."""
    linear, experts = RUNS[name]
    command = [sys.executable, str(EXAMPLE), "--recipe", linear, "--experts-recipe", experts, "--device", device]
    command += ["--steps", str(steps), "--out", str(folder), "--seed", str(int("seed" in name))]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def row(name: str, folder: Path) -> dict[str, Any]:
    """Return the losses of a run."""
    losses = [float(line) for line in (folder / "losses.txt").read_text().split()]
    return {
        "recipe": name,
        f"mean loss of the last {LAST} steps": statistics.mean(losses[-LAST:]),
        "steps": len(losses),
    }


if __name__ == "__main__":
    options = arguments(__doc__)
    steps = 300 if options.repeats > 1 else 2
    with tempfile.TemporaryDirectory() as made:
        folders = {name: Path(made) / str(index) for index, name in enumerate(RUNS)}
        processes = {name: start(name, folder, options.device, steps) for name, folder in folders.items()}
        failed = [name for name, process in processes.items() if process.wait()]
        if failed:
            raise SystemExit(f"no losses of {', '.join(failed)}")
        report("moe_losses", [row(name, folder) for name, folder in folders.items()], options)

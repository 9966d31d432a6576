"""Seconds that ``import hybridtensor``, its first use and its commands add to ``import torch``, and where they go.

Every figure is a median over fresh processes that take turns, of the difference to the process before it in the list
that does less.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import arguments, report

STEP = "p = torch.nn.Parameter(torch.ones(2)); o = torch.optim.AdamW([p]); p.sum().backward(); o.step()"
COMPILER = "import torch._dynamo, torch.distributed.tensor"
QUIET = "import logging; logging.disable()"
USE = "import hybridtensor as ht; ht.quantize_"
VARIANTS = {  # what runs, and what it is compared with
    "torch": ("import torch", None),
    "hybridtensor": ("import torch, hybridtensor", "torch"),
    "hybridtensor and its first use": (f"import torch; {USE}", "torch"),
    "torch's compiler and DTensor": (f"import torch; {COMPILER}", "torch"),
    "torchao, beside these": (f"import torch; {COMPILER}; import torchao.quantization", "torch's compiler and DTensor"),
    "hybridtensor's first use, beside all of them": (
        f"import torch; {COMPILER}; import torchao.quantization; {USE}",
        "torchao, beside these",
    ),
    "a first AdamW step": (f"import torch; {STEP}", "torch"),
    "hybridtensor's first use, beside such a step": (f"import torch; {USE}; {STEP}", "a first AdamW step"),
    "hybridtensor recipes": ("from hybridtensor.__main__ import main; main(['recipes'])", "torch"),
    "hybridtensor verify NOWHERE": ("from hybridtensor.__main__ import main; main(['verify', 'nowhere'])", "torch"),
    "hybridtensor doctor": ("from hybridtensor.__main__ import main; main(['doctor'])", "torch"),
}


def seconds(program: str) -> float:
    """Return how long a fresh process takes for a program."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    begin = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-c", f"{QUIET}; {program}"]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Measure all variants, in turns."""
    options = arguments(__doc__ or "")
    options.device = "cpu"
    taken: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(options.repeats + 1):
        for name, (program, _) in VARIANTS.items():
            once = seconds(program)
            if repeat:  # the first one reads from the disk
                taken[name].append(once)
    rows = []
    for name, (_, before) in VARIANTS.items():
        zero = [0.0] * options.repeats if before is None else taken[before]
        added = statistics.median(a - b for a, b in zip(taken[name], zero, strict=True))
        rows.append({"what": name, "beyond": before or "", "seconds": statistics.median(taken[name]), "adds": added})
    report("imports", rows, options)


if __name__ == "__main__":
    main()

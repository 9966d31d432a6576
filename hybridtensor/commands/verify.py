"""``hybridtensor verify FOLDER``: whether checkpoints are what was written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridtensor.commands.common import Parsers, add_command, print_json
from hybridtensor.distributed import checkpoint


def add(parsers: Parsers) -> None:
    """Say what the command takes."""
    verify = add_command(
        parsers, "verify", _run, "tell whether checkpoints are what was written", as_json=True
    )
    verify.add_argument(
        "directory", type=Path, help="a run's folder of checkpoints, or the folder of one step"
    )


def _run(given: argparse.Namespace) -> int:
    """Print every step with what is wrong with it."""
    found = checkpoint.verify(given.directory)
    if given.json:
        print_json(
            {"steps": [{"step": step, "problems": list(wrong)} for step, wrong in found.items()]}
        )
    elif not found:
        print(f"{given.directory}: no checkpoint", file=sys.stderr)
    else:
        for step, problems in found.items():
            print(f"step {step}: {'good' if not problems else 'DAMAGED'}")
            for problem in problems:
                print(f"  {problem}")
    if not found:
        return 2
    return 1 if any(found.values()) else 0

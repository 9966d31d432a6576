"""``hybridtensor verify FOLDER``: whether checkpoints, or what was exported, are what was written."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridtensor.commands.common import Parsers, add_command, print_json
from hybridtensor.distributed import checkpoint
from hybridtensor.inference.files import DIGESTS
from hybridtensor.inference.folder import Folder
from hybridtensor.inference.safetensors_files import safetensors
from hybridtensor.printed import visible


def add(parsers: Parsers) -> None:
    verify = add_command(
        parsers, "verify", _run, "tell whether checkpoints are what was written", as_json=True
    )
    verify.add_argument(
        "directory",
        type=Path,
        help="a run's folder of checkpoints, the folder of one step, or one that was exported",
    )


def _run(given: argparse.Namespace) -> int:
    found = checkpoint.verify(given.directory)
    if not found and (given.directory / DIGESTS).is_file():
        return _run_exported(given)
    if given.json:
        print_json(
            {"steps": [{"step": step, "problems": list(wrong)} for step, wrong in found.items()]}
        )
    elif not found:
        print(f"{given.directory}: {_what_it_is(given.directory)}", file=sys.stderr)
    else:
        for step, problems in found.items():
            print(f"step {step}: {'good' if not problems else 'DAMAGED'}")
            for problem in problems:
                print(f"  {visible(problem)}")
    if not found:
        return 2
    return 1 if any(found.values()) else 0


def _run_exported(given: argparse.Namespace) -> int:
    problems: list[str] = []
    try:
        Folder("verify", safetensors("verify"), given.directory).close()
    except ValueError as error:
        problems.append(str(error))
    if given.json:
        print_json({"steps": [], "exported": {"problems": problems}})
    else:
        print(f"exported weights: {'DAMAGED' if problems else 'good'}")
        for problem in problems:
            print(f"  {visible(problem)}")
    return 1 if problems else 0


def _what_it_is(folder: Path) -> str:
    """Return why there is nothing to verify."""
    if not folder.is_dir():
        return "a file; a folder is required" if folder.exists() else "no such folder"
    if any(folder.glob("*.safetensors")):
        return f"no checkpoint of a run, but safetensors without {DIGESTS}, which would tell what was written"
    return "no checkpoint"

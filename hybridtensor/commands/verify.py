"""``hybridtensor verify FOLDER``: whether checkpoints, or what was exported, are what was written."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from hybridtensor.commands.common import add_json, print_json
from hybridtensor.printed import visible
from hybridtensor.untrusted.manifest import has_steps
from hybridtensor.untrusted.safetensors_files import safetensors
from hybridtensor.untrusted.safetensors_folder import DIGESTS, Folder


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verify``."""
    add_json(command)
    command.add_argument(
        "directory",
        type=Path,
        help="a run's folder of checkpoints, the folder of one step, or one that was exported",
    )


def run(given: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    found = _verified(given.directory)
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


def _verified(directory: Path) -> dict[int, list[str]]:
    """Return the problems of each step; the reader, and torch.distributed.checkpoint, are imported if there is one."""
    if not has_steps(directory):
        return {}
    verify: Callable[[Path], dict[int, list[str]]]
    verify = importlib.import_module("hybridtensor.untrusted.verifying").verify
    return verify(directory)


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

"""``hybridtensor report FILE``: a page of what was watched."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from hybridtensor.commands.common import add_json, print_json
from hybridtensor.watching import Recording, report


def add(command: argparse.ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    add_json(command)
    command.add_argument("file", type=Path, help="that watched.recording().save(FILE) wrote")
    command.add_argument("page", type=Path, nargs="?", help="by default FILE with .html")
    command.add_argument(
        "--beside",
        type=Path,
        metavar="OTHER",
        help="another recording, to compare with on the page",
    )


def run(given: argparse.Namespace) -> int:
    """Write the page; or print the last sample's numbers as data."""
    if given.json:
        extra = given.page if given.beside is None else "--beside"
        if extra is not None:
            raise ValueError(
                f"one recording, and no page, is required with --json, got {extra}; leave one out"
            )
        recording = Recording.load(given.file)
        last = recording.samples[-1] if recording.samples else None
        scalars = {} if last is None else last.scalars()
        numbers = {name: value if math.isfinite(value) else None for name, value in scalars.items()}
        print_json({"step": None if last is None else last.step, "numbers": numbers})
        return 0
    if not given.file.is_file():
        raise ValueError(
            f"a file that watched.recording().save wrote is required, got {given.file}"
        )
    page = given.page or given.file.with_suffix(".html")
    print(report(given.file, page, beside=given.beside))
    return 0

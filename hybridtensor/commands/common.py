"""What several commands need."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command that can print data."""
    command.add_argument("--json", action="store_true", help="print data for programs")


def print_json(data: object) -> None:
    """Print data as indented JSON."""
    print(json.dumps(data, indent=1))


def config_of(folder: Path) -> object:
    """Return the ``config.json`` of a folder as transformers reads it; raise ValueError if there is none."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"a folder with config.json is required, got {folder}")
    return transformers().AutoConfig.from_pretrained(folder)


def transformers() -> ModuleType:
    """Import transformers; raise ImportError with advice if it is missing."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "the package transformers is required; pip install hybridtensor[inference]"
        ) from error

"""The command line: ``hybridtensor COMMAND``, or ``python -m hybridtensor COMMAND``."""

from __future__ import annotations

import argparse
import os
import sys

from hybridtensor.commands import doctor, explain, export, recipes, report, verify
from hybridtensor.printed import visible
from hybridtensor.version import __version__

_COMMANDS = (doctor, recipes, explain, verify, export, report)


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="hybridtensor",
        description="Low-precision training in PyTorch: what recipes do, and what to do with checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"hybridtensor {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add(parsers)
    given = parser.parse_args(arguments)
    try:
        code = int(given.run(given))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(visible(f"hybridtensor {given.command}: {error}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``hybridtensor COMMAND``, or ``python -m hybridtensor COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from hybridtensor.printed import visible
from hybridtensor.version import __version__

_COMMANDS = {
    "doctor": "tell what this machine runs natively, and known problems",
    "recipes": "list named recipes, formats and modifiers",
    "explain": "tell what a recipe does",
    "verify": "tell whether checkpoints are what was written",
    "export": "write weights as inference engines load them",
    "report": "write a page of HTML of what was watched",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        given = _parser(chosen).parse_args(arguments)
        code = int(given.run(given))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(visible(f"hybridtensor {chosen}: {error}"), file=sys.stderr)
        return 1


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of the chosen one: its module alone is imported."""
    parser = argparse.ArgumentParser(
        prog="hybridtensor",
        description="Low-precision training in PyTorch: what recipes do, and what to do with checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"hybridtensor {__version__}")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, words in _COMMANDS.items():
        description = f"{words[0].upper()}{words[1:]}."
        command = parsers.add_parser(name, help=words, description=description)
        if name == chosen:
            module = importlib.import_module(f"hybridtensor.commands.{name}")
            module.add(command)
            command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())

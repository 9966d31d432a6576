"""Verify checkpoints by their digests: ``hybridtensor verify DIR``, or ``python -m hybridtensor.verify DIR``.

Prints every step of a run's folder with what is wrong with it. Exits with 0 if all are good, 1 if
one is not, 2 if there is none.
"""

from __future__ import annotations

import sys

from hybridtensor.__main__ import main as _main


def main(arguments: list[str] | None = None) -> int:
    """Run ``hybridtensor verify`` with the arguments, and return its exit code."""
    return _main(["verify", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())

"""Tell whether checkpoints are what was written: ``python -m hybridtensor.verify DIR``.

Prints every step of a run's folder with what is wrong with it. Exits with 0 if all are good, 1 if
one is not, 2 if there is none.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridtensor.distributed import checkpoint


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridtensor.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "directory", type=Path, help="a run's folder of checkpoints, or the folder of one step"
    )
    directory = parser.parse_args(arguments).directory
    found = checkpoint.verify(directory)
    if not found:
        print(f"{directory}: no checkpoint", file=sys.stderr)
        return 2
    for step, problems in found.items():
        print(f"step {step}: {'good' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

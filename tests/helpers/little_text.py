"""What benchmarks that train are tested with: a little text, and little of it held out."""

import contextlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@contextlib.contextmanager
def benchmarks_hold_out_little():
    """Let modules of ``benchmarks`` be imported, with two batches of text that is held out."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(BENCHMARKS))
        patched.setattr("losses.training.VALIDATION_BATCHES", 2)
        yield


def write_text(folder):
    """Write a little text of many files, which is read faster than that of the Python packages; return the folder."""
    for i in range(25):
        (folder / f"{i:02}.txt").write_text(f"{i}: the quick brown fox jumps over the lazy dog\n" * 20)
    return folder

"""Scripts that run in this process: starting another one takes seconds."""

import os
import runpy
import subprocess
import sys

import pytest


def called(script, arguments, monkeypatch):
    """Run a script; return its exit code.

    Args:
        script: Its path.
        arguments: Its command line.
        monkeypatch: pytest's.
    """
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def on_ranks(script, ranks, *arguments):
    """Run a script with one thread on each of several ranks; return its exit code, output and errors."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *start, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def refused(script, arguments, monkeypatch, capsys):
    """Run a script whose arguments are wrong; return the lines that it ends with.

    Args:
        script: Its path.
        arguments: Its command line.
        monkeypatch: pytest's.
        capsys: pytest's.
    """
    assert called(script, arguments, monkeypatch) == 2
    return capsys.readouterr().err.splitlines()

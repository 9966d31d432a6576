"""Scripts that run in this process: starting another one takes seconds."""

import runpy
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

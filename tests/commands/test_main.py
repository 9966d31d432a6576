"""The command line as a whole: its ways in, and its exit codes."""

import os
import runpy
import subprocess
import sys

import pytest

import hybridtensor as ht
from hybridtensor.__main__ import main


def test_module_is_a_command(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "hybridtensor.__main__")
    monkeypatch.setattr(sys, "argv", ["hybridtensor", "recipes"])
    with pytest.raises(SystemExit) as exited:
        runpy.run_module("hybridtensor", run_name="__main__")
    assert exited.value.code == 0
    assert "fp8_rowwise_hp_grad_weight" in capsys.readouterr().out


def test_whoever_reads_may_stop(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-W", "error", "-m", "hybridtensor", "recipes"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"hybridtensor {ht.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["explain"], ["explain", "fp8", "--size", "1x1", "--model", "."]])
def test_wrong_arguments_are_2(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert "usage: hybridtensor" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "recipes", "explain", "verify", "export", "report"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hybridtensor {command}")

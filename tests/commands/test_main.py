"""The command line as a whole: its ways in, and its exit codes."""

import os
import subprocess
import sys

import pytest

import hybridtensor as ht
from hybridtensor.__main__ import main


def run(*arguments, reads=None):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "hybridtensor", *arguments], stdout=reads or subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_module_is_a_command():
    done = run("recipes")
    assert (done.returncode, done.stderr) == (0, "")
    assert "fp8_rowwise_hp_grad_weight" in done.stdout


def test_whoever_reads_may_stop(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = run("recipes", reads=writing)
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

"""The benchmarks run: on a CPU, once, with small shapes. What they print is not looked at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import long

ROOT = Path(__file__).parent.parent
SLOW = ["linear", "linear_details", "end_to_end", "memory"]
ONCE = ["--device", "cpu", "--repeats", "1", "--out"]


def run(name, tmp_path, *options):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cast", *(pytest.param(name, marks=long("takes half a minute")) for name in SLOW)])
def test_runs(name, tmp_path):
    run(name, tmp_path, *ONCE, tmp_path)
    assert [path.suffix for path in tmp_path.glob(f"{name}_*")] == [".json"]


def test_of_host_time_runs(tmp_path):
    run("host", tmp_path, "--device", "cpu", "--rounds", "1", "--count", "1", "--recipes", "fp8")

"""The benchmarks run: on a CPU, once, with small shapes. What they print is not looked at."""

import ast
import importlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import long

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.filterwarnings("default")  # compiling, torch warns of its own ways
SLOW = ["imports", "linear", "linear_details", "end_to_end", "saved", "memory", "small_batches"]


@pytest.fixture
def run(monkeypatch):
    """Run a benchmark in this process."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = [path.stem for path in BENCHMARKS.glob("*.py")]  # other folders have modules of the same names
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--device", "cpu", *map(str, options)])
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")

    yield run
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_what_it_imports_of_the_package_is_there(path):
    """Also where only a GPU gets to."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "hybridtensor":
            if node.module.startswith("hybridtensor.integrations."):
                pytest.importorskip(node.module.rpartition(".")[2], reason="an integration needs its package")
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize(
    "name",
    ["blocks", "cast", *(pytest.param(name, marks=long("takes half a minute")) for name in SLOW)],
)
def test_runs(name, run, tmp_path):
    run(name, "--repeats", 1, "--out", tmp_path)
    assert (tmp_path / f"{name}_cpu.json").stat().st_size > 100


@long("compiles what it measures")
def test_of_models_runs(run, tmp_path):
    pytest.importorskip("transformers", reason="its models are measured")
    run("models", "--models", "tiny", "--tokens", 64, "--modes", "eager,blocks", "--recipes", "fp8", "--repeats", 1,
        "--out", tmp_path)  # fmt: skip
    assert (tmp_path / "models_cpu.json").stat().st_size > 100


@long("compiles what it measures")
def test_of_host_time_runs(run, capfd):
    run("host", "--rounds", 1, "--count", 1, "--recipes", "fp8")
    assert '"fp8": ' in capfd.readouterr().out


@long("processes of their own take a while to start")
def test_of_scaling_runs(run, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    asked = ["--device", "cpu", "--repeats", "1", "--recipes", "fp8,fp8_block", "--out", str(tmp_path)]
    subprocess.run([*command, str(BENCHMARKS / "scale.py"), *asked], check=True)
    run("scale", "--table", "--out", tmp_path)
    rows = json.loads((tmp_path / "scale_cpu.json").read_text())["rows"]
    assert {row["layout"] for row in rows} == {"fsdp", "hsdp", "fsdp tp", "pp fsdp", "moe fsdp", "moe ep fsdp"}
    assert {row["efficiency"] for row in rows} == {1.0}, "of one number of ranks"


@long("processes of their own take a while to start")
def test_killed_runs_are_resumed_with_the_same_losses(run, tmp_path):
    run("resume", "--ranks", "2,1", "--steps", 16, "--every", 4, "--kills", 2, "--out", tmp_path)
    rows = json.loads((tmp_path / "resume_cpu.json").read_text())["rows"]
    assert [row["bitwise"] for row in rows[:2]] == [16, 16]
    assert all(row["largest difference %"] < 2 for row in rows[:-1]), "what another order of sums does to FP8"

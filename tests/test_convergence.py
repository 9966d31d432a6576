"""The convergence benchmark, at its smallest: what it trains, skips, reports and refuses."""

import json
import math
import os
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import called, refused
from tiers import long

import hybridtensor as ht

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "convergence.py"
SMOKE = ["--device", "cpu", "--model", "tiny", "--steps", "4", "--min-mb", "0", "--max-mb", "1", "--per-gpu", "2"]
SMOKE += ["--recipes", "bf16,fp8,nvfp4", "--repeat", "fp8", "--seeds", "2", "--replicas", "2"]
RUNS = {"bf16-0", "bf16-1", "bf16-0-replica1", "bf16-0-replica2", "fp8-0", "fp8-1", "nvfp4-0"}


def call(*arguments):
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def folders(path):
    """Return the options that keep everything in one folder."""
    return ["--out", path / "out", "--results", path / "results", "--plot", path / "plots" / "losses.png"]


def files(path):
    return {file.stem: file for file in (path / "out").glob("*.json")}


def runs(path):
    return {name: json.loads(file.read_text()) for name, file in files(path).items()}


def record(path):
    return json.loads((path / "results" / "convergence_cpu.json").read_text())


def percent(value, base):
    return 100 * (value / base - 1)


def close(value):
    return pytest.approx(value, abs=1e-9)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A little text of many files, which is read faster than that of the Python packages."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(25):
        (folder / f"{i:02}.txt").write_text(f"{i}: the quick brown fox jumps over the lazy dog\n" * 20)
    (folder / "copy.txt").write_bytes((folder / "00.txt").read_bytes())
    return folder


of_a_whole_benchmark = long("training seven small models in processes of their own takes a minute")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, text):
    """The folder of one whole benchmark."""
    folder = tmp_path_factory.mktemp("smoke")
    done = call(*SMOKE, "--data", text, *folders(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@of_a_whole_benchmark
def test_every_run_leaves_a_file(smoke):
    assert set(files(smoke)) == RUNS
    for run in runs(smoke).values():
        config = ht.recipes.from_name(run["recipe"])
        assert (run["spec"], run["fingerprint"]) == (str(config), config.fingerprint())
        assert run["plan"]["steps"] == len(run["losses"]) == 4
        assert run["losses"][-1] < run["losses"][0]
        assert all(map(math.isfinite, [*run["losses"], run["validation"]]))
        assert min(run["tokens_per_second"], run["seconds"], run["parameters"]) > 0


@of_a_whole_benchmark
def test_runs_of_a_seed_share_weights_and_batches(smoke):
    found = runs(smoke)
    first = {name: run["losses"][0] for name, run in found.items()}
    assert first["bf16-0"] != pytest.approx(first["bf16-1"], rel=1e-3)
    for name in ("fp8-0", "nvfp4-0", "fp8-1"):
        baseline = f"bf16-{found[name]['seed']}"
        assert first[name] == pytest.approx(first[baseline], rel=1e-3)
        assert found[name]["losses"] != found[baseline]["losses"], "low precision really ran"


@of_a_whole_benchmark
def test_replicas_differ_by_next_to_nothing(smoke):
    found = runs(smoke)
    losses = [found[name]["losses"] for name in ("bf16-0", "bf16-0-replica1", "bf16-0-replica2")]
    assert len(set(map(tuple, losses))) == 3
    for replica in losses[1:]:
        assert replica == pytest.approx(losses[0], rel=1e-3)


@of_a_whole_benchmark
def test_text_has_no_file_twice_and_holds_some_out(smoke, text):
    parts = [(smoke / "out" / f"{name}.bin").read_bytes() for name in ("train", "validation")]
    assert sum(map(len, parts)) == sum(file.stat().st_size for file in text.glob("[0-9]*.txt"))
    assert parts[1]
    assert not set(parts[0].splitlines()) & set(parts[1].splitlines())


@of_a_whole_benchmark
def test_gaps_follow_from_the_losses(smoke):
    found, made = runs(smoke), record(smoke)
    last = {name: run["losses"][-1] for name, run in found.items()}  # the last tenth of four steps is one
    rows = {row["recipe"]: row for row in made["rows"]}
    assert {name: row["seeds"] for name, row in rows.items()} == {"bf16": 2, "fp8": 2, "nvfp4": 1}
    for recipe, row in rows.items():
        seeds = range(row["seeds"])
        gaps = [percent(last[f"{recipe}-{s}"], last[f"bf16-{s}"]) for s in seeds]
        valid = [percent(found[f"{recipe}-{s}"]["validation"], found[f"bf16-{s}"]["validation"]) for s in seeds]
        assert row["gaps %"] == close(gaps)
        assert row["gap %"] == close(statistics.mean(gaps))
        assert row["validation gap %"] == close(statistics.mean(valid))
        assert row["allowed %"] == (1.0 if recipe == "nvfp4" else 0.25)
    replicas = [percent(last[f"bf16-0-replica{i}"], last["bf16-0"]) for i in (1, 2)]
    assert sorted(made["gaps of replicas %"]) == close(sorted(replicas))
    noise = statistics.stdev(rows["fp8"]["gaps %"])  # the one recipe that ran with several seeds
    assert rows["nvfp4"]["noise %"] == made["noise of one run %"] == close(noise)
    assert rows["fp8"]["noise %"] == close(noise / math.sqrt(2)), "the mean of two seeds"
    assert set(made["curves"]) == RUNS
    assert (smoke / "plots" / "losses.png").stat().st_size > 10_000


def test_a_verdict_is_above_only_beyond_the_noise(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    verdict = runpy.run_path(str(SCRIPT))["verdict"]
    cases = [(0.2, 0.25, 0.01), (-3.0, 0.25, 0.01), (0.4, 0.25, 0.1), (0.4, 0.25, 0.01), (0.4, 0.25, None)]
    made = [verdict(*case) for case in [*cases, (math.nan, 0.25, 0.1), (math.nan, 0.25, None)]]
    assert made == ["within", "within", "noise", "above", "above", "above", "above"]


@of_a_whole_benchmark
def test_finished_runs_are_not_repeated(smoke, text, monkeypatch):
    before = {name: file.stat().st_mtime_ns for name, file in files(smoke).items()}
    rows = record(smoke)["rows"]
    files(smoke)["fp8-0"].unlink()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert called(SCRIPT, [*SMOKE, "--data", text, *folders(smoke)], monkeypatch) == 0
    after = {name: file.stat().st_mtime_ns for name, file in files(smoke).items()}
    assert {name for name in RUNS if after[name] != before[name]} == {"fp8-0"}
    gaps = [[row["gap %"] for row in made] for made in (rows, record(smoke)["rows"])]
    assert gaps[0] == gaps[1], "a run repeats itself"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--repeat", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--steps", "0"], "--steps: at least 1 is required, got 0"),
        (["--seeds", "0"], "--seeds: at least 1 is required, got 0"),
        (["--min-mb", "1000"], "at least 1000 MB of text are required, got 0.0 MB"),
        (["--model", "huge"], "invalid choice: 'huge'"),
    ],
    ids=["recipe", "repeat", "steps", "seeds", "little", "model"],
)
def test_bad_values_end_with_one_line(arguments, message, tmp_path, text, monkeypatch, capsys):
    given = [*SMOKE, "--data", text, *arguments, *folders(tmp_path)]
    assert message in refused(SCRIPT, given, monkeypatch, capsys)[-1]
    assert not files(tmp_path)

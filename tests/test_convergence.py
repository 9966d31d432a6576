"""The convergence benchmark, at its smallest: what it trains, skips, carries on, reports and refuses."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from little_text import benchmarks_hold_out_little, write_text
from scripts import called, refused
from tiers import few, long
from torchao.core.config import config_to_dict
from torchao.quantization import FqnToConfig

import hybridtensor as ht

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "convergence.py"
SMALL = ["--device", "cpu", "--model", "tiny", "--steps", "10", "--min-mb", "0", "--max-mb", "1"]
WHOLE = [*SMALL, "--recipes", "bf16,fp8,bf16_disturbed", "--others", "nvfp4_last_tenth_bf16", "--seeds", "2"]
RUNS = {"bf16-0", "bf16-1", "fp8-0", "fp8-1", "bf16_disturbed-0", "bf16_disturbed-1", "nvfp4_last_tenth_bf16-0"}
DIGEST = 7  # "-" and six hex digits of the plan


def folders(path):
    """Return the options that keep everything in one folder."""
    return ["--out", path / "out", "--results", path / "results", "--plot", path / "plots" / "losses.png"]


def files(path):
    return {file.stem[:-DIGEST]: file for file in (path / "out").glob("*.json")}


def runs(path):
    return {name: json.loads(file.read_text()) for name, file in files(path).items()}


def record(path):
    return json.loads((path / "results" / "convergence_cpu.json").read_text())


def written(path):
    """Return when each run was."""
    return {name: file.stat().st_mtime_ns for name, file in files(path).items()}


def percent(value, base):
    return 100 * (value / base - 1)


def close(value):
    return pytest.approx(value, abs=1e-9)


@pytest.fixture(scope="module", autouse=True)
def _little_is_held_out():
    with benchmarks_hold_out_little():
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = write_text(tmp_path_factory.mktemp("text"))
    (folder / "copy.txt").write_bytes((folder / "00.txt").read_bytes())
    return folder


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, text):
    """The folder of one whole benchmark."""
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patched:
        assert called(SCRIPT, [*WHOLE, "--data", text, *folders(folder)], patched) == 0
    return folder


@pytest.fixture
def again(smoke, text, tmp_path, monkeypatch):
    """Call the benchmark again, on a copy of the folder of one; return its exit code."""
    shutil.copytree(smoke, tmp_path, dirs_exist_ok=True)
    return lambda *options: called(SCRIPT, [*WHOLE, "--data", text, *folders(tmp_path), *options], monkeypatch)


@pytest.fixture
def losses(monkeypatch):
    """The package that the benchmark is made of."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import losses
    import losses.gaps
    import losses.work

    return losses


# -- runs


def test_every_run_leaves_a_small_file(smoke):
    assert set(files(smoke)) == RUNS
    for run in runs(smoke).values():
        assert run["plan"]["steps"] == len(run["losses"]) == len(run["norms"]) == 10
        assert (run["plan"]["tokens"], run["plan"]["compiled"]) == (256, False)
        assert run["losses"][-1] < run["losses"][0]
        assert all(map(math.isfinite, [*run["losses"], *run["norms"], run["validation"]]))
        assert min(*run["norms"], run["tokens_per_second"], run["seconds"], run["parameters"]) > 0
    config = ht.recipes.from_name("fp8")
    assert (runs(smoke)["fp8-0"]["spec"], runs(smoke)["fp8-0"]["fingerprint"]) == ("fp8", config.fingerprint())


def test_a_run_of_a_thousand_steps_fits_into_20_kb(losses, tmp_path):
    values = [torch.pi / (i + 1) for i in range(1000)]
    plan = losses.training.Plan("113M", 1000, 32768, True, "0" * 16)
    outcome = losses.training.Outcome(values, values, 1.0, 1.0, 1.0, 1.0)
    losses.files.write(losses.files.record_of(outcome, plan, recipe="fp8", seed=0), tmp_path)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size < 20_000
    assert json.loads(file.read_text())["losses"] == [round(value, 5) for value in values]


def test_runs_of_a_seed_share_weights_and_batches(smoke):
    found = runs(smoke)
    first = {name: run["losses"][0] for name, run in found.items()}
    assert first["bf16-0"] != pytest.approx(first["bf16-1"], rel=1e-3)
    for name in ("fp8-0", "nvfp4_last_tenth_bf16-0", "fp8-1"):
        baseline = f"bf16-{found[name]['seed']}"
        assert first[name] == pytest.approx(first[baseline], rel=1e-3)
        assert found[name]["losses"] != found[baseline]["losses"], "low precision really ran"


def test_disturbed_runs_differ_by_next_to_nothing(smoke):
    found = runs(smoke)
    for seed in (0, 1):
        assert found[f"bf16_disturbed-{seed}"]["norms"] != found[f"bf16-{seed}"]["norms"]
        assert found[f"bf16_disturbed-{seed}"]["losses"] == pytest.approx(found[f"bf16-{seed}"]["losses"], rel=1e-3)


def test_text_has_no_file_twice_and_holds_some_out(smoke, text):
    parts = [(smoke / "out" / f"{name}.bin").read_bytes() for name in ("train", "validation")]
    assert sum(map(len, parts)) == sum(file.stat().st_size for file in text.glob("[0-9]*.txt"))
    assert parts[1]
    assert not set(parts[0].splitlines()) & set(parts[1].splitlines())
    assert record(smoke)["text bytes"] == {"train": len(parts[0]), "validation": len(parts[1])}


@pytest.mark.parametrize("name", few(["fp8_delayed", "nvfp4_last_tenth_bf16"], 1))
def test_a_model_that_was_trained_before_begins_anew(name, losses, smoke):
    """Bitwise, with all that its recipe remembers: scales, the counter of random rounding."""
    plan, entry = losses.training.Plan("tiny", 10, 256, False, ""), losses.recipes.candidate(name)
    trainers = [losses.training.Trainer(plan, smoke / "out", "cpu") for _ in range(2)]
    trainers[0].train(entry, 1)
    outcomes = [trainer.train(entry, 0) for trainer in trainers]
    assert outcomes[0][:3] == outcomes[1][:3]  # losses, norms, validation
    if name == "fp8_delayed":
        state = trainers[0].model(entry).blocks[1].mlp.up.quantization_state
        assert (state.amax_history != 0).sum() >= 9 * len(state.slots), "steps were counted"


# -- pieces


def test_finished_runs_are_not_repeated(again, smoke, tmp_path):
    before, rows = written(tmp_path), record(smoke)["rows"]
    lost = files(tmp_path)["fp8-0"]
    lost.rename(lost.with_suffix(".claim"))  # as if a process had been killed in it
    assert again() == 0
    after = written(tmp_path)
    assert {name for name in RUNS if after[name] != before[name]} == {"fp8-0"}
    gaps = [[row["gap %"] for row in made] for made in (rows, record(tmp_path)["rows"])]
    assert gaps[0] == gaps[1], "a run repeats itself"


def test_runs_of_another_machine_count_where_they_lie(again, smoke, tmp_path):
    (tmp_path / "out").rename(tmp_path / "carried")
    assert again("--runs", tmp_path / "carried") == 0
    assert not files(tmp_path)
    assert record(tmp_path)["rows"] == record(smoke)["rows"]


def test_runs_of_another_plan_do_not_count_and_stay(again, tmp_path):
    before = written(tmp_path)
    assert again("--steps", 4, "--recipes", "", "--others", "", "--seeds", 1) == 0
    assert record(tmp_path)["plan"]["steps"] == 4
    assert [row["recipe"] for row in record(tmp_path)["rows"]] == ["bf16"]
    assert len(list((tmp_path / "out").glob("bf16-0-*.json"))) == 2
    assert {name: when for name, when in written(tmp_path).items() if name != "bf16-0"}.items() <= before.items()


def test_a_report_trains_nothing_and_needs_no_text(again, smoke, tmp_path):
    files(tmp_path)["fp8-1"].unlink()
    for path in [*(tmp_path / "out").glob("*.bin"), tmp_path / "results" / "convergence_cpu.json"]:
        path.unlink()
    assert again("--report") == 0
    rows = {row["recipe"]: row for row in record(tmp_path)["rows"]}
    assert list(rows) == ["bf16", "fp8", "bf16_disturbed", "nvfp4_last_tenth_bf16"]
    assert rows["fp8"]["gaps %"] == next(r["gaps %"][:1] for r in record(smoke)["rows"] if r["recipe"] == "fp8")
    assert not list((tmp_path / "out").glob("*.bin"))
    assert record(tmp_path)["text bytes"] == record(smoke)["text bytes"]


def test_runs_by_other_recipes_of_one_name_are_not_mixed(again, tmp_path, capsys):
    for name, renamed in (("fp8-0", "mine"), ("bf16_disturbed-1", "mine"), ("fp8-1", "nvfp4")):
        run = json.loads(files(tmp_path)[name].read_text())
        files(tmp_path)[name].write_text(json.dumps(run | {"recipe": renamed}))
    assert again("--report") == 2
    assert "mine=FILE is required, to tell runs by several recipes" in capsys.readouterr().err
    files(tmp_path)["bf16_disturbed-1"].unlink()
    assert again("--report") == 0
    assert "nvfp4" not in {row["recipe"] for row in record(tmp_path)["rows"]}, "it is another recipe today"


def test_no_time_is_no_run(tmp_path, text, monkeypatch, capsys):
    given = [*WHOLE, "--data", text, "--minutes", 0, *folders(tmp_path)]
    assert called(SCRIPT, given, monkeypatch) == 0
    assert not files(tmp_path)
    assert "7 runs are left to do" in capsys.readouterr().out


def test_a_run_that_would_end_too_late_is_given_up(losses, smoke, monkeypatch):
    training, steps = losses.training, []
    plan, entry = training.Plan("tiny", 1000, 256, False, ""), losses.recipes.candidate("bf16")
    trainer, enter = training.Trainer(plan, smoke / "out", "cpu"), training.Learner.enter
    monkeypatch.setattr(training.Learner, "enter", lambda self, step: (steps.append(step), enter(self, step)))
    clock = types.SimpleNamespace(time=lambda: len(steps), perf_counter=lambda: len(steps))  # a step is a second
    monkeypatch.setattr(training, "time", clock)
    with pytest.raises(training.OutOfTime):
        trainer.train(entry, 0, until=300)
    assert len(steps) == 101, "after a tenth it is known"


def finished(recipe, set_up, seconds):
    return {"recipe": recipe, "set up seconds": set_up, "seconds": seconds}


def test_only_runs_that_fit_are_begun(losses):
    work = losses.work
    records = [finished("bf16", 20, 30), finished("bf16", 1, 11), finished("fp8", 29, 37), finished("fp8", 2, 11)]
    seconds = [work.seconds_of("bf16", records, known) for known in (True, False)]
    assert seconds == [11, 30]
    assert work.seconds_of("nvfp4", records, False) == 39, "as the slowest of all"
    assert work.seconds_of("nvfp4", [], False) == 0, "nobody knows"
    waiting = [work.Run("fp8", 1, 1), work.Run("nvfp4", 1, 1), work.Run("bf16", 2, 2)]
    chosen = [work.choose(waiting, records, {"bf16"}.__contains__, left) for left in (50, 39.5, 38.5, 20, 10)]
    assert chosen == [waiting[1], waiting[1], waiting[0], waiting[2], None]
    assert work.choose(waiting, records, {"bf16", "fp8"}.__contains__, 50) == waiting[0], "what is compiled here"


def test_rounds(losses):
    order = [str(run) for run in losses.work.in_rounds(["a", "b"], 2, ["c"], 3)]
    assert order == ["bf16-0", "a-0", "b-0", "bf16-1", "a-1", "b-1", "c-0", "c-1"]


def test_a_run_that_fails_is_told_and_others_go_on(text, tmp_path, monkeypatch, capsys):
    wrong = FqnToConfig({"blocks.7.mlp.up": ht.recipes.from_name("fp8")})
    (tmp_path / "wrong.json").write_text(json.dumps(config_to_dict(wrong)))
    given = [*SMALL, "--recipes", f"wrong={tmp_path / 'wrong.json'},fp8", "--seeds", "1", "--data", text]
    assert called(SCRIPT, [*given, *folders(tmp_path)], monkeypatch) == 1
    assert set(files(tmp_path)) == {"bf16-0", "fp8-0"}
    (log,) = (tmp_path / "out").glob("wrong-0-*.log")
    assert "FqnToConfig keys must match a layer, got blocks.7.mlp.up" in log.read_text()
    assert f"failed: {log}" in capsys.readouterr().out


@long("processes of their own take a while to start")
def test_several_processes_share_the_runs(smoke, text, tmp_path):
    command = [sys.executable, "-W", "error", str(SCRIPT), *WHOLE, "--per-gpu", "2", "--data", str(text)]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *map(str, folders(tmp_path))], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(files(tmp_path)) == RUNS
    assert done.stdout.count(" tokens/s\n") == len(RUNS), "each was done once"
    for name, run in runs(tmp_path).items():
        assert run["losses"] == pytest.approx(runs(smoke)[name]["losses"], rel=1e-3)


# -- what runs are trained by


def learner(losses, text, steps=20):
    plan = losses.training.Plan("tiny", steps, 256, False, "")
    return losses.training.Learner(losses.recipes.candidate(text), plan, "cpu")


def specs(model):
    """Return the recipe of each layer."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    return {name: str(getattr(m.weight, "config", "plain")) for name, m in layers.items()}


def test_the_last_tenth_is_bf16(losses):
    learning = learner(losses, "nvfp4_last_tenth_bf16")
    seen = []
    for step in range(20):
        learning.enter(step)
        seen.append(set(specs(learning.model).values()) - {"plain"})
    assert seen == 18 * [{"nvfp4"}] + 2 * [{"bf16"}]
    learning.begin(1)
    assert set(specs(learning.model).values()) == {"nvfp4", "plain"}


def test_the_first_and_the_last_block_are_bf16(losses):
    found = specs(learner(losses, "nvfp4_edge_blocks_bf16").model)
    assert {name.split(".")[1] for name, spec in found.items() if spec == "nvfp4"} == {"1"}
    assert sum(spec == "nvfp4" for spec in found.values()) == 5


def test_assignments_are_read_from_files_and_trained_anew_when_they_change(text, tmp_path, monkeypatch, losses):
    path = tmp_path / "mine.json"
    given = [*SMALL, "--recipes", f"mine={path}", "--seeds", "1", "--data", text, *folders(tmp_path)]
    seen = []
    for spec in ("fp8", "fp8", "nvfp4/mxfp8/mxfp8"):
        rules = {"blocks.0.mlp.up": ht.HybridConfig.parse(spec), "blocks.1.mlp.up": None}
        path.write_text(json.dumps(config_to_dict(FqnToConfig(rules))))
        assert specs(learner(losses, f"mine={path}").model)["blocks.0.mlp.up"] == spec
        assert called(SCRIPT, given, monkeypatch) == 0
        seen.append((written(tmp_path)["mine-0"], record(tmp_path)["rows"][1]["allowed %"]))
    assert seen[0] == seen[1]
    assert seen[1][0] != seen[2][0]
    assert [allowed for _, allowed in seen] == [0.25, 0.25, 1.0]


def test_every_recipe_has_a_fingerprint_of_its_own(losses):
    names = [*ht.recipes.RECIPES, *losses.recipes.VARIANTS]
    model = losses.training.plain_model(losses.training.MODELS["tiny"], 0, "meta")
    every = [losses.recipes.candidate(name) for name in names]
    assert len({one.fingerprint(model, 100) for one in every}) == len(names)
    assert [one.allowance(model, 100) for one in every] == [1.0 if "nvfp4" in name else 0.25 for name in names]


COMPILED = ["fp8_delayed", "nvfp4_last_tenth_bf16", "nvfp4_edge_blocks_bf16", "bf16_disturbed", *ht.recipes.RECIPES]


@long("models that are compiled elsewhere, too")
@pytest.mark.filterwarnings("default")  # compiling, torch warns of its own ways
@pytest.mark.parametrize("name", dict.fromkeys(COMPILED))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_runs_are_those_of_eager_code(backend, name, losses, smoke, monkeypatch):
    plain = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: plain(self, backend=backend, **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outcomes = []
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):  # and back to what they were
        for compiled in (False, True):
            plan = losses.training.Plan("tiny", 10, 256, compiled, "")
            trainer = losses.training.Trainer(plan, smoke / "out", "cpu")
            outcomes.append(trainer.train(losses.recipes.candidate(name), 0))
    if backend == "aot_eager":
        assert outcomes[0][:3] == outcomes[1][:3]
    assert outcomes[1].losses == pytest.approx(outcomes[0].losses, rel=5e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "it was compiled"
    torch._dynamo.reset()


# -- what gaps are worth


def test_gaps_follow_from_the_losses(smoke):
    found, made = runs(smoke), record(smoke)
    last = {name: run["losses"][-1] for name, run in found.items()}  # the last tenth of ten steps is one
    rows = {row["recipe"]: row for row in made["rows"]}
    assert {name: row["seeds"] for name, row in rows.items()} == {
        "bf16": 2, "fp8": 2, "bf16_disturbed": 2, "nvfp4_last_tenth_bf16": 1
    }  # fmt: skip
    held_out = {name: run["validation"] for name, run in found.items()}
    for recipe, row in rows.items():
        seeds = range(row["seeds"])
        names = ["bf16"] if recipe.startswith("bf16") else ["bf16", "bf16_disturbed"]
        gaps, valid = (
            [percent(of[f"{recipe}-{s}"], statistics.mean(of[f"{name}-{s}"] for name in names)) for s in seeds]
            for of in (last, held_out)
        )
        assert row["gaps %"] == close(gaps)
        assert row["gap %"] == close(statistics.mean(gaps))
        assert row["validation gap %"] == close(statistics.mean(valid))
        assert row["allowed %"] == (1.0 if "nvfp4" in recipe else 0.25)
    assert made["gaps of replicas %"] == close(rows["bf16_disturbed"]["gaps %"])
    parts = {
        "fp8": 1 + 1 / 2,
        "bf16_disturbed": 2,
    }  # variances of one run in a gap: its own, and of what stands for BF16
    variances = [statistics.variance(rows[name]["gaps %"]) / count for name, count in parts.items()]
    deviation = math.sqrt(statistics.mean(variances))  # a degree of freedom each
    assert made["scatter of one run %"] == close(deviation)
    for name, seeds in (("nvfp4_last_tenth_bf16", 1), ("fp8", 2)):
        row = rows[name]
        assert row["noise %"] == close(deviation * math.sqrt(1.5 / seeds))
        assert [row["low %"], row["high %"]] == close([row["gap %"] + s * 4.303 * row["noise %"] for s in (-1, 1)])
    assert set(made["curves"]) == RUNS
    assert (smoke / "plots" / "losses.png").stat().st_size > 10_000


def test_few_seeds_have_the_scatter_of_all_recipes_and_many_their_own(losses):
    gaps = losses.gaps
    percents = {"a": [0.1, 0.3], "b": [0.0, 0.2, 0.4, 0.2, 0.7], "c": [0.5], "d": [0.1, math.nan]}
    of_each = {name: list(map(gaps.Gap, of)) for name, of in percents.items()}
    common = gaps.pooled(of_each)
    squares = sum((x - statistics.mean(of)) ** 2 for of in (percents["a"], percents["b"]) for x in of)
    of_gap = math.sqrt(squares / 5)  # 1 + 4 degrees of freedom; what is no number tells nothing
    assert common == close((of_gap / math.sqrt(2), 5))  # a run and BF16's scatter alike
    assert gaps.estimate(of_each["c"], common).error == close(of_gap)
    assert gaps.estimate(of_each["a"], common).error == close(of_gap / math.sqrt(2))
    own = gaps.estimate(of_each["b"], common)
    assert own.error == close(statistics.stdev(percents["b"]) / math.sqrt(5))
    assert own.high - own.mean == close(2.776 * own.error)
    assert gaps.estimate([gaps.Gap(0.1)], None) == (0.1, None, None, None, None)


def test_a_replica_that_is_no_number_stands_for_nothing(losses):
    runs = [("bf16", 0, 1.0), ("bf16", 1, 1.0), ("bf16_disturbed", 0, math.nan), ("bf16_disturbed", 1, 0.98)]
    records = [
        {"recipe": recipe, "seed": seed, "losses": [loss] * 10}
        for recipe, seed, loss in (*runs, ("fp8", 0, 1.01), ("fp8", 1, 1.01))
    ]
    found = losses.gaps.gaps(records)
    assert [gap.base_runs for gap in found["fp8"]] == [1, 2]
    assert [gap.percent for gap in found["fp8"]] == close([1.0, percent(1.01, 0.99)])
    assert math.isnan(found["bf16_disturbed"][0].percent)


@pytest.mark.parametrize("base_runs", [1, 2])
def test_errors_are_those_of_gaps_that_are_drawn(base_runs, losses):
    """Oracle: the scatter of mean gaps over many benchmarks, of runs that are drawn with a known one."""
    gaps, deviation, times = losses.gaps, 0.1, 400
    generator, seeds = torch.Generator().manual_seed(base_runs), 2
    mean_gaps, errors = [], []
    for _ in range(times):
        runs = deviation * torch.randn(seeds, 20 + base_runs, generator=generator, dtype=torch.float64)
        above = runs[:, base_runs:] - runs[:, :base_runs].mean(dim=1, keepdim=True)
        found = {str(i): [gaps.Gap(float(x), base_runs) for x in of] for i, of in enumerate(above.T)}
        common = gaps.pooled(found)
        made = gaps.estimate(found["0"], common)
        mean_gaps.append(made.mean)
        errors.append(made.error)
    wanted = deviation * math.sqrt((1 + 1 / base_runs) / seeds)
    assert statistics.pstdev(mean_gaps, 0) == pytest.approx(wanted, rel=3 / math.sqrt(2 * times))  # three of its errors
    assert math.sqrt(statistics.fmean(error**2 for error in errors)) == pytest.approx(wanted, rel=0.1)


def test_seeds_that_are_missing_for_the_goal(losses):
    gaps = losses.gaps
    for deviation, count, more in ((0.55, 3, 45), (0.16, 3, 1), (0.16, 4, 0), (0.01, 1, 0)):
        of_run = gaps.Scatter(deviation / math.sqrt(2), 10)
        found = gaps.estimate([gaps.Gap(0.0)] * min(count, gaps.ENOUGH - 1), of_run)
        assert found.more == more
        assert deviation / math.sqrt(count + more) <= gaps.GOAL
        assert more == 0 or deviation / math.sqrt(count + more - 1) > gaps.GOAL


@pytest.mark.parametrize("freedom", [1, 2, 3, 10, 30, 31, 60, 500])
def test_intervals_hold_95_percent_of_students_distribution(freedom, losses):
    # t = sqrt(freedom) * tan(a), whose density is that of cos(a) ** (freedom - 1)
    angle = math.atan(losses.gaps.t_quantile(freedom) / math.sqrt(freedom))
    grid = torch.linspace(0, math.pi / 2, 2_000_001, dtype=torch.float64)
    density = grid.cos() ** (freedom - 1)
    assert float(density[grid <= angle].sum() / density.sum()) == pytest.approx(0.95, abs=1e-4)


def test_a_verdict_is_that_of_the_whole_interval(losses):
    gaps = losses.gaps
    cases = [(0.1, 0.0, 0.2), (0.1, -0.1, 0.3), (0.4, 0.2, 0.6), (0.4, 0.3, 0.5), (math.nan,) * 3]
    made = [gaps.verdict(gaps.Estimate(mean, 0.1, low, high), 0.25) for mean, low, high in cases]
    assert made == ["within", "open", "open", "above", "above"]
    assert [gaps.verdict(gaps.Estimate(mean), 0.25) for mean in (0.1, 0.4, math.nan)] == ["open", "open", "above"]


# -- wrong use


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--others", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--recipes", "mine=none.json"], "none.json: a file with a recipe for each layer is required"),
        (["--steps", "0"], "--steps: at least 1 is required, got 0"),
        (["--seeds", "0"], "--seeds: at least 1 is required, got 0"),
        (["--minutes", "-1"], "--minutes: at least 0 is required, got -1"),
        (["--tokens", "100"], "--tokens: a multiple of 64 is required, got 100"),
        (["--min-mb", "1000"], "at least 1000 MB of text are required, got 0.0 MB"),
        (["--model", "huge"], "invalid choice: 'huge'"),
        (["--report"], "--report: finished runs in"),
    ],
    ids=["recipe", "others", "file", "steps", "seeds", "minutes", "tokens", "little", "model", "nothing"],
)
def test_bad_values_end_with_one_line(arguments, message, tmp_path, text, monkeypatch, capsys):
    given = [*WHOLE, "--data", text, *arguments, *folders(tmp_path)]
    assert message in refused(SCRIPT, given, monkeypatch, capsys)[-1]
    assert not files(tmp_path)

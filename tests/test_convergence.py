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


def test_replicas_begin_from_draws_of_their_own_close_to_the_weights_of_their_seed(losses):
    from losses.training import Learner, Plan

    plan = Plan("tiny", 10, 64, False, "")
    names = ("bf16", "bf16_disturbed", "bf16_disturbed_again")
    learners = [Learner(losses.recipes.candidate(name), plan, "cpu") for name in names]
    plain, *replicas = ([p.detach().clone() for p in learner.begin(1).parameters()] for learner in learners)
    for weights in replicas:
        for weight, before in zip(weights, plain, strict=True):
            torch.testing.assert_close(weight, before, rtol=1e-5, atol=0)  # ten deviations
            assert not torch.equal(weight, before)
    assert all(not torch.equal(*pair) for pair in zip(*replicas, strict=True))
    assert {losses.gaps.recipe_of({"recipe": name}) for name in names} == {"bf16"}


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
    assert {name: row["runs"] for name, row in rows.items()} == {"bf16": 4, "fp8": 1, "nvfp4_last_tenth_bf16": 1}
    assert rows["fp8"]["gaps %"] == close([rows["fp8"]["gap %"]])
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
    four_bits = {"quartet2", "deepseek_v4_experts", "gpt_oss_experts", *(name for name in names if "nvfp4" in name)}
    assert {name for name, one in zip(names, every, strict=True) if one.allowance(model, 100) == 1.0} == four_bits
    assert {one.allowance(model, 100) for one in every} == {1.0, 0.25}


COMPILED = ["fp8_delayed", "nvfp4_last_tenth_bf16", "nvfp4_edge_blocks_bf16", "bf16_disturbed", *ht.recipes.RECIPES]
COMPILED.remove("quartet2")  # rotates 128 elements, of which the layers of the tiny model have no multiple


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


def drawn(losses, of_runs):
    """Return the fit of runs, given as the logarithm of the loss by recipe and seed."""
    return losses.gaps.fit(
        [{"recipe": recipe, "seed": seed, "losses": [math.exp(log)] * 10} for (recipe, seed), log in of_runs.items()]
    )


def test_gaps_follow_from_the_losses(smoke):
    """Oracle: least squares by hand, of two seeds with two runs of BF16 and one of FP8, and one other run."""
    found, made = runs(smoke), record(smoke)
    rows = {row["recipe"]: row for row in made["rows"]}
    assert {name: row["runs"] for name, row in rows.items()} == {"bf16": 4, "fp8": 2, "nvfp4_last_tenth_bf16": 1}

    def by_hand(of):
        logs = {name: math.log(of(run)) for name, run in found.items()}
        base = [(logs[f"bf16-{seed}"] + logs[f"bf16_disturbed-{seed}"]) / 2 for seed in (0, 1)]
        of_fp8 = [logs[f"fp8-{seed}"] - base[seed] for seed in (0, 1)]
        seeds = [(2 * base[seed] + logs[f"fp8-{seed}"]) / 3 for seed in (0, 1)]
        at_first = sum(base) / 2 + (seeds[0] - seeds[1]) / 2
        gaps = {
            "bf16": 0.0,
            "fp8": sum(of_fp8) / 2,
            "nvfp4_last_tenth_bf16": logs["nvfp4_last_tenth_bf16-0"] - at_first,
        }
        return logs, gaps, (seeds[0] - seeds[1]) / 2, sum(base) / 2

    logs, gaps, of_seed, base = by_hand(lambda run: run["losses"][-1])  # the last tenth of ten steps is one
    _, held_out, *_ = by_hand(lambda run: run["validation"])
    _, norms, *_ = by_hand(lambda run: run["norms"][-1])
    chance = {
        f"{name}-{seed}": logs[f"{name}-{seed}"]
        - base
        - gaps[name.removesuffix("_disturbed")]
        - (1 - 2 * seed) * of_seed
        for name in ("bf16", "bf16_disturbed", "fp8")
        for seed in (0, 1)
    }
    scatter = 100 * math.sqrt(sum(rest**2 for rest in chance.values()) / 3)  # seven runs, three recipes, two seeds
    assert (made["scatter of one run %"], made["degrees of freedom"]) == (close(scatter), 3)
    # the one run is compared with 5/6 of BF16's of its seed, 1/6 of those of the other, and 1/6 of how FP8's differ
    variances = {"fp8": 1 / 2 + 1 / 4, "nvfp4_last_tenth_bf16": 1 + (5**2 / 2 + 1 / 2 + 2) / 6**2}
    for name, row in rows.items():
        assert row["gap %"] == close(100 * math.expm1(gaps[name]))
        assert row["loss"] == close(math.exp(base + gaps[name]))
        assert row["validation gap %"] == close(100 * math.expm1(held_out[name]))
        assert row["gradient norm gap %"] == close(100 * math.expm1(norms[name]))
        assert row["allowed %"] == (1.0 if "nvfp4" in name else 0.25)
        assert row["tokens/s"] == max(
            run["tokens_per_second"] for run in found.values() if run["recipe"].startswith(name)
        )
        if name != "bf16":
            assert row["noise %"] == close(scatter * math.sqrt(variances[name]))
            assert [row["low %"], row["high %"]] == close([row["gap %"] + s * 3.182 * row["noise %"] for s in (-1, 1)])
    own = [100 * math.expm1(gaps["fp8"] + chance[f"fp8-{seed}"]) for seed in (0, 1)]
    assert rows["fp8"]["gaps %"] == close(own)
    assert rows["bf16"]["noise %"] is None
    assert set(made["curves"]) == RUNS
    assert (smoke / "plots" / "losses.png").stat().st_size > 10_000


def test_what_all_runs_of_a_seed_have_in_common_is_no_noise(losses):
    chance = {("bf16", 0): 0.0, ("fp8", 0): 0.01, ("bf16", 1): 0.001, ("fp8", 1): 0.013, ("fp8", 2): 0.5}
    moved = {(recipe, seed): log + (0.3 if seed == 1 else 0) for (recipe, seed), log in chance.items()}
    plain, found = drawn(losses, chance), drawn(losses, moved)
    assert found.gaps["fp8"][:2] == close(plain.gaps["fp8"][:2])
    assert found.gaps["fp8"].of_runs == close(plain.gaps["fp8"].of_runs)
    assert found.gaps["fp8"].percent == close(100 * math.expm1(0.011))  # the third seed has no BF16
    assert (found.scatter, found.freedom) == (close(plain.scatter), 1)
    assert found.scatter == close(100 * 0.001)  # four residuals of 0.0005, one degree of freedom


def test_runs_that_are_no_number_tell_nothing_of_others(losses):
    of_runs = {("bf16", 0): 0.0, ("bf16", 1): 0.0, ("fp8", 0): 0.01, ("fp8", 1): 0.02}
    of_runs |= {("nvfp4", 0): math.nan, ("nvfp4", 1): 0.03}
    plain = drawn(losses, {name: log for name, log in of_runs.items() if name[0] != "nvfp4"})
    for name in (("bf16_disturbed", 0), ("nvfp4", 1)):
        found = drawn(losses, {**of_runs, name: math.inf})
        assert [found.gaps[recipe].percent for recipe in plain.gaps] == close(
            [gap.percent for gap in plain.gaps.values()]
        )
        assert (found.scatter, found.freedom) == (close(plain.scatter), plain.freedom)
        assert math.isnan(found.gaps["nvfp4"].percent)
    diverged = drawn(losses, {name: math.nan if name[0] == "bf16" else log for name, log in of_runs.items()})
    assert all(math.isnan(gap.percent) for gap in diverged.gaps.values())
    assert losses.gaps.estimate(diverged.gaps["fp8"], diverged)[1:] == (None,) * 4


def test_one_run_of_each_has_no_noise_that_could_be_told(losses):
    found = drawn(losses, {("bf16", 0): 0.0, ("fp8", 0): 0.01})
    assert found.freedom == 0
    assert losses.gaps.estimate(found.gaps["fp8"], found) == (close(100 * math.expm1(0.01)), None, None, None, None)


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_intervals_hold_the_gaps_of_runs_that_are_drawn(replicas, losses):
    """Oracle: many benchmarks of runs that are drawn, with a gap and a scatter that are known."""
    deviation, above, times = 0.1, 0.25, 400
    generator, seeds = torch.Generator().manual_seed(replicas), 2
    names = ["bf16", *("bf16_disturbed", "bf16_disturbed_again")[:replicas], *map(str, range(10))]
    made = []
    for _ in range(times):
        runs = deviation / 100 * torch.randn(seeds, len(names), generator=generator, dtype=torch.float64)
        runs += torch.randn(seeds, 1, generator=generator, dtype=torch.float64)  # what a seed has in common
        runs[:, names.index("0")] += above / 100
        found = drawn(losses, {(name, s): float(runs[s, i]) for i, name in enumerate(names) for s in range(seeds)})
        made.append(losses.gaps.estimate(found.gaps["0"], found))
    wanted = deviation * math.sqrt((1 + 1 / (1 + replicas)) / seeds)
    of_times = 3 / math.sqrt(2 * times)  # three standard errors
    assert statistics.stdev(one.mean for one in made) == pytest.approx(wanted, rel=of_times)
    assert statistics.fmean(one.mean for one in made) == pytest.approx(above, abs=3 * wanted / math.sqrt(times))
    assert math.sqrt(statistics.fmean(one.error**2 for one in made)) == pytest.approx(wanted, rel=of_times)
    held = statistics.fmean(one.low <= above <= one.high for one in made)
    assert held == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / times))


def test_seeds_that_are_missing_for_the_goal(losses):
    gaps = losses.gaps
    for deviation, count, more in ((0.55, 3, 45), (0.16, 3, 1), (0.16, 4, 0), (0.01, 1, 0)):
        gap = gaps.Gap(0.1, math.sqrt(2 / count), (0.1,) * count)
        found = gaps.estimate(gap, gaps.Fit(0.8, {}, deviation / math.sqrt(2), 10))
        assert found.error == close(deviation / math.sqrt(count))
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

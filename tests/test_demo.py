"""The demo, at its smallest: what it prints, writes and refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import torch
from any_layer import ANY_LAYER
from scripts import called, refused

import hybridtensor as ht

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"


def demo(*arguments):
    """Run the demo with one thread: more would wait for each other where other tests run too."""
    command = [sys.executable, "-W", "error", str(TRAIN), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def demo_here(monkeypatch):
    """Run the demo in this process, where what it sets for the whole of it ends with the test; return its exit code."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "warnoptions", ["error"])  # for the processes that it starts
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: called(TRAIN, ["--device", "cpu", *arguments], monkeypatch)
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)


def test_trains_saves_resumes_and_reports(demo_here, tmp_path, capsys):
    """What resumes is a process of its own."""
    recipes = ["fp8+dequantized", "fp8_delayed", "nvfp4"]
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    out = tmp_path / "out"
    options = ["--size", "tiny", "--steps", 4, "--data", text, "--recipes", ",".join(recipes), "--out", out]
    assert demo_here(*options) == 0
    printed = capsys.readouterr().out
    assert printed.count("bitwise") == 4
    assert (out / "losses.png").stat().st_size > 10_000
    for recipe in recipes:
        assert "smallest cosine" in (out / f"{recipe}.html").read_text()
        assert f"{out / recipe}.html" in printed
    assert not (out / "bf16.html").exists()
    record = json.loads((out / "results.json").read_text())
    assert [r["recipe"] for r in record["results"]] == ["bf16", *recipes]
    assert record["results"][1]["fingerprint"] == ht.HybridConfig.parse("fp8+dequantized").fingerprint()
    assert set(record["versions"]) == {"hybridtensor", "torch", "torchao", "python"}
    base, *quantized = record["results"]
    for r in quantized:
        assert len(r["losses"]) == 4
        assert r["resumed_bitwise"]
        assert r["losses"] != base["losses"]  # low precision really ran
    for r in quantized[:2]:
        assert (
            0.40 < r["linear_input_bytes"] / base["linear_input_bytes"] < 0.55
        )  # autocast casts siblings' inputs apart


@tiers.long("what recipes are called is one list in the package")
def test_accepts_every_recipe(demo_here, tmp_path, capsys):
    names = [name for name in ANY_LAYER if name != "bf16"]
    options = ["--size", "tiny", "--steps", 2, "--data", TRAIN.parent, "--recipes", ",".join(names)]
    assert demo_here(*options, "--out", tmp_path) == 0
    assert capsys.readouterr().out.count("bitwise the same") == len(names) + 1
    record = json.loads((tmp_path / "results.json").read_text())
    assert [r["recipe"] for r in record["results"]] == ["bf16", *names]
    assert len({tuple(r["losses"]) for r in record["results"]}) > len(names) // 2  # some share a forward


RANKS = {"2 ranks": ("--fsdp", 2), "cut over 2 ranks": ("--tp", 2), "4 ranks": ("--tp", 2, "--fsdp", 2)}


@tiers.long("starting eight ranks takes most of a minute; what they do is tested in tests/distributed")
@pytest.mark.parametrize("degrees", RANKS)
def test_shards_over_ranks_and_resumes_without_them(degrees, demo_here, tmp_path):
    """A digest of all weights as they were when saved equals that of what is loaded without ranks."""
    options = ["--size", "tiny", "--steps", 2, "--data", TRAIN.parent, "--recipes", "fp8_delayed", "--out", tmp_path]
    run = demo(*options, *RANKS[degrees])
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("losses bitwise the same") == 2
    assert run.stdout.count(f", {'4' if '4' in degrees else '2'} ranks") == 1
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    record = json.loads((tmp_path / "results.json").read_text())
    saved = {r["recipe"]: r["saved_weights"] for r in record["results"]}
    assert len(set(saved.values())) == 2
    assert demo_here(*options, "--resume") == 0
    resumed = json.loads((tmp_path / "resumed.json").read_text())
    assert {recipe: r["weights"] for recipe, r in resumed.items()} == saved


def test_ranks_that_are_not_possible_are_refused(monkeypatch):
    from model import SIZES
    from ranks import Degrees, check_ranks

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def check(device="cuda", **degrees):
        check_ranks(Degrees(**degrees), torch.device(device), SIZES["tiny"])

    check(fsdp=2)
    check(tp=2)
    with pytest.raises(ValueError, match="at most a rank per GPU is required, got 4 for 2"):
        check(fsdp=4)
    with pytest.raises(ValueError, match="at most a rank per GPU is required, got 4 for 2"):
        check(fsdp=2, tp=2)
    with pytest.raises(ValueError, match="--fsdp: at least 1 rank is required, got 0"):
        check("cpu", fsdp=0)
    with pytest.raises(ValueError, match="--tp: a number that divides the 2 heads is required, got 4"):
        check("cpu", tp=4)
    with pytest.raises(ValueError, match="--tp: a device without a number is required, got --device cuda:1"):
        check("cuda:1", tp=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--steps", "0"], "--steps: at least 2 are required, got 0"),
        (["--data", "nowhere"], "a file or folder is required, got nowhere"),
        (["--data", TRAIN, "--size", "large"], "bytes are required for sequences of 1024"),
        (["--size", "huge"], "invalid choice: 'huge'"),
        (["--size", "tiny", "--fsdp", "3"], "--fsdp: a number that divides the batch of 4 is required, got 3"),
        (["--resume", "--out", TRAIN.parent / "none"], "--resume: checkpoints of all --recipes are required, got none"),
    ],
    ids=["recipe", "steps", "data", "short", "size", "ranks", "resume"],
)
def test_bad_arguments_end_with_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("ranks were started"))  # in place of this process
    assert message in refused(TRAIN, ["--device", "cpu", *arguments], monkeypatch, capsys)[-1]

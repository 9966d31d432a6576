"""The demo, at its smallest: what it prints, writes and refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import hybridtensor as ht

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"


def demo(*arguments):
    command = [sys.executable, "-W", "error", str(TRAIN), "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_trains_saves_resumes_and_reports(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    out = tmp_path / "out"
    run = demo("--size", "tiny", "--steps", 8, "--data", text, "--recipes", "fp8+dequantized,fp8_rowwise", "--out", out)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("bitwise") == 3
    assert (out / "losses.png").stat().st_size > 10_000
    record = json.loads((out / "results.json").read_text())
    assert [r["recipe"] for r in record["results"]] == ["bf16", "fp8+dequantized", "fp8_rowwise"]
    assert record["results"][1]["fingerprint"] == ht.HybridConfig.parse("fp8+dequantized").fingerprint()
    assert set(record["versions"]) == {"hybridtensor", "torch", "torchao", "python"}
    base, *quantized = record["results"]
    for r in quantized:
        assert len(r["losses"]) == 8
        assert r["resumed_bitwise"]
        assert r["losses"] != base["losses"]  # low precision really ran
        assert 0.45 < r["linear_input_bytes"] / base["linear_input_bytes"] < 0.55


def test_accepts_every_recipe(tmp_path):
    names = [name for name in ht.recipes.RECIPES if name != "bf16"]
    run = demo("--size", "tiny", "--steps", 2, "--data", TRAIN.parent, "--recipes", ",".join(names), "--out", tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("bitwise the same") == len(names) + 1
    record = json.loads((tmp_path / "results.json").read_text())
    assert [r["recipe"] for r in record["results"]] == ["bf16", *names]
    assert len({tuple(r["losses"]) for r in record["results"]}) > len(names) // 2  # some share a forward


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "fp9"], "unknown format 'fp9'; did you mean 'fp8'"),
        (["--steps", "0"], "--steps: at least 2 are required, got 0"),
        (["--data", "nowhere"], "a file or folder is required, got nowhere"),
        (["--data", TRAIN, "--size", "large"], "bytes are required for sequences of 1024"),
        (["--size", "huge"], "invalid choice: 'huge'"),
    ],
    ids=["recipe", "steps", "data", "short", "size"],
)
def test_bad_arguments_end_with_one_line(arguments, message):
    run = demo(*arguments)
    assert run.returncode == 2
    assert message in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr

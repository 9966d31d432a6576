"""The example of pipelines, at its smallest: two ranks lose, at every step, what one does."""

from pathlib import Path

import pytest
from scripts import called, on_ranks, refused
from tiers import long

from hybridtensor.linear import two_parts

PIPELINE = Path(__file__).parent.parent / "examples" / "pipeline.py"
TINY = ["--device", "cpu", "--size", "tiny"]


def losses(out):
    return [float(line) for line in (out / "losses.txt").read_text().split()]


@pytest.fixture
def options(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return ["--data", text, "--steps", 6, "--recipe", "fp8_delayed"]


@pytest.fixture
def one(options, tmp_path, monkeypatch):
    """What a single rank, in this process, loses at every step."""
    assert called(PIPELINE, [*TINY, *options, "--schedule", "GPipe", "--out", tmp_path / "one"], monkeypatch) == 0
    return losses(tmp_path / "one")


def test_trains(one):
    assert len(one) == 6
    assert one[-1] < one[0] - 0.3


ZERO_BUBBLES = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
in_two_parts = pytest.mark.skipif(two_parts._nodes_go(), reason="before torch 2.13 a backward in two parts raises")
SUMS = 1e-4  # nats: threads of the process add in another order


@long("two processes each, for half a minute")
@pytest.mark.parametrize(
    "schedule",
    ["1F1B", "Interleaved1F1B", *(pytest.param(name, marks=in_two_parts) for name in ZERO_BUBBLES)],
)
def test_two_ranks_train_as_one(schedule, tmp_path, options, one):
    done = on_ranks(PIPELINE, 2, *TINY, *options, "--schedule", schedule, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(one, abs=SUMS)


def test_bad_numbers_say_why(monkeypatch, capsys):
    last = refused(PIPELINE, [*TINY, "--blocks", 3, "--schedule", "ZBVZeroBubble"], monkeypatch, capsys)[-1]
    assert "got 3 blocks for 2 stages, a batch of 4 for 4" in last

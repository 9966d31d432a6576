"""The example of experts, at its smallest: on four ranks it trains as on one, and goes on on two."""

from pathlib import Path

import pytest
from scripts import called, on_ranks, refused
from tiers import long

MOE = Path(__file__).parent.parent / "examples" / "moe.py"
TINY = ["--device", "cpu", "--size", "tiny"]


def losses(out, name="losses.txt"):
    return [float(line) for line in (out / name).read_text().split()]


@pytest.fixture
def options(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    return ["--data", text, "--steps", 6, "--experts", 4]


@pytest.fixture
def one(options, tmp_path, monkeypatch):
    """What a single rank, in this process, loses at every step."""
    assert called(MOE, [*TINY, *options, "--out", tmp_path / "one"], monkeypatch) == 0
    return losses(tmp_path / "one")


def trained(ranks, ep, options, out, *more):
    done = on_ranks(MOE, ranks, *TINY, *options, "--ep", ep, "--out", out, *more)
    assert done.returncode == 0, done.stderr
    return losses(out, "resumed.txt" if more else "losses.txt")


FLIPPED = 2e-3  # nats: sums in another order, and the tokens that they send to another expert


def test_trains(one):
    assert len(one) == 6
    assert one[-1] < one[0] - 0.3


@long("three processes that wait for each other, for half a minute")
def test_two_ranks_train_as_one(tmp_path, options, one):
    assert trained(2, 2, options, tmp_path / "two") == pytest.approx(one, abs=FLIPPED)


@long("six processes, for half a minute")
def test_four_ranks_train_as_one_and_two_go_on(tmp_path, options, one):
    four = trained(4, 2, options, tmp_path / "four")
    assert four == pytest.approx(one, abs=FLIPPED)
    assert trained(2, 2, options, tmp_path / "four", "--resume") == pytest.approx(four[3:], abs=FLIPPED)


def test_bad_numbers_of_ranks_say_why(monkeypatch, capsys):
    last = refused(MOE, [*TINY, "--ep", 3], monkeypatch, capsys)[-1]
    assert "ranks that --ep and the batch divide are required, got 1 for --ep 3" in last

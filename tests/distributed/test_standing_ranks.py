"""The ranks that stay for all tests of a session."""

import pytest
from standing_ranks import Ranks


def fails(rank):
    raise ValueError(f"of {rank}")


def nothing(rank):
    pass


def test_ranks_start_when_they_run_and_again_after_an_error_or_a_stop(tmp_path):
    ranks = Ranks(1, tmp_path, "cpu")
    assert not ranks.processes
    with pytest.raises(AssertionError, match="ValueError: of 0"):
        ranks.run(fails)
    assert not ranks.processes
    for _ in range(2):
        ranks.run(nothing)
        ranks.stop()
    assert ranks.starts == 3

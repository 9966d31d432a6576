"""Ranks that stay for all tests: starting them is what takes time. Through gloo, and on GPUs through NCCL."""

from pathlib import Path

import pytest
from standing_ranks import KINDS, started, stop_idle


@pytest.fixture(scope="session", params=KINDS)
def two(request, tmp_path_factory):
    yield from started(2, request, tmp_path_factory)


@pytest.fixture(scope="session", params=KINDS)
def three(request, tmp_path_factory):
    yield from started(3, request, tmp_path_factory)


@pytest.fixture(scope="session", params=KINDS)
def four(request, tmp_path_factory):
    yield from started(4, request, tmp_path_factory)


def pytest_runtest_teardown(nextitem):
    """Stop ranks where other tests follow."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        stop_idle()

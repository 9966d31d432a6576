"""Ranks that stay for all tests: starting them is what takes time. Through gloo, and on GPUs through NCCL."""

import pytest
from standing_ranks import KINDS, started


@pytest.fixture(scope="session", params=KINDS)
def two(request, tmp_path_factory):
    yield from started(2, request, tmp_path_factory)


@pytest.fixture(scope="session", params=KINDS)
def three(request, tmp_path_factory):
    yield from started(3, request, tmp_path_factory)


@pytest.fixture(scope="session", params=KINDS)
def four(request, tmp_path_factory):
    yield from started(4, request, tmp_path_factory)

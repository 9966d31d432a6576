"""Two ranks that stay for all tests of a session."""

import pytest
from standing_ranks import started


@pytest.fixture(scope="session", params=["cpu"])
def two(request, tmp_path_factory):
    yield from started(2, request, tmp_path_factory)

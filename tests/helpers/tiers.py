"""Two tiers of tests: what runs by default, and with ``--long`` what takes its time, too.

Before tests are collected, ``conftest.py`` sets ``LONG`` from the command line.
"""

import itertools

import pytest
from hypothesis import settings
from pairwise import pairwise

LONG = False


def long(reason):
    """Return a mark that leaves a test to the long tier.

    Args:
        reason: What it adds to the tests that always run.
    """
    return pytest.mark.skipif(not LONG, reason=f"{reason}; --long runs it")


def covered(*factors):
    """Return a few rows of one value per factor, every two values of two factors in one; in the long tier all rows."""
    return list(itertools.product(*factors)) if LONG else pairwise(*factors)


def few(values, default):
    """Return the first ``default`` values, all of them in the long tier."""
    return list(values) if LONG else list(values)[:default]


def examples(default):
    """Return hypothesis settings with that many examples, ten times as many in the long tier."""
    return settings(max_examples=10 * default if LONG else default, deadline=None)

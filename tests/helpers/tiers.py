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


def in_turn(*factors):
    """Return every value of the longest factor once, those of the others in turn; in the long tier all rows."""
    if LONG:
        return list(itertools.product(*factors))
    rows = zip(*map(itertools.cycle, factors), strict=True)
    return list(itertools.islice(rows, max(map(len, factors))))


def by_group(groups, *factors):
    """Return what ``covered`` does of groups of like values, whose members take turns; in the long tier all rows.

    Raises:
        ValueError: If a group has members whose turn never comes.
    """
    if LONG:
        return list(itertools.product(itertools.chain(*groups), *factors))
    rows = pairwise(range(len(groups)), *factors)
    idle = [group for i, group in enumerate(groups) if sum(row[0] == i for row in rows) < len(group)]
    if idle:
        raise ValueError(f"by_group: a row for every member is required, got too few for {idle}; split the group")
    members = [itertools.cycle(group) for group in groups]
    return [(next(members[i]), *others) for i, *others in rows]


def few(values, default):
    """Return the first ``default`` values, all of them in the long tier."""
    return list(values) if LONG else list(values)[:default]


def examples(default):
    """Return hypothesis settings with that many examples, ten times as many in the long tier."""
    return settings(max_examples=10 * default if LONG else default, deadline=None)

"""The helpers that decide which cases the tests run, and the one that starts processes."""

import itertools

import pytest
import tiers
import torch
from pairwise import most_pairs, pairwise
from processes import PRELOADED, call_program


@pytest.mark.parametrize(
    "sizes", [(2, 2), (1, 3), (3, 3, 3), (2, 5, 4), (9, 8, 3), (6, 6, 2), (2, 2, 2, 2, 2)], ids=str
)
def test_every_two_values_of_two_factors_meet(sizes):
    factors = [[f"{letter}{i}" for i in range(size)] for letter, size in zip("abcde", sizes, strict=False)]
    rows = pairwise(*factors)
    assert all(value in factor for row in rows for value, factor in zip(row, factors, strict=True))
    for a, b in itertools.combinations(range(len(factors)), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))


def test_few_rows_are_enough():
    """Not many more than the two largest factors have pairs, which is the least that there can be."""
    for sizes in ((9, 8, 3), (6, 6, 2), (3, 3, 3, 3), (10, 10)):
        least = sizes[0] * sizes[1]
        assert least <= len(pairwise(*map(range, sizes))) <= 1.5 * least
    assert len(pairwise(*[range(2)] * 8)) <= 10  # of 256


def test_rows_are_the_same_every_time_and_for_any_values():
    assert pairwise(range(4), range(3), range(2)) == pairwise(range(4), range(3), range(2))
    values = [[0], [1]], [{}, {1: 2}], [None, None]  # neither hashable nor different
    assert len(pairwise(*values)) == 4


def test_a_factor_without_values_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        pairwise(range(2), range(2), [])


def test_names_with_few_new_pairs_are_left_out():
    found = {"two": {1, 2}, "three": {1, 2, 3}, "again": {2, 3}, "new": {3, 4}}
    assert most_pairs(found, 2) == ["three", "new"]
    assert most_pairs(found, 9) == ["three", "new", "two", "again"]


def test_values_take_turns(monkeypatch):
    monkeypatch.setattr(tiers, "LONG", False)
    assert tiers.in_turn("abcd", (1, 2, 3)) == [("a", 1), ("b", 2), ("c", 3), ("d", 1)]
    assert [row[0] for row in tiers.by_group(("ab", "c"), (1, 2))] == ["a", "b", "c", "c"]
    with pytest.raises(ValueError, match=r"a row for every member is required, got too few for \['abc'\]; split"):
        tiers.by_group(("abc", "d"), (1, 2))
    monkeypatch.setattr(tiers, "LONG", True)
    assert tiers.in_turn("abcd", (1, 2)) == tiers.by_group(("ab", "cd"), (1, 2)) == [*itertools.product("abcd", (1, 2))]


def test_the_long_tier_runs_all_combinations_and_more_examples(monkeypatch):
    factors = range(4), range(3), range(2)
    sizes = []
    for long in (False, True):
        monkeypatch.setattr(tiers, "LONG", long)
        rows = tiers.covered(*factors)
        assert set(rows) <= set(itertools.product(*factors))
        sizes.append((len(rows), len(tiers.few("abcdef", 2)), tiers.examples(5).max_examples))
        assert tiers.long("all of it").args == (not long,)
        assert tiers.long("all of it").kwargs == {"reason": "all of it; --long runs it"}
    assert sizes == [(12, 2, 5), (24, 6, 50)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes that may use a GPU are not forked")
def test_processes_begin_with_what_takes_long_to_import():
    program = f"import sys; print([name for name in {PRELOADED!r} if name not in sys.modules])"
    assert call_program(program) == "[]\n"

"""Names that differ only in numbers are told as one, and none is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtensor.explanation.folding import fold


def called(names, among=None):
    return [one.called for one in fold(((name, 0) for name in names), among or names)]


@pytest.mark.parametrize(
    ("names", "among", "expected"),
    [
        ([f"layers.{i}.up" for i in range(32)], None, "layers.*.up x32"),
        (["head"], None, "head"),
        (["a.1.up"], ["a.1.up", "a.2.up"], "a.1.up"),
        ([f"a.{i}.up" for i in (1, 2, 3, 7)], [f"a.{i}.up" for i in range(9)], "a.[1-3,7].up x4"),
        ([f"a.0.e.{i}.w1" for i in range(4)], [f"a.{j}.e.{i}.w1" for i in range(4) for j in (0, 1)], "a.0.e.*.w1 x4"),
        ([f"a.{j}.e.{i}.w1" for i in range(4) for j in (0, 1)], None, "a.*.e.*.w1 x8"),
    ],
)
def test_names(names, among, expected):
    assert called(names, among) == [expected]


def test_numbers_within_words_tell_layers_apart():
    names = ["l.0.w1", "l.0.w2", "l.1.w1", "l.1.w2"]
    assert called(names) == ["l.*.w1 x2", "l.*.w2 x2"]


def test_what_is_said_tells_layers_apart():
    said = [(f"l.{i}.up", i == 1) for i in range(3)]
    assert fold(said, [name for name, _ in said]) == [
        ("l.[0,2].up x2", ["l.0.up", "l.2.up"], False),
        ("l.1.up", ["l.1.up"], True),
    ]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 3), st.booleans()), max_size=30))
def test_every_name_is_in_one_fold_with_what_is_said_of_it(parts):
    said = {f"l.{i}.{word}.{j}": flag for i, word, j, flag in parts}
    found = fold(said.items(), said)
    assert sorted(name for one in found for name in one.members) == sorted(said)
    for text, members, of_all in found:
        assert {said[name] for name in members} == {of_all}
        assert text.endswith(f" x{len(members)}") or text == members[0]

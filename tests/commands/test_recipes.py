"""``hybridtensor recipes`` tells every word of specs."""

import json

from hybridtensor.__main__ import main
from hybridtensor.commands.recipes import FORMATS
from hybridtensor.commands.recipes import MODIFIERS as TOLD
from hybridtensor.recipes import RECIPES
from hybridtensor.recipes.spec import MODIFIERS, POLICIES, WORDS


def test_every_word_is_told(capsys):
    assert list(FORMATS) == list(WORDS)
    assert set(TOLD) == {*MODIFIERS, *POLICIES}
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out.split()
    assert set(printed) >= {*RECIPES, *WORDS, *MODIFIERS, *POLICIES}


def test_data(capsys):
    assert main(["recipes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["spec"] for row in found["recipes"]} == {n: str(make()) for n, make in RECIPES.items()}
    assert found["formats"] == FORMATS
    assert found["modifiers"] == TOLD

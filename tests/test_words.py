"""The package and its pages use the field's words: what is said instead of those that are not used."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [
    *ROOT.glob("hybridtensor/**/*.py"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("examples/**/*.py"),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
]
INSTEAD = {
    r"travel\w*": "send, all-gather, payload",
    r"takes? note|taking note": "record",
    r"ma(de|ke|kes) again": "recompute, requantize",
    r"hand(s|ed)? over": "pass, export",
    r"(is|are|was|were) told": "observed, called, printed: who does what",
}


@pytest.mark.parametrize("word", INSTEAD)
def test_words_are_the_fields(word):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b({word})\b", line, re.IGNORECASE)
    ]
    assert found == [], f"say instead: {INSTEAD[word]}"


def test_there_are_files():
    assert len(FILES) > 250

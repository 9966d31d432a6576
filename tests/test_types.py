"""What type checkers say of calls, and what editors offer."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from hybridtensor.convert import Options, quantize_
from hybridtensor.recipes import RECIPES
from hybridtensor.recipes.words import RecipeName

ROOT = Path(__file__).parent.parent
USE = ROOT / "tests" / "data" / "typed_use.py"


def test_wrong_calls_and_only_these_are_told_by_mypy():
    """As the package itself is checked, with what that left in the cache: torch alone takes half a minute."""
    run = subprocess.run([sys.executable, "-m", "mypy", USE], capture_output=True, text=True, cwd=ROOT)
    said = re.findall(r"typed_use\.py:(\d+): error: .*\[([a-z-]+)\]", run.stdout)
    lines = enumerate(USE.read_text().splitlines(), 1)
    expected = [(str(i), line.split("# wrong: ")[1]) for i, line in lines if "# wrong: " in line]
    assert len(expected) > 5
    assert said == expected, run.stdout + run.stderr


def test_editors_offer_the_names_of_recipes():
    assert get_args(RecipeName) == tuple(RECIPES)


def test_options_that_are_passed_on_are_those_of_quantize():
    named = [p.name for p in inspect.signature(quantize_).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert list(Options.__annotations__) == named

"""The scripts of ``examples/frameworks`` run as they are; so does the code of ``docs/frameworks.md`` and the README."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "frameworks"
SAYS = {
    "with_accelerate": r"loss [01]\.\d+\n",
    "with_lightning": r"loss [01]\.\d+\n",
    "with_torchtitan": r"fp8\n",
    "with_transformer_engine": r"gradient norm \d+\.\d+\n",
    "with_transformers": r"fp8_delayed\n",
}


def run(program, *needs):
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: make test-integrations")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if "transformer_engine" not in needs else os.environ
    done = subprocess.run([sys.executable, *program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_script_is_expected_to_say_something():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == SAYS.keys()


@pytest.mark.parametrize("name", SAYS)
def test_scripts_run(name):
    package = name.removeprefix("with_")
    needs = [package] if package != "transformers" else [package, "accelerate"]
    assert re.search(SAYS[name], run([SCRIPTS / f"{name}.py"], *needs))


@pytest.mark.parametrize(("page", "count"), [("docs/frameworks.md", len(SAYS)), ("README.md", 3)])
def test_the_code_of_the_docs_is_that_of_the_scripts(page, count):
    """Every line of a snippet is one of a script that runs, in that order."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    snippets = [snippet for snippet in snippets if "hybridtensor.integrations" in snippet]
    assert len(snippets) == count
    scripts = [path.read_text().splitlines() for path in SCRIPTS.glob("*.py")]
    for snippet in snippets:
        lines = [line for line in snippet.splitlines() if line.strip() and line.strip() != "..."]
        assert any(in_order(lines, script) for script in scripts), snippet


def in_order(lines, script):
    rest = iter(line.strip() for line in script)
    return all(line.strip() in rest for line in lines)

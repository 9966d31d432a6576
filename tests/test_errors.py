"""What all errors of the package have in common, read from its sources: who raised, what happened, what to do."""

import ast
import functools
import re
from pathlib import Path

import pytest

import hybridtensor

ROOT = Path(hybridtensor.__file__).parent
STATES = ("RuntimeError", "NotImplementedError")  # the others are of an argument's type or value
# Readers of files leave the subject to their callers, which begin the message with the file; a command with its name.
WITHOUT_SUBJECT = (
    "commands/",
    "untrusted/",
    "export.py",
    "inference/",
    "watching/recording.py",
)
CALLERS_SUBJECT = ("{", "both operands need")  # begins with a name, or is put behind a caller's words
OF_OTHERS = ("inference/", "integrations/")  # what another program requires is what has happened there
NESTED = ("{error}", "{failed}", "{_REFERENCED}", "{'\\n  '.join(found.problems)}")  # these say what to do


def text(node: ast.AST) -> str:
    """Return a message with the sources of what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


@functools.cache
def messages() -> list[tuple[str, str, str]]:
    """Return file and line, class and message of each error, but for those that are another's message alone."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        inside = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith("Error"):
                message = text(node.args[0])
                if not re.fullmatch(r"\{[^{}]*\}", message):
                    found.append((f"{inside}:{node.lineno}", ast.unparse(node.func), message))
    return found


def begins_with_a_subject(place: str, kind: str, message: str) -> bool:
    named = re.match(r"(\{[^{}]*\}|[^:;{])+: ", message) is not None
    return named or place.startswith(WITHOUT_SUBJECT) or message.startswith(CALLERS_SUBJECT)


def ends_without_a_period(place: str, kind: str, message: str) -> bool:
    return not message.rstrip().endswith(".")


def says_what_to_do(place: str, kind: str, message: str) -> bool:
    return kind not in STATES or "; " in message or any(nested in message for nested in NESTED)


def says_what_happened(place: str, kind: str, message: str) -> bool:
    """Not that something else was required, as errors of an argument do."""
    told = re.search(r"required.*, got|got (none|None)\b", message) is None
    return told or kind not in STATES or place.startswith(OF_OTHERS)


@pytest.mark.parametrize("rule", [begins_with_a_subject, ends_without_a_period, says_what_to_do, says_what_happened])
def test_every_error(rule):
    assert [f"{place}: {message}" for place, kind, message in messages() if not rule(place, kind, message)] == []


def test_there_are_messages():
    assert len(messages()) > 400

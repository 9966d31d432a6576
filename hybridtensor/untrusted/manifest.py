"""The manifest of a step: the size and digest of its files, what they store, and a crash-safe order of writes."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridtensor.untrusted.files import read_json
from hybridtensor.version import __version__

MANIFEST = "manifest.json"
_VERSION = 1
STEP = re.compile(r"step_([0-9]{8,})")
REPLACED = ".replaced"
"""Hidden folders of steps that are being replaced have it in their names."""
_LIMIT = 1 << 28  # some hundred bytes per weight, and per file


@dataclass(frozen=True)
class Weight:
    """A converted weight in a checkpoint: ``"master"`` or ``"persistent"``, and the fingerprint of its recipe."""

    kind: str
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a step.

    Attributes:
        step: Its number.
        world_size: Ranks that wrote it.
        versions: Versions of python, torch, torchao and this package.
        entries: Kind of each saved entry, by name: ``"module"``, ``"optimizer"``, ``"stateful"`` or ``"data"``.
        weights: Converted weights, by name.
        recipes: Fingerprint to recipe in words.
        groups: Per optimizer the names of the parameters in its groups.
        files: Name to size in bytes and SHA-256.
    """

    step: int
    world_size: int
    versions: dict[str, str]
    entries: dict[str, str]
    weights: dict[str, Weight]
    recipes: dict[str, str]
    groups: dict[str, list[list[str]]]
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A hash of all recipes."""
        return _digest({name: dataclasses.asdict(weight) for name, weight in self.weights.items()})[
            :16
        ]

    def to_json(self) -> str:
        content = {"format": _VERSION, "fingerprint": self.fingerprint, **dataclasses.asdict(self)}
        return json.dumps({**content, "digest": _digest(content)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest in the folder ``path``; raise ValueError if it is damaged, OSError if it cannot be read."""
        try:
            content = read_json(path, MANIFEST, _LIMIT, fractions=False)
            # The digest before all else: damage is then called damage, not a version or a field
            # that is unknown.
            digest = content.pop("digest")
            if digest != _digest(content):
                raise ValueError("its digest is wrong")
            version = content.pop("format")
            if version != _VERSION:
                raise ValueError(f"it has version {version}, this library reads {_VERSION}")
            content.pop("fingerprint")
            _check(content)
            weights = {name: Weight(**weight) for name, weight in content.pop("weights").items()}
            files = {name: (size, sha) for name, (size, sha) in content.pop("files").items()}
            return cls(**content, weights=weights, files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path / MANIFEST}: damaged manifest: {error}") from error


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_count(value: object) -> bool:
    # Not ``isinstance``: JSON's ``true`` would be the number 1.
    return type(value) is int and value >= 0


def _dict_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is dict and all(map(fits, value.values()))


def _list_of(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _is_weight(value: object) -> bool:
    fields = {"kind", "fingerprint"}
    return type(value) is dict and value.keys() == fields and all(map(_is_text, value.values()))


def _is_file(value: object) -> bool:
    return type(value) is list and len(value) == 2 and _is_count(value[0]) and _is_text(value[1])


_FIELDS: dict[str, Callable[[object], bool]] = {
    "step": _is_count,
    "world_size": _is_count,
    "versions": _dict_of(_is_text),
    "entries": _dict_of(_is_text),
    "weights": _dict_of(_is_weight),
    "recipes": _dict_of(_is_text),
    "groups": _dict_of(_list_of(_list_of(_is_text))),
    "files": _dict_of(_is_file),
}


def _check(content: dict[str, object]) -> None:
    """Raise ValueError unless a manifest has its fields, each of its type."""
    if content.keys() != _FIELDS.keys():
        raise ValueError(f"the fields {sorted(_FIELDS)} are required")
    wrong = [name for name, fits in _FIELDS.items() if not fits(content[name])]
    if wrong:
        raise ValueError(f"{wrong[0]} is not what it should be made of")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions that a manifest records."""
    return {
        "hybridtensor": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchao": importlib.metadata.version("torchao"),
    }


def step_path(root: Path, step: int) -> Path:
    """Return the folder of a step in the folder of a run."""
    return root / f"step_{step:08d}"


def replaced(root: Path) -> list[tuple[int, Path]]:
    """Return number and hidden folder of the steps that were being replaced, the last first."""
    found = []
    for path in root.glob(f".step_*{REPLACED}-*"):
        match = STEP.fullmatch(path.name[1:].partition(REPLACED)[0])
        if match and path.is_dir() and not path.is_symlink():
            found.append((path.stat().st_mtime_ns, int(match[1]), path))
    return [(step, path) for _, step, path in sorted(found, reverse=True)]


def root_folder(directory: str | os.PathLike[str], step: int | None) -> Path:
    """Return a folder of checkpoints, or raise for what is none, or no number of a step."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"checkpoint: a folder is required, got {directory!r:.80}")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise TypeError(f"checkpoint: the number of a step is required, got {step!r}")
    if step is not None and step < 0:
        raise ValueError(f"checkpoint: the number of a step, 0 or more, is required, got {step}")
    return Path(directory)


def has_steps(directory: Path) -> bool:
    """Return whether a folder is, or has in it, one that is named like a step, or like one that was being replaced."""
    inside = directory.iterdir() if directory.is_dir() else ()
    own = Path(os.path.abspath(directory))  # "." has no name
    return any(STEP.match(path.name.removeprefix(".")) for path in (own, *inside))

"""The manifest of a step: what its files should be, and what of; and the order of writes that
survives a crash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hybridtensor.distributed.checkpoint.metadata import METADATA, read_metadata
from hybridtensor.version import __version__

MANIFEST = "manifest.json"
_VERSION = 1
_STEP = re.compile(r"step_(\d{8,})")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Weight:
    """What a checkpoint knows of a converted weight.

    Attributes:
        kind: ``"master"``, or ``"persistent"``.
        fingerprint: Of its recipe.
    """

    kind: str
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """What a step consists of.

    Attributes:
        step: Its number.
        world_size: Ranks that wrote it.
        versions: Of python, torch, torchao and this package.
        entries: What was saved, name to kind: ``"module"``, ``"optimizer"``, ``"stateful"`` or
            ``"data"``.
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
        """Return the text of the file."""
        content = {"format": _VERSION, "fingerprint": self.fingerprint, **dataclasses.asdict(self)}
        return json.dumps({**content, "digest": _digest(content)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest in the folder ``path``.

        Raises:
            ValueError: If it is not what was written.
            OSError: If it cannot be read.
        """
        try:
            content = json.loads((path / MANIFEST).read_text())
            digest = content.pop("digest")
            if digest != _digest(content):
                raise ValueError("its digest is wrong")
            version = content.pop("format")
            if version != _VERSION:
                raise ValueError(f"it has version {version}, this library reads {_VERSION}")
            content.pop("fingerprint")
            weights = {name: Weight(**weight) for name, weight in content.pop("weights").items()}
            files = {
                name: (int(size), str(sha)) for name, (size, sha) in content.pop("files").items()
            }
            return cls(**content, weights=weights, files=files)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path / MANIFEST}: damaged manifest: {error}") from error


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what writes a checkpoint."""
    return {
        "hybridtensor": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchao": importlib.metadata.version("torchao"),
    }


def step_path(root: Path, step: int) -> Path:
    """Return the folder of a step."""
    return root / f"step_{step:08d}"


def steps(root: Path) -> dict[int, Path]:
    """Return the folders of all steps in ``root``, the newest first."""
    if not root.is_dir():
        return {}
    found = {
        int(match[1]): path
        for path in root.iterdir()
        if (match := _STEP.fullmatch(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def digest_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Return size and SHA-256 of a file; with ``sync``, once it is on the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
        if sync:
            os.fsync(stream.fileno())
    return size, digest.hexdigest()


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk on return."""
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def problems(path: Path, step: int | None = None, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a text for each damage of the step in the folder ``path``; none if it is intact.

    Args:
        path: The folder.
        step: The number that it should have; None is that of its name.
        share: Check only every ``share[1]``-th file, from ``share[0]`` on: the ranks' part of the
            work.
    """
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        return [f"{path.name}: {MANIFEST} is missing"]
    except (ValueError, OSError) as error:
        return [str(error)]
    found = []
    named = _STEP.fullmatch(path.name)
    expected = int(named[1]) if step is None and named else step
    if expected is not None and manifest.step != expected:
        found.append(f"{path.name}: the manifest is that of step {manifest.step}")
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        found += _file_problems(path, name, *manifest.files[name])
    if share[0] == 0 and not any(METADATA in text for text in found):
        try:
            read_metadata(path, manifest.files)
        except (ValueError, OSError) as error:
            found.append(str(error))
    return found


def _file_problems(path: Path, name: str, size: int, sha: str) -> list[str]:
    if Path(name).name != name:
        return [f"{path.name}: the manifest names {name!r}, which is not in it"]
    try:
        got = digest_file(path / name)
    except FileNotFoundError:
        return [f"{path.name}: {name} is missing"]
    except OSError as error:
        return [f"{path.name}: {name} cannot be read: {error}"]
    if got[0] != size:
        return [f"{path.name}: {name} has {got[0]} bytes, {size} were written"]
    return [] if got[1] == sha else [f"{path.name}: {name} has a wrong SHA-256"]


def root_folder(directory: str | os.PathLike[str], step: int | None) -> Path:
    """Return a folder of checkpoints, or raise for what is none, or no number of a step."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"checkpoint: a folder is required, got {directory!r}")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise TypeError(f"checkpoint: the number of a step is required, got {step!r}")
    if step is not None and step < 0:
        raise ValueError(f"checkpoint: the number of a step, 0 or more, is required, got {step}")
    return Path(directory)

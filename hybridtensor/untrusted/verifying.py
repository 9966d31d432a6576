"""Checkpoints of a run: which steps are there, and what is wrong with each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hybridtensor.printed import Printed, add_row, named_table
from hybridtensor.untrusted.files import check_folder, digest_file
from hybridtensor.untrusted.manifest import (
    MANIFEST,
    STEP,
    Manifest,
    replaced,
    root_folder,
    step_path,
)
from hybridtensor.untrusted.metadata import METADATA, read_metadata
from hybridtensor.untrusted.reader import SafeReader

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN = 20  # damaged steps in a table


def steps(root: Path) -> dict[int, Path]:
    """Return the folders of all steps by number, newest first, including intact ones whose replacement was
    interrupted."""
    if not root.is_dir():
        return {}
    found = {
        int(match[1]): path
        for path in root.iterdir()
        if (match := STEP.fullmatch(path.name)) and path.is_dir()
    }
    # A name with more zeros than needed would be a second folder of a step.
    found = {step: path for step, path in found.items() if path == step_path(root, step)}
    for step, path in replaced(root):
        if step not in found and not problems(path, step):
            found[step] = path
    return dict(sorted(found.items(), reverse=True))


def problems(path: Path, step: int | None = None, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Return a text for each damage of a step; with ``share=(i, n)`` check only every n-th file from the i-th on."""
    try:
        check_folder(path)
        manifest = Manifest.read(path)
    except FileNotFoundError:
        return [f"{path.name}: {MANIFEST} is missing"]
    except (ValueError, OSError) as error:
        return [str(error)]
    found = []
    named = STEP.fullmatch(path.name)
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
    # Names such as ``../x`` would have files elsewhere read and digested.
    if Path(name).name != name:
        return [f"{path.name}: the manifest names {name[:100]!r}, which is not in it"]
    try:
        got = digest_file(path / name, size=size)
    except FileNotFoundError:
        return [f"{path.name}: {name} is missing"]
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{path.name}: {name} cannot be read: {error}"]
    if got[0] != size:
        return [f"{path.name}: {name} has {got[0]} bytes, {size} were written"]
    return [] if got[1] == sha else [f"{path.name}: {name} has a wrong SHA-256"]


class Verified(Printed, dict[int, list[str]]):
    """The defects of each step, newest first."""

    def __rich__(self) -> Table:
        table = named_table("step", "what is wrong")
        damaged = [(step, wrong) for step, wrong in self.items() if wrong]
        good = [step for step, wrong in self.items() if not wrong]
        table.title = (
            f"{len(good)} of {len(self)} checkpoints are good" if self else "No checkpoint"
        )
        if good:
            table.caption = f"the newest that is good: step {good[0]}"
        for step, wrong in damaged[:_SHOWN]:
            more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            add_row(table, str(step), f"{wrong[0]}{more}")
        if len(damaged) > _SHOWN:
            table.add_row("...", f"{len(damaged) - _SHOWN} more")
        return table


def verify(directory: str | os.PathLike[str]) -> Verified:
    """Read every step in ``directory``, or the step that it is, and return the problems of each, the newest first.

    ::

        for step, problems in checkpoint.verify("runs/a").items():
            print(step, problems or "intact")

    An empty list means that the step is intact and readable; no step at all, that there is no checkpoint.

    Raises:
        TypeError: If ``directory`` is not a path.
    """
    root = root_folder(directory, None)
    found = steps(root)
    if not found:
        own = Path(os.path.abspath(root))  # "." has no name
        found = {
            number: path for number, path in steps(own.parent).items() if path.name == own.name
        }
    return Verified(
        {number: problems(path, number) or _unreadable(path) for number, path in found.items()}
    )


def _unreadable(path: Path) -> list[str]:
    """Return a text for each file of a step with an entry that cannot be read."""
    reader = SafeReader(path)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    return reader.unreadable()


def latest(directory: str | os.PathLike[str]) -> int | None:
    """Return the number of the newest intact step, or None.

    ::

        step = checkpoint.latest("runs/a")
    """
    return next(
        (
            number
            for number, path in steps(root_folder(directory, None)).items()
            if not problems(path, number)
        ),
        None,
    )

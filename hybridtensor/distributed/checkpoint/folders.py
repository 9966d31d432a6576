"""The hidden folders of a run: steps that are being written, and former steps that are being replaced.

Each is named for the process that made it, and other processes leave it alone as long as that one may live.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from hybridtensor.distributed.checkpoint.owners import (
    has_ended,
    is_forgotten,
    is_own,
    owned_name,
)
from hybridtensor.untrusted.files import sync_folder
from hybridtensor.untrusted.manifest import REPLACED, replaced, step_path
from hybridtensor.untrusted.verifying import problems

_PARTIAL = ".partial"


def new_folder(who: str, root: Path, step: int, overwrite: bool) -> Path:
    """Create the hidden folder that a step is written into, and remove leftovers of crashes.

    Raises:
        ValueError: If the step exists and is intact, unless ``overwrite``, or ``root`` can be no folder; ``who`` begins
            the message.
    """
    file = next((one for one in (root, *root.parents) if one.is_file()), None)
    if file is not None:
        raise ValueError(
            f"{who}: a folder is required as directory, got {root}, where {file} is a file; name another"
        )
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync_folder(root.parent)
    _recover(root)
    target = step_path(root, step)
    if target.exists() and not overwrite and not problems(target):
        raise ValueError(
            f"{who}: step {step} is there already, intact, in {target}; pass "
            "overwrite=True to replace it"
        )
    folder = root / f".{target.name}{_PARTIAL}{owned_name()}"
    folder.mkdir()
    _remove_unfinished(root, now=folder.stat().st_mtime)
    return folder


def move_into_place(folder: Path, target: Path) -> None:
    """Rename a finished folder; a former one of that name is moved to a hidden name first and removed afterwards."""
    # Order matters: between the two renames the step is its hidden folder, which ``steps`` finds after a crash.
    former = None
    if target.exists():
        former = target.with_name(f".{target.name}{REPLACED}{owned_name()}")
        target.rename(former)
    try:
        folder.rename(target)
    except BaseException:
        if former is not None:
            former.rename(target)
        raise
    sync_folder(target.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)


def _recover(root: Path) -> None:
    """Rename steps whose replacement did not finish, and remove replaced ones."""
    for step, path in replaced(root):
        if has_ended(path) is False and not is_own(path):
            continue  # is being replaced now
        target = step_path(root, step)
        if not target.exists() and not problems(path, step):
            path.rename(target)
            sync_folder(root)
        elif not problems(target):
            # Synced first: after a crash the rename that brought the new step may be lost, and this folder is then
            # the only one.
            sync_folder(root)
            shutil.rmtree(path, ignore_errors=True)


def _remove_unfinished(root: Path, now: float) -> None:
    """Remove unfinished folders of processes that have ended, and old ones of processes that nothing here knows."""
    for path in root.glob(f".step_*{_PARTIAL}-*"):
        ended = has_ended(path)
        if ended or (ended is None and is_forgotten(path, now)):
            shutil.rmtree(path, ignore_errors=True)

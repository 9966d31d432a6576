"""Which process made a hidden folder, by its name, and whether that process has ended.

A name ends in ``<machine>-<process id>-<start time>-<random>``. The machine is a hash of its boot, and of the
namespaces in which the other two numbers count, so that they are compared with those of this system alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from pathlib import Path

FORGOTTEN = 24 * 3600
"""Seconds without a change after which an unfinished folder of an unknown process is removed."""
_PROC = Path("/proc")
_OWNER = re.compile(r".*-([0-9a-f]{16})-([0-9]+)-([0-9]+)-[0-9a-f]+")
_NAMESPACES = ("pid", "time")  # of process ids, and of the clock of start times


def owned_name() -> str:
    """Return the end of a new folder's name, which no other folder has."""
    start = _start(os.getpid()) or "0"
    return f"-{_machine() or '0' * 16}-{os.getpid()}-{start}-{uuid.uuid4().hex[:8]}"


def has_ended(path: Path) -> bool | None:
    """Return whether the process that made a folder has ended; None if nothing here can tell."""
    match = _OWNER.fullmatch(path.name)
    if match is None or match[1] != _machine():
        return None
    process = int(match[2])
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except OSError:  # of another user
        pass
    start = _start(process)
    return None if start is None else start != match[3]


def is_own(path: Path) -> bool:
    """Return whether this process made a folder."""
    match = _OWNER.fullmatch(path.name)
    return match is not None and match.groups() == (
        _machine(),
        f"{os.getpid()}",
        _start(os.getpid()),
    )


def is_forgotten(path: Path, now: float) -> bool:
    """Return whether nothing in a folder has changed for a day, by the clock of its file system."""
    try:
        last = max(each.lstat().st_mtime for each in (path, *path.iterdir()))
    except OSError:  # somebody changes it
        return False
    return now - last > FORGOTTEN


def _machine() -> str | None:
    """Return 16 hexadecimal digits, other ones after each boot and in each container; None if unknown."""
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text()
        spaces = [os.readlink(_PROC / "self/ns" / kind) for kind in _NAMESPACES]
        return hashlib.sha256(repr((boot, spaces)).encode()).hexdigest()[:16]
    return None


def _start(process: int) -> str | None:
    """Return when a process started, in ticks since the boot; None if unknown."""
    with contextlib.suppress(OSError):
        # The name of the program comes before, in parentheses, and may have spaces.
        return (_PROC / f"{process}" / "stat").read_text().rpartition(")")[2].split()[19]
    return None

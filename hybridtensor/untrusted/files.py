"""Files of a checkpoint, opened only if they are what a checkpoint is made of: regular files of a known
size in a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK = 1 << 20
# Neither follow a link nor wait for who writes into a pipe, on systems that know these
_FLAGS = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def check_folder(path: Path) -> None:
    """Raise ValueError unless ``path`` is a folder, and not a link to one."""
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise ValueError(f"{path.name} is no folder but a link or a file; it is not followed")


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open a regular file in ``folder``; raise ValueError for links, pipes, devices and files elsewhere."""
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"{folder.name}: {name!r} is no name of a file in it")
    check_folder(folder)
    mode = (folder / name).lstat().st_mode
    if not stat.S_ISREG(mode):  # opening a device may already do something
        raise ValueError(f"{folder.name}: {name} is no regular file; it is not opened")
    descriptor = os.open(folder / name, _FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{folder.name}: {name} is no regular file; it is not read")
    return os.fdopen(descriptor, "rb")


def read_file(folder: Path, name: str, limit: int) -> bytes:
    """Return the bytes of a regular file; raise ValueError if it is larger than ``limit``."""
    with open_file(folder, name) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"{folder.name}: {name} has {size} bytes, {limit} at most are read")
        return stream.read(size)


def read_json(
    folder: Path, name: str, limit: int, *, fractions: bool = True, infinite: bool = False
) -> dict[str, Any]:
    """Read a JSON object, which has each name once, from a file of ``limit`` bytes at most.

    Args:
        folder: The folder of the file.
        name: The file.
        limit: Maximum size in bytes.
        fractions: Whether numbers may have a fraction or an exponent.
        infinite: Whether ``NaN`` and ``Infinity`` are numbers, as ``json.dump`` writes them.

    Raises:
        ValueError: If it is anything else, or no regular file in the folder.
        OSError: If it cannot be read.
    """

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is in it twice")
        return found

    def refused(text: str) -> int:
        raise ValueError(f"the number {text[:20]} is in it")

    def number(text: str) -> int:
        # 19 digits, as int64 has at most: the time that int() takes grows with the square of their number.
        return int(text) if len(text) < 20 else refused(text)

    try:
        content = json.loads(
            read_file(folder, name, limit),
            object_pairs_hook=once,
            parse_int=number,
            parse_float=float if fractions else refused,
            parse_constant=float if infinite else refused,
        )
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"it is no dictionary but {type(content).__name__}")
    return content


def digest_stream(stream: BinaryIO, size: int | None = None) -> tuple[int, str]:
    """Return the length and SHA-256 of a stream, reading at most ``size`` + 1 bytes."""
    digest, seen = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        seen += len(chunk)
        if size is not None and seen > size:
            break
    return seen, digest.hexdigest()


def digest_file(path: Path, *, size: int | None = None, sync: bool = False) -> tuple[int, str]:
    """Return the size and digest of a file; the digest is ``""`` if ``size`` is given and differs."""
    with open_file(path.parent, path.name) as stream:
        found = os.fstat(stream.fileno()).st_size, ""
        if size is None or size == found[0]:
            found = digest_stream(stream, size)
        if sync:
            os.fsync(stream.fileno())
    return found


@contextlib.contextmanager
def own_folder(target: Path) -> Iterator[Path]:
    """Create a hidden folder with a unique name beside ``target``, and the folder of both; remove the first at the
    end."""
    target.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Write text, and wait until it is on disk."""
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())

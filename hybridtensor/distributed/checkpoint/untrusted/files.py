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
    """Raise ValueError unless ``path`` is a folder itself, and not a link to one.

    Raises:
        OSError: If it cannot be looked at.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise ValueError(f"{path.name} is no folder but a link or a file; it is not followed")


def open_file(folder: Path, name: str) -> BinaryIO:
    """Open the file ``name`` in ``folder``.

    Raises:
        ValueError: If it is not in the folder, or no regular file: a link, a pipe, a device.
        OSError: If it cannot be opened.
    """
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
    """Return the bytes of a file of ``limit`` bytes at most.

    Raises:
        ValueError: If it is larger, or no regular file in the folder.
        OSError: If it cannot be read.
    """
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
        limit: How large it may be.
        fractions: Whether numbers may have a fraction or an exponent.
        infinite: Whether ``NaN`` and ``Infinity`` are numbers, as ``json.dump`` writes them.

    Raises:
        ValueError: If it is anything else, or no regular file in the folder.
        OSError: If it cannot be read.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is in it twice")
        return found

    def refused(text: str) -> int:
        raise ValueError(f"the number {text[:20]} is in it")

    def number(text: str) -> int:
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
    """Return the number of bytes of a stream, and their SHA-256; of ``size`` + 1 bytes at most."""
    digest, seen = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        seen += len(chunk)
        if size is not None and seen > size:
            break
    return seen, digest.hexdigest()


def digest_file(path: Path, *, size: int | None = None, sync: bool = False) -> tuple[int, str]:
    """Return size and SHA-256 of a file.

    Args:
        path: The file.
        size: What it should have; a file of another size is not read, and has the digest ``""``.
        sync: Bring it to the disk first.

    Raises:
        ValueError: If it is no regular file.
        OSError: If it cannot be read.
    """
    with open_file(path.parent, path.name) as stream:
        found = os.fstat(stream.fileno()).st_size, ""
        if size is None or size == found[0]:
            found = digest_stream(stream, size)
        if sync:
            os.fsync(stream.fileno())
    return found


@contextlib.contextmanager
def own_folder(target: Path) -> Iterator[Path]:
    """Make a hidden folder beside ``target`` whose name nobody else has, and remove it in the end.

    What becomes ``target`` is made in it, with permissions of its own.
    """
    own = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


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

"""The text of all runs: the source files of the Python packages on this machine, as bytes."""

from __future__ import annotations

import hashlib
import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SOURCES = {".py", ".pyi", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".c", ".js", ".ts", ".rst", ".md", ".cmake"}
VALIDATION_EVERY = 20  # one file in so many is held out
PARTS = ("train", "validation")


def source_files(data: Path | None) -> Iterator[Path]:
    """Yield the files below ``data``, or the source files of the Python packages on this machine, in order."""
    if data is not None:
        yield from [data] if data.is_file() else sorted(f for f in data.rglob("*") if f.is_file())
        return
    paths = sysconfig.get_paths()
    folders = dict.fromkeys([*(paths[name] for name in ("purelib", "platlib", "stdlib")), *site.getsitepackages()])
    for folder in folders:
        yield from sorted(f for f in Path(folder).rglob("*") if f.suffix in SOURCES and f.is_file())


def write_text(data: Path | None, out: Path, min_mb: float, max_mb: float) -> str:
    """Write all text, no file twice, as ``train.bin`` and ``validation.bin``, and return its digest.

    Raises:
        ValueError: If there is less than ``min_mb``.
    """
    seen: set[bytes] = set()
    size, digest = 0, hashlib.blake2b(digest_size=8)
    out.mkdir(parents=True, exist_ok=True)
    with (out / "train.bin").open("wb") as train, (out / "validation.bin").open("wb") as validation:
        for file in source_files(data):
            content = file.read_bytes()
            key = hashlib.blake2b(content).digest()
            if key in seen or not content:
                continue
            seen.add(key)
            (validation if len(seen) % VALIDATION_EVERY == 2 else train).write(content)
            digest.update(key)
            size += len(content)
            if size >= max_mb * 1e6:
                break
    if size < min_mb * 1e6:
        raise ValueError(f"--data: at least {min_mb:g} MB of text are required, got {size / 1e6:.1f} MB")
    return digest.hexdigest()


def sizes(out: Path) -> dict[str, int]:
    """Return the bytes of each part of the text that lies in ``out``."""
    return {part: (out / f"{part}.bin").stat().st_size for part in PARTS}


class Batches:
    """Batches of a text that lies on the device: which ones is known from the beginning, so that no step waits.

    Args:
        path: A file of bytes.
        rows: Of a batch, each a stretch of the text.
        context: Bytes of a row.
        device: Where.
    """

    def __init__(self, path: Path, rows: int, context: int, device: str) -> None:
        count = path.stat().st_size
        if count <= context + 1:
            raise ValueError(f"--data: more than {context + 1} bytes are required in {path.name}, got {count}")
        self.rows, self.context = rows, context
        self.bytes = torch.from_file(str(path), size=count, dtype=torch.uint8).to(device)
        self.window = torch.arange(context + 1, device=device)

    def draw(self, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and targets of ``count`` batches, ``[rows, context]`` each, drawn by ``seed``."""
        last, generator = len(self.bytes) - self.context - 1, torch.Generator().manual_seed(seed)
        starts = torch.randint(last, (count, self.rows, 1), generator=generator).to(self.bytes.device)
        for of_batch in starts:
            rows = self.bytes[of_batch + self.window].long()
            yield rows[:, :-1], rows[:, 1:]

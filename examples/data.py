"""Real text as bytes, and batches that are a pure function of seed and step."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_FRACTION = 0.05
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


def load_text(path: Path | None, *, without: Path) -> bytes:
    """Return the bytes of a file, of all files below a folder, or of the Python standard library's source files.

    Args:
        path: The file or folder; None for the standard library.
        without: A folder to leave out where it lies below ``path``: what a run writes is not its text.

    Raises:
        ValueError: If there is nothing to read.
    """
    if path is None:
        path = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in sorted(path.rglob("*.py")) if not NOT_THE_LIBRARY & set(f.relative_to(path).parts)]
    elif path.is_dir():
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and without.resolve() not in f.resolve().parents]
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"--data: a file or folder is required, got {path}, which is not there")
    if not files:
        raise ValueError(f"--data: text is required, got {path} without a file in it")
    return b"\n".join(f.read_bytes() for f in files)


class Bytes:
    """Training and validation text.

    Args:
        text: All of it; the last twentieth is for validation.
        context: Bytes per sequence.
        batch: Sequences per batch.
        seed: Draws the training batches.

    Raises:
        ValueError: If the text is too short for one sequence of each.
    """

    def __init__(self, text: bytes, *, context: int, batch: int, seed: int) -> None:
        split = int(len(text) * (1 - VALIDATION_FRACTION))
        if len(text) - split <= context:
            raise ValueError(
                f"--data: at least {int((context + 1) / VALIDATION_FRACTION)} bytes are required for sequences of "
                f"{context}, got {len(text)}; give more text or a smaller --size"
            )
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train, self.validation = data[:split], data[split:]
        self.context, self.batch, self.seed = context, batch, seed

    def training_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one step, ``[B, T]`` each."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - self.context, (self.batch,), generator=generator)
        return self._sequences(self.train, starts)

    def validation_batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return ``count`` batches spread evenly over the validation text, always the same."""
        last = len(self.validation) - self.context - 1
        starts = torch.linspace(0, last, count * self.batch).long().clamp(max=last)  # fp32 may round up
        return [self._sequences(self.validation, part) for part in starts.split(self.batch)]

    def _sequences(self, data: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.stack([data[s : s + self.context + 1] for s in starts.tolist()]).long()
        return rows[:, :-1], rows[:, 1:]

"""How a face is made, as a value and as text, and the tensors that hold it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format


class Cast(NamedTuple):
    """How a face is made.

    Attributes:
        name: Name of its format.
        pow2_scale: Whether current scaling rounds fp32 scales to powers of two, where the format does not say so.
        slot: Which delayed scale to cast with; -1 measures the tensor instead.
        stream: Random numbers to round with; -1 rounds to nearest.
    """

    name: str
    pow2_scale: bool = False
    slot: int = -1
    stream: int = -1

    @property
    def format(self) -> Format:
        """The record of the format."""
        return get_format(self.name)

    @property
    def measures(self) -> bool | None:
        """Whether scales follow from an amax per row; False is one of the tensor, None is no amax."""
        fmt = self.format
        if fmt.tensor_block is not None:
            return fmt.tensor_block[0] is not None
        return None if self.slot >= 0 or fmt.block[1] is not None else fmt.block[0] is not None

    def for_columnwise(self) -> Cast:
        """Return the cast of the columnwise face, which never shares random numbers with the rowwise one."""
        return self if self.stream < 0 else self._replace(stream=self.stream + 1)

    def __str__(self) -> str:
        return f"{self.name};{int(self.pow2_scale)};{self.slot};{self.stream}"


@functools.lru_cache(maxsize=1024)
def parse(text: str) -> Cast | None:
    """Undo ``str(cast)``; the empty text is None."""
    if not text:
        return None
    name, pow2_scale, slot, stream = text.split(";")
    return Cast(name, pow2_scale == "1", int(slot), int(stream))


class Layout(NamedTuple):
    """How a tensor lies in memory.

    Attributes:
        shape: Its shape.
        strides: Its strides.
        dtype: Its dtype.
    """

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return such a tensor, not filled."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def face_layouts(cast: Cast | None, other: int, contraction: int) -> list[Layout]:
    """Return how the tensors of an ``[other, contraction]`` face lie: elements, scales, in some formats tensor scales.

    Scales of blocks along the contraction lie block by block, not row by row: so hardware reads them, and so one block
    of neighbouring rows is written at once.
    """
    if cast is None:
        return []
    fmt = cast.format
    width, (rows, blocks) = contraction // fmt.elements_per_byte, fmt.scale_shape(other, contraction)
    outer_major = fmt.block[0] == 1 and fmt.block[1] is not None
    made = [
        Layout((other, width), (max(width, 1), 1), required(fmt.storage)),
        Layout((rows, blocks), (1, max(rows, 1)) if outer_major else (max(blocks, 1), 1), required(fmt.scale_dtype)),
    ]
    level = fmt.tensor_scale_shape(other, contraction)
    return made if level is None else [*made, Layout(level, (max(level[1], 1), 1), torch.float32)]


def empty_face(x: Tensor, cast: Cast | None, other: int, contraction: int) -> list[Tensor]:
    """Return the tensors of an ``[other, contraction]`` face on the device of ``x``, not filled."""
    return [layout.empty(x.device) for layout in face_layouts(cast, other, contraction)]


def required(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype that quantized formats have.

    Raises:
        TypeError: If there is none, in the identity format.
    """
    if dtype is None:
        raise TypeError("face_layouts: a quantized format is required, got the identity")
    return dtype


class State(NamedTuple):
    """What casts need besides the tensor; see ``ops.quantize``.

    Attributes:
        factors: Delayed factors, fp32 ``[S]``, or None.
        amaxes: Their notes, fp32 ``[S]``, or None.
        rounding: Key and step of random rounding, int64 ``[2]``, or None.
        first_row: Index of the first row in the whole tensor.
        row_amax: Largest magnitudes that the rowwise face is scaled by, fp32 ``[1]`` or one per row, or None.
        column_amax: The same of the columnwise face.
    """

    factors: Tensor | None = None
    amaxes: Tensor | None = None
    rounding: Tensor | None = None
    first_row: int = 0
    row_amax: Tensor | None = None
    column_amax: Tensor | None = None

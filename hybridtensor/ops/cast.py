"""How a face is made, as a value and as text, and the tensors that hold it."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import Format, get_format

_ALIGNMENT = 16  # of the addresses that kernels are compiled for


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


class Casts(NamedTuple):
    """What ``ops.quantize`` is asked for.

    Attributes:
        row: How the rowwise face is made, or None.
        column: How the columnwise face is made, or None.
        source: What the columnwise face is made from: what this cast would make rowwise; None is the tensor itself.
    """

    row: Cast | None
    column: Cast | None
    source: Cast | None = None


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

    def is_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies so; strides only count along what has several entries."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            return False
        steps = zip(self.shape, tensor.stride(), self.strides, strict=True)
        return tensor.numel() == 0 or all(extent == 1 or mine == theirs for extent, mine, theirs in steps)


def face_layouts(cast: Cast | None, other: int, contraction: int) -> tuple[Layout, ...]:
    """Return how the tensors of an ``[other, contraction]`` face lie: elements, scales, in some formats tensor scales.

    Scales of blocks along the contraction lie block by block, not row by row: so hardware reads them, and so one block
    of neighbouring rows is written at once.
    """
    if cast is None:
        return ()
    fmt = cast.format
    width, (rows, blocks) = contraction // fmt.elements_per_byte, fmt.scale_shape(other, contraction)
    outer_major = fmt.block[0] == 1 and fmt.block[1] is not None
    made = (
        Layout((other, width), (max(width, 1), 1), required(fmt.storage)),
        Layout((rows, blocks), (1, max(rows, 1)) if outer_major else (max(blocks, 1), 1), required(fmt.scale_dtype)),
    )
    level = fmt.tensor_scale_shape(other, contraction)
    return made if level is None else (*made, Layout(level, (max(level[1], 1), 1), torch.float32))


_numeric_layouts = functools.lru_cache(maxsize=1024)(face_layouts)  # symbols of a traced shape have no hash


def can_hold(out: list[Tensor], x: Tensor, row: Cast | None, column: Cast | None) -> bool:
    """Whether the faces of ``x`` can be written straight into ``out``, plain tensors that lie as kernels want them.

    They share no memory with each other, nor with ``x``, which is read while they are written.
    """
    rows, columns = x.shape
    layouts = (*_numeric_layouts(row, rows, columns), *_numeric_layouts(column, columns, rows))
    return (
        len(out) == len(layouts)
        and all(type(t) in (Tensor, torch.nn.Parameter) and t.device == x.device for t in (x, *out))
        and all(layout.is_of(t) and t.data_ptr() % _ALIGNMENT == 0 for t, layout in zip(out, layouts, strict=True))
        and not _overlap([x, *out])
    )


def _overlap(tensors: list[Tensor]) -> bool:
    """Whether stretches of memory that tensors lie in overlap."""
    stretches = []
    for t in tensors:
        if t.numel():
            last = sum((extent - 1) * stride for extent, stride in zip(t.shape, t.stride(), strict=True))
            stretches.append((t.data_ptr(), t.data_ptr() + t.itemsize * (last + 1)))
    return any(before[1] > after[0] for before, after in itertools.pairwise(sorted(stretches)))


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


class Hint:
    """By what amax the last tensor of a kind was scaled: going by it, a cast takes one pass if the scale still holds.

    It never changes a result, and is not saved.

    Attributes:
        amax: fp32 ``[1]``, or None.
        stream: On which it is known.
    """

    __slots__ = ("amax", "stream")

    def __init__(self) -> None:
        self.amax: Tensor | None = None
        self.stream = 0

    def last(self, device: torch.device, stream: int) -> Tensor | None:
        """Return the amax, if it is known on that device and stream."""
        amax = self.amax
        return amax if amax is not None and amax.device == device and self.stream == stream else None


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

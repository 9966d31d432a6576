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


def empty_face(x: Tensor, cast: Cast | None, other: int, contraction: int) -> list[Tensor]:
    """Return the tensors of an ``[other, contraction]`` face on the device of ``x``, not filled.

    Scales of blocks along the contraction lie block by block, not row by row: so hardware reads them, and so one block
    of neighbouring rows is written at once.
    """
    if cast is None:
        return []
    fmt = cast.format
    rows, blocks = fmt.scale_shape(other, contraction)
    made = [
        x.new_empty((other, contraction // fmt.elements_per_byte), dtype=fmt.storage),
        x.new_empty((blocks, rows), dtype=fmt.scale_dtype).t()
        if fmt.block[0] == 1 and fmt.block[1] is not None
        else x.new_empty((rows, blocks), dtype=fmt.scale_dtype),
    ]
    tensor_scale = fmt.tensor_scale_shape(other, contraction)
    return made if tensor_scale is None else [*made, x.new_empty(tensor_scale, dtype=torch.float32)]


class State(NamedTuple):
    """What casts need besides the tensor; see ``ops.quantize``.

    Attributes:
        factors: Delayed factors, fp32 ``[S]``, or None.
        amaxes: Their notes, fp32 ``[S]``, or None.
        rounding: Key and step of random rounding, int64 ``[2]``, or None.
        first_row: Index of the first row in the whole tensor.
    """

    factors: Tensor | None = None
    amaxes: Tensor | None = None
    rounding: Tensor | None = None
    first_row: int = 0

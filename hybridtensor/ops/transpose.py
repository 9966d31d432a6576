"""Transpose the elements of a face that came in parts, and copy them together on the way.

Shape letters: ``P`` parts of a matrix, below each other, ``R`` rows of a part, ``B`` bytes of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridtensor.ops.cache import Cache
from hybridtensor.ops.face import Face, bytewise
from hybridtensor.ops.kernel_library import Launch, on_device
from hybridtensor.ops.library import define, implement, is_traced, runs_directly
from hybridtensor.ops.references.nvfp4 import pack, unpack


def transpose_reference(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> None:
    """Define ``transpose``: write the columnwise face of gathered parts, and the rowwise one if given."""
    whole = parts.flatten(0, 1)
    column.copy_(whole.t() if bits == 8 else pack(unpack(whole).t()))
    if row is not None:
        row.copy_(whole)


def _fake(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> None:
    return None


_OP = define(
    "transpose(Tensor parts, int bits, Tensor(a!) column, Tensor(b!)? row) -> ()",
    reference=transpose_reference,
    fake=_fake,
)


class _Key(NamedTuple):
    """Cache key of a transpose: everything but addresses, with their alignment."""

    bits: int
    shape: torch.Size
    strides: tuple[int, int]
    copied: bool
    vector: int
    column_vector: int
    aligned: tuple[bool, ...]
    device: torch.device


_PLANS: Cache[_Key, Launch] = Cache()
_WORD = 4
_VECTOR = 16  # bytes that a thread reads or writes at once


def transpose_cuda(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> None:
    """Implement ``transpose`` by a kernel."""
    _prepared(parts, bits, column, row)()


def _prepared(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> Callable[[], None]:
    """Return a function that transposes these tensors, valid while their addresses keep their alignment."""
    if parts.numel() == 0:
        return _nothing
    whole = functools.partial(_transpose_whole, parts, bits, column, row)
    if parts.stride(2) != 1 or (bits == 4 and parts.shape[0] > 1 and parts.shape[1] % 2):
        # Rows that are not read in words, or bytes of the result with elements of two parts
        return whole
    num_parts, rows, width = parts.shape
    strides = parts.stride(0) if num_parts > 1 else 0, parts.stride(1) if rows > 1 else width
    written = [column] if row is None else [column, row]
    addresses = [tensor.data_ptr() for tensor in (parts, *written)]
    # The largest power of two up to 16 that divides all: so many bytes are read and written at once.
    # All but the column's, which has its own
    vector = math.gcd(_VECTOR, width, *strides, *addresses[::2])
    if vector < _WORD:
        return functools.partial(transpose_reference, parts, bits, column, row)
    key = _Key(
        bits, parts.shape, strides, row is not None, vector,
        math.gcd(_VECTOR, addresses[1], column.shape[1], rows * bits // 8 if num_parts > 1 else 0),
        tuple(address % _VECTOR == 0 for address in addresses), parts.device,
    )  # fmt: skip
    launch = _PLANS.get(key)
    if launch is None:
        launch = _PLANS[key] = _launch(key)
    first = parts if row is None else row
    arguments = parts, *strides, first, column, column.shape[1], rows, width
    return functools.partial(_run, launch, arguments, written)


def _run(launch: Launch, arguments: tuple[Any, ...], written: list[Tensor]) -> None:
    with on_device(written[0].device):
        launch(*arguments)
    torch.autograd.graph.increment_version(written)


def _transpose_whole(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> None:
    """Transpose a contiguous copy, which is the rowwise face if that is asked for."""
    whole = parts.contiguous() if row is None else row.view(parts.shape).copy_(parts)
    transpose_cuda(whole.view(1, -1, parts.shape[2]), bits, column, None)


def _nothing() -> None:
    """Transpose a matrix without elements."""


class _Tile(NamedTuple):
    """The tile of one program: each thread reads 16 bytes of ``neighbours`` rows."""

    rows: int
    bytes: int
    neighbours: int
    warps: int


# By bits; measured on an H200 with Triton 3.6, 2026-11-21; elsewhere a sane default.
# They reach 0.82 to 0.87 and 0.73 to 0.85 of copy speed; torch's strided copies 0.08 and 0.03.
_TILES = {8: _Tile(256, 128, 8, 8), 4: _Tile(128, 128, 8, 4)}


def _launch(key: _Key) -> Launch:
    tile, (num_parts, rows, width) = _TILES[key.bits], key.shape
    columns, pitch = tile.bytes * 8 // key.bits, num_parts * rows * key.bits // 8
    return Launch(
        "transpose", "transpose_kernel", num_parts * -(-rows // tile.rows) * -(-width // tile.bytes),
        BITS=key.bits, COPY=key.copied, V=key.vector, COLUMN_V=key.column_vector if key.column_vector >= _WORD else 1,
        EVEN=rows % tile.rows == 0 and width % tile.bytes == 0,
        WIDE=max(tile.rows * max(key.strides[1], width), columns * pitch) >= 2**31,
        BM=tile.rows, BK=tile.bytes, R=tile.neighbours, options={"num_warps": tile.warps},
    )  # fmt: skip


implement("transpose", transpose_cuda)


def transpose(parts: Tensor, *, column: Tensor, row: Tensor | None = None, bits: int = 8) -> None:
    """Write the transpose of the matrix that ``parts`` make below each other, and the matrix itself, in one read.

    Args:
        parts: Elements as bytes, uint8 ``[P, R, B]``; any strides, may be empty. Of 4-bit elements
            two are in a byte, the first one in its low half.
        column: What to write the transpose into, uint8, contiguous: ``[B, P * R]``; of 4-bit
            elements ``[2 * B, P * R / 2]``.
        row: What to write the matrix into, uint8 ``[P * R, B]``, contiguous; None leaves it out.
        bits: Bits of an element, 8 or 4.

    Raises:
        TypeError: If what should be a tensor is none, or not uint8.
        ValueError: If ``bits`` is another number, a shape is not one of those, 4-bit elements are
            in an odd number of rows, a result is not contiguous, or a tensor is on another device.
            Results must not share memory with ``parts``, which is not checked.
    """
    prepare_transpose(parts, column=column, row=row, bits=bits)()


def prepare_transpose(
    parts: Tensor, *, column: Tensor, row: Tensor | None = None, bits: int = 8
) -> Callable[[], None]:
    """Return a function that runs ``transpose`` with these tensors, whose storage may be replaced between calls."""
    _check(parts, bits, column, row)
    written = [column] if row is None else [column, row]
    known: dict[tuple[int, ...], Callable[[], None]] = {}

    def run() -> None:
        if not _is_direct(parts):
            _OP(parts, bits, column, row)
            return
        # Of addresses only the alignment counts for a launch.
        aligned = tuple([tensor.data_ptr() % _VECTOR for tensor in (parts, *written)])
        launch = known.get(aligned)
        if launch is None:
            launch = known[aligned] = _prepared(parts, bits, column, row)
        launch()

    return run


def transposed(row: Face) -> Face:
    """Return the columnwise face of a rowwise one with square blocks: the same elements, transposed."""
    elements, per_byte = bytewise(row.qdata), row.format.elements_per_byte
    if per_byte == 1 and is_traced():
        column = elements.t().contiguous()
    else:
        column = elements.new_empty(elements.shape[1] * per_byte, elements.shape[0] // per_byte)
        transpose(elements[None], column=column, bits=8 // per_byte)
    scale = row.scale
    if scale is not None:
        scale = bytewise(scale).t().contiguous().view(scale.dtype)
    return row._replace(qdata=column.view(row.qdata.dtype), scale=scale)


def _is_direct(parts: Tensor) -> bool:
    return parts.is_cuda and runs_directly(parts)


def _check(parts: Tensor, bits: int, column: Tensor, row: Tensor | None) -> None:
    if bits not in (8, 4):
        raise ValueError(f"transpose: elements of 8 or 4 bits are required, got {bits}")
    for name, tensor in (("parts", parts), ("column", column), ("row", row)):
        if tensor is None and name == "row":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"transpose: a tensor is required as {name}, got {type(tensor).__name__}; pass a torch.Tensor"
            )
        if tensor.dtype != torch.uint8:
            raise TypeError(
                f"transpose: {name} in uint8 is required, got {tensor.dtype}; view the tensor as bytes"
            )
    if parts.dim() != 3:
        raise ValueError(
            f"transpose: parts of 3 dimensions are required, got {tuple(parts.shape)}; "
            "unsqueeze a matrix: it is one part"
        )
    num_parts, rows, width = parts.shape
    per, height = 8 // bits, num_parts * rows
    if height % per:
        raise ValueError(
            f"transpose: an even number of rows of 4-bit elements is required, got {height}; pad them"
        )
    for name, tensor, shape in (
        ("column", column, (width * per, height // per)),
        ("row", row, (height, width)),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or not tensor.is_contiguous()):
            raise ValueError(
                f"transpose: {name} contiguous of shape {shape} is required, got {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}; allocate it so"
            )
        if tensor is not None and tensor.device != parts.device:
            raise ValueError(
                f"transpose: {name} on {parts.device} is required, as the tensor, got {tensor.device}; move it"
            )

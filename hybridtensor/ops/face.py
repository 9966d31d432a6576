"""One face of a tensor, from the kernel that casts it to the checkpoint that stores it.

The words that every file uses:

- A *face* is a matrix of *elements* ``[other, contraction]`` and the *scales* that turn them into
  values. The *rowwise* face of a tensor ``[rows, columns]`` is ``[rows, columns]``, its
  *columnwise* face ``[columns, rows]``: a matrix product contracts the last axis of both its faces.
- A *scale* decodes: element times scale is the value. An *encode scale* is its reciprocal: a value times the encode
  scale is rounded to the element. An *amax* is the largest magnitude that a scale follows from.
- A *tensor scale* is the second level of two-level formats: the amax of the tensor, or of each row.
- A face *in high precision* has the identity format: its elements are the values, and it has no scales.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtensor.formats import IDENTITY, Format


class Groups(NamedTuple):
    """Which rows of a matrix belong to which weight of a stack of weights.

    Attributes:
        num_groups: Weights.
        ends: Where the rows of each end, int32 ``[num_groups]``, not decreasing; rows behind the last end
            belong to none. None says that this is a stack itself, a matrix each.
        step: Of what number of rows each has a multiple in columnwise faces, and one at least; the rest is zeros.
        first: Number of the first weight among all that the layer has on all ranks.
    """

    num_groups: int
    ends: Tensor | None = None
    step: int = 1
    first: int = 0


class FaceKind(NamedTuple):
    """The format of a face's tensors; ``dequantized_rowwise`` as in ``Face``."""

    format: Format
    dequantized_rowwise: torch.dtype | None = None


class Face(NamedTuple):
    """One face ``[other, contraction]`` of a tensor.

    Attributes:
        qdata: Elements, ``[other, contraction / elements_per_byte]``; the values themselves in the
            identity format. Zeros at the end fill a last block that may not be partial.
        scale: Block scales, ``format.scale_shape(other, contraction)``; None in the identity format.
        tensor_scale: Second-level scale, fp32 ``format.tensor_scale_shape(...)``, or None.
        format: Format of the elements.
        dequantized_rowwise: If not None, the tensors above are those of the tensor's rowwise face, and this is the
            columnwise face in high precision, in this dtype, that they give back. It stores nothing of its own.
        groups: Which rows of the tensor belong together, where its scales end with them; see ``ops.groups``.
    """

    qdata: Tensor
    scale: Tensor | None
    tensor_scale: Tensor | None
    format: Format
    dequantized_rowwise: torch.dtype | None = None
    groups: Groups | None = None

    @classmethod
    def of(cls, tensors: list[Tensor], kind: FaceKind) -> Face:
        # ``tuple.__new__`` goes past the Python function that a NamedTuple has: several are made in every product
        if len(tensors) == 2:  # most are
            return tuple.__new__(cls, (*tensors, None, *kind, None))
        qdata, scale, tensor_scale = (*tensors, None, None)[:3]
        return tuple.__new__(cls, (qdata, scale, tensor_scale, *kind, None))

    def tensors(self) -> list[Tensor]:
        if self.scale is None:
            return [self.qdata]
        if self.tensor_scale is None:
            return [self.qdata, self.scale]
        return [self.qdata, self.scale, self.tensor_scale]

    @property
    def follows_rowwise(self) -> bool:
        """Whether this is a columnwise face requantized from the rowwise data, whose tensors it shares."""
        return self.dequantized_rowwise is not None and self.scale is not None

    @property
    def held_format(self) -> Format:
        """The format that is multiplied: the identity for a dequantized face."""
        return self.format if self.dequantized_rowwise is None else IDENTITY

    @property
    def kind(self) -> FaceKind:
        return FaceKind(self.format, self.dequantized_rowwise)

    def stored_dim(self, axis: int) -> int:
        """Return along which dimension of the tensors an axis lies, 0 ``other`` or 1 ``contraction``."""
        return axis if self.dequantized_rowwise is None else 1 - axis

    def cut(self, axis: int, first: int, count: int) -> Face:
        """Slice ``count`` entries along ``axis`` (0 ``other``, 1 ``contraction``) without copies; scales of cut
        blocks stay."""
        fmt, dim = self.format, self.stored_dim(axis)
        per_byte = fmt.elements_per_byte if dim == 1 else 1
        qdata = self.qdata.narrow(dim, first // per_byte, count // per_byte)
        scale = _cut_scale(self.scale, fmt.block[dim], dim, first, count)
        along = None if fmt.tensor_block is None else fmt.tensor_block[dim]
        return self._replace(
            qdata=qdata,
            scale=scale,
            tensor_scale=_cut_scale(self.tensor_scale, along, dim, first, count),
        )


def _cut_scale(
    scale: Tensor | None, block: int | None, dim: int, first: int, count: int
) -> Tensor | None:
    """Return the scales of the blocks that a slice touches; ``block=None`` is one scale for the whole axis."""
    if scale is None or block is None:
        return scale
    start = first // block
    return scale.narrow(dim, start, -(-(first + count) // block) - start)


def high_precision(values: Tensor) -> Face:
    """Return a face of the identity format with values ``[other, contraction]``."""
    return Face(values, None, None, IDENTITY)


def bytewise(tensor: Tensor) -> Tensor:
    """View one-byte dtypes as uint8, because not every operator and backend knows the narrow ones."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def columnwise_of(row: Face, dtype: torch.dtype) -> Face:
    """Return the columnwise face that is the dequantized rowwise one."""
    return row._replace(dequantized_rowwise=dtype)


def in_its_dtype(face: Face) -> Face:
    """Return a face whose high-precision values have the dtype in which they are multiplied."""
    dtype = face.dequantized_rowwise
    if dtype is None or face.scale is not None:
        return face
    return face._replace(qdata=face.qdata.to(dtype))


class TensorLayout(NamedTuple):
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has this layout; strides of extents up to 1 do not count."""
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            return False
        if tensor.numel() == 0:
            return True
        steps = zip(self.shape, tensor.stride(), self.strides, strict=True)
        return all(extent == 1 or mine == theirs for extent, mine, theirs in steps)


def face_layouts(fmt: Format, other: int, contraction: int) -> tuple[TensorLayout, ...]:
    """Return the layouts of a quantized ``[other, contraction]`` face's tensors, in the order of ``Face.tensors``.

    Scales of blocks along the contraction lie block by block, not row by row. Of formats without partial
    blocks the face has ``format.stored(contraction)`` entries along the contraction.

    Raises:
        TypeError: If the format is the identity.
    """
    if fmt.storage is None:
        raise TypeError("face_layouts: a quantized format is required, got the identity")
    contraction = fmt.stored(contraction)
    width = contraction // fmt.elements_per_byte
    elements = TensorLayout((other, width), (max(width, 1), 1), fmt.storage)
    if fmt.scale_dtype is None:
        return (elements,)
    rows, blocks = fmt.scale_shape(other, contraction)
    # So hardware reads scales, and so those of one block of neighbouring rows are written at once.
    block_by_block = fmt.block[0] == 1 and fmt.block[1] is not None
    scale_strides = (1, max(rows, 1)) if block_by_block else (max(blocks, 1), 1)
    layouts = (
        elements,
        TensorLayout((rows, blocks), scale_strides, fmt.scale_dtype),
    )
    shape = fmt.tensor_scale_shape(other, contraction)
    if shape is None:
        return layouts
    return (*layouts, TensorLayout(shape, (max(shape[1], 1), 1), torch.float32))


# Symbols of a traced shape have no hash
numeric_layouts = functools.lru_cache(maxsize=1024)(face_layouts)


def empty_face(fmt: Format, other: int, contraction: int, device: torch.device) -> Face:
    """Return a quantized ``[other, contraction]`` face that is not filled."""
    layouts = face_layouts(fmt, other, contraction)
    return Face.of([layout.empty(device) for layout in layouts], FaceKind(fmt))

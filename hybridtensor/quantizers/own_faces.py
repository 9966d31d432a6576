"""Check what quantizers outside of this package return: faces of another shape would be multiplied without a word."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridtensor.arguments import shown
from hybridtensor.formats import Format
from hybridtensor.ops import CastRequest, Face
from hybridtensor.ops.face import face_layouts
from hybridtensor.state import Context

if TYPE_CHECKING:
    from hybridtensor.quantizers.base import Quantizer


def checked(faces: Callable[..., object]) -> Callable[..., object]:
    """Return a quantizer's ``faces`` that raises unless the result is as its formats say."""

    @functools.wraps(faces)
    def check(
        self: Quantizer,
        x: Tensor,
        *,
        rowwise: bool,
        columnwise: bool,
        dtype: torch.dtype,
        **options: object,
    ) -> object:
        made = faces(self, x, rowwise=rowwise, columnwise=columnwise, dtype=dtype, **options)
        if not isinstance(made, (tuple, list)) or isinstance(made, Face) or len(made) != 2:
            raise TypeError(
                f"{self}: faces() returns a rowwise and a columnwise face, or None in place of one, got "
                f"{_told(made)}; return both as a tuple"
            )
        context = options.get("context")
        rows: int | None = math.prod(x.shape[:-1])
        if isinstance(context, Context) and context.groups is not None:
            rows = None  # of the groups, with zeros between them
        if rowwise:
            _require(self, "rowwise", made[0], self.rowwise_format, (rows, x.shape[-1]))
        if columnwise:
            _require(self, "columnwise", made[1], self.columnwise_format, (x.shape[-1], rows))
        return made

    return check


def _require(
    quantizer: Quantizer,
    direction: str,
    face: object,
    fmt: Format,
    extents: tuple[int | None, int | None],
) -> None:
    """Raise unless a face has the format, and tensors of its dtypes and shapes; None is any extent."""
    who = f"{quantizer}: faces()"
    if face is None:
        raise ValueError(f"{who} made no {direction} face; have it return what is asked for")
    if not isinstance(face, Face):
        raise TypeError(f"{who} returns a Face as {direction} face, got {_told(face)}; make one")
    if face.dequantized_rowwise is not None:
        return  # it has the tensors of the rowwise face
    if face.format.base is not fmt:
        raise ValueError(
            f"{who} returned a {direction} face in {face.format}, but {direction}_format is {fmt}; make both the same"
        )
    other, contraction = extents
    if other is None or contraction is None:
        return
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in face.tensors()]
    required: list[tuple[tuple[int, ...], torch.dtype]] = [((other, contraction), face.qdata.dtype)]
    if not fmt.is_identity:
        required = [
            (part.shape, part.dtype) for part in face_layouts(face.format, other, contraction)
        ]
    if got != required:
        raise ValueError(
            f"{who} returned a {direction} face of {_layout(got)}, but {fmt} has {_layout(required)} for a tensor of "
            f"{contraction if direction == 'columnwise' else other} rows; see ops.face.face_layouts"
        )


def require_formats(quantizer: Quantizer, request: CastRequest) -> None:
    """Raise ValueError if a cast is to other formats than the quantizer says."""
    casts = (request.row or request.source, request.column)
    for cast, fmt in zip(
        casts, (quantizer.rowwise_format, quantizer.columnwise_format), strict=True
    ):
        if cast is not None and cast.format.base is not fmt:
            raise ValueError(
                f"{quantizer}: a cast to its format, {fmt}, is required, got one to {cast.format}; make both the same"
            )


def _told(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, (tuple, list)) else shown(value)


def _layout(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors)

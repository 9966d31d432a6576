"""Check what quantizers outside of this package return: faces of another shape would be multiplied without a word."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybridtensor.arguments import shown
from hybridtensor.formats import Format
from hybridtensor.ops import CastRequest, Face
from hybridtensor.ops.face import Groups, face_layouts
from hybridtensor.ops.groups import layouts_of
from hybridtensor.state import Context

if TYPE_CHECKING:
    from hybridtensor.quantizers.base import Quantizer


def checked(faces: Callable[..., object]) -> Callable[..., object]:
    """Return a quantizer's ``faces`` that raises unless the result is as its formats say."""

    @functools.wraps(faces)
    def check(self: Quantizer, x: Tensor, **options: object) -> object:
        made = faces(self, x, **options)
        context = options.get("context")
        if not isinstance(made, (tuple, list)) or isinstance(made, Face) or len(made) != 2:
            raise TypeError(
                f"{_who(self, context)} returns a rowwise and a columnwise face, or None in place of one, got "
                f"{_found(made)}; return both as a tuple"
            )
        # What is asked for, or made by default
        if options.get("rowwise", made[0] is not None):
            _require(self, "rowwise", made[0], self.rowwise_format, x.shape, context)
        if options.get("columnwise", made[1] is not None):
            _require(self, "columnwise", made[1], self.columnwise_format, x.shape, context)
        return made

    return check


def _require(
    quantizer: Quantizer,
    direction: str,
    face: object,
    fmt: Format,
    shape: Sequence[int],
    context: object,
) -> None:
    """Raise unless a face of a tensor has the format, and tensors of its dtypes and shapes."""
    if face is None:
        raise ValueError(
            f"{_who(quantizer, context)} made no {direction} face; have it return what is asked for"
        )
    if not isinstance(face, Face):
        raise TypeError(
            f"{_who(quantizer, context)} returns a Face as {direction} face, got {_found(face)}; make one"
        )
    if face.dequantized_rowwise is not None:
        return  # it has the tensors of the rowwise face
    if face.format.base is not fmt:
        raise ValueError(
            f"{_who(quantizer, context)} returned a {direction} face in {face.format}, but {direction}_format is "
            f"{fmt}; make both the same"
        )
    groups = context.groups if isinstance(context, Context) else None
    got = [(tuple(tensor.shape), tensor.dtype) for tensor in face.tensors()]
    required = _required(face, direction, shape, groups)
    if got != required:
        of = "" if groups is None else f" by the {groups.num_groups} experts in its context"
        raise ValueError(
            f"{_who(quantizer, context)} returned a {direction} face of {_layout(got)}, but {fmt} has "
            f"{_layout(required)} for a tensor of shape {list(shape)}{of}; make it so, or derive from "
            "OneFormatQuantizer, whose casts do"
        )


def _required(
    face: Face, direction: str, shape: Sequence[int], groups: Groups | None
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of a face."""
    rows, columns, rowwise = math.prod(shape[:-1]), shape[-1], direction == "rowwise"
    extents = (rows, columns) if rowwise else (columns, rows)
    fmt, dtype = face.format, face.qdata.dtype
    if fmt.is_identity:
        return [(extents if groups is None else tuple(face.qdata.shape), dtype)]
    if groups is None:
        layouts = list(face_layouts(fmt, *extents))
    elif rowwise:
        layouts = layouts_of(fmt, None, shape, groups)[0]
    else:
        layouts = layouts_of(None, fmt, shape, groups)[1]
    return [(layout.shape, layout.dtype) for layout in layouts]


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


def _who(quantizer: Quantizer, context: object) -> str:
    """Return how an error begins: with the layer, if there is one."""
    layer = isinstance(context, Context) and context.state is not None and context.state.name
    return f"{context}: {quantizer}: faces()" if layer else f"{quantizer}: faces()"


def _found(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, (tuple, list)) else shown(value)


def _layout(tensors: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in tensors)

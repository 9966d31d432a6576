"""The tensors of an exported weight: those that are there, or parts that ranks put together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hybridtensor.inference.gather import (
    BucketPlace,
    Places,
    Source,
    Spread,
    Whole,
    exchanged,
    gathered,
    spread_of,
)
from hybridtensor.inference.weights import Exported
from hybridtensor.ops import Face, Groups
from hybridtensor.ops.cache import Cache
from hybridtensor.ops.face import FaceKind, TensorLayout, face_layouts
from hybridtensor.ops.groups import stack_layouts
from hybridtensor.quantizers.base import one_face
from hybridtensor.recipes.config import weight_values
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor, MasterWeight

Ready = tuple[Exported, "Face | Tensor | None"]
"""What is exported, and its whole face or values; None on ranks that do not get it."""

Placed = tuple[Places, Spread]
"""The parts that ranks hold of a weight, and over which ranks they are."""


_EXCHANGED: Cache[object, list[Places]] = Cache(most=64)


def places_of(found: list[Exported]) -> dict[str, Placed]:
    """Return where the parts of all sharded weights are; all ranks ask for the same ones."""
    spreads: dict[Spread, list[Exported]] = {}
    for one in found:
        spread = spread_of(one.value) if isinstance(one.value, DTensor) else None
        if spread is not None:
            spreads.setdefault(spread, []).append(one)
    known: dict[str, Placed] = {}
    for spread, some in spreads.items():
        key = (
            spread,
            tuple((tuple(one.value.shape), tuple(_whole(one).placements)) for one in some),
        )
        if key not in _EXCHANGED:  # on all ranks alike
            _EXCHANGED[key] = exchanged([_place(one) for one in some], spread)
        for one, places in zip(some, _EXCHANGED[key], strict=True):
            known[one.name] = places, spread
    return known


@torch.no_grad()
def whole_tensors(
    some: list[Exported], places: Mapping[str, Placed], dtype: torch.dtype, first_only: bool
) -> Iterator[Ready]:
    """Yield faces and values that are exported, in their order, gathered together where ranks hold parts.

    Args:
        some: What is exported, on every rank the same.
        places: Of all that is sharded.
        dtype: Of floating-point values.
        first_only: Whether only the first rank gets what is gathered.
    """
    ready: list[Face | Tensor | Source] = [_ready(one, places.get(one.name), dtype) for one in some]
    sources = [one for one in ready if isinstance(one, Source)]
    whole = iter(gathered(sources, first_only))
    for one, found in zip(some, ready, strict=True):
        if not isinstance(found, Source):
            yield one, found
            continue
        tensors = next(whole)
        yield one, None if not tensors else _finished(one, tensors)


def size_of(one: Exported, dtype: torch.dtype) -> int:
    """Return the bytes of what is exported, all of it, but for scales."""
    elements, dtype = math.prod(one.value.shape), one.dtype or dtype
    if one.format is not None:
        return elements // one.format.elements_per_byte
    return elements * (
        dtype.itemsize if one.value.is_floating_point() else one.value.dtype.itemsize
    )


def _ready(one: Exported, placed: Placed | None, dtype: torch.dtype) -> Face | Tensor | Source:
    """Return the face or the values, or this rank's part of them."""
    if one.format is None:
        values = _high_precision(one, dtype)
        return values if placed is None else _source(one, placed, values)
    face = _own_face(one)
    if placed is None:
        return face if face is not None else _made(one, one.part.source)
    if face is None:  # values that are quantized once they are whole
        return _source(one, placed, one.part.plain)
    places, spread = placed
    return Source(_parts_of_face(one, face), _as_matrices(one, places), spread)


def _whole(one: Exported) -> DTensor:
    """Return a weight of which this rank has a part."""
    return cast(DTensor, one.value)


def _high_precision(one: Exported, dtype: torch.dtype) -> Tensor:
    """Return the values of this rank's part, which may be an alias."""
    part = one.part
    if isinstance(part, MasterWeight):
        part = part.plain
    elif isinstance(part, HybridTensor):
        part = part.dequantize(dtype)
    values: Tensor = part.detach()
    return values.to(one.dtype or dtype) if values.is_floating_point() else values


def _own_face(one: Exported) -> Face | None:
    """Return the rowwise face of this rank's part; None where only the whole has one."""
    shard, part = one.shard, one.part
    if shard is not None:
        face = shard.forward_face()
    else:
        face = (part.transpose(-2, -1) if one.is_turned else part).forward_face()
    if face is None or face.format is one.format:
        return face
    # Parts of a matrix with a scale each: together they have one per row
    rows = face.qdata.shape[-2]
    scale = face.scale
    if scale is None or one.format is None:
        raise ValueError(f"{one.name}: a quantized face is required, got {face.format}")
    return face._replace(scale=scale.expand(*scale.shape[:-2], rows, 1), format=one.format)


def _made(one: Exported, values: Tensor) -> Face:
    """Return the face of a whole weight, made of its values."""
    part: Any = one.part
    values = weight_values(part.recipe, values)
    turned = values.transpose(-2, -1) if one.is_turned else values
    groups = Groups(values.shape[0]) if values.dim() == 3 else None
    context: Context = part.context._replace(record=False, groups=groups, section=None)
    return one_face(part.recipe.weight, turned, "rowwise", values.dtype, context)


def _place(one: Exported) -> BucketPlace:
    """Return where this rank's part begins in the whole, as that is stored, and its shape."""
    value = _whole(one)
    # private to torch's checkpoints, which say so where parts of parts are cut
    shape, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    return BucketPlace(tuple(offset), tuple(shape))


def _as_matrices(one: Exported, places: Places) -> Places:
    """Return places in a weight as linear layers have it."""
    if not one.is_turned:
        return places
    return tuple(
        BucketPlace(*((count, columns, rows) for count, rows, columns in place)) for place in places
    )


def _source(one: Exported, placed: Placed, values: Tensor) -> Source:
    value = one.value
    strides = torch.empty(value.shape, device="meta").stride()
    whole = Whole(tuple(value.shape), strides, (1,) * value.dim(), values)
    return Source([whole], *placed)


def _layouts(one: Exported) -> list[TensorLayout]:
    """Return how the tensors of the whole face lie."""
    fmt: Any = one.format
    if one.value.dim() == 3:
        return stack_layouts(fmt, one.value.shape[0], *one.matrix)
    return list(face_layouts(fmt, *one.matrix))


def _parts_of_face(one: Exported, face: Face) -> list[Whole]:
    """Return the tensors of a face as parts of those of the whole one."""
    fmt = face.format
    blocks = [(1, fmt.elements_per_byte), fmt.block, fmt.tensor_block or (None, None)]
    of_experts = (1,) * (one.value.dim() - 2)
    return [
        Whole(layout.shape, layout.strides, (*of_experts, *block), tensor)
        for tensor, layout, block in zip(face.tensors(), _layouts(one), blocks, strict=False)
    ]


def _finished(one: Exported, tensors: list[Tensor]) -> Face | Tensor:
    if one.format is None:
        return tensors[0]
    if len(tensors) == 1:
        return _made(one, tensors[0])
    return Face.of(tensors, FaceKind(one.format))

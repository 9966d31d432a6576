"""Quantize weights whose fp32 masters are scattered over ranks, as by a distributed optimizer (ZeRO-1).

Every rank holds a fragment of each flattened master: any range, maybe empty, maybe cutting blocks. No rank has a whole
master. Two collectives serve all weights: a MAX of the amaxes of all scale groups, and a SUM of bytes in which each
rank fills in the elements of its fragment.

In between, each rank quantizes a substitute of the whole matrix: its fragment and, in every scale group that extends
beyond it, the group's amax at one position outside the fragment. All scales are then those of the whole master, and so
are the fragment's elements, in every format and by the ordinary cast.

Shape letters: ``N, K`` a weight; ``G`` scale groups of ``E`` elements; ``W`` weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.arguments import require_group
from hybridtensor.distributed.fragments import (
    COLUMN,
    ROW,
    Fragment,
    agree,
    check_cover,
    fragments,
)
from hybridtensor.formats import Format
from hybridtensor.ops import Face, columnwise_of, high_precision
from hybridtensor.ops.references.blocks import Block
from hybridtensor.ops.references.nvfp4 import pack, unpack
from hybridtensor.quantizers import HybridQuantizer
from hybridtensor.quantizers.base import one_face
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.common_scale import by_scale
from hybridtensor.subclasses.quantizing import overwrite_


@torch.no_grad()
def quantize_master_weights(
    weights: Sequence[HybridTensor],
    master_shards: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Quantize weights, in place, on all ranks alike, from masters that are scattered over them.

    ::

        weights = [layer.weight for layer in model.blocks]  # persistent, the same on every rank
        ht.distributed.quantize_master_weights(weights, master_shards, offsets)

    Every face of every weight equals, bit for bit, that of the whole master. NaN and Inf count as in any cast. Faces in
    high precision, and those after a Hadamard rotation, need the values of other ranks: there values are exchanged.

    Args:
        weights: Persistent parameters, the same on every rank.
        master_shards: This rank's fragment of each flattened master, fp32; empty or None if it has none.
        offsets: Where each begins in the flattened master; None goes with None.
        group: Whose ranks hold the fragments; None is all ranks.

    Raises:
        TypeError: If a weight is not a persistent parameter, or a fragment not fp32.
        ValueError: If a fragment is on another device than its weight, or the lengths of the arguments differ.
        RuntimeError: If ranks disagree on weights or recipes, or the fragments are not the whole,
            each element once; if a weight has a common scale with one that is not given; if another
            rank found an error; or if there are no process groups.

    Source: TransformerEngine's ``quantize_master_weights``, which has FP8 per tensor and per block.
    """
    require_group("quantize_master_weights", group)
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "quantize_master_weights: no process group is initialized; call "
            "torch.distributed.init_process_group, or update_ of the weight's quantizer"
        )
    parts, error = fragments(weights, master_shards, offsets)
    agree(parts, error, group)
    check_cover(parts, group)
    if not parts:
        return
    magnitudes = _reduced_magnitudes(parts, group)
    _take_common_scales(parts, magnitudes)
    made = {
        (i, d): _quantized(part, d, magnitudes.get((i, d)))
        for i, part in enumerate(parts)
        for d in part.directions()
    }
    _exchange(parts, made, group)
    for i, part in enumerate(parts):
        _write(part, made.get((i, ROW)), made.get((i, COLUMN)))


# -- scale groups


def _grouped(matrix: Tensor, block: Block, fill: float | bool) -> Tensor:
    """Return the elements of each scale group, ``[G, E]``, padded with ``fill`` at the edge."""
    sizes = [extent if b is None else b for extent, b in zip(matrix.shape, block, strict=True)]
    pads = [-extent % size for extent, size in zip(matrix.shape, sizes, strict=True)]
    padded = F.pad(matrix, (0, pads[1], 0, pads[0]), value=fill)
    tiles: Tensor = padded.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0])).transpose(1, 2)
    return tiles.flatten(2).flatten(0, 1)


def _ungrouped(groups: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    sizes = [extent if b is None else b for extent, b in zip(shape, block, strict=True)]
    counts = [-(-extent // size) for extent, size in zip(shape, sizes, strict=True)]
    padded = (
        groups.view(*counts, *sizes)
        .transpose(1, 2)
        .reshape(counts[0] * sizes[0], counts[1] * sizes[1])
    )
    return padded[: shape[0], : shape[1]]


def _needs_values(fmt: Format) -> bool:
    """Return whether elements depend on more of the master than themselves and their group's amax."""
    return fmt.is_identity or fmt.hadamard


def _reduced_magnitudes(
    parts: list[Fragment], group: dist.ProcessGroup | None
) -> dict[tuple[int, str], Tensor]:
    """Return the amax of each scale group and whether it has a NaN, ``[2, G]``, by weight and face."""
    found: dict[tuple[int, str], Tensor] = {}
    for index, part in enumerate(parts):
        for direction in part.directions():
            if not _needs_values(part.format(direction)):
                groups = _grouped(
                    _seen(part.matrix(), direction), part.format(direction).block, 0.0
                )
                # As casts measure: an Inf counts, a NaN does not, and is sent beside, to mark its
                # block.
                finite = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1)
                found[index, direction] = torch.stack([finite, groups.isnan().any(1).float()])
    if found:
        whole = torch.cat([one.flatten() for one in found.values()])
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)
        for key, one in zip(found, whole.split([f.numel() for f in found.values()]), strict=True):
            found[key] = one.view(2, -1)
    return found


def _take_common_scales(parts: list[Fragment], magnitudes: dict[tuple[int, str], Tensor]) -> None:
    """Set common scales from the amaxes of their weights; raise RuntimeError if some of these are missing."""
    for scale, members in by_scale(list(enumerate(parts)), lambda one: one[1].weight):
        known = [
            magnitudes[i, d][0]
            for i, part in members
            for d in (ROW, COLUMN)
            if (i, d) in magnitudes
        ]
        scale.set_amaxes([groups.max() for groups in known])


def _seen(matrix: Tensor, direction: str) -> Tensor:
    """Return the matrix as a face stores it: itself, or its transpose."""
    return matrix if direction == ROW else matrix.t()


def _stand_in(part: Fragment, direction: str, reduced: Tensor) -> Tensor:
    """Return a matrix ``[N, K]`` with this rank's fragment and the amaxes of the whole; see the module's docstring."""
    fmt, shape = part.format(direction), part.weight.shape
    seen = (shape[0], shape[1]) if direction == ROW else (shape[1], shape[0])
    values = _grouped(_seen(part.matrix(), direction), fmt.block, 0.0)
    free = _grouped(_seen(~part.own(), direction), fmt.block, False)
    amax, has_nan = reduced
    # Where another rank has a larger value than this one
    larger = amax > values.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1)
    # At two places, since a NaN does not count in an amax.
    for number, wanted in ((amax, larger), (amax * float("nan"), has_nan > 0)):
        # The first place that is another rank's. argmax takes no bool.
        first = free.to(torch.uint8).argmax(1, keepdim=True)
        possible = free.any(1) & wanted
        values.scatter_(
            1, first, torch.where(possible[:, None], number[:, None], values.gather(1, first))
        )
        free.scatter_(1, first, free.gather(1, first) & ~possible[:, None])
    return _seen(_ungrouped(values, fmt.block, seen), direction).contiguous()


# -- faces


def _quantized(part: Fragment, direction: str, magnitudes: Tensor | None) -> Face | Tensor:
    """Return a face that is right within the fragment; or the master with zeros elsewhere, where values are
    exchanged."""
    if magnitudes is None:
        return (
            part.matrix().to(part.weight.dtype)
            if part.format(direction).is_identity
            else part.matrix()
        )
    return _face(part, direction, _stand_in(part, direction, magnitudes))


def _face(part: Fragment, direction: str, matrix: Tensor) -> Face:
    face = one_face(part.quantizer, matrix, direction, part.weight.dtype, part.context)
    if face.scale is None or face.dequantized_rowwise is not None:
        raise TypeError(
            f"quantize_master_weights: {part.quantizer} made no {direction} face of its own; its "
            "weights cannot be quantized from fragments"
        )
    return face


def _exchange(
    parts: list[Fragment],
    made: dict[tuple[int, str], Face | Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Complete every face, or what it needs, with the elements of other ranks."""
    mine = {key: _only_own(parts[key[0]], key[1], face) for key, face in made.items()}
    sent = torch.cat([one.view(torch.uint8).flatten() for one in mine.values()])
    # Where one rank has an element the others have zero bits
    dist.all_reduce(sent, dist.ReduceOp.SUM, group=group)
    sizes = [one.view(torch.uint8).numel() for one in mine.values()]
    for (key, one), whole in zip(mine.items(), sent.split(sizes), strict=True):
        elements, face = whole.clone().view(one.dtype).view(one.shape), made[key]
        made[key] = (
            face._replace(qdata=elements.view(face.qdata.dtype))
            if isinstance(face, Face)
            else elements
        )


def _only_own(part: Fragment, direction: str, face: Face | Tensor) -> Tensor:
    """Return the elements of a face, or high-precision values, with zero bits outside the fragment."""
    if isinstance(face, Tensor):
        return face.contiguous()
    own = _seen(part.own(), direction)
    codes = face.qdata.view(torch.uint8)
    if face.format.elements_per_byte == 1:
        return torch.where(own, codes, 0).contiguous()
    return pack(torch.where(own, unpack(codes), 0).to(torch.uint8)).contiguous()


def _write(part: Fragment, row: Face | Tensor | None, column: Face | Tensor | None) -> None:
    """Write the weight's faces, quantizing those whose values were exchanged, and requantizing from the rowwise
    data."""
    weight, quantizer = part.weight, part.quantizer
    whole_row, whole_column = _whole(part, ROW, row), _whole(part, COLUMN, column)
    if column is None and weight.columnwise is not None and isinstance(quantizer, HybridQuantizer):
        if whole_row is None:
            raise ValueError(
                "quantize_master_weights: the columnwise face is made of the rowwise one, which "
                "was not made"
            )
        whole_column = quantizer.derive_columnwise(whole_row, weight.dtype, part.context)
    faces = None if weight.rowwise is None else whole_row, whole_column
    overwrite_("quantize_master_weights", weight, faces)
    weight.high_precision.release_original()  # the masters are the caller's
    weight.high_precision.mark_copied(weight.dequantize, weight.taken)


def _whole(part: Fragment, direction: str, face: Face | Tensor | None) -> Face | None:
    """Return a face, quantizing it now if whole values were exchanged."""
    if not isinstance(face, Tensor):
        return face
    if part.format(direction).is_identity:
        kept = high_precision(face)
        return kept if direction == ROW else columnwise_of(kept, face.dtype)
    return _face(part, direction, face)

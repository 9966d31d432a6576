"""Quantize weights whose fp32 masters are scattered over ranks, as a distributed optimizer (ZeRO-1)
keeps them.

Every rank holds a fragment of each flattened master: any range, also none, also one that cuts
blocks. No rank sees a whole master. Two collectives serve all weights: a MAX of the magnitudes of
all scale groups, and a SUM of bytes in which each rank fills in the elements of its fragment.

In between each rank quantizes a stand-in for the whole matrix: its fragment, and in every scale
group that reaches beyond it one number in a place that is not its own, the group's largest
magnitude. So all scales come out as those of the whole, and the fragment's elements with them, in
every format and by the one way there is to quantize.

Shape letters: ``N, K`` a weight; ``G`` scale groups of ``E`` elements; ``W`` weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridtensor.formats import Format
from hybridtensor.ops import Face, columnwise_of, high_precision
from hybridtensor.ops.references.blocks import Block
from hybridtensor.ops.references.nvfp4 import pack, unpack
from hybridtensor.quantizers import HybridQuantizer, Quantizer
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor
from hybridtensor.subclasses.quantizing import overwrite_

_ROW, _COLUMN = "rowwise", "columnwise"


class _Part(NamedTuple):
    """This rank's fragment of one master.

    Attributes:
        weight: What is quantized.
        values: fp32, flat; empty if there is none.
        offset: Where it begins in the flattened master.
    """

    weight: HybridTensor
    values: Tensor
    offset: int

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the weight."""
        return self.weight.recipe.weight

    @property
    def context(self) -> Context:
        """What is quantized, with the layer's state."""
        return Context("weight", self.weight.state)

    def matrix(self) -> Tensor:
        """Return the master ``[N, K]`` with zeros where it is not here."""
        whole = self.values.new_zeros(self.weight.numel())
        whole[self.offset : self.offset + self.values.numel()] = self.values
        return whole.view(self.weight.shape)

    def own(self) -> Tensor:
        """Return where the fragment is, bool ``[N, K]``."""
        whole = torch.zeros(self.weight.numel(), dtype=torch.bool, device=self.values.device)
        whole[self.offset : self.offset + self.values.numel()] = True
        return whole.view(self.weight.shape)

    def directions(self) -> list[str]:
        """Return the faces that are quantized from the master: others come from the rowwise one."""
        made = [_ROW] if self.weight.rowwise is not None or self._of_rowwise() else []
        return made if self.weight.columnwise is None or self._of_rowwise() else [*made, _COLUMN]

    def _of_rowwise(self) -> bool:
        quantizer = self.quantizer
        of_rowwise = (
            isinstance(quantizer, HybridQuantizer)
            and quantizer.columnwise_source == "rowwise_dequantized"
        )
        return of_rowwise and self.weight.columnwise is not None

    def format(self, direction: str) -> Format:
        """Return the format of a face."""
        return getattr(self.quantizer, f"{direction}_format")  # type: ignore[no-any-return]


@torch.no_grad()
def quantize_master_weights(
    weights: Sequence[HybridTensor],
    master_shards: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Quantize weights, in place, on all ranks alike, from masters that are scattered over them.

    Every face of every weight equals, bit for bit, that of the whole master. NaN and Inf count as
    in any cast. Faces in high precision, and those after a Hadamard rotation, need the values of
    other ranks: there values are exchanged.

    Args:
        weights: Persistent parameters, the same on every rank.
        master_shards: This rank's fragment of each flattened master, fp32; empty or None if it has
            none.
        offsets: Where each begins in the flattened master; None goes with None.
        group: Whose ranks hold the fragments; None is all ranks.

    Raises:
        TypeError: If a weight is not a persistent parameter, or a fragment not fp32.
        ValueError: If a fragment is on another device than its weight, or the lengths of the
            arguments differ.
        RuntimeError: If ranks disagree on weights or recipes, or the fragments are not the whole,
            each element once; or if another rank found an error.

    Source: TransformerEngine's ``quantize_master_weights``, which has FP8 per tensor and per block.
    """
    parts, error = _parts(weights, master_shards, offsets)
    _agree(parts, error, group)
    _check_cover(parts, group)
    if not parts:
        return
    magnitudes = _reduced_magnitudes(parts, group)
    made = {
        (i, d): _quantized(part, d, magnitudes.get((i, d)))
        for i, part in enumerate(parts)
        for d in part.directions()
    }
    _exchange(parts, made, group)
    for i, part in enumerate(parts):
        _write(part, made.get((i, _ROW)), made.get((i, _COLUMN)))


# -- checks
# ----------------------------------------------------------------------------------------------------------


def _parts(
    weights: Sequence[HybridTensor], shards: Sequence[Tensor | None], offsets: Sequence[int | None]
) -> tuple[list[_Part], Exception | None]:
    """Return what this rank has, or what is wrong with it."""
    who = "quantize_master_weights"
    if not len(weights) == len(shards) == len(offsets):
        counts = f"{len(weights)}, {len(shards)} and {len(offsets)}"
        return [], ValueError(
            f"{who}: as many weights as fragments and offsets are required, got {counts}"
        )
    parts = []
    for index, (weight, shard, offset) in enumerate(zip(weights, shards, offsets, strict=True)):
        if not isinstance(weight, HybridTensor) or weight.config is None or weight.dim() != 2:
            return [], TypeError(
                f"{who}: persistent weights are required, got {weight!r} at {index}; see quantize_"
            )
        values = (
            torch.zeros(0, device=weight.device) if shard is None else shard.detach().reshape(-1)
        )
        if values.dtype != torch.float32:
            return [], TypeError(
                f"{who}: fp32 masters are required, got {values.dtype} at {index}; cast them"
            )
        if values.device != weight.device:
            where = f"{values.device} for a weight on {weight.device} at {index}"
            return [], ValueError(
                f"{who}: masters on their weights' devices are required, got {where}; move them"
            )
        if (offset is None and values.numel()) or (offset or 0) < 0:
            return [], ValueError(
                f"{who}: an offset of at least 0 is required, got {offset} at {index}"
            )
        if (offset or 0) + values.numel() > weight.numel():
            what = f"{values.numel()} from {offset} on, of {weight.numel()} at {index}"
            return [], ValueError(
                f"{who}: a fragment inside its weight is required, got elements {what}"
            )
        parts.append(_Part(weight, values, offset or 0))
    return parts, None


def _agree(parts: list[_Part], error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one has an error, or other weights."""
    what = "\n".join(
        f"{tuple(p.weight.shape)} {p.directions()} {p.weight.recipe.fingerprint()}" for p in parts
    )
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little")
    device = _device(group)
    extremes = torch.tensor([number, -number, error is not None], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest, failed = extremes.tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            "quantize_master_weights: another rank found an error in its fragments; see its message"
        )
    if largest != -smallest:
        raise RuntimeError(
            "quantize_master_weights: the same weights with the same recipes are required on all ranks, got others on "
            f"rank {dist.get_rank(group)}; pass them in the same order everywhere"
        )


def _check_cover(parts: list[_Part], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless the fragments are the whole of every weight, each element once."""
    ranges = torch.tensor(
        [[p.offset, p.offset + p.values.numel()] for p in parts], device=_device(group)
    )
    everywhere = [torch.empty_like(ranges) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, ranges, group=group)
    for index, part in enumerate(parts):
        held = sorted(tuple(of_rank[index].tolist()) for of_rank in everywhere)
        position = 0
        for begin, end in (h for h in held if h[0] < h[1]):
            if begin != position:
                break
            position = end
        else:
            if position == part.weight.numel():
                continue
        raise RuntimeError(
            f"quantize_master_weights: fragments that are the whole of weight {index} are required, each element once, "
            f"got {held} of {part.weight.numel()} elements"
        )


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else torch.device("cpu")
    )


# -- scale groups
# ----------------------------------------------------------------------------------------------------


def _grouped(matrix: Tensor, block: Block, fill: float | bool) -> Tensor:
    """Return the elements of each scale group, ``[G, E]``, those beyond the edge as ``fill``."""
    sizes = [extent if b is None else b for extent, b in zip(matrix.shape, block, strict=True)]
    pads = [-extent % size for extent, size in zip(matrix.shape, sizes, strict=True)]
    padded = F.pad(matrix, (0, pads[1], 0, pads[0]), value=fill)
    tiles: Tensor = padded.unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0])).transpose(1, 2)
    return tiles.flatten(2).flatten(0, 1)


def _ungrouped(groups: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """Undo ``_grouped``."""
    sizes = [extent if b is None else b for extent, b in zip(shape, block, strict=True)]
    counts = [-(-extent // size) for extent, size in zip(shape, sizes, strict=True)]
    padded = (
        groups.view(*counts, *sizes)
        .transpose(1, 2)
        .reshape(counts[0] * sizes[0], counts[1] * sizes[1])
    )
    return padded[: shape[0], : shape[1]]


def _needs_values(fmt: Format) -> bool:
    """Whether elements depend on more of the master than themselves and their group's magnitude."""
    return fmt.is_identity or fmt.hadamard


def _reduced_magnitudes(
    parts: list[_Part], group: dist.ProcessGroup | None
) -> dict[tuple[int, str], Tensor]:
    """Return, by weight and face, the largest magnitude of each scale group and whether it has a
    NaN, ``[2, G]``.
    """
    found: dict[tuple[int, str], Tensor] = {}
    for index, part in enumerate(parts):
        for direction in part.directions():
            if not _needs_values(part.format(direction)):
                groups = _grouped(
                    _seen(part.matrix(), direction), part.format(direction).block, 0.0
                )
                finite = groups.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(1)
                found[index, direction] = torch.stack([finite, groups.isnan().any(1).float()])
    if found:
        whole = torch.cat([one.flatten() for one in found.values()])
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=group)
        for key, one in zip(found, whole.split([f.numel() for f in found.values()]), strict=True):
            found[key] = one.view(2, -1)
    return found


def _seen(matrix: Tensor, direction: str) -> Tensor:
    """Return the matrix as a face sees it."""
    return matrix if direction == _ROW else matrix.t()


def _stand_in(part: _Part, direction: str, reduced: Tensor) -> Tensor:
    """Return a matrix ``[N, K]`` with this rank's fragment and the scales of the whole; see the
    module's docstring.
    """
    fmt, shape = part.format(direction), part.weight.shape
    seen = (shape[0], shape[1]) if direction == _ROW else (shape[1], shape[0])
    values = _grouped(_seen(part.matrix(), direction), fmt.block, 0.0)
    free = _grouped(_seen(~part.own(), direction), fmt.block, False)
    amax, has_nan = reduced
    larger = amax > values.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(
        1
    )  # than all that this rank has
    for number, wanted in ((amax, larger), (amax * float("nan"), has_nan > 0)):
        first = free.to(torch.uint8).argmax(1, keepdim=True)
        possible = free.any(1) & wanted
        values.scatter_(
            1, first, torch.where(possible[:, None], number[:, None], values.gather(1, first))
        )
        free.scatter_(1, first, free.gather(1, first) & ~possible[:, None])
    return _seen(_ungrouped(values, fmt.block, seen), direction).contiguous()


# -- faces
# -----------------------------------------------------------------------------------------------------------


def _quantized(part: _Part, direction: str, magnitudes: Tensor | None) -> Face | Tensor:
    """Return a face whose scales are those of the whole and whose elements are right where the
    fragment is.

    Values ``[N, K]`` with zeros elsewhere, where those have to be exchanged.
    """
    if magnitudes is None:
        return (
            part.matrix().to(part.weight.dtype)
            if part.format(direction).is_identity
            else part.matrix()
        )
    return _face(part, direction, _stand_in(part, direction, magnitudes))


def _face(part: _Part, direction: str, matrix: Tensor) -> Face:
    """Return a face of a matrix, as the quantizer makes it."""
    made = part.quantizer.faces(
        matrix,
        rowwise=direction == _ROW,
        columnwise=direction == _COLUMN,
        dtype=part.weight.dtype,
        context=part.context,
    )
    face = made[0 if direction == _ROW else 1]
    if face is None or face.scale is None or face.dequantized_rowwise is not None:
        raise TypeError(
            f"quantize_master_weights: {part.quantizer} made no {direction} face of its own"
        )
    return face


def _exchange(
    parts: list[_Part], made: dict[tuple[int, str], Face | Tensor], group: dist.ProcessGroup | None
) -> None:
    """Complete every face, or what it needs, with the elements of other ranks."""
    mine = {key: _only_own(parts[key[0]], key[1], face) for key, face in made.items()}
    sent = torch.cat([one.view(torch.uint8).flatten() for one in mine.values()])
    dist.all_reduce(
        sent, dist.ReduceOp.SUM, group=group
    )  # where one rank has an element the others have zero bits
    sizes = [one.view(torch.uint8).numel() for one in mine.values()]
    for (key, one), whole in zip(mine.items(), sent.split(sizes), strict=True):
        elements, face = whole.clone().view(one.dtype).view(one.shape), made[key]
        made[key] = (
            face._replace(qdata=elements.view(face.qdata.dtype))
            if isinstance(face, Face)
            else elements
        )


def _only_own(part: _Part, direction: str, face: Face | Tensor) -> Tensor:
    """Return the elements of a face, or values, with zero bits outside the fragment."""
    if isinstance(face, Tensor):
        return face.contiguous()
    own = _seen(part.own(), direction)
    codes = face.qdata.view(torch.uint8)
    if face.format.elements_per_byte == 1:
        return torch.where(own, codes, 0).contiguous()
    return pack(torch.where(own, unpack(codes), 0).to(torch.uint8)).contiguous()


def _write(part: _Part, row: Face | Tensor | None, column: Face | Tensor | None) -> None:
    """Overwrite the weight's faces; make those first that values were exchanged for, and those of
    the rowwise one.
    """
    weight, quantizer = part.weight, part.quantizer
    whole_row, whole_column = _whole(part, _ROW, row), _whole(part, _COLUMN, column)
    if column is None and weight.columnwise is not None and isinstance(quantizer, HybridQuantizer):
        if whole_row is None:
            raise ValueError(
                "quantize_master_weights: a rowwise face is required to make the columnwise one from"
            )
        made = quantizer.of_rowwise(
            whole_row, weight.dtype, part.context._replace(direction=_COLUMN)
        )
    else:
        made = whole_column
    overwrite_(
        "quantize_master_weights", weight, (None if weight.rowwise is None else whole_row, made)
    )
    weight.high_precision.let_go()  # the masters are the caller's
    weight.high_precision.note_copied(weight.dequantize, weight.taken)


def _whole(part: _Part, direction: str, face: Face | Tensor | None) -> Face | None:
    """Return a face; one that whole values were exchanged for is made now."""
    if not isinstance(face, Tensor):
        return face
    if part.format(direction).is_identity:
        kept = high_precision(face)
        return kept if direction == _ROW else columnwise_of(kept, face.dtype)
    return _face(part, direction, face)

"""This rank's fragments of fp32 masters, and what all ranks check of theirs before they quantize.

Shape letters: ``N, K`` a weight; ``W`` weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridtensor.arguments import require_items, require_tensor, shown
from hybridtensor.formats import Format
from hybridtensor.quantizers import Quantizer
from hybridtensor.recipes.config import weight_values
from hybridtensor.state import Context
from hybridtensor.subclasses import HybridTensor

ROW, COLUMN = "rowwise", "columnwise"
_WHO = "quantize_master_weights"


class Fragment(NamedTuple):
    """This rank's fragment of one fp32 master: flat elements from ``offset`` on."""

    weight: HybridTensor
    values: Tensor
    offset: int

    @property
    def quantizer(self) -> Quantizer:
        return self.weight.recipe.weight

    @property
    def context(self) -> Context:
        return self.weight.context

    def matrix(self) -> Tensor:
        """Return the master ``[N, K]`` with zeros outside the fragment."""
        whole = self.values.new_zeros(self.weight.numel())
        whole[self.offset : self.offset + self.values.numel()] = self.values
        return whole.view(self.weight.shape)

    def own(self) -> Tensor:
        """Return a bool mask ``[N, K]`` of the fragment."""
        whole = torch.zeros(self.weight.numel(), dtype=torch.bool, device=self.values.device)
        whole[self.offset : self.offset + self.values.numel()] = True
        return whole.view(self.weight.shape)

    def directions(self) -> list[str]:
        """Return the faces quantized from the master; the others are requantized from the rowwise data."""
        made = [ROW] if self.weight.rowwise is not None or self._of_rowwise() else []
        return made if self.weight.columnwise is None or self._of_rowwise() else [*made, COLUMN]

    def _of_rowwise(self) -> bool:
        return self.quantizer.derives_columnwise and self.weight.columnwise is not None

    def format(self, direction: str) -> Format:
        quantizer = self.quantizer
        return quantizer.rowwise_format if direction == ROW else quantizer.columnwise_format


def fragments(
    weights: Sequence[HybridTensor], shards: Sequence[Tensor | None], offsets: Sequence[int | None]
) -> tuple[list[Fragment], Exception | None]:
    """Return this rank's fragments, or the error to raise together with all ranks."""
    try:
        return _checked(weights, shards, offsets), None
    except (TypeError, ValueError) as error:
        return [], error


def _checked(weights: object, shards: object, offsets: object) -> list[Fragment]:
    given = {"weights": weights, "fragments": shards, "offsets": offsets}
    lists = [require_items(_WHO, f"a list of {what}", items) for what, items in given.items()]
    counts = [len(items) for items in lists]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{_WHO}: as many weights as fragments and offsets are required, got {counts[0]}, "
            f"{counts[1]} and {counts[2]}"
        )
    return [_fragment(index, *items) for index, items in enumerate(zip(*lists, strict=True))]


def _fragment(index: int, weight: object, shard: Tensor | None, offset: object) -> Fragment:
    if not isinstance(weight, HybridTensor) or weight.config is None or weight.dim() != 2:
        raise TypeError(
            f"{_WHO}: persistent weights are required, got {shown(weight)} at {index}; see quantize_"
        )
    if shard is None:
        shard = torch.zeros(0, device=weight.device)
    require_tensor(f"{_WHO}: fragment {index}", shard)
    values: Tensor = shard.detach().reshape(-1)
    if values.dtype != torch.float32:
        raise TypeError(
            f"{_WHO}: fp32 masters are required, got {values.dtype} at {index}; cast them"
        )
    if values.device != weight.device:
        where = f"{values.device} for a weight on {weight.device} at {index}"
        raise ValueError(
            f"{_WHO}: masters on their weights' devices are required, got {where}; move them"
        )
    begin = offset if isinstance(offset, int) else -1 if values.numel() or offset is not None else 0
    if begin < 0:
        raise ValueError(
            f"{_WHO}: an offset of at least 0 is required, got {shown(offset)} at {index}"
        )
    if begin + values.numel() > weight.numel():
        what = f"{values.numel()} from {begin} on, of {weight.numel()} at {index}"
        raise ValueError(f"{_WHO}: a fragment inside its weight is required, got elements {what}")
    return Fragment(weight, weight_values(weight.config, values).float(), begin)


def agree(parts: list[Fragment], error: Exception | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank if one has an error, or other weights."""
    what = "\n".join(
        f"{tuple(p.weight.shape)} {p.directions()} {p.weight.recipe.fingerprint()}" for p in parts
    )
    # Seven bytes, so that the negative fits into int64, too. One MAX gives the largest number, and the smallest as
    # the largest negative; the error of any rank comes along.
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "little")
    device = _device(group)
    extremes = torch.tensor([number, -number, error is not None], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest, failed = extremes.tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(f"{_WHO}: another rank found an error in its fragments; see its message")
    if largest != -smallest:
        raise RuntimeError(
            f"{_WHO}: rank {dist.get_rank(group)} and another one differ in weights or recipes; "
            "pass the same weights in the same order everywhere"
        )


def check_cover(parts: list[Fragment], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless the fragments are the whole of every weight, each element once."""
    ranges = torch.tensor(
        [[p.offset, p.offset + p.values.numel()] for p in parts], device=_device(group)
    )
    everywhere = [torch.empty_like(ranges) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everywhere, ranges, group=group)
    for index, part in enumerate(parts):
        held = sorted(tuple(of_rank[index].tolist()) for of_rank in everywhere)
        position = 0
        # Empty ranges, of ranks that hold nothing of a weight, may lie anywhere.
        for begin, end in (h for h in held if h[0] < h[1]):
            if begin != position:
                break
            position = end
        else:
            if position == part.weight.numel():
                continue
        raise RuntimeError(
            f"{_WHO}: the fragments of all ranks are not the whole of weight {index}, each element "
            f"once: they are {held} of {part.weight.numel()} elements; pass ranges that meet"
        )


def _device(group: dist.ProcessGroup | None) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else torch.device("cpu")
    )

"""Which ranks have the same part of a tensor, and whether it is the same on them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from hybridtensor.dtensor import local
from hybridtensor.printed import some

Replica: TypeAlias = tuple[tuple[object, ...], str]
"""Which part of a tensor a rank has, and the digest of its values."""


def different(ranks: Iterable[int], replicas: Iterable[Mapping[str, Replica]]) -> str:
    """Say of which tensors ranks have other values of one part; ``replicas`` are each rank's by name."""
    known: dict[tuple[str, tuple[object, ...]], dict[str, list[int]]] = {}
    for rank, of_rank in zip(ranks, replicas, strict=True):
        for name, (part, digest) in of_rank.items():
            known.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    wrong = [
        f"{name} ({' and '.join(ranks_in_words(holders) for holders in digests.values())} differ)"
        for (name, _), digests in known.items()
        if len(digests) > 1
    ]
    return some(wrong)


def replica(value: Tensor) -> Iterable[Replica]:
    """Yield the offset and digest of the local part of a tensor; nothing on a rank without one."""
    if not isinstance(value, DTensor):
        yield (), _digest(value)
        return
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is not None:
        pairs = zip(value.placements, coordinate, strict=True)
        # Ranks that are alike in all dimensions but replicated ones hold one part.
        part = tuple(None if isinstance(p, Replicate) else (str(p), at) for p, at in pairs)
        yield part, _digest(local(value))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    # torch gives its memory to Python only through numpy, which need not be there
    data: ctypes.Array[ctypes.c_char] | bytes = b""
    if len(flat):
        data = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
    return hashlib.sha256(data).hexdigest()


def ranks_in_words(ranks: list[int]) -> str:
    """List ranks for an error: ``rank 1``, or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

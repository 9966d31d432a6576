"""Whole tensors from the parts that ranks hold, in buckets: memory is bounded by a bucket, and what
travels is what is handed over.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

c10d = torch.ops._c10d_functional
_ALIGNMENT = 16  # bytes: any dtype begins there


class Whole(NamedTuple):
    """A tensor that ranks hold parts of.

    Attributes:
        shape: Of the whole.
        strides: Of the whole.
        dtype: Of both.
        part: What this rank holds.
        start: Where that begins in the whole.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    part: Tensor
    start: tuple[int, ...]


class Source(NamedTuple):
    """Tensors that travel together.

    Attributes:
        tensors: Parts of a face, or of values.
        mesh: Over which they are spread.
        dims: Dimensions of the mesh along which ranks hold different parts.
    """

    tensors: list[Whole]
    mesh: DeviceMesh
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.tensors)


class _Told(NamedTuple):
    """What a rank tells of the parts that it sends of a source: shapes, and where they begin."""

    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]

    def nbytes(self, source: Source) -> int:
        """Return the bytes that they take, each from a multiple of 16 on."""
        return sum(
            _aligned(math.prod(shape) * one.dtype.itemsize)
            for shape, one in zip(self.shapes, source.tensors, strict=True)
        )


def sharded_dims(tensor: DTensor) -> tuple[int, ...]:
    """Return the dimensions of its mesh along which ranks hold different parts."""
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(
        dim
        for dim, placement in enumerate(placements)
        if not isinstance(placement, Replicate) and mesh.size(dim) > 1
    )


def gathered(sources: Sequence[Source], first_only: bool) -> list[list[Tensor]]:
    """Return the whole tensors of each source; of some that are for the first rank only, on others
    none.

    Every rank calls it with its parts of the same sources.

    Args:
        sources: What is gathered.
        first_only: Whether only the first rank gets them.
    """
    made: list[list[Tensor]] = [[] for _ in sources]
    keys = dict.fromkeys((source.mesh, source.dims) for source in sources)
    for mesh, dims in keys:
        chosen = [
            i for i, source in enumerate(sources) if (source.mesh, source.dims) == (mesh, dims)
        ]
        if first_only and not _is_copy_of_first(mesh, dims):
            continue
        some = _gathered_together([sources[i] for i in chosen], first_only)
        for i, tensors in zip(chosen, some, strict=True):
            made[i] = tensors
    return made


def _is_copy_of_first(mesh: DeviceMesh, dims: tuple[int, ...]) -> bool:
    """Return whether this rank is needed for what the first rank of the mesh gets: others hold copies."""
    return all(mesh.get_local_rank(dim) == 0 for dim in range(mesh.ndim) if dim not in dims)


def _gathered_together(sources: list[Source], first_only: bool) -> list[list[Tensor]]:
    """Return the whole tensors of sources of one mesh, which travel in one message."""
    mesh, dims = sources[0].mesh, sources[0].dims
    mine = [
        _Told(
            tuple(tuple(one.part.shape) for one in source.tensors),
            tuple(one.start for one in source.tensors),
        )
        for source in sources
    ]
    told = _exchanged(mine, mesh, dims)
    sizes = [max(of_rank[i].nbytes(source) for of_rank in told) for i, source in enumerate(sources)]
    begins = [0, *itertools.accumulate(sizes)]
    sent = torch.empty(begins[-1], dtype=torch.uint8, device=sources[0].tensors[0].part.device)
    for source, own, begin in zip(sources, mine, begins, strict=False):
        for one, part in zip(source.tensors, _parts(sent, source, own, begin), strict=True):
            part.copy_(_bytewise(one.part))
    received = _received(sent, mesh, dims, first_only)
    if received is None:
        return [[] for _ in sources]
    return [
        _placed(source, received, [of_rank[i] for of_rank in told], begins[i])
        for i, source in enumerate(sources)
    ]


def _exchanged(mine: list[_Told], mesh: DeviceMesh, dims: tuple[int, ...]) -> list[list[_Told]]:
    """Return what every rank tells, in the order of ``_received``."""
    known = [mine]
    for dim in dims:
        group = mesh.get_group(dim)
        answers: list[list[list[_Told]] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, known, group=group)
        known = [one for answer in answers if answer is not None for one in answer]
    return known


def _received(
    sent: Tensor, mesh: DeviceMesh, dims: tuple[int, ...], first_only: bool
) -> Tensor | None:
    """Return what every rank sent, ``[ranks, bytes]``; None where only the first one gets it."""
    known = sent[None]
    for dim in dims:
        group = mesh.get_group(dim)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        if not first_only:
            known = c10d.wait_tensor(c10d.all_gather_into_tensor(known, size, group.group_name))
            continue
        out = known.new_empty(size if rank == 0 else 0, *known.shape)
        dist.gather(known, list(out) if rank == 0 else None, group=group, group_dst=0)
        if rank:
            return None
        known = out.flatten(0, 1)
    return known


def _placed(source: Source, received: Tensor, told: list[_Told], begin: int) -> list[Tensor]:
    """Return the whole tensors of a source, with the parts of every rank."""
    made = [
        torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=received.device)
        for one in source.tensors
    ]
    for of_rank, tells in zip(received, told, strict=True):
        for whole, part, start in zip(
            made, _parts(of_rank, source, tells, begin), tells.starts, strict=True
        ):
            for dim, (first, extent) in enumerate(zip(start, part.shape, strict=True)):
                whole = whole.narrow(dim, first, extent)
            _bytewise(whole).copy_(part)
    return made


def _parts(sent: Tensor, source: Source, tells: _Told, begin: int) -> Iterator[Tensor]:
    """Yield the parts that a rank sends of a source as views of its bytes."""
    for one, shape in zip(source.tensors, tells.shapes, strict=True):
        nbytes = math.prod(shape) * one.dtype.itemsize
        yield _bytewise(sent[begin : begin + nbytes].view(one.dtype).view(shape))
        begin += _aligned(nbytes)


def _bytewise(tensor: Tensor) -> Tensor:
    """Return a view as bytes where elements are bytes: not every dtype of one byte can be copied."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

"""Checks that ranks agree on the arguments of a call, the tensors of a state, and their values."""

from __future__ import annotations

import ctypes
import datetime
import hashlib
from collections.abc import Iterable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Replicate

from hybridtensor.distributed.checkpoint.entries import Entries
from hybridtensor.distributed.checkpoint.plain import StateDict, plain
from hybridtensor.distributed.checkpoint.ranks import TIMEOUT, Ranks
from hybridtensor.dtensor import local

Replica: TypeAlias = tuple[tuple[object, ...], str]
"""Which part of a tensor a rank has, and the digest of its values."""

_SHOWN = 5


def check_arguments(ranks: Ranks, /, **given: object) -> None:
    """Raise ValueError on all ranks, with who passed what, unless all passed the same."""
    every = ranks.gather(lambda: given)
    wrong = [
        f"{name}={other[name]!r} on rank {rank}, {every[0][name]!r} on rank 0"
        for rank, other in enumerate(every)
        for name in given
        if other[name] != every[0][name]
    ]
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks passed different arguments: {_some(wrong)}; pass the same on each"
        )


def check_plans(ranks: Ranks, plans: list[SavePlan]) -> None:
    """Raise ValueError unless all ranks that save an entry plan the same shape and dtype."""
    known: dict[str, dict[str, list[int]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            kind = "no tensor"
            if data is not None:
                kind = f"{tuple(data.size)} of {data.properties.dtype}"
            holders = known.setdefault(item.index.fqn, {}).setdefault(kind, [])
            if rank not in holders[-1:]:
                holders.append(rank)
    wrong = [
        f"{name} is {', '.join(f'{kind} on {_ranks(holders)}' for kind, holders in kinds.items())}"
        for name, kinds in known.items()
        if len(kinds) > 1
    ]
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks have tensors of different shapes or dtypes: {_some(wrong)}; build model and "
            "optimizer alike everywhere"
        )


def check_replicas(
    state: StateDict,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: datetime.timedelta = TIMEOUT,
) -> None:
    """Raise if ranks that should have the same values of a tensor have others.

    ::

        checkpoint.check_replicas({"model": model, "optimizer": optimizer})

    That is every tensor that is no shard, and every part that a DTensor replicates. Compared are
    digests of all bytes: the time is that of reading them once on the host.

    Args:
        state: As for ``save``. Only tensors are compared.
        group: Process group, which is then used to talk, with its own timeout; None is all ranks.
        timeout: How long to wait for the slowest rank.

    Raises:
        TypeError: If ``state`` is of the wrong kind.
        ValueError: If values differ, with names and ranks; on every rank.
        RuntimeError: If a rank is gone; on every rank.
    """
    ranks = Ranks("checkpoint.check_replicas", group, timeout)
    collected = ranks.each(lambda: flatten_state_dict(plain(Entries(state).collect(faces=True)))[0])
    compare_replicas(ranks, collected)


def compare_replicas(ranks: Ranks, collected: StateDict) -> None:
    """Raise ValueError if ranks hold different bytes for a replicated tensor; ``collected`` maps names to plain
    tensors."""
    tensors = {name: value for name, value in collected.items() if isinstance(value, Tensor)}
    replicas = ranks.gather(
        lambda: {name: found for name, value in tensors.items() for found in _replica(value)}
    )
    known: dict[tuple[str, tuple[object, ...]], dict[str, list[int]]] = {}
    for rank, of_rank in enumerate(replicas):
        for name, (part, digest) in of_rank.items():
            known.setdefault((name, part), {}).setdefault(digest, []).append(rank)
    wrong = [
        f"{name} ({' and '.join(_ranks(holders) for holders in digests.values())} differ)"
        for (name, _), digests in known.items()
        if len(digests) > 1
    ]
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks have different values of what they replicate: {_some(wrong)}; load the last "
            "intact step on all ranks"
        )


def _replica(value: Tensor) -> Iterable[Replica]:
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


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more

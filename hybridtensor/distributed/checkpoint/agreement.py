"""Checks that ranks agree on the arguments of a call, the tensors of a state, and their values."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import SavePlan

from hybridtensor.distributed.checkpoint.entries import Entries
from hybridtensor.distributed.checkpoint.plain import StateDict, plain
from hybridtensor.distributed.checkpoint.replicas import different, ranks_in_words, replica
from hybridtensor.printed import some
from hybridtensor.ranks import TIMEOUT, Ranks


def check_arguments(ranks: Ranks, /, **given: object) -> None:
    """Raise ValueError on all ranks, with who passed what, unless all passed the same."""
    every = ranks.gather(lambda: given)
    wrong = [
        f"{name}={other[name]!r} on rank {rank}, {every[0][name]!r} on rank {ranks.members[0]}"
        for rank, other in zip(ranks.members, every, strict=True)
        for name in given
        if other[name] != every[0][name]
    ]
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks passed different arguments: {some(wrong)}; pass the same on each"
        )


def check_plans(ranks: Ranks, plans: list[SavePlan]) -> None:
    """Raise ValueError unless all ranks that save an entry plan the same shape and dtype."""
    known: dict[str, dict[str, list[int]]] = {}
    for rank, plan in zip(ranks.members, plans, strict=True):
        for item in plan.items:
            data = item.tensor_data
            kind = "no tensor"
            if data is not None:
                kind = f"{tuple(data.size)} of {data.properties.dtype}"
            holders = known.setdefault(item.index.fqn, {}).setdefault(kind, [])
            if rank not in holders[-1:]:
                holders.append(rank)
    wrong = [
        f"{name} is {', '.join(f'{kind} on {ranks_in_words(holders)}' for kind, holders in kinds.items())}"
        for name, kinds in known.items()
        if len(kinds) > 1
    ]
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks have tensors of different shapes or dtypes: {some(wrong)}; build model and "
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
        lambda: {name: found for name, value in tensors.items() for found in replica(value)}
    )
    wrong = different(ranks.members, replicas)
    if wrong:
        raise ValueError(
            f"{ranks.who}: ranks have different values of what they replicate: {wrong}; load the last "
            "intact step on all ranks"
        )

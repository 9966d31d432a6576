"""Names that differ only in numbers, as one: ``layers.*.q_proj x32``."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

Said = TypeVar("Said", bound=Hashable)


class Fold(NamedTuple, Generic[Said]):
    """Names that differ only in numbers, with equal records: their common pattern and the members."""

    called: str
    members: list[str]
    said: Said


def fold(names: Iterable[tuple[str, Said]], among: Iterable[str]) -> list[Fold[Said]]:
    """Fold names that differ only in whole numbers between dots and have equal records: ``layers.[1-30].up x30``."""
    kinds: dict[str, list[str]] = {}
    for name in among:
        kinds.setdefault(_kind(name), []).append(name)
    groups: dict[tuple[str, Said], list[str]] = {}
    for name, said in names:
        groups.setdefault((_kind(name), said), []).append(name)
    return [
        Fold(_called(members, kinds.get(kind, members)), members, said)
        for (kind, said), members in groups.items()
    ]


def in_short(names: Iterable[str], among: Iterable[str]) -> str:
    """List some of all names, folded: ``layers.*.up x32, head``."""
    return ", ".join(one.called for one in fold(((name, "") for name in names), among))


def _kind(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _called(members: Sequence[str], kind: Sequence[str]) -> str:
    if len(members) == 1:
        return members[0]
    parts = []
    of_members, of_kind = (
        zip(*(n.split(".") for n in names), strict=True) for names in (members, kind)
    )
    for values, all_values in zip(of_members, of_kind, strict=True):
        if len(set(values)) == 1:
            parts.append(values[0])
        else:
            parts.append("*" if set(values) == set(all_values) else f"[{_ranges(values)}]")
    return f"{'.'.join(parts)} x{len(members)}"


def _ranges(values: Iterable[str]) -> str:
    """Format numbers in short: ``0-3,7``."""
    numbers = sorted({int(value) for value in values})
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = ([number for _, number in run] for _, run in runs)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)

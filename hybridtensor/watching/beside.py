"""Two recordings on one page: the same layers in rows, both figures and their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridtensor.printed import some
from hybridtensor.watching.expected import TWICE
from hybridtensor.watching.markup import decibel, decibels, escape, section, table, table_row
from hybridtensor.watching.recording import Recording

_MOST_FINDINGS = 12
_ERRORS = 3  # standard errors

_Key = tuple[str, str]
"""Layer, and operand or product."""


class _Figures(NamedTuple):
    """SQNR of a face or product in the compared steps, dB, and its last formats."""

    numbers: tuple[float, ...]
    formats: str

    @property
    def mean(self) -> float:
        """Mean in dB; NaN if one is not finite, infinite without noise."""
        return sum(self.numbers) / len(self.numbers)  # fmean raises for two infinities


class _Pair(NamedTuple):
    """Both figures of a face or product; None if only one recording has it."""

    layer: str
    name: str
    anchor: str
    first: _Figures | None
    second: _Figures | None

    @property
    def difference(self) -> float | None:
        """SQNR of the first less that of the second, dB; NaN if one is not finite."""
        if self.first is None or self.second is None:
            return None
        a, b = self.first.mean, self.second.mean
        return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else a - b


class Compared(NamedTuple):
    """Two recordings: pairs of their rows, and the scatter in dB of differences that mean nothing."""

    names: tuple[str, str]
    steps: tuple[int, int]
    common: bool
    pairs: tuple[_Pair, ...]
    scatter: float

    def threshold(self, pair: _Pair) -> float:
        """Return the difference in dB that counts as worse."""
        if math.isnan(self.scatter) or pair.first is None or pair.second is None:
            return TWICE
        counts = len(pair.first.numbers), len(pair.second.numbers)
        error = self.scatter * math.sqrt(sum(1 / count for count in counts))
        return max(TWICE, _ERRORS * error)


def compare(first: Recording, second: Recording, names: tuple[str, str]) -> Compared:
    """Compare two recordings in the steps that both have, or else in all."""
    steps = [{sample.step for sample in one.samples} for one in (first, second)]
    common = steps[0] & steps[1]
    taken = [common or own for own in steps]
    figures = [_figures(one, only) for one, only in zip((first, second), taken, strict=True)]
    keys = dict.fromkeys((*figures[0], *figures[1]))
    pairs = tuple(
        _Pair(*key, f"pair-{i}", figures[0].get(key), figures[1].get(key))
        for i, key in enumerate(keys)
    )
    counts = len(taken[0]), len(taken[1])
    return Compared(names, counts, bool(common), pairs, _scatter(figures))


def _figures(recording: Recording, steps: set[int]) -> dict[_Key, _Figures]:
    """Return the SQNR of each face and product in some steps, by layer."""
    found: dict[_Key, list[tuple[float, str]]] = {}
    for sample in recording.samples:
        if sample.step in steps:
            for one in (*sample.faces, *sample.products):
                of_place = found.setdefault((one.layer, one.name), [])
                of_place.append((one.statistics["sqnr"], one.told_formats))
    return {
        key: _Figures(tuple(number for number, _ in of), of[-1][1]) for key, of in found.items()
    }


def _scatter(figures: Sequence[Mapping[_Key, _Figures]]) -> float:
    """Pool the deviation of each figure from its mean over the steps, dB; NaN without two steps."""
    # Over all figures: one has as many values as there were sampled steps, too few for a deviation
    # of its own.
    squares, freedom = 0.0, 0
    for of in figures:
        for one in of.values():
            if len(one.numbers) > 1 and all(map(math.isfinite, one.numbers)):
                squares += sum((x - one.mean) * (x - one.mean) for x in one.numbers)
                freedom += len(one.numbers) - 1
    return math.sqrt(squares / freedom) if freedom else math.nan


def beside(first: Recording, second: Recording, names: tuple[str, str]) -> str:
    """Render two recordings side by side: findings first, then all faces and products."""
    found = compare(first, second, names)
    text = _findings(found) + _only(first, second, names) + _recipes(first, second, names)
    text += _losses(first, second, names) + f"<p class=quiet>{escape(_thresholds(found))}</p>"
    return section(f"Side by side: {names[0]} and {names[1]}", text + _table(found))


def _findings(found: Compared) -> str:
    """Render what got worse or better, the largest difference first."""
    out = sorted(
        (
            (-math.inf if math.isnan(d) else -abs(d), pair, d)
            for pair in found.pairs
            if (d := pair.difference) is not None
            and (math.isnan(d) or abs(d) > found.threshold(pair))
        ),
        key=lambda one: one[0],
    )
    if not out:
        return f"<p>{escape(_nothing(found))}</p>"
    items = "".join(
        f"<li><a href='#{pair.anchor}'>{escape(f'{pair.layer} {pair.name}')}</a>: "
        f"{escape(_sentence(found, pair, d))}</li>"
        for _, pair, d in out[:_MOST_FINDINGS]
    )
    more = len(out) - _MOST_FINDINGS
    return f"<ul>{items}</ul>" + (
        f"<p>And {more} more, which the table has.</p>" if more > 0 else ""
    )


def _sentence(found: Compared, pair: _Pair, difference: float) -> str:
    if pair.first is None or pair.second is None:
        return ""
    a, b = (decibels(one.mean) for one in (pair.first, pair.second))
    if math.isnan(difference):
        bad = found.names[0 if math.isnan(pair.first.mean) else 1]
        return f"not finite in {bad}; {a} in {found.names[0]}, {b} in {found.names[1]}."
    word = "better" if difference > 0 else "worse"
    by = f"{abs(difference):.1f} dB " if math.isfinite(difference) else ""
    formats = (
        ""
        if pair.first.formats == pair.second.formats
        else f" Formats: {pair.first.formats}, and {pair.second.formats}."
    )
    return (
        f"{by}{word} in {found.names[0]} ({a}) than in {found.names[1]} ({b}); threshold "
        f"{found.threshold(pair):.1f} dB.{formats}"
    )


def _nothing(found: Compared) -> str:
    """Format that no difference stands out, and the largest one."""
    known = [
        (abs(pair.difference), pair)
        for pair in found.pairs
        if pair.difference is not None and math.isfinite(pair.difference)
    ]
    if not known:
        return "No layer has figures in both recordings."
    largest, pair = max(known, key=lambda one: one[0])
    return (
        f"Nothing got worse or better: the largest difference is {largest:.1f} dB, of {pair.layer} {pair.name}, "
        f"where {found.threshold(pair):.1f} dB would count."
    )


def _thresholds(found: Compared) -> str:
    """Format what is compared, and where the thresholds come from."""
    a, b = found.steps
    steps = (
        f"the {a} sampled steps that both have"
        if found.common
        else f"all sampled steps, {a} and {b}, as none has the same number"
    )
    text = (
        f"Compared is the mean SQNR over {steps}. A difference counts from {TWICE:.1f} dB on, where one has twice the "
        "noise of the other"
    )
    if math.isnan(found.scatter):
        return f"{text}. How much figures scatter between steps is not known: each has been measured once."
    return (
        f"{text}, and from {_ERRORS} standard errors on: in these recordings a figure scatters by "
        f"{found.scatter:.2f} dB from step to step."
    )


def _only(first: Recording, second: Recording, names: tuple[str, str]) -> str:
    text = ""
    for own, other, name in ((first, second, names[0]), (second, first, names[1])):
        layers = [layer for layer in _layers(own) if layer not in _layers(other)]
        if layers:
            text += f"<p>Only in {escape(name)}: {escape(some(layers, 8, ', '))}</p>"
    return text


def _layers(recording: Recording) -> dict[str, None]:
    """Return the layers of a recording that have a recipe or were measured."""
    measured = (
        row.layer for sample in recording.samples for row in (*sample.faces, *sample.products)
    )
    return dict.fromkeys((*recording.recipes, *measured))


def _recipes(first: Recording, second: Recording, names: tuple[str, str]) -> str:
    """Format the layers whose recipes differ, by recipe."""
    changed: dict[tuple[str, str], list[str]] = {}
    for layer, recipe in first.recipes.items():
        other = second.recipes.get(layer, recipe)
        if other != recipe:
            changed.setdefault((recipe, other), []).append(layer)
    return "".join(
        f"<p>Recipe <code>{escape(a)}</code> in {escape(names[0])}, <code>{escape(b)}</code> in {escape(names[1])}: "
        f"{escape(some(layers, 8, ', '))}</p>"
        for (a, b), layers in changed.items()
    )


def _losses(first: Recording, second: Recording, names: tuple[str, str]) -> str:
    a, b = dict(first.losses), dict(second.losses)
    common = a.keys() & b.keys()
    if not common:
        return ""
    step = max(common)
    return (
        f"<p>Loss in step {step}: {a[step]:.6g} in {escape(names[0])}, {b[step]:.6g} in {escape(names[1])}, "
        f"difference {a[step] - b[step]:+.3g}</p>"
    )


def _table(found: Compared) -> str:
    first, second = found.names
    names = (
        ("layer", ""),
        ("face or product", ""),
        (f"format in {first}", ""),
        (f"format in {second}", "where it differs"),
        (f"sqnr in {first}", "mean over the compared steps, dB"),
        (f"sqnr in {second}", "mean over the compared steps, dB"),
        ("difference", "of the first to the second, dB"),
    )
    return table(names, (_row(pair) for pair in found.pairs))


def _row(pair: _Pair) -> str:
    formats = [one.formats if one is not None else "" for one in (pair.first, pair.second)]
    if formats[0] == formats[1]:
        formats[1] = ""
    numbers = [
        "not measured" if one is None else decibel(one.mean) for one in (pair.first, pair.second)
    ]
    d = pair.difference
    text = "" if d is None or math.isnan(d) else f"{d:+.1f}"
    return table_row((pair.layer, pair.name, *formats), (*numbers, text), pair.anchor)

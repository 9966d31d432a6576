"""A page of what was watched: one file of HTML that needs no network."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hybridtensor.arguments import require_file, wrong
from hybridtensor.explanation.folding import in_short
from hybridtensor.watching.beside import beside as side_by_side
from hybridtensor.watching.findings import findings, standing_out
from hybridtensor.watching.judging import Judged, judged, nearest
from hybridtensor.watching.markup import decibel, decibels, escape, section, table, table_row
from hybridtensor.watching.recording import Recording
from hybridtensor.watching.records import Sample, badness
from hybridtensor.watching.statistics import NAMES, PRODUCT_NAMES
from hybridtensor.watching.sums import GEMMS, OPERANDS
from hybridtensor.watching.watch import watch

_MOST_COLUMNS = 60  # sampled steps that are shown, the first and the last among them
_ROWS = 12  # of a table
_DIGITS = 4
_PRODUCTS = tuple(GEMMS)
_FACES = tuple(f"{role}.{direction}" for role, direction in OPERANDS)
_SCALES = {  # of each number that is shown: kind, where it is good, where it is bad, on a logarithmic axis
    "cosine": ("products", 1e-6, 1e-1, True),  # of 1 - cosine
    "sqnr of products": ("products", 60.0, 5.0, False),
    "sqnr": ("faces", 60.0, 5.0, False),
    "row_sqnr": ("faces", 60.0, 5.0, False),
    "underflows%": ("faces", 0.0, 40.0, False),
    "overflows%": ("faces", 0.0, 5.0, False),
    "wasted_blocks%": ("faces", 0.0, 50.0, False),
}


def report(
    watched: watch | Recording | str | Path,
    path: str | Path,
    *,
    beside: watch | Recording | str | Path | None = None,
) -> Path:
    """Write a page of HTML of what was watched: what stands out in words, heatmaps of layers and
    products over time, the worst layers, the loss, the recipe and the machine.

    ::

        with ht.watch(model, every=100) as watched:
            train(model)
        ht.report(watched, "report.html")

    Args:
        watched: Result of ``watch``, its recording, or a file of ``Recording.save``.
        path: Path of the page; a missing folder is made.
        beside: Another one of these to compare with, side by side on the same page. Its layers and formats may differ.

    Returns:
        The path.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If nothing was measured, a file is no recording, the page would be written over it, or ``path``
            is no file's.
    """
    path = require_file("report", path)
    for source in (watched, beside):
        if isinstance(source, (str, Path)) and os.path.realpath(source) == os.path.realpath(path):
            raise ValueError(
                f"report: a path of the page alone is required, got {path}, a recording that it is of; name another"
            )
    recording = _recording(watched)
    runs, compared = {"": recording}, ""
    if beside is not None:
        other, names = _recording(beside), _names(watched, beside)
        runs = dict(zip(names, (recording, other), strict=True))
        compared = side_by_side(recording, other, names)
    parts = {**_parts(recording), "beside": compared, "data": _data(runs)}
    page = files("hybridtensor.watching").joinpath("report.html").read_text(encoding="utf-8")
    # in one go: what a recording says may look like a place of the page
    page = re.sub(r"<!--(\w+)-->", lambda place: parts[place[1]], page)
    path.parent.mkdir(parents=True, exist_ok=True)
    # halves of surrogate pairs, of names of files for one, have no bytes
    path.write_bytes(page.encode("utf-8", "backslashreplace"))
    return path


def _recording(watched: object) -> Recording:
    """Return a recording, or load it; raise ValueError if no step was measured."""
    if isinstance(watched, (str, Path)):
        recording = Recording.load(watched)
    elif isinstance(watched, watch):
        recording = watched.recording()
    elif isinstance(watched, Recording):
        recording = watched
    else:
        raise wrong("report", "what watch returned, a Recording or its file", watched)
    if not recording.samples:
        where = f" in {watched}" if isinstance(watched, (str, Path)) else ""
        raise ValueError(
            f"report: no step was measured{where}; watch an optimizer's step, or call watched.step(), and report after "
            "the with block, or after a second step"
        )
    if not recording.losses and not any(sample.products for sample in recording.samples):
        raise ValueError(
            f"report: no product was measured in {len(recording.samples)} steps, as without gradients; watch steps "
            "that run forward and backward of the model"
        )
    return recording


def _names(first: object, second: object) -> tuple[str, str]:
    """Return names of two recordings, from their files where these differ."""
    paths = [Path(one) if isinstance(one, (str, Path)) else None for one in (first, second)]
    for of in (lambda path: path.name, str):
        a, b = (
            given if path is None else of(path)
            for path, given in zip(paths, ("this one", "the other"), strict=True)
        )
        if a != b:
            return a, b
    return "this one", "the other"


def _parts(recording: Recording) -> dict[str, str]:
    """Render the page's placeholders."""
    last = recording.samples[-1]
    found = judged(recording)
    return {
        "findings": findings(recording, found),
        "tiles": _tiles(recording, last),
        "alarms": _alarms(recording),
        "loss": _loss(recording),
        "worst": _worst(found),
        "experts": _experts(recording.samples),
        "recipe": _recipe(recording),
        "words": _words(),
    }


def _data(runs: dict[str, Recording]) -> str:
    """Render the heatmaps' numbers as JSON for the page's script, also of ``beside``."""
    scales = {
        name: {"good": good, "bad": bad, "log": log}
        for name, (_, good, bad, log) in _SCALES.items()
    }
    first, *others = ({"name": name, **_heat(run)} for name, run in runs.items())
    content = {**first, "scales": scales, "beside": others}
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def _heat(recording: Recording) -> dict[str, object]:
    """Return heatmap numbers by metric, layer, product or face, and step."""
    samples = _thinned(recording.samples)
    layers = list(recording.recipes)
    values: dict[str, dict[str, list[list[float | None]]]] = {}
    for metric, (kind, *_) in _SCALES.items():
        name = metric.removesuffix(" of products")
        found = [_by_place(sample, kind, name) for sample in samples]
        values[metric] = {
            column: [[_rounded(one.get((layer, column))) for one in found] for layer in layers]
            for column in (_PRODUCTS if kind == "products" else _FACES)
        }
    return {"steps": [sample.step for sample in samples], "layers": layers, "values": values}


def _by_place(sample: Sample, kind: str, name: str) -> dict[tuple[str, str], float]:
    """Return one statistic of a sample by layer and product or face."""
    return {
        (row.layer, row.name): row.statistics[name]
        for row in getattr(sample, kind)
        if name in row.statistics  # earlier versions recorded fewer
    }


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Return at most as many samples as a page shows, evenly spaced."""
    if len(samples) <= _MOST_COLUMNS:
        return list(samples)
    last = len(samples) - 1
    return [samples[round(i * last / (_MOST_COLUMNS - 1))] for i in range(_MOST_COLUMNS)]


def _rounded(value: float | None) -> float | None:
    """Round a number for JSON; infinity becomes 1e308, NaN and minus infinity -1e308."""
    if value is None:
        return None
    if not math.isfinite(value):
        return 1e308 if value > 0 else -1e308
    return float(f"{value:.{_DIGITS + 3}g}") if 0.9 < value < 1 else float(f"{value:.{_DIGITS}g}")


def _tiles(recording: Recording, last: Sample) -> str:
    worst_face = min(last.faces, key=lambda row: badness(row.statistics["sqnr"]), default=None)
    worst_product = min(
        last.products, key=lambda row: badness(row.statistics["cosine"]), default=None
    )
    tiles = [
        (
            "sampled steps",
            f"{len(recording.samples)}",
            f"one of {recording.every}, up to step {last.step}",
        ),
        ("layers", f"{len(recording.recipes)}", "quantized"),
    ]
    if worst_product is not None:
        where = f"{worst_product.where} {worst_product.product}"
        tiles.append(("smallest cosine", _number(worst_product.statistics["cosine"], ".5f"), where))
    if worst_face is not None:
        where = f"{worst_face.where} {worst_face.operand}"
        tiles.append(("most noise", decibels(worst_face.statistics["sqnr"]), where))
    if recording.losses:
        tiles.append(("loss", f"{recording.losses[-1][1]:.4g}", f"step {recording.losses[-1][0]}"))
    cells = (
        f"<div class=tile><span>{escape(name)}</span><b>{escape(number)}</b><small title='{escape(where)}'>"
        f"{escape(where)}</small></div>"
        for name, number, where in tiles
    )
    return "".join(cells)


def _alarms(recording: Recording) -> str:
    """Render a sentence on non-finite faces and unmeasured layers."""
    bad = [
        f"step {sample.step}: {row.where} {row.operand}"
        for sample in recording.samples
        for row in sample.faces
        if row.statistics["nonfinite"]
    ]
    shown = []
    if bad:
        shown.append(
            f"<p class=alarm>Not finite: {escape('; '.join(bad[:5]))}{' ...' if len(bad) > 5 else ''}</p>"
        )
    unseen = recording.samples[-1].unseen
    if unseen:
        names = "; ".join(f"{layer} ({why})" for layer, why in unseen[:8])
        shown.append(f"<p>Not measured: {escape(names)}{' ...' if len(unseen) > 8 else ''}</p>")
    return "".join(shown)


def _loss(recording: Recording) -> str:
    points = [(step, loss) for step, loss in recording.losses if math.isfinite(loss)]
    if len(points) < 2 <= len(recording.losses):
        return "<p class=quiet>Of the losses that were noted, fewer than two are finite.</p>"
    if len(points) < 2:
        return "<p class=quiet>No losses were noted: call watched.note(loss) in the loop.</p>"
    width, height, left, bottom = 1000, 180, 60, 24
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    low, high = min(losses), max(losses)
    across = (max(steps) - min(steps)) or 1
    half = (high / 2 - low / 2) or 0.5  # the whole distance may be more than a float holds

    def at(step: float, loss: float) -> tuple[float, float]:
        x = left + (step - min(steps)) / across * (width - left - 10)
        return x, 10 + (high / 2 - loss / 2) / half * (height - bottom - 10)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    marks = []
    for i in range(4):
        value = low + half * (i / 3) + half * (i / 3)
        _, y = at(min(steps), value)
        marks.append(f"<line class=grid x1={left} x2={width - 10} y1={y:.1f} y2={y:.1f} />")
        marks.append(f"<text x={left - 8} y={y + 4:.1f} text-anchor=end>{value:.4g}</text>")
        step = min(steps) + across * i / 3
        x, _ = at(step, low)
        marks.append(f"<text x={x:.1f} y={height - 4} text-anchor=middle>{step:.0f}</text>")
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='Loss over steps'>{''.join(marks)}"
        f"<polyline class=line points='{line}' /></svg>"
    )


_COMPARED = {  # columns of a table, of what is judged
    "expected": "SQNR of the same format without outliers, dB; see the findings",
    "threshold": "what is below stands out, dB",
    "worst step": "the smallest SQNR of all sampled steps, dB",
    "in step": "which step that was",
}


_JUDGED = ("cosine", "sqnr", "row_sqnr")


def _worst(found: Sequence[Judged]) -> str:
    """Render the noisiest faces and products, as last measured: all that stand out, and some more."""
    faces = [one for one in found if one.is_face]
    products = [one for one in found if not one.is_face]
    shown = [
        section(f"The noisiest {name}", _table(of, names))
        for name, of, names in (("faces", faces, NAMES), ("products", products, PRODUCT_NAMES))
        if of
    ]
    return "".join(shown)


def _table(found: Sequence[Judged], names: dict[str, str]) -> str:
    """Render findings as a table, noisiest first; ``names`` are the columns."""
    ordered = sorted(found, key=lambda one: badness(one.sqnr))
    linked = {one.anchor for one in standing_out(found)} | {one.anchor for one in ordered[:_ROWS]}
    linked |= {one.anchor for one in sorted(found, key=nearest)[:1]}
    # what it is judged by comes first: the rest may be beyond the edge of a screen
    order = [*(name for name in _JUDGED if name in names), *_COMPARED]
    order += [name for name in names if name not in order]
    rows = []
    for one in ordered:
        if one.anchor not in linked:
            continue
        own = {name: _number(one.row.statistics.get(name)) for name in names}
        ratios = one.expected, one.threshold, one.worst.statistics["sqnr"]
        compared = *map(decibel, ratios), str(one.worst.step)
        words = one.row.where, one.row.name, one.row.told_formats
        judged_by = dict(zip(_COMPARED, compared, strict=True))
        numbers = own | judged_by
        rows.append(table_row(words, (numbers[name] for name in order), one.anchor))
    columns = names | _COMPARED
    head = [
        ("layer", ""),
        (found[0].kind, ""),
        ("format", ""),
        *((name, columns[name]) for name in order),
    ]
    return table(head, rows)


def _number(value: float | None, spec: str = ".4g") -> str:
    if value is None:
        return "not recorded"
    return "not a number" if math.isnan(value) else format(value, spec)


def _experts(samples: Sequence[Sample]) -> str:
    """Render the worst experts by stack and product, at their last measurement."""
    last: dict[tuple[str, str], dict[int, tuple[float, int]]] = {}
    for sample in samples:
        for one in sample.products:
            for expert, cosine in one.experts:
                last.setdefault((one.layer, one.product), {})[expert] = cosine, sample.step
    if not last:
        return ""
    found = []
    for (layer, product), numbers in last.items():
        worst = min(numbers, key=lambda expert: badness(numbers[expert][0]))
        found.append((*numbers[worst], layer, product, worst, len(numbers)))
    found.sort(key=lambda one: badness(one[0]))
    rows = (
        table_row((layer, product), (f"{expert}", f"{cosine:.6f}", f"{step}", f"{count}"))
        for cosine, step, layer, product, expert, count in found[:_ROWS]
    )
    names = ("experts", "product", "worst expert", "its cosine", "in step", "experts measured")
    return section("The worst experts", table(((name, "") for name in names), rows))


def _recipe(recording: Recording) -> str:
    found = []
    by_recipe = itertools.groupby(
        sorted(recording.recipes.items(), key=lambda one: one[1]), key=lambda one: one[1]
    )
    for spec, layers in by_recipe:
        names = in_short((name for name, _ in layers), recording.recipes)
        found.append(f"<dt><code>{escape(spec)}</code></dt><dd>{escape(names)}</dd>")
    machine = ", ".join(f"{name} {value}" for name, value in recording.machine.items())
    return f"<dl>{''.join(found)}</dl><p class=quiet>{escape(machine)}</p>"


def _words() -> str:
    every = {f"{name} of faces": text for name, text in NAMES.items()}
    every |= {f"{name} of products": text for name, text in PRODUCT_NAMES.items()}
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in every.items())
    return f"<dl>{''.join(rows)}</dl>"

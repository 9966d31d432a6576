"""HTML fragments that escape everything from a recording."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable


def escape(value: str) -> str:
    """Escape text, because a recording may be untrusted."""
    return html.escape(value, quote=True)


def table_row(words: Iterable[str], numbers: Iterable[str], anchor: str = "") -> str:
    """Render a table row of text and number cells; ``anchor`` is never from a recording."""
    cells = [f"<td>{escape(word)}</td>" for word in words]
    cells += [f"<td class=number>{escape(number)}</td>" for number in numbers]
    return f"<tr{f' id={anchor}' if anchor else ''}>{''.join(cells)}</tr>"


def table(names: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    """Render a table of rendered rows; ``names`` are columns with tooltips."""
    head = "".join(f"<th title='{escape(title)}'>{escape(name)}</th>" for name, title in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def section(title: str, body: str) -> str:
    """Render a section that scrolls sideways."""
    return f"<section class=scroll><h2>{escape(title)}</h2>{body}</section>"


def decibel(value: float | None) -> str:
    """Format a ratio in dB; ``""`` if unknown."""
    if value is None:
        return ""
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "no noise" if value > 0 else "no signal"
    return f"{value:.1f}"


def decibels(value: float) -> str:
    """Format a ratio in dB, with the unit."""
    return f"{decibel(value)} dB" if math.isfinite(value) else decibel(value)

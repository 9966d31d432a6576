"""Pieces of a page of HTML, in which nothing of a recording is markup."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable


def escape(value: str) -> str:
    """Escape text: a recording may be someone else's."""
    return html.escape(value, quote=True)


def table_row(words: Iterable[str], numbers: Iterable[str], anchor: str = "") -> str:
    """Render a row of a table, of cells of text and of numbers.

    Args:
        words: Cells of text, not escaped yet.
        numbers: Cells of numbers, the same.
        anchor: What links to the row name, made by this package and never of a recording's strings.
    """
    cells = [f"<td>{escape(word)}</td>" for word in words]
    cells += [f"<td class=number>{escape(number)}</td>" for number in numbers]
    return f"<tr{f' id={anchor}' if anchor else ''}>{''.join(cells)}</tr>"


def table(names: Iterable[tuple[str, str]], rows: Iterable[str]) -> str:
    """Render a table of rows that are rendered.

    Args:
        names: Of the columns, and what each is.
        rows: As ``row`` renders them.
    """
    head = "".join(f"<th title='{escape(told)}'>{escape(name)}</th>" for name, told in names)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def section(title: str, body: str) -> str:
    """Render a section that scrolls sideways."""
    return f"<section class=scroll><h2>{escape(title)}</h2>{body}</section>"


def decibel(value: float | None) -> str:
    """Write a ratio in dB for people; ``""`` if it is not known."""
    if value is None:
        return ""
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "no noise" if value > 0 else "no signal"
    return f"{value:.1f}"

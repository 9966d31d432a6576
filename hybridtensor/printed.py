"""What is printed: tables, lists within sentences, and the line that a warning names."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_WIDTH = 110  # characters, where no terminal says another number
_CONTROLS = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)  # all but ends of lines; no text has surrogates
_OWN = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
)  # code that is not the caller's


def visible(words: str) -> str:
    """Escape control characters, so that foreign text cannot send commands to a terminal."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], words)


def some(texts: Sequence[str], most: int = 5, between: str = "; ") -> str:
    """Join the first texts, and count those beyond ``most``."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def as_text(words: str, style: str = "") -> Text:
    """Return printable text that ``rich`` does not parse as markup."""
    from rich.text import Text

    return Text(visible(words), style=style)


def named_table(
    *headers: str, title: str = "", caption: str = "", right: int = 0, edge: bool = True
) -> Table:
    """Return an empty table that wraps cells and never cuts them: names that are cut look alike.

    Args:
        headers: Of the columns.
        title: Above the table.
        caption: Below it.
        right: How many columns, the last ones, are of numbers.
        edge: Whether there is space around the table.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=edge, pad_edge=edge)
    table.title = as_text(title, "table.title") if title else None
    table.caption = as_text(caption, "table.caption") if caption else None
    for i, header in enumerate(headers):
        justify: Literal["left", "right"] = "right" if i >= len(headers) - right else "left"
        table.add_column(header, overflow="fold", justify=justify)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of text without markup."""
    table.add_row(*map(as_text, cells))


class Printed:
    """Results that ``print``, a prompt and notebooks show as tables; ``rich`` is imported only then."""

    def __rich__(self) -> RenderableType:
        raise NotImplementedError(f"{type(self).__name__}: __rich__ is missing; define it")

    def __str__(self) -> str:
        """Return the tables as text, as wide as the terminal."""
        console = self._printed_to(shutil.get_terminal_size((_WIDTH, 40)).columns)
        return console.export_text().strip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Render for notebooks: as on a screen, without scripts or anything from elsewhere."""
        body = self._printed_to(_WIDTH).export_html(inline_styles=True, code_format="{code}")
        return (
            f'<pre style="font-family: monospace; line-height: 1.2; white-space: pre">{body}</pre>'
        )

    def _printed_to(self, width: int) -> Console:
        from rich.console import Console

        console = Console(record=True, file=io.StringIO(), width=width)
        console.print(self)
        return console


def level_of_caller() -> int:
    """Return the ``stacklevel`` of a warning that points to the code outside of this library and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        level, frame = level + 1, frame.f_back
    return level

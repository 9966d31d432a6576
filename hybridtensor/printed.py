"""What is printed as tables."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WIDTH = 110  # characters, where no terminal says another number


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

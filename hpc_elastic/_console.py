"""The console of the commands: it shows what Rich renders, and nothing else reaches the terminal.

Texts of a run are written by all who may write to its directory, and by its nodes: names, events,
errors. A control character in them could clear the screen, set the window's title, or show lines
that this program has not written. `CleanConsole` removes them from all that Rich renders, and
`_util.CleanedStream` from what is printed without it. Colours stay.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from hpc_elastic._util import cleaned_lines, terminal_of

_FILE_WIDTH = 160


class CleanConsole(Console):
    """A console that removes control characters from all texts that it renders; its own stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render a part, or the whole."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text == "\n" or text.isprintable():
                yield segment
            else:
                yield Segment(cleaned_lines(text, colours=False), segment.style)


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup; the lines of a file or pipe are long."""
    file = terminal_of(sys.stderr if stderr else sys.stdout)
    made = CleanConsole(file=file, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _FILE_WIDTH
    return made


def plain_table() -> Table:
    """Return a table with one line, below its head."""
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))

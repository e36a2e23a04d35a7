"""What a person sees of the runs: a live table on a terminal, lines on change elsewhere.

Everything here writes to one rich console, and no run ends because that can not be written to
(`Unfailing`). Nothing decides anything: `row_of` puts into words what status.json and the scheduler
say, and the displays show it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit.backend import TrackedRun
from hpc_elastic.submit.outcome import Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLUMNS = ("run", "overrides", "tasks", "state", "nodes", "step", "loss", "restarts")
_WRAPPED = ("run", "overrides", "tasks", "result")
"""Columns that take several lines where the terminal is narrow; the others are kept whole."""
_REASON_WIDTH = len("(Resources),")
_LOG_WIDTH = 160
"""Columns of the tables in a log file, where rich would assume 80."""
_CHROME_LINES = 6
"""Lines of the table that are no runs, and of the prompt around it."""


@dataclass(frozen=True)
class Row:
    """One run in the table; texts, empty where nothing is known."""

    run: str
    overrides: str
    tasks: str = ""
    state: str = "waiting"
    nodes: str = ""
    step: str = ""
    loss: str = ""
    restarts: str = ""
    ended: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the texts in the order of the columns."""
        return tuple(str(getattr(self, name)) for name in _COLUMNS)


class Display(Protocol):
    """Shows progress for as long as it is entered."""

    def __enter__(self) -> Display:
        """Begin to show."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Leave what was shown last on the screen."""
        ...

    def show(self, rows: Sequence[Row]) -> None:
        """Show the runs as they are now."""
        ...

    def say(self, text: str) -> None:
        """Print a message that stays."""
        ...


def row_of(
    run: TrackedRun,
    status: Mapping[str, Any] | None,
    states: Sequence[TaskState] | None,
    outcome: Outcome | None,
    before: Row | None,
) -> Row:
    """Return the row of a run (pure).

    Args:
        run: The run.
        status: Its status.json; None if there is none yet.
        states: Its tasks as listed by the scheduler; None if that did not answer.
        outcome: How it ended; None if it goes on.
        before: Its row at the last look, for what is not known anew.
    """
    row = before or Row(run.name, run.label)
    if states is not None:
        row = replace(row, tasks=_tasks(states))
    if status is not None:
        row = replace(
            row,
            state=str(status.get("phase") or row.state),
            nodes=_text(status.get("nodes")),
            step=_text(status.get("step")),
            loss=_text(status.get("loss")),
            restarts=_restarts(status),
        )
    if outcome is not None:
        row = replace(row, state=outcome.status, nodes="", ended=True)
    return row


def _tasks(states: Iterable[TaskState]) -> str:
    """Return how many tasks are in which state, and what the pending ones wait for."""
    counts = Counter(state.state for state in states)
    reasons = Counter(s.reason for s in states if s.state == "PENDING" and s.reason)
    why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
    parts = [f"{n} {name}{why if name == 'PENDING' else ''}" for name, n in sorted(counts.items())]
    return ", ".join(parts)


def _restarts(status: Mapping[str, Any]) -> str:
    spent, allowed = status.get("restarts"), status.get("max_restarts")
    return _text(spent) if allowed is None else f"{spent or 0}/{allowed}"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Unfailing:
    """A text stream on which writing does not fail: on a full disk the text is lost instead.

    So is what is written to a terminal that was closed. Only a reader who has gone away
    (`BrokenPipeError`) still ends the program: ``| head`` means that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write if that is possible; return how many characters were taken."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Pass on what was written if that is possible."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass


def console_for(stream: TextIO | None) -> Console:
    """Return the console of all that is shown while runs go on, and of how they ended.

    Args:
        stream: Where that is written; None: the program has no such output, nothing is.
    """
    from rich.console import Console

    console = Console(file=None if stream is None else cast(TextIO, Unfailing(stream)))
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    return console


def choose_display(console: Console) -> Display:
    """Return a live table for a terminal, plain lines for anything else."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


class PlainDisplay:
    """One line when something of a run has changed, at most every few seconds for its step."""

    def __init__(self, console: Console, every_s: float = 10.0) -> None:
        self._console = console
        self._every_s = every_s
        self._shown: dict[str, tuple[Row, float]] = {}

    def __enter__(self) -> Display:
        """Begin to show."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: lines stay."""

    def show(self, rows: Sequence[Row]) -> None:
        """Print the rows that have changed."""
        now = time.monotonic()
        for row in rows:
            before, at = self._shown.get(row.run, (None, now))
            if worth_a_line(row, before, since_s=now - at, every_s=self._every_s):
                self._shown[row.run] = (row, now)
                self.say(line_of(row))

    def say(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def worth_a_line(row: Row, before: Row | None, *, since_s: float, every_s: float) -> bool:
    """Say whether a row is printed: at once if it changed, steps and losses now and then (pure)."""
    if before is None or row == before:
        return before is None
    calm = replace(row, step=before.step, loss=before.loss)
    return calm != before or since_s >= every_s


def line_of(row: Row) -> str:
    """Return a row as one line (pure)."""
    named = [f"{name} {getattr(row, name)}" for name in _COLUMNS[4:] if getattr(row, name)]
    head = f"[{row.run}] {row.overrides}".rstrip()
    return ": ".join([head, ", ".join(filter(None, [row.state, row.tasks, *named]))])


class LiveDisplay:
    """A table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Display:
        """Begin to show."""
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the last table on the screen."""
        self._live.stop()

    def show(self, rows: Sequence[Row]) -> None:
        """Redraw the table."""
        self._live.update(_table(rows, self._console.height - _CHROME_LINES), refresh=True)

    def say(self, text: str) -> None:
        """Print a message above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def fitting(rows: Sequence[Row], num_lines: int) -> list[Row]:
    """Return the rows to show where not all fit: those that go on first (pure)."""
    if len(rows) <= num_lines:
        return list(rows)
    return sorted(rows, key=lambda row: row.ended)[: max(1, num_lines)]


def _table(rows: Sequence[Row], num_lines: int) -> Table:
    from rich.markup import escape

    shown = fitting(rows, num_lines)
    hidden = len(rows) - len(shown)
    table = _empty_table(_COLUMNS)
    table.caption = f"and {hidden} more" if hidden else None
    for row in shown:
        table.add_row(*(escape(cell) for cell in row.cells))
    return table


def _empty_table(columns: Sequence[str]) -> Table:
    """Return a table without borders: on 80 columns they would take a third of the width."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        width = _REASON_WIDTH if name == "tasks" else None
        table.add_column(name, no_wrap=name not in _WRAPPED, overflow="fold", min_width=width)
    return table


def places(dirs: Sequence[Path], sweep: Path, cwd: Path) -> str:
    """Return the line that says in which folder the runs lie, below a table or alone (pure).

    A path does not fold well in a column, and the table's first column names the rest of it.
    """
    alone = len(dirs) == 1
    folder = dirs[0] if alone else sweep
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    return f"{'run' if alone else 'runs'} in {shown}{os.sep}"


def results_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the final table: how every run ended (where it is: `places`)."""
    from rich.markup import escape

    table = _empty_table(("run", "overrides", "status", "result", "restarts"))
    for outcome in outcomes:
        run = outcome.run
        value = "" if outcome.value is None else _text(outcome.value)
        cells = [run.name, run.label, outcome.status, value, str(outcome.restarts)]
        table.add_row(*(escape(cell) for cell in cells))
    return table

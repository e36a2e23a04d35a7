"""What a person sees of the runs: a live table on a terminal, lines on change elsewhere.

Everything here writes to one rich console, and no run ends because that can not be written to
(`Unfailing`). Nothing decides anything: `row_of` puts into words what status.json and the scheduler
say, and the displays show it.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.submit.backend import TrackedRun
from hpc_elastic.submit.outcome import Outcome
from hpc_elastic.words import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WRAPPED = ("run", "overrides", "queue", "result")
"""Columns that take several lines where the terminal is narrow; the others are kept whole."""
_REASON_WIDTH = len("(Resources),")
_BAR_WIDTH = 10
_LOG_WIDTH = 160
"""Columns of the tables in a log file, where rich would assume 80."""
_CHROME_LINES = 6
"""Lines of the table that are no runs, and of the prompt around it."""
_LONGEST_RESULT = 200
"""Characters of a result in the final table."""
_LINE_EVERY_S = (10.0, 600.0)
"""Shortest and longest time between two lines of a run in a log file that tell of its steps."""


@dataclass(frozen=True)
class Row:
    """One run in the table; texts are empty and numbers None where nothing is known.

    Attributes:
        run: Its name in the sweep.
        overrides: Its overrides.
        state: ``queued``, ``forming`` (tasks run, no group trains yet), ``training``,
            ``given back``, or how it ended.
        nodes: Nodes of the group that trains, and how many it may have: ``2 of 4``.
        queue: Its tasks that do not run, by state, and why the pending ones wait.
        step: The last step that was reported.
        total_steps: Where the training will be done.
        loss: The last loss that was reported.
        left_s: Seconds until ``total_steps``, at the present pace.
        restarts: Restarts that were spent, of those allowed: ``1 of 3``; empty if none was.
        ended: Whether the run has ended.
    """

    run: str
    overrides: str
    state: str = "queued"
    nodes: str = ""
    queue: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: str = ""
    left_s: float | None = None
    restarts: str = ""
    ended: bool = False

    @property
    def share(self) -> float | None:
        """Return how much of the training is done, from 0 to 1; None if that is not known."""
        if self.step is None or not self.total_steps:
            return None
        return min(1.0, self.step / self.total_steps)

    @property
    def cells(self) -> dict[str, str]:
        """Return the text of each column, in their order."""
        share = "" if self.share is None else f"{_bar(self.share)} {math.floor(self.share * 100)}%"
        return {
            "run": self.run, "overrides": self.overrides, "state": self.state,
            "nodes": self.nodes, "queue": self.queue, "progress": share,
            "step": "" if self.step is None else f"{self.step:,}", "loss": self.loss,
            "time left": "" if self.left_s is None else duration(self.left_s),
            "restarts": self.restarts,
        }  # fmt: skip


def _bar(share: float) -> str:
    done = round(share * _BAR_WIDTH)
    return "━" * done + "╌" * (_BAR_WIDTH - done)


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
        row = replace(row, queue=_queue(states), state=_state_without_status(row, states))
    if status is not None:
        nodes = status.get("nodes")
        row = replace(
            row,
            state=_PHASES.get(str(status.get("phase")), row.state),
            nodes=f"{nodes} of {len(run.tasks)}" if nodes else "",
            step=status.get("step"),
            total_steps=status.get("total_steps"),
            loss=_text(status.get("loss")),
            left_s=_left_s(status),
            restarts=_restarts(status),
        )
        if row.state == "forming" and states and not _any_runs(states):
            row = replace(row, state="queued")
    if outcome is not None:
        row = replace(row, state=outcome.status, nodes="", queue="", left_s=None, ended=True)
    return row


_PHASES = {"waiting": "forming", "training": "training", "given back": "given back"}
"""What is shown for the phases of status.json; how a run ended is told by its outcome."""


def _state_without_status(row: Row, states: Sequence[TaskState]) -> str:
    """Return the state of a run as far as its tasks show it: no leader need live to tell it."""
    if row.state in ("queued", "forming"):
        return "forming" if _any_runs(states) else "queued"
    return row.state


def _any_runs(states: Iterable[TaskState]) -> bool:
    return any(state.phase is Phase.RUNNING for state in states)


def _queue(states: Iterable[TaskState]) -> str:
    """Return how many tasks that do not run are in which state, and why the pending ones wait."""
    waiting = [state for state in states if state.phase is not Phase.RUNNING]
    counts = Counter(state.state for state in waiting)
    reasons = Counter(s.reason for s in waiting if s.state == "PENDING" and s.reason)
    why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
    parts = [f"{n} {name}{why if name == 'PENDING' else ''}" for name, n in sorted(counts.items())]
    return ", ".join(parts)


def _left_s(status: Mapping[str, Any]) -> float | None:
    """Return the seconds until the last step at the present pace; None if it is not known."""
    step, total, pace = (status.get(name) for name in ("step", "total_steps", "steps_per_s"))
    if step is None or total is None or not pace or status.get("phase") != "training":
        return None
    return float(max(0, total - step) / pace)


def _restarts(status: Mapping[str, Any]) -> str:
    spent, allowed = status.get("restarts"), status.get("max_restarts")
    if not spent:
        return ""
    return str(spent) if allowed is None else f"{spent} of {allowed}"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Unfailing:
    """A text stream on which writing does not fail: on a full disk the text is lost instead.

    So is what is written to a terminal that was closed. Only a reader who has gone away
    (`BrokenPipeError`) still ends the program: ``| head`` means that. A character that the stream's
    encoding has not, such as half of a file's odd name in a worker's error, is escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write if that is possible; return how many characters were taken."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            escaped = text.encode(encoding, "backslashreplace").decode(encoding)
            return self.write(escaped)
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
    """One line when something of a run has changed, and for its step now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._shown: dict[str, tuple[Row, float]] = {}

    def __enter__(self) -> Display:
        """Begin to show."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: lines stay."""

    def show(self, rows: Sequence[Row]) -> None:
        """Print the rows that have changed."""
        now = time.monotonic()
        every_s = line_spacing_s(now - self._began)
        for row in rows:
            before, at = self._shown.get(row.run, (None, now))
            if worth_a_line(row, before, since_s=now - at, every_s=every_s):
                self._shown[row.run] = (row, now)
                self.say(line_of(row))

    def say(self, text: str) -> None:
        """Print a message."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line_spacing_s(age_s: float) -> float:
    """Return the seconds between two lines that tell of steps only, after so long (pure).

    They grow with the age of the display, so that a day's log has some 200 lines a run.
    """
    shortest, longest = _LINE_EVERY_S
    return min(longest, max(shortest, age_s / 10))


def worth_a_line(row: Row, before: Row | None, *, since_s: float, every_s: float) -> bool:
    """Say whether a row is printed: at once if it changed, steps and losses now and then (pure)."""
    if before is None or row == before:
        return before is None
    calm = replace(
        row, step=before.step, total_steps=before.total_steps, loss=before.loss,
        left_s=before.left_s,
    )  # fmt: skip
    return calm != before or since_s >= every_s


def line_of(row: Row) -> str:
    """Return a row as one line (pure)."""
    told = [f"{row.state} on {row.nodes} nodes" if row.nodes else row.state]
    told += [row.queue] if row.queue else []
    if row.step is not None:
        share = "" if row.share is None else f" of {row.total_steps:,} ({row.share:.0%})"
        told.append(f"step {row.step:,}{share}")
    told += [f"loss {row.loss}"] if row.loss else []
    told += [f"{duration(row.left_s)} left"] if row.left_s is not None else []
    told += [f"{row.restarts} restarts"] if row.restarts else []
    head = f"[{row.run}] {row.overrides}".rstrip()
    return f"{head}: {', '.join(told)}"


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
    cells = [row.cells for row in shown]
    columns = [name for name in (cells[0] if cells else ()) if any(row[name] for row in cells)]
    table = _empty_table(columns)
    table.caption = f"and {hidden} more" if hidden else None
    for row in cells:
        table.add_row(*(escape(row[name]) for name in columns))
    return table


def _empty_table(columns: Sequence[str]) -> Table:
    """Return a table without borders: on 80 columns they would take a third of the width."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        width = _REASON_WIDTH if name == "queue" else None
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
    """Return the final table: how every run ended (where it is: `places`).

    A function may return as much as it likes; all of it is in the run's ``results``.
    """
    from rich.markup import escape

    table = _empty_table(("run", "overrides", "status", "result", "restarts"))
    for outcome in outcomes:
        run = outcome.run
        value = "" if outcome.value is None else _text(outcome.value)
        value = value if len(value) <= _LONGEST_RESULT else f"{value[:_LONGEST_RESULT]}..."
        cells = [run.name, run.label, outcome.status, value, str(outcome.restarts)]
        table.add_row(*(escape(cell) for cell in cells))
    return table

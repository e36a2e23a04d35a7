"""Progress of runs: a live table on a terminal, lines on change elsewhere; and the final table.

`row_of` turns the last status and task states of a run into text; `Progress` shows the rows. All
output passes through one rich console, and no run ends because that cannot be written to.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpc_elastic._util import duration
from hpc_elastic.launcher.run_handle import Outcome, RunHandle
from hpc_elastic.launcher.run_view import count_states, members_of, number, phase_of
from hpc_elastic.report.progress_log import Point
from hpc_elastic.slurm.job_state import Phase, TaskState

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = dict[str, str]
"""One run in the table: column -> text, empty or absent if unknown; ``total`` is in lines only."""

COLUMNS = (
    *("run", "overrides", "state", "nodes", "queue"),
    *("progress", "step", "loss", "time left", "restarts"),
)
_OF_STEPS = ("progress", "step", "total", "loss", "time left")
"""Cells that change all the time: in a log file they alone are worth a line only now and then."""
_ENDED = ("succeeded", "failed", "lost", "cancelled")
_WRAPPED = ("run", "overrides", "queue", "result")
"""Columns that take several lines where the terminal is narrow."""
_REASON_WIDTH = len("(Resources),")
_BAR_WIDTH = 10
_LOG_WIDTH = 160
"""Columns of the tables in a log file, where rich would assume 80."""
_CHROME_LINES = 6
"""Lines of the table that are no runs, and of the prompt around it."""
_LONGEST_RESULT = 200
"""Most characters of a result in the final table."""
_LINE_EVERY_S = (10.0, 600.0)
"""Least and most seconds between two lines of a run in a log file that show its steps only."""


def row_of(
    run: RunHandle,
    status: Mapping[str, Any] | None,
    states: Sequence[TaskState] | None,
    outcome: Outcome | None,
) -> Row:
    """Return the row of a run (pure).

    Args:
        run: The run.
        status: The last status.json that was read; None if there was none.
        states: Its tasks as they were listed last; None if they never were.
        outcome: How it ended; None if it continues.
    """
    live = {state.task: state for state in states or () if state.phase is not Phase.ENDED}
    phase = phase_of(
        None if states is None else live,
        str((status or {}).get("phase") or ""),
        [task for task, _ in members_of(status or {})],
        None if outcome is None else outcome.status,
        age_s=0.0,
    )
    row = {"run": run.name, "overrides": run.label, "state": phase}
    row |= {} if status is None else _cells(status, len(run.tasks))
    if outcome is not None:
        return {**row, "nodes": "", "time left": ""}
    return {**row, "queue": count_states(s for s in states or () if s.phase is not Phase.RUNNING)}


def _cells(status: Mapping[str, Any], num_tasks: int) -> Row:
    """Return the cells of status.json; fields that are damaged are unknown."""
    point = Point.of(status, 0.0)
    step, total, left_s = point.step, point.total_steps, None
    if step is not None and total and point.steps_per_s and status.get("phase") == "training":
        left_s = max(0, total - step) / point.steps_per_s
    spent, allowed = (int(number(status.get(n)) or 0) for n in ("restarts", "max_restarts"))
    return {
        "nodes": f"{point.nodes} of {num_tasks}" if point.nodes else "",
        "step": "" if step is None else f"{step:,}",
        "total": "" if step is None or not total else f"{total:,}",
        "progress": "" if step is None or not total else _percent(step, total),
        "loss": _text(point.loss),
        "time left": "" if left_s is None else duration(left_s),
        "restarts": f"{spent} of {allowed}" if spent else "",
    }


def _percent(step: float, total: float) -> str:
    return f"{math.floor(min(1.0, step / total) * 100)}%"


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Progress:
    """Shows the runs while entered: a live table on a terminal, else a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = None
        if console.is_terminal:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False)
        self._started = time.monotonic()
        self._shown: dict[str, tuple[Row, float]] = {}

    def __enter__(self) -> Progress:
        """Start the live table."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Redraw the table, or print the rows that have changed."""
        if self._live is not None:
            self._live.update(_table(rows, self._console.height - _CHROME_LINES), refresh=True)
            return
        now = time.monotonic()
        every_s = line_interval_s(now - self._started)
        for row in rows:
            before, at = self._shown.get(row["run"], (None, now))
            if is_worth_a_line(row, before, since_s=now - at, every_s=every_s):
                self._shown[row["run"]] = (row, now)
                self.print_message(line_of(row))

    def print_message(self, text: str) -> None:
        """Print a message, above the table if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line_interval_s(age_s: float) -> float:
    """Return the seconds between two lines that show steps only (pure).

    They grow with the age of the display, so that a day's log has some 200 lines per run.
    """
    least, most = _LINE_EVERY_S
    return min(most, max(least, age_s / 10))


def is_worth_a_line(row: Row, before: Row | None, *, since_s: float, every_s: float) -> bool:
    """Return whether a row is printed: at once if it changed, steps now and then (pure)."""
    if before is None or row == before:
        return before is None
    calm = {**row, **{name: before.get(name, "") for name in _OF_STEPS}}
    was_calm = {**before, **{name: before.get(name, "") for name in _OF_STEPS}}
    return calm != was_calm or since_s >= every_s


def line_of(row: Row) -> str:
    """Return a row as one line (pure)."""
    cells = {name: row.get(name, "") for name in (*COLUMNS, "total")}
    parts = [f"{cells['state']} on {cells['nodes']} nodes" if cells["nodes"] else cells["state"]]
    parts += [cells["queue"]] if cells["queue"] else []
    of_total = f" of {cells['total']} ({cells['progress']})" if cells["total"] else ""
    parts += [f"step {cells['step']}{of_total}"] if cells["step"] else []
    parts += [f"loss {cells['loss']}"] if cells["loss"] else []
    parts += [f"{cells['time left']} left"] if cells["time left"] else []
    parts += [f"{cells['restarts']} restarts"] if cells["restarts"] else []
    head = f"[{cells['run']}] {cells['overrides']}".rstrip()
    return f"{head}: {', '.join(parts)}"


def fitting(rows: Sequence[Row], num_lines: int) -> list[Row]:
    """Return the rows to show where not all fit: those that continue first (pure)."""
    if len(rows) <= num_lines:
        return list(rows)
    return sorted(rows, key=lambda row: row["state"] in _ENDED)[: max(1, num_lines)]


def _table(rows: Sequence[Row], num_lines: int) -> Table:
    from rich.markup import escape

    shown = fitting(rows, num_lines)
    columns = [name for name in COLUMNS if any(row.get(name) for row in shown)]
    table = _empty_table(columns)
    table.caption = f"and {len(rows) - len(shown)} more" if len(rows) > len(shown) else None
    for row in shown:
        cells = {**row, "progress": _bar(row["progress"])} if row.get("progress") else row
        table.add_row(*(escape(cells.get(name, "")) for name in columns))
    return table


def _bar(percent: str) -> str:
    done = round(int(percent.rstrip("%")) / 100 * _BAR_WIDTH)
    return "━" * done + "╌" * (_BAR_WIDTH - done) + f" {percent}"


def _empty_table(columns: Sequence[str]) -> Table:
    """Return a table without borders: on 80 columns they would take a third of the width."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        width = _REASON_WIDTH if name == "queue" else None
        table.add_column(name, no_wrap=name not in _WRAPPED, overflow="fold", min_width=width)
    return table


def results_table(outcomes: Sequence[Outcome]) -> Table:
    """Return the final table. Long results are cut; the run's ``results`` hold all of them."""
    from rich.markup import escape

    table = _empty_table(("run", "overrides", "status", "result", "restarts"))
    for outcome in outcomes:
        value = _text(outcome.value)
        value = value if len(value) <= _LONGEST_RESULT else f"{value[:_LONGEST_RESULT]}..."
        run = outcome.run
        cells = [run.name, run.label, outcome.status, value, str(outcome.restarts)]
        table.add_row(*(escape(cell) for cell in cells))
    return table


def location(dirs: Sequence[Path], sweep: Path, cwd: Path) -> str:
    """Return the line that names the folder of the runs, below a table or alone (pure).

    A path does not fold well in a column, and the table's first column has the rest of it.
    """
    folder = dirs[0] if len(dirs) == 1 else sweep
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    return f"{'run' if len(dirs) == 1 else 'runs'} in {shown}{os.sep}"


def console_for(stream: TextIO | None) -> Console:
    """Return the console of the progress and the results.

    Args:
        stream: Where it writes; None: the program has no standard output, nothing is written.
    """
    from rich.console import Console

    console = Console(file=None if stream is None else cast(TextIO, _Unfailing(stream)))
    if not console.is_terminal:
        console.width = max(console.width, _LOG_WIDTH)
    return console


class _Unfailing:
    """A text stream that does not fail: on a full disk, or a closed terminal, the text is lost.

    Only a closed pipe (`BrokenPipeError`) still ends the program: ``| head`` means that. Characters
    outside of the stream's encoding, such as half of a file's odd name in an error, are escaped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write if possible; return the number of characters taken."""
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
        """Flush if possible."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

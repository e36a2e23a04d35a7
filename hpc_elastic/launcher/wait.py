"""Wait for submitted runs: poll them, show their progress, and return how they ended.

`Progress` shows a live table on a terminal, and lines on change elsewhere; all output passes
through one rich console, and no run ends because that cannot be written to.

A run has ended when its result.json exists. If all its tasks have left the queue without one, no
process is left to write it: after a grace period (the file may be delayed by a network file system)
the run counts as lost.

The files of a run are read at every poll. The scheduler is queried more rarely, once for all runs:
every `LIST_S` seconds while a change is expected of it, that is, while tasks wait, a group has
changed, or a leader has stopped writing; every `LIST_LED_S` while every run has a leader, since
leaders that form a group query it themselves; every `LIST_SETTLED_S` while all runs train. Its
answers take at most `ANSWER_SHARE` of the time.
"""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hpc_elastic._util import counted, duration, sigterm_as_interrupt, terminal_of
from hpc_elastic.errors import RunDirectoryError, SlurmError
from hpc_elastic.launcher.run_handle import Outcome, RunHandle, SubmittedJobs
from hpc_elastic.report.progress_log import Point
from hpc_elastic.report.run_view import (
    AbsenceTimer,
    count_states,
    label_of,
    members_of,
    number,
    phase_of,
    warnings_of,
)
from hpc_elastic.run.directory import STATUS_SELDOM_S, SUBMISSION, RunDir, Submission
from hpc_elastic.run.events import Event, EventReader
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import Mount, is_there
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.job_state import Phase, TaskState, remedy
from hpc_elastic.slurm.local_queue import LocalQueue

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_log = logging.getLogger(__name__)

LIST_S = 4.0
"""Seconds between two queries of the scheduler while a change is expected."""
LIST_LED_S = 12.0
"""Seconds between two queries while the leaders of all runs write, and no group has changed."""
LIST_SETTLED_S = 60.0
"""Seconds between two queries while every run trains and its leader writes."""
ANSWER_SHARE = 0.05
"""Share of the time that the scheduler may take to answer."""
FRESH_S = 5.0
"""A leader that lives writes status.json about once a second, or once in `STATUS_SELDOM_S`; its
status is at most this much older."""
UNREADABLE_S = 30.0
"""Seconds for which a run may be unreadable before a message is printed."""
_LONGEST_ERROR = 600
"""Most characters of a failed worker's error that are printed; the run's logs hold all of it."""

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
_LOG_WIDTH = 160
"""Columns of the tables in a log file, where rich would assume 80."""
_CHROME_LINES = 6
"""Lines of the table that are no runs, and of the prompt around it."""
_LONGEST_RESULT = 200
"""Most characters of a result in the final table."""


def wait(
    runs: Sequence[RunHandle],
    *,
    poll_interval_s: float,
    out: TextIO | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Show the progress of runs until all have ended, then how each ended.

    Args:
        runs: The runs of one submission.
        poll_interval_s: Seconds between two polls.
        out: Where the progress is shown; None: standard output.
        on_end: Called with the outcome of each run as soon as the run has ended.

    Raises:
        SystemExit: Ctrl-C or SIGTERM. Slurm's runs continue, local runs are ended; which of the
            two, and how to come back, was printed.
    """
    jobs = runs[0].jobs
    console = console_for(out or sys.stdout)
    try:
        with sigterm_as_interrupt(), Progress(console) as progress:
            waiter = Waiter(runs, progress, poll_interval_s=poll_interval_s)
            outcomes = waiter.wait(on_end)
        jobs.close()
    except KeyboardInterrupt:
        console.print(jobs.release(), markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except BaseException:
        jobs.release()
        raise
    where = location([run.dir for run in runs], runs[0].submission.parent, Path.cwd())
    try:
        console.print()
        console.print(results_table(outcomes))
        console.print(where, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted: the runs had ended; {where}") from e
    return outcomes


class Waiter:
    """Polls the runs of one submission until all have ended.

    Args:
        runs: The runs.
        display: Shows progress and messages.
        poll_interval_s: Seconds between two polls.
        jobs: Those of the submission; None: of the first run.
        clock: Seconds, monotonic.
        sleep: Blocks for a number of seconds.
    """

    def __init__(
        self,
        runs: Sequence[RunHandle],
        display: Progress,
        *,
        poll_interval_s: float,
        jobs: SubmittedJobs | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runs: list[_WatchedRun] = []
        self._jobs = runs[0].jobs if jobs is None else jobs
        self._display = display
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._fresh_s = FRESH_S
        self._listed_at, self._answer_s = -math.inf, 0.0
        self._list_error = ""
        self._warned_unreadable = False
        self.watch(runs)

    def wait(self, on_end: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
        """Block until every run has ended; return how, in the order of the runs.

        Args:
            on_end: Called with the outcome of each run as soon as the run has ended.
        """
        reported: set[Path] = set()
        while True:
            outcomes = [outcome for outcome in self.poll_runs() if outcome is not None]
            for outcome in outcomes:
                if outcome.run.dir not in reported:
                    reported.add(outcome.run.dir)
                    on_end(outcome)
            if len(outcomes) == len(self._runs):
                return outcomes
            self._sleep(self._poll_interval_s)

    def watch(self, runs: Sequence[RunHandle]) -> None:
        """Poll further runs of the same sweep from now on."""
        if runs and not Mount.of(runs[0].dir).is_local:
            self._fresh_s = FRESH_S + STATUS_SELDOM_S
        self._runs += [_WatchedRun(run) for run in runs]
        self._listed_at = -math.inf  # their tasks are unknown

    def drop(self, run: RunHandle) -> None:
        """Poll a run no longer."""
        self._runs = [each for each in self._runs if each.handle is not run]

    def status_of(self, run: RunHandle) -> Mapping[str, Any]:
        """Return the last status.json of a run that was read; empty if there was none."""
        return next((r.status for r in self._runs if r.handle is run), None) or {}

    def poll_runs(self) -> list[Outcome | None]:
        """Poll once: the scheduler if it is due, then the files of every run that continues.

        Returns:
            How each run ended, in the order of the runs; None for those that continue.
        """
        now = self._clock()
        pauses = [run.list_pause_s(self._listed_at, now, self._fresh_s) for run in self._runs]
        pause_s = max(min(pauses, default=0.0), self._answer_s / ANSWER_SHARE)
        listed = self._list_tasks() if now - self._listed_at >= pause_s else None
        for run in self._runs:
            if run.outcome is None:
                self._poll_run(run, listed)
        self._report_unreadable()
        self._display.show_rows([run.row for run in self._runs])
        return [run.outcome for run in self._runs]

    def _list_tasks(self) -> Mapping[str, TaskState] | None:
        """Return the scheduler's list; None while it does not answer, which is reported once."""
        self._listed_at = self._clock()
        try:
            tasks = self._jobs.list_tasks()
        except (SlurmError, OSError) as e:
            is_slurm = isinstance(e, SlurmError)
            what = "Slurm does not answer" if is_slurm else "the tasks are unreadable"
            if not self._list_error:
                self._display.print_message(f"{what}, the runs are not affected: {e}")
            self._list_error = what
            return None
        finally:
            self._answer_s = self._clock() - self._listed_at
        if self._list_error:
            self._display.print_message("the tasks of the runs can be listed again")
        self._list_error = ""
        return tasks

    def _poll_run(self, run: _WatchedRun, listed: Mapping[str, TaskState] | None) -> None:
        now, poll = self._clock(), run.handle.poll(listed)
        run.outcome = poll.outcome
        if poll.error is not None:
            run.unreadable_since = now if run.unreadable_since is None else run.unreadable_since
            run.read_error = poll.error
        else:
            run.unreadable_since = None
            if poll.outcome is None and poll.states is not None:
                run.outcome = self._check_tasks(run, poll.states, now)
        run.states = run.states if poll.states is None else poll.states
        if poll.status is not None:
            run.note_status(poll.status, now)
            self._report_restarts(run, poll.status)
            self._report_warnings(run, poll.status)
        run.row = row_of(run.handle, run.status, run.states, run.outcome)

    def _check_tasks(
        self, run: _WatchedRun, states: Sequence[TaskState], now: float
    ) -> Outcome | None:
        """Report tasks that failed or cannot start; return the outcome if the run is lost."""
        for state in states:
            reason = f" ({state.reason})" if state.reason else ""
            run.last_seen[state.task] = f"{state.state}{reason}"
        name = run.handle.label or run.handle.name
        failed = [state.task for state in states if state.state == "FAILED"]
        if failed and not run.warned_failed:  # the other tasks may wait for hours
            run.warned_failed = True
            lines = [f"task {failed[0]} of {name} failed", *run.handle.log_tails(1)]
            self._display.print_message("\n".join(lines))
        stuck = {s.reason: s.task for s in states if s.state == "PENDING" and remedy(s.reason)}
        for reason in sorted(stuck.keys() - run.warned_reasons):
            what = f"task {stuck[reason]} of {name} will not start by itself"
            self._display.print_message(f"{what} ({reason}): {remedy(reason)}")
        run.warned_reasons |= stuck.keys()
        run.gone.update(states, now)
        return run.handle.lost(run.last_seen) if run.gone.is_over(now) else None

    def _report_restarts(self, run: _WatchedRun, status: Mapping[str, Any]) -> None:
        """Print the error behind each restart, once."""
        for nth, event in run.new_restarts(int(number(status.get("restarts")) or 0)):
            error = str(event.get("failure") or "")
            shown = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}..."
            head = f"[{run.handle.name}] {run.handle.label}".rstrip()
            count = f"restart {nth} of {status.get('max_restarts')}"
            self._display.print_message(f"{head}: {count}: {shown}")

    def _report_warnings(self, run: _WatchedRun, status: Mapping[str, Any]) -> None:
        """Print what is wrong with a training that goes on, once."""
        head = f"[{run.handle.name}] {run.handle.label}".rstrip()
        for text in warnings_of(status):
            if text not in run.warnings:
                self._display.print_message(f"{head}: {text}")
        run.warnings |= set(warnings_of(status))

    def _report_unreadable(self) -> None:
        """Report once that runs are unreadable for long, and once that all are readable again."""
        found = [r for r in self._runs if r.outcome is None and r.unreadable_since is not None]
        now = self._clock()
        late = [r for r in found if now - (r.unreadable_since or 0.0) >= UNREADABLE_S]
        if late and not self._warned_unreadable:
            what = f"{len(late)} of {len(self._runs)} runs cannot be read, and may have ended"
            self._display.print_message(f"{what}; they are polled further: {late[0].read_error}")
            self._warned_unreadable = True
        elif self._warned_unreadable and not found:
            self._display.print_message("the runs can be read again")
            self._warned_unreadable = False


@dataclass
class _WatchedRun:
    """A run, and what its polls have shown so far."""

    handle: RunHandle
    outcome: Outcome | None = None
    row: Row = field(default_factory=dict)
    status: Mapping[str, Any] | None = None
    states: Sequence[TaskState] | None = None
    gone: AbsenceTimer = field(default_factory=AbsenceTimer)
    last_seen: dict[str, str] = field(default_factory=dict)
    warned_failed: bool = False
    warned_reasons: frozenset[str] = frozenset()
    warnings: frozenset[str] = frozenset()
    unreadable_since: float | None = None
    read_error: OSError | None = None
    num_restarts_reported: int = 0
    restarts: dict[int, Event] = field(default_factory=dict)
    """The ``restart`` events read so far, by number."""
    events: EventReader | None = None
    updated_at: float = -math.inf
    """When the leader's time in the last status was first read, by this clock."""
    group_since: float = -math.inf
    """The same for its phase, number of nodes and of joined nodes."""

    def note_status(self, status: Mapping[str, Any], now: float) -> None:
        before, self.status = self.status or {}, status
        if status.get("updated") != before.get("updated"):
            self.updated_at = now
        if any(status.get(name) != before.get(name) for name in ("phase", "nodes", "joined")):
            self.group_since = now

    def list_pause_s(self, listed_at: float, now: float, fresh_s: float) -> float:
        """Return the seconds between two queries of the scheduler that this run needs."""
        if self.outcome is not None:
            return math.inf
        if self.gone.since is not None:
            return 0.0  # for `GONE_S`: the run is lost, or its tasks come back
        if now - self.updated_at >= fresh_s or self.group_since > listed_at:
            return LIST_S
        is_training = (self.status or {}).get("phase") == "training"
        return LIST_SETTLED_S if is_training else LIST_LED_S

    def new_restarts(self, num_spent: int) -> Iterable[tuple[int, Event]]:
        """Yield number and event of each restart that was not reported yet.

        Events are read only if status.json counts more restarts than were reported. A file system
        may show them late: they are yielded at a later poll then.
        """
        if num_spent <= self.num_restarts_reported:
            return
        self.events = self.events or EventReader(self.handle.paths.event_logs)
        try:
            for event in self.events.new():
                if event["kind"] == "resume":  # the count starts anew
                    self.restarts.clear()
                elif event["kind"] == "restart" and isinstance(event.get("restarts"), int):
                    self.restarts[event["restarts"]] = event
        except OSError:
            return
        while (event_ := self.restarts.get(self.num_restarts_reported + 1)) is not None:
            self.num_restarts_reported += 1
            yield self.num_restarts_reported, event_


# ---- progress


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
    queue = count_states(s for s in states or () if s.phase is not Phase.RUNNING)
    waiting = int(number((status or {}).get("joined")) or 0) if phase == "training" else 0
    if waiting:  # spares, and nodes that are admitted later
        queue = ", ".join(filter(None, (f"{counted(waiting, 'node')} waiting", queue)))
    return {**row, "queue": queue}


def _cells(status: Mapping[str, Any], num_tasks: int) -> Row:
    """Return the cells of status.json; fields that are damaged are unknown."""
    point = Point.of(status, 0.0)
    step, total, left_s = point.step, point.total_steps, None
    if step is not None and total and point.steps_per_s and status.get("phase") == "training":
        left_s = max(0, total - step) / point.steps_per_s
    spent, allowed = (int(number(status.get(n)) or 0) for n in ("restarts", "max_restarts"))
    share = "" if step is None or not total else f"{math.floor(min(1.0, step / total) * 100)}%"
    return {
        "nodes": f"{point.nodes} of {num_tasks}" if point.nodes else "",
        "step": "" if step is None else f"{step:,}",
        "total": "" if step is None or not total else f"{total:,}",
        "progress": share,
        "loss": _text(point.loss),
        "time left": "" if left_s is None else duration(left_s),
        "restarts": f"{spent} of {allowed}" if spent else "",
    }


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


class LoggedMessages(Progress):
    """Logs the messages, and shows no rows: for a thread beside the user's program."""

    def __init__(self) -> None:
        """Need no console."""

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Do nothing."""

    def print_message(self, text: str) -> None:
        """Log a message."""
        _log.warning("%s", text)


def line_interval_s(age_s: float) -> float:
    """Return the seconds between two lines that show steps only (pure).

    They grow with the age of the display, so that a day's log has some 200 lines per run.
    """
    return min(600.0, max(10.0, age_s / 10))


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
        cells = row
        if percent := row.get("progress"):
            done = round(int(percent.rstrip("%")) / 10)
            cells = {**row, "progress": f"{'━' * done}{'╌' * (10 - done)} {percent}"}
        table.add_row(*(escape(cells.get(name, "")) for name in columns))
    return table


def _empty_table(columns: Sequence[str]) -> Table:
    """Return a table without borders: on 80 columns they would take a third of the width."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        width = len("(Resources),") if name == "queue" else None
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
    from hpc_elastic._console import CleanConsole

    file = None if stream is None else cast(TextIO, _Unfailing(terminal_of(stream)))
    console = CleanConsole(file=file)
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


# ---- runs that were submitted before


@dataclass(frozen=True)
class LocalView:
    """Read-only view of the tasks that another process has launched with launcher=local."""

    submission: Path
    job_ids: Sequence[str]
    result_job: None = None

    def list_tasks(self) -> Mapping[str, TaskState]:
        """Return the states of the launcher's tasks."""
        return LocalQueue(Submission(self.submission)).tasks(self.job_ids)

    def cancel(self) -> None:
        """Do nothing: the launcher ends its processes."""

    def release(self) -> str:
        """Return the command that waits for the runs again."""
        sweep = shlex.quote(str(self.submission.parent))
        return f"The runs continue with their launcher.\n  wait: hpc-elastic wait {sweep}"

    def close(self) -> None:
        """Do nothing: the launcher ends its processes."""


def find_submission(folder: Path) -> Path:
    """Return the ``.hpc_elastic`` of a sweep directory, or of the sweep of a run directory.

    Raises:
        RunDirectoryError: `folder` is neither.
    """
    if (folder / SUBMISSION).is_dir():
        return folder / SUBMISSION
    if is_there(RunDir(folder).spec):
        return Path(RunDir(folder).load().submission)
    remedy = "give the directory of a sweep, such as multirun/2030-01-31/12-00-00"
    raise RunDirectoryError(f"{folder} is not a sweep directory: {remedy}")


def read_handles(submission: Path, only: Path | None = None) -> list[RunHandle]:
    """Return the runs of a sweep that were submitted.

    Runs whose directories were removed are left out, and named on standard error.

    Args:
        submission: The sweep's ``.hpc_elastic``.
        only: The run directory of the one run to return; None: all runs.

    Raises:
        RunDirectoryError: A file of the sweep is missing, all its runs are, or nothing was
            submitted from it.
    """
    job_ids = Submission(submission).job_ids()
    if not job_ids:
        arrays = Submission(submission).arrays()
        scripts = " ".join(shlex.quote(str(a.script)) for a in arrays if a.script.exists())
        remedy = f"; to submit it: sbatch {scripts}" if scripts else ""
        raise RunDirectoryError(f"{submission.parent} was never submitted{remedy}")
    dirs = [only] if only is not None else []
    if only is None:
        dirs = [path for k in job_ids for path in Submission(submission).array(k).run_dirs()]
    there = {path: is_there(path) for path in dict.fromkeys(dirs)}
    removed = [path.name for path, is_there in there.items() if not is_there]
    if len(removed) == len(there):
        raise RunDirectoryError(
            f"{submission.parent} has no runs left: their directories were removed"
        )
    if removed:
        print(f"left out, as their directories were removed: {', '.join(removed)}", file=sys.stderr)
    specs = {path: RunDir(path).load() for path in there if there[path]}
    jobs: SubmittedJobs
    if next(iter(specs.values())).launcher == "local":
        jobs = LocalView(submission, list(job_ids.values()))
    else:
        from hpc_elastic.launcher.slurm import SlurmJobs
        from hpc_elastic.site import time_slots_of

        me, client, ids = user(), SlurmClient(), list(job_ids.values())
        is_own = all(spec.provenance.get("user", me) == me for spec in specs.values())
        slots = time_slots_of(specs.values(), client) if is_own else ()
        jobs = SlurmJobs(ids, submission.parent, client, slots)
    return [
        RunHandle(path, label_of(path), tuple(spec.task_names(job_ids)), submission, jobs)
        for path, spec in specs.items()
    ]

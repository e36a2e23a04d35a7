"""Wait for submitted runs: follow them, show their progress, and return how they ended.

`Progress` shows a live table on a terminal, and lines on change elsewhere; all output passes
through one rich console, and no run ends because that cannot be written to.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from hpc_elastic._util import counted, duration, sigterm_as_interrupt, terminal_of
from hpc_elastic.errors import HpcElasticError, SlurmError, UntrustedRunError
from hpc_elastic.launcher.follow import RunFollower
from hpc_elastic.launcher.run_handle import RunHandle, SubmittedJobs
from hpc_elastic.report.run_view import RunEnd, RunView, count_states
from hpc_elastic.run.directory import RunSpec
from hpc_elastic.run.events import Event, EventReader
from hpc_elastic.run.notify import Notifier
from hpc_elastic.run.ownership import require_own
from hpc_elastic.slurm.job_state import Phase, remedy
from hpc_elastic.slurm.scheduler import QueueSnapshot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_log = logging.getLogger(__name__)
T = TypeVar("T")

UNREADABLE_S = 30.0
"""Seconds for which a run may be unreadable before a message is printed."""
_LONGEST_ERROR = 600
"""Most characters of a failed worker's error that are printed; the run's logs hold all of it."""
_MANY = 500
"""Runs from which on their submission shows how far it is."""

Row = dict[str, str]
"""One run in the table: column -> text, empty or absent if unknown; ``total`` is in lines only, and
``waits`` there and below the table."""

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
_CHROME_LINES = 8
"""Lines of the table that are no runs, and of the prompt around it."""
_LONGEST_RESULT = 200
"""Most characters of a result in the final table."""


def wait(
    runs: Sequence[RunHandle],
    *,
    poll_interval_s: float,
    out: TextIO | None = None,
    on_end: Callable[[RunHandle, RunEnd], None] = lambda run, end: None,
    timeout_s: float = math.inf,
) -> list[RunEnd]:
    """Show the progress of runs until all have ended (`wait_until`), then how each ended."""
    console = console_for(out or sys.stdout)
    views = wait_until(runs, "ended", console, poll_interval_s, timeout_s, on_end)
    where = location([run.dir for run in runs], runs[0].submission.parent)
    found = [view.ended for view in views if view.ended is not None]
    try:
        console.print()
        console.print(results_table(runs, found))
        console.print(where, markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt(f"interrupted: the runs had ended; {where}") from e
    return found


def wait_until(
    runs: Sequence[RunHandle],
    state: str,
    console: Console,
    poll_interval_s: float,
    timeout_s: float,
    on_end: Callable[[RunHandle, RunEnd], None] = lambda run, end: None,
) -> list[RunView]:
    """Show the progress of runs until each has been in a state (`is_reached`); return their views.

    What a leader has written counts once it has written again: the first that is read may be from
    before the loss of a node. Raises HpcElasticError if a run ends before, or has not been in the
    state after ``timeout_s``, and SystemExit at Ctrl-C or SIGTERM: how to come back was printed.
    """
    jobs = runs[0].jobs
    first: dict[Path, float | None] = {}
    reached, ended = set[Path](), set[Path]()
    try:
        with sigterm_as_interrupt(), Progress(console) as progress:
            waiter = Waiter(runs, progress, poll_interval_s=poll_interval_s)
            for views in waiter.polls(time.monotonic() + timeout_s):
                for run, view in zip(runs, views, strict=True):
                    is_new = view.updated != first.setdefault(run.dir, view.updated)
                    if is_reached(view, state) and (is_new or not view.trains):
                        reached.add(run.dir)
                    if view.ended is not None and run.dir not in ended:
                        ended.add(run.dir)
                        on_end(run, view.ended)
                if len(reached | ended) == len(runs):
                    break
        if len(ended) == len(runs):
            jobs.close()
    except KeyboardInterrupt:
        console.print(jobs.release(), markup=False, highlight=False, soft_wrap=True)
        sys.exit(130)
    except BaseException:
        jobs.release()
        raise
    for run, view in zip(runs, views, strict=True):
        if run.dir not in reached:
            late = f" after {timeout_s:g} s" if view.ended is None else ""
            raise HpcElasticError(f"{run.dir} has not reached {state}{late}: {view.describe()}")
    return views


def is_reached(view: RunView, state: str) -> bool:
    """Return whether a run has ``ended``, is ``training``, has ``nodes=N`` or ``step=N`` (pure).

    With ``nodes=N`` it trains with a group of N nodes; with ``step=N`` it has made step N.
    """
    word, _, number = state.partition("=")
    if word == "ended":
        return view.ended is not None
    if word == "step":
        return view.status is not None and (view.status.step or 0) >= int(number)
    nodes = view.status.nodes if view.status is not None else 0
    return view.trains and (not number or nodes == int(number))


class Waiter:
    """Polls the runs of one submission, shows them, and reads how they ended.

    ``jobs`` are those of the submission; None: of the first run.
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
        self._runs: list[RunNews] = []
        self._jobs = runs[0].jobs if jobs is None else jobs
        self._display = display
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._follower = RunFollower((), self._list_tasks, clock=clock)
        self._list_error = ""
        self._without_group: dict[Path, float] = {}
        """Since when each run has had no group, as far as it was polled."""
        self._sent: set[tuple[object, ...]] = set()
        self._unreadable_since: dict[Path, float] = {}
        self._warned_unreadable = False
        self.watch(runs)

    def watch(self, runs: Sequence[RunHandle]) -> None:
        """Poll further runs of the same sweep from now on."""
        self._runs += map(RunNews, runs)
        self._follower.add([run.dir for run in runs])

    def drop(self, run: RunHandle) -> None:
        """Poll a run no longer."""
        self._runs = [each for each in self._runs if each.run is not run]
        self._follower.drop(run.dir)

    def polls(self, deadline: float = math.inf) -> Iterator[list[RunView]]:
        """Yield the views of each poll, until all runs have ended or the clock is at a time."""
        while True:
            views = self.poll_runs()
            yield views
            left_s = deadline - self._clock()
            if left_s <= 0 or all(view.ended is not None for view in views):
                return
            self._sleep(min(left_s, self._poll_interval_s))

    def poll_runs(self) -> list[RunView]:
        """Poll once; return what each run is doing, those that have ended with values or error."""
        for news, view in zip(self._runs, self._follower.poll(), strict=True):
            if news.view is None or news.view.ended is None:
                for text in news.messages(view):
                    self._display.print_message(text)
        views = [news.view for news in self._runs if news.view is not None]
        self._report_unreadable(views)
        for view in views:
            self._send_messages(view)
        rows = zip(self._runs, views, strict=True)
        self._display.show_rows([row_of(news.run, view) for news, view in rows])
        return views

    def _send_messages(self, view: RunView) -> None:
        """Send what a run cannot without a process: that it is lost, or waits in the queue."""
        spec, run, now = view.spec, view.run, self._clock()
        waited_s = now - self._without_group.setdefault(run.path, now)
        if view.trains or spec is None:
            del self._without_group[run.path]
            return
        longest_s = spec.settings.launcher.notify.noted_wait_s
        kind, facts = "", dict[str, object]()
        if view.ended is not None:
            kind, facts = view.ended.status, {"why": view.ended.why}
        elif longest_s is not None and waited_s >= longest_s:
            round_ = view.status.round if view.status is not None else 0
            kind, facts = "waits_long", {"round": round_, "waited_s": waited_s}

        def report(kind: str, *, why: str | None, **fields: object) -> None:
            if why is not None:
                self._display.print_message(f"a message was not delivered: {why}")

        what = (run.path, kind, facts.get("round"))
        send = Notifier(run, spec, report).prepare(kind, facts)
        if send is not None and what not in self._sent:
            self._sent.add(what)
            with suppress(UntrustedRunError):  # it would be the command of somebody else
                require_own(run.path, run.spec)
                send()

    def _list_tasks(self, specs: Sequence[RunSpec]) -> QueueSnapshot | None:
        """Return the scheduler's list; None while it does not answer, which is reported once."""
        try:
            tasks = self._jobs.list_tasks()
        except (SlurmError, OSError) as e:
            is_slurm = isinstance(e, SlurmError)
            what = "Slurm does not answer" if is_slurm else "the tasks are unreadable"
            if not self._list_error:
                self._display.print_message(f"{what}, the runs are not affected: {e}")
            self._list_error = what
            return None
        if self._list_error:
            self._display.print_message("the tasks of the runs can be listed again")
        self._list_error = ""
        return QueueSnapshot(tasks)

    def _report_unreadable(self, views: Sequence[RunView]) -> None:
        """Report once that runs are unreadable for long, and once that all are readable again."""
        now, before = self._clock(), self._unreadable_since
        found = {view.run.path: view.unreadable for view in views if view.unreadable is not None}
        self._unreadable_since = {run: before.get(run, now) for run in found}
        late = [run for run, at in self._unreadable_since.items() if now - at >= UNREADABLE_S]
        if late and not self._warned_unreadable:
            what = f"{len(late)} of {len(views)} runs cannot be read, and may have ended"
            self._display.print_message(f"{what}; they are polled further: {found[late[0]]}")
            self._warned_unreadable = True
        elif self._warned_unreadable and not found:
            self._display.print_message("the runs can be read again")
            self._warned_unreadable = False


# ---- what is shown of a run


class RunNews:
    """What is worth a message in the polls of a run, each once."""

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self.view: RunView | None = None
        self._last_seen: dict[str, str] = {}
        """The last state of each of its tasks."""
        self._reported: set[str] = set()
        """Warnings, reasons to wait, and states of tasks that have had their message."""
        self._num_restarts = 0
        self._restarts: dict[int, Event] = {}
        """The ``restart`` events read so far, by number."""
        self._events: EventReader | None = None

    def messages(self, view: RunView) -> Iterator[str]:
        """Take the view of a poll; yield what is new in it."""
        yield from self._of_tasks(view)
        self.view = self._with_result(view)
        head = f"[{self.run.name}] {self.run.label}".rstrip()
        spent, allowed = view.restarts
        for nth, event in self._new_restarts(spent):
            error = str(event.get("failure") or "")
            shown = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}..."
            yield f"{head}: restart {nth} of {allowed}: {shown}"
        for text in self._new(view.warnings):
            yield f"{head}: {text}"

    def _of_tasks(self, view: RunView) -> Iterator[str]:
        names: dict[int | None, str] = dict(enumerate(self.run.tasks))
        listed = (view.tasks or {}).items()  # a replacement counts as the task
        states = {names.get(state.slot, name): state for name, state in listed}
        for task, state in states.items():
            self._last_seen[task] = f"{state.state}{f' ({state.reason})' if state.reason else ''}"
        name = self.run.label or self.run.name
        failed = [task for task, state in states.items() if state.state == "FAILED"]
        for _ in self._new(["FAILED"] if failed else []):  # the other tasks may wait for hours
            yield "\n".join([f"task {failed[0]} of {name} failed", *self.run.log_tails(1)])
        waiting = [(s.reason, task) for task, s in states.items() if s.state == "PENDING"]
        stuck = {reason: task for reason, task in waiting if remedy(reason)}
        for reason in self._new(sorted(stuck)):
            what = f"task {stuck[reason]} of {name} will not start by itself"
            yield f"{what} ({reason}): {remedy(reason)}"

    def _new(self, texts: Iterable[str]) -> list[str]:
        """Return the texts that were not reported yet, and count them as reported."""
        new = [text for text in dict.fromkeys(texts) if text not in self._reported]
        self._reported.update(new)
        return new

    def _with_result(self, view: RunView) -> RunView:
        if (known := view.ended) is None:
            return view
        try:
            end = self.run.read_end() if known.has_result else self.run.lost(self._last_seen)
        except OSError as e:
            return replace(view, ended=None, unreadable=e)
        return replace(view, ended=end and replace(end, time=known.time, why=known.why))

    def _new_restarts(self, num_spent: int) -> Iterable[tuple[int, Event]]:
        """Yield number and event of each restart that was not reported yet.

        Events are read only if the count of restarts has grown. A file system may show them late: a
        later poll yields them then.
        """
        if num_spent <= self._num_restarts:
            return
        self._events = self._events or EventReader(self.run.paths.event_logs)
        try:
            for event in self._events.new():
                if event["kind"] == "resume":  # the count starts anew
                    self._restarts.clear()
                elif event["kind"] == "restart" and isinstance(event.get("restarts"), int):
                    self._restarts[event["restarts"]] = event
        except OSError:
            return
        while (event_ := self._restarts.get(self._num_restarts + 1)) is not None:
            self._num_restarts += 1
            yield self._num_restarts, event_


def row_of(run: RunHandle, view: RunView) -> Row:
    """Return the row of a run (pure)."""
    row = {"run": run.name, "overrides": run.label, "state": view.phase}
    row |= _cells(view, len(run.tasks))
    if view.ended is not None:
        return {**row, "state": view.ended.status, "nodes": "", "time left": ""}
    states = (view.tasks or {}).values()
    queue = count_states(s for s in states if s.phase is not Phase.RUNNING)
    if view.num_joined and view.phase == "training":  # spares, and nodes that are admitted later
        waiting = f"{counted(view.num_joined, 'node')} waiting"
        queue = ", ".join(filter(None, (waiting, queue)))
    waits = {"waits": view.why_waits} if view.why_waits is not None else {}
    return {**row, "queue": queue, **waits}


def _cells(view: RunView, num_tasks: int) -> Row:
    """Return the cells of status.json; fields that are damaged are unknown."""
    point = view.status
    if point is None:
        return {}
    step, total, left_s = point.step, point.total_steps, None
    if step is not None and total and point.steps_per_s and point.phase == "training":
        left_s = max(0, total - step) / point.steps_per_s
    spent, allowed = view.restarts
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
    """Shows the runs while entered: as a table, as lines, or in log messages without a console."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._live = None
        if console is not None and console.is_terminal:
            from rich.live import Live

            self._live = Live(console=console, auto_refresh=False)
        self._started = time.monotonic()
        self._shown: dict[str, tuple[Row, float]] = {}

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()

    def show_rows(self, rows: Sequence[Row]) -> None:
        """Redraw the table, or print the rows that have changed."""
        if self._console is None:
            return
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
        if self._console is None:
            _log.warning("%s", text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line_interval_s(age_s: float) -> float:
    """Return the seconds between lines of steps: a day's log has some 200 per run (pure)."""
    return min(600.0, max(10.0, age_s / 10))


def is_worth_a_line(row: Row, before: Row | None, *, since_s: float, every_s: float) -> bool:
    """Return whether a row is printed: at once if it changed, steps now and then (pure)."""
    if before is None or row == before:
        return before is None
    changed = {name for name in {*row, *before} if row.get(name) != before.get(name)}
    return not changed <= set(_OF_STEPS) or since_s >= every_s


def line_of(row: Row) -> str:
    """Return a row as one line (pure)."""
    cells = {name: row.get(name, "") for name in (*COLUMNS, "total")}
    parts = [f"{cells['state']} on {cells['nodes']} nodes" if cells["nodes"] else cells["state"]]
    why = f": {row['waits']}" if row.get("waits") else ""
    parts += [f"{cells['queue']}{why}"] if cells["queue"] else []
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
    notes = [f"and {len(rows) - len(shown)} more"] if len(rows) > len(shown) else []
    waiting = (row for row in shown if row.get("waits"))
    notes += dict.fromkeys(f"{row['run']} waits: {row['waits']}" for row in waiting)
    table.caption = escape("\n".join(notes[:2])) or None
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


def results_table(runs: Sequence[RunHandle], ends: Sequence[RunEnd]) -> Table:
    """Return the final table. Long results are cut; the run's ``results`` hold all of them."""
    from rich.markup import escape

    table = _empty_table(("run", "overrides", "status", "result", "restarts"))
    for run, end in zip(runs, ends, strict=True):
        value = _text(end.value)
        value = value if len(value) <= _LONGEST_RESULT else f"{value[:_LONGEST_RESULT]}..."
        cells = [run.name, run.label, end.status, value, str(end.restarts)]
        table.add_row(*(escape(cell) for cell in cells))
    return table


def shown(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """Return the items; with a bar on a terminal while they are taken, if there are many."""
    if total < _MANY or not sys.stderr.isatty():
        return items
    from rich.progress import track

    return track(items, what, total, console=console_for(sys.stderr), transient=True)


def location(dirs: Sequence[Path], sweep: Path) -> str:
    """Return the line that names the folder of the runs, below a table or alone."""
    folder, cwd = dirs[0] if len(dirs) == 1 else sweep, Path.cwd()
    shown = folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder
    return f"{'run' if len(dirs) == 1 else 'runs'} in {shown}{os.sep}"


def console_for(stream: TextIO | None) -> Console:
    """Return a console of the progress and the results; one that writes nothing for no stream."""
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
        """Return the number of characters taken."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            encoding = self._stream.encoding or "ascii"
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except BrokenPipeError:
            raise
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            pass

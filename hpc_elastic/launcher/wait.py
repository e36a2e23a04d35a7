"""Wait until every run has ended, from their files; the scheduler is asked seldom, for all at once.

A run has ended when its result.json is there. If all its tasks have left the queue and it is
not, nobody is left to write it: after a grace period (the file may be on its way through a
network file system) the run counts as lost. `judge` decides that; `Waiter` looks and remembers.

A read that fails says nothing of the run: on NFS a file that is replaced every second may be stale
before it is read, and a server may be away for minutes. The run is looked at again.

The files of a run say nearly everything, so they are read at every poll. The scheduler is asked
once in `ASK_S` while something is expected of it: tasks wait, or a group has changed, or the leader
has stopped writing. While every run has a leader it is asked once in `ASK_LED_S`, for the leaders
of those that form a group ask it themselves, and once in `ASK_SETTLED_S` while all train. It never
spends more than `ANSWER_SHARE` of the time on the answers.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO, cast

from hpc_elastic._util import duration
from hpc_elastic.agent.signals import name_of
from hpc_elastic.errors import RunDirectoryError, SlurmError, WorkerGroupError
from hpc_elastic.launcher.plan import Plan
from hpc_elastic.run.directory import STATUS_SELDOM_S, RunDir, Submission, task_name
from hpc_elastic.run.events import Event, EventLog, EventReader
from hpc_elastic.run.registry import user
from hpc_elastic.shared_files import Mount, is_there, read_json, write_atomic
from hpc_elastic.slurm.job_state import Phase, TaskState, queue_name, remedy
from hpc_elastic.slurm.scheduler import states_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


GRACE_S = 5.0
"""How long a result may be on its way after the last task has gone."""
ASK_S = 4.0
"""Seconds between two questions to the scheduler while something is expected to change."""
ASK_LED_S = 12.0
"""Seconds between two questions while the leaders of all runs write, and no group has changed."""
ASK_SETTLED_S = 60.0
"""Seconds between two questions while every run trains and its leader writes."""
ANSWER_SHARE = 0.05
"""The share of the time that the scheduler may take to answer."""
FRESH_S = 5.0
"""A leader writes status.json about once a second, or every `STATUS_SELDOM_S` and that much later;
after this time it is expected to be gone."""
UNREADABLE_S = 30.0
"""How long a run may be unreadable before the user is told."""

_LONGEST_ERROR = 600
"""Characters of a failed worker's error at most: the run's log files hold all of it."""

Verdict = Literal["going", "gone", "lost"]


def judge(
    states: Iterable[TaskState], *, gone_since: float | None, now: float, grace_s: float = GRACE_S
) -> Verdict:
    """Say what has become of a run that has left no result so far (pure).

    Args:
        states: Its tasks, as far as the scheduler still lists them.
        gone_since: When it was first seen without a task that runs or will; None if it was not.
        now: On the same clock.
        grace_s: How long its result may be on its way.
    """
    if any(state.phase is not Phase.ENDED for state in states):
        return "going"
    gone_for = 0.0 if gone_since is None else now - gone_since
    return "lost" if gone_for > grace_s else "gone"


@dataclass
class _Memory:
    """What is remembered of one run between two looks."""

    gone_since: float | None = None
    last_seen: dict[str, str] = field(default_factory=dict)
    warned: bool = False
    stuck: frozenset[str] = frozenset()
    unreadable: tuple[float, OSError] | None = None
    """Since when, and why; None if the last look went well."""
    num_restarts_told: int = 0
    restarts: dict[int, Event] = field(default_factory=dict)
    """The ``restart`` events read so far, by their number."""
    events: EventReader | None = None
    updated: object = None
    """The time in the status that was read last, by the leader's clock."""
    updated_at: float = -math.inf
    """When that was first read, by ours."""
    group: tuple[object, ...] = ()
    """The phase, the number of nodes and of those that wait, in that status."""
    group_since: float = -math.inf
    """When they were first read."""

    def note(self, status: Mapping[str, Any], now: float) -> None:
        """Remember what status.json says, and since when."""
        if status.get("updated") != self.updated:
            self.updated, self.updated_at = status.get("updated"), now
        group = tuple(status.get(name) for name in ("phase", "nodes", "joined"))
        if group != self.group:
            self.group, self.group_since = group, now

    def pause_s(self, asked_at: float, now: float, fresh_s: float) -> float:
        """Return the time between two questions to the scheduler, for the sake of this run.

        Args:
            asked_at: When the scheduler was asked last.
            now: The time.
            fresh_s: So old the status of a leader that lives may be.
        """
        if self.gone_since is not None:
            return 0.0  # for `GRACE_S`: the run is lost, or its tasks come back
        if now - self.updated_at >= fresh_s or self.group_since > asked_at:
            return ASK_S
        return ASK_SETTLED_S if self.group[0] == "training" else ASK_LED_S


class Waiter:
    """Looks after the runs of one submission.

    Args:
        handle: The submission.
        runs: Its runs.
        display: Shows progress and messages.
        poll_interval_s: Interval between two looks.
        clock: Seconds, monotonic.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        handle: SubmittedTasks,
        runs: Sequence[TrackedRun],
        display: Display,
        *,
        poll_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._handle = handle
        self._runs = list(runs)
        self._display = display
        self._poll_s = poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._outcomes: dict[int, Outcome] = {}
        self._rows: dict[int, RunRow] = {}
        self._memory = [_Memory() for _ in self._runs]
        seldom = any(not Mount.of(run.dir).is_local for run in self._runs[:1])
        self._fresh_s = FRESH_S + seldom * STATUS_SELDOM_S
        self._asked_at, self._answer_s = -math.inf, 0.0
        self._silent = ""
        self._blind = False

    def wait(self) -> list[Outcome]:
        """Block until every run has ended; return how, in the order of the runs."""
        while True:
            self.look()
            if len(self._outcomes) == len(self._runs):
                return [self._outcomes[number] for number in range(len(self._runs))]
            self._sleep(self._poll_s)

    def look(self) -> None:
        """Poll once: the scheduler if it is time, then the files of every run that goes on."""
        tasks = self._ask() if self._is_time_to_ask() else None
        for number, run in enumerate(self._runs):
            if number not in self._outcomes:
                self._look_at(number, run, tasks)
        self._tell_of_unreadable()
        self._display.show([self._rows[number] for number in sorted(self._rows)])

    def _is_time_to_ask(self) -> bool:
        now = self._clock()
        going = [m for n, m in enumerate(self._memory) if n not in self._outcomes]
        pause_s = min((m.pause_s(self._asked_at, now, self._fresh_s) for m in going), default=0.0)
        pause_s = max(pause_s, self._answer_s / ANSWER_SHARE)
        return now - self._asked_at >= pause_s

    def _ask(self) -> Mapping[str, TaskState] | None:
        """Return what the scheduler lists; None while it does not answer, said once."""
        self._asked_at = self._clock()
        try:
            tasks = self._handle.tasks()
        except (SlurmError, OSError) as e:
            slurm = isinstance(e, SlurmError)
            if not self._silent:
                what = "Slurm does not answer" if slurm else "the tasks can not be looked up"
                self._display.say(f"{what}, the runs are not affected: {e}")
            self._silent = "Slurm answers again" if slurm else "the tasks can be looked up again"
            return None
        finally:
            self._answer_s = self._clock() - self._asked_at
        if self._silent:
            self._display.say(self._silent)
        self._silent = ""
        return tasks

    def _look_at(
        self, number: int, run: TrackedRun, listed: Mapping[str, TaskState] | None
    ) -> None:
        states = None if listed is None else list(states_of(run.tasks, listed).values())
        outcome = self._outcome_of(run, self._memory[number], states)
        if outcome is not None:
            self._outcomes[number] = outcome
        before, status = self._rows.get(number), _status(run.paths)
        self._rows[number] = row_of(run, status, states, outcome, before)
        if status is not None:
            self._memory[number].note(status, self._clock())
            self._tell_of_restarts(run, self._memory[number], status)

    def _outcome_of(
        self, run: TrackedRun, memory: _Memory, states: list[TaskState] | None
    ) -> Outcome | None:
        """Return how a run ended; None if it has not, or nobody can say at the moment."""
        try:
            outcome = read_outcome(run)
            if outcome is None and states is not None:
                outcome = self._missing(run, memory, states)
        except OSError as e:
            since = memory.unreadable[0] if memory.unreadable else self._clock()
            memory.unreadable = (since, e)
            return None
        memory.unreadable = None
        return outcome

    def _tell_of_unreadable(self) -> None:
        """Say once that runs can not be read for long, and once that they all can again."""
        found = [memory.unreadable for memory in self._memory if memory.unreadable]
        errors = [error for since, error in found if self._clock() - since >= UNREADABLE_S]
        if errors and not self._blind:
            what = f"{len(errors)} of {len(self._runs)} runs can not be read, and may have ended"
            self._display.say(f"{what}; they are looked at again and again: {errors[0]}")
            self._blind = True
        elif self._blind and not found:
            self._display.say("the runs can be read again")
            self._blind = False

    def _tell_of_restarts(
        self, run: TrackedRun, memory: _Memory, status: Mapping[str, Any]
    ) -> None:
        """Print the error behind each restart, once.

        The events are read only when status.json counts a restart that was not told yet. A file
        system that shows them late is asked again at the next look.
        """
        spent, allowed = int(status.get("restarts") or 0), status.get("max_restarts")
        if spent <= memory.num_restarts_told:
            return
        memory.events = memory.events or EventReader(run.paths.event_logs)
        try:
            _note_restarts(memory.restarts, memory.events.new())
        except OSError:
            return
        while (event := memory.restarts.get(memory.num_restarts_told + 1)) is not None:
            memory.num_restarts_told += 1
            error = str(event.get("failure") or "")
            shown = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}..."
            count = f"restart {memory.num_restarts_told} of {allowed}"
            self._display.say(f"[{run.name}] {run.label}".rstrip() + f": {count}: {shown}")

    def _missing(self, run: TrackedRun, memory: _Memory, states: list[TaskState]) -> Outcome | None:
        """Return the outcome of a run that has no result; None if one may still come."""
        memory.last_seen.update({state.task: _describe(state) for state in states})
        self._warn(memory, run, states)
        self._warn_of_stuck(memory, run, states)
        verdict = judge(states, gone_since=memory.gone_since, now=self._clock(), grace_s=GRACE_S)
        if verdict == "going":
            memory.gone_since = None
        elif memory.gone_since is None:
            memory.gone_since = self._clock()
        return lost(run, memory.last_seen) if verdict == "lost" else None

    def _warn(self, memory: _Memory, run: TrackedRun, states: Iterable[TaskState]) -> None:
        """Tell of the first task that failed while others wait: they may wait for hours."""
        failed = [state for state in states if state.state == "FAILED"]
        if failed and not memory.warned:
            memory.warned = True
            head = f"task {failed[0].task} of {run.label or run.name} failed"
            self._display.say("\n".join([head, *log_tails(run, 1)]))

    def _warn_of_stuck(self, memory: _Memory, run: TrackedRun, states: Iterable[TaskState]) -> None:
        """Tell once of each reason for which tasks would wait for ever."""
        waiting = {s.reason: s.task for s in states if s.state == "PENDING" and remedy(s.reason)}
        for reason in sorted(waiting.keys() - memory.stuck):
            head = f"task {waiting[reason]} of {run.label or run.name} will not start by itself"
            self._display.say(f"{head} ({reason}): {remedy(reason)}")
        memory.stuck |= waiting.keys()


def _note_restarts(restarts: dict[int, Event], events: Iterable[Event]) -> None:
    """Add the ``restart`` events by number; a resumed run counts its restarts from 0 again."""
    for event in events:
        if event["kind"] == "resume":
            restarts.clear()
        elif event["kind"] == "restart":
            restarts[int(event["restarts"])] = event


_SHOWN: dict[str, tuple[type, ...]] = {
    "phase": (str,),
    "updated": (int, float),
    **dict.fromkeys(("nodes", "joined", "step", "total_steps"), (int,)),
    **dict.fromkeys(("restarts", "max_restarts"), (int,)),
    **dict.fromkeys(("loss", "steps_per_s"), (int, float)),
}
"""What is shown of status.json, and of what type it is."""


def _status(run: RunDir) -> dict[str, Any] | None:
    """Return what is shown of the run's status.json, as far as it is what it should be.

    Returns:
        None if there is none, or it cannot be read just now.
    """
    try:
        status = read_json(run.status)
    except OSError:
        return None
    if status is None:
        return None
    return {n: status[n] for n, kind in _SHOWN.items() if isinstance(status.get(n), kind)}


def _describe(state: TaskState) -> str:
    return f"{state.state} ({state.reason})" if state.reason else state.state


# ---- What a person sees of the runs: a live table on a terminal, lines on change elsewhere
# Everything here writes to one rich console, and no run ends because that can not be written to
# (`Unfailing`). Nothing decides anything: `row_of` puts into words what status.json and the
# scheduler say, and the displays show it.


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
class RunRow:
    """One run in the table; texts are empty and numbers None where nothing is known.

    Attributes:
        run: Its name in the sweep.
        overrides: Its overrides.
        state: ``queued``, ``forming`` (tasks run, no group trains yet), ``training``,
            ``requeued``, or how it ended.
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

    def show(self, rows: Sequence[RunRow]) -> None:
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
    before: RunRow | None,
) -> RunRow:
    """Return the row of a run (pure).

    Args:
        run: The run.
        status: Its status.json; None if there is none yet.
        states: Its tasks as listed by the scheduler; None if that did not answer.
        outcome: How it ended; None if it goes on.
        before: Its row at the last look, for what is not known anew.
    """
    row = before or RunRow(run.name, run.label)
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


_PHASES = {"waiting": "forming", "training": "training", "requeued": "requeued"}
"""What is shown for the phases of status.json; how a run ended is told by its outcome."""


def _state_without_status(row: RunRow, states: Sequence[TaskState]) -> str:
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
        self._shown: dict[str, tuple[RunRow, float]] = {}

    def __enter__(self) -> Display:
        """Begin to show."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: lines stay."""

    def show(self, rows: Sequence[RunRow]) -> None:
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


def worth_a_line(row: RunRow, before: RunRow | None, *, since_s: float, every_s: float) -> bool:
    """Say whether a row is printed: at once if it changed, steps and losses now and then (pure)."""
    if before is None or row == before:
        return before is None
    calm = replace(
        row, step=before.step, total_steps=before.total_steps, loss=before.loss,
        left_s=before.left_s,
    )  # fmt: skip
    return calm != before or since_s >= every_s


def line_of(row: RunRow) -> str:
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

    def show(self, rows: Sequence[RunRow]) -> None:
        """Redraw the table."""
        self._live.update(_table(rows, self._console.height - _CHROME_LINES), refresh=True)

    def say(self, text: str) -> None:
        """Print a message above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def fitting(rows: Sequence[RunRow], num_lines: int) -> list[RunRow]:
    """Return the rows to show where not all fit: those that go on first (pure)."""
    if len(rows) <= num_lines:
        return list(rows)
    return sorted(rows, key=lambda row: row.ended)[: max(1, num_lines)]


def _table(rows: Sequence[RunRow], num_lines: int) -> Table:
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


# ---- How a run ended, in the words of result.json, of its log files, and of an exception
# The first failure is what the user must see in full; whoever died of it afterwards is one line.


TAIL_LINES = 20


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        run: The run.
        status: ``lost``: its tasks are gone, and it has left no result; ``cancelled``: for it was
            cancelled by `hpc-elastic cancel`.
        values: Return values of the workers, by global rank.
        restarts: How many restarts it spent.
        error: What to raise; None if it succeeded.
    """

    run: TrackedRun
    status: Literal["succeeded", "failed", "lost", "cancelled"]
    values: dict[int, Any]
    restarts: int
    error: WorkerGroupError | None

    @property
    def value(self) -> Any:
        """Return what rank 0 returned."""
        return self.values.get(0)


def read_outcome(run: TrackedRun) -> Outcome | None:
    """Return how a run ended; None if it has not. One whose files are damaged has failed.

    Raises:
        OSError: its files can not be read just now, so nobody knows.
    """
    try:
        result = read_json(run.paths.result)
        return None if result is None else _outcome(run, result)
    except (ValueError, TypeError, AttributeError) as e:
        told = f"the run has ended, but {run.paths.result}, or what it names, is damaged: {e}"
        see = f"what happened is told by: hpc-elastic events {run.dir}"
        return Outcome(run, "failed", {}, 0, WorkerGroupError(f"{told}\n{see}"))


def _outcome(run: TrackedRun, result: Mapping[str, Any]) -> Outcome:
    restarts = int(result.get("restarts") or 0)
    if result.get("status") == "succeeded":
        return Outcome(run, "succeeded", read_values(run.dir, result), restarts, None)
    return Outcome(run, "failed", {}, restarts, failure(run, result))


def read_values(run: Path, result: Mapping[str, Any]) -> dict[int, Any]:
    """Return what each worker returned in the last round, by global rank."""
    if not result.get("results"):
        return {}
    folder = run / str(result["results"])
    files = sorted(folder.glob("rank-*.json"))
    return {int(f.stem.removeprefix("rank-")): json.loads(f.read_text()) for f in files}


def failure(run: TrackedRun, result: Mapping[str, Any]) -> WorkerGroupError:
    """Return the error of a run whose workers failed."""
    first = result.get("failure")
    victims = list(result.get("victims") or [])
    lines = [f"the run failed: {run.dir}"]
    lines += [_in_full(first)] if first else ["no worker's failure was recorded"]
    lines += [f"  {_where(victim)}: {_how(victim)} ({_when(victim, first)})" for victim in victims]
    lines += [f"logs: {run.dir / 'tasks'}", f"      {Submission(run.submission).logs}"]
    return WorkerGroupError("\n".join(lines), first, victims)


def lost(run: TrackedRun, last_seen: Mapping[str, str]) -> Outcome:
    """Return the outcome of a run whose tasks are gone without a result.

    Args:
        run: The run.
        last_seen: What Slurm last said of each of its tasks.
    """
    mark = run.paths.cancellation()
    if mark is not None:
        error = WorkerGroupError(f"the run was cancelled{mark.by_whom}: {run.dir}")
        return Outcome(run, "cancelled", {}, 0, error)
    lines = [f"the run ended without a result: {run.dir}"]
    lines += [f"  task {task}: {last_seen.get(task, 'never seen')}" for task in run.tasks]
    lines += log_tails(run)
    return Outcome(run, "lost", {}, 0, WorkerGroupError("\n".join(lines)))


COMMANDS = "command"
"""In place of a task, in events that a command writes."""


def mark(run: RunDir, warn: Callable[[str], None]) -> None:
    """Write down that the run is cancelled; the first who does so stays on record.

    Raises:
        RunDirectoryError: it may not be written to.
    """
    if is_there(run.cancelled):
        return
    who = {"user": user(), "host": socket.gethostname(), "time": time.time()}
    try:
        write_atomic(run.cancelled, json.dumps(who) + "\n")
    except PermissionError as e:
        owner = _owner(run.path)
        remedy = "only that user, or root, can cancel it"
        raise RunDirectoryError(f"{run.path} belongs to {owner}: {remedy}") from e
    except OSError as e:
        what = f"{run.cancelled} can not be written ({e.strerror})"
        warn(f"{what}: the tasks are cancelled all the same; look again whether one comes back")
        return
    EventLog(run.events(COMMANDS), COMMANDS).write("cancel", user=who["user"], host=who["host"])


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except (KeyError, OSError):
        return "another user"


def log_tails(run: TrackedRun, num_files: int = 3) -> list[str]:
    """Return the last lines of the run's logs that say anything, and where they are."""
    folder = Submission(run.submission).logs
    said = [(f, text) for f in _logs(folder, run.tasks) if (text := tail(f))]
    shown = [line for file, text in said[:num_files] for line in (f"--- {file}", text)]
    return shown or [f"no task has written anything to {folder}"]


def tail(path: Path, num_lines: int = TAIL_LINES, at_most_bytes: int = 32_768) -> str:
    """Return the last lines of a file; nothing if it can not be read."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - at_most_bytes))
            text = f.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:]).strip()


def _logs(folder: Path, tasks: Sequence[str]) -> Iterable[Path]:
    """Return the logs of tasks, and for those of a gang that of its batch script as well."""
    names = dict.fromkeys(name for task in tasks for name in (task, queue_name(task)))
    return (folder / f"{name}.log" for name in names)


def _in_full(first: Mapping[str, Any]) -> str:
    lines = [f"first failure: {_where(first)}: {_how(first)}"]
    if first.get("traceback"):
        lines.append(str(first["traceback"]).rstrip())
    elif first.get("message") != _how(first) and (first.get("exception") or first.get("message")):
        lines.append(f"{first.get('exception') or 'error'}: {first.get('message') or ''}")
    if first.get("remedy"):
        lines.append(str(first["remedy"]))
    return "\n".join(lines)


def _when(victim: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """Say how a failure follows the first one: of the same attempt, or of a later one."""
    round_ = victim.get("round")
    if first is None or round_ in (None, first.get("round")):
        return "died afterwards"
    return f"failed in a later attempt, round {round_}"


def _where(failed: Mapping[str, Any]) -> str:
    parts = [f"host {failed.get('host')}"]
    parts += [f"rank {failed['rank']}"] if failed.get("rank") is not None else []
    parts += [f"local rank {failed['local_rank']}"] if failed.get("local_rank") is not None else []
    parts += [f"task {failed['task']}"] if failed.get("task") else []
    return ", ".join(parts)


def _how(failed: Mapping[str, Any]) -> str:
    if failed.get("phase") == "hang":
        return "hung"
    if failed.get("signal"):
        number = failed["signal"]
        return f"ended by {name_of(number) if isinstance(number, int) else number}"
    if failed.get("exit_code") is not None:
        if not failed.get("exception") and str(failed.get("message")).startswith("exited with"):
            return str(failed["message"])
        return f"exit code {failed['exit_code']}"
    return str(failed.get("exception") or failed.get("phase") or "failed")


# ---- What a submission looks like from outside, whichever scheduler runs it
# `wait` and the commands know this interface only; `slurm` and `local` implement it.


class SubmittedTasks(Protocol):
    """A submission under way."""

    @property
    def job_ids(self) -> Sequence[str]:
        """Return the job id of each array, in the plan's order."""
        ...

    def tasks(self) -> Mapping[str, TaskState]:
        """Return all that the scheduler still lists, by its own names; one call for all.

        A gang is one entry, by its job id: `hpc_elastic.slurm.scheduler.states_of` takes it apart.

        Raises:
            SlurmError: the scheduler does not answer at the moment.
        """
        ...

    def cancel(self) -> None:
        """End all tasks that still wait or run."""
        ...

    def leave(self) -> str:
        """Let go on Ctrl-C, and return what the user should know: how to go on, or what ended."""
        ...

    def close(self) -> None:
        """Release what the handle holds, once all runs have ended."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """One run that is waited for.

    Attributes:
        dir: The run directory.
        label: What people recognise it by: its overrides.
        tasks: Names of its tasks, by slot.
        submission: The sweep's ``.hpc_elastic``.
    """

    dir: Path
    label: str
    tasks: tuple[str, ...]
    submission: Path

    @property
    def paths(self) -> RunDir:
        """Return the run's files."""
        return RunDir(self.dir)

    @property
    def name(self) -> str:
        """Return its directory relative to the sweep's, by which no two runs are alike."""
        sweep = self.submission.parent
        inside = self.dir != sweep and self.dir.is_relative_to(sweep)
        return str(self.dir.relative_to(sweep)) if inside else self.dir.name


def track(plan: Plan, job_ids: Sequence[str], labels: Sequence[str]) -> list[TrackedRun]:
    """Return the runs of a plan as submitted, in its order."""
    jobs = dict(zip((array.number for array in plan.arrays), job_ids, strict=True))
    gangs = {array.number for array in plan.arrays if array.gang}
    names = [
        tuple(task_name(jobs[k], index, gang=k in gangs) for k, index in tasks)
        for tasks in plan.tasks()
    ]
    return [
        TrackedRun(run.dir, label, tasks, plan.submission)
        for run, label, tasks in zip(plan.runs, labels, names, strict=True)
    ]

"""Wait for submitted runs: poll them, show their progress, and return how they ended.

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

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hpc_elastic._util import sigterm_as_interrupt
from hpc_elastic.errors import SlurmError
from hpc_elastic.launcher.progress import (
    Progress,
    Row,
    console_for,
    location,
    results_table,
    row_of,
)
from hpc_elastic.launcher.run_handle import Outcome, RunHandle
from hpc_elastic.launcher.run_view import GoneTimer, number
from hpc_elastic.run.directory import STATUS_SELDOM_S
from hpc_elastic.run.events import Event, EventReader
from hpc_elastic.shared_files import Mount
from hpc_elastic.slurm.job_state import TaskState, remedy

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


def wait(
    runs: Sequence[RunHandle], *, poll_interval_s: float, out: TextIO | None = None
) -> list[Outcome]:
    """Show the progress of runs until all have ended, then how each ended.

    Args:
        runs: The runs of one submission.
        poll_interval_s: Seconds between two polls.
        out: Where the progress is shown; None: standard output.

    Raises:
        SystemExit: Ctrl-C or SIGTERM. Slurm's runs continue, local runs are ended; which of the
            two, and how to come back, was printed.
    """
    jobs = runs[0].jobs
    console = console_for(out or sys.stdout)
    try:
        with sigterm_as_interrupt(), Progress(console) as progress:
            outcomes = Waiter(runs, progress, poll_interval_s=poll_interval_s).wait()
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
        clock: Seconds, monotonic.
        sleep: Blocks for a number of seconds.
    """

    def __init__(
        self,
        runs: Sequence[RunHandle],
        display: Progress,
        *,
        poll_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._runs = [_WatchedRun(run) for run in runs]
        self._jobs = runs[0].jobs
        self._display = display
        self._poll_interval_s = poll_interval_s
        self._clock = clock
        self._sleep = sleep
        self._fresh_s = FRESH_S + (0.0 if Mount.of(runs[0].dir).is_local else STATUS_SELDOM_S)
        self._listed_at, self._answer_s = -math.inf, 0.0
        self._list_error = ""
        self._warned_unreadable = False

    def wait(self) -> list[Outcome]:
        """Block until every run has ended; return how, in the order of the runs."""
        while True:
            self.poll_runs()
            outcomes = [run.outcome for run in self._runs if run.outcome is not None]
            if len(outcomes) == len(self._runs):
                return outcomes
            self._sleep(self._poll_interval_s)

    def poll_runs(self) -> None:
        """Poll once: the scheduler if it is due, then the files of every run that continues."""
        listed = self._list_tasks() if self._is_list_due() else None
        for run in self._runs:
            if run.outcome is None:
                self._poll_run(run, listed)
        self._report_unreadable()
        self._display.show_rows([run.row for run in self._runs])

    def _is_list_due(self) -> bool:
        now = self._clock()
        pauses = [run.list_pause_s(self._listed_at, now, self._fresh_s) for run in self._runs]
        pause_s = max(min(pauses, default=0.0), self._answer_s / ANSWER_SHARE)
        return now - self._listed_at >= pause_s

    def _list_tasks(self) -> Mapping[str, TaskState] | None:
        """Return the scheduler's list; None while it does not answer, which is reported once."""
        self._listed_at = self._clock()
        try:
            tasks = self._jobs.list_tasks()
        except (SlurmError, OSError) as e:
            what = (
                "Slurm does not answer" if isinstance(e, SlurmError) else "the tasks are unreadable"
            )
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
    gone: GoneTimer = field(default_factory=GoneTimer)
    last_seen: dict[str, str] = field(default_factory=dict)
    warned_failed: bool = False
    warned_reasons: frozenset[str] = frozenset()
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
                elif event["kind"] == "restart":
                    self.restarts[int(event["restarts"])] = event
        except OSError:
            return
        while (event_ := self.restarts.get(self.num_restarts_reported + 1)) is not None:
            self.num_restarts_reported += 1
            yield self.num_restarts_reported, event_

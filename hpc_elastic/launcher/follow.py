"""Follow runs to their ends: `RunFollower` yields what each is doing, as a `RunView`.

A run has ended when its result.json exists. If all its tasks have left the queue without one, no
process is left to write it: after `GONE_S` the run has ended without a result, and is lost or
cancelled. What cannot be read, and a scheduler that does not answer, show nothing; but a cancelled
run has ended once its tasks must have.

The files of a run are read at every poll. The scheduler is queried more rarely, once for all runs:
every `LIST_S` seconds while a change is expected of it, that is, while tasks wait, a group has
changed, or a leader has stopped writing; every `LIST_LED_S` while every run has a leader, since
leaders that form a group query it themselves; every `LIST_SETTLED_S` while all runs train. Its
answers take at most `ANSWER_SHARE` of the time. The tasks of launcher=local are files as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_elastic.report.run_view import CANCELLED, LOST, RunReading, RunView, end_limit_s
from hpc_elastic.run.directory import STATUS_SELDOM_S, Cancellation, RunDir, RunSpec
from hpc_elastic.shared_files import Mount
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

LIST_S = 4.0
"""Seconds between two queries of the scheduler while a change is expected."""
LIST_LED_S = 12.0
"""Seconds between two queries while the leaders of all runs write, and no group has changed."""
LIST_SETTLED_S = 60.0
"""Seconds between two queries while every run trains and its leader writes."""
LIST_SHOWN_S = 10.0
"""`LIST_S` of a display of one run: many users have one open all day."""
LIST_LOCAL_S = 1.0
"""Seconds between two readings of the tasks of launcher=local."""
READ_S = 1.0
"""Seconds between two readings of the files, for a caller that polls a few times a second."""
ANSWER_SHARE = 0.05
"""Share of the time that the scheduler may take to answer."""
FRESH_S = 5.0
"""A leader that lives writes status.json about once a second, or once in `STATUS_SELDOM_S`; its
status is at most this much older."""
GONE_S = 6.0
"""Time after the end of the last task within which a network file system shows the result, and the
scheduler a task that is being requeued."""


class RunFollower:
    """Follows runs. A run that has ended is read no further.

    ``query`` returns None if the scheduler has no answer at the moment: its last list still counts
    then. ``warn`` is called once when it does not answer, and once when it does again. ``list_s``
    and ``read_s`` are the shortest times between two queries of Slurm and two readings of the
    files.
    """

    def __init__(
        self,
        runs: Iterable[Path] = (),
        query: Callable[[Sequence[RunSpec]], QueueSnapshot | None] = take_snapshot,
        *,
        list_s: float = LIST_S,
        read_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._query = query
        self._list_s = list_s
        self._read_s = read_s
        self._clock = clock
        self._warn = warn
        self._runs: list[_FollowedRun] = []
        self._read_at = self._listed_at = -math.inf
        self._answer_s = 0.0
        self._is_silent = False
        self._fresh_s = FRESH_S
        self.add(list(runs))

    def add(self, runs: Sequence[Path]) -> None:
        """Follow further runs from now on."""
        if runs and not Mount.of(runs[0]).is_local:
            self._fresh_s = FRESH_S + STATUS_SELDOM_S
        self._runs += [_FollowedRun(RunDir(run)) for run in runs]
        self._read_at = self._listed_at = -math.inf

    def drop(self, run: Path) -> None:
        """Follow a run no longer."""
        self._runs = [each for each in self._runs if each.run.path != run]

    def poll(self) -> list[RunView]:
        """Return the views of the runs; `RunView.ended` of a run is set once its end is certain."""
        now = self._clock()
        if now - self._read_at >= self._read_s:
            self._read_at = now
            going = [run for run in self._runs if run.view is None or run.view.ended is None]
            for run in going:
                run.read(now)
            self._list_tasks([run for run in going if run.files.result is None], now)
            for run in going:
                run.update_view(self._clock())
        return [run.view for run in self._runs if run.view is not None]

    def _list_tasks(self, runs: Sequence[_FollowedRun], now: float) -> None:
        dues = [run.list_due(self._list_s, self._fresh_s, now) for run in runs]
        if now < max(min(dues, default=math.inf), self._listed_at + self._answer_s / ANSWER_SHARE):
            return
        for run in runs:
            run.prepare_query()
        specs = [run.files.spec for run in runs if run.files.spec is not None]
        queue = self._query(specs) if specs else None
        self._listed_at, self._answer_s = now, self._clock() - now
        for run in runs:
            run.listed_at = now
            with suppress(OSError):  # the names of its tasks cannot be read now
                if queue is not None:
                    run.listed, run.is_news = run.files.tasks_in(queue), True
        whys = [why for run in runs if (why := run.listed[1]) is not None]
        if whys and not self._is_silent:
            what = "it is not known whether the run goes on, but its files are read"
            self._warn(f"{what}: {whys[0]}")
        if not whys and self._is_silent:
            self._warn("its tasks can be listed again")
        self._is_silent = bool(whys)


class _FollowedRun:
    """A run, and what its polls have shown so far; times are the follower's."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.view: RunView | None = None
        self.listed: tuple[Mapping[str, TaskState] | None, str | None] = None, None
        """The tasks as they were listed last, or why they are unknown."""
        self.listed_at = -math.inf
        self.is_news = False
        """Whether `listed` was not judged yet."""
        self.files = RunReading(run)
        self._end = EndDecision()
        self._updated_at = -math.inf
        """When the leader's time in the last status was first read."""
        self._group_since = -math.inf
        """The same for its phase, number of nodes and of joined nodes."""

    def read(self, now: float) -> None:
        """Read what the leader writes, and the rest if it was not read yet."""
        before, self.files = self.files.status, RunReading.read(self.run, self.files)
        status = self.files.status
        if status.get("updated") != before.get("updated"):
            self._updated_at = now
        if any(status.get(name) != before.get(name) for name in ("phase", "nodes", "joined")):
            self._group_since = now

    def list_due(self, list_s: float, fresh_s: float, now: float) -> float:
        """Return when the scheduler is to be queried again for this run."""
        spec = self.files.spec
        if spec is not None and spec.settings.backend == "local":
            return self.listed_at + min(list_s, LIST_LOCAL_S)
        if self._end.since is not None:
            return min(self.listed_at + list_s, self._end.since + GONE_S)
        if now - self._updated_at >= fresh_s or self._group_since > self.listed_at:
            return self.listed_at + list_s
        is_training = self.files.status.get("phase") == "training"
        return self.listed_at + (LIST_SETTLED_S if is_training else max(list_s, LIST_LED_S))

    def prepare_query(self) -> None:
        """Read again what decides whether a run without a task was cancelled, or resumed."""
        has_tasks = self.listed[0] and self._end.since is None
        if self.view is not None and not has_tasks:
            again = RunReading.read(self.run)
            self.files = self.files if again.spec is None else again  # its directory may be gone

    def update_view(self, now: float) -> None:
        view = self.files.view(*self.listed)
        if self.is_news:
            self._end.judge(view, now)
            self.is_news = False
        self.view = self._end.apply(view)


@dataclass
class EndDecision:
    """Decides when a run without a result has ended: no task of it was left for `GONE_S`.

    Attributes:
        since: When it was first seen without a task, on the caller's clock; None if it has one.
            Begin with minus infinity where a run that is never seen with a task has ended.
    """

    since: float | None = None
    _is_over: bool = field(default=False, init=False)
    _phase: str | None = field(default=None, init=False)
    """The phase before it had no task."""

    def judge(self, view: RunView, now: float) -> None:
        """Note whether a task is left, after a query of the scheduler."""
        if view.spec is None or view.unreadable is not None:  # there may be a result
            return
        if view.ended is not None and view.ended.has_result:
            return
        if view.tasks is None:
            if must_have_ended(view.spec, view.cancellation, view.now):
                self._is_over = True
        elif not view.has_no_task_left:
            self.since, self._is_over = None, False
        elif self.since is None:
            self.since = now
        else:
            self._is_over = now - self.since > GONE_S

    def apply(self, view: RunView) -> RunView:
        """Return a view with its end if that is certain, else with its phase before."""
        if view.ended is not None and view.ended.has_result:
            return view
        if self._is_over:
            return view.concluded()
        if view.phase in (LOST, CANCELLED):
            view = replace(view, phase=self._phase or view.phase, ended=None)
        self._phase = view.phase
        return view


def must_have_ended(spec: RunSpec, cancellation: Cancellation | None, now: float) -> bool:
    """Return whether a run was cancelled longer ago than its tasks can take to end (pure)."""
    return cancellation is not None and now - cancellation.time > end_limit_s(spec)

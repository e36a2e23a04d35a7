"""What a run is doing: one view of its files and of its tasks in the scheduler.

`RunView` is a value; `read_view` and `read_views` make it. Every command that shows a run uses it:
`list`, `status`, `report`, and `logs` and `events`, which follow a run to its end by `EndDetector`.
No leader need live, and files may be missing or damaged: `RunView.notes` names them.

A run has ended when it has left a result. A cancelled run leaves none, nor does a run whose tasks
have ended otherwise (scancel by hand, a time limit, a job that Slurm has purged). It has ended when
the scheduler has listed no task of it for a while.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_elastic._util import counted, quoted
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.directory import Cancellation, RunDir, RunSpec
from hpc_elastic.shared_files import is_there, read_json, read_yaml
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.run_tasks import current_names
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

STALE_S = 30.0
"""Age of status.json from which on no leader lives: one writes it about once a second."""

NOT_SUBMITTED = "not submitted"
LOST, CANCELLED, SUCCEEDED = "lost", "cancelled", "succeeded"

GONE_S = 6.0
"""Time after the end of the last task within which a network file system shows the result, and the
scheduler a task that is being requeued."""
_PURGED_S = 300.0
"""Slurm lists ended tasks for this time (MinJobAge). Those of a younger run, if none is listed, may
be newer than the answer of a squeue that is a cache."""
_QUERY_INTERVAL_S = 5.0
_TOO_LARGE = 1e11
"""No time, step or count of a run is as large: the file is damaged."""

Query = Callable[[Sequence[RunSpec]], QueueSnapshot]
"""Lists the tasks of runs, as `take_snapshot` does."""


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        status: ``succeeded``, ``failed``, ``cancelled``, ``lost`` (its tasks ended without a
            result), or ``unknown`` (its result cannot be read).
        time: Unix seconds; of a run without a result, of its last sign.
        why: The first failure, or what else is known; None if nothing is.
        failure: The first failure as in result.json; None if there was none.
    """

    status: str
    time: float
    why: str | None = None
    failure: Mapping[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of a command that has followed the run to its end."""
        return 0 if self.status == SUCCEEDED else 1


@dataclass(frozen=True)
class RunView:
    """A run at one moment.

    Attributes:
        run: The run directory.
        spec: The run as it was submitted; None if run.json cannot be read.
        now: Unix seconds.
        phase: See `phase_of`; or ``not submitted``.
        tasks: Its tasks as the scheduler lists them, by the names of their agents; None if unknown,
            or if it has a result.
        why_unknown: Why `tasks` are unknown; None if they are known, or it has a result.
        is_submitted: Whether a job id of it is known.
        status: The group as its leader wrote it last; None if it has not.
        updated: When that was, in Unix seconds; None as above.
        members: Task and number of workers of each member of that group, by group rank.
        restarts: Restarts that failures of workers have spent, and how many are allowed.
        stragglers: Ranks that are persistently slower than the others, as in status.json.
        warnings: What is wrong with the training though it goes on, as in status.json.
        cancellation: Who cancelled it; None if it was not.
        ended: How it ended; None if it goes on.
        notes: What cannot be found out, and why.
    """

    run: RunDir
    spec: RunSpec | None
    now: float
    phase: str
    tasks: Mapping[str, TaskState] | None
    why_unknown: str | None
    is_submitted: bool
    status: Point | None
    updated: float | None
    members: Sequence[tuple[str, int]]
    restarts: tuple[int, int]
    stragglers: Sequence[Mapping[str, Any]]
    warnings: Sequence[str]
    cancellation: Cancellation | None
    ended: RunEnd | None
    notes: tuple[str, ...]

    @property
    def submitted(self) -> float | None:
        """When the run was submitted, in Unix seconds; None if unknown."""
        return _submitted(self.spec)

    @property
    def has_no_task_left(self) -> bool:
        """Whether the scheduler lists no task of it that runs or may start."""
        return self.is_submitted and self.tasks is not None and _all_ended(self.tasks.values())

    def describe(self) -> str:
        """Return what the run is doing: ``it waits: 2 tasks PENDING (Resources)``."""
        if (end := self.ended) is not None:
            if end.status in (LOST, CANCELLED):
                what = f"it is lost: {end.why}" if end.status == LOST else str(end.why)
                resume = f"hpc-elastic resume {quoted(self.run.path)}"
                return f"{what}; to continue from its last checkpoint: {resume}"
            if end.status == "unknown":
                return f"it has ended, but {self.run.result} cannot be read"
            return f"it has ended: {end.status}"
        if self.spec is None:
            return f"it is not known what it is doing: {'; '.join(self.notes)}"
        if self.tasks is None:
            return f"it is not known what its tasks do: {self.why_unknown}"
        if not self.is_submitted:
            hint = "a script that was submitted by hand is known once its first task has started"
            return f"it was not submitted yet, as far as is known ({hint})"
        if self.has_no_task_left:
            return self.concluded().describe()
        states = list(self.tasks.values())
        runs = any(state.phase is Phase.RUNNING for state in states)
        return f"it {f'is {self.phase}' if runs else 'waits'}: {count_states(states)}"

    def concluded(self) -> RunView:
        """Return the view of this run if it has ended without a result."""
        end = _end_without_result(self.cancellation, self.tasks, self.updated or self.submitted)
        return replace(self, phase=end.status, ended=end)


# ---- reading


def read_view(run: Path, query: Query = take_snapshot) -> RunView:
    """Return the view of a run; the scheduler is queried if it has no result.

    Args:
        run: The run directory. `RunView.spec` is None if it is none.
        query: Queries the scheduler.
    """
    return read_views([run], query)[0]


def read_views(runs: Iterable[Path], query: Query = take_snapshot) -> list[RunView]:
    """Return the views of runs; the scheduler is queried once for all that have no result."""
    files = [_Files.read(RunDir(run)) for run in runs]
    going = [f.spec for f in files if f.spec is not None and f.result is None]
    queue = query(going) if going else QueueSnapshot()
    return [f.view(queue, time.time()) for f in files]


@dataclass(frozen=True)
class _Files:
    """The content of a run's files, as far as they can be read."""

    run: RunDir
    spec: RunSpec | None
    status: Mapping[str, Any]
    result: Mapping[str, Any] | None
    cancellation: Cancellation | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, run: RunDir) -> _Files:
        notes: list[str] = []
        spec = None
        try:
            spec = run.load()
        except RunDirectoryError as e:
            notes.append(str(e))
        status = _read(run.status, notes) or {}
        result = _read(run.result, notes, damaged={"status": "unknown"})
        return cls(run, spec, status, result, run.cancellation(), tuple(notes))

    def view(self, queue: QueueSnapshot, now: float) -> RunView:
        """Return the view of the run."""
        spec, status, result = self.spec, self.status, self.result
        asked = spec if result is None else None
        why_unknown = None if asked is None else queue.why_unknown(asked)
        tasks = None if asked is None else queue.tasks_of(asked)
        notes = self.notes
        if why_unknown is not None:
            notes = (*notes, f"what the tasks do now is unknown: {why_unknown}")
        updated, submitted = number(status.get("updated")), _submitted(spec)
        members = members_of(status)
        is_submitted = spec is not None and bool(current_names(spec))
        phase = phase_of(
            tasks,
            str(status.get("phase") or ""),
            [task for task, _ in members],
            None if result is None else str(result.get("status")),
            age_s=now - (updated or submitted or now),
            cancelled=self.cancellation is not None,
        )
        if spec is not None and not (is_submitted or status or result is not None):
            phase = NOT_SUBMITTED
        spent = (result or {}).get("restarts") or status.get("restarts")
        allowed = spec.max_restarts if spec else status.get("max_restarts")
        listed = status.get("stragglers")
        stragglers = listed if isinstance(listed, list) else []
        last_sign = updated or submitted
        ended = None
        if result is not None:
            found = result.get("failure")
            failure = found if isinstance(found, Mapping) else None
            at = number(result.get("ended")) or last_sign or 0.0
            ended = RunEnd(str(result.get("status")), at, _first_failure(failure), failure)
        if ended is None and phase in (LOST, CANCELLED):
            ended = _end_without_result(self.cancellation, tasks, last_sign)
        return RunView(
            self.run, spec, now, phase, tasks, why_unknown, is_submitted,
            Point.of(status, updated or 0.0) if status else None, updated, members,
            (int(number(spent) or 0), int(number(allowed) or 0)),
            [each for each in stragglers if isinstance(each, Mapping)], warnings_of(status),
            self.cancellation, ended, notes,
        )  # fmt: skip


def warnings_of(status: Mapping[str, Any]) -> list[str]:
    """Return the warnings in status.json."""
    listed = status.get("warnings")
    return [str(text) for text in listed] if isinstance(listed, list) else []


def _read(
    file: Path, notes: list[str], *, damaged: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the content of a JSON file; None if there is none, or it cannot be read now."""
    try:
        return read_json(file)
    except (OSError, ValueError) as e:
        notes.append(f"{file.name} cannot be read: {e}")
        return damaged if isinstance(e, ValueError) else None


def overrides_of(run: Path) -> list[str]:
    """Return the overrides of a run; none for one that a program launched."""
    try:
        overrides = read_yaml(RunDir(run).hydra / "overrides.yaml")
    except OSError:
        return []
    return [str(line) for line in overrides] if isinstance(overrides, list) else []


def label_of(run: Path) -> str:
    """Return the overrides of a run in one line."""
    return overrides_label(overrides_of(run))


def overrides_label(overrides: Sequence[str]) -> str:
    r"""Return the overrides by which people distinguish the runs of a sweep (pure)."""
    ours = r"\+*(?!launcher\.partition=)(launcher[=.]|hydra[./])"
    return " ".join(unescaped(line) for line in overrides if not re.match(ours, line))


def unescaped(override: str) -> str:
    r"""Return an override without the escapes of Hydra's sweeper (pure): ``nodes=1\:4``."""
    return re.sub(r"\\(.)", r"\1", override)


# ---- decisions (pure)


def phase_of(
    tasks: Mapping[str, TaskState] | None,
    reported: str,
    members: Sequence[str],
    result: str | None,
    *,
    age_s: float,
    cancelled: bool = False,
) -> str:
    """Return what a run is doing, by its result, then the scheduler, then its leader (pure).

    Args:
        tasks: Its tasks as the scheduler lists them; None if unknown.
        reported: The phase in status.json; empty if there is none.
        members: The tasks of the group in status.json.
        result: The status in result.json; None if there is none.
        age_s: Age of status.json; without one, time since the submission.
        cancelled: Whether it was cancelled.

    Returns:
        ``queued``, ``starting``, ``waiting``, ``training``, ``requeued``, ``succeeded``,
        ``failed``, ``cancelled``, ``lost`` or ``unknown``.
    """
    if result is not None:
        return result
    if tasks is None:
        return reported or "unknown"
    phases = {state.phase for state in tasks.values()}
    on_nodes = {Phase.RUNNING, Phase.COMPLETING}
    if phases & on_nodes:
        present = [tasks[m].phase in on_nodes for m in members if m in tasks]
        group_exists = any(present) or not present
        return reported if reported and group_exists else "starting"
    if Phase.PENDING in phases:
        return "queued"
    if cancelled:
        return CANCELLED
    return LOST if phases or age_s > _PURGED_S else reported or "unknown"


def count_states(states: Iterable[TaskState]) -> str:
    """Return the number of tasks in each state: ``2 tasks PENDING (Resources)`` (pure)."""
    counts = Counter(f"{s.state} ({s.reason})" if s.reason else s.state for s in states)
    return ", ".join(f"{counted(n, 'task')} {what}" for what, n in counts.items())


def number(value: object) -> float | None:
    """Return a finite number of sensible size; None for anything else (pure)."""
    return float(value) if isinstance(value, int | float) and abs(value) < _TOO_LARGE else None


def _all_ended(states: Iterable[TaskState]) -> bool:
    return all(state.phase is Phase.ENDED for state in states)


def _submitted(spec: RunSpec | None) -> float | None:
    try:
        return datetime.fromisoformat(spec.provenance["time"]).timestamp() if spec else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _end_without_result(
    cancellation: Cancellation | None,
    tasks: Mapping[str, TaskState] | None,
    last_sign: float | None,
) -> RunEnd:
    if cancellation is not None:
        at = max(cancellation.time, last_sign or 0.0)
        return RunEnd(CANCELLED, at, f"it was cancelled{cancellation.by_whom}")
    states = count_states((tasks or {}).values())
    why = f"its tasks have ended without a result{f': {states}' if states else ''}"
    return RunEnd(LOST, last_sign or 0.0, why)


def _first_failure(failure: Mapping[str, Any] | None) -> str | None:
    """Return a failure in one line."""
    if not failure:
        return None
    where = f"rank {failure.get('rank')} on {failure.get('host')}"
    if failure.get("phase") == "start":
        where = f"task {failure.get('task')} on {failure.get('host') or 'an unknown node'}"
    what = str(failure.get("message") or "").strip().partition("\n")[0]
    error = failure.get("exception")
    signal, code = failure.get("signal"), failure.get("exit_code")
    how = f"ended by {signal}" if signal else f"{error}: {what}" if error else what
    return f"{where}: {how or f'exit code {code}'}"


def members_of(status: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return task and number of workers of each member in status.json; none if it is damaged."""
    try:
        return [(str(m["task"]), int(m["nproc"])) for m in status.get("members") or ()]
    except (TypeError, ValueError, KeyError, OverflowError):
        return []


# ---- the end


@dataclass
class AbsenceTimer:
    """Measures how long no task of a run is left: without a result it has ended after a while.

    Attributes:
        limit_s: Seconds without a task after which the run has ended.
        since: When it was first seen without a task, on the caller's clock; None if it has one.
    """

    limit_s: float = GONE_S
    since: float | None = None

    def update(self, states: Iterable[TaskState], now: float) -> None:
        """Note the tasks that the scheduler lists now."""
        if not _all_ended(states):
            self.since = None
        elif self.since is None:
            self.since = now

    def is_over(self, now: float) -> bool:
        """Return whether no task has been left for longer than `limit_s`."""
        return self.since is not None and now - self.since > self.limit_s


class EndDetector:
    """Detects the end of a run, for a caller that polls it a few times a second.

    Args:
        run: The run.
        query: Queries the scheduler.
        clock: Monotonic seconds.
        warn: Called once when the scheduler does not answer, and once when it does again.

    Raises:
        RunDirectoryError: `run` is no run directory.
    """

    def __init__(
        self,
        run: RunDir,
        query: Query = take_snapshot,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run = run
        self._spec = run.load()
        self._query = query
        self._clock = clock
        self._warn = warn
        self._is_silent = False
        self._query_at = 0.0
        self._gone = AbsenceTimer()
        self._view: RunView | None = None

    def poll(self) -> RunView | None:
        """Return the view of the run, whose ``ended`` is set, if it has ended; else None."""
        if is_there(self._run.result):
            view = read_view(self._run.path, lambda specs: QueueSnapshot())
            if view.ended is not None and view.tasks is None:
                return view
        now = self._clock()
        if now >= self._query_at:
            self._query_at = now + _QUERY_INTERVAL_S
            self._view = read_view(self._run.path, self._query)
            why = self._view.why_unknown
            if why is not None and not self._is_silent:
                what = "it is not known whether the run goes on, but its files are read"
                self._warn(f"{what}: {why}")
            if why is None and self._is_silent:
                self._warn("its tasks can be listed again")
            self._is_silent = why is not None
            if self._view.tasks is None:
                if must_have_ended(self._spec, self._view.cancellation, self._view.now):
                    self._gone.since = -math.inf
            elif self._view.is_submitted:
                self._gone.update(self._view.tasks.values(), now)
        is_over = self._view is not None and self._gone.is_over(now)
        return self._view.concluded() if is_over and self._view is not None else None


def must_have_ended(spec: RunSpec, cancellation: Cancellation | None, now: float) -> bool:
    """Return whether a run was cancelled longer ago than its tasks can take to end (pure).

    Args:
        spec: The run.
        cancellation: Who cancelled it; None if it was not.
        now: Unix seconds.
    """
    return cancellation is not None and now - cancellation.time > end_limit_s(spec)


def stop_s(spec: RunSpec) -> float:
    """Return the seconds between SIGTERM and the end of a run's tasks, at most (pure)."""
    if spec.launcher == "slurm":
        return spec.kill_wait_s
    return max(spec.kill_wait_s, spec.agent.stop_timeout_s)


def end_limit_s(spec: RunSpec) -> float:
    """Return the seconds that the tasks of a run may take to end once they are cancelled (pure)."""
    return stop_s(spec) + 30.0

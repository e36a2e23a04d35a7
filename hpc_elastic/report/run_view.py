"""What a run is doing: one view of its files and of its tasks in the scheduler.

`RunView` is a value. `read_view` and `read_views` make it from one reading of the files and one
query of the scheduler; `launcher.follow.RunFollower` makes it again and again, to the end of the
run. No leader need live, and files may be missing or damaged: `RunView.notes` names them.

A run has ended when it has left a result. A cancelled run leaves none, nor does a run whose tasks
have ended otherwise (scancel by hand, a time limit, a job that Slurm has purged). It has ended when
the scheduler lists no task of it. A follower looks twice, since a task that is being requeued may
be in no list for a moment.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_elastic._util import counted, quoted
from hpc_elastic.errors import RunDirectoryError, WorkerGroupError
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.report.progress_log import TRAINING, Point
from hpc_elastic.run.directory import Cancellation, RunDir, RunSpec
from hpc_elastic.shared_files import parse_yaml, read_json
from hpc_elastic.slurm.job_state import Phase, TaskState, words_of
from hpc_elastic.slurm.run_tasks import current_names
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

STALE_S = 30.0  # age of status.json, written about once a second, from which on no leader lives

NOT_SUBMITTED = "not submitted"
LOST, CANCELLED, SUCCEEDED = "lost", "cancelled", "succeeded"

_PURGED_S = 300.0
"""Slurm lists ended tasks for this time (MinJobAge). Those of a younger run, if none is listed, may
be newer than the answer of a squeue that is a cache."""
_TOO_LARGE = 1e11  # no time, step or count of a run is as large: the file is damaged

Query = Callable[[Sequence[RunSpec]], QueueSnapshot]  # lists the tasks of runs, as `take_snapshot`


@dataclass(frozen=True)
class RunEnd:
    """How a run ended."""

    status: str
    """``succeeded``, ``failed``, ``cancelled``, ``lost`` (its tasks ended without a result), or
    ``unknown`` (its result cannot be read)."""
    time: float  # Unix seconds; of a run without a result, of its last sign
    why: str | None = None
    failure: Mapping[str, Any] | None = None  # the first one, as in result.json
    restarts: int = 0
    values: Mapping[int, Any] = field(default_factory=dict)
    """Return values of the workers, by global rank, if they were read (`RunHandle.read_end`)."""
    error: WorkerGroupError | None = None
    """The error for a program that waits, if it was made; None if the run succeeded."""

    @property
    def exit_code(self) -> int:
        """Exit code of a command that has followed the run to its end."""
        return 0 if self.status == SUCCEEDED else 1

    @property
    def value(self) -> Any:
        """Return value of rank 0."""
        return self.values.get(0)

    @property
    def has_result(self) -> bool:
        """Whether the run has left a result."""
        return self.status not in (LOST, CANCELLED)

    def to_json(self) -> dict[str, Any]:
        """Return what commands print of it."""
        return {name: getattr(self, name) for name in ("status", "time", "why", "failure")}


@dataclass(frozen=True)
class RunView:
    """A run at one moment; ``now`` is in Unix seconds."""

    run: RunDir
    spec: RunSpec | None  # the run as it was submitted; None if run.json cannot be read
    now: float
    phase: str  # see `phase_of`; or ``not submitted``
    tasks: Mapping[str, TaskState] | None
    """Its tasks as the scheduler lists them, by the names of their agents; None if unknown, or if
    it has a result."""
    why_unknown: str | None
    is_submitted: bool
    submitted: float | None  # when it was submitted, in Unix seconds; None if unknown
    status: Point | None
    updated: float | None  # when the leader wrote `status`, in Unix seconds; None if it has not
    members: Sequence[tuple[str, int]]  # of that group, by group rank: task and number of workers
    num_joined: int
    restarts: tuple[int, int]  # that failures of workers have spent, and how many are allowed
    stragglers: Sequence[Mapping[str, Any]]  # persistently slow ranks, as in status.json
    warnings: Sequence[str]  # what is wrong though the training continues, as in status.json
    cancellation: Cancellation | None
    ended: RunEnd | None
    notes: tuple[str, ...]
    unreadable: OSError | None  # why its result cannot be read at the moment; None if it can

    @property
    def trains(self) -> bool:
        """Whether its group trains now."""
        return self.phase == TRAINING and self.ended is None

    @property
    def why_waits(self) -> str | None:
        """Why its first task waits, in words, while no group trains; None if unknown."""
        spec, states = self.spec, (self.tasks or {}).values()
        waiting = [state for state in states if state.phase is Phase.PENDING]
        if spec is None or self.trains or not waiting or spec.settings.backend == "local":
            return None
        first = min(waiting, key=lambda state: state.slot or 0)
        launcher = spec.pool_of(first.slot or 0).launcher
        names = (getattr(launcher, key, None) for key in ("account", "qos"))
        return words_of(first.reason, *names)

    @property
    def has_no_task_left(self) -> bool:
        """Whether the scheduler lists no task of it that runs or may start."""
        if self.tasks is None or not self.is_submitted:
            return False
        return all(state.phase is Phase.ENDED for state in self.tasks.values())

    def describe(self) -> str:
        """Return what the run is doing: ``it waits: 2 tasks PENDING (Resources)``."""
        if (end := self.ended) is not None:
            if end.status == "unknown":
                return f"it has ended, but {self.run.result} cannot be read"
            if end.has_result:
                return f"it has ended: {end.status}"
            what = f"it is lost: {end.why}" if end.status == LOST else str(end.why)
            resume = f"hpc-elastic resume {quoted(self.run.path)}"
            return f"{what}; to continue from its last checkpoint: {resume}"
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
        why = f": {self.why_waits}" if self.why_waits and not runs else ""
        return f"it {f'is {self.phase}' if runs else 'waits'}: {count_states(states)}{why}"

    def concluded(self) -> RunView:
        """Return the view of this run if it has ended without a result."""
        end = _end_without_result(self.cancellation, self.tasks, self.updated or self.submitted)
        return replace(self, phase=end.status, ended=end)


def read_view(run: Path, query: Query = take_snapshot) -> RunView:
    """Return the view of a run directory; the scheduler is queried if it has no result."""
    return read_views([run], query)[0]


def read_views(runs: Iterable[Path], query: Query = take_snapshot) -> list[RunView]:
    """Return the views of runs; the scheduler is queried once for all that have no result."""
    files = [RunReading.read(RunDir(run)) for run in runs]
    going = [f.spec for f in files if f.spec is not None and f.result is None]
    queue = query(going) if going else QueueSnapshot()
    return [f.view(*f.tasks_in(queue)) for f in files]


@dataclass(frozen=True)
class RunReading:
    """The content of a run's files, as far as they can be read."""

    run: RunDir
    spec: RunSpec | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] | None = None
    cancellation: Cancellation | None = None
    notes: tuple[str, ...] = ()
    unreadable: OSError | None = None

    @classmethod
    def read(cls, run: RunDir, known: RunReading | None = None) -> RunReading:
        """Read the files of a run; those that its leader writes alone, if the spec is known."""
        notes, is_first = list[str](), False
        if known is None or known.spec is None:
            known, is_first = cls(run), True
            try:
                known = replace(known, spec=run.load())
            except RunDirectoryError as e:
                notes.append(str(e))
        status, _ = _read(run.status, notes)
        result, unreadable = _read(run.result, notes, damaged={"status": "unknown"})
        return replace(
            known, status=known.status if status is None else status,  # replaced at this moment
            result=result, notes=tuple(notes), unreadable=unreadable,
            cancellation=run.cancellation() if is_first else known.cancellation,
        )  # fmt: skip

    def tasks_in(self, queue: QueueSnapshot) -> tuple[dict[str, TaskState] | None, str | None]:
        """Return the tasks of the run in an answer of the scheduler; if unknown, None and why."""
        if self.spec is None or self.result is not None:
            return None, None
        return queue.tasks_of(self.spec), queue.why_unknown(self.spec)

    def view(
        self, tasks: Mapping[str, TaskState] | None, why_unknown: str | None = None
    ) -> RunView:
        """Return the view of the run with its tasks as in `RunView`."""
        spec, status, result, now = self.spec, self.status, self.result, time.time()
        if result is not None:
            tasks = why_unknown = None
        notes = self.notes
        if why_unknown is not None:
            notes = (*notes, f"what the tasks do now is unknown: {why_unknown}")
        updated, submitted = number(status.get("updated")), _submitted(spec)
        members = members_of(status)
        phase = phase_of(
            tasks, str(status.get("phase") or ""), [task for task, _ in members],
            None if result is None else str(result.get("status")),
            age_s=now - (updated or submitted or now), cancelled=self.cancellation is not None,
        )  # fmt: skip
        is_submitted = bool(tasks) or result is not None
        with suppress(OSError):  # not as far as is known
            is_submitted = is_submitted or (spec is not None and bool(current_names(spec)))
        if spec is not None and not (is_submitted or status):
            phase = NOT_SUBMITTED
        spent = (result or {}).get("restarts") or status.get("restarts")
        allowed = spec.settings.launcher.max_restarts if spec else status.get("max_restarts")
        last_sign = updated or submitted
        ended = None if result is None else end_with_result(result, last_sign or 0.0)
        if ended is None and phase in (LOST, CANCELLED):
            ended = _end_without_result(self.cancellation, tasks, last_sign)
        return RunView(
            self.run, spec, now, phase, tasks, why_unknown, is_submitted, submitted,
            Point.of(status, updated or 0.0) if status else None, updated, members,
            int(number(status.get("joined")) or 0),
            (int(number(spent) or 0), int(number(allowed) or 0)),
            [each for each in _list_in(status, "stragglers") if isinstance(each, Mapping)],
            list(map(str, _list_in(status, "warnings"))),
            self.cancellation, ended, notes, self.unreadable,
        )  # fmt: skip


def _list_in(status: Mapping[str, Any], name: str) -> list[Any]:
    found = status.get(name)
    return found if isinstance(found, list) else []


def _read(
    file: Path, notes: list[str], *, damaged: dict[str, Any] | None = None
) -> tuple[dict[str, Any] | None, OSError | None]:
    """Return the content of a JSON file, or None; and why it cannot be read now, or None."""
    try:
        return read_json(file), None
    except (OSError, ValueError) as e:
        notes.append(f"{file.name} cannot be read: {e}")
        return (damaged, None) if isinstance(e, ValueError) else (None, e)


def overrides_of(run: Path, spec: RunSpec | None) -> list[str]:
    """Return the overrides of a run; none for one that a program launched."""
    name = "overrides.yaml"
    try:
        overrides = parse_yaml(RunDir(run).hydra_text(name, spec), RunDir(run).hydra / name)
    except OSError:
        return []
    return [str(line) for line in overrides] if isinstance(overrides, list) else []


def label_of(run: Path, spec: RunSpec | None) -> str:
    """Return the overrides of a run in one line."""
    return overrides_label(overrides_of(run, spec))


def overrides_label(overrides: Sequence[str]) -> str:
    r"""Return the overrides by which people distinguish the runs of a sweep (pure)."""
    ours = r"\+*(?!launcher\.partition=)(launcher[=.]|hydra[./])"
    return " ".join(unescaped(line) for line in overrides if not re.match(ours, line))


def unescaped(override: str) -> str:
    r"""Return an override without the escapes of Hydra's sweeper (pure): ``nodes=1\:4``."""
    return re.sub(r"\\(.)", r"\1", override)


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

    It is ``queued``, ``starting``, ``waiting``, ``training``, ``requeued``, ``succeeded``,
    ``failed``, ``cancelled``, ``lost`` or ``unknown``. ``tasks`` is None if the scheduler does not
    answer; ``reported`` and ``members`` are from status.json, ``result`` is the status in
    result.json. ``age_s`` is the age of status.json, or without one the time since the submission.
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


def _submitted(spec: RunSpec | None) -> float | None:
    try:
        return datetime.fromisoformat(spec.provenance["time"]).timestamp() if spec else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def end_with_result(result: Mapping[str, Any], last_sign: float = 0.0) -> RunEnd:
    """Return the end of a run that has left this result.json; without a time, at the last sign."""
    found, restarts = result.get("failure"), int(number(result.get("restarts")) or 0)
    failure = found if isinstance(found, Mapping) else None
    at = number(result.get("ended")) or last_sign
    why = Failure.of(failure).summary().partition("\n")[0] if failure else None
    return RunEnd(str(result.get("status")), at, why, failure, restarts)


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


def members_of(status: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return task and number of workers of each member in status.json; none if it is damaged."""
    try:
        return [(str(m["task"]), int(m["nproc"])) for m in status.get("members") or ()]
    except (TypeError, ValueError, KeyError, OverflowError):
        return []


def stop_s(spec: RunSpec) -> float:
    """Return the seconds between SIGTERM and the end of a run's tasks, at most (pure)."""
    settings, is_slurm = spec.settings.launcher, spec.settings.backend == "slurm"
    own_s = 0.0 if is_slurm else settings.agent.stop_timeout_s
    return max(own_s, *(terms.kill_wait_s for terms in spec.terms))


def end_limit_s(spec: RunSpec) -> float:
    """Return the seconds that the tasks of a run may take to end once they are cancelled (pure)."""
    return stop_s(spec) + 30.0


# ---- failures of workers in words, from their entries in result.json


def failures_in_full(
    first: Mapping[str, Any] | None, later: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the lines of the first failure in full, and one for each later one."""
    lines = ["no worker's failure was recorded"]
    if first:
        failure = Failure.of(first)
        lines = [f"first failure: {_head(failure)}"]
        if failure.traceback:
            lines.append(quoted_text(str(failure.traceback).rstrip()))
        elif failure.message != failure.cause and (failure.exception or failure.message):
            lines.append(quoted_text(f"{failure.exception or 'error'}: {failure.message}"))
        lines += [str(failure.remedy)] if failure.remedy else []
    for failed in map(Failure.of, later):
        when = "died afterwards"
        if first is not None and failed.round not in (None, first.get("round")):
            when = f"failed in a later attempt, round {failed.round}"
        lines.append(f"  {_head(failed)} ({when})")
    return lines


def _head(failure: Failure) -> str:
    is_named = failure.phase in ("start", "lead") or failure.task is None
    what = failure.cause or failure.exception or "failed"
    return f"{failure.place}{'' if is_named else f', task {failure.task}'}: {what}"


def quoted_text(text: str) -> str:
    """Return a text of the training's own so that it is not taken for ours."""
    return "\n".join(f"    {line}" for line in text.split("\n"))

"""What can be found out about one run, from its files and its scheduler: the facts of `status`.

Nothing here needs a server, a running leader or all of the files. What is missing is said in
`RunFacts.notes`, and what it would have told is None.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_elastic._util import counted
from hpc_elastic.checkpoint.store import Store, directories
from hpc_elastic.cli.options import quoted
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.launcher.control import bound_s
from hpc_elastic.launcher.wait import Cancellation, cancellation
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.node_time import Account, account
from hpc_elastic.report.progress_log import Point, Rates, rates, read_points
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.event_schema import sound
from hpc_elastic.run.events import read_events
from hpc_elastic.shared_files import is_there, read_json
from hpc_elastic.slurm.job_state import Phase, TaskState
from hpc_elastic.slurm.requeue import current_names
from hpc_elastic.slurm.scheduler import QueueSnapshot, take_snapshot

STALE_S = 30.0
"""A leader writes status.json about once a second; older than that, nobody leads."""

LOST, CANCELLED = "lost", "cancelled"
"""Of a run that has ended without a result."""
_TOO_MUCH = 1e11
"""No time, step or count of a run is that large: the file is damaged."""
NOT_SUBMITTED = "not submitted"
"""What a run is doing whose script was only rendered."""

Event = Mapping[str, Any]


def look(run: Path, asks: Callable[[Sequence[RunSpec]], QueueSnapshot] = take_snapshot) -> RunFacts:
    """Find out about a run.

    Args:
        run: Its directory.
        asks: Asks the scheduler.

    Raises:
        RunDirectoryError: this is no run directory, nor what is left of one.
    """
    notes: list[str] = []
    files = RunDir(run)
    spec = _spec(files, notes)
    status = _object(files.status, notes)
    result = _object(files.result, notes)
    history = EventIndex(_events(run, notes))
    if spec is None and status is None and result is None and not history.events:
        remedy = "give a run directory, or an id of `hpc-elastic list`"
        raise RunDirectoryError(f"{run} is no run directory, nor what is left of one: {remedy}")
    queue = QueueSnapshot() if spec is None or result is not None else asks([spec])
    unknown = None if spec is None or result is not None else queue.why_unknown(spec)
    if unknown is not None:
        notes.append(f"what the tasks do now is unknown: {unknown}")
    states = None if spec is None or result is not None else queue.tasks_of(spec)
    mark = cancellation(files) if result is None else None
    return _facts(_Found(run, spec, status, result, history, states, mark), time.time(), notes)


@dataclass(frozen=True)
class _Found:
    """What was read."""

    run: Path
    spec: RunSpec | None
    status: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    history: EventIndex
    states: Mapping[str, TaskState] | None
    mark: Cancellation | None


def _facts(found: _Found, now: float, notes: list[str]) -> RunFacts:
    spec, status = found.spec, found.status or {}
    points = read_points(RunDir(found.run).progress)
    updated = number(status.get("updated"))
    if updated is not None:
        points.append(Point.of(status, updated))
    named = current_names(spec) if spec is not None else []
    submitted = _submitted(spec)
    age_s = now - (updated or submitted or now)
    phase = phase_of(
        found.states, status, found.result, age_s=age_s, cancelled=found.mark is not None
    )
    if spec is not None and not (named or status or found.result):
        phase = NOT_SUBMITTED
    ended = _ended(found, phase, points)
    until = now if ended is None else ended.time
    running, waiting = _by_phase(found.states, named)
    spent = account(
        found.history, points, now=until, running=running, waiting=waiting, submitted=submitted,
    )  # fmt: skip
    lives = phase == "training" and ended is None
    stale = updated is not None and now - updated > STALE_S
    if stale and ended is None and phase in ("training", "waiting"):
        notes.append(f"no leader has written status.json for {now - (updated or now):.0f} s")
    last = _last_known(points, lives=lives)
    return RunFacts(
        run_id=spec.run_id if spec else found.run.name,
        directory=found.run,
        launcher=spec.launcher if spec else "unknown",
        label=label_of(found.run),
        phase=phase,
        now=now,
        updated=updated,
        submitted=submitted,
        nodes=(last.nodes if last and lives else 0, spec.min_nodes, spec.max_nodes)
        if spec
        else None,
        status=last,
        round=int(number(status.get("round")) or 0),
        restarts=_restarts(spec, status, found.result),
        tasks=_tasks(found, named, {node.task: node.ended_by for node in spent.nodes}),
        pace=rates(points) if lives else Rates(),
        saved=_saved(found.run, points),
        departures=Counter(node.ended_by for node in spent.nodes if node.ended_by),
        account=spent,
        ended=ended,
        notes=notes,
        spec=spec,
        history=found.history,
        points=points,
        stragglers=_stragglers(status) if lives else (),
    )


# ---- reading -------------------------------------------------------------------------------


def _spec(files: RunDir, notes: list[str]) -> RunSpec | None:
    try:
        return files.load()
    except RunDirectoryError as e:
        notes.append(str(e))
        return None


def _object(file: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        return read_json(file)
    except (OSError, ValueError) as e:
        notes.append(f"{file.name} can not be read: {e}")
        return None


def _events(run: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        read = read_events(RunDir(run).event_logs)
        whole = sound(read)
        if len(whole) < len(read):
            notes.append(f"damaged events are left out: {len(read) - len(whole)}")
        return whole
    except (OSError, ValueError, KeyError, TypeError) as e:
        notes.append(f"the events can not be read: {e}")
        return []


def label_of(run: Path) -> str:
    """Return the overrides of a run in one line."""
    from hpc_elastic.launcher.session import overrides_label

    return overrides_label(overrides_of(run))


def overrides_of(run: Path) -> list[str]:
    """Return the overrides of a run; what a program launched has none."""
    import yaml

    try:
        overrides = yaml.safe_load((RunDir(run).hydra / "overrides.yaml").read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []
    return [str(line) for line in overrides] if isinstance(overrides, list) else []


def _submitted(spec: RunSpec | None) -> float | None:
    try:
        return datetime.fromisoformat(spec.provenance["time"]).timestamp() if spec else None
    except (KeyError, TypeError, ValueError):
        return None


def _saved(run: Path, points: Sequence[Point]) -> SavedCheckpoint | None:
    """Return the newest checkpoint: on disk, or announced by a framework that keeps its own."""
    there = _on_disk(RunDir(run))
    announced = _announced(points)
    if announced is None or (there is not None and there.step >= announced[0]):
        return there
    return SavedCheckpoint(*announced, 0 if there is None else there.kept)


def _announced(points: Sequence[Point]) -> tuple[int, float] | None:
    """Return the newest step whose checkpoint was announced, and when it was told of first.

    Who trains on from before a step did not find its checkpoint: that was lost with its nodes,
    however long its announcement is repeated.
    """
    told: dict[int, float] = {}
    lost = None
    for point in points:
        if point.step is not None:
            told = {step: time for step, time in told.items() if step <= point.step}
        if point.checkpoint is None:
            continue
        if point.step is not None and point.step < point.checkpoint:
            lost = point.checkpoint
        elif point.checkpoint != lost:
            told.setdefault(point.checkpoint, point.time)
            lost = None
    return max(told.items(), default=None)


def _on_disk(run: RunDir) -> SavedCheckpoint | None:
    try:
        stores = [Store(directory) for directory in directories(run)]
        found = [(step, store.folder(step)) for store in stores for step in store.steps()]
        if not found:
            return None
        step, folder = max(found)
        return SavedCheckpoint(step, folder.stat().st_mtime, len(found))
    except OSError:  # removed meanwhile, or a server that is away
        return None


# ---- deciding (pure) -----------------------------------------------------------------------


def phase_of(
    states: Mapping[str, TaskState] | None,
    status: Mapping[str, Any],
    result: Mapping[str, Any] | None,
    *,
    age_s: float,
    cancelled: bool = False,
) -> str:
    """Return what a run is doing: the leader's word, unless the scheduler knows better (pure).

    Args:
        states: Its tasks, as the scheduler lists them; None: nobody knows.
        status: status.json.
        result: result.json; None: it has not ended.
        age_s: How old status.json is; without one, how long ago the run was submitted.
        cancelled: Whether somebody has cancelled it.

    Returns:
        ``queued``, ``starting``, ``waiting``, ``training``, ``requeued``, ``succeeded``,
        ``failed``, ``cancelled``, ``lost`` or ``unknown``.
    """
    if result is not None:
        return str(result.get("status"))
    told = str(status.get("phase") or "")
    if states is None:
        return told or "unknown"
    phases = {state.phase for state in states.values()}
    if phases & {Phase.RUNNING, Phase.LEAVING}:
        return told if told and _has_node(status, states) else "starting"
    if Phase.PENDING in phases:
        return "queued"
    if cancelled:
        return CANCELLED
    return LOST if phases or age_s > STALE_S else told or "unknown"


def _has_node(status: Mapping[str, Any], states: Mapping[str, TaskState]) -> bool:
    """Tell whether the group that status.json shows, if it shows one, is still there."""
    members = [task for task, _ in _members(status)]
    there = [states[m].phase in (Phase.RUNNING, Phase.LEAVING) for m in members if m in states]
    return any(there) or not there


def _by_phase(
    states: Mapping[str, TaskState] | None, named: Sequence[str]
) -> tuple[set[str] | None, set[str]]:
    """Return which tasks have a node (None: nobody knows), and which wait for one."""
    if states is None:
        return None, set()
    has_node = (Phase.RUNNING, Phase.LEAVING)
    running = {name for name in named if name in states and states[name].phase in has_node}
    waiting = {name for name in named if name in states and states[name].phase is Phase.PENDING}
    return running, waiting


def _last_known(points: Sequence[Point], *, lives: bool) -> Point | None:
    """Return the last point, with what is known of the training from those before it.

    Once nothing trains, a saved step was made, though the last heartbeat may not have told of it.
    """
    if not points:
        return None
    last = asdict(points[-1])
    for name in ("step", "total_steps", "loss", "samples", "checkpoint"):
        values = (getattr(p, name) for p in reversed(points))
        last[name] = next((value for value in values if value is not None), None)
    if not lives and None not in (last["step"], last["checkpoint"]):
        last["step"] = max(last["step"], last["checkpoint"])
    return Point(**last)


def _ended(found: _Found, phase: str, points: Sequence[Point]) -> EndedTask | None:
    result = found.result
    if result is not None:
        failure = result.get("failure")
        failure = failure if isinstance(failure, Mapping) else None
        return EndedTask(phase, number(result.get("ended")) or 0.0, _why(failure), failure)
    if phase not in (LOST, CANCELLED):
        return None
    heard = [*(float(e["time"]) for e in found.history.events), *(p.time for p in points)]
    if found.mark is not None:
        at = max(found.mark.time, max(heard, default=0.0))
        return EndedTask(phase, at, f"it was cancelled{found.mark.by_whom}", None)
    states = (found.states or {}).values()
    counts = Counter(f"{s.state} ({s.reason})" if s.reason else s.state for s in states)
    tasks = ", ".join(f"{n} {state}" for state, n in counts.items())
    why = f"its tasks are gone, and it has left no result{f': {tasks}' if tasks else ''}"
    return EndedTask(phase, max(heard, default=_submitted(found.spec) or 0.0), why, None)


def _why(failure: Mapping[str, Any] | None) -> str | None:
    """Return the first failure in one line."""
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


def _restarts(
    spec: RunSpec | None, status: Mapping[str, Any], result: Mapping[str, Any] | None
) -> tuple[int, int]:
    spent = (result or {}).get("restarts") or status.get("restarts") or 0
    allowed = spec.max_restarts if spec else status.get("max_restarts") or 0
    return int(number(spent) or 0), int(number(allowed) or 0)


def _tasks(
    found: _Found, named: Sequence[str], ended_by: Mapping[str, str | None]
) -> list[RunTask]:
    """Return the run's tasks by slot; what is only known by its events where nothing else is."""
    begun = {e["task"]: e for e in found.history.of("task")}
    ranks = _ranks(found)
    states = found.states or {}
    return [
        _task(
            name, slot, states.get(name), begun.get(name), ranks.get(name), ended_by.get(name),
            is_known=found.states is not None or found.result is not None,
        )
        for slot, name in enumerate(named or begun)
    ]  # fmt: skip


def _task(
    name: str,
    slot: int,
    state: TaskState | None,
    begun: Event | None,
    ranks: tuple[int, int] | None,
    ended_by: str | None,
    *,
    is_known: bool,
) -> RunTask:
    host = str(begun["host"]) if begun is not None else None
    attempt = int(begun["attempt"]) if begun is not None else None
    if state is None:
        last_known = None
        if not is_known:
            last_known = "never started" if begun is None else ended_by or "running"
        return RunTask(
            name, slot, None, ended_by, node=host, attempt=attempt, ranks=ranks,
            last_known=last_known,
        )  # fmt: skip
    runs = state.phase in (Phase.RUNNING, Phase.LEAVING)
    return RunTask(
        name, slot, state.state, state.reason or None,
        (state.node or host) if runs else None,
        attempt if state.restarts is None or begun is None else state.restarts,
        ranks if runs else None,
        state.time_left_s if runs else None,
        state.starts_in_s,
    )  # fmt: skip


def _ranks(found: _Found) -> dict[str, tuple[int, int]]:
    """Return the ranks of the workers of each member of the present group."""
    if found.result is not None or (found.status or {}).get("phase") != "training":
        return {}
    ranks, first = {}, 0
    for task, num in _members(found.status or {}):
        ranks[task] = (first, first + num - 1)
        first += num
    return ranks


def _stragglers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = status.get("stragglers")
    found = listed if isinstance(listed, list) else []
    return [straggler for straggler in found if isinstance(straggler, Mapping)]


def _members(status: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the tasks of the present group, and how many workers each has."""
    listed = status.get("members")
    try:
        return [(str(m["task"]), int(m["nproc"])) for m in listed or ()]
    except (TypeError, ValueError, KeyError):
        return []


def number(value: object) -> float | None:
    """Return what is a number; None: it is none, or not known."""
    return float(value) if isinstance(value, int | float) and abs(value) < _TOO_MUCH else None


# ---- The facts of a run, as `status` shows them, and their JSON form


@dataclass(frozen=True)
class RunTask:
    """One node's task, as it is now.

    Attributes:
        task: Its name.
        slot: Its place in the run, from 0.
        state: Slurm's word; None: Slurm does not list it, or does not answer.
        reason: Why it is in it; without a state, how its last attempt ended (`NodeTime`).
            None if there is nothing to say.
        last_known: Where Slurm does not answer, what the task was at as far as the run knows:
            ``running``, ``never started``, or how its last attempt ended; else None.
        node: Its node; None if it has none.
        attempt: How often it was requeued; None if it never started.
        ranks: The first and the last rank of its workers; None: it is not in the group.
        time_left_s: Slurm's time limit; None if there is none, or it does not run.
        starts_in_s: When a pending one may start, as far as Slurm knows.
    """

    task: str
    slot: int
    state: str | None
    reason: str | None = None
    node: str | None = None
    attempt: int | None = None
    ranks: tuple[int, int] | None = None
    time_left_s: float | None = None
    starts_in_s: float | None = None
    last_known: str | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """The newest checkpoint.

    Attributes:
        step: The step that it holds.
        time: Unix seconds at which it was committed; where its files are elsewhere, at which the
            leader first knew of it.
        kept: How many lie in the run's directory.
    """

    step: int
    time: float
    kept: int


@dataclass(frozen=True)
class EndedTask:
    """How a run ended: ``succeeded``, ``failed``, ``cancelled``; ``lost``: its tasks are gone."""

    status: str
    time: float
    why: str | None
    failure: Mapping[str, Any] | None


@dataclass(frozen=True)
class RunFacts:
    """A run as it is now."""

    run_id: str
    directory: Path
    launcher: str
    label: str
    phase: str
    now: float
    updated: float | None
    submitted: float | None
    nodes: tuple[int, int, int] | None
    """Now, at least, at most."""
    status: Point | None
    round: int
    restarts: tuple[int, int]
    """Spent, allowed."""
    tasks: Sequence[RunTask]
    pace: Rates
    saved: SavedCheckpoint | None
    departures: Mapping[str, int]
    """How many attempts of tasks ended how (`report.node_time.NodeTime`)."""
    account: Account
    ended: EndedTask | None
    notes: Sequence[str]
    spec: RunSpec | None
    """As it was submitted; None: that can not be read."""
    history: EventIndex
    """The valid events of all tasks."""
    points: Sequence[Point]
    """Its progress, in order of time, up to now."""
    stragglers: Sequence[Mapping[str, Any]] = ()
    """The ranks that are persistently slower than the others: rank, host, ratio (their own part of
    a step to the median's)."""

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints; its help names the keys."""
        status, saved, nodes = self.status or Point(self.now, "unknown"), self.saved, self.nodes
        time_s = {kind: round(s, 1) for kind, s in self.account.seconds.items()}
        return {
            "run_id": self.run_id, "directory": str(self.directory), "launcher": self.launcher,
            "overrides": self.label, "phase": self.phase, "time": self.now,
            "updated": self.updated, "submitted": self.submitted, "round": self.round,
            "nodes": nodes and nodes[0], "min_nodes": nodes and nodes[1],
            "max_nodes": nodes and nodes[2],
            "world_size": status.world_size if nodes and nodes[0] else 0,
            "group": [asdict(size) for size in self.account.sizes],
            "tasks": [asdict(task) for task in self.tasks],
            "step": status.step, "total_steps": status.total_steps, "loss": status.loss,
            "samples": status.samples, "steps_per_s": self.pace.steps_per_s,
            "samples_per_s": self.pace.samples_per_s, "remaining_s": self.pace.remaining_s,
            "checkpoint": None if saved is None else {
                **asdict(saved), "age_s": max(0.0, self.now - saved.time),
            },
            "restarts": self.restarts[0], "max_restarts": self.restarts[1],
            "departures": dict(self.departures),
            "stragglers": [dict(straggler) for straggler in self.stragglers],
            "goodput": self.account.goodput, "node_seconds": time_s,
            "queue_seconds": round(self.account.queue_s, 1),
            "ended": None if self.ended is None else asdict(self.ended),
            "notes": list(self.notes),
        }  # fmt: skip


# ---- What a run is doing, in half a sentence; and whether it has ended, and how
# A run has ended once it has left a result. One that was cancelled leaves none, nor does one
# whose tasks are gone otherwise (scancel by hand, a time limit, a job that Slurm has purged): it
# has ended once the scheduler has had no task of it for a while. Whoever follows a run asks
# `EndDetector`.


SUCCEEDED = "succeeded"
NOT_SUBMITTED_HINT = (
    "it was not submitted yet, as far as is known (a script that is submitted by hand is known "
    "once its first task has started)"
)

_ASK_S = 5.0
"""Seconds between two questions to the scheduler."""
_GONE_S = 6.0
"""A result may be on its way through a network file system so long after the last task has gone."""


Asks = Callable[[Sequence[RunSpec]], QueueSnapshot]


def doing(run: RunDir, asks: Asks = take_snapshot) -> str:
    """Return what a run is doing: ``it waits: 2 tasks PENDING (Resources)``.

    Raises:
        RunDirectoryError: it is no run directory.
    """
    spec = run.load()
    result = how_it_ended(run)
    if result is not None:
        return result.sentence
    queue = asks([spec])
    states = queue.tasks_of(spec)
    if states is None:
        return f"it is not known what its tasks do: {queue.why_unknown(spec)}"
    if not current_names(spec):
        return NOT_SUBMITTED_HINT
    if all(state.phase is Phase.ENDED for state in states.values()):
        return gone(run, states.values()).sentence
    return what_tasks_do(states.values(), _status(run))


def what_tasks_do(states: Iterable[TaskState], status: Mapping[str, Any]) -> str:
    """Return the same from what is known of its tasks, and from status.json (pure)."""
    listed = list(states)
    if any(state.phase is Phase.RUNNING for state in listed):
        phase = str(status.get("phase") or "starting")
        return f"it is {phase}: {in_words(listed)}"
    if any(state.phase is not Phase.ENDED for state in listed):
        return f"it waits: {in_words(listed)}"
    found = in_words(listed)
    return f"none of its tasks is left, and it has left no result{': ' + found if found else ''}"


def in_words(states: Iterable[TaskState]) -> str:
    """Return so many tasks in this state, and so many in that (pure)."""
    counts = Counter(f"{s.state} ({s.reason})" if s.reason else s.state for s in states)
    return ", ".join(f"{counted(n, 'task')} {what}" for what, n in counts.items())


def _status(run: RunDir) -> dict[str, Any]:
    try:
        return read_json(run.status) or {}
    except (OSError, ValueError):
        return {}


# ---- how it ended --------------------------------------------------------------------------


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        status: ``succeeded``, ``failed``, ``cancelled``, ``lost`` (its tasks are gone), or
            ``unknown`` (its result can not be read).
        sentence: The same for a person, with what can be done about it.
    """

    status: str
    sentence: str

    @property
    def exit_code(self) -> int:
        """Return that of a command that has followed the run to its end."""
        return 0 if self.status == SUCCEEDED else 1


def how_it_ended(run: RunDir) -> RunEnd | None:
    """Return how a run ended that has left a result; None if it has left none."""
    try:
        result = read_json(run.result)
    except (OSError, ValueError) as e:
        return RunEnd("unknown", f"it has ended, but {run.result} can not be read: {e}")
    if result is None and not is_there(run.result):
        return None
    status = str((result or {}).get("status") or "unknown")
    return RunEnd(status, f"it has ended: {status}")


def gone(run: RunDir, states: Iterable[TaskState] = ()) -> RunEnd:
    """Return how a run ended that has no task any more, and has left no result.

    Args:
        run: The run.
        states: Its tasks, as far as the scheduler still lists them.
    """
    remedy = f"to go on from its last checkpoint: hpc-elastic resume {quoted(run.path)}"
    mark = cancellation(run)
    if mark is not None:
        return RunEnd("cancelled", f"it was cancelled{mark.by_whom}; {remedy}")
    return RunEnd("lost", f"it is lost: {what_tasks_do(states, {})}; {remedy}")


class EndDetector:
    """Tells when a run has ended, for whoever looks a few times a second.

    Args:
        run: The run.
        asks: Asks the scheduler.
        clock: Seconds, monotonic.
        warn: Is told once that the scheduler does not answer, and once that it does again.

    Raises:
        RunDirectoryError: it is no run directory.
    """

    def __init__(
        self,
        run: RunDir,
        asks: Asks = take_snapshot,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._run = run
        self._spec = run.load()
        self._asks = asks
        self._clock = clock
        self._warn = warn
        self._is_silent = False
        self._ask_at = 0.0
        self._gone_since: float | None = None
        self._states: list[TaskState] = []

    def come(self) -> RunEnd | None:
        """Return how the run ended; None as long as it may go on."""
        ended = how_it_ended(self._run)
        if ended is not None:
            return ended
        now = self._clock()
        if now >= self._ask_at:
            self._ask_at = now + _ASK_S
            self._ask(now)
        is_gone = self._gone_since is not None and now - self._gone_since > _GONE_S
        return gone(self._run, self._states) if is_gone else None

    def _ask(self, now: float) -> None:
        queue = self._asks([self._spec])
        states = queue.tasks_of(self._spec)
        self._note_silence(queue.why_unknown(self._spec))
        if states is None:
            if given_up(self._spec, cancellation(self._run), time.time()):
                self._gone_since = -math.inf
            return
        self._states = list(states.values())
        if not current_names(self._spec) or any(s.phase is not Phase.ENDED for s in self._states):
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now

    def _note_silence(self, why: str | None) -> None:
        if why is not None and not self._is_silent:
            self._warn(f"it is not known whether the run goes on, but its files are read: {why}")
        if why is None and self._is_silent:
            self._warn("its tasks can be seen again")
        self._is_silent = why is not None


def given_up(spec: RunSpec, mark: Cancellation | None, now: float) -> bool:
    """Tell whether no task can be left, though the scheduler does not say so (pure).

    Args:
        spec: The run.
        mark: Who has cancelled it; None: nobody.
        now: Unix seconds.
    """
    return mark is not None and now - mark.time > bound_s(spec)

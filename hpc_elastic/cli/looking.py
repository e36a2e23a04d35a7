"""What can be found out about one run, from its files and its scheduler: the facts of `status`.

Nothing here needs a server, a running leader or all of the files. What is missing is said in
`Facts.notes`, and what it would have told is None.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hpc_elastic.checkpoint.folders import directories
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.cli.facts import Ended, Facts, Saved, Task
from hpc_elastic.cli.queues import Queue, ask
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.events import read_events
from hpc_elastic.files import read_json
from hpc_elastic.rundir import RunDir, RunSpec
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.states import Phase, TaskState
from hpc_elastic.story.account import account
from hpc_elastic.story.kinds import sound
from hpc_elastic.story.points import Point, Rates, rates, read_points
from hpc_elastic.submit.outcome import Cancellation, cancellation

STALE_S = 30.0
"""A leader writes status.json about once a second; older than that, nobody leads."""

LOST, CANCELLED = "lost", "cancelled"
"""Of a run that has ended without a result."""
_TOO_MUCH = 1e11
"""No time, step or count of a run is that large: the file is damaged."""
NOT_SUBMITTED = "not submitted"
"""What a run is doing whose script was only rendered."""

Event = Mapping[str, Any]


def look(run: Path, asks: Callable[[Sequence[RunSpec]], Queue] = ask) -> Facts:
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
    events = _events(run, notes)
    if spec is None and status is None and result is None and not events:
        remedy = "give a run directory, or an id of `hpc-elastic list`"
        raise RunDirectoryError(f"{run} is no run directory, nor what is left of one: {remedy}")
    queue = Queue() if spec is None or result is not None else asks([spec])
    unknown = None if spec is None or result is not None else queue.why_unknown(spec)
    if unknown is not None:
        notes.append(f"what the tasks do now is unknown: {unknown}")
    states = None if spec is None or result is not None else queue.of(spec)
    mark = cancellation(files) if result is None else None
    return _facts(_Found(run, spec, status, result, events, states, mark), time.time(), notes)


@dataclass(frozen=True)
class _Found:
    """What was read."""

    run: Path
    spec: RunSpec | None
    status: Mapping[str, Any] | None
    result: Mapping[str, Any] | None
    events: Sequence[dict[str, Any]]
    states: Mapping[str, TaskState] | None
    mark: Cancellation | None


def _facts(found: _Found, now: float, notes: list[str]) -> Facts:
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
        found.events, points, now=until, running=running, waiting=waiting, submitted=submitted,
        ft=spec is not None and spec.ft,
    )  # fmt: skip
    lives = phase == "training" and ended is None
    stale = updated is not None and now - updated > STALE_S
    if stale and ended is None and phase in ("training", "waiting"):
        notes.append(f"no leader has written status.json for {now - (updated or now):.0f} s")
    last = _last_known(points, lives=lives)
    return Facts(
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
        events=found.events,
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
    from hpc_elastic.submit.session import overrides_label

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


def _saved(run: Path, points: Sequence[Point]) -> Saved | None:
    """Return the newest checkpoint: on disk, or announced by a framework that keeps its own."""
    there = _on_disk(RunDir(run))
    announced = _announced(points)
    if announced is None or (there is not None and there.step >= announced[0]):
        return there
    return Saved(*announced, 0 if there is None else there.kept)


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


def _on_disk(run: RunDir) -> Saved | None:
    try:
        stores = [Store(directory) for directory in directories(run)]
        found = [(step, store.folder(step)) for store in stores for step in store.steps()]
        if not found:
            return None
        step, folder = max(found)
        return Saved(step, folder.stat().st_mtime, len(found))
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
        ``queued``, ``starting``, ``waiting``, ``training``, ``given back``, ``succeeded``,
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


def _ended(found: _Found, phase: str, points: Sequence[Point]) -> Ended | None:
    result = found.result
    if result is not None:
        failure = result.get("failure")
        failure = failure if isinstance(failure, Mapping) else None
        return Ended(phase, number(result.get("ended")) or 0.0, _why(failure), failure)
    if phase not in (LOST, CANCELLED):
        return None
    heard = [*(float(e["time"]) for e in found.events), *(p.time for p in points)]
    if found.mark is not None:
        at = max(found.mark.time, max(heard, default=0.0))
        return Ended(phase, at, f"it was cancelled{found.mark.by_whom}", None)
    states = (found.states or {}).values()
    counts = Counter(f"{s.state} ({s.reason})" if s.reason else s.state for s in states)
    tasks = ", ".join(f"{n} {state}" for state, n in counts.items())
    why = f"its tasks are gone, and it has left no result{f': {tasks}' if tasks else ''}"
    return Ended(phase, max(heard, default=_submitted(found.spec) or 0.0), why, None)


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


def _tasks(found: _Found, named: Sequence[str], ended_by: Mapping[str, str | None]) -> list[Task]:
    """Return the run's tasks by slot; what is only known by its events where nothing else is."""
    begun = {e["task"]: e for e in found.events if e["kind"] == "task"}
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
) -> Task:
    host = str(begun["host"]) if begun is not None else None
    attempt = int(begun["attempt"]) if begun is not None else None
    if state is None:
        last_known = None
        if not is_known:
            last_known = "never started" if begun is None else ended_by or "running"
        return Task(
            name, slot, None, ended_by, node=host, attempt=attempt, ranks=ranks,
            last_known=last_known,
        )  # fmt: skip
    runs = state.phase in (Phase.RUNNING, Phase.LEAVING)
    return Task(
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

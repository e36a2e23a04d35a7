"""All that `status` and `report` show of one run: its view, events, progress and checkpoints."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_elastic._util import cleaned
from hpc_elastic.checkpoint.store import Store, directories_of
from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.report import run_view
from hpc_elastic.report.attempts import EventIndex
from hpc_elastic.report.node_time import Account, account
from hpc_elastic.report.progress_log import TRAINING, Point, Rates, rates, read_points
from hpc_elastic.report.report import About, Configuration, Report, WorkerFailure, report
from hpc_elastic.report.run_view import RunView
from hpc_elastic.report.timeline import build_timeline
from hpc_elastic.run.directory import RunDir, RunSpec
from hpc_elastic.run.events import Event, EventReader, valid_events
from hpc_elastic.run.redaction import redact, redact_argument
from hpc_elastic.shared_files import parse_yaml, read_tail, status_of
from hpc_elastic.site import ExpectedStart, expected_start
from hpc_elastic.slurm.job_state import Phase
from hpc_elastic.slurm.run_tasks import current_names


@dataclass(frozen=True)
class RunTask:
    """One node's task; ``attempt`` is None if it never started."""

    task: str
    slot: int
    state: str | None  # the scheduler's term; None if it does not list the task, or does not answer
    reason: str | None = None
    """Reason of the state; without a state, how its last attempt ended (`NodeTime`). None if there
    is none."""
    node: str | None = None
    attempt: int | None = None
    ranks: tuple[int, int] | None = None  # first and last of its workers; None outside of the group
    time_left_s: float | None = None  # of its time limit; None if it has none, or does not run
    starts_in_s: float | None = None  # while it is pending, when it may start; None if unknown
    last_known: str | None = None
    """If the scheduler does not answer: ``running``, ``never started``, or how its last attempt
    ended; else None."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint."""

    step: int
    time: float
    """When it was committed, in Unix seconds; if its files are elsewhere, when the leader first
    knew of it."""
    kept: int  # number of checkpoints in the run's directories


@dataclass(frozen=True)
class RunDetails:
    """A run at one moment, in detail."""

    view: RunView
    label: str
    nodes: tuple[int, int, int] | None  # in the group now, fewest and most; None if unknown
    status: Point | None  # the last state of the group, and what is known of before
    round: int
    tasks: Sequence[RunTask]
    pace: Rates
    saved: NewestCheckpoint | None
    departures: Mapping[str, int]  # ended attempts by how they ended (`NodeTime`)
    account: Account
    history: EventIndex
    points: Sequence[Point]
    notes: Sequence[str]  # what cannot be found out, and why
    next_node: ExpectedStart | None = None  # None if no task waits, or none is needed

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.view.spec.run_id if self.view.spec else self.view.run.path.name

    @property
    def launcher(self) -> str:
        """``slurm``, ``local`` or ``unknown``."""
        return self.view.spec.settings.backend if self.view.spec else "unknown"

    @property
    def stragglers(self) -> Sequence[Mapping[str, Any]]:
        """The persistently slow ranks of the group that trains now."""
        return self.view.stragglers if self.view.trains else ()

    def to_json(self) -> dict[str, Any]:
        """Return what ``status --json`` prints; its help describes the keys."""
        view, saved, nodes = self.view, self.saved, self.nodes
        status = self.status or Point(view.now, "unknown")
        time_s = {kind: round(s, 1) for kind, s in self.account.seconds.items()}
        return {
            "run_id": self.run_id, "run": str(view.run.path), "launcher": self.launcher,
            "overrides": self.label, "phase": view.phase, "time": view.now,
            "updated": view.updated, "submitted": view.submitted, "round": self.round,
            "nodes": nodes and nodes[0], "min_nodes": nodes and nodes[1],
            "max_nodes": nodes and nodes[2],
            "world_size": status.world_size if nodes and nodes[0] else 0,
            "group": [asdict(size) for size in self.account.sizes],
            "tasks": [asdict(task) for task in self.tasks],
            "why_waits": self.view.why_waits,
            "next_node": None if self.next_node is None else asdict(self.next_node),
            "step": status.step, "total_steps": status.total_steps, "loss": status.loss,
            "samples": status.samples, "steps_per_s": self.pace.steps_per_s,
            "samples_per_s": self.pace.samples_per_s, "remaining_s": self.pace.remaining_s,
            "checkpoint": None if saved is None else {
                **asdict(saved), "age_s": max(0.0, view.now - saved.time),
            },
            "restarts": view.restarts[0], "max_restarts": view.restarts[1],
            "departures": dict(self.departures),
            "stragglers": [dict(straggler) for straggler in self.stragglers],
            "warnings": list(view.warnings),
            "goodput": self.account.goodput, "node_seconds": time_s,
            "queue_seconds": round(self.account.queue_s, 1),
            "given_back": asdict(self.account.given_back),
            "ended": None if view.ended is None else view.ended.to_json(),
            "notes": list(self.notes),
        }  # fmt: skip


def read_details(view: RunView) -> RunDetails:
    """Return the details of a run; raise RunDirectoryError if nothing of a run is there."""
    run = view.run.path
    notes: list[str] = []
    events: list[Event] = []
    try:
        reader = EventReader(view.run.event_logs)
        found = reader.new()
        notes += filter(None, [reader.doubt])
        events = valid_events(found)
        if len(events) < len(found):
            notes.append(f"damaged events are left out: {len(found) - len(events)}")
    except (OSError, ValueError, KeyError, TypeError) as e:
        notes.append(f"the events cannot be read: {e}")
    points = read_points(view.run.progress)
    history = EventIndex(events, tuple(points))
    if view.spec is None and view.status is None and view.ended is None and not history.events:
        remedy = "give a run directory, or an id of `hpc-elastic list`"
        raise RunDirectoryError(f"{run} is not a run directory: {remedy}", remedy=remedy)
    if view.updated is not None and view.status is not None:
        points.append(view.status)
    if view.ended is not None and not view.ended.has_result:
        # a run without a result ended with its last event or point
        signs = [*(float(e["time"]) for e in history.events), *(p.time for p in points)]
        if view.cancellation is not None:
            signs.append(view.cancellation.time)
        ended_at = max(signs, default=view.submitted or 0.0)
        view = replace(view, ended=replace(view.ended, time=ended_at))
    spec, lives = view.spec, view.trains
    names = current_names(spec) if spec is not None else []
    tasks = view.tasks or {}
    phases = {name: tasks[name].phase for name in names if name in tasks}
    running = {n for n, phase in phases.items() if phase in (Phase.RUNNING, Phase.COMPLETING)}
    spent = account(
        history, points, now=view.now if view.ended is None else view.ended.time,
        running=None if view.tasks is None else running, submitted=view.submitted,
        waiting={name for name, phase in phases.items() if phase is Phase.PENDING},
    )  # fmt: skip
    stale_s = 0.0 if view.updated is None else view.now - view.updated
    if stale_s > run_view.STALE_S and view.ended is None and view.phase in (TRAINING, "waiting"):
        notes.append(f"no leader has written status.json for {stale_s:.0f} s")
    last = _last_known(points, lives=lives)
    wanted = spec and spec.settings.nodes
    next_node = None
    if spec is not None and view.ended is None and view.tasks:
        next_node = expected_start(view.tasks.values(), view.now)
        if next_node is not None and spec.settings.backend != "slurm":
            why = "a local node starts when one of this machine's is free"
            next_node = replace(next_node, at=None, why=why)
    return RunDetails(
        view=view, label=run_view.label_of(run, spec), status=last, next_node=next_node,
        nodes=(last.nodes if last and lives else 0, wanted.min, wanted.max) if wanted else None,
        round=int(view.status.round) if view.status else 0,
        tasks=_tasks(view, history, names, {node.task: node.ended_by for node in spent.nodes}),
        pace=rates(points) if lives else Rates(), saved=_newest_checkpoint(view.run, points),
        departures=Counter(node.ended_by for node in spent.nodes if node.ended_by),
        account=spent, history=history, points=points, notes=[*view.notes, *notes],
    )  # fmt: skip


def _last_known(points: Sequence[Point], *, lives: bool) -> Point | None:
    """Return the last point, with the last known values of those before it.

    When nothing trains any more, a saved step was made even if no heartbeat has reported it.
    """
    if not points:
        return None
    known: dict[str, Any] = {}
    for name in ("step", "total_steps", "loss", "samples", "checkpoint"):
        values = (getattr(p, name) for p in reversed(points))
        known[name] = next((value for value in values if value is not None), None)
    if not lives and None not in (known["step"], known["checkpoint"]):
        known["step"] = max(known["step"], known["checkpoint"])
    return replace(points[-1], **known)


def _newest_checkpoint(run: RunDir, points: Sequence[Point]) -> NewestCheckpoint | None:
    """Return the newest checkpoint: on disk, or announced by a framework that keeps its own."""
    there = None
    with suppress(OSError):  # removed meanwhile, or the server is away
        if found := _checkpoints(run):
            step, folder = max(found)
            there = NewestCheckpoint(step, status_of(folder).st_mtime, len(found))
    announced = _announced(points)
    if announced is None or (there is not None and there.step >= announced[0]):
        return there
    return NewestCheckpoint(*announced, 0 if there is None else there.kept)


def _checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    stores = [Store(directory) for directory in directories_of(run)]
    return [(step, store.folder(step)) for store in stores for step in store.steps()]


def _announced(points: Sequence[Point]) -> tuple[int, float] | None:
    """Return the newest step whose checkpoint was announced, and when it was announced first.

    A group that resumes before that step has not found the checkpoint: it was lost with its nodes,
    although leaders continue to announce it.
    """
    known: list[tuple[int, float]] = []  # by step
    lost, highest = None, -1
    for point in points:
        if point.step is not None and point.step < highest:
            del known[bisect_right(known, (point.step, math.inf)) :]
            highest = point.step
        if point.checkpoint is None:
            continue
        if point.step is not None and point.step < point.checkpoint:
            lost = point.checkpoint
        elif point.checkpoint != lost:
            at = bisect_left(known, (point.checkpoint, -math.inf))
            if at == len(known) or known[at][0] != point.checkpoint:
                known.insert(at, (point.checkpoint, point.time))
            highest = max(highest, point.checkpoint)
            lost = None
    return known[-1] if known else None


def _tasks(
    view: RunView, history: EventIndex, names: Sequence[str], ended_by: Mapping[str, str | None]
) -> list[RunTask]:
    started = {event["task"]: event for event in history.of("task")}
    ranks, first = dict[str, tuple[int, int]](), 0
    has_no_result = view.ended is None or not view.ended.has_result
    if view.status is not None and view.status.phase == TRAINING and has_no_result:
        for task, num in view.members:
            ranks[task] = (first, first + num - 1)
            first += num
    states = view.tasks or {}
    is_known = view.tasks is not None or view.ended is not None
    found = []
    for slot, name in enumerate(names or started):
        event, state, ended = started.get(name), states.get(name), ended_by.get(name)
        host = str(event["host"]) if event is not None else None
        attempt = int(event["attempt"]) if event is not None else None
        if state is None:
            last_known = "never started" if event is None else ended or "running"
            last = None if is_known else last_known
            known = RunTask(
                name, slot, None, ended, host, attempt, ranks.get(name), last_known=last
            )
            found.append(known)
            continue
        runs = state.phase in (Phase.RUNNING, Phase.COMPLETING)
        found.append(RunTask(
            name, slot, state.state, state.reason or None, (state.node or host) if runs else None,
            attempt if state.restarts is None or event is None else state.restarts,
            ranks.get(name) if runs else None, state.time_left_s if runs else None,
            state.starts_in_s,
        ))  # fmt: skip
    return found


# ---- the report


def report_of(view: RunView) -> Report:
    """Return the report of a run; raise RunDirectoryError if nothing of a run is there."""
    details = read_details(view)
    notes, kept = list(details.notes), None
    try:
        found = _checkpoints(view.run)
        kept = [{"step": step, "time": status_of(folder).st_mtime} for step, folder in found]
    except OSError as e:
        notes.append(f"the checkpoints cannot be listed: {e}")
    return report(
        _about(details), details.account, details.points, build_timeline(details.history),
        made=time.time(), failures=_failures(details), kept=kept,
        configuration=_configuration(view.run, details.view.spec, notes), notes=notes,
    )  # fmt: skip


def _about(details: RunDetails) -> About:
    view, spec = details.view, details.view.spec
    status, ended = details.status or Point(view.now), view.ended
    lines = run_view.overrides_of(view.run.path, spec)
    overrides = run_view.overrides_label([redact_argument(line) for line in lines])
    return About(
        run_id=details.run_id, directory=str(view.run.path), overrides=overrides,
        launcher=details.launcher, ft=spec is not None and spec.settings.ft, phase=view.phase,
        submitted=view.submitted, until=view.now if ended is None else ended.time,
        ended=None if ended is None else ended.to_json(),
        min_nodes=details.nodes and details.nodes[1], max_nodes=details.nodes and details.nodes[2],
        restarts=view.restarts[0] if view.status or ended or view.phase == "queued" else None,
        max_restarts=view.restarts[1] or (0 if spec else None), rounds=details.round,
        step=status.step, total_steps=status.total_steps, samples=status.samples, loss=status.loss,
        steps_per_s=details.pace.steps_per_s, remaining_s=details.pace.remaining_s,
    )  # fmt: skip


def _failures(details: RunDetails) -> Sequence[WorkerFailure]:
    run, ended = details.view.run.path.resolve(), details.view.ended

    def failure_of(time: float, error: str, facts: Mapping[str, Any]) -> WorkerFailure:
        keys = ("rank", "round", "traceback", "log")
        known: dict[str, Any] = {key: facts.get(key) for key in keys}
        return WorkerFailure(time, error, str(facts.get("host")), **known)

    found = [failure_of(e["time"], e["failure"], e) for e in details.history.of("restart")]
    if ended is not None and (last := ended.failure) is not None:
        error = ended.why or str(last.get("message"))
        found.append(replace(failure_of(ended.time, error, last), ended_run=True))
    for number, failure in enumerate(found):
        lines = list[str]()
        # a forged event may name a private file of the reader's, outside of the run
        if failure.log and Path(failure.log).resolve().is_relative_to(run):
            lines = read_tail(Path(failure.log)).splitlines()
        text = redact("\n".join(cleaned(line, colours=False) for line in lines))
        found[number] = replace(failure, traceback=redact(failure.traceback), last_lines=text)
    return found


def _configuration(files: RunDir, spec: RunSpec | None, notes: list[str]) -> Configuration:
    config: Any = None
    try:
        config = parse_yaml(files.hydra_text("config.yaml", spec), files.hydra / "config.yaml")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as e:
        notes.append(f"config.yaml cannot be read: {e}")
    if config is None and spec is not None and spec.entry.kind == "function":
        config = {"args": spec.entry.args}
    if isinstance(config, dict):
        config.pop("launcher", None)  # part of the settings
    provenance = dict(spec.provenance) if spec is not None else {}
    provenance.pop("environment", None)
    if isinstance(provenance.get("argv"), list):
        provenance["argv"] = [redact_argument(str(word)) for word in provenance["argv"]]
    settings = spec.settings.as_config() if spec is not None else None
    return Configuration(redact(settings), redact(config), redact(provenance))

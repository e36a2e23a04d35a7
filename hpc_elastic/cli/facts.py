"""The facts of a run, as `status` shows them, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_elastic.rundir import RunSpec
from hpc_elastic.story.account import Account
from hpc_elastic.story.points import Point, Rates


@dataclass(frozen=True)
class Task:
    """One node's task, as it is now.

    Attributes:
        task: Its name.
        slot: Its place in the run, from 0.
        state: Slurm's word; None: Slurm does not list it, or does not answer.
        reason: Why it is in it; without a state, how its last attempt ended (`spans.Attempt`).
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
class Saved:
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
class Ended:
    """How a run ended: ``succeeded``, ``failed``, ``cancelled``; ``lost``: its tasks are gone."""

    status: str
    time: float
    why: str | None
    failure: Mapping[str, Any] | None


@dataclass(frozen=True)
class Facts:
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
    tasks: Sequence[Task]
    pace: Rates
    saved: Saved | None
    departures: Mapping[str, int]
    """How many attempts of tasks ended how (`story.spans.Attempt`)."""
    account: Account
    ended: Ended | None
    notes: Sequence[str]
    spec: RunSpec | None
    """As it was submitted; None: that can not be read."""
    events: Sequence[dict[str, Any]]
    """Those of all tasks that are whole, in order of time."""
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

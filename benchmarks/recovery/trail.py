"""From the workers' trails and a run's events to one measurement; pure but for the reading."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evidence.trails import Steps, read_trails

from hpc_elastic.run.events import read_events

STAGES = ("detect", "rendezvous", "to worker", "start+import", "init", "first step")


@dataclass(frozen=True)
class Worker:
    """One training process; its moments are Unix seconds."""

    host: str
    rank: int
    world_size: int
    created: float
    begun: float
    """The first line of the script."""
    imported: float
    """It had torch."""
    joined: float
    """The process group stood."""
    spare_since: float | None
    """It was a spare, and had imported torch then; None for others."""
    steps: Steps = ()


@dataclass(frozen=True)
class Fault:
    """What was done to the group, and when."""

    at: float
    host: str
    """The node that was hit, or that joins."""
    grows: bool = False
    group_size: int = 4
    """Nodes of the group before."""


@dataclass(frozen=True)
class Notice:
    """What the leader of a run of ours did: he heard of a change, or closed a round."""

    time: float
    closed: bool


@dataclass(frozen=True)
class Recovery:
    """How one group got over one fault; seconds."""

    total_s: float
    """From the fault to the next step."""
    pause_s: float
    """From the last step of the group before to the next step."""
    repeated: int
    """Steps done before that had to be done again."""
    world_size: int
    stages: dict[str, float] = field(default_factory=dict)
    """The parts of the total, in order; those that can not be seen are left out."""

    @property
    def own_s(self) -> float:
        """The part that is neither the start of a process nor the import of torch."""
        return self.total_s - self.stages["start+import"]


def read_workers(folder: Path) -> list[Worker]:
    return [Worker(**first, steps=steps) for first, steps in read_trails(folder)]


def run_events(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run, none before it has begun."""
    return read_events(run / "events") if (run / "events").is_dir() else []


def host_of_leader(run: Path) -> str:
    """Return the node whose agent leads; all that is known here of such events is in this file."""
    events = run_events(run)
    task = next(e["task"] for e in reversed(events) if e["kind"] == "leader")
    return str(next(e["host"] for e in events if e["kind"] == "task" and e["task"] == task))


def read_notices(run: Path) -> list[Notice]:
    """Return what the leaders of a run did, in order of time."""
    kinds = ("node_lost", "joined", "round_stopped", "leader", "round")
    return [Notice(e["time"], e["kind"] == "round") for e in run_events(run) if e["kind"] in kinds]


def group_of(workers: Iterable[Worker], size: int) -> list[Worker]:
    newest = {w.rank: w for w in sorted(workers, key=lambda w: w.joined) if w.world_size == size}
    return [newest[rank] for rank in sorted(newest)]


def recovery(
    workers: Sequence[Worker], fault: Fault, notices: Sequence[Notice] = ()
) -> Recovery | None:
    """Return how the group got over the fault; None while nobody has made a step since.

    Only a step of a group that was formed after the fault counts, made on a node that was not hit;
    where a node joins, of a group that is larger.
    """
    before = [w for w in workers if w.joined <= fault.at]
    after = [w for w in workers if _counts(w, fault)]
    stepped = [w for w in after if w.steps]
    if not stepped or not any(w.steps for w in before):
        return None
    first = min(stepped, key=lambda w: w.steps[0])
    moment, number = first.steps[0]
    group = [w for w in after if w.world_size == first.world_size and w.joined <= moment]
    done = max(s for w in before if fault.grows or w.host != fault.host for s in w.steps)
    return Recovery(
        total_s=moment - fault.at,
        pause_s=moment - done[0],
        repeated=max(0, done[1] - number + 1),
        world_size=first.world_size,
        stages=_stages(group, fault.at, moment, notices),
    )


def _counts(worker: Worker, fault: Fault) -> bool:
    if worker.joined <= fault.at:
        return False
    return worker.world_size > fault.group_size if fault.grows else worker.host != fault.host


def _stages(
    group: Sequence[Worker], at: float, moment: float, notices: Sequence[Notice]
) -> dict[str, float]:
    """Return the parts of the way to the first step, along the worker that was ready last."""
    newest = {w.host: w for w in sorted(group, key=lambda w: w.joined)}
    slowest = max(newest.values(), key=lambda w: w.imported)
    joined = max(w.joined for w in newest.values())
    known = next((n.time for n in notices if at < n.time < moment), None)
    closed = next((n.time for n in reversed(notices) if n.closed and at < n.time < joined), None)
    decided = at if closed is None else closed
    ready = slowest.imported
    moments = {
        "detect": known,
        "rendezvous": closed,
        "to worker": ready - _start_s(slowest, decided),
    }
    moments |= {"start+import": ready, "init": joined, "first step": moment}
    return _differences(at, moments)


def _start_s(worker: Worker, decided: float) -> float:
    """Return how much of a worker's way is its process' start and the import of torch.

    A spare was created before anything was decided: what counts is the import that it had not done
    by then, and what the script still imports.
    """
    if worker.created >= decided:
        return worker.imported - worker.created
    if worker.spare_since is None:
        return worker.imported - decided
    return max(0.0, worker.spare_since - decided) + worker.imported - worker.begun


def _differences(start: float, moments: dict[str, float | None]) -> dict[str, float]:
    differences = {}
    for name, moment in moments.items():
        if moment is not None:
            differences[name] = moment - start
            start = moment
    return differences

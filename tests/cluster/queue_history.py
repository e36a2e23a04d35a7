"""Runs of one or more sweeps over time: nodes that were held in vain, and nodes that were idle."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sweeps import Sweep

from hpc_elastic.run.directory import RunDir, Submission
from hpc_elastic.run.events import read_events

_EVERY_S = 0.5
_GOES = ("nodes_requeued", "task_exited", "agent_killed", "agent_failed", "node_lost")


@dataclass(frozen=True)
class Look:
    """One look at the queue: its time, the tasks that run, and how many nodes are idle."""

    time: float
    running: frozenset[str]
    num_idle: int


@dataclass(frozen=True)
class Stretch:
    """A stretch of time, and what it was."""

    begin: float
    end: float
    what: str

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.what}: {self.seconds:.1f} s from {time.ctime(self.begin)} on"


@dataclass(frozen=True)
class _Run:
    """One run that has ended."""

    name: str
    min_nodes: int
    tasks: tuple[str, ...]
    submitted: float
    ended: float
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Self:
        spec = RunDir(folder).load()
        submission = Submission(folder.parent / ".hpc_elastic")
        jobs = submission.job_ids()
        return cls(
            f"{folder.parent.name}/{folder.name}",
            spec.settings.nodes.min,
            tuple(f"{jobs[k]}_{index}" for k, index in spec.tasks),
            max(submission.array(k).job_id_file.stat().st_mtime for k, _ in spec.tasks),
            (folder / "result.json").stat().st_mtime,
            sorted(read_events(folder / "events"), key=lambda e: float(e["time"])),
        )


class QueueHistory:
    """Looks at the queue and at the nodes twice a second while it is entered.

    Args:
        slurm: The sandbox.
    """

    def __init__(self, slurm) -> None:
        self._slurm = slurm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="queue history", daemon=True)
        self._looks: list[Look] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(_EVERY_S):
            ask = ["squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i"]
            running = frozenset(self._slurm.run(ask).stdout.split())
            idle = self._slurm.run(["sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D"]).stdout
            self._looks.append(Look(time.time(), running, int(idle.strip() or 0)))

    def held_in_vain(self, *sweeps: Sweep) -> Stretch:
        """Return the longest time for which a node was ready, and its group had not formed."""
        waits = (wait for run in _runs(sweeps) for task in run.tasks for wait in _waits(run, task))
        return max(waits, key=lambda stretch: stretch.seconds)

    def idle_in_vain(self, *sweeps: Sweep) -> Stretch:
        """Return the longest time for which idle nodes could have served a waiting run's minimum.

        A run waits from its submission to its end whenever fewer tasks than its minimum run.
        """
        longest = Stretch(0.0, 0.0, "no idle nodes could have served a run")
        runs, since = _runs(sweeps), None
        for look in self._looks:
            waiting = [run.name for run in runs if _could_start(run, look)]
            since = (since or look.time) if waiting else None
            if since is not None and look.time - since > longest.seconds:
                what = f"{look.num_idle} nodes idle for {', '.join(waiting)}"
                longest = Stretch(since, look.time, what)
        return longest


def _runs(sweeps: tuple[Sweep, ...]) -> list[_Run]:
    return [_Run.read(f.parent) for s in sweeps for f in sorted(s.folder.glob("*/run.json"))]


def _could_start(run: _Run, look: Look) -> bool:
    lacks = run.min_nodes - sum(task in look.running for task in run.tasks)
    return run.submitted < look.time < run.ended and 0 < lacks <= look.num_idle


def _waits(run: _Run, task: str) -> Iterator[Stretch]:
    """Yield each wait of a task: from its agent's request for a place until it has one, or goes."""
    since = None
    for event in run.events:
        kind, now = event["kind"], float(event["time"])
        # a member of a round that was stopped asks again without an event of its own
        if kind in ("joined", "workers_stopped") and event["task"] == task:
            since = since or now
        members = [m["task"] for m in event["members"]] if kind == "round" else []
        if since and (task in members or (kind in _GOES and event["task"] == task)):
            yield Stretch(since, now, f"{task} of run {run.name}")
            since = None
    if since:
        yield Stretch(since, run.ended, f"{task} of run {run.name}")

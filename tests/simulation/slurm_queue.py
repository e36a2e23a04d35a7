"""A small model of how Slurm starts jobs: by priority, and by backfill into gaps.

Whole nodes only. The main scheduler tries jobs in order of their priority whenever something has
changed; a job that does not fit keeps its nodes' partitions from all that come after it. Backfill
plans at intervals, by time limits: a job starts if that delays no plan of one before it. `decide`
and `plan` are pure, so that they also say what would start on other nodes than the idle ones.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_elastic.site.neighbours import NICE, has_features
from hpc_elastic.slurm.parsing import NodeKind, NodeNeeds, QueuedJob
from simulation.world import World

MAX_TESTED = 50
"""Waiting jobs that backfill looks at (bf_max_job_test)."""


@dataclass(eq=False)
class Job:
    """One job, or one element of an array: the elements have the array's id.

    ``hidden_until`` is when a hidden rule stops to keep it from starting.
    """

    id: str
    user: str
    submitted_s: float
    num_nodes: int
    limit_s: float
    runs_s: float
    priority: int
    needs: NodeNeeds = field(default_factory=NodeNeeds)
    partitions: tuple[str, ...] = ("main",)
    nice: int = 0
    hidden_until: float = 0.0
    on_start: Callable[[Job], None] | None = None
    fits: Mapping[int, None] = field(default_factory=dict)
    """Nodes that it may have."""
    nodes: tuple[int, ...] = ()
    planned: tuple[int, ...] = ()
    planned_s: float | None = None
    not_before_s: float = 0.0
    reason: str = "Priority"
    started_s: float | None = None
    ended_s: float | None = None
    is_cancelled: bool = False
    attempt: int = 0

    @property
    def order(self) -> tuple[int, str]:
        """The scheduler's."""
        return self.nice - self.priority, self.id

    @property
    def ends_at_most_s(self) -> float:
        """The end of its time limit, once it runs."""
        return math.inf if self.started_s is None else self.started_s + self.limit_s


def decide(
    jobs: Iterable[Job], free: Collection[int], partitions: Mapping[str, Collection[int]]
) -> list[tuple[Job, tuple[int, ...]]]:
    """Return what the main scheduler starts on idle nodes; it notes why the others wait."""
    left, found = sorted(free), list[tuple[Job, tuple[int, ...]]]()
    for job in jobs:
        fits = job.fits
        usable = [node for node in left if node in fits][: job.num_nodes]
        if len(usable) == job.num_nodes:
            found.append((job, tuple(usable)))
            left = [node for node in left if node not in usable]
        else:
            closed = {node for name in job.partitions for node in partitions.get(name, ())}
            job.reason = "Resources"
            left = [node for node in left if node not in closed]
        if not left:
            break
    return found


Start = tuple[Job, tuple[int, ...]]
Plan = tuple[Job, float, tuple[int, ...]]


def plan(
    now: float, jobs: Iterable[Job], free: Collection[int], ends: Mapping[int, float]
) -> tuple[list[Start], list[Plan]]:
    """Return what backfill starts on idle nodes, and its plans: job, time, nodes.

    ``ends`` is when each busy node is free at the latest.
    """
    left = sorted(free)
    reserved = dict[int, float]()
    available = {**dict.fromkeys(left, now), **ends}
    starts, plans = list[Start](), list[Plan]()
    last = ""
    for number, job in enumerate(jobs):
        if number >= MAX_TESTED or (not left and job.nice >= NICE):
            break
        if job.id == last:
            continue  # the element before it waits, as this one
        fits, end = job.fits, now + job.limit_s
        usable = [n for n in left if n in fits and reserved.get(n, math.inf) >= end]
        if len(usable) >= job.num_nodes:
            nodes = tuple(usable[: job.num_nodes])
            starts.append((job, nodes))
            left = [node for node in left if node not in nodes]
            available |= dict.fromkeys(nodes, end)
            continue
        if job.nice >= NICE:
            last = job.id
            continue  # it stands behind all: no job is behind its plan
        known = [node for node in job.fits if node in available]
        soonest = heapq.nsmallest(job.num_nodes, known, key=available.__getitem__)
        if len(soonest) < job.num_nodes:
            continue
        at = max(available[node] for node in soonest)
        if at == math.inf:
            continue
        plans.append((job, at, tuple(soonest)))
        for node in soonest:
            reserved[node] = min(reserved.get(node, math.inf), at)
            available[node] = at + job.limit_s
    return starts, plans


@dataclass
class Cluster:
    """Nodes, the queue, and the scheduler's passes, in the virtual time of a world."""

    world: World
    kinds: Sequence[NodeKind]
    backfill_s: float = 30.0
    pass_s: float = 2.0
    """From a change until the main scheduler has looked at it."""
    completing_s: float = 1.0
    """From the end of a job until its nodes are idle."""
    waiting: list[Job] = field(default_factory=list)
    running: dict[Job, None] = field(default_factory=dict)
    completing: dict[int, str] = field(default_factory=dict)
    """Node -> job."""
    down: set[int] = field(default_factory=set)
    on_change: Callable[[], None] = lambda: None
    _is_due: bool = False

    def __post_init__(self) -> None:
        self.names = [f"n{number}" for number in range(len(self.kinds))]
        self.partitions: dict[str, list[int]] = {}
        for number, kind in enumerate(self.kinds):
            for name in kind.partitions:
                self.partitions.setdefault(name, []).append(number)
        self.free = set(range(len(self.kinds)))
        self._fits: dict[tuple[object, ...], dict[int, None]] = {}
        self.world.after(self.backfill_s * self.world.rng.random(), None, self._backfill)

    # ---- what users do ------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Put a job into the queue."""
        needs = job.needs
        key = (job.partitions, needs.features, needs.required, needs.excluded)
        if key not in self._fits:
            self._fits[key] = {
                number: None
                for number, kind in enumerate(self.kinds)
                if not kind.partitions.keys().isdisjoint(job.partitions)
                and has_features(needs.features, kind.features)
                and (not needs.required or self.names[number] in needs.required)
                and self.names[number] not in needs.excluded
            }
        job.fits = self._fits[key]
        self.waiting.append(job)
        self._is_sorted = False
        self.changed()

    def cancel(self, job: Job) -> None:
        """Cancel a job."""
        if job in self.running:
            self.end_job(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        else:
            return
        job.is_cancelled = True
        self.world.log_event(job.id, "is cancelled")

    def end_job(self, job: Job) -> None:
        """End a job that runs; its nodes are idle soon after."""
        del self.running[job]
        job.ended_s = self.world.now
        for node in job.nodes:
            self.completing[node] = job.id
        self.world.after(self.completing_s, None, self._completed, job.nodes)
        job.nodes = ()

    def requeue(self, job: Job, delay_s: float) -> None:
        """End a job that runs, and put it back into the queue for a later start."""
        self.end_job(job)
        job.attempt, job.started_s, job.reason = job.attempt + 1, None, "BeginTime"
        job.not_before_s = self.world.now + delay_s
        self.waiting.append(job)
        self._is_sorted = False
        self.world.after(delay_s, None, self.changed)

    def changed(self) -> None:
        """Let the main scheduler look at the queue soon."""
        if not self._is_due:
            self._is_due = True
            self.world.after(self.pass_s, None, self._pass)

    # ---- what users see -----------------------------------------------------------------

    def squeue(self) -> list[QueuedJob]:
        """Return what squeue prints: elements that wait are one line, if they have one reason."""
        found = [
            QueuedJob(
                "RUNNING", tuple(self.names[n] for n in job.nodes), None, job.ends_at_most_s,
                job.limit_s, job.num_nodes, 1, job.partitions, "", job.id, job.priority, job.user,
                job.nice, job.needs,
            )
            for job in self.running
        ]  # fmt: skip
        found += [
            QueuedJob("COMPLETING", (self.names[n],), job=j) for n, j in self.completing.items()
        ]
        counts = Counter((job.id, job.reason) for job in self.waiting)
        for job in self.waiting:
            number = counts.pop((job.id, job.reason), 0)
            if number:
                planned = tuple(self.names[n] for n in job.planned)
                found.append(QueuedJob(
                    "PENDING", planned, job.planned_s, None, job.limit_s, job.num_nodes, number,
                    job.partitions, job.reason, job.id, max(1, job.priority - job.nice), job.user,
                    job.nice, job.needs,
                ))  # fmt: skip
        return found

    def sinfo(self) -> dict[str, NodeKind]:
        """Return the nodes that are in service."""
        return {self.names[n]: kind for n, kind in enumerate(self.kinds) if n not in self.down}

    # ---- the scheduler ------------------------------------------------------------------

    _is_sorted = True

    def startable(self) -> list[Job]:
        """Return the jobs that may start, in the scheduler's order."""
        if not self._is_sorted:
            self.waiting.sort(key=lambda job: job.order)
            self._is_sorted = True
        now = self.world.now
        return [j for j in self.waiting if j.not_before_s <= now and j.hidden_until <= now]

    def ends(self) -> dict[int, float]:
        """Return when each busy node is free at the latest."""
        soon = dict.fromkeys(self.completing, self.world.now + self.completing_s)
        return soon | {node: job.ends_at_most_s for job in self.running for node in job.nodes}

    def _pass(self) -> None:
        self._is_due = False
        jobs = self.startable()
        for job in jobs:
            job.reason = "Priority"
        for job, nodes in decide(jobs, self.free - self.down, self.partitions):
            self._start(job, nodes)
        self.on_change()

    def _backfill(self) -> None:
        self.world.after(self.backfill_s, None, self._backfill)
        jobs = self.startable()
        if not jobs:
            return
        for job in jobs:
            job.planned, job.planned_s = (), None
        starts, plans = plan(self.world.now, jobs, self.free - self.down, self.ends())
        for job, nodes in starts:
            self._start(job, nodes)
        for job, at, nodes in plans:
            job.planned, job.planned_s = nodes, at
        self.on_change()

    def _start(self, job: Job, nodes: tuple[int, ...]) -> None:
        self.waiting.remove(job)
        self.free -= set(nodes)
        job.nodes, job.planned, job.planned_s = nodes, (), None
        job.started_s = self.world.now
        self.running[job] = None
        self.world.log_event(job.id, "starts on", nodes)
        if job.on_start is not None:
            job.on_start(job)
        else:
            self.world.after(min(job.runs_s, job.limit_s), None, self._over, job)

    def _over(self, job: Job) -> None:
        if job in self.running:
            self.end_job(job)

    def _completed(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            del self.completing[node]
            self.free.add(node)
        self.changed()

"""The decision which jobs start, on which nodes, and which jobs they preempt; pure.

Jobs are considered by their partition's tier, then in the order of submission. A job that does not
fit reserves the nodes that it could use, as backfilling does without known run times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_elastic.testing.fake_slurm.config import FakeConfig
from hpc_elastic.testing.fake_slurm.jobs import COMPLETED, PENDING, Job

HELD, BEGIN, LIMIT = "JobHeldUser", "BeginTime", "JobArrayTaskLimit"
RESOURCES, PRIORITY, DEPENDENCY = "Resources", "Priority", "Dependency"
PARTITION_DOWN = "PartitionDown"


@dataclass
class SchedulingDecision:
    """The jobs to start and to preempt.

    Attributes:
        starts: Jobs and their nodes.
        victims: Jobs to preempt.
        reasons: The pending reason of each other job, by its place in the queue.
    """

    starts: list[tuple[Job, list[str]]] = field(default_factory=list)
    victims: list[Job] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Capacity:
    """The nodes and partitions that take jobs.

    Attributes:
        config: The cluster's settings.
        up: Nodes that take jobs.
        closed: Partitions that start no jobs.
    """

    config: FakeConfig
    up: frozenset[str]
    closed: frozenset[str] = frozenset()


def plan(jobs: Sequence[Job], cluster: Capacity, now: float) -> SchedulingDecision:
    """Return the jobs to start and to preempt now."""
    config = cluster.config
    decision, room = SchedulingDecision(), _Room(jobs, cluster)
    running = _running_elements(jobs)
    ended = {job.number or 0: job.state for job in jobs if job.is_over}
    known = {number for job in jobs for number in (job.number, job.array) if number is not None}
    begun = _begun(jobs)
    waiting = [job for job in jobs if job.state == PENDING and job.ending is None]
    by_tier = sorted(waiting, key=lambda j: (-config.partition(j.request.partition).tier, j.order))
    for job in by_tier:
        reason = _blocking_reason(job, cluster, now, running)
        if reason is None and _depends(job, begun, ended, known):
            reason = DEPENDENCY
        if reason is not None:
            decision.reasons[job.order] = reason
            continue
        _place_job(job, room, decision)
        if decision.starts and decision.starts[-1][0] is job and job.array is not None:
            running[job.array] = running.get(job.array, 0) + 1
    return decision


def _blocking_reason(
    job: Job, cluster: Capacity, now: float, running: Mapping[int, int]
) -> str | None:
    """Return why a job may not start even on free nodes; None if it may."""
    if job.held:
        return HELD
    if job.begin > now:
        return BEGIN
    if job.request.partition in cluster.closed:
        return PARTITION_DOWN
    config = cluster.config
    if job.request.num_nodes > config.nodes or job.request.cpus > config.cpus_per_node:
        return "PartitionConfig"
    if job.array is not None and job.limit and running.get(job.array, 0) >= job.limit:
        return LIMIT
    return None


def _running_elements(jobs: Iterable[Job]) -> dict[int, int]:
    found: dict[int, int] = {}
    for job in jobs:
        if job.array is not None and job.has_nodes:
            found[job.array] = found.get(job.array, 0) + 1
    return found


def _begun(jobs: Iterable[Job]) -> set[int]:
    """Return the ids of jobs that have started, or never will."""
    waiting = {n for job in jobs if job.state == PENDING for n in (job.number, job.array) if n}
    all_ids = {n for job in jobs for n in (job.number, job.array) if n}
    restarted = {n for job in jobs if job.restarts for n in (job.number, job.array) if n}
    return (all_ids - waiting) | restarted


def _depends(
    job: Job, begun: Iterable[int], ended: Mapping[int, str], known: Iterable[int]
) -> bool:
    """Return whether a job waits for another one; a forgotten job is not waited for."""
    begun, known = set(begun), set(known)
    for kind, other in job.request.dependency:
        if other not in known:
            continue
        if kind == "after" and other not in begun:
            return True
        if kind == "afterany" and other not in ended:
            return True
        if kind == "afterok" and ended.get(other) != COMPLETED:
            return True
    return False


class _Room:
    """The jobs on each node, and the CPUs that are free."""

    def __init__(self, jobs: Iterable[Job], cluster: Capacity) -> None:
        self.config, self.up = cluster.config, cluster.up
        self.reserved: set[str] = set()
        self.blocked: set[str] = set()
        self._on: dict[str, list[tuple[Job, int, bool]]] = {n: [] for n in self.config.node_names}
        for job in jobs:
            if job.has_nodes:
                self.occupy(job, job.nodes)

    def occupy(self, job: Job, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._on[node].append((job, job.request.cpus, job.request.exclusive))

    def eligible(self, job: Job) -> list[str]:
        """Return the nodes that a job may use, those of its nodelist first."""
        must = job.request.nodelist
        others = [n for n in self.config.node_names if n not in must]
        fixed = len(must) >= job.request.num_nodes
        nodes = [*must, *([] if fixed else others)]
        return [n for n in nodes if n not in job.excluded and n in self.up]

    def fits(self, job: Job, node: str, *, without: Iterable[Job] = ()) -> bool:
        """Return whether a job fits on a node without some others."""
        gone = list(without)
        there = [entry for entry in self._on[node] if entry[0] not in gone]
        if job.request.exclusive or any(exclusive for _, _, exclusive in there):
            return not there
        return sum(cpus for _, cpus, _ in there) + job.request.cpus <= self.config.cpus_per_node

    def preemptable(self, job: Job, node: str) -> list[Job]:
        """Return the jobs on a node that this one may preempt."""
        tier = self.config.partition(job.request.partition).tier
        found = []
        for other, _, _ in self._on[node]:
            theirs = self.config.partition(other.request.partition)
            if theirs.tier < tier and theirs.preempt_mode != "OFF":
                found.append(other)
        return found

    def victims(self, job: Job, nodes: Iterable[str]) -> list[Job]:
        """Return the jobs to preempt on these nodes, without those that are ending already."""
        found = {other.order: other for node in nodes for other in self.preemptable(job, node)}
        return [v for v in found.values() if v.ending is None and v.preempted is None]

    def reserve(self, job: Job, chosen: Sequence[str]) -> None:
        """Reserve nodes for a job that waits."""
        others = [node for node in self.eligible(job) if node not in chosen]
        self.reserved.update([*chosen, *others][: job.request.num_nodes])
        self.blocked.add(job.request.partition)


def _place_job(job: Job, room: _Room, decision: SchedulingDecision) -> None:
    """Start a job, or preempt others for it, or let it wait."""
    wanted, must = job.request.num_nodes, set(job.request.nodelist)
    mine = [n for n in room.eligible(job) if n not in room.reserved]
    free = [node for node in mine if room.fits(job, node)]
    if len(free) >= wanted and must <= set(free):
        nodes = sorted(free[:wanted], key=room.config.node_names.index)
        room.occupy(job, nodes)
        decision.starts.append((job, nodes))
        return
    taken = [
        n for n in mine if n not in free and room.fits(job, n, without=room.preemptable(job, n))
    ]
    chosen = [n for n in (mine if must else [*free, *taken]) if n in {*free, *taken}][:wanted]
    if len(chosen) == wanted and must <= set(chosen):
        decision.victims += room.victims(job, [node for node in chosen if node in taken])
    decision.reasons[job.order] = _pending_reason(job, room)
    room.reserve(job, chosen)


def _pending_reason(job: Job, room: _Room) -> str:
    away = [node for node in job.request.nodelist if node not in room.up]
    if away:
        return f"ReqNodeNotAvail, UnavailableNodes:{','.join(away)}"
    return PRIORITY if job.request.partition in room.blocked else RESOURCES

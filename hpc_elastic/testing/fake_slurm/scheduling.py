"""Which jobs start on which nodes, which others they take them from, and why the rest waits. Pure.

Jobs are looked at by their partition's tier, then in the order in which they were submitted. One
that does not fit keeps the nodes that it could use from those behind it, as backfilling does where
nothing is known of how long jobs take.
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
class Plan:
    """What is to be done.

    Attributes:
        starts: Jobs and their nodes.
        victims: Jobs that are to be preempted.
        reasons: Why each other job waits, by its place in the queue.
    """

    starts: list[tuple[Job, list[str]]] = field(default_factory=list)
    victims: list[Job] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """What there is to give.

    Attributes:
        config: The cluster's.
        up: Nodes that take jobs.
        closed: Partitions that start none.
    """

    config: FakeConfig
    up: frozenset[str]
    closed: frozenset[str] = frozenset()


def plan(jobs: Sequence[Job], cluster: Cluster, now: float) -> Plan:
    """Return what is to be done now."""
    config = cluster.config
    todo, room = Plan(), _Room(jobs, cluster)
    running = _running_elements(jobs)
    ended = {job.number or 0: job.state for job in jobs if job.is_over}
    known = {number for job in jobs for number in (job.number, job.array) if number is not None}
    begun = _begun(jobs)
    waiting = [job for job in jobs if job.state == PENDING and job.ending is None]
    by_tier = sorted(waiting, key=lambda j: (-config.partition(j.request.partition).tier, j.order))
    for job in by_tier:
        reason = _not_yet(job, cluster, now, running)
        if reason is None and _depends(job, begun, ended, known):
            reason = DEPENDENCY
        if reason is not None:
            todo.reasons[job.order] = reason
            continue
        _try(job, room, todo)
        if todo.starts and todo.starts[-1][0] is job and job.array is not None:
            running[job.array] = running.get(job.array, 0) + 1
    return todo


def _not_yet(job: Job, cluster: Cluster, now: float, running: Mapping[int, int]) -> str | None:
    """Return why a job may not start, whatever is free."""
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
    """Return the ids of jobs that have begun, or never will."""
    waiting = {n for job in jobs if job.state == PENDING for n in (job.number, job.array) if n}
    all_ids = {n for job in jobs for n in (job.number, job.array) if n}
    restarted = {n for job in jobs if job.restarts for n in (job.number, job.array) if n}
    return (all_ids - waiting) | restarted


def _depends(
    job: Job, begun: Iterable[int], ended: Mapping[int, str], known: Iterable[int]
) -> bool:
    """Tell whether a job waits for another; one that Slurm has forgotten is waited for no more."""
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
    """CPUs that are free, and who has the others."""

    def __init__(self, jobs: Iterable[Job], cluster: Cluster) -> None:
        self.config, self.up = cluster.config, cluster.up
        self.reserved: set[str] = set()
        self.blocked: set[str] = set()
        self._on: dict[str, list[tuple[Job, int, bool]]] = {n: [] for n in self.config.node_names}
        for job in jobs:
            if job.has_nodes:
                self.give(job, job.nodes)

    def give(self, job: Job, nodes: Iterable[str]) -> None:
        for node in nodes:
            self._on[node].append((job, job.request.cpus, job.request.exclusive))

    def eligible(self, job: Job) -> list[str]:
        """Return the nodes that a job may use at all, those that it must have first."""
        must = job.request.nodelist
        others = [n for n in self.config.node_names if n not in must]
        fixed = len(must) >= job.request.num_nodes
        nodes = [*must, *([] if fixed else others)]
        return [n for n in nodes if n not in job.excluded and n in self.up]

    def fits(self, job: Job, node: str, *, without: Iterable[Job] = ()) -> bool:
        """Tell whether a job has room on a node, once some others are gone."""
        gone = list(without)
        there = [entry for entry in self._on[node] if entry[0] not in gone]
        if job.request.exclusive or any(exclusive for _, _, exclusive in there):
            return not there
        return sum(cpus for _, cpus, _ in there) + job.request.cpus <= self.config.cpus_per_node

    def lower(self, job: Job, node: str) -> list[Job]:
        """Return the jobs on a node that this one may take it from."""
        tier = self.config.partition(job.request.partition).tier
        found = []
        for other, _, _ in self._on[node]:
            theirs = self.config.partition(other.request.partition)
            if theirs.tier < tier and theirs.preempt_mode != "OFF":
                found.append(other)
        return found

    def victims(self, job: Job, nodes: Iterable[str]) -> list[Job]:
        """Return who is to be told to leave these nodes; those who know are left alone."""
        found = {other.order: other for node in nodes for other in self.lower(job, node)}
        return [v for v in found.values() if v.ending is None and v.preempted is None]

    def reserve(self, job: Job, chosen: Sequence[str]) -> None:
        """Keep nodes for a job that waits, those that it would take first."""
        others = [node for node in self.eligible(job) if node not in chosen]
        self.reserved.update([*chosen, *others][: job.request.num_nodes])
        self.blocked.add(job.request.partition)


def _try(job: Job, room: _Room, todo: Plan) -> None:
    """Start a job, or take nodes for it from others, or let it wait."""
    wanted, must = job.request.num_nodes, set(job.request.nodelist)
    mine = [n for n in room.eligible(job) if n not in room.reserved]
    free = [node for node in mine if room.fits(job, node)]
    if len(free) >= wanted and must <= set(free):
        nodes = sorted(free[:wanted], key=room.config.node_names.index)
        room.give(job, nodes)
        todo.starts.append((job, nodes))
        return
    taken = [n for n in mine if n not in free and room.fits(job, n, without=room.lower(job, n))]
    chosen = [n for n in (mine if must else [*free, *taken]) if n in {*free, *taken}][:wanted]
    if len(chosen) == wanted and must <= set(chosen):
        todo.victims += room.victims(job, [node for node in chosen if node in taken])
    todo.reasons[job.order] = _why(job, room)
    room.reserve(job, chosen)


def _why(job: Job, room: _Room) -> str:
    away = [node for node in job.request.nodelist if node not in room.up]
    if away:
        return f"ReqNodeNotAvail, UnavailableNodes:{','.join(away)}"
    return PRIORITY if job.request.partition in room.blocked else RESOURCES

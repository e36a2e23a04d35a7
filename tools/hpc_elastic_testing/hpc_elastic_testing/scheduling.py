"""The decision which jobs start, on which nodes, and which jobs they preempt; pure.

Jobs are considered by their partition's tier, then in the order of submission. A job that does not
fit reserves the nodes that it could use, as backfilling does without known run times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import starmap

from hpc_elastic_testing.config import FakeConfig
from hpc_elastic_testing.jobs import COMPLETED, PENDING, Job


@dataclass
class SchedulingDecision:
    """The jobs to start and to preempt.

    ``reasons`` are the pending reasons of all other jobs, by place in the queue.
    """

    starts: list[tuple[Job, list[str]]] = field(default_factory=list)
    preemptions: list[Job] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def plan(
    jobs: Sequence[Job],
    now: float,
    *,
    config: FakeConfig,
    up: frozenset[str],
    closed: Set[str] = frozenset(),
) -> SchedulingDecision:
    """Return the jobs to start and to preempt now.

    ``up`` are the nodes that take jobs, ``closed`` the partitions that start none.
    """
    decision, room = SchedulingDecision(), _Room(jobs, config, up)
    num_running = Counter(job.array for job in jobs if job.has_nodes)

    def ids(chosen: Iterable[Job]) -> set[int]:
        return {n for job in chosen for n in (job.number, job.array) if n}

    known = ids(jobs)
    ended = {job.number or 0: job.state for job in jobs if job.is_over}
    pending = [job for job in jobs if job.state == PENDING]
    begun = (known - ids(pending)) | ids(job for job in jobs if job.restarts)

    def must_wait(kind: str, other: int) -> bool:
        if other not in known:
            return False  # it is forgotten
        if kind == "after":
            return other not in begun
        return other not in ended if kind == "afterany" else ended.get(other) != COMPLETED

    def blocking_reason(job: Job) -> str | None:
        """Return why a job may not start even on free nodes; None if it may."""
        if job.held:
            return "JobHeldUser"
        if job.begin > now:
            return "BeginTime"
        if job.request.partition in closed:
            return "PartitionDown"
        if job.request.num_nodes > config.nodes or job.request.cpus > config.cpus_per_node:
            return "PartitionConfig"
        if job.array is not None and job.limit and num_running[job.array] >= job.limit:
            return "JobArrayTaskLimit"
        return "Dependency" if any(starmap(must_wait, job.request.dependency)) else None

    waiting = [job for job in pending if job.ending is None]
    for job in sorted(
        waiting, key=lambda j: (-config.partition(j.request.partition).tier, j.nice, j.order)
    ):
        reason = blocking_reason(job)
        if reason is not None:
            decision.reasons[job.order] = reason
        elif _place_job(job, room, decision):
            num_running[job.array] += 1
    return decision


class _Room:
    """The jobs on each node, and the CPUs that are free."""

    def __init__(self, jobs: Iterable[Job], config: FakeConfig, up: Set[str]) -> None:
        self.config, self.up = config, up
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

    def fits(self, job: Job, node: str, *, without: Sequence[Job] = ()) -> bool:
        """Return whether a job fits on a node without some others."""
        there = [entry for entry in self._on[node] if entry[0] not in without]
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


def _place_job(job: Job, room: _Room, decision: SchedulingDecision) -> bool:
    """Start a job, or preempt others for it, or let it wait; return whether it starts."""
    wanted, must = job.request.num_nodes, set(job.request.nodelist)
    eligible = room.eligible(job)
    own = [n for n in eligible if n not in room.reserved]
    free = [node for node in own if room.fits(job, node)]
    if len(free) >= wanted and must <= set(free):
        nodes = sorted(free[:wanted], key=room.config.node_names.index)
        room.occupy(job, nodes)
        decision.starts.append((job, nodes))
        return True
    taken = [
        n for n in own if n not in free and room.fits(job, n, without=room.preemptable(job, n))
    ]
    chosen = [n for n in (own if must else [*free, *taken]) if n in {*free, *taken}][:wanted]
    if len(chosen) == wanted and must <= set(chosen):
        others = {j.order: j for n in chosen if n in taken for j in room.preemptable(job, n)}
        decision.preemptions += [
            other for other in others.values() if other.ending is None and other.preempted is None
        ]
    partition = job.request.partition
    if away := [node for node in job.request.nodelist if node not in room.up]:
        reason = f"ReqNodeNotAvail, UnavailableNodes:{','.join(away)}"
    else:
        reason = "Priority" if partition in room.blocked else "Resources"
    decision.reasons[job.order] = reason
    room.reserved.update([*chosen, *(n for n in eligible if n not in chosen)][:wanted])
    room.blocked.add(partition)
    return False

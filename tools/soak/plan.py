"""The faults of a soak: their kinds, and a plan of them from a seed (pure).

Kinds come in random order, and none twice before all have come once, so that a short soak has many
of them. A fault may *overlap* the one before: it comes while the run still recovers from that. Its
targets are chosen when it is injected, by `Fault.seed`, among the nodes of that moment.

The number of faults that silence a node is limited to the number of nodes, each on another node: a
run avoids a node that was silent twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_NODES = 4
"""Of the run; the companion has one more."""
_OVERLAP = 0.4
"""Probability that another fault overlaps one that allows it."""
_RESERVE = 1.5
"""Planned faults, as a multiple of those that `FaultKind.recovery_s` leaves time for."""
_SILENT = frozenset({"node_lost", "leader_lost", "leader_changed", "unreachable"})
_FAILED = frozenset({"worker_failed"})


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault, and what the run's timeline has to show of it.

    A fault is explained if the timeline has an entry, begun while the fault lasts, with one of the
    kind's `causes` and a host that was hit, or an entry of the kind's `timeline_kind`. A run
    recovers from two kinds without noticing them; those have neither.

    Attributes:
        name: In the plan and in the table.
        what: Description for people; ``{hosts}`` are the targets.
        causes: Causes in the timeline that fit, see `hpc_elastic.report.timeline`; empty if the
            group does not change.
        timeline_kind: Kind of an additional timeline entry; empty if there is none.
        visible_after: Whether the timeline shows it only after it is over.
        duration_s: Range of its duration, for a fault that lasts; longer, until the run notices.
        recovery_s: Time until the run has recovered on an idle machine, roughly.
        costs_task: Whether the task that was hit does not come back.
        counts_against_host: Whether a host is avoided after two of them.
        costs_node: Whether the run does not use the node again; it is planned once at most.
        companion: Whether it hits the companion instead of the run.
        may_overlap: Whether it may overlap another fault, and another one may overlap it.
        needs_slurm: Whether Slurm has to answer when it is injected.
        stops_slurm: Whether Slurm does not answer while it lasts.
        ft: Whether it is for replicas (``ft=true``) alone.
    """

    name: str
    what: str
    causes: frozenset[str] = frozenset()
    timeline_kind: str = ""
    visible_after: bool = False
    duration_s: tuple[float, float] = (0.0, 0.0)
    recovery_s: float = 15.0
    costs_task: bool = False
    counts_against_host: bool = False
    costs_node: bool = False
    companion: bool = False
    may_overlap: bool = False
    needs_slurm: bool = False
    stops_slurm: bool = False
    ft: bool = False


_ALL = (
    FaultKind(
        "preempt", "{hosts} preempted by a job of higher priority",
        frozenset({"preempted", "signalled"}), duration_s=(2.0, 8.0), recovery_s=30.0,
        may_overlap=True, needs_slurm=True,
    ),
    FaultKind(
        "preempt-all", "all nodes preempted by a job of higher priority",
        frozenset({"preempted", "signalled"}), duration_s=(2.0, 8.0), recovery_s=35.0,
    ),
    FaultKind(
        "kill-node", "power cut on {hosts}, which is started again later",
        frozenset({"node_lost", "leader_lost"}), duration_s=(1.0, 20.0), recovery_s=35.0,
        may_overlap=True,
    ),
    FaultKind(
        "cut", "network cable of {hosts} pulled, and plugged in later", _SILENT,
        duration_s=(1.0, 20.0), recovery_s=35.0, counts_against_host=True, may_overlap=True,
    ),
    FaultKind(
        "flap", "network cable of {hosts} with a loose contact", duration_s=(2.0, 6.0),
        recovery_s=12.0, counts_against_host=True,
    ),
    FaultKind(
        "freeze-node", "every process of {hosts} stopped, and continued later", _SILENT,
        duration_s=(1.0, 20.0), recovery_s=35.0, counts_against_host=True, may_overlap=True,
    ),
    FaultKind(
        "freeze-leader", "every process of {hosts}, the leader's node, stopped, continued later",
        _SILENT, duration_s=(6.0, 12.0), recovery_s=35.0, counts_against_host=True,
        may_overlap=True,
    ),
    FaultKind(
        "freeze-long", "every process of {hosts} stopped for longer than a minute", _SILENT,
        duration_s=(62.0, 75.0), recovery_s=100.0, counts_against_host=True,
    ),
    FaultKind(
        "slow-worker", "the worker of {hosts} makes no step for longer than its peers wait for it",
        duration_s=(100.0, 130.0), recovery_s=150.0, ft=True,
    ),
    FaultKind(
        "freeze-worker", "the worker of {hosts} stopped (SIGSTOP)", _FAILED, "hang",
        recovery_s=45.0,
    ),
    FaultKind("kill-worker", "the worker of {hosts} killed", _FAILED, may_overlap=True),
    FaultKind(
        "long-log", "the worker of {hosts} killed after 1 GB of stderr (a sparse file)", _FAILED,
    ),
    FaultKind(
        "clear-shm", "the run's folder in /dev/shm of {hosts} removed, then its worker killed",
        _FAILED,
    ),
    FaultKind(
        "full-shm", "the run's folder in /dev/shm of {hosts} full, and its worker killed", _FAILED,
        duration_s=(4.0, 8.0), recovery_s=30.0,
    ),
    FaultKind("early-exit", "the worker of {hosts} ends early with exit code 0", _FAILED),
    FaultKind(
        "kill-agent", "the agent of {hosts}, a follower, killed", frozenset({"node_lost"}),
        recovery_s=30.0,
    ),
    FaultKind(
        "kill-leader", "the leader's agent, on {hosts}, killed", frozenset({"leader_lost"}),
        recovery_s=35.0,
    ),
    FaultKind(
        "kill-warm-worker", "the warm worker of {hosts} killed", timeline_kind="warm_worker_died",
        recovery_s=8.0,
    ),
    FaultKind(
        "cancel", "the task of {hosts} cancelled", frozenset({"cancelled", "signalled"}),
        recovery_s=20.0, costs_task=True,
    ),
    FaultKind(
        "requeue", "the task of {hosts} requeued by hand", frozenset({"requeued", "signalled"}),
        recovery_s=30.0,
    ),
    FaultKind(
        "drain", "{hosts} drained, its task asked to leave (USR2)", frozenset({"asked"}),
        duration_s=(1.0, 10.0), recovery_s=30.0,
    ),
    FaultKind(
        "read-only", "all files of {hosts} read-only for a while, its task requeued by hand",
        timeline_kind="start_failed", duration_s=(4.0, 8.0), recovery_s=45.0, costs_node=True,
    ),
    FaultKind(
        "notice", "{hosts} asked to leave by a notice file", frozenset({"asked"}), recovery_s=30.0,
        may_overlap=True,
    ),
    FaultKind(
        "companion-preempt", "{hosts}, the companion's node, preempted by a job of higher priority",
        frozenset({"preempted", "signalled"}), duration_s=(2.0, 8.0), recovery_s=35.0,
        companion=True, needs_slurm=True,
    ),
    FaultKind(
        "companion-requeue", "the companion's task, on {hosts}, requeued by hand",
        frozenset({"requeued", "signalled"}), recovery_s=30.0, companion=True,
    ),
    FaultKind(
        "slurmctld", "slurmctld ended, and started again later", duration_s=(1.0, 15.0),
        may_overlap=True, stops_slurm=True,
    ),
    FaultKind(
        "full-disk", "the disk of the run directory full", timeline_kind="checkpoint_failed",
        visible_after=True, duration_s=(4.0, 10.0), recovery_s=20.0,
    ),
    FaultKind(
        "damage", "the newest checkpoint damaged, then the worker of {hosts} killed", _FAILED,
    ),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        number: From 1.
        kind_name: A key of `KINDS`.
        after_s: Pause before it.
        duration_s: Seconds for which it lasts at least.
        seed: Decides its targets and variants when it is injected.
        overlaps: Whether it comes before the run has recovered from the fault before.
    """

    number: int
    kind_name: str
    after_s: float
    duration_s: float
    seed: int
    overlaps: bool = False

    @property
    def kind(self) -> FaultKind:
        """Its kind."""
        return KINDS[self.kind_name]

    def describe(self, hosts: Sequence[str]) -> str:
        """Return what it does to some hosts, for people."""
        what = self.kind.what.format(hosts=", ".join(hosts))
        return f"{what} (overlaps the one before)" if self.overlaps else what


def plan(seed: int, minutes: float, *, ft: bool = False) -> list[Fault]:
    """Return the faults, in order: more than there is time for.

    Args:
        seed: The same seed gives the same faults; with more minutes, more of them.
        minutes: For how long faults are injected.
        ft: Whether the nodes of the run are replicas.
    """
    chance = random.Random(seed)
    all_kinds = [kind for kind in _ALL if ft or not kind.ft]
    faults: list[Fault] = []
    num_silenced, total_s = 0, 0.0

    def is_allowed(kind: FaultKind) -> bool:
        if kind.costs_node and any(fault.kind is kind for fault in faults):
            return False
        return not kind.counts_against_host or num_silenced < NUM_NODES

    def make_fault(kind: FaultKind, *, overlaps: bool = False) -> Fault:
        nonlocal num_silenced
        num_silenced += kind.counts_against_host
        return Fault(
            number=len(faults) + 1,
            kind_name=kind.name,
            after_s=round(chance.uniform(0.0, 2.0 if overlaps else 3.0), 1),
            duration_s=round(chance.uniform(*kind.duration_s), 1),
            seed=chance.getrandbits(32),
            overlaps=overlaps,
        )

    while True:
        for kind in chance.sample(all_kinds, len(all_kinds)):
            if not is_allowed(kind):
                continue
            total_s += kind.recovery_s
            is_full = total_s > _RESERVE * 60.0 * minutes
            if not faults or not is_full:
                faults.append(make_fault(kind))
            if is_full:
                return faults
            if kind.may_overlap and chance.random() < _OVERLAP:
                kinds = [k for k in KINDS.values() if k.may_overlap and is_allowed(k)]
                fitting = [k for k in kinds if not (kind.stops_slurm and k.needs_slurm)]
                faults.append(make_fault(chance.choice(fitting), overlaps=True))


def num_tasks(faults: Sequence[Fault]) -> int:
    """Return the number of tasks with which no fault leaves a node unused."""
    return NUM_NODES + sum(fault.kind.costs_task for fault in faults)


def overlapping_groups(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Return the faults in groups: each fault with those that overlap it."""
    groups: list[list[Fault]] = []
    for fault in faults:
        if fault.overlaps:
            groups[-1].append(fault)
        else:
            groups.append([fault])
    return groups

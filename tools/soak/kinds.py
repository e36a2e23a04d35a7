"""The kinds of faults, and what the run's story has to say of each (pure).

A fault is explained if an episode that begins while it lasts has a cause that is one of the kind's
`tells`, and that names a host that was hit, or is itself of the kind's `aside`. Two kinds of faults
a run gets over without noticing anything, and without a word: those have neither.
"""

from __future__ import annotations

from dataclasses import dataclass

_WENT_SILENT = frozenset({"node_lost", "leader_lost", "leader_changed", "unreachable"})
_FAILED = frozenset({"worker_failed"})


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: In the plan and in the table.
        what: What is done, for people; ``{hosts}`` is where.
        tells: What a cause in the story may be called, see `hpc_elastic.report.causes`; empty: the
            group does not change for it.
        aside: The kind of an episode of its own that the story has of it; empty: it has none.
        told_late: Whether the run can tell of it only once it is over.
        lasts_s: Between which seconds it lasts, where it lasts at all; longer, if the run is to
            notice it and has not.
        takes_s: How long a run needs to get over it on an idle machine, about.
        costs_task: Whether the task that was hit does not come back.
        strikes: Whether it is held against a host: two strikes, and the run avoids it.
        costs_node: Whether the run does not use the node again; then it is thrown once.
        companion: Whether it hits the companion, the other run of the same sweep of faults.
        pairs: Whether it may come on the heels of another, or have another on its own.
        asks_slurm: Whether Slurm is needed to throw it.
        stops_slurm: Whether Slurm does not answer while it lasts.
    """

    name: str
    what: str
    tells: frozenset[str] = frozenset()
    aside: str = ""
    told_late: bool = False
    lasts_s: tuple[float, float] = (0.0, 0.0)
    takes_s: float = 15.0
    costs_task: bool = False
    strikes: bool = False
    costs_node: bool = False
    companion: bool = False
    pairs: bool = False
    asks_slurm: bool = False
    stops_slurm: bool = False


_ALL = (
    Kind(
        "preempt", "{hosts} taken by a job of higher priority",
        frozenset({"preempted", "signalled"}), lasts_s=(2.0, 8.0), takes_s=30.0, pairs=True,
        asks_slurm=True,
    ),
    Kind(
        "preempt-all", "all nodes taken by a job of higher priority",
        frozenset({"preempted", "signalled"}), lasts_s=(2.0, 8.0), takes_s=35.0,
    ),
    Kind(
        "kill-node", "power cut on {hosts}, which is started again later",
        frozenset({"node_lost", "leader_lost"}), lasts_s=(1.0, 20.0), takes_s=35.0, pairs=True,
    ),
    Kind(
        "cut", "network cable of {hosts} pulled, and put back later",
        _WENT_SILENT, lasts_s=(1.0, 20.0), takes_s=35.0, strikes=True, pairs=True,
    ),
    Kind(
        "flap", "network cable of {hosts} with a loose contact", lasts_s=(2.0, 6.0), takes_s=12.0,
        strikes=True,
    ),
    Kind(
        "freeze-node", "every process of {hosts} stopped, and continued later",
        _WENT_SILENT, lasts_s=(1.0, 20.0), takes_s=35.0, strikes=True, pairs=True,
    ),
    Kind(
        "freeze-leader", "every process of {hosts}, the leader's node, stopped, continued later",
        _WENT_SILENT, lasts_s=(6.0, 12.0), takes_s=35.0, strikes=True, pairs=True,
    ),
    Kind(
        "freeze-worker", "the worker of {hosts} stopped (SIGSTOP)", _FAILED, "hang",
        takes_s=45.0,
    ),
    Kind("kill-worker", "the worker of {hosts} killed", _FAILED, pairs=True),
    Kind("early-exit", "the worker of {hosts} ends early with exit code 0", _FAILED),
    Kind(
        "kill-agent", "the agent of {hosts}, a follower, killed", frozenset({"node_lost"}),
        takes_s=30.0,
    ),
    Kind(
        "kill-leader", "the leader's agent, on {hosts}, killed", frozenset({"leader_lost"}),
        takes_s=35.0,
    ),
    Kind("kill-spare", "the spare of {hosts} killed", aside="warm_worker_died", takes_s=8.0),
    Kind(
        "cancel", "the task of {hosts} cancelled", frozenset({"cancelled", "signalled"}),
        takes_s=20.0, costs_task=True,
    ),
    Kind(
        "requeue", "the task of {hosts} requeued by hand", frozenset({"requeued", "signalled"}),
        takes_s=30.0,
    ),
    Kind(
        "drain", "{hosts} drained, its task asked to leave (USR2)", frozenset({"asked"}),
        lasts_s=(1.0, 10.0), takes_s=30.0,
    ),
    Kind(
        "read-only", "all files of {hosts} read-only for a while, its task requeued by hand",
        aside="start_failed", lasts_s=(4.0, 8.0), takes_s=45.0, costs_node=True,
    ),
    Kind(
        "notice", "{hosts} asked to leave by a notice file", frozenset({"asked"}), takes_s=30.0,
        pairs=True,
    ),
    Kind(
        "companion-preempt", "{hosts}, the companion's node, taken by a job of higher priority",
        frozenset({"preempted", "signalled"}), lasts_s=(2.0, 8.0), takes_s=35.0, companion=True,
        asks_slurm=True,
    ),
    Kind(
        "companion-requeue", "the companion's task, on {hosts}, requeued by hand",
        frozenset({"requeued", "signalled"}), takes_s=30.0, companion=True,
    ),
    Kind(
        "slurmctld", "slurmctld ended, and started again later", lasts_s=(1.0, 15.0), pairs=True,
        stops_slurm=True,
    ),
    Kind(
        "full-disk", "the disk of the run directory full", aside="checkpoint_failed",
        told_late=True, lasts_s=(4.0, 10.0), takes_s=20.0,
    ),
    Kind("damage", "the newest checkpoint damaged, then the worker of {hosts} killed", _FAILED),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}

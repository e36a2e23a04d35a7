"""What Slurm says of a task, and what it means for a run. Pure.

    PENDING   has no node to work on now, and may get one: queued, held, requeued, suspended, or its
              node is still being booted. Nobody waits for it.
    RUNNING   its processes run: it joins the rendezvous, or has.
    LEAVING   its processes are being ended. It is PENDING next if it is requeued, else ENDED.
    ENDED     it will not run again.

LEAVING is apart because both other readings are wrong: a member that leaves is not waited for, and
a run whose tasks all leave, for they were all preempted, has not ended.
A state that a later Slurm may add counts as LEAVING: neither waited for, nor given up.
Source: https://slurm.schedmd.com/job_state_codes.html
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The four things a run distinguishes."""

    PENDING = "pending"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"


_STATES: dict[Phase, tuple[str, ...]] = {
    Phase.PENDING: (
        *("PENDING", "CONFIGURING", "POWER_UP_NODE", "RESV_DEL_HOLD", "SUSPENDED", "STOPPED"),
        *("REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "EXPEDITING"),
    ),
    Phase.RUNNING: ("RUNNING", "SIGNALING", "RESIZING", "UPDATE_DB"),
    Phase.LEAVING: ("COMPLETING", "STAGE_OUT"),
    Phase.ENDED: (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"),
        *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    ),
}
PHASES: dict[str, Phase] = {state: phase for phase, states in _STATES.items() for state in states}

SOON_S = 3.0
"""A start no further ahead is not worth hastening; longer than it takes to say ``now+2``."""
LAUNCHER_ENDED = "its launcher has ended"
"""The reason of a task of ``launcher=local`` that nothing would start again."""


LAUNCH_HELD = "launch failed requeued held"
"""Slurm's reason for a task that a node could not start, and that is in the queue again."""


@dataclass(frozen=True)
class TaskState:
    """One task as squeue sees it.

    Attributes:
        task: ``<array job id>_<index>``, or the job id of a job that is no array.
        state: Slurm's word, such as PENDING.
        reason: Why it is in it, such as Resources; empty where Slurm says None.
        node: Its node, a host list if it has several; empty if it has none. While `is_launch_held`
            the node that could not start it, if that is known.
        restarts: How often it was requeued; None if squeue does not say.
        time_left_s: How long it may still run, the whole time limit while it waits; None if there
            is no limit, or none known. A length of time and no point in it: no clock but that of
            the controller stands behind it.
        preempted: Whether Slurm preempts this attempt, or has: from its first signal on, until the
            next attempt waits.
        starts_in_s: While it is PENDING, how far its start lies ahead, by this machine's clock: the
            time before which it may not start, or what Slurm expects; None if it has neither.
    """

    task: str
    state: str
    reason: str = ""
    node: str = ""
    restarts: int | None = None
    time_left_s: float | None = None
    preempted: bool = False
    starts_in_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether it may not start yet, however idle the cluster is: a requeue's two minutes.

        Right after a requeue no reason is given; later it is BeginTime. A start less than
        `SOON_S` ahead is no hold.
        """
        waits_for_time = self.state == "PENDING" and self.reason in ("", "BeginTime")
        return waits_for_time and (self.starts_in_s or 0.0) > SOON_S

    @property
    def is_launch_held(self) -> bool:
        """Whether Slurm holds it for good because a node could not start it."""
        return self.state == "PENDING" and self.reason.replace("_", " ") == LAUNCH_HELD

    @property
    def phase(self) -> Phase:
        """What the state means for a run."""
        return PHASES.get(self.state, Phase.LEAVING)


def queue_name(task: str) -> str:
    """Return what squeue and scontrol call a task: a node of a job of several goes by the job."""
    return task.partition(".")[0]


def job_of(task: str) -> str:
    """Return the job id, of the array or of the job of several nodes, that a task is a part of."""
    return queue_name(task).partition("_")[0]


# ---- Reasons for which a task waits that no patience cures, or has ended, and what to do. Pure
# Slurm takes such a task and keeps it pending for ever, unless the site has set
# EnforcePartLimits. Reasons that pass by themselves (Resources, Priority, a limit that other jobs
# of the user use up) are not among them. Source: https://slurm.schedmd.com/job_reason_codes.html


_TIME = "ask for less by launcher.time, or choose another launcher.partition"
_NODES = "ask for fewer nodes, or choose another launcher.partition"
_REMEDIES = {
    "PartitionTimeLimit": f"the partition's time limit is shorter (`sinfo -o '%P %l'`): {_TIME}",
    "PartitionNodeLimit": f"the partition does not give that many nodes to one job: {_NODES}",
    "PartitionConfig": "the partition's nodes are fewer, or smaller, than what is asked for "
    "(`sinfo -o '%P %D %c %m %G'`): ask for less, or choose another launcher.partition",
    "PartitionDown": "the partition is down: choose another launcher.partition, or ask the site",
    "PartitionInactive": "the partition is off: choose another launcher.partition, or ask the site",
    "AssocMaxWallDurationPerJobLimit": f"your account's time limit is shorter: {_TIME}",
    "QOSMaxWallDurationPerJobLimit": f"the time limit of the QOS is shorter: {_TIME}",
    "AssocMaxNodePerJobLimit": f"your account gets fewer nodes for one job: {_NODES}",
    "QOSMaxNodePerJobLimit": f"the QOS gives fewer nodes to one job: {_NODES}",
    "InvalidAccount": "the account is not yours any more: set launcher.account",
    "InvalidQOS": "the QOS is not one that you may use: set launcher.qos",
    "BadConstraints": "no node has what launcher.constraint asks for (`sinfo -o '%N %f'`), or the "
    "task avoids those that have (ExcNodeList in `scontrol show job`)",
    "launch failed requeued held": "its node could not start it and takes no more jobs: `sinfo -R` "
    "says why; if that is not the prolog, which is the admin's, `scontrol release` lets it go",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "job requeued in held state": "it was requeued to be held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask the site",
}


_LOG = "the task's log says why"
_OF_ENDS = {
    "JobLaunchFailure": "its node could not start it: the folder of its log, or Slurm's own, can "
    "not be written there, say. `sinfo -R` and slurmd's log on the node tell more",
    "NonZeroExitCode": f"{_LOG}; a line of launcher.setup, or Python's environment, may not work "
    "there",
    "OutOfMemory": "it took more memory than it has: ask for more, by launcher.mem",
    "OUT_OF_MEMORY": "it took more memory than it has: ask for more, by launcher.mem",
    "BOOT_FAIL": "its node could not be booted: `sinfo -R` says why",
    "FAILED": _LOG,
}


def remedy_of_end(reason: str, state: str) -> str | None:
    """Return what to do about a task that ended by itself before it joined; None if unknown."""
    return _OF_ENDS.get(reason) or _OF_ENDS.get(state)


def remedy(reason: str) -> str | None:
    """Return what to do about a task that waits for this reason; None if it may yet start."""
    return _REMEDIES.get(reason.replace("_", " "))  # as some releases write blanks

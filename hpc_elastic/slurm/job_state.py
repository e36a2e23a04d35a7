"""States of a task in Slurm's queue, and their meaning for a run. Pure.

    PENDING     has no node to work on now, and may get one: queued, held, requeued, suspended, or
                its node is still being booted. The run does not wait for it.
    RUNNING     its processes run: it joins the rendezvous, or has.
    COMPLETING  its processes are being ended. It is PENDING next if it is requeued, else ENDED.
    ENDED       it will not run again.

COMPLETING is apart because both other readings are wrong: the run does not wait for a member that
exits, and a run whose tasks all exit, for they were all preempted, has not ended.
A state that a later Slurm may add counts as COMPLETING: neither waited for, nor given up.
Source: https://slurm.schedmd.com/job_state_codes.html
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The four states that a run distinguishes."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETING = "completing"
    ENDED = "ended"


_PHASES = {
    Phase.PENDING: "PENDING CONFIGURING POWER_UP_NODE RESV_DEL_HOLD SUSPENDED STOPPED REQUEUED"
    " REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT EXPEDITING",
    Phase.RUNNING: "RUNNING SIGNALING RESIZING UPDATE_DB",
    Phase.ENDED: "COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY DEADLINE NODE_FAIL BOOT_FAIL"
    " PREEMPTED REVOKED LAUNCH_FAILED RECONFIG_FAIL",
}
_PHASE_OF = {state: phase for phase, states in _PHASES.items() for state in states.split()}

SOON_S = 3.0
"""A start no further ahead need not be hastened; more than the command ``now+2`` takes."""
LAUNCHER_ENDED = "its launcher has ended"
"""The reason of a task of ``launcher=local`` that nothing would start again."""


@dataclass(frozen=True)
class TaskState:
    """One task as squeue sees it.

    Attributes:
        task: ``<array job id>_<index>``, or the job id of a job that is no array.
        state: Slurm's word, such as PENDING.
        reason: Why it is in it, such as Resources; empty for Slurm's None.
        node: Its node, a host list if it has several; empty if it has none. While `is_launch_held`
            the node that could not start it, if that is known.
        restarts: Number of its requeues; None if unknown.
        time_left_s: Seconds that it may still run, the whole time limit while it waits; None if
            there is no limit, or none known. It depends on no clock but the controller's.
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
        """Whether it may not start yet on an idle cluster: a requeue's two minutes.

        Right after a requeue it has no reason; later BeginTime. A start less than `SOON_S` ahead
        is no hold.
        """
        waits_for_time = self.state == "PENDING" and self.reason in ("", "BeginTime")
        return waits_for_time and (self.starts_in_s or 0.0) > SOON_S

    @property
    def is_launch_held(self) -> bool:
        """Whether Slurm holds it for good because a node could not start it."""
        return (
            self.state == "PENDING"
            and self.reason.replace("_", " ") == "launch failed requeued held"
        )

    @property
    def phase(self) -> Phase:
        """What the state means for a run."""
        return _PHASE_OF.get(self.state, Phase.COMPLETING)


def queue_name(task: str) -> str:
    """Return the name of a task for squeue and scontrol: of a node of a larger job, the job's."""
    return task.partition(".")[0]


def job_of(task: str) -> str:
    """Return the job id, of the array or of the job of several nodes, that a task is a part of."""
    return queue_name(task).partition("_")[0]


# ---- Reasons for which a task waits for ever, or has ended, and what to do about it
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
    "launch failed requeued held": "its node could not start it and takes no more jobs: "
    "`sinfo -R` has the reason; if that is not the prolog, which is the admin's, `scontrol "
    "release` lets it go",
    "JobHeldUser": "it is held: `scontrol release` lets it go",
    "job requeued in held state": "it was requeued to be held: `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it: ask the site",
}


_MEMORY = "it took more memory than it has: ask for more, by launcher.mem"
_LOG = "the task's log has the reason"
_OF_ENDS = {
    "JobLaunchFailure": "its node could not start it; for example, the folder of its log, or "
    "Slurm's own, is not writable there. `sinfo -R` and slurmd's log on the node have more",
    "NonZeroExitCode": f"{_LOG}; a line of launcher.setup, or Python's environment, may not work "
    "there",
    "OutOfMemory": _MEMORY,
    "OUT_OF_MEMORY": _MEMORY,
    "BOOT_FAIL": "its node could not be booted: `sinfo -R` has the reason",
    "FAILED": _LOG,
}


def remedy_of_end(reason: str, state: str) -> str | None:
    """Return what to do about a task that ended by itself before it joined; None if unknown."""
    return _OF_ENDS.get(reason) or _OF_ENDS.get(state)


def remedy(reason: str) -> str | None:
    """Return what to do about a task that waits for this reason; None if it may yet start."""
    return _REMEDIES.get(reason.replace("_", " "))  # as some releases write blanks

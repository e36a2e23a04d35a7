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

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

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from hpc_elastic.slurm.nodelist import expand_indices


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

FIELDS = (
    *("ArrayJobID", "ArrayTaskID", "JobID", "State", "RestartCnt", "NodeList", "TimeLeft"),
    *("PreemptTime", "StartTime", "Reason"),
)
"""The fields asked of squeue; the reason comes last, for it is free text."""

NO_ARRAY = "N/A"
"""squeue's index of a job that is no element of an array."""

SQUEUE_FORMAT = ",".join(f"{name}:0|" for name in FIELDS)
"""For squeue -O: width 0 cuts nothing."""

SOON_S = 3.0
"""A start no further ahead is not worth hastening; longer than it takes to say ``now+2``."""

_DATE = "%Y-%m-%dT%H:%M:%S"
_DURATION = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", re.ASCII)
"""Days, hours, minutes and seconds."""


@dataclass(frozen=True)
class TaskState:
    """One task as squeue sees it.

    Attributes:
        task: ``<array job id>_<index>``, or the job id of a job that is no array.
        state: Slurm's word, such as PENDING.
        reason: Why it is in it, such as Resources; empty where Slurm says None.
        node: Its node, a host list if it has several; empty if it has none.
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
    def phase(self) -> Phase:
        """What the state means for a run."""
        return PHASES.get(self.state, Phase.LEAVING)


def queue_name(task: str) -> str:
    """Return what squeue and scontrol call a task: a node of a job of several goes by the job."""
    return task.partition(".")[0]


def job_of(task: str) -> str:
    """Return the job id, of the array or of the job of several nodes, that a task is a part of."""
    return queue_name(task).partition("_")[0]


def parse_time_left(text: str) -> float | None:
    """Return the seconds in squeue's TimeLeft, such as ``1-02:03:04`` or ``2:03``.

    Returns:
        None for UNLIMITED, NOT_SET, INVALID (the limit has passed), and whatever else is no time.
    """
    m = _DURATION.fullmatch(text.strip())
    if m is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in m.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_date(text: str) -> float | None:
    """Return a date of squeue's, which is local time, in seconds since the epoch.

    Returns:
        None for N/A, NONE, Unknown, and whatever else is no date.
    """
    try:
        return time.mktime(time.strptime(text.strip(), _DATE))
    except (ValueError, OverflowError):
        return None


def parse_squeue(output: str, now: float | None = None) -> dict[str, TaskState]:
    """Return the tasks in what ``squeue -h -O SQUEUE_FORMAT`` printed, by their names.

    Without ``-r``: the pending elements of an array are one line then, and are taken apart here.
    squeue itself loses the last of a set such as ``3-9:2`` (22.05). An array whose last pending
    elements were cancelled leaves a line without an index, which is no task.

    Args:
        output: What squeue printed.
        now: Seconds since the epoch, to tell how far a start lies ahead; None leaves that open.

    Raises:
        ValueError: a line is not of that format.
    """
    lines = [_fields(line) for line in output.splitlines() if line.strip()]
    arrays = {array_job for array_job, index, *_ in lines if index != NO_ARRAY}
    tasks = [
        task
        for line in lines
        if line[1] != NO_ARRAY or line[0] not in arrays
        for task in _tasks(now, *line)
    ]
    return {task.task: task for task in tasks}


def _fields(line: str) -> list[str]:
    fields = line.split("|", len(FIELDS) - 1)
    if len(fields) != len(FIELDS) or not fields[0].strip().isdecimal():
        raise ValueError(f"not a line of squeue in the format {SQUEUE_FORMAT}: {line!r}")
    return [field.strip() for field in (*fields[:-1], fields[-1].rstrip().removesuffix("|"))]


def _tasks(
    now: float | None, array_job: str, indices: str, job: str, *rest: str
) -> Iterator[TaskState]:
    """Yield what one line stands for."""
    state, restarts, node, left, preempted, start, reason = rest
    names = [job]
    if indices != NO_ARRAY:
        names = [f"{array_job}_{index}" for index in expand_indices(indices)[0]]
    starts_at = parse_date(start) if state == "PENDING" and now is not None else None
    known = TaskState(
        "", state,
        reason="" if reason == "None" else reason,
        node=node,
        restarts=int(restarts) if restarts.isdecimal() else None,
        time_left_s=parse_time_left(left),
        preempted=parse_date(preempted) is not None,
        starts_in_s=None if starts_at is None or now is None else starts_at - now,
    )  # fmt: skip
    for name in names:
        yield replace(known, task=name)

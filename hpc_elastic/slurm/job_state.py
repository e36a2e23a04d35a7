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

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache


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
_LAUNCH_HELD = ("launch failed requeued held", "launch failure limit exceeded requeued held")
LAUNCHER_ENDED = "its launcher has ended"
"""The reason of a task of ``launcher=local`` that nothing would start again."""


@dataclass(frozen=True)
class TaskState:
    """One task as squeue sees it.

    Attributes:
        task: ``<array job id>_<index>``, or the job id of a job that is no array.
        node: Its node, a host list if it has several; empty if it has none. While `is_launch_held`
            the node that could not start it, if that is known.
        slot: The place of the task in its run, which another in its place has as well; None if the
            run was not looked at.
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
    slot: int | None = field(default=None, compare=False, kw_only=True)
    restarts: int | None = None
    time_left_s: float | None = None
    preempted: bool = False
    starts_in_s: float | None = None

    def has_replaced(self, attempt: int | None) -> bool:
        """Whether this is a later attempt of the task, which may run on another node."""
        return attempt is not None and (self.restarts or 0) > attempt

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
        return self.state == "PENDING" and self.reason.replace("_", " ") in _LAUNCH_HELD

    @property
    def is_booting(self) -> bool:
        """Whether it has a node that is not up yet."""
        return self.state in ("CONFIGURING", "POWER_UP_NODE")

    @property
    def phase(self) -> Phase:
        """What the state means for a run."""
        return _PHASE_OF.get(self.state, Phase.COMPLETING)


# Slurm takes tasks that can never start and keeps them pending, unless the site has set
# EnforcePartLimits. The rows of `_REASONS` cover the reasons of 22.05 to 26.05 (slurm_job_reason in
# job_state_reason.c). Source: https://slurm.schedmd.com/job_reason_codes.html


BEHIND_OTHER_PARTITION = (
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
)
"""The reason of a job whose nodes a job of another partition waits for that is tried before it."""
WAITS_FOR_NODES = ("Priority", "Resources", BEHIND_OTHER_PARTITION)
"""Reasons of jobs that wait for nodes, once Slurm has looked at them."""


class Wait(Enum):
    """What ends the wait of a task."""

    PASSES = "passes"  # free nodes, a date, a repair
    OWN_LIMIT = "own limit"  # the end of another job of the user, the account or the array
    NEVER = "never"  # another request only, or another budget
    HELD = "held"  # a release


_TIME = "ask for less by launcher.time, or choose another launcher.partition"
_NODES = "ask for fewer nodes, or choose another launcher.partition"
_LESS = "a limit for each job: ask for less on a node, or choose another launcher.qos"
_BUDGET = "the budget is used up: choose another launcher.account or launcher.qos, or wait until "
_BUDGET += "it is renewed"
_REASONS: tuple[tuple[str, Wait, str], ...] = (
    ("PartitionTimeLimit", Wait.NEVER, f"the partition's limit (`sinfo -o '%P %l'`): {_TIME}"),
    ("PartitionNodeLimit", Wait.NEVER, "the partition gives a job more nodes at least, or fewer at "
     "most (MinNodes, MaxNodes in `scontrol show partition`): launcher.coallocate_min asks for "
     "several at once; or choose another launcher.partition"),
    ("PartitionConfig", Wait.NEVER, "the partition's nodes are fewer, or smaller, than what is "
     "asked for (`sinfo -o '%P %D %c %m %G'`): ask for less, or choose another launcher.partition"),
    ("PartitionDown", Wait.NEVER, "the partition is down: choose another one, or ask the site"),
    ("PartitionInactive", Wait.NEVER, "the partition is off: choose another one, or ask the site"),
    ("AssocMaxWallDurationPerJobLimit", Wait.NEVER, f"your account's time limit: {_TIME}"),
    ("QOSMaxWallDurationPerJobLimit", Wait.NEVER, f"the time limit of the QOS: {_TIME}"),
    ("AssocMaxNodePerJobLimit", Wait.NEVER, f"your account gets fewer nodes for one job: {_NODES}"),
    ("QOSMaxNodePerJobLimit", Wait.NEVER, f"the QOS gives fewer nodes to one job: {_NODES}"),
    (r"(QOS|Assoc)Max\w+Per(Job|Node)(Limit)?|MaxMemPerLimit", Wait.NEVER, _LESS),
    (r"QOSMin\w+", Wait.NEVER, "the QOS is for larger jobs: choose another launcher.qos"),
    (r"(QOS|Assoc)Grp\w+RunMinutes(Limit)?", Wait.OWN_LIMIT, ""),
    (r"(QOS|Assoc)Grp\w*(Minutes|Wall)(Limit)?|(QOS|Association)TimeLimit|QOSUsageThreshold",
     Wait.NEVER, _BUDGET),
    (r"(QOS|Assoc)(Grp|Max)\w+|(QOS|Association)(Job|Resource)Limit", Wait.OWN_LIMIT, ""),
    (r"Max\w+PerAccount|JobArrayTaskLimit|AccountingPolicy", Wait.OWN_LIMIT, ""),
    ("InvalidAccount|AccountNotAllowed", Wait.NEVER, "the account is not yours, or not in this "
     "partition: set launcher.account"),
    ("InvalidQOS|QOSNotAllowed", Wait.NEVER, "the QOS is not one that you may use here: set "
     "launcher.qos"),
    ("BadConstraints|Constraints", Wait.NEVER, "no node has what launcher.constraint asks for "
     "(`sinfo -o '%N %f'`), or the task avoids those that have (ExcNodeList in `scontrol show "
     "job`)"),
    ("DependencyNeverSatisfied", Wait.NEVER, "the job that it depends on has ended otherwise"),
    ("Reservation(Deleted|Invalid)", Wait.NEVER, "the reservation is gone: choose another "
     "launcher.sbatch.reservation"),
    ("BurstBufferOperation", Wait.NEVER, "the burst buffer failed: ask the site"),
    ("DeadLine", Wait.NEVER, "it cannot end before its deadline"),
    ("launch fail(ed|ure limit exceeded) requeued held", Wait.HELD, "its node could not start it "
     "and takes no more jobs: `sinfo -R` has the reason; if that is not the prolog, which is the "
     "admin's, `scontrol release` lets it go"),
    ("JobHoldMaxRequeue", Wait.HELD, "Slurm has requeued it too often (MaxBatchRequeue): "
     "`scontrol release` lets it go"),
    ("JobHeldUser", Wait.HELD, "it is held: `scontrol release` lets it go"),
    ("job requeued in (special exit|held) state", Wait.HELD, "it was requeued to be held: "
     "`scontrol release` lets it go"),
    ("JobHeldAdmin", Wait.HELD, "an administrator holds it: ask the site"),
    ("|None|Priority|Resources|Dependency|BeginTime|Licenses|Reservation|Prolog|Cleaning",
     Wait.PASSES, ""),
    ("ReqNodeNotAvail|NodeDown|FrontEndDown|SchedDefer|PowerNotAvail|PowerReserved|FedJobLock",
     Wait.PASSES, ""),
    ("BurstBufferResources|BurstBufferStageIn", Wait.PASSES, ""),
    ("SystemFailure|JobLaunchFailure|NonZeroExitCode|RaisedSignal|TimeLimit|InactiveLimit|"
     "OutOfMemory", Wait.PASSES, ""),  # of an earlier attempt
)  # fmt: skip
"""Pattern of a whole reason, kind, and what to do; the first row that fits decides."""


_SOONER = "a shorter launcher.time may start sooner"
_WORDS = {
    "": "Slurm has not looked at it yet",
    "None": "Slurm has not looked at it yet",
    "Priority": f"jobs of a higher priority are before it; {_SOONER}",
    "Resources": f"the nodes that fit it are in use; {_SOONER}",
    "Dependency": "the job that it depends on has not ended",
    "BeginTime": "it may not start before its begin time",
    "Licenses": "all licences that it asks for are in use",
    "Reservation": "its reservation has not begun, or has no free node",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "JobArrayTaskLimit": "launcher.array_parallelism allows no more tasks at a time",
    "AccountingPolicy": "a limit of your account or QOS is reached",
}
"""Why a task waits for what passes, or for an own limit that is of no account or QOS."""
_LIMIT = re.compile(
    r"(QOS|Assoc(?:iation)?)?(Grp|Max)?(\w*?)((?:Run)?Minutes)?(?:Per(User|Account))?(?:Limit)?"
)
_LIMITED = {
    **{"Cpu": "CPUs", "CPU": "CPUs", "Node": "nodes", "Mem": "memory", "Memory": "memory"},
    **{"GRES": "GPUs and other GRES", "License": "licences", "BB": "burst buffers"},
    **dict.fromkeys(("Job", "Jobs"), "running jobs"),
    **dict.fromkeys(("SubmitJob", "SubmitJobs"), "jobs in the queue"),
    **{"Billing": "billing", "Energy": "energy"},
}


def words_of(reason: str, account: str | None = None, qos: str | None = None) -> str:
    """Return why a task waits, in words; account and QOS are those that it asked for (pure)."""
    word, _, details = reason.partition(",")
    if (cure := remedy(reason)) is not None:
        return cure
    if word in _WORDS:
        return _WORDS[word] + f" ({details.strip()})" * bool(details)
    found = _LIMIT.fullmatch(word) if wait_of(reason) is Wait.OWN_LIMIT else None
    if found is None:
        return f"Slurm's reason is {reason.replace('_', ' ')!r}"
    owner, of_all, resource, minutes, each = found.groups()
    is_account = (owner or "").startswith("Assoc")
    key, name = ("account", account) if is_account else ("QOS", qos)
    what = _LIMITED.get(resource, "a resource") + (" times minutes" if minutes else "")
    whose = f" of each {each.lower()}" if each else " of all its jobs together" * (of_all == "Grp")
    limit = f"the limit of {f'{key} {name}' if name else f'your {key}'} for {what}{whose}"
    return f"{limit} is reached: other jobs have to end, or choose another launcher.{key.lower()}"


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
    return _row(reason)[2] or None


def wait_of(reason: str) -> Wait:
    """Return what ends the wait of a task; one that a later Slurm may add passes."""
    return _row(reason)[1]


_UNKNOWN = ("", Wait.PASSES, "")


@lru_cache(1024)
def _row(reason: str) -> tuple[str, Wait, str]:
    word = reason.partition(",")[0]  # as in "ReqNodeNotAvail, UnavailableNodes:n1"
    forms = (word, word.replace("_", " "))  # as some releases write blanks
    found = (row for row in _REASONS if any(re.fullmatch(row[0], form) for form in forms))
    return next(found, _UNKNOWN)

"""Parsers of what Slurm's commands print: the only place where that is done. Pure.

Sites wrap these commands, and a wrapper may print more, before and after the answer. So each parser
takes the lines that have the form of its rows, and ignores the others. Text without any row is an
error where an empty answer would mean that a job has ended.

squeue is asked for fields by name (``-O``), sinfo by ``-o``, sacctmgr by ``format=``, and of
scontrol only fields are read whose names have been the same from Slurm 20 to 26, or are known with
both names; ``--json`` changes its schema from release to release and is not used. Outputs that were
recorded from three releases are the tests of this module. scontrol's values with blanks in them (a
job's name, its comment) come cut off; none of those is used. Errors are distinguished by their
words, since exit codes do not differ; what sbatch refuses has a table of its own
(`hpc_elastic.launcher.batch_script`), from its words to our keys.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from hpc_elastic.errors import SlurmCommandError
from hpc_elastic.run import job_of
from hpc_elastic.slurm import nodelist
from hpc_elastic.slurm.job_state import Phase, TaskState

FIELDS = (
    *("ArrayJobID", "ArrayTaskID", "JobID", "State", "RestartCnt", "NodeList", "TimeLeft"),
    *("PreemptTime", "StartTime", "Reason"),
)
"""The fields asked of squeue; the reason comes last, for it is free text."""
SQUEUE_FORMAT = ",".join(f"{name}:0|" for name in FIELDS)
"""For squeue -O: width 0 cuts nothing."""
NODE_KINDS_FORMAT = "%G|%c|%m"
"""For sinfo -e -o: what the nodes of each kind have."""
EACH_NODE_FORMAT = "%N|%T"
"""For sinfo -N -o: each node and its state."""
SCRIPTS_FORMAT = "%F|%K|%o"
"""For squeue -o: job or array, element, and the batch script with its arguments."""
JOBS_FORMAT = "ArrayJobID:0|,Command:0|,WorkDir:0|,Name:0|"
"""For squeue -O: what identifies a job; the name comes last, for it is free text."""

QUEUE_FIELDS = (
    *("State", "NodeList", "SchedNodes", "StartTime", "EndTime", "TimeLimit", "NumNodes"),
    *("ArrayTaskID", "ArrayJobID", "PriorityLong", "Partition", "Reason"),
)
RESERVED = "RESERVED"
"""The state of a reservation in the queue."""
QUEUE_FORMAT = ",".join(f"{name}:0|" for name in QUEUE_FIELDS)
"""For squeue -O: the jobs of all users, as far as the user may see them."""
RUNS_FORMAT = "%i|%T|%u|%P|%M|%l|%e"
"""For squeue -o: how long jobs have run."""
RUNS_FIELDS = "JobID,State,User,Partition,Elapsed,Timelimit,End"
"""For sacct -P -o: the same."""
NODES_FORMAT = f"%N|%P|%p|%f|%T|{NODE_KINDS_FORMAT}"
"""For sinfo -N -o: what each node has, a line for each of its partitions."""
QOS_FORMAT = "name,flags,preemptmode,gracetime,preempt,maxwall"
"""For sacctmgr -n -P show qos."""

_NO_ARRAY = "N/A"
_NOT_UP = {
    *("DOWN", "NOT_RESPONDING", "UNKNOWN", "FUTURE", "POWERED_DOWN", "POWERING_DOWN"),
    *("POWERING_UP", "REBOOT_ISSUED"),
}
_NO_NEW_JOBS = {"DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "MAINT", "REBOOT_REQUESTED"}
_DEFAULT_KILL_WAIT_S = 30
_ENDED_BY_ITSELF = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY", "DEADLINE")


@dataclass(frozen=True)
class Partition:
    """A partition, as scontrol shows it, with the limits of one job; None without a limit.

    ``preempt_mode`` may be several with commas. A job that names no time gets `max_time_s` where
    `default_time_s` is None. With `allowed_qos` None, all QOS but `denied_qos` are allowed.
    """

    name: str
    state: str = "UP"
    is_default: bool = False
    max_time_s: float | None = None
    grace_s: int = 0
    preempt_mode: str = "OFF"
    num_nodes: int = 0
    max_nodes: int | None = None
    default_time_s: float | None = None
    allowed_qos: tuple[str, ...] | None = None
    denied_qos: tuple[str, ...] = ()

    def allows(self, qos: str) -> bool:
        """Return whether its jobs may have a QOS."""
        if self.allowed_qos is not None:
            return qos in self.allowed_qos
        return qos not in self.denied_qos


@dataclass(frozen=True)
class Preemption:
    """What a task gets when it is preempted: from SIGTERM to the end, and from there to SIGKILL.

    A task without a grace (0) has the second only. ``partitions`` are those in which it may run,
    none if Slurm does not answer.
    """

    grace_s: int = 0
    kill_wait_s: int = _DEFAULT_KILL_WAIT_S
    partitions: tuple[Partition, ...] = ()


@dataclass(frozen=True)
class JobIdentity:
    """What identifies a job or an array; its script is ``(null)`` if sbatch read it from a pipe."""

    name: str
    script: str
    cwd: str


@dataclass(frozen=True)
class JobRecord:
    """One record of ``scontrol show job``: a task, or the waiting elements of an array.

    ``submitted`` is when they were submitted or requeued last, as Slurm prints it. ``states`` are
    what squeue would list, without times. ``partition`` may be several with commas.
    """

    tasks: tuple[str, ...]
    state: str
    excluded: tuple[str, ...] = ()
    partition: str = ""
    submitted: str = ""
    states: tuple[TaskState, ...] = field(default=(), compare=False)

    @property
    def may_wait(self) -> bool:
        """Whether it waits for nodes, or may be on its way back to the queue."""
        return self.state in ("PENDING", "COMPLETING", "REQUEUED")


@dataclass(frozen=True)
class NodeRecord:
    """One node, as scontrol shows it; of one that Slurm does not have nothing is known.

    ``is_up``: Slurm may start jobs there; ``is_off``: it is powered down, so nothing runs there any
    more. ``out_of_service`` is why it gets no new jobs, in Slurm's words, such as ``IDLE+DRAIN:
    maintenance [root@2030-01-31T12:00:00]``.
    """

    address: str | None
    is_up: bool
    is_off: bool
    out_of_service: str


@dataclass(frozen=True)
class NodeKind:
    """What nodes of one kind have; ``gpus`` are by type, empty where none is configured.

    ``partitions`` are those of the nodes, each with its PriorityTier.
    """

    gpus: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 0
    memory_mb: int = 0
    features: frozenset[str] = frozenset()
    partitions: Mapping[str, int] = field(default_factory=dict)
    state: str = ""


@dataclass(frozen=True)
class NodeNeeds:
    """What a job needs of its nodes.

    Each node has ``gpus``, by type, ``cpus`` and ``memory_mb``. All together have ``all_gpus``, and
    room for ``ntasks`` tasks, at most ``ntasks_per_node`` on one; each task needs ``per_task``.
    ``features`` is sbatch's ``--constraint``. Nodes that are ``required`` are among those of the
    job, which has at most ``most_nodes``.
    """

    gpus: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 0
    memory_mb: int = 0
    all_gpus: Mapping[str, int] = field(default_factory=dict)
    ntasks: int = 1
    ntasks_per_node: int | None = None
    per_task: NodeKind = NodeKind(cpus=1)
    most_nodes: int | None = None
    features: str = ""
    required: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    is_reserved: bool = False
    """Whether it waits for nodes of a reservation."""
    is_exclusive: bool = False
    """Whether other jobs, or those of other users, keep it from a node."""


@dataclass(frozen=True)
class QueuedJob:
    """A job of any user that has nodes or waits, as squeue lists it; or a reservation.

    Times are in Unix seconds. While it waits, ``nodes`` and ``starts_at`` are backfill's plan, or
    its earliest start. A line has ``num_tasks`` waiting elements of an array, each of
    ``num_nodes`` at least, and at most ``throttle`` of the array run at the same time. A
    reservation's ``reason`` are its flags, and it has no ``job``. What follows it is known of
    `parse_needs` only; ``others`` are the other parts of a heterogeneous job that waits, which
    starts with all.
    """

    state: str
    nodes: tuple[str, ...] = ()
    starts_at: float | None = None
    ends_at: float | None = None
    limit_s: float | None = None
    num_nodes: int = 1
    num_tasks: int = 1
    partitions: tuple[str, ...] = ()
    reason: str = ""
    job: str = ""
    priority: int = 0
    user: str = ""
    nice: int = 0
    needs: NodeNeeds = NodeNeeds()
    throttle: int | None = None
    others: tuple[QueuedJob, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in ("PENDING", RESERVED)

    def is_behind(self, other: QueuedJob) -> bool:
        """Return whether this is a job that the scheduler tries after another one."""
        is_same_queue = bool(self.job) and self.partitions == other.partitions
        return is_same_queue and self.priority < other.priority


class JobRun(NamedTuple):
    """For how long a job has run, 0 while it waits; ``ended_at`` is None if not ended by itself."""

    job: str
    user: str
    partition: str
    used_s: float
    limit_s: float | None
    ended_at: float | None


@dataclass(frozen=True)
class Qos:
    """A QOS of the accounting; its ``preempt_mode`` ``cluster`` is PreemptMode of slurm.conf."""

    name: str
    flags: frozenset[str] = frozenset()
    preempt_mode: str = "cluster"
    grace_s: float = 0.0
    preempts: frozenset[str] = frozenset()
    max_time_s: float | None = None

    def mode(self, config: Mapping[str, str]) -> str:
        """Return what becomes of its preempted jobs, such as ``REQUEUE``, by the configuration."""
        is_usual = self.preempt_mode == "cluster"
        return (config.get("PreemptMode", "") if is_usual else self.preempt_mode).upper()


# ---- scontrol


def parse_config(output: str) -> dict[str, str]:
    """Return the settings in what ``scontrol show config`` printed."""
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", output, re.MULTILINE))


def hides_jobs(config: Mapping[str, str]) -> bool:
    """Return whether a user sees no jobs of other users, and no plans for them."""
    return "jobs" in config.get("PrivateData", "").lower().split(",")


def has_backfill(config: Mapping[str, str]) -> bool:
    """Return whether Slurm starts jobs in gaps between others; assumed if it is not known."""
    return "backfill" in config.get("SchedulerType", "backfill")


def backfill_interval_s(config: Mapping[str, str]) -> float:
    """Return the seconds between two passes of backfill, Slurm's default of 30 if none is named."""
    named = re.search(r"\bbf_interval=(\d+)", config.get("SchedulerParameters", ""))
    return float(named[1]) if named else 30.0


def enforces_qos(config: Mapping[str, str]) -> bool:
    """Return whether users may name only the QOS of their associations."""
    return bool({"qos", "all"} & set(config.get("AccountingStorageEnforce", "").split(",")))


def parse_number(value: str) -> int | None:
    """Return the number that a value begins with, such as ``30 sec``; None if with no number."""
    m = re.match(r"\d+", value)
    return int(m[0]) if m else None


def is_nothing(value: str) -> bool:
    """Return whether a value is what Slurm prints where it has none."""
    return value in ("", "(null)", "N/A", "None")


def _hosts(value: str) -> tuple[str, ...]:
    return () if is_nothing(value) else tuple(nodelist.expand(value))


def _elements(array: str, indices: str) -> list[str]:
    return [f"{array}_{index}" for index in nodelist.expand_indices(indices)[0]]


def _rows_with(key: str, output: str) -> list[dict[str, str]]:
    """Return the fields of each line of ``scontrol -o show ...`` that has this one.

    A name counts where it stands first: what users write comes last.
    """
    found = re.compile(r"(?<!\S)([A-Za-z][\w/:-]*)=(\S*)").findall
    rows = (dict(reversed(found(line))) for line in output.splitlines())
    return [row for row in rows if key in row]


def parse_partitions(output: str) -> list[Partition]:
    """Return the partitions in what ``scontrol -o show partition`` printed."""
    return [
        Partition(
            name=row["PartitionName"],
            state=row.get("State", "UP"),
            is_default=row.get("Default") == "YES",
            max_time_s=parse_time_left(row.get("MaxTime", "")),
            grace_s=parse_number(row.get("GraceTime", "")) or 0,
            preempt_mode=row.get("PreemptMode", "OFF"),
            num_nodes=parse_number(row.get("TotalNodes", "")) or 0,
            max_nodes=parse_number(row.get("MaxNodes", "")),
            default_time_s=parse_time_left(row.get("DefaultTime", "")),
            allowed_qos=_allowed_qos(row.get("AllowQos", "ALL")),
            denied_qos=tuple(sorted(_names(row.get("DenyQos", "")))),
        )
        for row in _rows_with("PartitionName", output)
    ]


def _allowed_qos(names: str) -> tuple[str, ...] | None:
    return None if names.upper() == "ALL" else tuple(sorted(_names(names)))


def selected(partitions: Iterable[Partition], wanted: str | None) -> list[Partition]:
    """Return the partitions that sbatch would take: those named, with commas, or the default."""
    names = set(wanted.split(",")) if wanted else set()
    return [p for p in partitions if p.name in names or (not names and p.is_default)]


def parse_preemption(config: str, partitions: str, wanted: str | None) -> Preemption:
    """Return what a preempted task gets; of several partitions the least grace counts."""
    chosen = selected(parse_partitions(partitions), wanted)
    kill_wait_s = parse_number(parse_config(config).get("KillWait", ""))
    return Preemption(
        grace_s=min((partition.grace_s for partition in chosen), default=0),
        kill_wait_s=_DEFAULT_KILL_WAIT_S if kill_wait_s is None else kill_wait_s,
        partitions=tuple(chosen),
    )


def _job_rows(output: str) -> list[dict[str, str]]:
    """Return the fields of each job; a job's name, its command and comment set none."""
    name = re.compile(r" JobName=.*?(?= UserId=\S+ GroupId=)")
    lines = (name.sub("", line, count=1) for line in output.splitlines())
    return _rows_with("JobId", "\n".join(lines))


def parse_records(output: str) -> list[JobRecord]:
    """Return the jobs in ``scontrol -o show job``'s output; ValueError if a list is malformed."""
    records: list[JobRecord] = []
    for row in _job_rows(output):
        array, indices = row.get("ArrayJobId"), row.get("ArrayTaskId", "")
        if array is None:
            names = [row["JobId"]]
        else:
            names = [] if is_nothing(indices) else _elements(array, indices)
        state, reason, node = (row.get(k, "") for k in ("JobState", "Reason", "NodeList"))
        listed = TaskState(
            "",
            state,
            "" if reason == "None" else reason,
            "" if is_nothing(node) else node,
            restarts=parse_number(row.get("Restarts", "")),
            preempted=_date(row.get("PreemptTime", "")) is not None,
        )
        avoided, partition = _hosts(row.get("ExcNodeList", "")), row.get("Partition", "")
        states = tuple(replace(listed, task=name) for name in names)
        submitted = row.get("SubmitTime", "")
        records.append(JobRecord(tuple(names), state, avoided, partition, submitted, states))
    return records


def parse_needs(output: str) -> list[QueuedJob]:
    """Return the jobs in ``scontrol -o show job``'s output that have not ended, and their needs."""
    jobs: list[QueuedJob] = []
    parts: dict[str, list[QueuedJob]] = {}
    for row in _job_rows(output):
        state = row.get("JobState", "")
        if TaskState("", state).phase is Phase.ENDED:
            continue
        num_nodes, _, most_nodes = row.get("NumNodes", "").partition("-")
        asked = re.search(r"\bnode=(\d+)", row.get("ReqTRES", row.get("TRES", "")))
        job = _queued(
            state, row.get("NodeList", ""), row.get("SchedNodeList", ""),
            row.get("StartTime", ""), row.get("EndTime", ""), row.get("TimeLimit", ""),
            asked[1] if asked else num_nodes, row.get("ArrayTaskId", ""),
            row.get("ArrayJobId", row["JobId"]), row.get("Priority", ""), row.get("Partition", ""),
            reason=row.get("Reason", "").replace("_", " "),
        )  # fmt: skip
        job = replace(
            job,
            user=row.get("UserId", "").partition("(")[0],
            nice=int(row.get("Nice", 0)),
            needs=_needs(row, parse_number(most_nodes)),
            throttle=parse_number(row.get("ArrayTaskThrottle", "")),
        )
        if job.waits and (whole := row.get("HetJobId")):
            parts.setdefault(whole, []).append(job)
        else:
            jobs.append(job)
    return jobs + [replace(first, others=tuple(others)) for first, *others in parts.values()]


def _needs(row: Mapping[str, str], most_nodes: int | None) -> NodeNeeds:
    """Return what a job needs, by its fields."""
    free = ("NO",) if "Exclusive" in row else ("OK", "YES")  # since 26.05 it has a field of its own
    in_all, on_node, of_task, gpu_mb = (
        gpus(re.sub("gres[:/]", "", row.get(name, "")).replace("=", ":"))
        for name in ("TresPerJob", "TresPerNode", "TresPerTask", "MemPerTres")
    )
    cpus, per_gpu_mb = parse_number(row.get("CPUs/Task", "")) or 1, max(gpu_mb.values(), default=0)
    memory_mb = megabytes(row.get("MinMemoryCPU", "")) * cpus + per_gpu_mb * sum(of_task.values())
    return NodeNeeds(
        on_node,
        parse_number(row.get("MinCPUsNode", "")) or 0,
        megabytes(row.get("MinMemoryNode", "")) + per_gpu_mb * sum(on_node.values()),
        in_all,
        parse_number(row.get("NumTasks", "")) or 1,
        parse_number(row.get("NtasksPerN:B:S:C", "")) or None,
        NodeKind(of_task, cpus, memory_mb),
        most_nodes,
        "" if is_nothing(wanted := row.get("Features", "")) else wanted,
        frozenset(_hosts(row.get("ReqNodeList", ""))),
        frozenset(_hosts(row.get("ExcNodeList", ""))),
        is_reserved=not is_nothing(row.get("Reservation", "")),
        is_exclusive=row.get("Exclusive", row.get("OverSubscribe")) not in free,
    )


def parse_reservations(output: str) -> list[QueuedJob]:
    """Return what is reserved, by what ``scontrol -o show reservation`` printed."""
    found: list[QueuedJob] = []
    for row in _rows_with("ReservationName", output):
        begin, end = (_date(row.get(name, "")) for name in ("StartTime", "EndTime"))
        if (nodes := _hosts(row.get("Nodes", ""))) and begin is not None:
            limit_s = None if end is None else end - begin
            flags = row.get("Flags", "")
            found.append(QueuedJob(RESERVED, nodes, begin, limit_s=limit_s, reason=flags))
    return found


def parse_last_busy(output: str, record: JobRecord) -> str | None:
    """Return the only node of a task's partitions that was busy last when it was requeued."""
    partitions, requeued_at = set(record.partition.split(",")), _date(record.submitted)
    if requeued_at is None:
        return None
    found = [
        row["NodeName"]
        for row in _rows_with("NodeName", output)
        if not partitions.isdisjoint(row.get("Partitions", "").split(","))
        and abs((_date(row.get("LastBusyTime", "")) or 0.0) - requeued_at) <= 1.0
    ]
    return found[0] if len(found) == 1 else None


def parse_node(output: str) -> NodeRecord:
    """Return what ``scontrol show node`` printed of one node.

    A drained node is up, and so is one of a state that a later Slurm may add.
    """
    address, state, reason = (
        found[1].strip() if (found := re.search(rf"(?<!\S){pattern}", output)) else ""
        for pattern in (r"NodeAddr=(\S+)", r"State=(\S+)", r"Reason=(.+)")
    )
    words = set(state.replace("*", "+NOT_RESPONDING").split("+"))
    gets_jobs = words.isdisjoint(_NOT_UP | _NO_NEW_JOBS)
    return NodeRecord(
        None if address == "n/a" or is_nothing(address) else address,
        bool(output) and words.isdisjoint(_NOT_UP),
        "POWERED_DOWN" in words,
        "" if gets_jobs else f"{state}: {reason}" if reason else state,
    )


# ---- sinfo


def parse_each_node(output: str) -> dict[str, str]:
    """Return the state of each node, marks included, in `EACH_NODE_FORMAT`."""
    return dict(re.findall(r"^\s*(\S+)\|(\S+)\s*$", output, re.MULTILINE))


def parse_node_kinds(output: str) -> list[NodeKind]:
    """Return the kinds of nodes in what ``sinfo -h -o NODE_KINDS_FORMAT`` printed."""
    rows = [line.strip().split("|") for line in output.splitlines()]
    return [
        NodeKind(gpus(gres), parse_number(cpus) or 0, parse_number(memory) or 0)
        for gres, cpus, memory in (row for row in rows if len(row) == 3)
    ]


def parse_nodes(output: str) -> dict[str, NodeKind]:
    """Return what each node has, by what ``sinfo -h -N -o NODES_FORMAT`` printed."""
    found: dict[str, NodeKind] = {}
    for line in output.splitlines():
        row = line.strip().split("|")
        if len(row) != 8:
            continue
        name, partition, tier, features, state, gres, cpus, memory = row
        before = found[name].partitions if name in found else {}
        found[name] = NodeKind(
            gpus(gres), parse_number(cpus) or 0, parse_number(memory) or 0,
            _names(features), {**before, partition.rstrip("*"): parse_number(tier) or 0}, state,
        )  # fmt: skip
    return found


def gpus_of_each(kinds: Iterable[NodeKind]) -> int:
    """Return the GPUs that every node of these kinds has."""
    return min((sum(kind.gpus.values()) for kind in kinds), default=0)


def gpus(gres: str) -> dict[str, int]:
    """Return the GPUs in generic resources such as ``gpu:a100:4(S:0-1),lustre:1``, by type."""
    found: dict[str, int] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *words = resource.split(":")
        number = words.pop() if words and words[-1].isdecimal() else "1"
        if name == "gpu":
            kind = ":".join(words)
            found[kind] = found.get(kind, 0) + int(number)
    return found


# ---- squeue


def parse_time_left(text: str) -> float | None:
    """Return the seconds in squeue's TimeLeft or scontrol's MaxTime, such as ``1-02:03:04``.

    None for UNLIMITED, NOT_SET, INVALID (the limit has passed), and whatever else is no time.
    """
    m = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip(), re.ASCII)
    if m is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in m.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _date(text: str) -> float | None:
    """Return a date in seconds since the epoch, as squeue has it, or in local time; else None."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def parse_squeue(output: str, now: float | None = None) -> dict[str, TaskState]:
    """Return the tasks in what ``squeue -h -O SQUEUE_FORMAT`` printed, by their names.

    With ``-r`` each element has a line of its own, as far as `lists_all`. Without it the pending
    elements of an array are one line, which is taken apart here: one that was requeued, and may not
    start yet, is in it with the restarts of the others and the reasons of both. An array whose last
    pending elements were cancelled leaves a line without an index, which is no task. With ``now``
    (Unix seconds) each has how far its start lies ahead. Raises ValueError if a line is not of that
    format.
    """
    lines = list(_lines(output))
    arrays = {array_job for array_job, index, *_ in lines if index != _NO_ARRAY}
    tasks: dict[str, TaskState] = {}
    for array_job, indices, job, state, restarts, node, left, preempted, start, reason in lines:
        if indices != _NO_ARRAY:
            names = _elements(array_job, indices)
        else:
            names = [] if array_job in arrays else [job]
        starts_at = _date(start) if state == "PENDING" else None
        listed = TaskState(
            "",
            state,
            "" if reason == "None" else reason,
            node,
            restarts=int(restarts) if restarts.isdecimal() else None,
            time_left_s=parse_time_left(left),
            preempted=_date(preempted) is not None,
            starts_in_s=None if starts_at is None or now is None else starts_at - now,
        )
        tasks |= {name: replace(listed, task=name) for name in names}
    return tasks


def parse_queue(output: str) -> list[QueuedJob]:
    """Return the jobs in ``squeue -h -O QUEUE_FORMAT``'s output; ValueError for another format."""
    jobs: list[QueuedJob] = []
    for line in _rows(r"\s*[A-Z_]+\s*\|", output):
        *rest, reason = _fields(line, QUEUE_FORMAT, len(QUEUE_FIELDS))
        jobs.append(_queued(*rest, reason=reason.removesuffix("|")))
    return jobs


def parse_runs(output: str) -> list[JobRun]:
    """Return the jobs that squeue prints in `RUNS_FORMAT`, or sacct with `RUNS_FIELDS`."""
    rows = (line.strip().split("|") for line in output.splitlines())
    return [
        JobRun(
            job_of(job), user, partition, parse_time_left(used) or 0.0, parse_time_left(limit),
            _date(end) if state.partition(" ")[0] in _ENDED_BY_ITSELF else None,
        )
        for job, state, user, partition, used, limit, end in (row for row in rows if len(row) == 7)
    ]  # fmt: skip


def _queued(
    state: str, has: str, planned: str, start: str, end: str, limit: str, num_nodes: str,
    indices: str, job: str, priority: str, partitions: str, *, reason: str,
) -> QueuedJob:  # fmt: skip
    waits = state == "PENDING"
    is_set = waits and not is_nothing(indices)
    return QueuedJob(
        state,
        _hosts(planned if waits else has),
        starts_at=_date(start) if waits else None,
        ends_at=None if waits else _date(end),
        limit_s=parse_time_left(limit),
        num_nodes=parse_number(num_nodes) or 1,
        num_tasks=len(nodelist.expand_indices(indices)[0]) if is_set else 1,
        partitions=tuple(partitions.split(",")),
        reason="" if is_nothing(reason) else reason,
        job=job,
        priority=parse_number(priority) or 0,
    )


def megabytes(text: str) -> int:
    """Return the megabytes in what squeue prints of a job's memory, such as ``4G`` or ``100M``."""
    m = re.match(r"([\d.]+)([KMGT]?)", text)
    return math.ceil(float(m[1]) * 1024.0 ** ("KMGT".index(m[2] or "M") - 1)) if m else 0


def parse_job_id(output: str) -> str | None:
    """Return the only job id in what ``sbatch --parsable`` printed; None if it is not one.

    The name of a cluster may follow. A wrapper may print sbatch's usual sentence instead.
    """
    line = r"^\s*(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?\s*$"
    found = set(re.findall(line, output, re.MULTILINE))
    return found.pop() if len(found) == 1 else None


def parse_expected_start(words: str) -> float | None:
    """Return the Unix seconds in what ``sbatch --test-only`` printed; None if it has no time."""
    m = re.search(r"to start at (\S+)", words)
    return None if m is None else _date(m[1])


def lists_all(output: str) -> bool:
    """Return whether ``squeue -h -r -O SQUEUE_FORMAT`` has certainly listed every element.

    It loses the last of those that wait in one record if their indices are a set such as
    ``0-20:4``, all of one step (22.05 to 26.05).
    """
    records: dict[str, list[int]] = {}
    for _, index, job, state, *_ in _lines(output):
        if state == "PENDING" and index.isdecimal():
            records.setdefault(job, []).append(int(index))
    steps = ({b - a for a, b in pairwise(sorted(indices))} for indices in records.values())
    return not any(len(found) == 1 and found != {1} for found in steps)


def parse_jobs(output: str) -> dict[str, JobIdentity]:
    """Return the jobs in what ``squeue -h -O JOBS_FORMAT`` printed, by job id."""
    found: dict[str, JobIdentity] = {}
    for line in _rows(r"\s*\d+\s*\|", output):
        job, script, cwd, name = (*line.rstrip().removesuffix("|").split("|", 3), "", "", "")[:4]
        found[job.strip()] = JobIdentity(name.strip(), script.strip(), cwd.strip())
    return found


def parse_scripts(output: str) -> list[tuple[str, str, str]]:
    """Return job, element and path of each batch script in what ``-o SCRIPTS_FORMAT`` printed."""
    rows = (row.strip().split("|", 2) for row in _rows(r"\s*\d+\|[^|]*\|/", output))
    return [(job, element, script) for job, element, script in rows]


def excluded_in(script: str) -> set[str]:
    """Return the nodes that the lines of a batch script exclude; the last line counts."""
    lines = re.findall(r"^#SBATCH --exclude='?([^'\n]+)", script, re.MULTILINE)
    return set(nodelist.expand(lines[-1])) if lines else set()


def _rows(begin: str, output: str) -> list[str]:
    """Return the lines that begin like a row."""
    return [line for line in output.splitlines() if re.match(begin, line)]


def _lines(output: str) -> Iterator[list[str]]:
    """Yield the fields of each line of squeue."""
    rows = _rows(r"\s*\d+\s*\|", output)
    for line in rows or filter(str.strip, output.splitlines()):
        *fields, reason = _fields(line, SQUEUE_FORMAT, len(FIELDS) if rows else 0)
        yield [*fields, reason.removesuffix("|").strip()]


def _fields(line: str, form: str, number: int) -> list[str]:
    """Return the fields of a line of squeue, the last one with all that follows."""
    fields = [part.strip() for part in line.split("|", number - 1)]
    if len(fields) != number:
        raise ValueError(f"not a line of squeue in the format {form}: {line!r}")
    return fields


# ---- sacctmgr


def preemptible_qos(qos: Sequence[Qos], config: Mapping[str, str]) -> list[Qos]:
    """Return the QOS whose jobs other QOS preempt."""
    if config.get("PreemptType") != "preempt/qos":
        return []
    return [own for own in qos if any(own.name in other.preempts for other in qos)]


def parse_qos(output: str) -> list[Qos]:
    """Return the QOS in what ``sacctmgr -n -P show qos format=QOS_FORMAT`` printed."""
    rows = [line.split("|") for line in output.splitlines()]
    return [
        Qos(
            name, _names(flags), mode or "cluster", parse_time_left(grace) or 0.0,
            _names(preempts), parse_time_left(longest),
        )
        for name, flags, mode, grace, preempts, longest in (row for row in rows if len(row) == 6)
    ]  # fmt: skip


def parse_offered_qos(output: str) -> frozenset[str]:
    """Return the names in what ``sacctmgr -n -P show assoc format=qos`` printed."""
    return frozenset[str]().union(*map(_names, _rows(r"\s*\S+\s*$", output)))


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, (name.strip() for name in text.split(","))))


# ---- errors, by Slurm's words

_OF_SLURM = re.compile(r"error|^[\d_]+(\[\S*\])?: | for job \d|Access|denied|fatal", re.IGNORECASE)
"""A line of Slurm's own beside a wrapper's text."""
_FORGOTTEN = "Invalid job id specified"
ENDED = (_FORGOTTEN, "already completing or completed")
"""Lines of scancel about a task that has ended."""
NOT_WAITING = (_FORGOTTEN, "no longer pending execution", "already finished", "No error")
"""Lines of ``scontrol update`` about each element when one of several does not wait any more."""
REQUEUED = ("Job is pending execution", "No error")
"""Lines of ``scontrol requeue`` about a task that goes to the queue already."""


_LOST_ANSWER = (
    *("timed out", "Zero Bytes were transmitted", "Transport endpoint", "Insane message length"),
    *("send failure", "receive failure", "shutdown failure", "Unexpected message received"),
    *("Connection reset", "Broken pipe"),
)
"""Words of sbatch where the controller may have taken the job (slurm_errno.c, 22.05 to 26.05)."""


def has_only_lines_with(phrases: Sequence[str], error: SlurmCommandError) -> bool:
    """Return whether a command failed and printed no line without one of these phrases."""
    lines = [line for line in error.stderr.splitlines() if line.strip()]
    known = [line for line in lines if any(phrase in line for phrase in phrases)]
    others = [line for line in lines if line not in known and _OF_SLURM.search(line)]
    return error.exit_code is not None and bool(known) and not others


def is_forgotten(error: SlurmCommandError) -> bool:
    """Return whether squeue or scontrol have no such job, or no longer."""
    return _FORGOTTEN in error.stderr


def is_refused(error: SlurmCommandError) -> bool:
    """Return whether Slurm refuses to requeue a task, however often it is asked."""
    words = ("Requested operation is presently disabled", "already finished")
    return any(phrase in error.stderr for phrase in words)


def is_denied(error: SlurmCommandError) -> bool:
    """Return whether the user may not do what a command was to do."""
    return "Access/permission denied" in error.stderr


def has_submitted_nothing(error: BaseException | None) -> bool:
    """Return whether sbatch has failed, and has certainly submitted nothing.

    If the controller's answer was lost, or sbatch was killed, the job may be in the queue.
    """
    if not isinstance(error, SlurmCommandError):
        return False
    if error.exit_code is None:
        return could_not_start(error)
    was_killed = not 0 < error.exit_code < 128  # a shell's, whose command a signal has ended
    return not was_killed and not any(words in error.stderr for words in _LOST_ANSWER)


def could_not_start(error: SlurmCommandError) -> bool:
    """Return whether a command is not installed here, or could not be executed."""
    return isinstance(error.__cause__, OSError)


def is_unknown_node(error: SlurmCommandError) -> bool:
    """Return whether scontrol has no such node."""
    return re.search(r"Node \S+ not found", error.stderr) is not None

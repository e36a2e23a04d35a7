"""squeue: the queue, in the formats of ``-o`` and ``-O``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm import scheduling, submit_options, variables
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.config import FakeConfig, Partition, Refusal, unknown
from hpc_elastic.testing.fake_slurm.jobs import COMPACT, INVALID, SHORT, Job
from hpc_elastic.testing.fake_slurm.jobs import Table as Jobs
from hpc_elastic.testing.fake_slurm.scontrol import VERSION, scancel, scontrol
from hpc_elastic.testing.fake_slurm.submit_options import (
    FLAG,
    VALUE,
    Parsed,
    Table,
    directives,
    parse,
    show_date,
    show_span,
)

SQUEUE_OPTIONS = Table(
    {
        **dict.fromkeys(("noheader", "me", "all", "array"), FLAG),
        **dict.fromkeys(("states", "jobs", "format", "Format", "user", "partition"), VALUE),
        **dict.fromkeys(("nodelist", "name"), VALUE),
    },
    {
        **{"h": "noheader", "a": "all", "r": "array", "t": "states", "j": "jobs", "o": "format"},
        **{"O": "Format", "u": "user", "p": "partition", "w": "nodelist", "n": "name"},
    },
)
_SQUEUE_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_LIVING = ("PENDING", "RUNNING", "COMPLETING")
_SPEC = re.compile(r"%(\.?)(\d*)([A-Za-z])")
_LONG = re.compile(r"([A-Za-z]+)(?::(\.?)(\d*)(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One line of squeue: a job, or the elements that wait in an array's record."""

    job: Job
    elements: tuple[Job, ...]
    config: FakeConfig
    now: float
    is_apart: bool = False

    @property
    def job_id(self) -> str:
        """The number of the job, or of the array's record."""
        return str(self.job.number or self.job.array)

    @property
    def indices(self) -> str:
        """The array indices; N/A outside of arrays."""
        if self.job.array is None:
            return "N/A"
        found = [job.index for job in self.elements if job.index is not None]
        if self.job.number is not None or self.is_apart:
            return str(found[0])
        return nodelist.compress_indices(found, self.job.limit)

    @property
    def name(self) -> str:
        """What squeue calls it."""
        if self.job.array is None or self.job.number is not None or self.is_apart:
            return self.job.name
        return f"{self.job.array}_[{self.indices}]"

    @property
    def ends_at(self) -> float | None:
        """When its processes are ended, as far as known."""
        limits = [self.job.ends_at] if self.job.ends_at is not None else []
        if self.job.preempted is not None and self.job.has_nodes:
            limits.append(self.job.preempted + self.config.grace_s)
        return min(limits, default=None)

    @property
    def time_left(self) -> str:
        """How long it may still run."""
        if self.job.has_nodes and self.job.ends_at is not None:
            return show_span(self.job.ends_at - self.now)
        return show_span(self.job.limit_s)

    @property
    def time_used(self) -> str:
        """How long it has run in this attempt."""
        if self.job.started is None:
            return "0:00"
        return show_span((self.job.ended or self.now) - self.job.started)

    @property
    def start(self) -> str:
        """When it started, or when it may."""
        may = self.job.begin if self.job.waits and self.job.begin > self.now else None
        return show_date(self.job.started or may)

    @property
    def node_names(self) -> str:
        """Its nodes, as a host list."""
        return nodelist.compress(self.job.nodes)

    @property
    def reason(self) -> str:
        """Why it waits; None where it does not."""
        return self.job.reason

    @property
    def reason_or_nodes(self) -> str:
        """What squeue prints last: the nodes, or why there are none."""
        return self.node_names if self.job.has_nodes else f"({self.reason})"


_FIELDS: dict[str, Callable[[Row], str]] = {
    "arrayjobid": lambda r: str(r.job.array or r.job.number),
    "arraytaskid": lambda r: r.indices,
    "jobid": lambda r: r.job_id,
    "jobarrayid": lambda r: r.name,
    "state": lambda r: r.job.shown_state,
    "statecompact": lambda r: COMPACT[r.job.shown_state],
    "restartcnt": lambda r: str(r.job.restarts),
    "nodelist": lambda r: r.node_names,
    "numnodes": lambda r: str(len(r.job.nodes) or r.job.request.num_nodes),
    "timeleft": lambda r: r.time_left,
    "timelimit": lambda r: show_span(r.job.limit_s),
    "timeused": lambda r: r.time_used,
    "preempttime": lambda r: show_date(r.job.preempted),
    "starttime": lambda r: r.start,
    "endtime": lambda r: show_date(r.job.ended or r.ends_at),
    "submittime": lambda r: show_date(r.job.submitted),
    "reason": lambda r: r.reason,
    "reasonlist": lambda r: r.reason_or_nodes,
    "name": lambda r: r.job.request.name,
    "partition": lambda r: r.job.request.partition,
    "username": lambda _: variables.user(),
    "dependency": lambda r: ",".join(f"{k}:{i}" for k, i in r.job.request.dependency) or "(null)",
}
_LETTERS = {
    **{"i": "jobarrayid", "A": "jobid", "F": "arrayjobid", "K": "arraytaskid", "t": "statecompact"},
    **{"T": "state", "r": "reason", "R": "reasonlist", "N": "nodelist", "P": "partition"},
    **{"j": "name", "u": "username", "D": "numnodes", "M": "timeused", "l": "timelimit"},
    **{"L": "timeleft", "S": "starttime", "V": "submittime", "e": "endtime", "E": "dependency"},
}


_HEADS = {
    **{"jobarrayid": "JOBID", "username": "USER", "statecompact": "ST", "timeused": "TIME"},
    **{"numnodes": "NODES", "reasonlist": "NODELIST(REASON)"},
}


def squeue(argv: Sequence[str], jobs: Jobs, config: FakeConfig, now: float) -> str:
    """Return what squeue prints.

    Raises:
        Refusal: the one job that it was asked for is unknown, or something it can not do.
    """
    options = parse(argv, SQUEUE_OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    show = _formatter(options)
    rows = _squeue_rows(_chosen(options, jobs), config, now, apart="array" in options)
    lines = [show(row) for row in rows]
    if "noheader" not in options:
        lines.insert(0, show(None))
    return "".join(line + "\n" for line in lines)


def _chosen(options: Parsed, jobs: Jobs) -> list[Job]:
    chosen = jobs.jobs
    if (ids := options.get("jobs")) is not None:
        names = ids.split(",")
        found = {job.order for name in names for job in jobs.find(name)}
        if len(names) == 1 and not found:
            raise Refusal(f"slurm_load_jobs error: {INVALID}")
        chosen = [job for job in chosen if job.order in found]
    states = (options.get("states") or ",".join(_LIVING)).upper().split(",")
    if "ALL" not in states:
        chosen = [j for j in chosen if {j.shown_state, COMPACT[j.shown_state]} & set(states)]
    for name, value in _FILTERS.items():
        if (wanted := options.get(name)) is not None:
            chosen = [job for job in chosen if value(job) & set(wanted.split(","))]
    if (nodes := options.get("nodelist")) is not None:
        chosen = [job for job in chosen if set(job.nodes) & set(nodelist.expand(nodes))]
    return chosen


_FILTERS: dict[str, Callable[[Job], set[str]]] = {
    "user": lambda _: {variables.user()},
    "partition": lambda job: {job.request.partition},
    "name": lambda job: {job.request.name},
}


def _squeue_rows(jobs: Iterable[Job], config: FakeConfig, now: float, *, apart: bool) -> list[Row]:
    """Return the lines: elements that wait in one record are one line, unless asked otherwise."""
    records: dict[tuple[int, str], list[Job]] = {}
    rows: list[tuple[Job, list[Job]]] = []
    for job in jobs:
        if apart or job.number is not None or job.array is None:
            rows.append((job, [job]))
            continue
        key = (job.array, _record_reason(job))
        if key not in records:
            records[key] = []
            rows.append((job, records[key]))
        records[key].append(job)
    rows.sort(key=lambda row: (not row[0].waits or row[0].has_nodes, row[0].order))
    return [Row(job, tuple(group), config, now, apart) for job, group in rows]


def _record_reason(job: Job) -> str:
    return "" if job.reason in (scheduling.RESOURCES, scheduling.PRIORITY) else job.reason


def _formatter(options: Parsed) -> Callable[[Row | None], str]:
    """Return what makes a line of a row; of none, the head."""
    if (long := options.get("Format")) is not None:
        fields = [_long_field(part) for part in long.split(",")]
        return lambda row: "".join(
            _cut(_text(name, row), width) + tail for name, width, tail in fields
        )
    pattern = options.get("format") or _SQUEUE_DEFAULT
    for m in _SPEC.finditer(pattern):
        if m[3] not in _LETTERS:
            raise unknown(f"%{m[3]} in squeue's --format")
    return lambda row: _SPEC.sub(
        lambda m: _pad(_text(_LETTERS[m[3]], row), m[2], right=bool(m[1])), pattern
    )


def _long_field(part: str) -> tuple[str, int, str]:
    m = _LONG.fullmatch(part)
    name = m[1].lower() if m else part
    if m is None or name not in _FIELDS:
        raise unknown(f"the field {part} of squeue's --Format")
    return name, int(m[3]) if m[3] else 20, m[4] or ""


def _text(name: str, row: Row | None) -> str:
    return _HEADS.get(name, name.upper()) if row is None else _FIELDS[name](row)


def _cut(text: str, width: int) -> str:
    return text[:width].ljust(width) if width else text


def _pad(text: str, width: str, *, right: bool) -> str:
    if not width:
        return text
    cut = text[: int(width)]
    return cut.rjust(int(width)) if right else cut.ljust(int(width))


# ---- sinfo: partitions and nodes, in the formats of ``-o``. Pure


SINFO_OPTIONS = Table(
    {
        **dict.fromkeys(("noheader", "all", "Node"), FLAG),
        **dict.fromkeys(("format", "partition", "nodes"), VALUE),
    },
    {"h": "noheader", "a": "all", "N": "Node", "o": "format", "p": "partition", "n": "nodes"},
)
_SINFO_DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
_Row = tuple[Partition, str, tuple[str, ...]]


def sinfo(argv: Sequence[str], cluster: Cluster) -> str:
    """Return what sinfo prints.

    Raises:
        Refusal: something that it can not do.
    """
    options = parse(argv, SINFO_OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    pattern = options.get("format") or _SINFO_DEFAULT
    fields = _fields(cluster)
    for m in _SPEC.finditer(pattern):
        if m[3] not in fields:
            raise unknown(f"%{m[3]} in sinfo's --format")

    def show(row: _Row | None) -> str:
        def value(m: re.Match[str]) -> str:
            head, text = fields[m[3]]
            shown = head if row is None else text(row)
            cut = shown[: int(m[2])] if m[2] else shown
            return cut.rjust(int(m[2] or 0)) if m[1] else cut.ljust(int(m[2] or 0))

        return _SPEC.sub(value, pattern)

    by_state = bool(re.search(r"%\.?\d*[tT]", pattern)) or "Node" in options
    wanted = options.get("partition")
    partitions = [
        p for p in cluster.config.partitions if wanted is None or p.name in wanted.split(",")
    ]
    names = nodelist.expand(options.get("nodes") or "") or list(cluster.nodes)
    rows = _sinfo_rows(cluster, partitions, names, by_state=by_state, apart="Node" in options)
    lines = [show(row) for row in rows]
    if "noheader" not in options:
        lines.insert(0, show(None))
    return "".join(f"{line}\n" for line in lines)


def _sinfo_rows(
    cluster: Cluster,
    partitions: Sequence[Partition],
    names: Sequence[str],
    *,
    by_state: bool,
    apart: bool,
) -> list[_Row]:
    groups: dict[tuple[str, str, str], tuple[Partition, str, list[str]]] = {}
    states = {n: _state(cluster, n) for n in names if n in cluster.nodes}
    for partition in partitions:
        for name, state in states.items():
            key = (name if apart else "", partition.name, state if by_state else "")
            groups.setdefault(key, (partition, state, []))[2].append(name)
    rows = [(partition, state, tuple(members)) for partition, state, members in groups.values()]
    return sorted(rows, key=lambda r: list(cluster.nodes).index(r[2][0])) if apart else rows


def _state(cluster: Cluster, name: str) -> str:
    return cluster.nodes[name].state(cluster.table.jobs, cluster.config.cpus_per_node)


def _fields(cluster: Cluster) -> dict[str, tuple[str, Callable[[_Row], str]]]:
    config = cluster.config
    return {
        "P": ("PARTITION", lambda r: r[0].name + ("*" if r[0].is_default else "")),
        "R": ("PARTITION", lambda r: r[0].name),
        "a": ("AVAIL", lambda r: "down" if r[0].name in cluster.closed else "up"),
        "l": ("TIMELIMIT", lambda _: "infinite"),
        "D": ("NODES", lambda r: str(len(r[2]))),
        "t": ("STATE", lambda r: SHORT[r[1]]),
        "T": ("STATE", lambda r: r[1]),
        "N": ("NODELIST", lambda r: nodelist.compress(r[2])),
        "c": ("CPUS", lambda _: str(config.cpus_per_node)),
        "m": ("MEMORY", lambda _: str(config.memory_mb)),
        "G": ("GRES", lambda _: "(null)"),
        "f": ("AVAIL_FEATURES", lambda _: "(null)"),
    }


# ---- The commands that end at once: what each prints, and its exit code


_UNKNOWN_OPTION = {"sbatch": 255, "srun": 255}
"""Exit codes; 1 elsewhere."""


@dataclass(frozen=True)
class Call:
    """One call of a command.

    Attributes:
        command: Its name.
        argv: Its arguments.
        env: Its environment.
        cwd: Its directory.
        stdin: Reads its standard input.
        now: When it was called.
    """

    command: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: Callable[[], str]
    now: float


@dataclass(frozen=True)
class Answer:
    """What a command prints, and its exit code."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0


def answer(call: Call, cluster: Cluster, address: str) -> Answer:
    """Do what a command is asked."""
    if "--version" in call.argv[:1]:
        return Answer(f"slurm {VERSION} (FakeSlurm)\n")
    try:
        return Answer(_COMMANDS[call.command](call, cluster, address))
    except Refusal as e:
        return refused(call.command, e)


def refused(command: str, why: Refusal) -> Answer:
    """Return what a command prints that can not do what it was asked."""
    if why.stderr.startswith("FakeSlurm does not know"):
        return Answer(stderr=f"{command}: {why.stderr}\n", code=_UNKNOWN_OPTION.get(command, 1))
    prefix = f"{command}: error: " if command in ("sbatch", "srun", "scancel") else ""
    lines = [prefix + line for line in why.stderr.splitlines()]
    return Answer(stderr="".join(f"{line}\n" for line in lines), code=why.exit_code)


def _sbatch(call: Call, cluster: Cluster, _address: str) -> str:
    """Submit a job or an array: what stands on the command line goes before the script's lines."""
    given = parse(call.argv, submit_options.SBATCH)
    name, script = _script(call, given.rest, given.get("wrap"))
    options = parse(directives(script), submit_options.SBATCH)
    options.options.update(given.options)
    _latest_wins(options.options, given.options)
    origin = submit_options.Origin(
        call.cwd, call.env, call.now, script, name, () if "wrap" in given else tuple(given.rest[1:])
    )
    wanted = submit_options.read(options, origin, cluster.config)
    size = cluster.config.max_array_size
    number, _ = cluster.table.submit(wanted, options.get("array"), call.now, size)
    cluster.schedule(call.now)
    return f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n"


def _latest_wins(options: dict[str, str], given: Mapping[str, str]) -> None:
    """Of two options that contradict each other, keep the command line's."""
    for one, other in (("requeue", "no-requeue"), ("no-requeue", "requeue")):
        if one in given and other not in given:
            options.pop(other, None)


def _script(call: Call, rest: Sequence[str], wrapped: str | None) -> tuple[str, str]:
    if wrapped is not None:
        return "wrap", f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{wrapped}\n"
    if not rest:
        return "sbatch", call.stdin()
    path = Path(call.cwd) / rest[0]
    try:
        return path.name, path.read_text()
    except OSError as e:
        raise Refusal(f"Unable to open file {rest[0]}: {e.strerror}") from e


def _sacct(_call: Call, _cluster: Cluster, _address: str) -> str:
    raise Refusal("Slurm accounting storage is disabled")


_COMMANDS: dict[str, Callable[[Call, Cluster, str], str]] = {
    "sbatch": _sbatch,
    "squeue": lambda call, cluster, _: squeue(call.argv, cluster.table, cluster.config, call.now),
    "scancel": lambda call, cluster, _: scancel(call.argv, cluster, call.now),
    "scontrol": lambda call, cluster, where: scontrol(call.argv, cluster, where, call.now),
    "sinfo": lambda call, cluster, _: sinfo(call.argv, cluster),
    "sacct": _sacct,
}
COMMANDS = (*_COMMANDS, "srun")

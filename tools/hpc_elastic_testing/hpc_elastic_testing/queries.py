"""squeue and sinfo: the queue and the nodes, in the formats of ``-o`` and ``-O``; pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from hpc_elastic.slurm import nodelist
from hpc_elastic_testing.cluster import FakeCluster
from hpc_elastic_testing.config import FakeConfig, FakePartition, Refusal, unknown
from hpc_elastic_testing.jobs import COMPACT, INVALID, SHORT, Job, JobTable
from hpc_elastic_testing.steps import user_name
from hpc_elastic_testing.submit_options import (
    FLAG,
    VALUE,
    OptionTable,
    ParsedOptions,
    parse,
    show_date,
    show_span,
)

SQUEUE_OPTIONS = OptionTable(
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
SINFO_OPTIONS = OptionTable(
    {
        **dict.fromkeys(("noheader", "all", "Node"), FLAG),
        **dict.fromkeys(("format", "partition", "nodes"), VALUE),
    },
    {"h": "noheader", "a": "all", "N": "Node", "o": "format", "p": "partition", "n": "nodes"},
)
_SQUEUE_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_SINFO_DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
_LIVING = ("PENDING", "RUNNING", "COMPLETING")
_SPEC = re.compile(r"%(\.?)(\d*)([A-Za-z])")
_LONG = re.compile(r"([A-Za-z]+)(?::(\.?)(\d*)(.*))?", re.DOTALL)


def squeue(argv: Sequence[str], jobs: JobTable, config: FakeConfig, now: float) -> str:
    """Return the output of squeue; raise Refusal for a single unknown job or an unknown option."""
    options = parse(argv, SQUEUE_OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    show = _line_formatter(options)
    rows = _squeue_rows(_select_jobs(options, jobs), config, now, apart="array" in options)
    lines = [show(row) for row in rows]
    if "noheader" not in options:
        lines.insert(0, show(None))
    return "".join(line + "\n" for line in lines)


def _select_jobs(options: ParsedOptions, jobs: JobTable) -> list[Job]:
    chosen = jobs.jobs
    if (ids := options.get("jobs")) is not None:
        names = ids.split(",")
        found = {job.order for name in names for job in jobs.find_jobs(name)}
        if len(names) == 1 and not found:
            raise Refusal(f"slurm_load_jobs error: {INVALID}")
        chosen = [job for job in chosen if job.order in found]
    states = (options.get("states") or ",".join(_LIVING)).upper().split(",")
    if "ALL" not in states:
        chosen = [j for j in chosen if {j.shown_state, COMPACT[j.shown_state]} & set(states)]
    if (users := options.get("user")) is not None and user_name() not in users.split(","):
        return []
    if (partitions := options.get("partition")) is not None:
        chosen = [job for job in chosen if job.request.partition in partitions.split(",")]
    if (wanted := options.get("name")) is not None:
        chosen = [job for job in chosen if job.request.name in wanted.split(",")]
    if (nodes := options.get("nodelist")) is not None:
        chosen = [job for job in chosen if set(job.nodes) & set(nodelist.expand(nodes))]
    return chosen


def _squeue_rows(
    jobs: Iterable[Job], config: FakeConfig, now: float, *, apart: bool
) -> list[QueueRow]:
    """Return the lines; elements that wait in one record share a line unless `apart`."""
    records: dict[tuple[int, str], list[Job]] = {}
    rows: list[tuple[Job, list[Job]]] = []
    for job in jobs:
        if apart or job.number is not None or job.array is None:
            rows.append((job, [job]))
            continue
        key = (job.array, "" if job.reason in ("Resources", "Priority") else job.reason)
        if key not in records:
            records[key] = []
            rows.append((job, records[key]))
        records[key].append(job)
    rows.sort(key=lambda row: (not row[0].is_queued or row[0].has_nodes, row[0].order))
    return [QueueRow(job, tuple(group), config, now, apart) for job, group in rows]


@dataclass(frozen=True)
class QueueRow:
    """One line of squeue: a job, or the elements that wait in an array's record."""

    job: Job
    elements: tuple[Job, ...]
    config: FakeConfig
    now: float
    is_apart: bool = False

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
        """Its name in squeue."""
        if self.job.array is None or self.job.number is not None or self.is_apart:
            return self.job.name
        return f"{self.job.array}_[{self.indices}]"

    @property
    def ends_at(self) -> float | None:
        """When its processes are ended; None if unknown."""
        limits = [self.job.ends_at] if self.job.ends_at is not None else []
        if self.job.preempted is not None and self.job.has_nodes:
            limits.append(self.job.preempted + self.config.grace_s)
        return min(limits, default=None)

    @property
    def time_left(self) -> str:
        """The rest of its time limit."""
        if self.job.has_nodes and self.job.ends_at is not None:
            return show_span(self.job.ends_at - self.now)
        return show_span(self.job.limit_s)

    @property
    def time_used(self) -> str:
        """Its running time in this attempt."""
        if self.job.started is None:
            return "0:00"
        return show_span((self.job.ended or self.now) - self.job.started)

    @property
    def start(self) -> str:
        """When it started, or may start."""
        may = self.job.begin if self.job.is_queued and self.job.begin > self.now else None
        return show_date(self.job.started or may)


_FIELDS: dict[str, Callable[[QueueRow], str]] = {
    "arrayjobid": lambda r: str(r.job.array or r.job.number),
    "arraytaskid": lambda r: r.indices,
    "jobid": lambda r: str(r.job.number or r.job.array),
    "jobarrayid": lambda r: r.name,
    "state": lambda r: r.job.shown_state,
    "statecompact": lambda r: COMPACT[r.job.shown_state],
    "restartcnt": lambda r: str(r.job.restarts),
    "nodelist": lambda r: nodelist.compress(r.job.nodes),
    "numnodes": lambda r: str(len(r.job.nodes) or r.job.request.num_nodes),
    "timeleft": lambda r: r.time_left,
    "timelimit": lambda r: show_span(r.job.limit_s),
    "timeused": lambda r: r.time_used,
    "preempttime": lambda r: show_date(r.job.preempted),
    "starttime": lambda r: r.start,
    "endtime": lambda r: show_date(r.job.ended or r.ends_at),
    "submittime": lambda r: show_date(r.job.submitted),
    "reason": lambda r: r.job.reason,
    "reasonlist": lambda r: (
        nodelist.compress(r.job.nodes) if r.job.has_nodes else f"({r.job.reason})"
    ),
    "name": lambda r: r.job.request.name,
    "command": lambda r: r.job.request.command or "(null)",
    "workdir": lambda r: r.job.request.cwd,
    "partition": lambda r: r.job.request.partition,
    "prioritylong": lambda r: str(r.job.priority),
    "schednodes": lambda _: "(null)",
    "username": lambda _: user_name(),
    "dependency": lambda r: ",".join(f"{k}:{i}" for k, i in r.job.request.dependency) or "(null)",
}
_LETTERS = {
    **{"i": "jobarrayid", "A": "jobid", "F": "arrayjobid", "K": "arraytaskid", "t": "statecompact"},
    **{"T": "state", "r": "reason", "R": "reasonlist", "N": "nodelist", "P": "partition"},
    **{"j": "name", "u": "username", "D": "numnodes", "M": "timeused", "l": "timelimit"},
    **{"L": "timeleft", "S": "starttime", "V": "submittime", "e": "endtime", "E": "dependency"},
    **{"o": "command", "Y": "schednodes", "Q": "prioritylong"},
}
_HEADS = {
    **{"jobarrayid": "JOBID", "username": "USER", "statecompact": "ST", "timeused": "TIME"},
    **{"numnodes": "NODES", "reasonlist": "NODELIST(REASON)"},
}


def _line_formatter(options: ParsedOptions) -> Callable[[QueueRow | None], str]:
    """Return the function that formats a row; it formats the header for None."""

    def text(name: str, row: QueueRow | None) -> str:
        return _HEADS.get(name, name.upper()) if row is None else _FIELDS[name](row)

    if (long := options.get("Format")) is not None:
        fields: list[tuple[str, int, str]] = []
        for part in long.split(","):
            m = _LONG.fullmatch(part)
            if m is None or m[1].lower() not in _FIELDS:
                raise unknown(f"the field {part} of squeue's --Format")
            fields.append((m[1].lower(), int(m[3]) if m[3] else 20, m[4] or ""))
        return lambda row: "".join(
            text(name, row)[: width or None].ljust(width) + tail for name, width, tail in fields
        )
    pattern = options.get("format") or _SQUEUE_DEFAULT
    _require_letters(pattern, _LETTERS, "squeue")
    return lambda row: _fill_pattern(pattern, lambda letter: text(_LETTERS[letter], row))


def _require_letters(pattern: str, known: Container[str], command: str) -> None:
    for m in _SPEC.finditer(pattern):
        if m[3] not in known:
            raise unknown(f"%{m[3]} in {command}'s --format")


def _fill_pattern(pattern: str, text: Callable[[str], str]) -> str:
    """Replace each ``%.10L`` by the text of its letter, cut and padded to its width."""

    def field(m: re.Match[str]) -> str:
        width = int(m[2] or 0)
        shown = text(m[3])[: width or None]
        return shown.rjust(width) if m[1] else shown.ljust(width)

    return _SPEC.sub(field, pattern)


_Row = tuple[FakePartition, str, tuple[str, ...]]


def sinfo(argv: Sequence[str], cluster: FakeCluster) -> str:
    """Return the output of sinfo; raise Refusal for an unknown option or format field."""
    options = parse(argv, SINFO_OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    pattern = options.get("format") or _SINFO_DEFAULT
    fields = _sinfo_fields(cluster)
    _require_letters(pattern, fields, "sinfo")

    def show(row: _Row | None) -> str:
        return _fill_pattern(
            pattern, lambda letter: fields[letter][0] if row is None else fields[letter][1](row)
        )

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
    cluster: FakeCluster,
    partitions: Sequence[FakePartition],
    names: Sequence[str],
    *,
    by_state: bool,
    apart: bool,
) -> list[_Row]:
    groups: dict[tuple[str, str, str], tuple[FakePartition, str, list[str]]] = {}
    jobs, num_cpus = cluster.table.jobs, cluster.config.cpus_per_node
    states = {n: cluster.nodes[n].state(jobs, num_cpus) for n in names if n in cluster.nodes}
    for partition in partitions:
        for name, state in states.items():
            key = (name if apart else "", partition.name, state if by_state else "")
            groups.setdefault(key, (partition, state, []))[2].append(name)
    rows = [(partition, state, tuple(members)) for partition, state, members in groups.values()]
    return sorted(rows, key=lambda r: list(cluster.nodes).index(r[2][0])) if apart else rows


def _sinfo_fields(cluster: FakeCluster) -> dict[str, tuple[str, Callable[[_Row], str]]]:
    config = cluster.config
    return {
        "P": ("PARTITION", lambda r: r[0].name + ("*" if r[0].is_default else "")),
        "R": ("PARTITION", lambda r: r[0].name),
        "p": ("PRIO_TIER", lambda r: str(r[0].tier)),
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

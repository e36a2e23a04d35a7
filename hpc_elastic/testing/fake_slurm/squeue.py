"""squeue: the queue, in the formats of ``-o`` and ``-O``. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm import scheduling, variables
from hpc_elastic.testing.fake_slurm.config import FakeConfig
from hpc_elastic.testing.fake_slurm.errors import Refusal, unknown
from hpc_elastic.testing.fake_slurm.jobs import COMPACT, Job
from hpc_elastic.testing.fake_slurm.options import FLAG, VALUE, Parsed, Table, parse
from hpc_elastic.testing.fake_slurm.table import INVALID
from hpc_elastic.testing.fake_slurm.table import Table as Jobs
from hpc_elastic.testing.fake_slurm.times import show_date, show_span

OPTIONS = Table(
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
_DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
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
    options = parse(argv, OPTIONS)
    if options.rest:
        raise Refusal(f"Unrecognized option: {options.rest[0]}")
    show = _formatter(options)
    rows = _rows(_chosen(options, jobs), config, now, apart="array" in options)
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


def _rows(jobs: Iterable[Job], config: FakeConfig, now: float, *, apart: bool) -> list[Row]:
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
    pattern = options.get("format") or _DEFAULT
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

"""scontrol: show, requeue, hold, release, update, ping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm import scontrol_show as show
from hpc_elastic.testing.fake_slurm.cluster import Cluster
from hpc_elastic.testing.fake_slurm.errors import Refusal, unknown
from hpc_elastic.testing.fake_slurm.jobs import Job
from hpc_elastic.testing.fake_slurm.options import FLAG, Parsed, Table, parse
from hpc_elastic.testing.fake_slurm.table import INVALID
from hpc_elastic.testing.fake_slurm.times import parse_begin, parse_limit

OPTIONS = Table({"all": FLAG, "oneliner": FLAG}, {"a": "all", "o": "oneliner"})
_NOT_PENDING = "Job is no longer pending execution"
_FINISHED = "Job has already finished"


def scontrol(argv: Sequence[str], cluster: Cluster, address: str, now: float) -> str:
    """Do what scontrol is asked; return what it prints.

    Args:
        argv: Its arguments.
        cluster: The cluster.
        address: The address of every node.
        now: The time.

    Raises:
        Refusal: it can not be done.
    """
    options = parse(argv, OPTIONS)
    if not options.rest:
        raise unknown("scontrol without a command")
    command, *rest = options.rest
    if command == "show":
        return _show(options, rest, cluster, address, now)
    if command == "ping":
        return "Slurmctld(primary) at localhost is UP\n"
    if command not in _COMMANDS:
        raise unknown(f"scontrol {command}")
    _COMMANDS[command](rest, cluster, now)
    return ""


def _show(options: Parsed, what: Sequence[str], cluster: Cluster, address: str, now: float) -> str:
    entity, name = (*what, "", "")[:2]
    one_line = "oneliner" in options
    if entity in ("job", "jobs"):
        return show.text(_jobs(cluster, name, now), one_line=one_line)
    if entity in ("node", "nodes"):
        return show.text(_nodes(cluster, name, address), one_line=one_line)
    if entity in ("partition", "partitions"):
        known = [p for p in cluster.config.partitions if name in ("", p.name)]
        if not known:
            raise Refusal(f"Partition {name} not found")
        fields = [
            show.partition(p, cluster.config, is_up=p.name not in cluster.closed) for p in known
        ]
        return show.text(fields, one_line=one_line)
    if entity == "config":
        return show.config(cluster.config)
    if entity == "hostnames":
        return "".join(f"{host}\n" for host in nodelist.expand(name))
    raise unknown(f"scontrol show {entity}")


def _jobs(cluster: Cluster, name: str, now: float) -> list[dict[str, str]]:
    jobs = cluster.table.find(name) if name else cluster.table.jobs
    if name and not jobs:
        raise Refusal(f"slurm_load_jobs error: {INVALID}")
    return [show.job(r[0], r, cluster.config, now) for r in show.records(jobs)]


def _nodes(cluster: Cluster, name: str, address: str) -> list[dict[str, str]]:
    names = nodelist.expand(name) if name else list(cluster.nodes)
    for node in names:
        if node not in cluster.nodes:
            raise Refusal(f"Node {node} not found")
    jobs = cluster.table.jobs
    return [show.node(cluster.nodes[node], jobs, cluster.config, address) for node in names]


def _each(names: Iterable[str], cluster: Cluster, act: Callable[[Job], str | None]) -> None:
    """Do something to all jobs that some names stand for; say of which it could not be done.

    Raises:
        Refusal: a name is unknown, or something could not be done.
    """
    lines: list[str] = []
    for name in names:
        jobs = cluster.table.find(name)
        if not jobs:
            lines.append(f"{INVALID} for job {name}")
        for job in jobs:
            if (why := act(job)) is not None:
                is_set = len(jobs) > 1 or "[" in name
                lines.append(f"{job.name}: {why}" if is_set else f"{why} for job {job.name}")
    if lines:
        raise Refusal("\n".join(lines))


def _requeue(names: Sequence[str], cluster: Cluster, now: float) -> None:
    def act(job: Job) -> str | None:
        if job.waits:
            return "Job is pending execution"
        if job.ending is not None:
            return "Requested operation is presently disabled"
        if not job.may_requeue or job.request.script is None:
            return "Requested operation is presently disabled"
        cluster.requeue(job, now)
        return None

    _each(_split(names), cluster, act)


def _hold(names: Sequence[str], cluster: Cluster, _now: float, *, held: bool = True) -> None:
    def act(job: Job) -> str | None:
        if not job.waits:
            return _FINISHED if job.is_over else _NOT_PENDING
        job.held = held
        return None

    _each(_split(names), cluster, act)


def _split(names: Sequence[str]) -> list[str]:
    """Return the names in ``1,2_[1,3]``: commas in brackets part nothing."""
    return [part for name in names for part in nodelist_names(name)]


def nodelist_names(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "[") - (c == "]")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _update(words: Sequence[str], cluster: Cluster, now: float) -> None:
    given: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        given[key.lower()] = value
    if "jobid" in given:
        _update_jobs(given.pop("jobid"), given, cluster, now)
    elif "nodename" in given:
        _update_nodes(given.pop("nodename"), given, cluster, now)
    elif "partitionname" in given:
        _update_partition(given.pop("partitionname"), given, cluster)
    else:
        raise unknown(f"scontrol update {' '.join(words)}")


def _update_jobs(names: str, given: Mapping[str, str], cluster: Cluster, now: float) -> None:
    for key in given:
        if key not in _JOB_FIELDS:
            raise unknown(f"scontrol update jobid=... {key}=")

    def act(job: Job) -> str | None:
        if job.number is None and "_" in names:
            cluster.table.number(job)
        for key, value in given.items():
            if (why := _JOB_FIELDS[key](job, value, now)) is not None:
                return why
        return None

    _each(_split([names]), cluster, act)


def _set_start(job: Job, value: str, now: float) -> str | None:
    if not job.waits:
        return _FINISHED if job.is_over else _NOT_PENDING
    job.begin = parse_begin(value, now)
    job.reason = "None"
    return None


def _set_excluded(job: Job, value: str, _now: float) -> str | None:
    if not job.waits:
        return _FINISHED if job.is_over else _NOT_PENDING
    job.excluded = frozenset(nodelist.expand(value))
    return None


def _set_requeue(job: Job, value: str, _now: float) -> str | None:
    if job.is_over:
        return _FINISHED
    job.may_requeue = value == "1"
    return None


def _set_limit(job: Job, value: str, _now: float) -> str | None:
    if job.is_over:
        return _FINISHED
    job.limit_s = parse_limit(value)
    return None


_JOB_FIELDS: dict[str, Callable[[Job, str, float], str | None]] = {
    "starttime": _set_start,
    "excnodelist": _set_excluded,
    "requeue": _set_requeue,
    "timelimit": _set_limit,
}


def _update_nodes(names: str, given: Mapping[str, str], cluster: Cluster, now: float) -> None:
    state = given.get("state", "").lower()
    if state not in ("resume", "down", "drain") or set(given) - {"state", "reason"}:
        raise unknown(f"scontrol update nodename=... {' '.join(given)} state={state}")
    for name in nodelist.expand(names):
        if name not in cluster.nodes:
            raise Refusal(f"Invalid node name specified: {name}")
        node = cluster.nodes[name]
        if state == "drain":
            node.is_drained = True
        elif state == "down":
            cluster.kill_node(name, now)
        elif node.died is None:
            node.is_drained = False


def _update_partition(name: str, given: Mapping[str, str], cluster: Cluster) -> None:
    state = given.get("state", "").lower()
    if state not in ("up", "down") or set(given) != {"state"}:
        raise unknown(f"scontrol update partitionname=... {' '.join(given)}")
    if name not in [p.name for p in cluster.config.partitions]:
        raise Refusal("Invalid partition name specified")
    (cluster.closed.discard if state == "up" else cluster.closed.add)(name)


_COMMANDS: dict[str, Callable[[Sequence[str], Cluster, float], None]] = {
    "requeue": _requeue,
    "hold": _hold,
    "release": partial(_hold, held=False),
    "update": _update,
}

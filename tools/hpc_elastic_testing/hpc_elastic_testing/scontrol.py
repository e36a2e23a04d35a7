"""scontrol and scancel."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from hpc_elastic.slurm import nodelist
from hpc_elastic_testing import steps
from hpc_elastic_testing.cluster import FakeCluster
from hpc_elastic_testing.config import FakeConfig, FakePartition, Refusal, unknown
from hpc_elastic_testing.jobs import INVALID, FakeNode, Job
from hpc_elastic_testing.submit_options import (
    FLAG,
    VALUE,
    OptionTable,
    ParsedOptions,
    parse,
    parse_begin,
    parse_limit,
    show_date,
    show_full_span,
    signal_name,
)

VERSION = "22.05.8"
"""The release that the fake imitates."""
SCONTROL_OPTIONS = OptionTable({"all": FLAG, "oneliner": FLAG}, {"a": "all", "o": "oneliner"})
SCANCEL_OPTIONS = OptionTable(
    {
        **dict.fromkeys(("signal", "state", "user", "name", "partition"), VALUE),
        **dict.fromkeys(("batch", "full", "me", "quiet"), FLAG),
    },
    {
        **{"s": "signal", "t": "state", "u": "user", "n": "name", "p": "partition", "b": "batch"},
        **{"f": "full", "Q": "quiet"},
    },
)
_NOT_PENDING = "Job is no longer pending execution"
_FINISHED = "Job has already finished"


def scontrol(argv: Sequence[str], cluster: FakeCluster, address: str, now: float) -> str:
    """Run scontrol; return its output, or raise Refusal. ``address`` is that of every node."""
    options = parse(argv, SCONTROL_OPTIONS)
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


def _show(
    options: ParsedOptions, what: Sequence[str], cluster: FakeCluster, address: str, now: float
) -> str:
    entity, name = (*what, "", "")[:2]
    config, jobs = cluster.config, cluster.table.jobs
    if entity == "config":
        return show_config(config)
    if entity == "hostnames":
        return "".join(f"{host}\n" for host in nodelist.expand(name))
    if entity in ("job", "jobs"):
        chosen = cluster.table.find_jobs(name) if name else jobs
        if name and not chosen:
            raise Refusal(f"slurm_load_jobs error: {INVALID}")
        fields = [show_job(group[0], group, config, now) for group in records(chosen)]
    elif entity in ("node", "nodes"):
        names = nodelist.expand(name) if name else list(cluster.nodes)
        for node in names:
            if node not in cluster.nodes:
                raise Refusal(f"Node {node} not found")
        fields = [show_node(cluster.nodes[node], jobs, config, address) for node in names]
    elif entity in ("reservation", "reservations"):
        return "No reservations in the system\n"
    elif entity in ("partition", "partitions"):
        known = [p for p in config.partitions if name in ("", p.name)]
        if not known:
            raise Refusal(f"Partition {name} not found")
        fields = [show_partition(p, config, is_up=p.name not in cluster.closed) for p in known]
    else:
        raise unknown(f"scontrol show {entity}")
    between, end = (" ", "\n") if "oneliner" in options else ("\n   ", "\n\n")
    return "".join(between.join(f"{k}={v}" for k, v in one.items()) + end for one in fields)


def _apply_to_jobs(
    names: Iterable[str], cluster: FakeCluster, act: Callable[[Job], str | None]
) -> None:
    """Apply a change to jobs; raise Refusal, with all names that are unknown or cannot change."""
    lines: list[str] = []
    for name in names:
        jobs = cluster.table.find_jobs(name)
        if not jobs:
            lines.append(f"{INVALID} for job {name}")
        for job in jobs:
            if (why := act(job)) is not None:
                is_set = len(jobs) > 1 or "[" in name
                lines.append(f"{job.name}: {why}" if is_set else f"{why} for job {job.name}")
    if lines:
        raise Refusal("\n".join(lines))


def _requeue(names: Sequence[str], cluster: FakeCluster, now: float) -> None:
    def act(job: Job) -> str | None:
        if job.is_queued:
            return "Job is pending execution"
        if job.ending is not None or not job.may_requeue or job.request.script is None:
            return "Requested operation is presently disabled"
        cluster.requeue_job(job, now)
        return None

    _apply_to_jobs(_split_names(names), cluster, act)


def _hold(names: Sequence[str], cluster: FakeCluster, _now: float, *, held: bool = True) -> None:
    def act(job: Job) -> str | None:
        if not job.is_queued:
            return _FINISHED if job.is_over else _NOT_PENDING
        job.held = held
        return None

    _apply_to_jobs(_split_names(names), cluster, act)


def _split_names(words: Sequence[str]) -> list[str]:
    """Return all names in words such as ``1,2_[1,3]``: split at the commas outside of brackets."""
    return [name for word in words for name in re.split(r",(?![^\[]*\])", word)]


def _update(words: Sequence[str], cluster: FakeCluster, now: float) -> None:
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


def _update_jobs(names: str, given: Mapping[str, str], cluster: FakeCluster, now: float) -> None:
    for key in given:
        if key not in ("starttime", "excnodelist", "requeue", "timelimit", "numtasks", "nice"):
            raise unknown(f"scontrol update jobid=... {key}=")

    def act(job: Job) -> str | None:
        if job.number is None and "_" in names:
            cluster.table.assign_number(job)
        for key, value in given.items():
            if job.is_over:
                return _FINISHED
            if key in ("starttime", "excnodelist", "numtasks") and not job.is_queued:
                return _NOT_PENDING
            if key == "starttime":
                job.begin, job.reason = parse_begin(value, now), "None"
            elif key == "excnodelist":
                job.excluded = frozenset(nodelist.expand(value))
            elif key == "nice":
                job.nice = int(value)
            elif key == "requeue":
                job.may_requeue = value == "1"
            elif key == "timelimit":
                job.limit_s = parse_limit(value)
            elif value != str(job.request.num_tasks):
                raise unknown(f"scontrol update jobid=... NumTasks={value}")
        return None

    _apply_to_jobs(_split_names([names]), cluster, act)


def _update_nodes(names: str, given: Mapping[str, str], cluster: FakeCluster, now: float) -> None:
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


def _update_partition(name: str, given: Mapping[str, str], cluster: FakeCluster) -> None:
    state = given.get("state", "").lower()
    if state not in ("up", "down") or set(given) != {"state"}:
        raise unknown(f"scontrol update partitionname=... {' '.join(given)}")
    if name not in [p.name for p in cluster.config.partitions]:
        raise Refusal("Invalid partition name specified")
    (cluster.closed.discard if state == "up" else cluster.closed.add)(name)


_COMMANDS: dict[str, Callable[[Sequence[str], FakeCluster, float], None]] = {
    "requeue": _requeue,
    "hold": _hold,
    "release": partial(_hold, held=False),
    "update": _update,
}


def show_config(cluster: FakeConfig) -> str:
    """Return ``scontrol show config``."""
    settings = {
        "ClusterName": steps.CLUSTER,
        "JobRequeue": "1",
        "KillWait": f"{cluster.kill_wait_s:g} sec",
        "MaxArraySize": str(cluster.max_array_size),
        "MinJobAge": f"{cluster.min_job_age_s:g} sec",
        "PreemptMode": "REQUEUE",
        "PreemptType": "preempt/partition_prio",
        "SLURM_VERSION": VERSION,
        "SlurmdTimeout": f"{cluster.node_timeout_s:g} sec",
        "AccountingStorageType": "accounting_storage/none",
    }
    lines = [f"{name:<23} = {value}" for name, value in sorted(settings.items())]
    return "\n".join(["Configuration data as of now", *lines, "", ""])


def show_partition(known: FakePartition, cluster: FakeConfig, *, is_up: bool) -> dict[str, str]:
    """Return the fields of ``scontrol show partition``."""
    nodes = nodelist.compress(cluster.node_names)
    return {
        "PartitionName": known.name,
        "AllowGroups": "ALL",
        "Default": "YES" if known.is_default else "NO",
        "GraceTime": f"{0 if known.preempt_mode == 'OFF' else cluster.grace_s:g}",
        "Hidden": "NO",
        "MaxTime": "UNLIMITED",
        "MaxNodes": "UNLIMITED",
        "Nodes": nodes,
        "PriorityTier": str(known.tier),
        "PreemptMode": known.preempt_mode,
        "State": "UP" if is_up else "DOWN",
        "TotalCPUs": str(cluster.nodes * cluster.cpus_per_node),
        "TotalNodes": str(cluster.nodes),
    }


def show_node(
    known: FakeNode, jobs: Iterable[Job], cluster: FakeConfig, address: str
) -> dict[str, str]:
    """Return the fields of ``scontrol show node``."""
    state = known.state(jobs, cluster.cpus_per_node)
    return {
        "NodeName": known.name,
        "CPUTot": str(cluster.cpus_per_node),
        "Gres": "(null)",
        "NodeAddr": address,
        "NodeHostName": known.name,
        "Version": VERSION,
        "RealMemory": str(cluster.memory_mb),
        "State": state.upper(),
        "Partitions": ",".join(p.name for p in cluster.partitions),
    }


def show_job(
    known: Job, elements: Sequence[Job], cluster: FakeConfig, now: float
) -> dict[str, str]:
    """Return the fields of ``scontrol show job``.

    ``known`` is the job, or the first of the ``elements`` that wait in one record.
    """
    request = known.request
    may_start = known.begin if known.begin > now else None
    identity = {"JobId": str(known.number or known.array)}
    if known.array is not None:
        shown = str(known.index)
        if known.number is None:
            indices = [e.index for e in elements if e.index is not None]
            shown = nodelist.compress_indices(indices, known.limit)
        identity |= {"ArrayJobId": str(known.array), "ArrayTaskId": shown}
    return {
        **identity,
        "JobName": request.name,
        "UserId": f"{steps.user_name()}({os.getuid()})",
        "GroupId": f"{steps.user_name()}({os.getgid()})",
        "Priority": str(known.priority),
        "Nice": str(known.nice),
        "JobState": known.shown_state,
        "Reason": known.reason,
        "Dependency": ",".join(f"{kind}:{i}" for kind, i in request.dependency) or "(null)",
        "Requeue": str(int(known.may_requeue)),
        "Restarts": str(known.restarts),
        "BatchFlag": "0" if request.script is None else "1",
        "ExitCode": str(known.exit),
        "RunTime": show_full_span((known.ended or now) - known.started if known.started else 0),
        "TimeLimit": show_full_span(known.limit_s),
        "SubmitTime": show_date(known.submitted),
        "EligibleTime": show_date(max(known.begin, known.submitted)),
        "StartTime": show_date(known.started or may_start, "Unknown"),
        "EndTime": show_date(known.ended or known.ends_at, "Unknown"),
        "PreemptTime": show_date(known.preempted, "None"),
        "Partition": request.partition,
        "ReqNodeList": nodelist.compress(request.nodelist) or "(null)",
        "ExcNodeList": nodelist.compress(sorted(known.excluded)) or "(null)",
        "NodeList": nodelist.compress(known.nodes),
        "NumNodes": str(len(known.nodes) or request.num_nodes),
        "NumCPUs": str(steps.cpus_of(known, cluster) * request.num_nodes),
        "NumTasks": str(request.num_tasks),
        "MinCPUsNode": str(request.cpus),
        "MinMemoryNode": "0",
        "OverSubscribe": "NO" if request.exclusive else "OK",
        "WorkDir": request.cwd,
    }


def records(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs by record: the waiting elements of an array share one."""
    found: dict[tuple[str, int], list[Job]] = {}
    for known in jobs:
        in_record = known.number is None
        key = ("array", known.array or 0) if in_record else ("job", known.number or 0)
        found.setdefault(key, []).append(known)
    return list(found.values())


def scancel(argv: Sequence[str], cluster: FakeCluster, now: float) -> str:
    """Cancel jobs, or send them a signal; unknown or ended jobs are no error, as in Slurm.

    Raises Refusal if there is neither a job nor a filter, or an option is unknown.
    """
    options = parse(argv, SCANCEL_OPTIONS)
    if (
        not options.rest
        and not {"state", "user", "name", "partition", "me"} & options.options.keys()
    ):
        raise Refusal("No job identification provided")
    names = _split_names(options.rest)
    jobs = [job for name in names for job in cluster.table.find_jobs(name)]
    chosen = [job for job in (jobs if names else cluster.table.jobs) if _matches(job, options)]
    number = options.get("signal")
    for job in [job for job in chosen if not job.is_over]:
        if number is None:
            cluster.cancel_job(job, now)
        elif job.has_nodes:
            # To the steps, with --batch to the batch script, with --full to both.
            signal_number = signal.Signals[f"SIG{signal_name(number)}"]
            if "batch" in options or "full" in options:
                cluster.signal_batch(job, signal_number, with_children="batch" not in options)
            if "batch" not in options:
                cluster.signal_steps(job, signal_number)
    return ""


def _matches(job: Job, options: ParsedOptions) -> bool:
    state = options.get("state")
    if state is not None and job.shown_state not in state.upper().split(","):
        return False
    if (options.get("user") or steps.user_name()) != steps.user_name():
        return False
    if (options.get("name") or job.request.name) != job.request.name:
        return False
    return (options.get("partition") or job.request.partition) == job.request.partition

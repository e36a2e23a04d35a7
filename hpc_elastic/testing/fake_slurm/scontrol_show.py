"""scontrol show: jobs, nodes, partitions and the configuration. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm import launching, variables
from hpc_elastic.testing.fake_slurm.config import FakeConfig, Partition
from hpc_elastic.testing.fake_slurm.jobs import Job
from hpc_elastic.testing.fake_slurm.nodes import Node
from hpc_elastic.testing.fake_slurm.times import show_date, show_full_span

VERSION = "22.05.8"
"""The release whose behaviour is imitated."""


def config(cluster: FakeConfig) -> str:
    """Return ``scontrol show config``."""
    settings = {
        "ClusterName": variables.CLUSTER,
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


def partition(known: Partition, cluster: FakeConfig, *, is_up: bool) -> dict[str, str]:
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


def node(known: Node, jobs: Iterable[Job], cluster: FakeConfig, address: str) -> dict[str, str]:
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


def job(known: Job, elements: Sequence[Job], cluster: FakeConfig, now: float) -> dict[str, str]:
    """Return the fields of ``scontrol show job``.

    Args:
        known: The job; of elements that wait in one record, the first.
        elements: All of them; itself alone elsewhere.
        cluster: The cluster's configuration.
        now: The time.
    """
    request = known.request
    may_start = known.begin if known.begin > now else None
    return {
        **_identity(known, elements),
        "JobName": request.name,
        "UserId": variables.user(),
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
        "NumCPUs": str(launching.cpus_of(known, cluster) * request.num_nodes),
        "NumTasks": str(request.num_tasks),
        "WorkDir": request.cwd,
    }


def _identity(known: Job, elements: Sequence[Job]) -> dict[str, str]:
    if known.array is None:
        return {"JobId": str(known.number)}
    indices = [e.index for e in elements if e.index is not None]
    in_record = known.number is None
    shown = nodelist.compress_indices(indices, known.limit) if in_record else str(known.index)
    return {
        "JobId": str(known.number or known.array),
        "ArrayJobId": str(known.array),
        "ArrayTaskId": shown,
    }


def records(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return jobs as Slurm keeps them: elements of an array that wait are one record."""
    found: dict[tuple[str, int], list[Job]] = {}
    for known in jobs:
        in_record = known.number is None
        key = ("array", known.array or 0) if in_record else ("job", known.number or 0)
        found.setdefault(key, []).append(known)
    return list(found.values())


def text(fields: Sequence[dict[str, str]], *, one_line: bool) -> str:
    """Return records as scontrol prints them."""
    between = " " if one_line else "\n   "
    shown = [between.join(f"{k}={v}" for k, v in record.items()) for record in fields]
    return "".join(line + ("\n" if one_line else "\n\n") for line in shown)

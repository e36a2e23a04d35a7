"""The SLURM_* variables of batch scripts and of steps, as Slurm sets them. Pure.

SLURM_JOB_START_TIME and SLURM_JOB_END_TIME are set as by Slurm 23 and later.
"""

from __future__ import annotations

import itertools
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_elastic.slurm import nodelist
from hpc_elastic.testing.fake_slurm.config import unknown
from hpc_elastic.testing.fake_slurm.jobs import MARKER, Job

CLUSTER = "fake"
_FIRST_PORT = 20000
"""Nobody listens there: the number is what tells one step from another."""


def of_batch(job: Job, cpus: int, folder: Path) -> dict[str, str]:
    """Return the environment of a job's batch script.

    Args:
        job: A job that has its nodes.
        cpus: CPUs that it has on each of them.
        folder: The cluster's directory.
    """
    node = job.nodes[0]
    return {
        **job.request.env,
        **of_job(job, cpus),
        **_of_place(node, 0, 0, 0),
        "SLURM_SUBMIT_DIR": job.request.env.get("PWD", job.request.cwd),
        "SLURM_SUBMIT_HOST": os.uname().nodename,
        "SLURM_CPUS_ON_NODE": str(cpus),
        "ENVIRONMENT": "BATCH",
        "HOSTNAME": node,
        MARKER: str(folder),
    }


def of_job(job: Job, cpus: int) -> dict[str, str]:
    """Return what all processes of a job are told of it."""
    request, count = job.request, len(job.nodes)
    nodes = nodelist.compress(job.nodes)
    found = {
        "SLURM_JOB_ID": str(job.number),
        "SLURM_JOBID": str(job.number),
        "SLURM_JOB_NAME": request.name,
        "SLURM_JOB_PARTITION": request.partition,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_JOB_NUM_NODES": str(count),
        "SLURM_NNODES": str(count),
        "SLURM_JOB_CPUS_PER_NODE": repeated([cpus] * count),
        "SLURM_TASKS_PER_NODE": repeated(split(request.num_tasks, count)),
        "SLURM_NTASKS": str(request.num_tasks),
        "SLURM_NPROCS": str(request.num_tasks),
        "SLURM_JOB_USER": user(),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "SLURM_CLUSTER_NAME": CLUSTER,
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_PRIO_PROCESS": "0",
    }
    return {**found, **_asked(job), **_of_array(job), **_of_time(job)}


def _asked(job: Job) -> dict[str, str]:
    """Return what is told only of what was asked for, or has been."""
    request = job.request
    told = {
        "SLURM_CPUS_PER_TASK": request.cpus_per_task,
        "SLURM_NTASKS_PER_NODE": request.tasks_per_node,
        "SLURM_RESTART_COUNT": job.restarts or None,
    }
    return {name: str(value) for name, value in told.items() if value is not None}


def _of_array(job: Job) -> dict[str, str]:
    if job.array is None:
        return {}
    return {
        "SLURM_ARRAY_JOB_ID": str(job.array),
        "SLURM_ARRAY_TASK_ID": str(job.index),
        "SLURM_ARRAY_TASK_COUNT": str(job.num_in_array),
        "SLURM_ARRAY_TASK_MIN": str(job.bounds[0]),
        "SLURM_ARRAY_TASK_MAX": str(job.bounds[1]),
        "SLURM_ARRAY_TASK_STEP": "1",
    }


def _of_time(job: Job) -> dict[str, str]:
    assert job.started is not None
    times = {"SLURM_JOB_START_TIME": str(int(job.started))}
    if job.ends_at is not None:
        times["SLURM_JOB_END_TIME"] = str(int(job.ends_at))
    return times


def _of_place(node: str, node_id: int, rank: int, local_rank: int) -> dict[str, str]:
    return {
        "SLURMD_NODENAME": node,
        "SLURM_NODEID": str(node_id),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_GTIDS": str(rank),
        "SLURM_TOPOLOGY_ADDR": node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    }


def of_step(
    job: Job, number: int, placed: Sequence[str], rank: int, cpus: int, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one task of a step.

    Args:
        job: Its job.
        number: The step's number.
        placed: The node of each task, by rank; tasks of one node stand together.
        rank: Which task.
        cpus: CPUs that the task's node gives to the step.
        env: The environment of the srun that starts it.
    """
    nodes = list(dict.fromkeys(placed))
    per_node = [len(list(same)) for _, same in itertools.groupby(placed)]
    node = placed[rank]
    step = {
        "SLURM_STEP_ID": str(number),
        "SLURM_STEPID": str(number),
        "SLURM_STEP_NODELIST": nodelist.compress(nodes),
        "SLURM_STEP_NUM_NODES": str(len(nodes)),
        "SLURM_STEP_NUM_TASKS": str(len(placed)),
        "SLURM_STEP_TASKS_PER_NODE": repeated(per_node),
        "SLURM_STEP_LAUNCHER_PORT": str(_FIRST_PORT + (job.number or 0) % 20000 + number),
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_NTASKS": str(len(placed)),
        "SLURM_NPROCS": str(len(placed)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_CPUS_ON_NODE": str(cpus),
    }
    local_rank = rank - placed.index(node)
    return {
        **env,
        **of_job(job, cpus),
        **_of_place(node, nodes.index(node), rank, local_rank),
        **step,
    }


def split(num_tasks: int, num_nodes: int) -> list[int]:
    """Return how many tasks each node has."""
    least, more = divmod(num_tasks, num_nodes)
    return [least + (i < more) for i in range(num_nodes)]


def repeated(numbers: Sequence[int]) -> str:
    """Return numbers as Slurm does: ``2(x3),1``."""
    groups = [(number, len(list(same))) for number, same in itertools.groupby(numbers)]
    return ",".join(f"{n}(x{count})" if count > 1 else str(n) for n, count in groups)


def user() -> str:
    """Return the name of the user; his number if he has none."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


# ---- The file name patterns of ``--output``: ``%A_%a.log``. Pure


_SYMBOL = re.compile(r"%(\d*)(.)")


def default(job: Job) -> str:
    """Return the pattern of a job that names none."""
    return "slurm-%A_%a.out" if job.array is not None else "slurm-%j.out"


def expand(
    pattern: str, job: Job, *, node: str, node_id: int = 0, rank: int = 0, step: int | None = None
) -> Path:
    """Return the file that a pattern stands for, in the job's directory if it is relative.

    Raises:
        Refusal: it has a symbol that the fake does not know.
    """
    values = {
        "%": "%",
        "j": str(job.number),
        "J": f"{job.number}" + ("" if step is None else f".{step}"),
        "A": str(job.number if job.array is None else job.array),
        "a": str(4294967294 if job.index is None else job.index),
        "N": node,
        "n": str(node_id),
        "t": str(rank),
        "s": "batch" if step is None else str(step),
        "u": user(),
        "x": job.request.name,
    }

    def value(m: re.Match[str]) -> str:
        if m[2] not in values:
            raise unknown(f"%{m[2]} in the file name {pattern}")
        text = values[m[2]]
        return text.zfill(int(m[1])) if m[1] and m[2] in "jJAants" else text

    return Path(job.request.cwd) / _SYMBOL.sub(value, pattern)

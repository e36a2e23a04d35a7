"""The start of batch scripts and steps: their environment, their files, their processes.

The SLURM_* variables are those of Slurm 22.05; SLURM_JOB_START_TIME and SLURM_JOB_END_TIME are set
as by Slurm 23 and later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_elastic.slurm import nodelist
from hpc_elastic_testing import jobs
from hpc_elastic_testing.config import FakeConfig, Refusal, unknown
from hpc_elastic_testing.jobs import MARKER, Job, JobStep, StepTask
from hpc_elastic_testing.submit_options import ParsedOptions

CLUSTER = "fake"
_FIRST_PORT = 20000
"""Nothing listens there; the number only identifies a step."""
_SYMBOL = re.compile(r"%(\d*)(.)")


def start_batch(job: Job, config: FakeConfig, folder: Path) -> JobStep:
    """Start the batch script of a job on its first node.

    Raises OSError if its directory, or that of its log, is missing.
    """
    request = job.request
    assert request.script is not None
    script = folder / "spool" / f"job{job.number:05}" / "slurm_script"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(request.script)
    script.chmod(0o700)
    env = batch_env(job, cpus_of(job, config), folder)
    mode = "ab" if request.append else "wb"
    node = job.nodes[0]
    default = "slurm-%A_%a.out" if job.array is not None else "slurm-%j.out"
    log = expand_pattern(request.output or default, job, node=node)
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open(mode))
        error: IO[bytes] = output
        if request.error:
            error = files.enter_context(expand_pattern(request.error, job, node=node).open(mode))
        process = jobs.start(
            [str(script), *request.arguments], env=env, cwd=request.cwd, output=output, error=error
        )
    return JobStep(None, [StepTask(0, node, process)])


@dataclass(frozen=True)
class StepOptions:
    """Options of a step: one call of srun; ``output`` and ``error`` are file descriptors."""

    options: ParsedOptions
    env: Mapping[str, str]
    cwd: str
    output: int
    error: int

    def number(self, option: str, default: int) -> int:
        """Return the value of an option as a number."""
        text = self.options.get(option)
        return default if text is None else int(text)


def start_step(job: Job, srun: StepOptions, config: FakeConfig, folder: Path) -> JobStep:
    """Start a step: its tasks, on the nodes of its job.

    Raises Refusal if the job has fewer nodes or CPUs than it asks for, or OSError if its directory,
    or that of a log, is missing.
    """
    placed = _place_tasks(job, srun)
    cpus = cpus_of(job, config)
    if srun.number("cpus-per-task", 1) > cpus:
        raise Refusal(
            f"Unable to create step for job {job.number}: "
            "Requested node configuration is not available"
        )
    number, job.num_steps = job.num_steps, job.num_steps + 1
    bad_exit = srun.options.get("kill-on-bad-exit")
    step = JobStep(
        number,
        no_kill="no-kill" in srun.options and srun.options.get("no-kill") != "off",
        kills_on_bad_exit=bad_exit is not None and bad_exit != "0",
    )
    for rank, node in enumerate(placed):
        env = task_env(job, number, placed, rank, cpus, srun.env)
        env[jobs.MARKER] = str(folder)
        cwd = srun.options.get("chdir") or srun.cwd
        node_id = list(dict.fromkeys(placed)).index(node)
        with contextlib.ExitStack() as files:
            output, error = srun.output, srun.error
            for name in ("output", "error"):
                if (pattern := srun.options.get(name)) is None:
                    continue
                path = expand_pattern(
                    str(Path(cwd) / pattern), job,
                    node=node, node_id=node_id, rank=rank, step=number,
                )  # fmt: skip
                mode = os.O_APPEND if srun.options.get("open-mode") == "append" else os.O_TRUNC
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
                files.callback(os.close, fd)
                output = fd if name == "output" else output
                error = fd if name == "error" or "error" not in srun.options else error
            process = jobs.start(srun.options.rest, env=env, cwd=cwd, output=output, error=error)
        step.tasks.append(StepTask(rank, node, process))
    job.steps.append(step)
    return step


def _place_tasks(job: Job, srun: StepOptions) -> list[str]:
    """Return the node of each task, by rank: by srun's options, else by the job's."""
    count = srun.number("nodes", 0)
    tasks = srun.number("ntasks", 0)
    per_node = srun.number("ntasks-per-node", 0)
    if not count:
        count = min(tasks, len(job.nodes)) if tasks else len(job.nodes)
    if count > len(job.nodes):
        why = "More processors requested than permitted"
        raise Refusal(f"Unable to create step for job {job.number}: {why}")
    tasks = tasks or (count * per_node if per_node else max(count, job.request.num_tasks))
    counts = tasks_per_node(max(tasks, count), count)
    return [node for node, num in zip(job.nodes, counts, strict=False) for _ in range(num)]


def cpus_of(job: Job, config: FakeConfig) -> int:
    """Return the number of CPUs that a job has on each node."""
    return config.cpus_per_node if job.request.exclusive else job.request.cpus


def batch_env(job: Job, cpus: int, folder: Path) -> dict[str, str]:
    """Return the environment of a job's batch script; the job has ``cpus`` on each of its nodes."""
    node = job.nodes[0]
    return {
        **job.request.env,
        **_job_env(job, cpus),
        **_place_env(node, 0, 0, 0),
        "SLURM_SUBMIT_DIR": job.request.env.get("PWD", job.request.cwd),
        "SLURM_SUBMIT_HOST": os.uname().nodename,
        "SLURM_CPUS_ON_NODE": str(cpus),
        "ENVIRONMENT": "BATCH",
        "HOSTNAME": node,
        MARKER: str(folder),
    }


def task_env(
    job: Job, number: int, placed: Sequence[str], rank: int, cpus: int, env: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of one task of a step, made of that of its srun.

    ``placed`` has the node of each task by rank; tasks of one node stand together. ``cpus`` are
    those that the task's node gives to the step.
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
        "SLURM_STEP_TASKS_PER_NODE": nodelist.repeat_counts(per_node),
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
        **_job_env(job, cpus),
        **_place_env(node, nodes.index(node), rank, local_rank),
        **step,
    }


def _job_env(job: Job, cpus: int) -> dict[str, str]:
    """Return the variables of all processes of a job."""
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
        "SLURM_JOB_CPUS_PER_NODE": nodelist.repeat_counts([cpus] * count),
        "SLURM_TASKS_PER_NODE": nodelist.repeat_counts(tasks_per_node(request.num_tasks, count)),
        "SLURM_NTASKS": str(request.num_tasks),
        "SLURM_NPROCS": str(request.num_tasks),
        "SLURM_JOB_USER": user_name(),
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "SLURM_CLUSTER_NAME": CLUSTER,
        "SLURM_NODE_ALIASES": "(null)",
        "SLURM_PRIO_PROCESS": "0",
    }
    optional = {  # only for options that were given, or after a restart
        "SLURM_CPUS_PER_TASK": request.cpus_per_task,
        "SLURM_NTASKS_PER_NODE": request.tasks_per_node,
        "SLURM_RESTART_COUNT": job.restarts or None,
    }
    found |= {name: str(value) for name, value in optional.items() if value is not None}
    if job.array is not None:
        found |= {
            "SLURM_ARRAY_JOB_ID": str(job.array),
            "SLURM_ARRAY_TASK_ID": str(job.index),
            "SLURM_ARRAY_TASK_COUNT": str(job.num_in_array),
            "SLURM_ARRAY_TASK_MIN": str(job.bounds[0]),
            "SLURM_ARRAY_TASK_MAX": str(job.bounds[1]),
            "SLURM_ARRAY_TASK_STEP": "1",
        }
    assert job.started is not None
    found["SLURM_JOB_START_TIME"] = str(int(job.started))
    if job.ends_at is not None:
        found["SLURM_JOB_END_TIME"] = str(int(job.ends_at))
    return found


def _place_env(node: str, node_id: int, rank: int, local_rank: int) -> dict[str, str]:
    return {
        "SLURMD_NODENAME": node,
        "SLURM_NODEID": str(node_id),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_GTIDS": str(rank),
        "SLURM_TOPOLOGY_ADDR": node,
        "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    }


def tasks_per_node(num_tasks: int, num_nodes: int) -> list[int]:
    """Return the number of tasks of each node."""
    least, more = divmod(num_tasks, num_nodes)
    return [least + (i < more) for i in range(num_nodes)]


def user_name() -> str:
    """Return the name of the user, or the number of one without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def expand_pattern(
    pattern: str, job: Job, *, node: str, node_id: int = 0, rank: int = 0, step: int | None = None
) -> Path:
    """Return the file of a pattern such as ``%A_%a.log``, relative to the job's directory.

    Raises Refusal if it has a symbol that the fake does not know.
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
        "u": user_name(),
        "x": job.request.name,
    }

    def value(m: re.Match[str]) -> str:
        if m[2] not in values:
            raise unknown(f"%{m[2]} in the file name {pattern}")
        text = values[m[2]]
        return text.zfill(int(m[1])) if m[1] and m[2] in "jJAants" else text

    return Path(job.request.cwd) / _SYMBOL.sub(value, pattern)

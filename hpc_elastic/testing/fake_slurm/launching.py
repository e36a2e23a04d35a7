"""Starts what a job runs: its batch script, and the tasks of its steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_elastic.testing.fake_slurm import patterns, processes, variables
from hpc_elastic.testing.fake_slurm.config import FakeConfig
from hpc_elastic.testing.fake_slurm.errors import Refusal
from hpc_elastic.testing.fake_slurm.jobs import Job, Step, Task
from hpc_elastic.testing.fake_slurm.options import Parsed


def cpus_of(job: Job, config: FakeConfig) -> int:
    """Return how many CPUs a job has on each of its nodes."""
    return config.cpus_per_node if job.request.exclusive else job.request.cpus


def start_batch(job: Job, config: FakeConfig, folder: Path) -> Step:
    """Start the batch script of a job on its first node.

    Raises:
        OSError: its directory or its log is not there.
    """
    request = job.request
    assert request.script is not None
    script = folder / "spool" / f"job{job.number:05}" / "slurm_script"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(request.script)
    script.chmod(0o700)
    env = variables.of_batch(job, cpus_of(job, config), folder)
    mode = "ab" if request.append else "wb"
    node = job.nodes[0]
    log = patterns.expand(request.output or patterns.default(job), job, node=node)
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open(mode))
        error: IO[bytes] = output
        if request.error:
            error = files.enter_context(patterns.expand(request.error, job, node=node).open(mode))
        process = processes.start(
            [str(script), *request.arguments], env=env, cwd=request.cwd, output=output, error=error
        )
    return Step(None, [Task(0, node, process)])


@dataclass(frozen=True)
class Srun:
    """One call of srun.

    Attributes:
        options: Its options.
        env: Its environment.
        cwd: Its directory.
        output: File descriptor of its standard output.
        error: The same for its errors.
    """

    options: Parsed
    env: Mapping[str, str]
    cwd: str
    output: int
    error: int

    def number(self, option: str, default: int) -> int:
        """Return the value of an option that is a number."""
        text = self.options.get(option)
        return default if text is None else int(text)


def start_step(job: Job, srun: Srun, config: FakeConfig, folder: Path) -> Step:
    """Start a step: its tasks, on the nodes of its job.

    Raises:
        Refusal: the job has not as much as it asks for.
        OSError: its directory or a log is not there.
    """
    placed = _places(job, srun)
    cpus = cpus_of(job, config)
    if srun.number("cpus-per-task", 1) > cpus:
        raise Refusal(
            f"Unable to create step for job {job.number}: "
            "Requested node configuration is not available"
        )
    number, job.num_steps = job.num_steps, job.num_steps + 1
    bad_exit = srun.options.get("kill-on-bad-exit")
    step = Step(
        number,
        no_kill="no-kill" in srun.options and srun.options.get("no-kill") != "off",
        kills_on_bad_exit=bad_exit is not None and bad_exit != "0",
    )
    for rank, node in enumerate(placed):
        env = variables.of_step(job, number, placed, rank, cpus, srun.env)
        env[processes.MARKER] = str(folder)
        step.tasks.append(Task(rank, node, _start_task(job, srun, step, placed, rank, env)))
    job.steps.append(step)
    return step


def _start_task(
    job: Job, srun: Srun, step: Step, placed: Sequence[str], rank: int, env: Mapping[str, str]
) -> processes.Process:
    cwd = srun.options.get("chdir") or srun.cwd
    with contextlib.ExitStack() as files:
        output, error = srun.output, srun.error
        for name in ("output", "error"):
            if (pattern := srun.options.get(name)) is not None:
                nodes = list(dict.fromkeys(placed))
                node_id = nodes.index(placed[rank])
                path = patterns.expand(
                    str(Path(cwd) / pattern), job,
                    node=placed[rank], node_id=node_id, rank=rank, step=step.number,
                )  # fmt: skip
                mode = os.O_APPEND if srun.options.get("open-mode") == "append" else os.O_TRUNC
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | mode, 0o666)
                files.callback(os.close, fd)
                output = fd if name == "output" else output
                error = fd if name == "error" or "error" not in srun.options else error
        return processes.start(srun.options.rest, env=env, cwd=cwd, output=output, error=error)


def _places(job: Job, srun: Srun) -> list[str]:
    """Return the node of each task, by rank: what srun says, else what the job asked for."""
    count = srun.number("nodes", 0)
    tasks = srun.number("ntasks", 0)
    per_node = srun.number("ntasks-per-node", 0)
    if not count:
        count = min(tasks, len(job.nodes)) if tasks else len(job.nodes)
    if count > len(job.nodes):
        why = "More processors requested than permitted"
        raise Refusal(f"Unable to create step for job {job.number}: {why}")
    tasks = tasks or (count * per_node if per_node else max(count, job.request.num_tasks))
    counts = variables.split(max(tasks, count), count)
    return [node for node, num in zip(job.nodes, counts, strict=False) for _ in range(num)]

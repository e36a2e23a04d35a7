"""The process that Slurm starts on each node of a run: ``python -m hpc_elastic.agent.task ARRAY``.

ARRAY is ``<sweep>/.hpc_elastic/array-<k>.json``; the task finds its run there by its index in the
job array, or by its node's id in a gang. A task that starts after its run has ended exits with 0 at
once, before torch is imported.

Exit codes: 0 the run succeeded or had ended before; 1 it failed; 143 this node was taken.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.agent import gang
from hpc_elastic.errors import HpcElasticError, RunDirectoryError
from hpc_elastic.rundir import ArrayFiles, RunDir, RunSpec, task_name
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.environment import SlurmEnvironment


@dataclass(frozen=True)
class Task:
    """One node of one run, in one attempt."""

    run: RunDir
    spec: RunSpec
    slot: int
    slurm: SlurmEnvironment

    in_gang: bool = False

    @property
    def name(self) -> str:
        """``<array job id>_<index>``, as squeue prints it; ``<job id>.<node id>`` in a gang."""
        return self.slurm.task_name

    @property
    def attempt(self) -> int:
        """How often Slurm has requeued this task."""
        return self.slurm.restart_count

    @property
    def logs(self) -> Path:
        """Where this attempt's logs go."""
        return self.run.attempt(self.name, self.attempt)


def find_task(array: Path, slurm: SlurmEnvironment) -> Task:
    """Look up which node of which run this task is.

    Raises:
        RunDirectoryError: the array file or the run directory can not be read.
        SlurmEnvironmentError: a variable that the task will need is malformed.
        HpcElasticError: this process is no task of that array.
    """
    require_readable(slurm)
    try:
        content = json.loads(array.read_text())
        runs, in_gang = content["runs"], bool(content.get("gang"))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(f"{array}: not readable on {slurm.node_name}: {e}") from e
    job_id, index = _place(slurm, in_gang=in_gang)
    if index >= len(runs):
        raise HpcElasticError(f"{array} has {len(runs)} tasks, not {index}")
    files = ArrayFiles.of(array)
    if files.job_id is None:  # submitted by hand
        files.submitted_as(str(job_id))
    if in_gang:
        gang.record(files, slurm)
    run = RunDir(Path(runs[index]["dir"]))
    return Task(run, run.load(), int(runs[index]["slot"]), slurm, in_gang)


def require_readable(slurm: SlurmEnvironment) -> None:
    """Read once what the agent will read later, far from where an error could be explained.

    Raises:
        SlurmEnvironmentError: names the variable, its value and what is expected.
    """
    _ = slurm.task_name, slurm.restart_count, slurm.node_name, slurm.cpus_on_node
    _ = slurm.step_id, slurm.end_time_s, slurm.hosts


def _place(slurm: SlurmEnvironment, *, in_gang: bool) -> tuple[int, int]:
    """Return (job id, index in the array file) of this task."""
    if in_gang:
        if slurm.array_job_id is not None:
            raise HpcElasticError("not a gang's job: submit the script without --array")
        return slurm.job_id, slurm.node_id
    if slurm.array_task_id is None or slurm.array_job_id is None:
        raise HpcElasticError("not an array task: submit the script with its #SBATCH --array line")
    return slurm.array_job_id, slurm.array_task_id


def main(argv: list[str] | None = None) -> int:
    """Run the agent of one node; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hpc_elastic.agent.task", description=__doc__)
    parser.add_argument("array", type=Path, help="<sweep>/.hpc_elastic/array-<k>.json")
    arguments = parser.parse_args(argv)
    try:
        task = find_task(arguments.array, SlurmEnvironment.from_env(os.environ))
        if task.run.result.exists():
            print(f"{task.run.path}: the run has ended; nothing to do")
            return 0
        task.logs.mkdir(parents=True, exist_ok=True)
        _log_to(task.logs / "agent.log")
    except (HpcElasticError, OSError) as e:
        print(f"hpc_elastic: {e}", file=sys.stderr)
        return 1
    print(f"{task.run.path}: logs of this task are in {task.logs}")
    from hpc_elastic.agent.supervise import supervise

    exit_code = supervise(task)
    if task.in_gang:
        _leave_gang(task)
    return exit_code


def _leave_gang(task: Task) -> None:
    """See that the gang's job ends with its run, whatever became of the batch script."""
    gang.mark_end(task.logs, task.slurm)
    if 0 < task.slurm.node_id < gang.DEPUTIES and task.run.result.exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the cancellation is sent to us as well
        first = task_name(str(task.slurm.job_id), 0, gang=True)
        gang.end_if_orphaned(task.name, task.run.attempt(first, task.attempt), SlurmClient())


def _log_to(path: Path) -> None:
    line = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(
        level=logging.INFO, format=line, handlers=[logging.FileHandler(path, delay=False)]
    )
    errors = logging.StreamHandler()
    errors.setLevel(logging.ERROR)
    logging.getLogger().addHandler(errors)


if __name__ == "__main__":
    sys.exit(main())

"""The process that Slurm starts for each array task: ``python -m hpc_elastic.agent.task ARRAY``.

ARRAY is ``<sweep>/.hpc_elastic/array-<k>.json``; the task finds its run there by its index. A task
that starts after its run has ended exits with 0 at once, before torch is imported.

Exit codes: 0 the run succeeded or had ended before; 1 it failed; 143 this node was taken.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.errors import HpcElasticError, RunDirectoryError
from hpc_elastic.rundir import RunDir, RunSpec, write_atomic
from hpc_elastic.slurm.environment import SlurmEnvironment


@dataclass(frozen=True)
class Task:
    """One node of one run, in one attempt."""

    run: RunDir
    spec: RunSpec
    slot: int
    slurm: SlurmEnvironment

    @property
    def name(self) -> str:
        """``<array job id>_<index>``, as squeue prints it."""
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
    """Look up which node of which run this array task is.

    Raises:
        RunDirectoryError: the array file or the run directory can not be read.
        HpcElasticError: this process is no task of that array.
    """
    if slurm.array_task_id is None or slurm.array_job_id is None:
        raise HpcElasticError("not an array task: submit the script with its #SBATCH --array line")
    try:
        runs = json.loads(array.read_text())["runs"]
        place = runs[slurm.array_task_id]
    except (OSError, ValueError, KeyError) as e:
        raise RunDirectoryError(f"{array}: not readable on {slurm.node_name}: {e}") from e
    except IndexError as e:
        raise HpcElasticError(f"{array} has {len(runs)} tasks, not {slurm.array_task_id}") from e
    job_id = array.with_suffix(".jobid")
    if not job_id.exists():  # submitted by hand
        write_atomic(job_id, str(slurm.array_job_id))
    run = RunDir(Path(place["dir"]))
    return Task(run, run.load(), int(place["slot"]), slurm)


def main(argv: list[str] | None = None) -> int:
    """Run one array task; return its exit code."""
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

    return supervise(task)


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

"""A task: one node of one run in one attempt; how it is found, and what its workers start with."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hpc_elastic.errors import HpcElasticError, RunDirectoryError
from hpc_elastic.run import job_of, ownership
from hpc_elastic.run.directory import ArrayFiles, Pool, RunDir, RunSpec
from hpc_elastic.shared_files import read_text
from hpc_elastic.slurm import run_tasks, scheduler
from hpc_elastic.slurm.environment import REPLACEMENT, SlurmEnvironment
from hpc_elastic.slurm.job_state import Phase

_THREADS = "OMP_NUM_THREADS"
_GIVEN_THREADS = os.environ.get(_THREADS)  # the user's own value, before anything is set here


@dataclass(frozen=True)
class Task:
    """One node of one run, in one attempt."""

    run: RunDir
    spec: RunSpec
    slot: int
    slurm: SlurmEnvironment

    is_coallocated: bool = False
    num_in_array: int = 1  # how many tasks the array has, of all its runs
    superseded: bool = False
    """Whether another task has its place: the run was resumed, or no record names this one."""

    @property
    def name(self) -> str:
        """``<array job id>_<index>``; ``<job id>.<node id>`` in a co-allocated job."""
        return self.slurm.task_name

    @property
    def pool(self) -> Pool:
        """The pool of its slot."""
        return self.spec.pool_of(self.slot)

    @property
    def attempt(self) -> int:
        """How often Slurm has requeued this task."""
        return self.slurm.restart_count

    @property
    def logs(self) -> Path:
        """Where this attempt's logs go."""
        return self.run.attempt(self.name, self.attempt)


def find_task(array: Path, slurm: SlurmEnvironment) -> Task:
    """Look up the run and the node of this task.

    Raises HpcElasticError if this process is no task of that array, another job runs its script,
    others may write it, it or the run cannot be read, or a variable that the task will need is
    malformed.
    """
    # read once what the agent will read later, far from where an error could be explained
    _ = slurm.task_name, slurm.restart_count, slurm.node_name, slurm.cpus_on_node
    _ = slurm.step_id, slurm.end_time_s, slurm.hosts
    ownership.require_own(array.parent, array)
    try:
        content = json.loads(read_text(array))
        runs, is_coallocated = content["runs"], bool(content.get("coallocated"))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(f"{array}: not readable on {slurm.node_name}: {e}") from e
    job_id, index = slurm.array_job_id, slurm.array_task_id
    if is_coallocated:
        if job_id is not None:
            raise HpcElasticError("not a co-allocated job: submit the script without --array")
        job_id, index = slurm.job_id, slurm.node_id
    elif index is None or job_id is None:
        raise HpcElasticError("not an array task: submit the script with its #SBATCH --array line")
    if index >= len(runs):
        raise HpcElasticError(f"{array} has {len(runs)} tasks, not {index}")
    files = ArrayFiles.of(array)
    if files.job_id is None:
        files.started_as(str(job_id))
    run = RunDir(Path(runs[index]["dir"]))
    spec = ownership.load_own(run, run.rdzv, run.first_term, run.event_logs, run.tasks, run.hydra)
    superseded = spec.generation > 0 and (files.number, index) not in spec.tasks
    if REPLACEMENT in slurm.variables:  # its answer may have been lost, and another one submitted
        superseded = superseded or not run_tasks.is_recorded(spec, slurm.task_name)
    elif not (superseded or files.job_id == str(job_id)):
        _require_sole_job(run, spec, slurm.task_name)
    if is_coallocated:
        scheduler.record_job_nodes(files, slurm)
    slot = int(runs[index]["slot"])
    run.complete(spec)
    return Task(run, spec, slot, slurm, is_coallocated, len(runs), superseded)


def _require_sole_job(run: RunDir, spec: RunSpec, task: str) -> None:
    """Refuse a job whose script was submitted by hand while the run's own job waits or runs."""
    if run_tasks.is_recorded(spec, task):
        return
    job, states = job_of(task), scheduler.own_queue(spec).tasks(run_tasks.jobs_of(spec)).values()
    for state in states:
        if state.phase is not Phase.ENDED:
            raise RunDirectoryError(
                f"job {job} has the script of job {job_of(state.task)}, whose task {state.task} is "
                f"{state.state}: it would have the places of the same run; `scancel {job}`. To "
                f"change the nodes of the run: `hpc-elastic cancel {run.path}`, then `hpc-elastic "
                f"resume {run.path} nodes=...`"
            )


def worker_command(task: Task) -> tuple[str, ...]:
    """Return the command line of this task's workers."""
    return (sys.executable, "-uP", "-m", "hpc_elastic.agent.worker_main", str(task.run.path))


def prepare_environment(task: Task, num_workers: int) -> None:
    """Set the variables that a process reads at its start, for a number of workers."""
    cpus = min(task.slurm.cpus_on_node, len(os.sched_getaffinity(0)))
    launcher = task.spec.settings.launcher
    share = launcher.agent.omp_num_threads or max(1, cpus // num_workers)
    os.environ[_THREADS] = _GIVEN_THREADS or str(share)
    os.environ |= {**task.spec.file_env, **launcher.env}

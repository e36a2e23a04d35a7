"""What a submission looks like from outside, whichever scheduler runs it.

`wait` and the commands know this interface only; `slurm_backend` and `local` implement it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hpc_elastic.rundir import RunDir, task_name
from hpc_elastic.slurm.states import TaskState
from hpc_elastic.submit.plan import Plan


class Handle(Protocol):
    """A submission under way."""

    @property
    def job_ids(self) -> Sequence[str]:
        """Return the job id of each array, in the plan's order."""
        ...

    def tasks(self) -> Mapping[str, TaskState]:
        """Return all that the scheduler still lists, by its own names; one call for all.

        A gang is one entry, by its job id: `hpc_elastic.agent.gang.states_of` takes it apart.

        Raises:
            SlurmError: the scheduler does not answer at the moment.
        """
        ...

    def cancel(self) -> None:
        """End all tasks that still wait or run."""
        ...

    def leave(self) -> str:
        """Let go on Ctrl-C, and return what the user should know: how to go on, or what ended."""
        ...

    def close(self) -> None:
        """Release what the handle holds, once all runs have ended."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """One run that is waited for.

    Attributes:
        dir: The run directory.
        label: What people recognise it by: its overrides.
        tasks: Names of its tasks, by slot.
        submission: The sweep's ``.hpc_elastic``.
    """

    dir: Path
    label: str
    tasks: tuple[str, ...]
    submission: Path

    @property
    def paths(self) -> RunDir:
        """Return the run's files."""
        return RunDir(self.dir)

    @property
    def name(self) -> str:
        """Return its directory relative to the sweep's, by which no two runs are alike."""
        sweep = self.submission.parent
        inside = self.dir != sweep and self.dir.is_relative_to(sweep)
        return str(self.dir.relative_to(sweep)) if inside else self.dir.name


def track(plan: Plan, job_ids: Sequence[str], labels: Sequence[str]) -> list[TrackedRun]:
    """Return the runs of a plan as submitted, in its order."""
    jobs = dict(zip((array.number for array in plan.arrays), job_ids, strict=True))
    gangs = {array.number for array in plan.arrays if array.gang}
    names = [
        tuple(task_name(jobs[k], index, gang=k in gangs) for k, index in tasks)
        for tasks in plan.tasks()
    ]
    return [
        TrackedRun(run.dir, label, tasks, plan.submission)
        for run, label, tasks in zip(plan.runs, labels, names, strict=True)
    ]

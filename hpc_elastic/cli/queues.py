"""What the scheduler says of runs that others have submitted, for commands that look at them."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from hpc_elastic.agent.gang import GangNodes, recorded, states_of
from hpc_elastic.errors import SlurmError
from hpc_elastic.rundir import RunSpec, Submission, read_json
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import TaskState, job_of


@dataclass(frozen=True)
class Queue:
    """What the schedulers of some runs list.

    Attributes:
        listed: The tasks, by the scheduler's names.
        silent: Why Slurm did not answer; None if it did, or had not to be asked.
    """

    listed: Mapping[str, TaskState] = field(default_factory=dict)
    silent: str | None = None

    def of(self, spec: RunSpec) -> dict[str, TaskState] | None:
        """Return the tasks of one of these runs that are listed; None: nobody knows."""
        if spec.launcher == "slurm" and self.silent is not None:
            return None
        submission = Submission(Path(spec.submission))
        return states_of(names_of(spec), self.listed, _gangs(submission))


def names_of(spec: RunSpec) -> list[str]:
    """Return the names of a run's tasks by slot, replacements included, as far as submitted."""
    return replacement.current_names(spec)


def ask(specs: Sequence[RunSpec], client: SlurmClient | None = None) -> Queue:
    """Ask for all tasks of these runs: Slurm once, and for local runs their own table."""
    listed: dict[str, TaskState] = {}
    for spec in specs:
        if spec.launcher == "local":
            listed |= local_tasks(Submission(Path(spec.submission)), _is_here(spec))
    jobs = [job for spec in specs if spec.launcher == "slurm" for job in _jobs(spec)]
    if not jobs:
        return Queue(listed)
    try:
        return Queue(listed | (client or SlurmClient()).tasks(jobs, once=True))
    except SlurmError as e:
        return Queue(listed, silent=str(e))


def _jobs(spec: RunSpec) -> Iterable[str]:
    return dict.fromkeys(job_of(name) for name in names_of(spec))


def _gangs(submission: Submission) -> dict[str, GangNodes]:
    found = ((array.job_id, recorded(array)) for array in submission.arrays())
    return {job: nodes for job, nodes in found if job and nodes}


def _is_here(spec: RunSpec) -> bool:
    return spec.provenance.get("host") == socket.gethostname()


def local_tasks(submission: Submission, is_here: bool) -> dict[str, TaskState]:
    """Return what a local launcher has written down about its tasks, in Slurm's words.

    Args:
        submission: Where.
        is_here: They are processes of this machine: one that is not there has ended, for a
            launcher that was killed can not write that down.
    """
    states = {}
    for name, task in (read_json(submission.local_tasks) or {}).items():
        state = _local_state(name, task)
        gone = state.state == "RUNNING" and is_here and not psutil.pid_exists(int(task["pid"]))
        states[name] = replace(state, state="FAILED", reason="killed") if gone else state
    return states


def _local_state(name: str, task: Mapping[str, object]) -> TaskState:
    state, code = str(task.get("state")), task.get("exit_code")
    if state != "ENDED":
        return TaskState(name, state, "" if state == "RUNNING" else "Resources")
    if code is None:
        return TaskState(name, "CANCELLED")
    return TaskState(name, "COMPLETED" if code == 0 else "FAILED", f"exit code {code}")

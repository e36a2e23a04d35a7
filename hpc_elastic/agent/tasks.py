"""The tasks of a run, as the scheduler sees them: Slurm, or the local launcher's table."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from hpc_elastic.agent.gang import GangNodes, recorded, states_of
from hpc_elastic.errors import SlurmError
from hpc_elastic.rundir import RunSpec, Submission, read_json
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase, TaskState

_log = logging.getLogger(__name__)

_HOST = socket.gethostname()


class RunTasks(Protocol):
    """What the leader asks of the scheduler. All calls may block for seconds."""

    def view(self) -> Mapping[str, TaskState] | None:
        """Return every task of the run that the scheduler knows, by name; None: nobody knows."""

    def is_running(self, task: str) -> bool | None:
        """Tell whether a task is RUNNING; None where nobody knows."""

    def cancel_pending(self) -> None:
        """Take the run's tasks that have not started yet out of the queue.

        Raises:
            SlurmError: they may still be there.
        """

    def postpone_pending(self, delay_s: float) -> None:
        """Let the run's tasks that have not started yet not start before so long from now.

        Raises:
            SlurmError: they may start earlier.
        """


def tasks_of(spec: RunSpec) -> RunTasks:
    """Return the tasks of a run."""
    return SlurmTasks(spec) if spec.launcher == "slurm" else LocalTasks(spec)


def job_ids(spec: RunSpec) -> dict[int, str]:
    """Return the job id of each array of the run that has been submitted, by array number."""
    submission = Submission(Path(spec.submission))
    found = {k: submission.array(k).job_id for k in dict(spec.tasks)}
    return {k: job_id for k, job_id in found.items() if job_id}


def task_names(spec: RunSpec) -> list[str]:
    """Return the names of the run's tasks by slot, as far as their arrays have been submitted."""
    return spec.task_names(job_ids(spec))


class SlurmTasks:
    """Tasks of one or more job arrays, and of the gang where the run has one."""

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()
        self._silent = False

    def view(self) -> Mapping[str, TaskState] | None:
        """Ask squeue once; a Slurm that does not answer is logged once."""
        try:
            return self._ask()
        except SlurmError as e:
            if not self._silent:
                _log.warning("Slurm does not answer; going by time-outs instead: %s", e)
            self._silent = True
            return None

    def is_running(self, task: str) -> bool | None:
        """Ask squeue once."""
        return _is_running(self.view(), task)

    def cancel_pending(self) -> None:
        """Cancel with one scancel; tasks that run are left alone."""
        self._client.cancel(task_names(self._spec), pending_only=True)

    def postpone_pending(self, delay_s: float) -> None:
        """Ask squeue once, then tell the tasks that it calls pending."""
        pending = [n for n, state in self._ask().items() if state.phase is Phase.PENDING]
        if pending:
            self._client.postpone(pending, delay_s)

    def _ask(self) -> dict[str, TaskState]:
        """Ask squeue.

        Raises:
            SlurmError: it does not answer.
        """
        jobs = job_ids(self._spec)
        listed = self._client.tasks(jobs.values())
        self._silent = False
        return states_of(self._spec.task_names(jobs), listed, self._gangs(jobs))

    def _gangs(self, jobs: Mapping[int, str]) -> dict[str, GangNodes]:
        """Return what is recorded of the nodes of the run's gang."""
        if not self._spec.gang:
            return {}
        number = self._spec.tasks[0][0]
        nodes = recorded(Submission(Path(self._spec.submission)).array(number))
        return {jobs[number]: nodes} if nodes and number in jobs else {}


class LocalTasks:
    """Tasks that the local launcher runs as processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._table = Submission(Path(spec.submission)).local_tasks

    def view(self) -> Mapping[str, TaskState] | None:
        """Read the launcher's table, and see which of its processes live."""
        try:
            table = read_json(self._table)
            names = task_names(self._spec)
        except (OSError, ValueError):
            return None
        if table is None:
            return None
        return {n: TaskState(n, _state(table[n]), node=_HOST) for n in names if n in table}

    def is_running(self, task: str) -> bool | None:
        """Look the task up in the table."""
        return _is_running(self.view(), task)

    def cancel_pending(self) -> None:
        """Do nothing: the local launcher starts no task of a run that has ended."""

    def postpone_pending(self, delay_s: float) -> None:
        """Do nothing: the local launcher's queue has no times."""


def _is_running(view: Mapping[str, TaskState] | None, task: str) -> bool | None:
    if view is None:
        return None
    return task in view and view[task].phase is Phase.RUNNING


def _state(entry: Mapping[str, object]) -> str:
    """Return Slurm's word for an entry of the table; a process that is gone has ended."""
    if entry["state"] == "PENDING":
        return "PENDING"
    runs = entry["state"] == "RUNNING" and _lives(int(str(entry["pid"])))
    return "RUNNING" if runs else "COMPLETED"


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

"""What is left of a run: its tasks that run or may still start, and how to end them.

For the commands that steer a run from outside. Slurm is asked about each of the run's jobs by
itself: asked for several, it would tell of the caller's own only (`SlurmClient.tasks`), and root
may steer others' runs. Processes of ``launcher=local`` are known by pid and start time, never by
name.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import psutil

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rundir import RunSpec, Submission
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.local_tasks import LocalEntry, read_local_tasks
from hpc_elastic.slurm.states import Phase, TaskState, job_of


class Tasks(Protocol):
    """The tasks of one run."""

    def left(self) -> dict[str, TaskState]:
        """Return those that have not ended, by name; a gang is one, by its job id.

        Raises:
            SlurmError: Slurm does not answer, so nobody knows.
            RunDirectoryError: they can not be seen from this machine.
        """
        ...

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Tell tasks to end, and let them save what they have; those that wait never start.

        Raises:
            SlurmError: Slurm refuses.
            RunDirectoryError: they belong to somebody else.
        """
        ...

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """End at once what was told to end and has not; Slurm does so by itself."""
        ...


def tasks_of(spec: RunSpec) -> Tasks:
    """Return the tasks of a run."""
    return SlurmJobs(spec) if spec.launcher == "slurm" else LocalProcesses(spec)


def moved(spec: RunSpec) -> str:
    """Say that the folder is gone in which the tasks of a run are written down (pure)."""
    remedy = "if the sweep directory was moved or renamed while the run goes on, move it back"
    return f"{spec.submission} is not there any more: {remedy}"


def kill_node(spec: RunSpec, task: str) -> None:
    """Kill the processes of one node at once, without notice; its task may come back.

    Args:
        spec: The run.
        task: The node's task, by its agent's name.

    Raises:
        SlurmError: Slurm refuses, or does not answer.
        RunDirectoryError: the processes are another user's, or `require_killable`.
    """
    require_killable(task)
    if spec.launcher == "slurm":
        SlurmClient().kill_steps(task)
    else:
        LocalProcesses(spec).kill([TaskState(task, "RUNNING")])


def require_killable(task: str) -> None:
    """Refuse a node of a gang.

    Raises:
        RunDirectoryError: it cannot be killed alone.
    """
    if "." in task:
        remedy = "preempt it, which the others survive, or end the run with hpc-elastic cancel"
        raise RunDirectoryError(f"{task} is a node of a gang, which Slurm kills as one: {remedy}")


class SlurmJobs:
    """The tasks of a run that are Slurm's.

    Args:
        spec: The run.
        client: The caller of Slurm's commands.
    """

    def __init__(self, spec: RunSpec, client: SlurmClient | None = None) -> None:
        self._spec = spec
        self._client = client or SlurmClient()

    def left(self) -> dict[str, TaskState]:
        """Ask squeue once for each job; those that it has forgotten have ended."""
        jobs = replacement.all_jobs(self._spec)
        names = [place.queue_name(job) for place, ids in jobs.items() for job in ids]
        listed: dict[str, TaskState] = {}
        for job in dict.fromkeys(map(job_of, names)):
            listed |= self._client.tasks([job])
        found = {name: listed[name] for name in names if name in listed}
        return {n: state for n, state in found.items() if state.phase is not Phase.ENDED}

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Cancel them by name, with one scancel; those that are being ended already are left."""
        self._client.cancel([t.task for t in tasks if t.phase is not Phase.LEAVING])

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """Do nothing: Slurm kills after its KillWait."""


class LocalProcesses:
    """The tasks of a run that are processes of this machine."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._submission = Submission(Path(spec.submission))

    def left(self) -> dict[str, TaskState]:
        """Read the launcher's table, and see which of its processes live."""
        entries = self._entries()
        for name, entry in entries.items():
            if entry.state != "ENDED" and not entry.is_here:
                where, remedy = entry.host, f"call this command on {entry.host}"
                why = f"{name} is a process on {where}, not on this machine: {remedy}"
                raise RunDirectoryError(why)
        states = {name: entry.seen_as(name) for name, entry in entries.items()}
        return {n: state for n, state in states.items() if state.phase is not Phase.ENDED}

    def end(self, tasks: Iterable[TaskState]) -> None:
        """Send SIGTERM to each agent; the launcher starts no further task of a cancelled run."""
        for process in self._processes(tasks):
            _signal(process, signal.SIGTERM)

    def kill(self, tasks: Iterable[TaskState]) -> None:
        """Send SIGKILL to the agents and to all that they have started."""
        for process in self._processes(tasks):
            family = [process]
            with contextlib.suppress(psutil.Error):
                family += process.children(recursive=True)
            for member in family:
                _signal(member, signal.SIGKILL)

    def _entries(self) -> dict[str, LocalEntry]:
        table = read_local_tasks(self._submission)
        names = self._spec.task_names(self._submission.job_ids())
        return {name: table[name] for name in names if name in table}

    def _processes(self, tasks: Iterable[TaskState]) -> list[psutil.Process]:
        entries = self._entries()
        found = (entries[task.task].process for task in tasks if task.task in entries)
        return [process for process in found if process is not None]


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil looks once more whether the pid is still its own
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as e:
        who = f"process {process.pid} is another user's"
        raise RunDirectoryError(f"{who}: only that user, or root, can end it") from e

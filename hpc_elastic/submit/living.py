"""What is left of a run: its tasks that run or may still start, and how to end them.

For the commands that steer a run from outside. Slurm is asked about each of the run's jobs by
itself: asked for several, it would tell of the caller's own only (`SlurmClient.tasks`), and root
may steer others' runs. Processes of ``launcher=local`` are known by pid and start time, never by
name.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.rundir import RunSpec, Submission, read_json
from hpc_elastic.slurm import replacement
from hpc_elastic.slurm.client import SlurmClient
from hpc_elastic.slurm.states import Phase, TaskState, job_of
from hpc_elastic.submit.processes import same_process


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
        states = {name: _state(name, entry) for name, entry in self._entries().items()}
        return {name: state for name, state in states.items() if state is not None}

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

    def _entries(self) -> dict[str, Mapping[str, Any]]:
        try:
            table = read_json(self._submission.local_tasks) or {}
        except (OSError, ValueError) as e:
            raise RunDirectoryError(f"{self._submission.local_tasks}: not readable: {e}") from e
        names = self._spec.task_names(self._submission.job_ids())
        return {name: table[name] for name in names if name in table}

    def _processes(self, tasks: Iterable[TaskState]) -> list[psutil.Process]:
        entries = self._entries()
        found = (_process(entries[task.task]) for task in tasks if task.task in entries)
        return [process for process in found if process is not None]


def _state(name: str, entry: Mapping[str, Any]) -> TaskState | None:
    """Return the state of a task in the launcher's table; None if it has ended."""
    host = str(entry.get("host") or "")
    if entry["state"] == "ENDED":
        return None
    if host and host != socket.gethostname():
        remedy = f"call this command on {host}"
        raise RunDirectoryError(f"{name} is a process on {host}, not on this machine: {remedy}")
    if entry["state"] == "PENDING":
        waits = _alive(entry.get("launcher"), entry.get("launcher_started"))
        return TaskState(name, "PENDING") if waits else None
    return TaskState(name, "RUNNING", node=host) if _process(entry) is not None else None


def _process(entry: Mapping[str, Any]) -> psutil.Process | None:
    return _alive(entry.get("pid"), entry.get("started"))


def _alive(pid: object, made: object) -> psutil.Process | None:
    if not (isinstance(pid, int) and isinstance(made, int | float)):
        return None
    return same_process(pid, made)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)  # psutil looks once more whether the pid is still its own
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as e:
        who = f"process {process.pid} is another user's"
        raise RunDirectoryError(f"{who}: only that user, or root, can end it") from e

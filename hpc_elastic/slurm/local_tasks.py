"""The local launcher's table of its tasks, ``local-tasks.json``, which stands in for squeue.

    {task name: {"state": "PENDING|RUNNING|ENDED", "pid", "started", "exit_code",
                 "host", "launcher", "launcher_started"}}

A pid alone may be another process's by now, so each stands beside the time at which its process
was made, in clock ticks since the machine was booted (in Unix seconds it would change with the
clock): the task's, and the launcher's, without which nothing starts that is PENDING. A launcher
that was killed can not write down what became of its tasks. So whoever reads the table on their
machine looks for the processes themselves; elsewhere its word is taken.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpc_elastic.errors import RunDirectoryError
from hpc_elastic.files import read_json
from hpc_elastic.rundir import Submission
from hpc_elastic.slurm.states import TaskState

_START_TIME = 19
"""Its place in /proc/<pid>/stat, behind the name of the process; proc(5) counts it as the 22nd."""


@dataclass(frozen=True)
class LocalEntry:
    """One task, as its launcher has written it down.

    Attributes:
        state: ``PENDING``, ``RUNNING`` or ``ENDED``.
        pid: Its process; None before it starts.
        started: When that was made.
        exit_code: Of a process that has ended; None of one that never started.
        host: The machine.
        launcher: The process that starts what is PENDING.
        launcher_started: When that was made.
    """

    state: str
    pid: int | None
    started: int | None
    exit_code: int | None
    host: str
    launcher: int | None
    launcher_started: int | None

    @property
    def is_here(self) -> bool:
        """Return whether its processes are of this machine."""
        return self.host == socket.gethostname()

    @property
    def process(self) -> psutil.Process | None:
        """Return its process, if that is on this machine, and lives."""
        return same_process(self.pid, self.started) if self.is_here else None

    def seen_as(self, name: str) -> TaskState:
        """Return its state in Slurm's words."""
        if self.state == "RUNNING":
            if self.is_here and self.process is None:
                return TaskState(name, "FAILED", "killed")
            return TaskState(name, "RUNNING", node=self.host)
        if self.state == "PENDING":
            if self.is_here and same_process(self.launcher, self.launcher_started) is None:
                return TaskState(name, "CANCELLED", "its launcher has ended")
            return TaskState(name, "PENDING", "Resources")
        if self.exit_code is None:
            return TaskState(name, "CANCELLED")
        if self.exit_code == 0:
            return TaskState(name, "COMPLETED")
        return TaskState(name, "FAILED", f"exit code {self.exit_code}")


def read_local_tasks(submission: Submission) -> dict[str, LocalEntry]:
    """Return the table of a submission by task name; empty if nothing was started from it yet.

    Raises:
        RunDirectoryError: it can not be read.
    """
    try:
        table = read_json(submission.local_tasks) or {}
        return {name: LocalEntry(**entry) for name, entry in table.items()}
    except (OSError, ValueError, TypeError) as e:
        raise RunDirectoryError(f"{submission.local_tasks} can not be read: {e}") from e


def started(pid: int) -> int | None:
    """Return when the process with a pid was made, in ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])


def same_process(pid: int | None, made: int | None) -> psutil.Process | None:
    """Return a process by its pid and the time at which it was made; None if it is gone."""
    if pid is None or made is None or started(pid) != made:
        return None
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None

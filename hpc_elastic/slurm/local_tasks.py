"""The local launcher's queue, as agents and commands see it: its table, and requests to it.

The launcher is a small scheduler (`hpc_elastic.submit.local`). It writes down its tasks:

    <sweep>/.hpc_elastic/local-tasks.json
        {task name: {"state": "PENDING|RUNNING|COMPLETING|ENDED", "node", "restarts", "begin",
                     "reason", "pid", "started", "exit_code", "host", "launcher",
                     "launcher_started"}}

and carries out what agents and commands ask for, in the order of the files' names:

    <sweep>/.hpc_elastic/local-requests/<n>.json   {"do": "requeue|postpone", "task", ...}

It removes a request once the table shows what has become of it. `LocalQueue` has the methods of
`SlurmClient` that a task needs in order to go back to the queue.

A pid alone may be another process's by now, so each stands beside the time at which its process
was made, in clock ticks since the machine was booted (in Unix seconds it would change with the
clock): the task's, and the launcher's, without which nothing starts. A launcher that was killed
can not write down what became of its tasks. So a reader on the same machine looks for the
processes themselves; elsewhere the table's word is taken.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hpc_elastic.errors import LocalQueueError, RunDirectoryError
from hpc_elastic.files import is_there, read_json, write_atomic
from hpc_elastic.rundir import Submission
from hpc_elastic.slurm.states import LAUNCHER_ENDED, TaskState, job_of

_START_TIME = 19
"""Its place in /proc/<pid>/stat, behind the name of the process; proc(5) counts it as the 22nd."""
_POLL_S = 0.02
_numbers = itertools.count()


def node_name(slot: int) -> str:
    """Return the name of a run's node on this machine (pure)."""
    return f"local-{slot}"


@dataclass(frozen=True)
class LocalEntry:
    """One task, as its launcher has written it down.

    Attributes:
        state: ``PENDING``; ``RUNNING``; ``COMPLETING``: its process is to end, or has ended, and
            what it has left behind is being ended; ``ENDED``.
        pid: Its process; None while it waits.
        started: When that was made.
        exit_code: Of a process that has ended, minus the number of a signal that ended it; None of
            one that never started.
        host: The machine.
        launcher: The process that starts what is PENDING.
        launcher_started: When that was made.
        node: The name of its node.
        restarts: How often the task went back to the queue.
        begin: It does not start before this time: monotonic seconds of this machine; None: it may.
        reason: Why it waits, if not for a place.
    """

    state: str
    pid: int | None
    started: int | None
    exit_code: int | None
    host: str
    launcher: int | None
    launcher_started: int | None
    node: str = ""
    restarts: int = 0
    begin: float | None = None
    reason: str = ""

    @property
    def is_here(self) -> bool:
        """Return whether its processes are of this machine."""
        return self.host == socket.gethostname()

    @property
    def process(self) -> psutil.Process | None:
        """Return its process, if that is on this machine, and lives."""
        return same_process(self.pid, self.started) if self.is_here else None

    @property
    def is_orphaned(self) -> bool:
        """Return whether its launcher is dead: what is not running does not start any more."""
        return self.is_here and same_process(self.launcher, self.launcher_started) is None

    def seen_as(self, name: str) -> TaskState:
        """Return its state in the words of `slurm.states`."""
        orphaned = self.is_orphaned
        match self.state:
            case "ENDED":
                return self._ended(name)
            case "PENDING" if not orphaned:
                return self._waiting(name)
            case "RUNNING" | "COMPLETING" if not self.is_here or self.process is not None:
                reason = LAUNCHER_ENDED if orphaned else ""
                return TaskState(name, self.state, reason, self.node, self.restarts)
            case _ if orphaned:
                return TaskState(name, "CANCELLED", LAUNCHER_ENDED, restarts=self.restarts)
        # its launcher has yet to see that its process has ended
        return TaskState(name, "COMPLETING", node=self.node, restarts=self.restarts)

    def _ended(self, name: str) -> TaskState:
        if self.exit_code is None:
            return TaskState(name, "CANCELLED", restarts=self.restarts)
        if self.exit_code == 0:
            return TaskState(name, "COMPLETED", restarts=self.restarts)
        code = self.exit_code
        why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return TaskState(name, "FAILED", why, restarts=self.restarts)

    def _waiting(self, name: str) -> TaskState:
        in_s = None if self.begin is None or not self.is_here else self.begin - time.monotonic()
        if in_s is not None and in_s > 0:
            return TaskState(name, "PENDING", "BeginTime", restarts=self.restarts, starts_in_s=in_s)
        return TaskState(name, "PENDING", self.reason or "Resources", restarts=self.restarts)


class LocalQueue:
    """A local launcher's queue, for those who ask it for something: agents, and commands.

    Args:
        submission: The sweep's ``.hpc_elastic``.
        timeout_s: How long the launcher may take to carry out a request.
    """

    def __init__(self, submission: Submission, timeout_s: float = 10.0) -> None:
        self._submission = submission
        self._timeout_s = timeout_s

    def tasks(self, job_ids: Iterable[str], *, once: bool = False) -> dict[str, TaskState]:
        """Return all tasks of these jobs by name.

        Raises:
            LocalQueueError: the table can not be read.
        """
        wanted = set(job_ids)
        found = {n: entry for n, entry in self._entries().items() if job_of(n) in wanted}
        return {name: entry.seen_as(name) for name, entry in found.items()}

    def requeue(self, task: str) -> None:
        """Send a task back to the queue: it starts again once its process has ended.

        One that is on its way there already is no error. A process that does not end in time is
        killed.

        Raises:
            LocalQueueError: the launcher has ended, or does not answer.
        """
        entry = self._entries().get(task)
        if entry is not None:
            self._ask([{"do": "requeue", "task": task, "restarts": entry.restarts}])

    def postpone(self, tasks: Sequence[str], delay_s: float) -> None:
        """Let tasks that wait, or are on their way to the queue, not start for so long.

        It replaces what an earlier call said, longer or shorter.

        Raises:
            LocalQueueError: the launcher has ended, or does not answer.
        """
        begin = time.monotonic() + delay_s
        self._ask([{"do": "postpone", "task": task, "begin": begin} for task in tasks])

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Do nothing: the launcher starts no task of a run that has ended or is cancelled."""

    def exclude(self, tasks: Sequence[str], hosts: Iterable[str]) -> None:
        """Do nothing: the launcher looks itself which nodes a run avoids."""

    def _entries(self) -> dict[str, LocalEntry]:
        try:
            return read_local_tasks(self._submission)
        except RunDirectoryError as e:
            raise LocalQueueError(str(e)) from e

    def _ask(self, requests: Sequence[dict[str, Any]]) -> None:
        """Leave requests for the launcher, and wait until they were carried out."""
        try:
            self._submission.local_requests.mkdir(exist_ok=True)
            files = [self._leave(request) for request in requests]
        except OSError as e:
            raise LocalQueueError(f"the launcher can not be asked: {e}") from e
        deadline = time.monotonic() + self._timeout_s
        while any(map(is_there, files)):
            if any(e.is_orphaned for n, e in self._entries().items() if n == requests[0]["task"]):
                self._withdraw(files, LAUNCHER_ENDED)
            if time.monotonic() > deadline:
                self._withdraw(files, f"the launcher has not answered for {self._timeout_s:g} s")
            time.sleep(_POLL_S)

    def _leave(self, request: dict[str, Any]) -> Path:
        name = f"{time.time_ns():020}-{os.getpid()}-{next(_numbers)}.json"
        file = self._submission.local_requests / name
        write_atomic(file, json.dumps(request))
        return file

    @staticmethod
    def _withdraw(files: Iterable[Path], why: str) -> None:
        for file in files:
            file.unlink(missing_ok=True)
        raise LocalQueueError(why)


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

"""The queue of ``launcher=local``, as agents and commands see it: a table, and requests.

The launcher (`hpc_elastic.launcher.local`) is a small scheduler. It writes a table of its tasks,
and carries out the requests of agents and commands in the order of their file names:

    <sweep>/.hpc_elastic/local-tasks.json
        {task name: {"state": "PENDING|RUNNING|COMPLETING|ENDED", "node", "restarts", "begin",
                     "reason", "pid", "started", "exit_code", "host", "launcher",
                     "launcher_started"}}
    <sweep>/.hpc_elastic/local-requests/<n>.json   {"do": "requeue|postpone", "task", ...}

The launcher removes a request when the table shows the result. A pid can be reused, so the table
holds the start time of each process beside it, in clock ticks since boot: Unix seconds would change
with the clock. A process gets a signal only if its command line, too, is that of the task: it names
the array's file. A launcher that was killed cannot update the table. A reader on the same machine
therefore looks for the processes; a reader elsewhere relies on the table.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_elastic.config.parse import restored
from hpc_elastic.errors import LocalQueueError, RunDirectoryError
from hpc_elastic.run import job_of
from hpc_elastic.run.directory import Submission
from hpc_elastic.shared_files import is_there, make_folder, read_json, write_atomic
from hpc_elastic.slurm.job_state import LAUNCHER_ENDED, TaskState

if TYPE_CHECKING:
    import psutil

_request_numbers = itertools.count()
_POLL_S, _NUM_TRIES = 0.02, 50
_CANCELLED = (None, 128 + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of a task that never started, or that SIGTERM has ended."""


def node_name(slot: int) -> str:
    """Return the name of a run's node on this machine (pure)."""
    return f"local-{slot}"


@dataclass(frozen=True)
class LocalEntry:
    """One task in the launcher's table.

    The start times of processes are `start_ticks`. The exit code of a signal is minus its number,
    and None if the task never started. A task does not start before ``begin``, in monotonic seconds
    of this machine. ``reason`` is why it is pending, other than for a place.
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
        """Return whether its processes are on this machine."""
        return self.host == socket.gethostname()

    @property
    def process(self) -> psutil.Process | None:
        """Return its process; None if it has ended, or is on another machine."""
        return find_process(self.pid, self.started) if self.is_here else None

    @property
    def is_orphaned(self) -> bool:
        """Return whether its launcher has ended, so that nothing starts the task again."""
        return self.is_here and find_process(self.launcher, self.launcher_started) is None

    def to_state(self, name: str) -> TaskState:
        """Return its state in Slurm's terms."""
        code, orphaned = self.exit_code, self.is_orphaned
        state = partial(TaskState, name, restarts=self.restarts)
        match self.state:
            case "ENDED":
                if code in _CANCELLED:
                    return state("CANCELLED")
                if code == 0:
                    return state("COMPLETED")
                return state(
                    "FAILED", f"killed by signal {-code}" if code < 0 else f"exit code {code}"
                )
            case "PENDING" if not orphaned:
                in_s = 0.0
                if self.begin is not None and self.is_here:
                    in_s = self.begin - time.monotonic()
                if in_s > 0:
                    return state("PENDING", "BeginTime", starts_in_s=in_s)
                return state("PENDING", self.reason or "Resources")
            case "RUNNING" | "COMPLETING" if not self.is_here or self.process is not None:
                return state(self.state, LAUNCHER_ENDED if orphaned else "", self.node)
            case _ if orphaned:
                return state("CANCELLED", LAUNCHER_ENDED)
        # the process has ended, and its launcher has not noticed yet
        return state("COMPLETING", node=self.node)


class LocalQueue:
    """The queue of a local launcher, as agents and commands see it.

    Methods raise `LocalQueueError` if the table cannot be read, or the launcher has ended or does
    not answer.
    """

    def __init__(self, submission: Submission, timeout_s: float = 10.0) -> None:
        self._submission = submission
        self._timeout_s = timeout_s

    def tasks(self, job_ids: Iterable[str]) -> dict[str, TaskState]:
        """Return all tasks of these jobs by name; none before the first task has started."""
        wanted = set(job_ids)
        entries = self._entries().items()
        return {name: entry.to_state(name) for name, entry in entries if job_of(name) in wanted}

    def require_this_machine(self, tasks: Iterable[str]) -> None:
        """Raise RunDirectoryError if a task is a process on another machine."""
        entries = self._entries()
        for name in tasks:
            entry = entries.get(name)
            if entry is not None and entry.state != "ENDED" and not entry.is_here:
                where = f"{name} is a process on {entry.host}, not on this machine"
                raise RunDirectoryError(f"{where}: call this command on {entry.host}")

    def requeue(self, task: str) -> None:
        """Send a task back to the queue; its process is killed if it does not end in time."""
        entry = self._entries().get(task)
        if entry is not None:
            self._request([{"do": "requeue", "task": task, "restarts": entry.restarts}])

    def postpone(
        self, tasks: Sequence[str], delay_s: float, *, time_limit_s: float | None = None
    ) -> None:
        """Delay tasks that wait or are being requeued; it replaces the delay of an earlier call."""
        begin = time.monotonic() + delay_s
        self._request([{"do": "postpone", "task": task, "begin": begin} for task in tasks])

    def exclude(
        self, tasks: Sequence[str], hosts: Iterable[str], *, but: Iterable[str] = ()
    ) -> None:
        """Do nothing: the launcher reads the excluded nodes of a run itself."""

    def cancel(self, tasks: Sequence[str], *, pending_only: bool = False) -> None:
        """Send SIGTERM to agents; RunDirectoryError if one is another user's, or no agent."""
        for process in () if pending_only else self.require_agents(tasks):
            _send_signal(process, signal.SIGTERM)

    def kill(self, task: str) -> None:
        """Send SIGKILL to an agent and to its descendants; raises as `cancel`."""
        import psutil

        for process in self.require_agents([task]):
            family = [process]
            with contextlib.suppress(psutil.Error):
                family += process.children(recursive=True)
            for member in family:
                _send_signal(member, signal.SIGKILL)

    def _entries(self) -> dict[str, LocalEntry]:
        table = self._submission.local_tasks
        try:
            entries = (read_json(table) or {}).items()
            return {name: restored(LocalEntry, entry) for name, entry in entries}
        except (OSError, KeyError, TypeError, ValueError) as e:
            raise LocalQueueError(f"{table} cannot be read: {e}") from e

    def require_agents(self, tasks: Iterable[str]) -> list[psutil.Process]:
        """Return the processes of tasks here; RunDirectoryError if one is none of our agents."""
        entries = self._entries()
        found = [(task, entries[task].process) for task in tasks if task in entries]
        agents = [(task, process) for task, process in found if process is not None]
        if not agents:
            return []
        arrays = {job: number for number, job in self._submission.job_ids().items()}
        for task, process in agents:
            number = arrays.get(job_of(task))
            file = None if number is None else str(self._submission.array(number).tasks)
            argv = _command_line(process)
            if file not in argv and entries[task].process is not None:
                what = f"names process {process.pid} as task {task}, but it is `{' '.join(argv)}`"
                why = f"{self._submission.local_tasks} {what}"
                remedy = "nothing was ended; end the processes of the run by their pids"
                raise RunDirectoryError(f"{why}: {remedy}")
        return [process for _, process in agents]  # a signal to one that has ended does nothing

    def _request(self, requests: Sequence[dict[str, Any]]) -> None:
        """Write requests, and wait until the launcher has carried them out."""
        folder = self._submission.local_requests
        files: list[Path] = []
        try:
            make_folder(folder)
            for request in requests:
                number = f"{time.time_ns():020}-{os.getpid()}-{next(_request_numbers)}"
                files.append(folder / f"{number}.json")
                write_atomic(files[-1], json.dumps(request))
        except OSError as e:
            raise LocalQueueError(f"no request to the launcher can be written: {e}") from e
        deadline = time.monotonic() + self._timeout_s
        while any(map(is_there, files)):
            entry = self._entries().get(str(requests[0]["task"]))
            is_orphaned = entry is not None and entry.is_orphaned
            if is_orphaned or time.monotonic() > deadline:
                for file in files:
                    file.unlink(missing_ok=True)
                silent = f"the launcher has not answered for {self._timeout_s:g} s"
                raise LocalQueueError(LAUNCHER_ENDED if is_orphaned else silent)
            time.sleep(_POLL_S)


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # field 22 of proc(5), 19 after the name


def find_process(pid: int | None, started: int | None) -> psutil.Process | None:
    """Return the process with this pid and start time; None if it has ended."""
    if pid is None or started is None or start_ticks(pid) != started:
        return None
    import psutil  # agents in Slurm do without

    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def _command_line(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended, and for a moment at its start."""
    import psutil

    for _ in range(_NUM_TRIES):
        with contextlib.suppress(psutil.Error):
            if argv := process.cmdline():
                return argv
        if find_process(process.pid, start_ticks(process.pid)) is None:
            break
        time.sleep(_POLL_S)
    return []


def _send_signal(process: psutil.Process, number: signal.Signals) -> None:
    import psutil

    try:
        process.send_signal(number)  # psutil checks the start time again
    except psutil.NoSuchProcess:
        pass
    except psutil.AccessDenied as e:
        whose = f"process {process.pid} belongs to another user"
        raise RunDirectoryError(f"{whose}: only that user, or root, can end it") from e

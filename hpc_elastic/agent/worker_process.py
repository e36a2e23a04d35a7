"""The processes of workers: their files, how they have failed, and what they leave behind.

torch's agent ends its workers, not their children: data loaders, and others that they started.
Those of a killed worker live on, and hold GPU memory and files. Every worker has a session of its
own. So a process descends from a worker if it descends from this agent and has another session,
even if it has created yet another one. The agent adopts processes whose parent has died
(`signals.adopt_orphans`): with process 1 as parent they could not be identified.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hpc_elastic.agent.signals import KILL_WAIT_S, name_of
from hpc_elastic.agent.warm_workers import WarmWorkerPool
from hpc_elastic.rendezvous.log_entry import Failure
from hpc_elastic.shared_files import parse_json, read_tail, read_text
from hpc_elastic.transport.auth import MAX_FRAME_BYTES
from hpc_elastic.worker.shared_page import WorkerStatus

_log = logging.getLogger(__name__)

_MAX_REPORTED = 8
_MAX_MESSAGE = 2_000
_MAX_TRACEBACK = 10_000
_MAX_BYTES = MAX_FRAME_BYTES - (64 << 10)
"""Of a report, with escaped characters; that of one failure is less."""

_REMEDY = (
    "A run succeeds once its function has returned on every rank: return from the function instead "
    "of calling sys.exit() or os._exit(). A script that handles SIGTERM itself may set a flag and "
    "save; the node's agent ends the process."
)
_REMEDY_OF_SIGNAL = {
    "SIGXCPU": "The limit of CPU time was reached (`ulimit -t`): Slurm hands on that of the shell "
    "that submits, or limits.conf of the node sets it; `hpc-elastic doctor --probe` shows it."
}
_POLL_S = 0.005
_SCANS = 2  # consecutive scans without a result: a scan misses processes that are adopted meanwhile


@dataclass(frozen=True)
class NodeIdentity:
    """Where an agent's workers run."""

    task: str
    host: str
    logs: Path


@dataclass(frozen=True)
class WorkerFiles:
    """The files of one worker in one round."""

    place: NodeIdentity
    round: int
    rank: int
    local_rank: int

    @property
    def out(self) -> Path:
        """Its standard output."""
        return self._file("out")

    @property
    def err(self) -> Path:
        """Its standard error."""
        return self._file("err")

    @property
    def error(self) -> Path:
        """What it wrote of its own failure."""
        return self._file("error.json")

    @property
    def stack(self) -> Path:
        """Its stacks, whenever its group was looked into."""
        return self._file("stack.txt")

    def _file(self, suffix: str) -> Path:
        return self.place.logs / f"round-{self.round}.rank-{self.rank}.{suffix}"


class WorkerProcess:
    """The process of a worker, which may have been a warm worker."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        files: WorkerFiles,
        warm_workers: WarmWorkerPool,
    ) -> None:
        self.local_rank = files.local_rank
        self._end_requested = False
        with files.out.open("wb") as out, files.err.open("wb") as err:
            outputs = [out.fileno(), err.fileno()]
            warm = warm_workers.take_worker(self.local_rank, command, env, outputs)
            self.proc = warm or subprocess.Popen(
                command, env=env, stdout=out, stderr=err, start_new_session=True
            )

    def send_signal(self, number: signal.Signals) -> None:
        """Send the worker, and its process group, a signal that is to end it."""
        if self.proc.poll() is None:
            self._end_requested = True
            with suppress(ProcessLookupError):  # it has ended since, as its peers have
                os.killpg(self.proc.pid, number)

    def has_ended(self, deadline: float) -> bool:
        """Return whether the process ends until a time (monotonic)."""
        with suppress(subprocess.TimeoutExpired):
            self.proc.wait(max(0.0, deadline - time.monotonic()))
        return self.proc.poll() is not None

    @property
    def own_exit_code(self) -> int | None:
        """The exit code of a worker that has ended by itself; None if it has not."""
        return None if self._end_requested else self.proc.poll()


def earliest(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures of one node that its report has room for, the oldest first."""
    found = sorted(failures, key=lambda failure: failure.time)[:_MAX_REPORTED]
    while len(json.dumps([asdict(failure) for failure in found])) > _MAX_BYTES:
        found.pop()
    return found


def recorded_exit_code(files: WorkerFiles) -> int | None:
    """Return the exit code of a worker that has written down its failure; None if it has not.

    Its process may live on for a while: threads are waited for, and exit handlers run.
    """
    code = _worker_report(files.error).get("exit_code")
    return code if isinstance(code, int) else None


def describe(exit_code: int, files: WorkerFiles, progress: WorkerStatus | None = None) -> Failure:
    """Describe how a worker has failed; a negative exit code is the signal that has ended it."""
    told, now = _worker_report(files.error), time.time()
    died_of = name_of(-exit_code) if exit_code < 0 else None
    how = f"ended by {died_of}" if died_of else _how_it_exited(exit_code, told, progress)
    return Failure(
        task=files.place.task,
        host=files.place.host,
        rank=files.rank,
        local_rank=files.local_rank,
        time=min(now, float(told.get("time", now))),
        message=str(told.get("message", how))[:_MAX_MESSAGE],
        exception=told.get("exception") and str(told["exception"])[:_MAX_MESSAGE],
        traceback=str(told.get("traceback") or read_tail(files.err))[-_MAX_TRACEBACK:] or None,
        exit_code=None if died_of else exit_code,
        signal=died_of,
        phase=told.get("phase", "run"),
        log=str(files.err),
        remedy=_REMEDY if exit_code == 0 else _REMEDY_OF_SIGNAL.get(died_of or ""),
        round=files.round,
    )


def _how_it_exited(code: int, told: Mapping[str, Any], progress: WorkerStatus | None) -> str:
    step = progress.step if progress is not None else None
    at = "" if step is None else f" at step {step}"
    if told.get("phase") == "import":
        when = "while its script was imported"
    else:
        when = "before its function returned"
    handled = f", while it handled {told['while_handling']}" if told.get("while_handling") else ""
    return f"exited with code {code}{at} {when}{handled}"


def _worker_report(error_file: Path) -> dict[str, Any]:
    """Return what the worker itself wrote of its failure; nothing if it had no chance to."""
    try:
        told = parse_json(read_text(error_file), error_file)["hpc_elastic"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return told if isinstance(told, dict) else {}


def kill_strays(keep: Collection[int] = ()) -> int:
    """Kill all descendants but ``keep`` (warm workers) and theirs; return how many were killed."""
    killed: list[psutil.Process] = []
    num_idle = 0
    while num_idle < _SCANS:  # they may start others meanwhile
        found = [p for p in _find_strays(keep) if p not in killed]
        num_idle = 0 if found else num_idle + 1
        for process in found:
            with suppress(psutil.Error):  # ended, or another user's (sudo)
                process.kill()  # checks that it is still the same process
        killed += found
    if killed:
        names = set()
        for process in killed:
            with suppress(psutil.Error):
                names.add(str(process.name()))
        _log.info(
            "killed %d processes that workers had left behind: %s", len(killed), sorted(names)
        )
    deadline, alive = time.monotonic() + KILL_WAIT_S, killed
    while alive := [p for p in alive if not _has_exited(p)]:
        if time.monotonic() > deadline:
            _log.error("processes that cannot be killed: %s", [p.pid for p in alive])
            break
        time.sleep(_POLL_S)
    return len(killed)


def reap_orphans(keep: Collection[int]) -> None:
    """Reap adopted processes that have ended; called regularly (the thread of the workers).

    Those in the agent's session are left: another thread waits for its own commands, and what a
    site's wrapper has started looks the same. Others wait for the processes in ``keep``: workers
    and warm workers.
    """
    # another thread waits for the agent's own commands: they may be reaped at any moment
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    states, children = _processes()
    for pid in children.get(os.getpid(), ()):
        letter, session = states[pid]
        if letter == b"Z" and pid not in keep and session != os.getsid(0):
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _processes() -> tuple[dict[int, tuple[bytes, int]], dict[int, list[int]]]:
    """Return state letter and session of all other processes, and the children of each.

    psutil finds no children at all if other users' processes are hidden (proc(5), hidepid=1).
    """
    states: dict[int, tuple[bytes, int]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - by the thousand
        if name.isdigit() and int(name) != os.getpid():
            with (
                suppress(OSError, ValueError),  # gone, or another user's
                open(f"/proc/{name}/stat", "rb") as f,  # noqa: PTH123
            ):
                letter, parent, _, session, *_ = f.read().rpartition(b")")[2].split()
                states[int(name)] = letter, int(session)
                children.setdefault(int(parent), []).append(int(name))
    return states, children


def _find_strays(keep: Collection[int]) -> list[psutil.Process]:
    (states, children), own_session = _processes(), os.getsid(0)
    strays = [
        pid
        for pid in children.get(os.getpid(), ())
        if pid not in keep and states[pid][1] != own_session
    ]
    for pid in strays:  # grows meanwhile
        strays += children.get(pid, ())
    found: list[psutil.Process] = []
    for pid in strays:
        if states[pid][0] not in (b"Z", b"X"):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def _has_exited(process: psutil.Process) -> bool:
    with suppress(ChildProcessError):  # psutil does not wait for one just adopted
        os.waitpid(process.pid, os.WNOHANG)
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:  # it belongs to another user now
        return False

"""Ending processes that this process started: politely, then surely."""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil


def end_processes(processes: Sequence[subprocess.Popen[bytes]], stop_after_s: float) -> None:
    """End processes and all their descendants.

    SIGTERM first, so that agents can stop their workers; after ``stop_after_s`` seconds, or at
    once on a second Ctrl-C, SIGKILL for whatever is left.
    """
    if not processes:
        return
    for process in processes:
        process.terminate()
    family = [member for process in processes for member in _family(process.pid)]
    with contextlib.suppress(KeyboardInterrupt):
        wait_all(processes, stop_after_s)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a pid that was reused
            member.kill()
    for process in processes:
        process.wait()


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let one process of this machine at a time change a file that several change.

    Raises:
        OSError: the lock can not be made.
    """
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def wait_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for processes to end, at most so long over all."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def kill_family(pid: int) -> None:
    """Kill a process and all its descendants at once."""
    for member in _family(pid):
        with contextlib.suppress(psutil.Error):
            member.kill()


def kill_leftovers(marks: Mapping[str, str]) -> int:
    """Kill the processes that were started with these variables; return how many there were.

    For what an agent that was killed has left behind: it is nobody's descendant any more.

    Args:
        marks: Variables with their values; all have to be there.
    """
    wanted = {f"{name}={value}".encode() for name, value in marks.items()}
    num = 0
    for process in psutil.process_iter():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            if wanted <= set(environ.split(b"\0")) and process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                num += 1
        except (OSError, psutil.Error):  # another user's, or gone
            continue
    return num


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextlib.contextmanager
def terminated_as_interrupt(*others: signal.Signals) -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that one path ends what was started.

    Without it SIGTERM ends Python at once, and its child processes would go on alone.

    Args:
        others: What does the same, such as the SIGHUP of a lost terminal.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # whoever has it decides
        yield
        return
    before = {n: signal.signal(n, interrupt) for n in (signal.SIGTERM, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

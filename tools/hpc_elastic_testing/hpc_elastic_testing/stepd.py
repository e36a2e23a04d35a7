"""The parent of one task of a step, like Slurm's stepd: ``stepd.py LIFELINE_FD COMMAND...``.

It becomes the parent of every descendant whose own parent dies, so no process can leave the task.
When the task ends, or the controller does (the other end of the lifeline is closed), it kills all
its descendants. It ends as the task did: with the exit code, or by the signal.

Standard library only: it runs without site-packages, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main() -> None:
    """Run the command; does not return."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = os.fork()
    if pid == 0:
        _exec_command(command, lifeline)
    status = _wait_for_task(pid, lifeline, read)
    _kill_all()
    _end_as(status)


def _exec_command(command: list[str], lifeline: int) -> None:
    os.close(lifeline)
    signal.set_wakeup_fd(-1)
    os.setsid()
    for number in (*_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.environ["SLURM_TASK_PID"] = str(os.getpid())
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(
            f"slurmstepd: error: execve(): {command[0]}: {e.strerror}", file=sys.stderr, flush=True
        )
        os._exit(13 if isinstance(e, PermissionError) else 2)


def _wait_for_task(pid: int, lifeline: int, read: int) -> int | None:
    """Return the wait status of the task; None if the controller has ended."""
    while True:
        ready, _, _ = select.select([lifeline, read], [], [])
        if read in ready:
            os.read(read, 4096)
        ended = dict(_reap())
        if pid in ended:
            return ended[pid]
        if lifeline in ready and not os.read(lifeline, 1):
            return None


def _reap() -> list[tuple[int, int]]:
    """Reap all children that have ended; return their pids and wait statuses."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def _kill_all() -> None:
    """Kill all descendants of this process, until there are none."""
    while found := _descendants():
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
        _reap()


def _descendants() -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                stat = (entry / "stat").read_bytes()
                parent = int(stat.rpartition(b")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    ahead = [os.getpid()]
    while ahead:
        children = parents.get(ahead.pop(), [])
        found += children
        ahead += children
    return found


def _end_as(status: int | None) -> None:
    """End with the exit code or the signal of the task."""
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    main()

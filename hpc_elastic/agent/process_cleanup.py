"""Ends what workers leave behind: data loaders, and whatever else they have started.

torch's agent ends its workers, not their children; those of a worker that is killed live on, and
hold GPU memory and files. Every worker is started in a session of its own, so a process descends
from a worker if it descends from this agent and is in another session than it, also where it has
put itself into yet another one. One whose parent has died is adopted by the agent (`adopt`), in
place of process 1, where it could not be told from others.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import psutil

_log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_WAIT_S = 5.0
"""One that hangs in the kernel is left behind after that."""
_POLL_S = 0.005
_LOOKS = 2
"""That find nothing: a look takes time, and misses what is adopted meanwhile."""
_DEAD = ("Z", "X")


class _Stat(NamedTuple):
    """What Linux tells of a process (proc(5), stat)."""

    letter: str
    parent: int
    session: int


def adopt() -> None:
    """Become the parent of descendants whose own parent dies (agent, before its first worker)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(keep: Collection[int] = ()) -> int:
    """Kill everything that workers have started, and the workers.

    Args:
        keep: Ids of processes that stay, with all that descends from them: spares.

    Returns:
        How many there were.
    """
    killed: list[psutil.Process] = []
    num_idle = 0
    while num_idle < _LOOKS:  # one may start another meanwhile
        found = [p for p in _strays(keep) if p not in killed]
        num_idle = 0 if found else num_idle + 1
        for process in found:
            with contextlib.suppress(psutil.Error):  # gone, or another user's (sudo)
                process.kill()  # looks whether it is still the same process
        killed += found
    if killed:
        names = sorted({_name(process) for process in killed})
        _log.info("%d processes that workers had left behind were ended: %s", len(killed), names)
    if alive := _wait_for(killed):
        _log.error("processes that can not be ended: %s", [p.pid for p in alive])
    return len(killed)


def reap(keep: Collection[int]) -> None:
    """Let an adopted process that has ended go; called now and then (the thread of the workers).

    Args:
        keep: Ids of processes that somebody else waits for: workers and spares.
    """
    # a command of this agent's own is waited for by another thread: it may be gone at any moment
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid in keep:
            return
        if os.getsid(ended.si_pid) != os.getsid(0):
            os.waitpid(ended.si_pid, 0)


def _strays(keep: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in _descendants(_look(), os.getpid(), os.getsid(0), keep):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _look() -> dict[int, _Stat]:
    """Return every process that may be looked at.

    psutil finds no children at all where others' processes may not be (proc(5), hidepid=1).
    """
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - by the thousand
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError):  # gone, or another user's
                letter, parent, _, session, *_ = _read_stat(name).rpartition(b")")[2].split()
                found[int(name)] = _Stat(letter.decode(), int(parent), int(session))
    return found


def _read_stat(pid: str) -> bytes:
    with open(f"/proc/{pid}/stat", "rb") as f:  # noqa: PTH123
        return f.read()


def _descendants(
    processes: Mapping[int, _Stat], agent: int, session: int, keep: Collection[int]
) -> list[int]:
    """Return what descends from workers, and lives (pure)."""
    children: dict[int, list[int]] = {}
    for pid, stat in processes.items():
        if pid != agent:
            children.setdefault(stat.parent, []).append(pid)
    strays = [
        pid for pid in children.get(agent, ())
        if pid not in keep and processes[pid].session != session
    ]  # fmt: skip
    for pid in strays:  # grows meanwhile
        strays += children.get(pid, ())
    return [pid for pid in strays if processes[pid].letter not in _DEAD]


def _wait_for(killed: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Wait until they are gone, for a while, and return those that are not.

    psutil would wait in vain for a process that becomes this one's child only now.
    """
    deadline = time.monotonic() + _WAIT_S
    while alive := [p for p in killed if not _is_gone(p)]:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    return alive


def _is_gone(process: psutil.Process) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return not _lives(process)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it has become another user's
        return True


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"

"""Cleanup of the processes that workers leave behind: data loaders, and others that they started.

torch's agent ends its workers, not their children. Those of a killed worker live on, and hold GPU
memory and files. Every worker has a session of its own. So a process descends from a worker if it
descends from this agent and has another session, even if it has created yet another one. The agent
adopts processes whose parent has died (`adopt_orphans`): with process 1 as parent they could not be
identified.
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
"""Longest wait; a process that hangs in the kernel is left behind."""
_POLL_S = 0.005
_SCANS = 2
"""Consecutive scans without a result: a scan misses processes that are adopted meanwhile."""
_DEAD = ("Z", "X")


class _Stat(NamedTuple):
    """The state of a process (proc(5), stat)."""

    letter: str
    parent: int
    session: int


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (agent, before its first worker)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_strays(keep: Collection[int] = ()) -> int:
    """Kill the workers and all their descendants.

    Args:
        keep: Ids of processes that stay, with their descendants: warm workers.

    Returns:
        The number of killed processes.
    """
    killed: list[psutil.Process] = []
    num_idle = 0
    while num_idle < _SCANS:  # they may start others meanwhile
        found = [p for p in _strays(keep) if p not in killed]
        num_idle = 0 if found else num_idle + 1
        for process in found:
            with contextlib.suppress(psutil.Error):  # ended, or another user's (sudo)
                process.kill()  # checks that it is still the same process
        killed += found
    if killed:
        names = sorted({_name(process) for process in killed})
        _log.info("killed %d processes that workers had left behind: %s", len(killed), names)
    if alive := _wait_for(killed):
        _log.error("processes that cannot be killed: %s", [p.pid for p in alive])
    return len(killed)


def reap_orphan(keep: Collection[int]) -> None:
    """Reap an adopted process that has ended; called regularly (the thread of the workers).

    Args:
        keep: Ids of processes that others wait for: workers and warm workers.
    """
    # another thread waits for the agent's own commands: they may be reaped at any moment
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid in keep:
            return
        if os.getsid(ended.si_pid) != os.getsid(0):
            os.waitpid(ended.si_pid, 0)


def _strays(keep: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in _descendants(_read_processes(), os.getpid(), os.getsid(0), keep):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _read_processes() -> dict[int, _Stat]:
    """Return every visible process.

    psutil finds no children at all if other users' processes are hidden (proc(5), hidepid=1).
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
    """Return the living descendants of workers (pure)."""
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
    """Wait for the end of killed processes; return those that are left after `_WAIT_S`.

    psutil cannot wait for a process that becomes this one's child only now.
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
    return not _is_alive(process)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # it belongs to another user now
        return True


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "?"

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
from collections.abc import Collection

import psutil

_log = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_WAIT_S = 5.0
"""Longest wait; a process that hangs in the kernel is left behind."""
_POLL_S = 0.005
_SCANS = 2
"""Consecutive scans without a result: a scan misses processes that are adopted meanwhile."""


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (agent, before its first worker)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_strays(keep: Collection[int] = ()) -> int:
    """Kill all descendants but ``keep`` (warm workers) and theirs; return how many were killed."""
    killed: list[psutil.Process] = []
    num_idle = 0
    while num_idle < _SCANS:  # they may start others meanwhile
        found = [p for p in _find_strays(keep) if p not in killed]
        num_idle = 0 if found else num_idle + 1
        for process in found:
            with contextlib.suppress(psutil.Error):  # ended, or another user's (sudo)
                process.kill()  # checks that it is still the same process
        killed += found
    if killed:
        names = set()
        for process in killed:
            with contextlib.suppress(psutil.Error):
                names.add(str(process.name()))
        _log.info(
            "killed %d processes that workers had left behind: %s", len(killed), sorted(names)
        )
    deadline, alive = time.monotonic() + _WAIT_S, killed
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
    with contextlib.suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    states, children = _processes()
    for pid in children.get(os.getpid(), ()):
        letter, session = states[pid]
        if letter == b"Z" and pid not in keep and session != os.getsid(0):
            with contextlib.suppress(ChildProcessError):
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
                contextlib.suppress(OSError, ValueError),  # gone, or another user's
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
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def _has_exited(process: psutil.Process) -> bool:
    with contextlib.suppress(ChildProcessError):  # psutil does not wait for one just adopted
        os.waitpid(process.pid, os.WNOHANG)
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:  # it belongs to another user now
        return False

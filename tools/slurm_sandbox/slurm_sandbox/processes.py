"""Processes that are told apart for good: a pid and the moment that its process began.

A pid alone is recycled, and a state file outlives processes, so nothing here signals a pid without
first checking its start time, on a pid file descriptor that keeps the check true.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.02
_START_FIELD = 19  # field 22 of proc(5)'s stat, counted after the command in parentheses


@dataclass(frozen=True)
class Process:
    """One process, even after its pid has been given to another.

    Attributes:
        pid: Its pid as this process sees it.
        start_ticks: Clock ticks from boot to its start.
    """

    pid: int
    start_ticks: int


def identify(pid: int) -> Process | None:
    """Return the process that has this pid now, or None if there is none."""
    stat = _read_stat(pid)
    return None if stat is None else Process(pid, stat[1])


def state_of(process: Process) -> str:
    """Return its state letter of proc(5) (``R``, ``S``, ``T``, ...), or ``""`` once it is gone.

    A zombie counts as gone; it is reaped if it is a child of ours.
    """
    stat = _read_stat(process.pid)
    if stat is None or stat[1] != process.start_ticks:
        return ""
    if stat[0] in "ZX":
        _reap(process.pid)
        return ""
    return stat[0]


def is_alive(process: Process) -> bool:
    """Tell whether the process still exists."""
    return state_of(process) != ""


def send(process: Process, number: signal.Signals) -> bool:
    """Signal the process; False, and nothing sent, if it is gone or its pid is another's."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def end(process: Process, grace_s: float = 0.0, timeout_s: float = 10.0) -> bool:
    """End the process and wait until it is gone.

    Args:
        process: Which one; nothing happens to another process that has got its pid.
        grace_s: Seconds that it has after SIGTERM; 0 goes straight to SIGKILL.
        timeout_s: Seconds to wait after SIGKILL.

    Returns:
        Whether it is gone.
    """
    if grace_s > 0 and send(process, signal.SIGTERM) and _wait_gone(process, grace_s):
        return True
    send(process, signal.SIGKILL)
    return _wait_gone(process, timeout_s)


def only_child(process: Process) -> Process | None:
    """Return the first child of the process, or None if it has none (yet)."""
    try:
        children = (_PROC / f"{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return None
    return identify(int(children[0])) if children else None


def members(init: Process) -> Iterator[Process]:
    """Yield all processes of the pid namespace whose first process is `init`."""
    namespace = _pid_namespace(init.pid)
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and namespace and _pid_namespace(int(entry.name)) == namespace:
            process = identify(int(entry.name))
            if process is not None:
                yield process


def stop_tree(init: Process, timeout_s: float = 20.0) -> bool:
    """Stop every process of init's namespace, those forked meanwhile included.

    One that waits for a file server that does not answer (``D``) stands still once it has been
    signalled: it runs no further than to the end of its system call.

    Returns:
        Whether all stand still.
    """
    deadline = time.monotonic() + timeout_s
    signalled: set[Process] = set()
    while time.monotonic() < deadline:
        states = {process: state_of(process) for process in members(init)}
        running = [
            process
            for process, state in states.items()
            if state not in ("", "T", "t") and not (state == "D" and process in signalled)
        ]
        if not running:
            return True
        for process in running:
            send(process, signal.SIGSTOP)
        signalled.update(running)
        time.sleep(_POLL_S)
    return False


def continue_tree(init: Process) -> None:
    """Let every process of init's namespace run again."""
    for process in list(members(init)):
        send(process, signal.SIGCONT)


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a pid, or None if no process has it."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 1 :].split()
    return fields[0], int(fields[_START_FIELD])


def _pid_namespace(pid: int) -> str:
    try:
        return str((_PROC / str(pid) / "ns/pid").readlink())
    except OSError:
        return ""


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _wait_gone(process: Process, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True

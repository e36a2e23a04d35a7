"""The processes of the tasks: started, signalled and killed with all that descends from them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

MARKER = "HPC_ELASTIC_FAKE_SLURM"
"""Names the cluster's directory in the environment of every process of its jobs."""

_STEPD = Path(__file__).with_name("stepd.py")
_KILL_S = 5.0
"""What hangs in the kernel is left alone after that."""


class Process:
    """One task: its stepd, and all that descends from it."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        self._popen, self._lifeline = popen, lifeline
        self.pid = popen.pid

    def poll(self) -> int | None:
        """Return its exit code, minus the signal if one ended it; None: it runs."""
        code = self._popen.poll()
        if code is not None:
            self._close()
        return code

    def signal(self, number: int, *, only_first: bool = False) -> None:
        """Send a signal to every process of the task, or to the one that was started only."""
        for process in self._children(recursive=not only_first):
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all of it, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._close()  # the stepd ends what has begun meanwhile, and itself
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_KILL_S)

    def _children(self, *, recursive: bool) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.pid).children(recursive=recursive)
        except psutil.Error:
            return []
        return [p for p in found if _lives(p)]

    def _close(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    output: int | IO[bytes],
    error: int | IO[bytes],
) -> Process:
    """Start a task under a stepd of its own.

    Raises:
        OSError: the directory is not there, or the machine has no process left.
    """
    theirs, ours = os.pipe()
    argv = [sys.executable, "-I", "-S", str(_STEPD), str(theirs), *command]
    try:
        popen = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=error,
            pass_fds=(theirs,), start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return Process(popen, ours)


def kill_descendants() -> None:
    """Kill everything that descends from this process (the controller, at its end)."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        found = [p for p in psutil.Process().children(recursive=True) if _lives(p)]
        if not found:
            return
        _kill(found)


def kill_marked(folder: Path) -> None:
    """Kill what has a cluster's mark in its environment: whatever became of the controller."""
    mark = str(folder)
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        found = [p for p in psutil.process_iter() if _mark(p) == mark and _lives(p)]
        if not found:
            return
        _kill(found)


def _kill(found: Iterable[psutil.Process]) -> None:
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    time.sleep(0.005)


def _mark(process: psutil.Process) -> str | None:
    try:
        return str(process.environ().get(MARKER))
    except (psutil.Error, OSError):
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False

"""The stacks of a worker's threads, taken from outside, whatever the worker is doing.

``py-spy`` is used where it is installed and may look. Else the worker itself writes its stacks: at
its start it registers faulthandler on `ASK`, a signal that nothing else uses.
The handler is C: it runs also while a thread holds the interpreter lock in a call that never
returns, but not in a process that is stopped (SIGSTOP). The stacks go to a file in the node's
memory; a worker that has not registered yet is not asked, since the signal would end it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpc_elastic import _util

ASK = signal.SIGRTMAX - 9
"""Real-time signals have no meaning of their own; glibc uses the first two, below SIGRTMIN."""
_SETTLED_S = 0.05
_WRITTEN_WITHIN_S = 2.0
_PY_SPY_WITHIN_S = 5.0


def stacks_file(control: Path, local_rank: int) -> Path:
    """Return where a worker writes its stacks; in the node's memory."""
    return control / f"worker-{local_rank}.stack"


def offer(control: Path, local_rank: int) -> None:
    """Write this process's stacks whenever its agent asks (worker, once it knows its rank)."""
    file = stacks_file(control, local_rank).open("a")  # open for good: the handler writes to it
    faulthandler.register(ASK, file=file, all_threads=True, chain=False)


def take(pid: int, file: Path) -> str | None:
    """Return the stacks of a worker's threads; None if they can not be had (agent).

    Args:
        pid: The worker.
        file: Where it writes them.
    """
    return _by_py_spy(pid) or _by_faulthandler(pid, file)


def process_state(pid: int) -> str | None:
    """Return Linux's letter for what a process does, as in ps(1); None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def has_gpu(pid: int) -> bool:
    """Tell whether a process has an NVIDIA or AMD GPU open."""
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith(("/dev/nvidia", "/dev/kfd")):
                    return True
    return False


def _by_py_spy(pid: int) -> str | None:
    beside = str(Path(sys.executable).with_name("py-spy"))
    command = shutil.which("py-spy") or shutil.which(beside)
    if command is None:
        return None
    try:
        dump = [command, "dump", "--full-filenames", "--pid", str(pid)]
        done = _util.run(dump, timeout_s=_PY_SPY_WITHIN_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and "Thread" in done.stdout else None


def _by_faulthandler(pid: int, file: Path) -> str | None:
    if not _listens(pid):
        return None
    try:
        os.truncate(file, 0)
        os.kill(pid, ASK)
    except OSError:
        return None
    return _settled(file)


def _listens(pid: int) -> bool:
    """Tell whether a process has a handler for `ASK` (proc(5), SigCgt)."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (ASK - 1) & 1)
    return False


def _settled(file: Path) -> str | None:
    """Wait until the file is written, and grows no more."""
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    size = -1
    while time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        before, size = size, file.stat().st_size
        if size == before and size > 0:
            break
    text = file.read_text(errors="replace")
    return text or None

"""The signals that announce that a node will be taken: caught by its agent, withstood by others.

Every byte of the pipe is one signal. Python writes it from the C handler itself, at once, even
while the main thread is inside C code: nothing else happens in a handler. Imports hardly anything,
for it comes before everything else: a SIGTERM that is not caught ends the task for good.

A worker stays at work while its node is under notice. Slurm may send the signals to every process
of a task: with proctrack/linuxproc it does, and so do `scancel --full` and a signal to a process
group. They are handled by a function of Python: it outlives a call into C++, is not handed on to
programs that are started (SIG_IGN would be), and a script may set its own.

A worker's data loaders withstand them as well, however they are started: torch ends its loaders on
a SIGTERM whose sender is not the worker. What each of them calls first, a private name, is
replaced; and so is their main function, by one that a process started by "spawn" or "forkserver"
imports from here, and that does the same there (test_worker_signals fails if torch changes them).
They ignore the worker's SIGTERM as well then, which torch sends to one that has not ended in time;
`end_children` replaces it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

from hpc_elastic._util import readable

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm's own, and those that a user may choose as ``launcher.preempt_signal``."""


def name_of(number: int) -> str:
    """Return a signal's name, such as ``SIGKILL`` (pure); real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def do_nothing(_number: int, _frame: object) -> None:
    """Handle a signal in Python, so that programs that this process starts do not inherit it."""


def ignore_preemption_signals() -> None:
    """Let these signals do nothing to this process, nor to its system calls (main thread)."""
    for number in NOTICES:
        signal.signal(number, do_nothing)
        signal.siginterrupt(number, False)


def ignore_notices_here() -> None:
    """Let these signals do nothing here (main thread), but have their effect in a forked child."""
    ignore_preemption_signals()
    os.register_at_fork(after_in_child=_restore_defaults)


def _restore_defaults() -> None:
    for number in NOTICES:
        if signal.getsignal(number) is do_nothing:
            signal.signal(number, signal.SIG_DFL)


STOP = signal.SIGHUP
"""By this the agent stops workers. Its default ends a process that is stuck in a collective at
once, and leaves no core file; nothing else sends it to a process without a terminal."""
KILL_WAIT_S = 5.0  # longest wait for killed processes; one that hangs in the kernel is left behind


def set_up_worker() -> None:
    """Withstand the signals of a notice from now on (worker's main thread, at its start)."""
    importlib.import_module("multiprocessing.util")  # registers at exit what waits for children
    ignore_notices_here()
    for number in (STOP, signal.SIGQUIT):  # the parent of the program may ignore them: nohup, `&`
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(end_children)  # the last one registered runs first


def end_with_agent(agent: int) -> None:
    """Let Linux end this process with its agent, whose session it does not share; or end it now.

    The agent is its parent, 1 where a container has no other process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:  # it died before the request
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies (agent, before its first worker)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill what multiprocessing would wait for, having sent a SIGTERM that does nothing.

    torch's handler of SIGCHLD would raise here when the first is dead, and the others would live.
    """
    import multiprocessing

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            with contextlib.suppress(OSError, ValueError):
                child.kill()


class SignalError(Exception):
    """A signal ends this agent; its workers get the same one."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"it got {self.signal.name}")


def raise_signals() -> None:
    """Raise `SignalError` from now on where a signal other than a notice comes (main thread)."""

    def handle(number: int, _frame: object) -> None:
        raise SignalError(number)

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, handle)


class SignalPipe:
    """The signals that came since this was made (an agent's main thread, once)."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        ignore_preemption_signals()

    def wait(self, timeout_s: float | None) -> list[signal.Signals]:
        """Return the signals that came, after waiting for one; none if none comes (one thread)."""
        ready = readable(self._read, timeout_s=timeout_s)
        numbers = os.read(self._read, 1024) if ready else b""
        return [signal.Signals(n) for n in numbers if n in NOTICES]

    def wake(self) -> None:
        """Let `wait` return (any thread)."""
        os.write(self._write, b"\0")


_TORCHS = "torch.utils.data._utils"
"""By name: a login node imports this module, and does without torch."""
_HANDLERS, _LOOP = "_set_worker_signal_handlers", "_worker_loop"
_torchs_loop: Callable[..., None] | None = None
"""torch's main function of a loader, once it is replaced in this process or its parent."""


def keep_loaders() -> None:
    """Let data loaders withstand the signals (worker, once torch is imported)."""
    global _torchs_loop
    worker = importlib.import_module(f"{_TORCHS}.worker")
    _keep_handlers()
    _torchs_loop = getattr(worker, _LOOP)
    setattr(worker, _LOOP, loader_loop)


def keep_fork_server() -> None:
    """Let Python's fork server withstand them, too (worker, before the user's code)."""
    import multiprocessing

    multiprocessing.set_forkserver_preload(["hpc_elastic.agent.fork_server", "__main__"])


def loader_loop(*args: Any) -> None:
    """Run the process of a data loader."""
    loop = _torchs_loop
    if loop is None:  # a program of its own
        _keep_handlers()
        loop = getattr(importlib.import_module(f"{_TORCHS}.worker"), _LOOP)
    loop(*args)


def _keep_handlers() -> None:
    signal_handling = importlib.import_module(f"{_TORCHS}.signal_handling")
    theirs = getattr(signal_handling, _HANDLERS)

    def set_handlers() -> None:
        theirs()
        ignore_preemption_signals()

    setattr(signal_handling, _HANDLERS, set_handlers)

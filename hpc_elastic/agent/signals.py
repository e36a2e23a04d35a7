"""The signals that announce that a node will be taken: caught, and not acted on here.

Every byte of the pipe is one signal. Python writes it from the C handler itself, at once, even
while the main thread is inside C code (`import torch` takes seconds): nothing else happens in a
handler. Imports hardly anything, for it comes before everything else: a SIGTERM that is not caught
ends the task for good.
"""

from __future__ import annotations

import os
import signal

from hpc_elastic._util import readable

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
    """Let these signals do nothing to this process (main thread).

    Nor to a system call: C libraries rarely expect one to be interrupted.
    """
    for number in NOTICES:
        signal.signal(number, do_nothing)
        signal.siginterrupt(number, False)


def ignore_notices_here() -> None:
    """Let these signals do nothing to this process, and what they usually do to a forked child.

    Its parent may want to end it (main thread).
    """
    ignore_preemption_signals()
    os.register_at_fork(after_in_child=_restore_defaults)


def _restore_defaults() -> None:
    for number in NOTICES:
        if signal.getsignal(number) is do_nothing:
            signal.signal(number, signal.SIG_DFL)


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

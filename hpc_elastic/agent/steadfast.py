"""Keeps a worker at work while its node is under notice: signals of a notice do nothing to it.

Slurm may send them to every process of a task: with proctrack/linuxproc it does, and so do `scancel
--full` and a signal to a process group. The agent makes a notice of them, and the workers go on for
as long as it lets them. They are handled by a function of Python: it outlives a call into C++, is
not handed on to programs that are started (SIG_IGN would be), and a script may set its own.

So the agent stops workers by another signal, `STOP`. It has to end a process that is stuck in a
collective at once, hence one whose default is to end it, and leave no core file; users know what
SIGHUP means, may handle it, and nothing else sends it to a process without a terminal.

A data loader's children would die: torch lets them end on a SIGTERM whose sender is not the worker.
`torch.utils.data._utils.signal_handling._set_worker_signal_handlers`, a private name, is what each
of them calls first (test_steadfast fails if torch changes it). They ignore the worker's SIGTERM as
well then, which torch sends to one that has not ended in time; `end_children` replaces it.

Loaders that are started by "spawn" or "forkserver" are programs of their own, and die.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
from types import ModuleType

from hpc_elastic.agent import signals

STOP = signal.SIGHUP
_OF_LOADERS = "_set_worker_signal_handlers"


def stand() -> None:
    """Withstand the signals of a notice from now on (worker's main thread, at its start)."""
    signals.withstand()
    for number in (STOP, signal.SIGQUIT):  # what started all this may ignore them: nohup, `&`
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.register_at_fork(after_in_child=_as_others_do)
    # The last one registered runs first: before multiprocessing, which waits for its children.
    assert multiprocessing.util is not None
    atexit.register(end_children)


def _as_others_do() -> None:
    """Restore the defaults in a forked child: whoever forked it may want to end it."""
    for number in signals.NOTICES:
        if signal.getsignal(number) is signals.do_nothing:
            signal.signal(number, signal.SIG_DFL)


def keep_loaders(signal_handling: ModuleType) -> None:
    """Let data loaders withstand them, too (worker, once torch is imported, before its first).

    Args:
        signal_handling: ``torch.utils.data._utils.signal_handling``.
    """
    theirs = getattr(signal_handling, _OF_LOADERS)

    def set_handlers() -> None:
        theirs()
        signals.withstand()

    setattr(signal_handling, _OF_LOADERS, set_handlers)


def end_children() -> None:
    """Kill what multiprocessing would wait for, having sent a SIGTERM that does nothing.

    torch's handler of SIGCHLD would raise here when the first is dead, and the others would live.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        if child.daemon:
            with contextlib.suppress(OSError, ValueError):
                child.kill()

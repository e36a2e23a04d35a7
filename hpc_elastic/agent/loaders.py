"""Data loaders' processes withstand the signals of a notice, however they are started.

torch ends its loaders on a SIGTERM whose sender is not the worker. What each of them calls first, a
private name, is replaced; and so is their main function, by one that a process started by "spawn"
or "forkserver" imports from here, and that does the same there (test_worker_signals fails if torch
changes them). They ignore the worker's SIGTERM as well then, which torch sends to one that has not
ended in time; `worker_main.end_children` replaces it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from hpc_elastic.agent import signals

_HANDLERS, _LOOP = "_set_worker_signal_handlers", "_worker_loop"
_torchs_loop: Callable[..., None] | None = None
"""torch's main function of a loader, once it is replaced in this process or its parent."""


def keep_loaders() -> None:
    """Let data loaders withstand the signals (worker, once torch is imported)."""
    global _torchs_loop
    from torch.utils.data._utils import worker

    _keep_handlers()
    _torchs_loop = getattr(worker, _LOOP)
    setattr(worker, _LOOP, loader_loop)


def keep_fork_server() -> None:
    """Let Python's fork server withstand them, too (worker, before the user's code)."""
    multiprocessing.set_forkserver_preload(["hpc_elastic.agent.fork_server", "__main__"])


def loader_loop(*args: Any) -> None:
    """Run the process of a data loader."""
    from torch.utils.data._utils import worker

    loop = _torchs_loop
    if loop is None:  # a program of its own
        _keep_handlers()
        loop = getattr(worker, _LOOP)
    loop(*args)


def _keep_handlers() -> None:
    from torch.utils.data._utils import signal_handling

    theirs = getattr(signal_handling, _HANDLERS)

    def set_handlers() -> None:
        theirs()
        signals.ignore_preemption_signals()

    setattr(signal_handling, _HANDLERS, set_handlers)

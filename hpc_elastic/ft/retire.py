"""To end torch's groups on a thread of their own.

The destructor of a gloo group joins its threads, which takes 10 to 30 ms; run by one of those
threads (in a callback of a future) it would end the process. So the last reference is dropped by a
thread that does nothing else, and only once nobody else has one.

A thread that comes back from C++ while Python ends could crash the process, so the end waits for
them; but not for one whose group is stuck until a time-out.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any

_OTHERS_S = 10.0
_POLL_S = 0.001
_AT_EXIT_S = 0.5
_OWN_REFERENCES = 2  # the list's, and getrefcount's argument

_threads: set[threading.Thread] = set()


def retire(held: list[Any]) -> threading.Event:
    """Take a group out of the list that held it, and destroy it in the background.

    Returns:
        An event that is set when the group's threads have ended.
    """
    quiet = threading.Event()
    groups = held[:]
    held.clear()
    name = "hpc-elastic-ft-retire"
    thread = threading.Thread(target=_drop, args=(groups, quiet), name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return quiet


def _drop(groups: list[Any], quiet: threading.Event) -> None:
    until = time.monotonic() + _OTHERS_S
    while groups:
        if sys.getrefcount(groups[-1]) > _OWN_REFERENCES and time.monotonic() < until:
            time.sleep(_POLL_S)  # somebody is in the middle of an operation
        else:
            groups.pop()
    quiet.set()
    _threads.discard(threading.current_thread())


@atexit.register
def _await_all() -> None:
    until = time.monotonic() + _AT_EXIT_S
    for thread in list(_threads):
        thread.join(max(0.0, until - time.monotonic()))

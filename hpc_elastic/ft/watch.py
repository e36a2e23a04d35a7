"""A thread that looks at the deadlines of operations, and tells when one is missed.

Operations on a GPU end on their own; nobody waits for them on the CPU, and so nobody would notice
one that does not end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

_LOOK_S = 0.5


class Pending(Protocol):
    """What can be asked whether it has ended, as torch's Work."""

    def is_completed(self) -> bool:
        """Tell whether it has ended."""


class _Operation(NamedTuple):
    work: Pending
    name: str
    timeout_s: float
    until: float


class Watch:
    """Watch over the operations of one group, in the order in which they were begun."""

    def __init__(self, late: Callable[[str], None]) -> None:
        """Watch nothing yet.

        Args:
            late: Called once, on the watch's thread, with the name and the seconds of the first
                operation that missed its deadline.
        """
        self._late = late
        self._operations: deque[_Operation] = deque()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, work: Pending, name: str, timeout_s: float) -> None:
        """Watch over an operation that has just begun."""
        self._forget_completed()
        self._operations.append(_Operation(work, name, timeout_s, time.monotonic() + timeout_s))
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="hpc-elastic-ft-watch", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Forget all operations; the thread ends."""
        self._stopped.set()
        self._operations.clear()

    def _run(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self._forget_completed()
            missed = self._missed(time.monotonic())
            if missed is not None and not self._stopped.is_set():
                self._stopped.set()
                self._late(f"{missed.name} timed out after {missed.timeout_s:g} s")

    def _missed(self, now: float) -> _Operation | None:
        late = (o for o in list(self._operations) if o.until < now and not o.work.is_completed())
        return next(late, None)

    def _forget_completed(self) -> None:
        try:
            while self._operations[0].work.is_completed():
                self._operations.popleft()
        except IndexError:  # all have, or the other thread was faster
            pass

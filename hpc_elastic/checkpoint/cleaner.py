"""Removals from a directory of checkpoints, for which no save waits.

A server of NFS 4 holds a removal up for minutes where it has to recall a delegation of the file
from a node that is dead.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from hpc_elastic.checkpoint.store import Store

_log = logging.getLogger(__name__)

_GETS_ON_S = 5.0
"""A program's end waits no longer for removals if none ends in this time."""


class Cleaner:
    """Removes in a daemon thread, one thing after another."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_removed = 0

    def start_removal(self, set_aside: Callable[[], object]) -> None:
        """Begin to set things aside and to delete all that was, after what was begun before."""
        with self._lock:
            self._waiting.append(set_aside)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="checkpoint-cleaner", daemon=True)
                try:
                    thread.start()
                except RuntimeError as e:
                    _log.warning("%s: old checkpoints stay for now", e)
                    return
                self._thread = thread

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all is done, for as long as removals get on, or ``timeout_s`` at most."""
        thread, before = self._thread, -1
        if thread is not None and timeout_s is not None:
            thread.join(timeout_s)
            return
        while thread is not None and thread.is_alive() and before < self._num_removed:
            before = self._num_removed
            thread.join(_GETS_ON_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                set_aside = self._waiting.popleft()
            try:
                set_aside()
                for _ in self._store.empty_trash():
                    self._num_removed += 1
            except OSError as e:
                _log.warning("old checkpoints stay in %s for now: %s", self._store.directory, e)

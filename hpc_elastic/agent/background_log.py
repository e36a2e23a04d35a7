"""The log of an agent, written on a thread of its own.

Its file is on the shared file system. Who logs only hands over: the event loop that keeps the
heartbeats may neither wait for that file, nor for the lock of a thread that does.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from logging.handlers import QueueHandler
from queue import SimpleQueue

_JOIN_S = 2.0
"""A file system that hangs does not keep the task from its end."""
_MOST = 10_000
"""So many records wait for one that hangs; those that come then are lost."""

_Queue = SimpleQueue[logging.LogRecord | None]


class BackgroundLog:
    """Writes what the process logs, from now on (agent, once).

    Args:
        make_handlers: Makes what writes it; again in a process that is forked.
    """

    def __init__(self, make_handlers: Callable[[], Sequence[logging.Handler]]) -> None:
        self._make_handlers = make_handlers
        self._handlers = make_handlers()
        self._queue: _Queue = SimpleQueue()
        self._hands_over = _HandsOver(self._queue)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        logging.getLogger().addHandler(self._hands_over)
        os.register_at_fork(after_in_child=self._go_on_in_child)

    def close(self) -> None:
        """Write what was handed over, within `_JOIN_S`; what is logged later is written at once."""
        self._queue.put(None)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            atexit.unregister(logging.shutdown)  # it would wait for the handler that hangs
        else:
            self._replace_by(self._handlers)

    def _write(self) -> None:
        while (record := self._queue.get()) is not None:
            for handler in self._handlers:
                if record.levelno >= handler.level:
                    _handle(handler, record)

    def _go_on_in_child(self) -> None:
        """The thread is not there, and may have held a lock of what it wrote to."""
        if self._hands_over in logging.getLogger().handlers:
            self._replace_by(self._make_handlers())

    def _replace_by(self, handlers: Sequence[logging.Handler]) -> None:
        root = logging.getLogger()
        for handler in handlers:
            root.addHandler(handler)
        root.removeHandler(self._hands_over)


def _handle(handler: logging.Handler, record: logging.LogRecord) -> None:
    try:
        handler.handle(record)
    except Exception:  # a file that could not be opened; the next record tries again
        handler.handleError(record)


class _HandsOver(QueueHandler):
    """Hands a record over as text, with its traceback."""

    def __init__(self, records: _Queue) -> None:
        super().__init__(records)
        self._records = records

    def enqueue(self, record: logging.LogRecord) -> None:
        """Lose it where too many wait."""
        if self._records.qsize() < _MOST:
            self._records.put(record)

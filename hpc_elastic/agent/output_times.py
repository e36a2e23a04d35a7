"""The time index of this node's output files, and their synchronisation to other nodes.

One thread polls only the sizes, several times a second. It does not touch the workers or the data,
and the death of a worker loses nothing, since its output is in its file. A poll is one lseek per
file. On NFS a stat would first send the file's dirty pages to the server.

An NFS client keeps written data until the file is closed, at the worker's end, or for half a
minute. So a second thread synchronises it: an fdatasync sends the data of all processes of a node.
It does so only for files that have grown, and not on a local file system.

Neither thread fails the run or waits for the other. Errors are logged once; then the times are less
exact, or others see the output late.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from hpc_elastic.run.log_index import IndexWriter
from hpc_elastic.shared_files import Mount

_log = logging.getLogger(__name__)

POLL_S = 0.1
"""Seconds between two polls: the precision of the times."""
_MAX_POLL_S = 2.0
"""Longest interval between polls for a missing file; the interval doubles up to it."""
SYNC_S = 2.0
"""Seconds between two synchronisations."""
_SYNC_SHARE = 10
"""A slow server is used less often: synchronisation takes at most a tenth of the time."""
_SYNC_AT_LEAST_S = 30.0
"""About the interval at which a client sends by itself."""
_JOIN_S = 1.0
"""Longest wait at the end, in case the file system hangs."""


class OutputTimes:
    """Writes the time index of each output file of a task; all methods return at once."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Create it without starting it; the files grow with the task, and need not exist."""
        self._always = [_OutputFile(file) for file in files]
        self._round: list[_OutputFile] = []
        self._over: list[_OutputFile] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_poll, name="output-times", daemon=True)
        self._sync_thread = threading.Thread(target=self._run_sync, name="output-sync", daemon=True)
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start both threads."""
        self._thread.start()
        self._sync_thread.start()

    def new_round(self, files: Iterable[Path]) -> None:
        """Watch the files of another round; those of the previous round are polled once more."""
        watched = [_OutputFile(file) for file in files]
        with self._lock:
            self._over, self._round = [*self._over, *self._round], watched

    def close(self) -> None:
        """Poll once more, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run_poll(self) -> None:
        while not self._stop.wait(POLL_S):
            self.poll()
        self.new_round([])
        self.poll()

    def poll(self) -> None:
        """Record the sizes of all files, and close those of previous rounds."""
        with self._lock:
            over, self._over = self._over, []
            watched = [*self._always, *self._round, *over]
        for file in watched:
            try:
                file.record_size()
            except OSError as e:
                self._warn_once("the times of %s, and others, are less exact: %s", file, e)
        for file in over:
            try:
                if not file.close():
                    with self._lock:
                        self._over.append(file)
            except OSError as e:  # NFS reports an exceeded quota at the close
                self._warn_once("the times of %s, and others, are less exact: %s", file, e)

    def _run_sync(self) -> None:
        pause_s = SYNC_S
        while not self._stop.wait(pause_s):
            began = time.monotonic()
            self.sync()
            took_s = time.monotonic() - began
            pause_s = min(max(SYNC_S, _SYNC_SHARE * took_s), _SYNC_AT_LEAST_S)

    def sync(self) -> None:
        """Send what other nodes do not see yet; may block."""
        with self._lock:
            watched = [*self._always, *self._round]
        for file in watched:
            try:
                file.sync()
            except OSError as e:
                self._warn_once("other nodes see %s, and other output, late: %s", file, e)

    def _warn_once(self, what: str, file: _OutputFile, error: OSError) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(what, file.path, error)


class _OutputFile:
    """One file of output; two threads use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._index: IndexWriter | None = None
        self._size = self._synced = 0
        self._needs_sync = False
        """Whether others see the data only after it is sent."""
        self._next_open, self._open_every_s = 0.0, POLL_S
        self._recording, self._syncing = threading.Lock(), threading.Lock()

    def record_size(self) -> None:
        """Record the size of the file, if it has grown; after an OSError the next poll retries."""
        with self._recording:
            if self._fd is None:
                now = time.monotonic()
                if now < self._next_open:
                    return
                try:
                    self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    self._open_every_s = min(2 * self._open_every_s, _MAX_POLL_S)
                    self._next_open = now + self._open_every_s
                    return
                self._needs_sync = Mount.of(self.path).keeps_writes
            size = os.lseek(self._fd, 0, os.SEEK_END)
            if size <= self._size:
                return
            if self._index is None:
                self._index = IndexWriter(self.path)
            self._index.append(size, time.time())
            self._size = size

    def sync(self) -> None:
        """Synchronise data and index, and wait for the server; after an OSError call it again."""
        with self._syncing:
            if not self._needs_sync or self._fd is None or self._size == self._synced:
                return
            os.fdatasync(self._fd)
            self.record_size()  # the index covers the synchronised data
            assert self._index is not None
            size = self._size
            self._index.send()
            self._synced = size

    def close(self) -> bool:
        """Close the file and its index; return False, and do nothing, during a synchronisation."""
        if not self._syncing.acquire(blocking=False):
            return False
        try:
            fd, index, self._fd, self._index = self._fd, self._index, None, None
            if fd is not None:
                os.close(fd)
            if index is not None:
                index.close()
        finally:
            self._syncing.release()
        return True

"""Writes down when the output of this node was written: one thread for all files of a task.

It looks at the sizes only, a few times a second, so that neither the workers nor their files know
of it, and the death of a worker loses nothing: what it has written is in its file. A look is one
lseek a file. A stat would, on NFS, send the file's dirty pages to the server first.

It never fails the run. What can not be written is logged once; the times are less exact then.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from hpc_elastic.output_index import IndexWriter

_log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks, and so the exactness of the times."""
_RARELY_S = 2.0
"""A file that is not there yet is looked for ever more rarely, down to this."""
_JOIN_S = 1.0
"""A file system that hangs does not keep the task from its end."""


class OutputTimes:
    """Keeps the index of each file of a task; all methods return at once."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
        """Make it, not yet started.

        Args:
            files: Files that grow as long as the task lives; they need not exist.
        """
        self._always = [_Watched(file) for file in files]
        self._round: list[_Watched] = []
        self._over: list[_Watched] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="output-times", daemon=True)
        self._complained = False

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def new_round(self, files: Iterable[Path]) -> None:
        """Look at the files of another round; those of the one before are seen one last time."""
        watched = [_Watched(file) for file in files]
        with self._lock:
            self._over, self._round = [*self._over, *self._round], watched

    def close(self) -> None:
        """Look once more, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _keep(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look()
        self.new_round([])
        self._look()

    def _look(self) -> None:
        with self._lock:
            over, self._over = self._over, []
            watched = [*self._always, *self._round, *over]
        for file in watched:
            try:
                file.look()
            except OSError as e:
                self._complain(file, e)
        for file in over:
            try:
                file.close()
            except OSError as e:  # where a quota is told of at the close (NFS)
                self._complain(file, e)

    def _complain(self, file: _Watched, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            _log.warning("the times of %s, and others, are less exact: %s", file.path, error)


class _Watched:
    """One file of output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._index: IndexWriter | None = None
        self._size = 0
        self._look_at, self._patience_s = 0.0, LOOK_S

    def look(self) -> None:
        """Write down how long the file is, if it has grown.

        Raises:
            OSError: that failed; the next look tries again.
        """
        if self._fd is None and not self._open():
            return
        assert self._fd is not None
        size = os.lseek(self._fd, 0, os.SEEK_END)
        if size <= self._size:
            return
        if self._index is None:
            self._index = IndexWriter(self.path)
        self._index.append(size, time.time())
        self._size = size

    def _open(self) -> bool:
        now = time.monotonic()
        if now < self._look_at:
            return False
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._patience_s = min(2 * self._patience_s, _RARELY_S)
            self._look_at = now + self._patience_s
            return False
        return True

    def close(self) -> None:
        """Release what is open.

        Raises:
            OSError: what was written last has come to nothing.
        """
        fd, index, self._fd, self._index = self._fd, self._index, None, None
        if fd is not None:
            os.close(fd)
        if index is not None:
            index.close()

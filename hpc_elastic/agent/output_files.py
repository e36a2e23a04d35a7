"""The output files of a task: their time index, their synchronisation, and which ones are kept.

One thread polls only the sizes, several times a second. It does not touch the workers or the data,
and the death of a worker loses nothing, since its output is in its file. A poll is one lseek per
file. On NFS a stat would first send the file's dirty pages to the server.

An NFS client keeps written data until the file is closed, at the worker's end, or for half a
minute. So a second thread synchronises it: an fdatasync sends the data of all processes of a node.
It does so only for files that have grown, and not on a local file system.

Neither thread fails the run or waits for the other. Errors are logged once; then the times are less
exact, or others see the output late.

Four files for each worker and round would be millions. The agent of a task removes files of that
task alone, those of its earlier attempts included, and only of rounds that are over. It keeps

- a round in which a failure spent a restart, or for which stacks were dumped: reports name them;
- a round in which a worker of this node failed, until it is known that this spent no restart;
- of the others the first round of the task and the `NEWEST`. Of these a round that came to no step
  is removed as soon as a later round of the attempt has come to one.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_elastic.run.log_index import IndexWriter
from hpc_elastic.shared_files import Mount, names_in

_log = logging.getLogger(__name__)

POLL_S = 0.1  # seconds between two polls: the precision of the times
_MAX_POLL_S = 2.0
"""Longest interval between polls for a missing file; the interval doubles up to it."""
SYNC_S = 2.0  # seconds between two synchronisations
_SYNC_SHARE = 10
"""A slow server is used less often: synchronisation takes at most a tenth of the time."""
_SYNC_AT_LEAST_S = 30.0  # about the interval at which a client sends by itself
_JOIN_S = 1.0  # longest wait at the end, in case the file system hangs


class OutputTimes:
    """Writes the time index of each output file of a task; all methods return at once."""

    def __init__(self, files: Iterable[Path] = ()) -> None:
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
        self._needs_sync = False  # whether others see the data only after it is sent
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


NEWEST = 20  # number of past rounds of a task whose files are kept, whatever happened in them

_ATTEMPT, _ROUND = re.compile(r"attempt-(\d+)"), re.compile(r"round-(\d+)\.")
_MARK = ".kept"
_NAMED = (_MARK, ".stack.txt")
"""Ends of names of files that only a round has which a report may name."""

PastRound = tuple[int, int]  # number of the attempt, and of the round


def superfluous(
    rounds: Iterable[PastRound], kept: Collection[PastRound], stepless: Collection[PastRound]
) -> set[PastRound]:
    """Return the past rounds of a task, of those with files, whose files are removed (pure).

    Reports name the ``kept`` ones; the ``stepless`` ones came to no step.
    """
    found = sorted(rounds)
    last = max((r for r in found if r not in stepless), default=(-1, -1))
    overtaken = {r for r in found if r in stepless and r < last}
    others = [r for r in found if r not in overtaken]
    return {*overtaken, *others[1:-NEWEST]}.difference(kept)


class LogRetention:
    """Removes the files of a task's past rounds, in threads of its own."""

    def __init__(self, folder: Path, attempt: int) -> None:
        self._attempt = attempt
        self._own = {attempt: folder}
        self._round: tuple[int, int] | None = None  # its number, restarts spent before it
        self._files: dict[PastRound, list[Path]] = {}
        self._stepless: set[PastRound] = set()
        self._lock = threading.Lock()

    def keep_round(self) -> None:
        """Keep the files of the present round: a worker has failed, and that may be reported."""
        if self._round is not None:
            with suppress(OSError):
                self._mark(self._round[0]).touch(0o644)

    def start_round(self, number: int, restarts: int, *, had_step: bool) -> None:
        """Remove what is not kept any more, since another round begins; returns at once.

        ``restarts`` are those that the run has spent before it. ``had_step``: all workers of this
        node came to a step in the round before.
        """
        before, self._round = self._round, (number, restarts)
        args = (before, self._round, had_step)
        with suppress(RuntimeError):  # no more threads
            threading.Thread(target=self._remove_files, args=args, daemon=True).start()

    def _remove_files(
        self, before: tuple[int, int] | None, now: tuple[int, int], had_step: bool
    ) -> None:
        with self._lock, suppress(OSError):
            if before is None:
                self._find_files(self._earlier_attempts())
            else:
                mark = self._mark(before[0])
                if now[1] == before[1]:
                    mark.unlink(missing_ok=True)
                else:
                    mark.touch(0o644)
                if not had_step:
                    self._stepless.add((self._attempt, before[0]))
            self._files = {r: paths for r, paths in self._files.items() if r[0] < self._attempt}
            self._find_files(self._own)
            past = [r for r in self._files if r < (self._attempt, now[0])]
            kept = [r for r in past if any(p.name.endswith(_NAMED) for p in self._files[r])]
            for round_ in superfluous(past, kept, self._stepless):
                for path in self._files.pop(round_):
                    path.unlink(missing_ok=True)
            self._stepless.intersection_update(self._files)

    def _earlier_attempts(self) -> dict[int, Path]:
        around = self._own[self._attempt].parent
        found = ((_ATTEMPT.fullmatch(name), around / name) for name in names_in(around))
        return {int(m[1]): path for m, path in found if m and int(m[1]) < self._attempt}

    def _find_files(self, folders: Mapping[int, Path]) -> None:
        for attempt, folder in folders.items():
            for name in names_in(folder):
                if found := _ROUND.match(name):
                    self._files.setdefault((attempt, int(found[1])), []).append(folder / name)

    def _mark(self, number: int) -> Path:
        return self._own[self._attempt] / f"round-{number}{_MARK}"

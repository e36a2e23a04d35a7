"""The run's log on the shared file system: ``rdzv/entry.<n>.json``, and the leaders' leases.

`log_entry` holds the procedures (`LogSteps`); this module carries them out on files. Every call may
block as long as the file system does; callers use threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from pathlib import Path

from hpc_elastic import shared_files
from hpc_elastic.errors import DamagedFileError, RunDirectoryError
from hpc_elastic.rendezvous.log_entry import LogEntry, LogSteps, decode_signed
from hpc_elastic.run.fencing import entries_in, entry_path
from hpc_elastic.shared_files import carried_out, read_text, remove_behind
from hpc_elastic.transport.auth import is_signed, sign


class DecisionLog:
    """The log entries and leases of one run; implements `LogFiles`."""

    def __init__(self, path: Path, secret: bytes) -> None:
        self.path = path
        self.secret = secret
        self._removal = shared_files.RemovalWatch(path)

    def is_removed(self) -> bool:
        """Return whether the log's folder was removed for good; only for an unreadable log."""
        return self._removal.is_removed(time.monotonic())

    def last_index(self) -> int:
        """See `LogSteps.last_index`."""
        return carried_out(LogSteps(self).last_index())

    def last(self) -> tuple[int, LogEntry | None]:
        """See `LogSteps.last`."""
        return carried_out(LogSteps(self).last())

    def read_last(self) -> tuple[int, LogEntry | None, int | None]:
        """See `LogSteps.last_with_lease`."""
        return carried_out(LogSteps(self).last_with_lease())

    def create(self, entry: LogEntry) -> bool:
        """Create an entry; return False if its index is taken.

        Raises RunDirectoryError if the file system has no hard links, or is not writable. After
        another OSError the caller may try the entry again.
        """
        try:
            return carried_out(LogSteps(self).create(entry))
        except OSError as e:
            if e.errno in shared_files.NO_HARD_LINKS:
                raise RunDirectoryError(
                    f"{self.path}: the file system has no hard links ({e.strerror}), by which the "
                    "nodes of a run agree: put hydra.sweep.dir on one that has, such as NFS, "
                    "Lustre or GPFS"
                ) from e
            if e.errno in (errno.EACCES, errno.EROFS):
                what = f"not writable on this node ({e.strerror})"
                raise RunDirectoryError(f"{self.path}: {what}") from e
            raise

    def remove_old(self, index: int, term: int) -> None:
        """Begin to remove what `effects.RemoveEntries` names; it stays if that fails."""
        with contextlib.suppress(OSError):
            names = shared_files.names_listed(self.path)
            numbers = sorted(shared_files.numbers_in(names, "entry.", ".json"))
            terms = shared_files.numbers_in(names, "lease.")
            old = [entry_path(self.path, n) for n in numbers if n < index]
            remove_behind(*old, *(self.path / f"lease.{n}" for n in terms if n < term))

    def make_lease(self, term: int) -> Lease:
        """Return the lease of a term, for its leader."""
        return Lease(self.path / f"lease.{term}", self.secret, term)

    def indices(self) -> frozenset[int]:
        """Return the indices of all entries, from a fresh listing."""
        return entries_in(self.path)

    def read(self, index: int) -> LogEntry | None:
        """Open an entry anew and return it."""
        try:
            text = read_text(entry_path(self.path, index))
        except (FileNotFoundError, IsADirectoryError, DamagedFileError):
            return None  # a damaged entry still takes its index
        entry = decode_signed(text, self.secret)
        return entry if entry is not None and entry.index == index else None

    def put(self, entry: LogEntry) -> None:
        """Write an entry under another name, and link it to its own."""
        staged = self.path / f".entry.{secrets.token_hex(8)}"
        try:
            with open(staged, "x", opener=shared_files.owner_writes) as f:
                f.write(entry.encode_signed(self.secret))
                f.flush()
                os.fsync(f.fileno())
            os.link(staged, entry_path(self.path, entry.index))
        finally:
            remove_behind(staged)

    def lease(self, term: int) -> int | None:
        """Open a lease anew; return the value that the leader of its term wrote last."""
        file = self.path / f"lease.{term}"
        try:
            shared_files.refresh(file)
            text, _, mac = read_text(file).rpartition("|")
        except (FileNotFoundError, DamagedFileError):
            return None
        if not is_signed(self.secret, f"lease|{text}", mac):
            return None
        of_term, _, beats = text.partition("|")
        return int(beats) if int(of_term) == term else None


class Lease:
    """The lease of one leader. Its file stays open, so a renewal is one operation."""

    def __init__(self, path: Path, secret: bytes, term: int) -> None:
        self._path = path
        self._secret = secret
        self._term = term
        self._beats = 0
        self._fd: int | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def renew(self) -> None:
        """Raise the counter of the lease; OSError if the file system does not answer."""
        self._beats += 1
        text = f"{self._term}|{self._beats:012d}"
        content = f"{text}|{sign(self._secret, f'lease|{text}')}".encode()
        with self._lock:
            try:
                if self._fd is None:
                    self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.pwrite(self._fd, content, 0)
                os.fdatasync(self._fd)
            except OSError:  # such as ESTALE, after a restart of the file server
                self._close_file()
                raise
            if self._is_over:
                self._close_file()

    def close(self) -> None:
        """Close the file; if a renewal hangs, it closes the file when it ends."""
        self._is_over = True
        if self._lock.acquire(blocking=False):
            self._close_file()
            self._lock.release()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

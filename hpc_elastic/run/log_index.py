"""The time index of a log file, ``<file>.times``: when which bytes were written.

The output of a worker has no times of its own, and it is not changed. So the agent records the size
of the file while it grows (`agent/metrics`). `report/log_files` merges the files of several workers
by these times.

The index has records of 16 bytes, little endian: the size as an unsigned integer, and as a float
the Unix seconds at which the file had that size. A line that ends at byte e was written before the
first record with a size of at least e, and after the record before it. A record that was cut off by
a full disk is ignored, and the next one replaces it.

Readers keep no file open: a run of days has tens of thousands of them.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hpc_elastic.shared_files import LATEST_TIME, open_file, refresh

SUFFIX = ".times"

_RECORD = struct.Struct("<Qd")
_BLOCK = 1024  # records that a reader keeps in memory: 16 KiB

Record = tuple[int, float]  # size in bytes, Unix seconds


def index_of(output: Path) -> Path:
    """Return the path of the index of a log file."""
    return output.with_name(output.name + SUFFIX)


class IndexWriter:
    """Writer of the index of one log file (OSError if it cannot be opened); one at a time."""

    def __init__(self, output: Path) -> None:
        self._fd = os.open(index_of(output), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._at = os.fstat(self._fd).st_size // _RECORD.size * _RECORD.size

    def append(self, size: int, time_s: float) -> None:
        """Record the size of the file at a time; after an OSError the call may be repeated."""
        record = _RECORD.pack(size, time_s)
        if os.pwrite(self._fd, record, self._at) < len(record):
            raise OSError("no space for a whole record")
        self._at += len(record)

    def send(self) -> None:
        """Flush the index to the file server; OSError if it was not flushed."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Index:
    """Reader of the index of one log file, also while it grows; there may be none."""

    def __init__(self, output: Path) -> None:
        self._path = index_of(output)
        self._sizes: list[int] = []
        self._times: list[float] = []

    def time_at(self, end: int) -> float | None:
        """Return when the line that ends at a byte was written; None beyond the index."""
        # calls in ascending order read the file once in a thousand times
        if not self._sizes or not self._sizes[0] <= end <= self._sizes[-1]:
            records = self._query(
                lambda f, num: _read(f, _first(f, num, lambda record: record[0] >= end), _BLOCK)
            )
            self._sizes = [size for size, _ in records]
            self._times = [time_s for _, time_s in records]
        at = bisect_left(self._sizes, end)
        return self._times[at] if at < len(self._sizes) else None

    @property
    def first_time(self) -> float | None:
        """The time of the first record; None if there is none."""
        with_first = self._query(lambda f, num: _read(f, 0, 1) if num else [])
        return with_first[0][1] if with_first else None

    @property
    def covered(self) -> int:
        """The size in the last record; 0 if there is none."""
        with_last = self._query(lambda f, num: _read(f, num - 1, 1) if num else [])
        return with_last[0][0] if with_last else 0

    def written_before(self, time_s: float) -> int:
        """Return the byte up to which everything was written before a time."""

        def last_before(f: BinaryIO, num: int) -> list[Record]:
            at = _first(f, num, lambda record: record[1] >= time_s)
            return _read(f, at - 1, 1) if at else []

        found = self._query(last_before)
        return found[0][0] if found else 0

    def _query(self, what: Callable[[BinaryIO, int], list[Record]]) -> list[Record]:
        try:
            refresh(self._path)
            with open_file(self._path) as f:
                return what(f, os.fstat(f.fileno()).st_size // _RECORD.size)
        except (OSError, IndexError):  # IndexError: it was cut off since
            return []


def _first(f: BinaryIO, num: int, is_reached: Callable[[Record], bool]) -> int:
    """Return the number of the first record for which a monotonic predicate holds."""
    low, high = 0, num
    while low < high:
        middle = (low + high) // 2
        if is_reached(_read(f, middle, 1)[0]):
            high = middle
        else:
            low = middle + 1
    return low


def _read(f: BinaryIO, first: int, num: int) -> list[Record]:
    f.seek(first * _RECORD.size)
    data = f.read(num * _RECORD.size)
    whole = len(data) // _RECORD.size * _RECORD.size
    records = _RECORD.iter_unpack(data[:whole])
    return [(size, time_s if 0.0 <= time_s <= LATEST_TIME else 0.0) for size, time_s in records]

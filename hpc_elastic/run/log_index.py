"""When the bytes of a file of output were written: a small index beside it, ``<file>.times``.

A worker's output has no times of its own, and what it prints is not ours to change. So its agent
looks at how long the file is, and writes that down while it grows (`agent/metrics`). People
who read the files of several workers together need it (`report/log_files`).

The file holds records of 16 bytes, little endian: the size as an unsigned integer, and the Unix
seconds, as a float, at which the file was seen to be that long. What ends at byte e was written
before the first record with a size of at least e, and after the one before. A record that is torn,
for the disk was full, is none; the next one is written over it.

Readers open the file for each look only: a run of days has tens of thousands.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hpc_elastic.shared_files import refresh

SUFFIX = ".times"

_RECORD = struct.Struct("<Qd")
_BLOCK = 1024
"""Records that a reader has in memory: 16 KiB."""

Record = tuple[int, float]
"""Size in bytes, Unix seconds."""


def index_of(output: Path) -> Path:
    """Return where the index of a file of output is."""
    return output.with_name(output.name + SUFFIX)


class IndexWriter:
    """Appends to the index of one file, which has one writer at a time.

    Raises:
        OSError: it can not be opened; so does `append`, and may be called again then.
    """

    def __init__(self, output: Path) -> None:
        self._fd = os.open(index_of(output), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._at = os.fstat(self._fd).st_size // _RECORD.size * _RECORD.size

    def append(self, size: int, time_s: float) -> None:
        """Write down that the file was so long at a time.

        Raises:
            OSError: it was not written.
        """
        record = _RECORD.pack(size, time_s)
        if os.pwrite(self._fd, record, self._at) < len(record):
            raise OSError("no space for a whole record")
        self._at += len(record)

    def send(self) -> None:
        """Have the server of the file have what was appended.

        Raises:
            OSError: it has not.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)


class Index:
    """Reads the index of one file of output, also while it grows; there may be none."""

    def __init__(self, output: Path) -> None:
        self._path = index_of(output)
        self._sizes: list[int] = []
        self._times: list[float] = []

    def time_at(self, end: int) -> float | None:
        """Return when what ends at a byte was written; None: the index does not reach so far.

        Questions in ascending order are answered from memory, but for one in a thousand.
        """
        if not self._sizes or not self._sizes[0] <= end <= self._sizes[-1]:
            self._load(end)
        at = bisect_left(self._sizes, end)
        return self._times[at] if at < len(self._sizes) else None

    @property
    def first_time(self) -> float | None:
        """The time of the first record; None without one."""
        with_first = self._look(lambda f, num: _read(f, 0, 1) if num else [])
        return with_first[0][1] if with_first else None

    @property
    def covered(self) -> int:
        """The size in the last record; 0 without one."""
        with_last = self._look(lambda f, num: _read(f, num - 1, 1) if num else [])
        return with_last[0][0] if with_last else 0

    def written_before(self, time_s: float) -> int:
        """Return up to which byte everything was written before a time."""

        def last_before(f: BinaryIO, num: int) -> list[Record]:
            at = _first(f, num, lambda record: record[1] >= time_s)
            return _read(f, at - 1, 1) if at else []

        found = self._look(last_before)
        return found[0][0] if found else 0

    def _load(self, end: int) -> None:
        """Have the records in memory from the first one on that reaches a byte."""

        def block(f: BinaryIO, num: int) -> list[Record]:
            return _read(f, _first(f, num, lambda record: record[0] >= end), _BLOCK)

        records = self._look(block)
        self._sizes = [size for size, _ in records]
        self._times = [time_s for _, time_s in records]

    def _look(self, what: Callable[[BinaryIO, int], list[Record]]) -> list[Record]:
        try:
            refresh(self._path)
            with self._path.open("rb", buffering=0) as f:
                return what(f, os.fstat(f.fileno()).st_size // _RECORD.size)
        except OSError:
            return []


def _first(f: BinaryIO, num: int, is_reached: Callable[[Record], bool]) -> int:
    """Return the number of the first record for which something holds; all those after it do."""
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
    return [(size, time_s) for size, time_s in _RECORD.iter_unpack(data[:whole])]

"""The event log of a run: one JSON object a line, append only.

Each line has ``v`` (the version of the schema), ``time`` (Unix seconds), ``kind``, ``task`` and
fields of its kind; `hpc_elastic.run.event_schema` lists them. Every task writes its own file, so
that lines are not interleaved on a shared file system.

Readers ignore unknown kinds and fields: a newer version may have started the run.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from hpc_elastic import shared_files

_log = logging.getLogger(__name__)

VERSION = 1
"""It changes when a kind or a field changes its meaning or goes, not when one is added."""

_LOGGED_CHARS = 500
_KEPT = 1000
"""Lines kept for a file system that does not accept them now."""
_MOST_EVENTS = 1_000_000
"""Largest number of events of a run that are kept by a reader: they are all in memory."""
_OF_EACH_NODE = ("first_step", "workers_stopped", "joined")
"""Events of each node in each round: of too many events the oldest of these are left out first."""
_LARGEST, _LARGEST_REAL = 1 << 63, 1e300
"""No integer, and no other number, of a line of a run's files is as large."""

Event = dict[str, Any]


@dataclass(frozen=True)
class EventLog:
    """The events of one task, appended from any thread.

    Events that the file system rejects, because it is full or does not answer, are written by the
    next call that succeeds.
    """

    path: Path
    task: str
    _waiting: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        self.append([self.line(kind, **fields)])

    def write_behind(self, kind: str, **fields: Any) -> None:
        """Append one event in a thread of its own; the caller does not wait for the file."""
        line = self.line(kind, **fields)
        try:
            threading.Thread(target=self.append, args=([line],), daemon=True).start()
        except RuntimeError:  # no more threads
            self.append([line])

    def line(self, kind: str, **fields: Any) -> str:
        """Return the line of an event at the present time, for `append`."""
        line = json.dumps(
            {"v": VERSION, "time": time.time(), "kind": kind, "task": self.task, **fields}
        )
        _log.info("%s", line[:_LOGGED_CHARS])
        return line

    def append(self, lines: Sequence[str]) -> None:
        """Append events, possibly none, and those that could not be written before."""
        with self._lock:
            self._waiting.extend(lines)
            if not self._waiting:
                return
            try:
                _append(self.path, "".join(f"{line}\n" for line in self._waiting).encode())
            except OSError as e:
                num_lost = max(0, len(self._waiting) - _KEPT)
                del self._waiting[:num_lost]
                told = "%s: %d events not written so far, %d lost: %s"
                _log.warning(told, self.path, len(self._waiting), num_lost, e)
            else:
                self._waiting.clear()


def _append(path: Path, data: bytes) -> None:
    """Append all of it or nothing: a disk that is nearly full accepts a part."""
    with open(path, "ab", buffering=0, opener=shared_files.owner_writes) as f:
        before = f.seek(0, os.SEEK_END)
        if f.write(data) < len(data):
            f.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@dataclass
class EventReader:
    """Incremental reader of the events of all tasks of a run; the folder need not exist yet."""

    folder: Path
    num_left_out: int = 0
    """Number of older events that were left out, because there were too many at once."""
    _read: dict[Path, int] = field(default_factory=dict)
    """Number of bytes read of each file, up to the end of a line."""

    def new(self) -> list[Event]:
        """Return the events since the last call, in order of time; of too many the newest.

        A line that is being written is returned by a later call. A line that was cut off, because
        the process or its node ended, is left out. Raises DamagedFileError if a log is no file, and
        OSError if the file system does not answer.
        """
        events: list[Event] = []
        for path in self._logs():
            for end, line in shared_files.lines_in(path, self._read.get(path, 0), newest=True):
                self._read[path] = end
                if event := _parsed(line):
                    events.append(event)
                if len(events) >= 2 * _MOST_EVENTS:
                    events = self._newest(events)
        return sorted(self._newest(events), key=itemgetter("time"))

    def skip(self) -> None:
        """Leave out the events so far."""
        self._read = {path: shared_files.status_of(path).st_size for path in self._logs()}

    def _logs(self) -> list[Path]:
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - glob is silent where it may not look
        except FileNotFoundError:
            return []
        return [self.folder / name for name in sorted(names) if name.endswith(".jsonl")]

    def _newest(self, events: list[Event]) -> list[Event]:
        surplus = len(events) - _MOST_EVENTS
        if surplus <= 0:
            return events
        self.num_left_out += surplus
        return sorted(events, key=lambda e: (e["kind"] not in _OF_EACH_NODE, e["time"]))[surplus:]

    @property
    def doubt(self) -> str | None:
        """What is incomplete because events were left out; None if none were."""
        if not self.num_left_out:
            return None
        what = f"{self.num_left_out:,} of the oldest events are left out"
        return f"{what}: what is known of the time before is incomplete"


def read_events(folder: Path) -> list[Event]:
    """Return the events of all tasks of a run, in order of time; cut-off lines are left out."""
    return EventReader(folder).new()


@functools.cache
def decoder() -> Callable[[Any], dict[str, Any]]:
    """Return the function that decodes a line of a run's files to an object.

    It raises ValueError at what is no JSON, such as NaN, and at numbers that no run writes.
    """
    from msgspec import Meta, convert
    from msgspec.json import Decoder  # 30 ms, which writers of events do not spend

    integer = Annotated[int, Meta(gt=-_LARGEST, le=_LARGEST - 1)]
    real = Annotated[float, Meta(gt=-_LARGEST_REAL, lt=_LARGEST_REAL)]
    value = integer | real | str | bool | list[Any] | dict[str, Any] | None
    decode = Decoder(dict[str, value]).decode

    def decoded(line: bytes) -> dict[str, Any]:
        try:
            return decode(line)
        except ValueError:
            if rb"\ud" not in line:
                raise  # else it may have a byte of a file's name that is no UTF-8
            return convert(json.loads(line), dict[str, value])

    return decoded


def _parsed(line: bytes) -> Event | None:
    """Return the event in a line; None if there is none.

    An attempt that was killed while it wrote leaves half a line, and the next attempt appends to
    it.
    """
    return _whole(line) or _whole(line[max(0, line.rfind(b'{"v": ')) :])


def _whole(line: bytes) -> Event | None:
    try:
        event: Event = shared_files.parse_json(line, "the event", decoder())
        named = isinstance(event["kind"], str) and isinstance(event["task"], str)
        return event if named and 0.0 <= event["time"] <= shared_files.LATEST_TIME else None
    except (ValueError, KeyError, TypeError):
        return None

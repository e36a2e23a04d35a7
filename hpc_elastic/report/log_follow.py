"""Following the log files of a run across restarts, requeues and new nodes.

New files are found when they appear. A line is returned when it is complete, or its file is; the
present state of a progress bar, which may end after hours, is returned now and then.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpc_elastic.report.log_files import (
    Discovery,
    Keep,
    LogLine,
    LogReader,
    LogSource,
    Selection,
    Settling,
    changed,
    is_over,
    line_start,
    newest_of_tasks,
    readable_until,
    size_of,
)

_FIND_S = 0.5
"""Interval of searches for new files."""
_BAR_S = 10.0
"""Interval of returned states of a progress bar."""
_IDLE_S = 0.5
"""Longest interval of reads of a file that does not grow."""
_SHARE = 10
"""At most a tenth of the time is spent on searching files, and as much on checking their sizes."""
_OVER_AFTER_S = 5.0
"""Time after which a file is closed that does not grow, if its task writes a newer one."""

_LINES_A_POLL = 10_000
"""Lines of one file in one poll, so that the other files are not delayed."""


class Follower:
    """Reader of lines that are added to the log files of a run.

    Args:
        discovery: Finds the files.
        selection: Selects files.
        keep: Predicate of lines to return.
    """

    def __init__(self, discovery: Discovery, selection: Selection, keep: Keep) -> None:
        self._discovery = discovery
        self._selection = selection
        self._keep = keep
        self._files: dict[Path, _Followed] = {}
        self._settling = Settling()
        self._newest: dict[str, LogSource] = {}
        self._find_at = self._read_at = 0.0
        self.last_news = time.monotonic()
        """Time of the last read that returned lines, in monotonic seconds."""

    def skip(self, sources: Sequence[LogSource]) -> dict[Path, int]:
        """Skip the present content of files, which the caller reads.

        Returns:
            The byte up to which the caller reads each file. A line that is being written is left to
            the follower.
        """
        return {source.path: self._skip(source) for source in sources}

    def _skip(self, source: LogSource) -> int:
        size = size_of(source.path)
        grows = time.time() - changed(source.path) < _OVER_AFTER_S
        end = line_start(source.path, size) if grows else size
        self._files[source.path] = _Followed(source, end)
        return end

    def poll(self) -> list[LogLine]:
        """Return the lines that are complete and ordered by now."""
        now = time.monotonic()
        if now >= self._find_at:
            self._find()
            took_s = time.monotonic() - now
            self._find_at = now + max(_FIND_S, _SHARE * took_s)
        if now >= self._read_at:
            in_vain_s = sum(self._read(file, now) for file in self._files.values())
            self._read_at = now + _SHARE * in_vain_s
        return self._settling.take(now)

    def finish(self) -> list[LogLine]:
        """Return all remaining lines: the run has ended."""
        self._find()
        for file in self._files.values():
            if not file.is_closed:
                self._settling.add(filter(self._keep, file.drain()), 0.0)
        return self._settling.take_all()

    def _find(self) -> None:
        sources = self._discovery.sources()
        self._newest = newest_of_tasks(s for s in sources if s.attempt is not None)
        for source in filter(self._selection.selects, sources):
            known = self._files.get(source.path)
            if known is None:
                self._files[source.path] = _Followed(source)
            else:
                known.reader.source = source  # its host may have become known

    def _read(self, file: _Followed, now: float) -> float:
        """Read a file; return the seconds that were spent if it had no new lines."""
        if file.is_closed or now < file.read_at:
            return 0.0
        began = time.monotonic()
        found = file.read(now)
        in_vain_s = 0.0 if found else time.monotonic() - began
        source = file.reader.source
        if found is not None:
            self.last_news = now
        elif file.idle_s(now) > _OVER_AFTER_S and self._is_over(source):
            found = file.drain()
        self._settling.add(filter(self._keep, [*(found or ()), *file.bar(now)]), now)
        return in_vain_s

    def _is_over(self, source: LogSource) -> bool:
        return source.task in self._newest and is_over(source, self._newest[source.task])


class _Followed:
    """One file that is followed."""

    def __init__(self, source: LogSource, offset: int = 0) -> None:
        self.reader = LogReader(source, offset)
        self.is_closed = False
        self.read_at = 0.0
        """Time of the next read, in monotonic seconds."""
        self._grew_at = time.monotonic()
        self._waits_since: float | None = None
        self._bar, self._bar_at = "", time.monotonic()

    def bar(self, now: float) -> list[LogLine]:
        """Return the state of a progress bar, if it is due and has changed."""
        if now - self._bar_at < _BAR_S:
            return []
        self._bar_at = now
        line = self.reader.redrawn()
        if line is None or line.text == self._bar:
            return []
        self._bar = line.text
        return [line]

    def idle_s(self, now: float) -> float:
        """Return the seconds since the file last grew."""
        return now - self._grew_at

    def read(self, now: float) -> list[LogLine] | None:
        """Return the lines that are complete; None if the file has not grown."""
        reader = self.reader
        size = reader.size()
        if size <= reader.offset:
            self._waits_since = None
            self.read_at = now + min(self.idle_s(now) / 4, _IDLE_S)
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        waited_s = now - self._waits_since
        covered = reader.index.covered
        until = readable_until(size=size, read=reader.offset, covered=covered, waited_s=waited_s)
        if until <= reader.offset:
            return []
        self._waits_since, self._grew_at = None, now
        found: list[LogLine] = []
        while len(found) < _LINES_A_POLL and (lines := reader.read(until)) is not None:
            found += lines
        return found

    def drain(self) -> list[LogLine]:
        """Return all remaining lines of a complete file."""
        found: list[LogLine] = []
        while (lines := self.reader.read()) is not None:
            found += lines
        self.is_closed = True
        return found + self.reader.rest()

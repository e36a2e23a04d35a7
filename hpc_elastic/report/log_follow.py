"""Follows the output of a run, whatever becomes of its workers and nodes.

New files are found as they appear: of workers that were started again, of tasks that came back from
the queue, of nodes that joined late. A line is shown when it is complete, or its file is over; of a
progress bar, which comes to its end after hours, now and then how far it is.
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
    readable,
    size_of,
)

_FIND_S = 0.5
"""Seconds between two looks for new files."""
_BAR_S = 10.0
"""Seconds between two looks at a progress bar."""
_IDLE_S = 0.5
"""At most so many seconds between two looks at a file that does not grow."""
_SHARE = 10
"""In a run with very many files, at most a tenth of the time is spent on looking for more, and as
much on looking whether they have grown."""
_OVER_AFTER_S = 5.0
"""A file whose task has gone on is given up when it has not grown for so long."""

_LINES_A_LOOK = 10_000
"""So that one file does not keep the others waiting."""


class Follower:
    """Reads what is added to a run's output.

    Args:
        discovery: Finds the run's files.
        selection: Which of them are wanted.
        keep: Which lines.
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
        """When something was last read, in monotonic seconds."""

    def skip(self, sources: Sequence[LogSource]) -> dict[Path, int]:
        """Leave out what files hold so far, which the caller reads himself.

        Returns:
            Up to where he has to: a line that is being written is left to the follower.
        """
        return {source.path: self._skip(source) for source in sources}

    def _skip(self, source: LogSource) -> int:
        size = size_of(source.path)
        grows = time.time() - changed(source.path) < _OVER_AFTER_S
        end = line_start(source.path, size) if grows else size
        self._files[source.path] = _Followed(source, end)
        return end

    def poll(self) -> list[LogLine]:
        """Return the lines whose turn has come."""
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
        """Return all that is left: the run has ended."""
        self._find()
        for file in self._files.values():
            if not file.is_closed:
                self._settling.add(filter(self._keep, file.drain()), 0.0)
        return self._settling.take_all()

    def _find(self) -> None:
        sources = self._discovery.sources()
        self._newest = newest_of_tasks(s for s in sources if s.attempt is not None)
        for source in filter(self._selection.takes, sources):
            known = self._files.get(source.path)
            if known is None:
                self._files[source.path] = _Followed(source)
            else:
                known.reader.source = source  # its host may be known by now

    def _read(self, file: _Followed, now: float) -> float:
        """Read what a file has to show now; return the seconds that finding nothing took."""
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
        """When it is to be looked at again, in monotonic seconds."""
        self._grew_at = time.monotonic()
        self._waits_since: float | None = None
        self._bar, self._bar_at = "", time.monotonic()

    def bar(self, now: float) -> list[LogLine]:
        """Return how far a progress bar is, if it is time to show that again."""
        if now - self._bar_at < _BAR_S:
            return []
        self._bar_at = now
        line = self.reader.redrawn()
        if line is None or line.text == self._bar:
            return []
        self._bar = line.text
        return [line]

    def idle_s(self, now: float) -> float:
        """Return since when nothing new was read."""
        return now - self._grew_at

    def read(self, now: float) -> list[LogLine] | None:
        """Return the lines that are complete now; None if nothing was added."""
        reader = self.reader
        size = reader.size()
        if size <= reader.offset:
            self._waits_since = None
            self.read_at = now + min(self.idle_s(now) / 4, _IDLE_S)
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        waited_s = now - self._waits_since
        covered = reader.index.covered
        until = readable(size=size, read=reader.offset, covered=covered, waited_s=waited_s)
        if until <= reader.offset:
            return []
        self._waits_since, self._grew_at = None, now
        found: list[LogLine] = []
        while len(found) < _LINES_A_LOOK and (lines := reader.read(until)) is not None:
            found += lines
        return found

    def drain(self) -> list[LogLine]:
        """Return all that is left of a file that is over."""
        found: list[LogLine] = []
        while (lines := self.reader.read()) is not None:
            found += lines
        self.is_closed = True
        return found + self.reader.rest()

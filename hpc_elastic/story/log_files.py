"""Finds and reads the files of a run's output, however many and however long they are.

No file is held open, and of each one block is in memory at a time. A file that has vanished, or can
not be read, is like an empty one: what the others hold is shown.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_elastic.files import names_listed, status_of
from hpc_elastic.output_index import Index
from hpc_elastic.rundir import RunDir, Submission
from hpc_elastic.slurm.replacement import current_names
from hpc_elastic.slurm.states import queue_name
from hpc_elastic.story.log_text import Splitter
from hpc_elastic.story.logs import Keep, Line, Source, source_of

BLOCK = 1 << 16
_LATE_S = 60.0
"""The clock of a file server, by which files are dated, may be wrong by so much."""
_TICK_S = 1.0
"""Two changes within so much may have one date."""


class Discovery:
    """Finds the sources of a run, again and again; what has not changed is not read.

    Args:
        run: The run.

    Raises:
        RunDirectoryError: it is no run directory.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._spec = run.load()
        self._folders: dict[Path, tuple[int, float, list[str]]] = {}
        self._attempts: dict[Path, tuple[list[str], str, list[Source]]] = {}
        self._hosts: dict[str, tuple[int, dict[int, str]]] = {}

    def sources(self) -> list[Source]:
        """Return all sources that there are now, sorted."""
        tasks = self._names(self._run.tasks)
        found = [source for task in tasks for source in self._of_task(task)]
        return sorted([*found, *self._captured(tasks)], key=lambda source: source.order)

    def _of_task(self, task: str) -> Iterator[Source]:
        folder = self._run.tasks / task
        for name in self._names(folder):
            number = name.removeprefix("attempt-")
            if number.isdecimal():
                host = self._host_of(task, int(number))
                yield from self._of_attempt(folder / name, task, int(number), host)

    def _of_attempt(self, folder: Path, task: str, attempt: int, host: str) -> list[Source]:
        names = self._names(folder)
        known = self._attempts.get(folder)
        if known is None or known[0] is not names or known[1] != host:
            found = [source_of(file, folder, task, attempt, host) for file in names]
            known = self._attempts[folder] = (names, host, [s for s in found if s is not None])
        return known[2]

    def _captured(self, tasks: Iterable[str]) -> Iterator[Source]:
        """Yield what Slurm has captured of the tasks, and of a gang's batch script."""
        submission = Submission(Path(self._spec.submission))
        there = set(self._names(submission.logs))
        names = dict.fromkeys([*tasks, *current_names(self._spec)])
        for name in dict.fromkeys(n for task in names for n in (task, queue_name(task))):
            path = submission.log(name)
            if path.name in there:
                hosts = set(self._hosts.get(name, (0, {}))[1].values())
                host = hosts.pop() if len(hosts) == 1 else ""
                yield Source(path, self._spec.launcher, name, host=host)

    def _names(self, folder: Path) -> list[str]:
        """Return the names in a folder; of a changed one anew, and a tick later once more."""
        now = time.monotonic()
        try:
            changed = status_of(folder).st_mtime_ns
            known = self._folders.get(folder)
            is_new = known is None or known[0] != changed
            if known is None or is_new or now >= known[1]:
                again_at = now + _TICK_S if is_new else math.inf
                known = self._folders[folder] = (changed, again_at, names_listed(folder))
        except OSError:
            return []
        return known[2]

    def _host_of(self, task: str, attempt: int) -> str:
        """Return on which node an attempt of a task is; empty as long as no event says so."""
        path = self._run.events(task)
        size, hosts = self._hosts.get(task, (0, {}))
        if attempt not in hosts and path.name in self._names(path.parent):
            try:
                now = status_of(path).st_size
                if now != size:
                    hosts = _hosts_in(path)
                    self._hosts[task] = (now, hosts)
            except OSError:
                return ""
        return hosts.get(attempt, "")


def _hosts_in(events: Path) -> dict[int, str]:
    import json

    hosts = {}
    with events.open(errors="replace") as f:
        for line in f:
            if '"kind": "task"' not in line:
                continue
            try:
                event = json.loads(line)
                hosts[int(event["attempt"])] = str(event["host"])
            except (ValueError, KeyError, TypeError):
                continue
    return hosts


class Reader:
    """Reads one file forwards, in blocks, also while it grows.

    Args:
        source: The file.
        offset: Where to begin: the beginning of a line.
    """

    def __init__(self, source: Source, offset: int = 0) -> None:
        self.source = source
        self.offset = offset
        """Up to where it has been read; a line without an end is held back."""
        self.index = Index(source.path)
        self._splitter = Splitter(offset)
        self._last = 0.0

    def size(self) -> int:
        """Return the length of the file."""
        return size_of(self.source.path)

    def read(self, until: int | None = None) -> list[Line] | None:
        """Return the lines that end in the next block; None at the end of the file.

        Args:
            until: Take this byte for the end of the file.
        """
        num_bytes = BLOCK if until is None else min(BLOCK, until - self.offset)
        data = _bytes_at(self.source.path, self.offset, num_bytes)
        if not data:
            return None
        self.offset += len(data)
        return self._lines(self._splitter.feed(data))

    def redrawn(self) -> Line | None:
        """Return what a progress bar shows now that has not come to its end."""
        state = self._splitter.state()
        self._last = max(self._last, changed(self.source.path)) if state else self._last
        return Line(self._last, self.source, state, timed=False) if state else None

    def rest(self) -> list[Line]:
        """Return the last line, if it has no end."""
        return self._lines(self._splitter.rest())

    def _lines(self, pieces: Iterable[tuple[int, str]]) -> list[Line]:
        found: list[Line] = []
        otherwise: float | None = None
        for end, text in pieces:
            known = self.index.time_at(end) if otherwise is None else None
            if known is None and otherwise is None:  # nor is any later line in the index
                otherwise = changed(self.source.path)
            self._last = max(self._last, known or otherwise or 0.0)
            found.append(Line(self._last, self.source, text, timed=known is not None))
        return found


def lines(source: Source, start: int = 0, until: int | None = None) -> Iterator[Line]:
    """Yield the lines of a file from the beginning of a line on, up to a byte or its end."""
    reader = Reader(source, start)
    while (found := reader.read(until)) is not None:
        yield from found
    yield from reader.rest()


def begin_of(source: Source, since: float | None) -> float | None:
    """Return a time that no line lies before which is to be shown; None: there is no such line.

    Args:
        source: The file.
        since: Unix seconds; lines before are not wanted.
    """
    if not size_of(source.path):
        return None
    last = changed(source.path)
    if since is not None and last < since - _LATE_S:
        return None
    begin = Index(source.path).first_time
    begin = last if begin is None else begin
    return begin if since is None else max(begin, since)


def start_of(source: Source, since: float | None) -> int:
    """Return the beginning of the first line that may have been written since a time."""
    if since is None:
        return 0
    written = min(Index(source.path).written_before(since), size_of(source.path))
    return line_start(source.path, written)


def tail(
    sources: Sequence[Source],
    num_lines: int,
    keep: Keep,
    *,
    since: float | None = None,
    until: Mapping[Path, int] | None = None,
) -> list[Line]:
    """Return the last lines of all files together, in order, without reading all of them.

    Args:
        sources: The files, in their order.
        num_lines: So many.
        keep: Which lines count.
        since: Unix seconds before which no line is wanted.
        until: What to take for the end of a file; else its end.
    """
    order = {source.path: number for number, source in enumerate(sources)}
    newest = sorted(sources, key=lambda source: -changed(source.path))
    found: list[Line] = []
    for source in newest if num_lines else ():
        full = len(found) == num_lines
        if full and changed(source.path) + _LATE_S < found[0].time:
            break
        end = (until or {}).get(source.path)
        found += _last_lines(source, num_lines, keep, start_of(source, since), end)
        found.sort(key=lambda line: (line.time, order[line.source.path]))
        found = found[-num_lines:]
    return found


def _last_lines(
    source: Source, num_lines: int, keep: Keep, floor: int, until: int | None
) -> list[Line]:
    """Look at four times as many lines as long as too few of them are wanted."""
    count = num_lines
    while True:
        start = max(floor, _start_of_last(source.path, count, until))
        kept = deque((line for line in lines(source, start, until) if keep(line)), num_lines)
        if len(kept) == num_lines or start == floor:
            return list(kept)
        count *= 4


def _start_of_last(path: Path, num_lines: int, until: int | None) -> int:
    """Return where the last so many lines of a file begin."""
    end = size_of(path) if until is None else until
    at = end - 1  # an end of line at the very end belongs to the last line
    while at > 0:
        first = max(0, at - BLOCK)
        block = _bytes_at(path, first, at - first)
        ends = block.count(b"\n")
        if ends >= num_lines:
            found = -1
            for _ in range(ends - num_lines + 1):
                found = block.index(b"\n", found + 1)
            return first + found + 1
        num_lines -= ends
        at = first
    return 0


def line_start(path: Path, offset: int) -> int:
    """Return where the line begins that a byte is in."""
    return _start_of_last(path, 1, offset + 1) if offset else 0


def size_of(path: Path) -> int:
    """Return the length of a file; 0 if it can not be read."""
    try:
        return status_of(path).st_size
    except OSError:
        return 0


def changed(path: Path) -> float:
    """Return when a file was last written to; 0 if it can not be read."""
    try:
        return status_of(path).st_mtime
    except OSError:
        return 0.0


def _bytes_at(path: Path, offset: int, num_bytes: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as f:
            f.seek(offset)
            return f.read(num_bytes)
    except OSError:
        return b""

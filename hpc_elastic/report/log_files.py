"""The log files of a run as one stream of lines, in order of time.

For each attempt of each task, each round and each rank a run writes one file of standard output and
one of standard error. A `LogSource` is one of these files. A `LogLine` is a line of it, with the
time at which it was written (`hpc_elastic.run.log_index`). `Follower` follows growing files.

Lines of one file keep their order. Lines of several files are ordered by time, and at the same time
by the order of their sources.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_elastic import shared_files
from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run import queue_name
from hpc_elastic.run.directory import AGENT_LOG, RunDir, Submission
from hpc_elastic.run.log_index import Index
from hpc_elastic.slurm.nodelist import compress_indices
from hpc_elastic.slurm.run_tasks import current_names

Stream = Literal["out", "err", "agent", "slurm", "local"]

_NAME = re.compile(r"round-(\d+)\.rank-(\d+)\.(out|err)")


@dataclass(frozen=True)
class LogSource:
    """One log file."""

    path: Path
    stream: Stream
    """``agent``: the log of the agent; ``slurm``, ``local``: output of the task that the launcher
    of that name has captured."""
    task: str
    attempt: int | None = None  # None for ``slurm`` and ``local``: one file has all attempts
    round: int | None = None  # the round; None for ``agent``, ``slurm`` and ``local``
    rank: int | None = None
    host: str = ""  # the node; empty if it is unknown, or not the same for all attempts

    @property
    def is_worker(self) -> bool:
        """Whether a worker writes it."""
        return self.rank is not None

    @property
    def order(self) -> tuple[int, int, str, int, str]:
        """Sort key of sources: rounds, then ranks, then the others."""
        rank = 1 << 31 if self.rank is None else self.rank
        return (self.round or 0, rank, self.task, self.attempt or 0, self.stream)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log file."""

    time: float  # when it was written, in Unix seconds; not before the line above it
    source: LogSource
    text: str  # the line as it was written, without its end; `cleaned` removes control characters
    timed: bool = True  # whether the time is from the index, and not that of the file's last change


Keep = Callable[[LogLine], bool]


def source_of(file: str, folder: Path, task: str, attempt: int, host: str) -> LogSource | None:
    """Return the source of a file in the folder of an attempt; None if it is no log file."""
    if file == AGENT_LOG:
        return LogSource(folder / file, "agent", task, attempt, host=host)
    m = _NAME.fullmatch(file)
    if m is None:
        return None
    stream: Stream = "out" if m[3] == "out" else "err"
    return LogSource(folder / file, stream, task, attempt, int(m[1]), int(m[2]), host)


@dataclass(frozen=True)
class Selection:
    """Criteria for sources; None or an empty set selects all. Agents have no rank and no round."""

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    attempt: int | None = None
    round: int | None = None
    agents: bool = False  # also output that Slurm has captured

    def selects(self, source: LogSource) -> bool:
        """Return whether a source is selected."""
        if self.attempt is not None and source.attempt not in (None, self.attempt):
            return False
        if self.nodes and source.host not in self.nodes:
            return False
        if not source.is_worker:
            return self.agents
        by_rank = not self.ranks or source.rank in self.ranks
        return by_rank and self.round in (None, source.round)


class NothingSelectedError(HpcElasticError, LookupError):
    """The run has no source that is selected; the message names what it has."""

    remedy = "leave the option out, or select what the message names"


def require_there(selection: Selection, sources: Iterable[LogSource]) -> None:
    """Raise NothingSelectedError if a criterion names nothing, or no source meets all."""
    found = list(sources)
    workers = [s for s in found if s.is_worker]
    _require("rank", selection.ranks, {s.rank for s in workers if s.rank is not None})
    _require("node", selection.nodes, {s.host for s in found if s.host})
    if selection.attempt is not None:
        there = {s.attempt for s in found if s.attempt is not None}
        _require("attempt", {selection.attempt}, there)
    if selection.round is not None:
        _require("round", {selection.round}, {s.round for s in workers if s.round is not None})
    if not any(map(selection.selects, found)):
        hosts = {s.host for s in workers if not selection.ranks or s.rank in selection.ranks}
        where = f"; these ranks were on {', '.join(sorted(hosts))}" if selection.ranks else ""
        what = "the run has no output that meets all options"
        raise NothingSelectedError(f"{what}{where}: leave one out")


def _require(option: str, wanted: Iterable[int | str], there: Iterable[int | str]) -> None:
    there = set(there)
    missing = sorted(w for w in wanted if w not in there)
    if not missing:
        return
    numbers = [t for t in there if isinstance(t, int)]
    names = compress_indices(numbers) if numbers else ", ".join(sorted(map(str, there)))
    has = f"{option if len(there) == 1 else option + 's'} {names}" if there else "none so far"
    what = f"--{option} {missing[0]}: the run has no such {option}"
    raise NothingSelectedError(f"{what}; it has {has}")


def merge(streams: Iterable[tuple[float, Iterator[LogLine]]]) -> Iterator[LogLine]:
    """Yield the lines of several files in order of time.

    Each stream comes with a lower bound of the times of its lines, and is read when that time has
    come: a run of days has tens of thousands of files, and writes few of them at a time.
    """
    heap: list[tuple[float, int, LogLine | None, Iterator[LogLine]]]
    heap = [(begin, number, None, lines) for number, (begin, lines) in enumerate(streams)]
    heapq.heapify(heap)
    while heap:
        _, number, line, lines = heap[0]
        if line is not None:
            yield line
        following = next(lines, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (following.time, number, following, lines))


# ---- finding and reading files
# No file is kept open, and one block of each is in memory at a time. A file that has vanished, or
# cannot be read, counts as empty.


BLOCK = 1 << 16
_LATE_S = 60.0  # largest error of the clock of a file server, which dates files
_TICK_S = 1.0  # resolution of a file server's dates: two changes within it may have the same date
_LONGEST_BACK = 256 << 20  # number of bytes in which the start of one line is searched for


class Discovery:
    """Repeated search for the sources of a run; unchanged folders are not read again."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._spec = run.load()
        self._folders: dict[Path, tuple[int, float, list[str]]] = {}
        self._attempts: dict[Path, tuple[list[str], str, list[LogSource]]] = {}
        self._hosts: dict[str, tuple[int, dict[int, str]]] = {}

    def sources(self) -> list[LogSource]:
        """Return all present sources, sorted."""
        tasks = self._names(self._run.tasks)
        found: list[LogSource] = []
        for task in tasks:
            for name in self._names(self._run.tasks / task):
                number = name.removeprefix("attempt-")
                if number.isdecimal():
                    found += self._of_attempt(self._run.tasks / task / name, task, int(number))
        return sorted([*found, *self._captured(tasks)], key=lambda source: source.order)

    def _of_attempt(self, folder: Path, task: str, attempt: int) -> list[LogSource]:
        names, host = self._names(folder), self._host_of(task, attempt)
        known = self._attempts.get(folder)
        if known is None or known[0] is not names or known[1] != host:
            found = (source_of(file, folder, task, attempt, host) for file in names)
            known = self._attempts[folder] = (names, host, [s for s in found if s is not None])
        return known[2]

    def _captured(self, tasks: Iterable[str]) -> Iterator[LogSource]:
        """Yield what Slurm has captured of the tasks, and of a co-allocated job's batch script."""
        submission = Submission(Path(self._spec.submission))
        try:
            owners = {
                shared_files.status_of(path).st_uid for path in (submission.path, self._run.spec)
            }
        except OSError:
            return
        if len(owners) > 1:  # run.json may name any folder
            return
        there = set(self._names(submission.logs))
        names = dict.fromkeys([*tasks, *current_names(self._spec)])
        for name in dict.fromkeys(n for task in names for n in (task, queue_name(task))):
            path = submission.log(name)
            if path.name in there:
                hosts = set(self._hosts.get(name, (0, {}))[1].values())
                host = hosts.pop() if len(hosts) == 1 else ""
                yield LogSource(path, self._spec.settings.backend, name, host=host)

    def _names(self, folder: Path) -> list[str]:
        """Return the names in a folder, read again after a change, and once more a tick later."""
        now = time.monotonic()
        try:
            changed = shared_files.status_of(folder).st_mtime_ns
            known = self._folders.get(folder)
            is_new = known is None or known[0] != changed
            if known is None or is_new or now >= known[1]:
                again_at, names = now + _TICK_S, shared_files.names_listed(folder)
                known = (changed, again_at if is_new else math.inf, names)
                self._folders[folder] = known
        except OSError:
            return []
        return known[2]

    def _host_of(self, task: str, attempt: int) -> str:
        path = self._run.events(task)
        size, hosts = self._hosts.get(task, (0, {}))
        with contextlib.suppress(OSError):
            is_there = attempt not in hosts and path.name in self._names(path.parent)
            if is_there and (now := shared_files.status_of(path).st_size) != size:
                hosts = _hosts_in(path)
                self._hosts[task] = (now, hosts)
        return hosts.get(attempt, "")


def _hosts_in(events: Path) -> dict[int, str]:
    hosts = {}
    for line in shared_files.lines_in(events):
        if b'"kind": "task"' not in line:
            continue
        try:
            event = shared_files.parse_json(line, events)
            hosts[int(event["attempt"])] = str(event["host"])
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
    return hosts


class LogReader:
    """Reader of one file, forwards and in blocks, also while it grows; from a start of a line."""

    def __init__(self, source: LogSource, offset: int = 0) -> None:
        self.source = source
        self.offset = offset  # number of bytes that were read; a line without an end is held back
        self.index = Index(source.path)
        self._splitter = Splitter(offset)
        self._last = 0.0

    def read(self, until: int | None = None) -> list[LogLine] | None:
        """Return the lines that end in the next block before ``until``; None at the file's end."""
        num_bytes = BLOCK if until is None else min(BLOCK, until - self.offset)
        data = _bytes_at(self.source.path, self.offset, num_bytes)
        if not data:
            return None
        if len(data) == BLOCK and data.count(0) == BLOCK:  # perhaps a hole of a sparse file
            size = until or size_of(self.source.path)
            num_bytes = min(_data_after(self.source.path, self.offset), size) - self.offset
            if num_bytes > BLOCK:
                self.offset += num_bytes
                self._splitter.skip(num_bytes)
                return []
        self.offset += len(data)
        return self._lines(self._splitter.feed(data))

    def redrawn(self) -> LogLine | None:
        """Return the present state of a progress bar; None if the last line is complete."""
        state = self._splitter.state()
        if not state:
            return None
        self._last = max(self._last, modified_at(self.source.path))
        return LogLine(self._last, self.source, state, timed=False)

    def rest(self) -> list[LogLine]:
        """Return the last line if it has no end of line."""
        return self._lines(self._splitter.rest())

    def _lines(self, pieces: Iterable[tuple[int, str]]) -> list[LogLine]:
        found: list[LogLine] = []
        otherwise: float | None = None
        for end, text in pieces:
            known = self.index.time_at(end) if otherwise is None else None
            if known is None and otherwise is None:  # later lines are not in the index either
                otherwise = modified_at(self.source.path)
            self._last = max(self._last, known or otherwise or 0.0)
            found.append(LogLine(self._last, self.source, text, timed=known is not None))
        return found


def lines(source: LogSource, start: int = 0, until: int | None = None) -> Iterator[LogLine]:
    """Yield the lines of a file from the start of a line on, up to a byte or its end."""
    reader = LogReader(source, start)
    while (found := reader.read(until)) is not None:
        yield from found
    yield from reader.rest()


def begin_of(source: LogSource, since: float | None) -> float | None:
    """Return a lower bound of the times of a file's lines since a time; None if it has none."""
    last, since = modified_at(source.path), -math.inf if since is None else since
    if not size_of(source.path) or last < since - _LATE_S:
        return None
    begin = Index(source.path).first_time
    return max(last if begin is None else begin, since)


def start_of(source: LogSource, since: float | None) -> int:
    """Return the byte at which the first line starts that may have been written since a time."""
    if since is None:
        return 0
    written = min(Index(source.path).written_before(since), size_of(source.path))
    return line_start(source.path, written)


def tail(
    sources: Sequence[LogSource],
    num_lines: int,
    keep: Keep,
    *,
    since: float | None = None,
    until: Mapping[Path, int] | None = None,
) -> list[LogLine]:
    """Return the last lines of all files together, in order, without reading all of them.

    ``keep`` is true for lines that count; those before ``since`` (Unix seconds) do not. ``until``
    is the byte to read a file up to; others are read to their end.
    """
    order = {source.path: number for number, source in enumerate(sources)}
    newest = sorted(sources, key=lambda source: -modified_at(source.path))
    found: list[LogLine] = []
    for source in newest if num_lines else ():
        full = len(found) == num_lines
        if full and modified_at(source.path) + _LATE_S < found[0].time:
            break
        end, floor = (until or {}).get(source.path), start_of(source, since)
        count, start, before, last = num_lines, floor + 1, floor + 2, deque[LogLine]()
        while len(last) < num_lines and floor < start != before:  # four times as many while few
            before, start = start, max(floor, _start_of_last(source.path, count, end))
            last = deque((line for line in lines(source, start, end) if keep(line)), num_lines)
            count *= 4
        found += last
        found.sort(key=lambda line: (line.time, order[line.source.path]))
        found = found[-num_lines:]
    return found


def _start_of_last(path: Path, num_lines: int, until: int | None) -> int:
    end = size_of(path) if until is None else until
    at = end - 1  # an end of line at the very end belongs to the last line
    farthest = at - _LONGEST_BACK
    while at > max(0, farthest):
        first = max(0, at - BLOCK)
        block = _bytes_at(path, first, at - first)
        ends = block.count(b"\n")
        if ends >= num_lines:
            return first + len(block) - len(block.split(b"\n", ends - num_lines + 1)[-1])
        num_lines -= ends
        at = first
        farthest = at - _LONGEST_BACK if ends else farthest
    return max(0, at)


def line_start(path: Path, offset: int) -> int:
    """Return the byte at which the line starts that contains a byte."""
    return _start_of_last(path, 1, offset + 1) if offset else 0


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it cannot be read."""
    try:
        return shared_files.status_of(path).st_size
    except OSError:
        return 0


def modified_at(path: Path) -> float:
    """Return when a file was last written to; 0 if it cannot be read."""
    try:
        return min(max(0.0, shared_files.status_of(path).st_mtime), shared_files.LATEST_TIME)
    except OSError:
        return 0.0


def _bytes_at(path: Path, offset: int, num_bytes: int) -> bytes:
    try:
        with shared_files.open_file(path) as f:
            f.seek(offset)
            return f.read(num_bytes)
    except OSError:
        return b""


def _data_after(path: Path, offset: int) -> int:
    """Return where the data of a file goes on at or after a byte; its end if there is a hole."""
    try:
        with shared_files.open_file(path) as f:
            return os.lseek(f.fileno(), offset, os.SEEK_DATA)
    except OSError as e:
        return size_of(path) if e.errno == errno.ENXIO else offset


# ---- following files across restarts, requeues and new nodes
# New files are found when they appear. A line is returned when it is complete, or its file is; the
# present state of a progress bar, which may end after hours, is returned now and then.


SETTLE_S = 0.5  # time for which a followed line waits for earlier lines of other files
INDEX_WAIT_S = 1.0  # time for which a followed line waits for its time in the index
_FIND_S = 0.5  # interval of searches for new files
_BAR_S = 10.0  # interval of returned states of a progress bar
_IDLE_S = 0.5  # longest interval of reads of a file that does not grow
_SHARE = 10  # a tenth of the time, at most, for searching files, and for checking their sizes
_OVER_AFTER_S = 5.0  # a file that does not grow is closed if its task writes a newer one

_LINES_A_POLL = 10_000  # lines of one file in one poll, so that the other files are not delayed
_BYTES_A_POLL = 64 << 20  # bytes of one file in one poll: they are in memory


class Follower:
    """Reader of lines that are added to the log files of a run."""

    def __init__(self, discovery: Discovery, selection: Selection, keep: Keep) -> None:
        self._discovery = discovery
        self._selection = selection
        self._keep = keep
        self._files: dict[Path, _Followed] = {}
        self._settling = Settling()
        self._newest: dict[str, LogSource] = {}
        self._find_at = self._read_at = 0.0
        self.last_news = time.monotonic()  # last read that returned lines, monotonic

    def skip(self, sources: Sequence[LogSource]) -> dict[Path, int]:
        """Skip the present content of files, which the caller reads up to the returned bytes."""
        ends = {}
        for source in sources:
            end = size_of(source.path)
            if time.time() - modified_at(source.path) < _OVER_AFTER_S:
                end = line_start(source.path, end)  # a line that is being written is the follower's
            self._files[source.path] = _Followed(source, end)
            ends[source.path] = end
        return ends

    def poll(self) -> list[LogLine]:
        """Return the lines that are complete and ordered by now."""
        now = time.monotonic()
        if now >= self._find_at:
            self._find()
            self._find_at = now + max(_FIND_S, _SHARE * (time.monotonic() - now))
        if now >= self._read_at:
            without_news_s = sum(self._read(file, now) for file in self._files.values())
            self._read_at = now + _SHARE * without_news_s
        return self._settling.take_due(now)

    def finish(self) -> list[LogLine]:
        """Return all remaining lines: the run has ended."""
        self._find()
        for file in self._files.values():
            if not file.is_closed:
                self._settling.add(filter(self._keep, file.drain()), 0.0)
        return self._settling.take_due(math.inf)

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
        without_news_s = 0.0 if found else time.monotonic() - began
        source = file.reader.source
        if found is not None:
            self.last_news = now
        elif now - file.grew_at > _OVER_AFTER_S:
            newest = self._newest.get(source.task)
            if newest is not None and is_over(source, newest):
                found = file.drain()
        self._settling.add(filter(self._keep, [*(found or ()), *file.bar(now)]), now)
        return without_news_s


class _Followed:
    def __init__(self, source: LogSource, offset: int = 0) -> None:
        self.reader = LogReader(source, offset)
        self.is_closed = False
        self.read_at = 0.0  # time of the next read, in monotonic seconds
        self.grew_at = time.monotonic()
        self._waits_since: float | None = None
        self._bar, self._bar_at = "", time.monotonic()

    def bar(self, now: float) -> list[LogLine]:
        """Return the state of a progress bar, if it is due and has changed."""
        line = None
        if now - self._bar_at >= _BAR_S:
            self._bar_at, line = now, self.reader.redrawn()
        if line is None or line.text == self._bar:
            return []
        self._bar = line.text
        return [line]

    def read(self, now: float) -> list[LogLine] | None:
        """Return the lines that are complete; None if the file has not grown."""
        reader = self.reader
        size = size_of(reader.source.path)
        if size <= reader.offset:
            self._waits_since = None
            self.read_at = now + min((now - self.grew_at) / 4, _IDLE_S)
            return None
        self._waits_since = now if self._waits_since is None else self._waits_since
        waited_s = now - self._waits_since
        covered = reader.index.covered
        until = readable_until(size=size, read=reader.offset, covered=covered, waited_s=waited_s)
        if until <= reader.offset:
            return []
        self._waits_since, self.grew_at = None, now
        found, begin = list[LogLine](), reader.offset
        while len(found) < _LINES_A_POLL and reader.offset - begin < _BYTES_A_POLL:
            if (lines := reader.read(until)) is None:
                break
            found += lines
        return found

    def drain(self) -> list[LogLine]:
        self.is_closed = True
        found = [line for lines in iter(self.reader.read, None) for line in lines]
        return found + self.reader.rest()


class Settling:
    """Buffer that orders lines of growing files, by holding each back for a moment.

    Clocks of nodes may differ: the time for which a line was held back is by the reader's clock,
    and all earlier lines are released with it.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, LogLine]] = []

    def add(self, lines: Iterable[LogLine], now: float) -> None:
        """Add lines, those of one file in its order; ``now`` is monotonic seconds."""
        self._waiting.extend((now, line) for line in lines)

    def take_due(self, now: float) -> list[LogLine]:
        """Return the lines that were held back long enough, in order; at infinity, all."""
        waited = (line.time for at, line in self._waiting if now - at >= SETTLE_S)
        until = max(waited, default=-math.inf)
        due = [line for _, line in self._waiting if line.time <= until]
        self._waiting = [(at, line) for at, line in self._waiting if line.time > until]
        return sorted(due, key=lambda line: line.time)


def readable_until(*, size: int, read: int, covered: int, waited_s: float) -> int:
    """Return the byte up to which a file can be read that grows before its index (pure)."""
    if covered > read:
        return min(covered, size)
    return size if waited_s >= INDEX_WAIT_S else read


def is_over(source: LogSource, newest: LogSource) -> bool:
    """Return whether a file is complete: ``newest``, of the same task, is a later one (pure)."""
    if source.attempt is None or source.attempt != newest.attempt:
        return source.attempt is not None and source.attempt < (newest.attempt or 0)
    return source.round is not None and source.round < (newest.round or 0)


def newest_of_tasks(sources: Iterable[LogSource]) -> dict[str, LogSource]:
    """Return the newest source of each task, by attempt and round."""
    return {s.task: s for s in sorted(sources, key=lambda s: (s.attempt or 0, s.round or 0))}


MAX_LINE = 1 << 16  # bytes of a line; a longer line is split


class Splitter:
    r"""Splitter of the bytes of a file, piece by piece, into lines.

    Of a line that a progress bar has redrawn with ``\r`` the last state counts, as on a terminal.
    """

    def __init__(self, offset: int = 0) -> None:
        self._held = b""
        self._end = offset
        self._is_redrawn = False

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """Add a piece; return the lines that end in it, each with the byte at which it ends."""
        end = self._end
        self._end += len(data)
        *whole, rest = data.split(b"\n")
        found = []
        for part in whole:
            end += len(part) + 1
            found += self._pieces(self._held + part, end - 1)
            self._held, self._is_redrawn = b"", False
        self._held += rest
        self._is_redrawn = self._is_redrawn or b"\r" in rest
        return found + self._overlong()

    def skip(self, num_bytes: int) -> None:
        """Leave out bytes that are a hole of the file."""
        self._end += num_bytes

    def state(self) -> str:
        """Return the present state of a progress bar without an end of line; else empty."""
        return _last_state(self._held).decode(errors="replace") if self._is_redrawn else ""

    def rest(self) -> list[tuple[int, str]]:
        """Return the last line, which has no end of line, when the file is complete."""
        held, self._held = self._held, b""
        return self._pieces(held, self._end) if held else []

    def _overlong(self) -> list[tuple[int, str]]:
        """Return the start of a line that is too long; a redrawn line has none."""
        if len(self._held) <= MAX_LINE:
            return []
        drawn = self._held.rstrip(b"\r").rfind(b"\r")
        if drawn >= 0:
            self._held = self._held[drawn + 1 :]
        whole = len(self._held) // MAX_LINE * MAX_LINE
        begun, self._held = self._held[:whole], self._held[whole:]
        return self._pieces(begun, self._end - len(self._held)) if begun else []

    @staticmethod
    def _pieces(line: bytes, end: int) -> list[tuple[int, str]]:
        last = _last_state(line)
        starts = range(0, max(1, len(last)), MAX_LINE)
        return [(end, last[at : at + MAX_LINE].decode(errors="replace")) for at in starts]


def _last_state(line: bytes) -> bytes:
    r"""Return the last state of a line on a terminal; ``\r\n`` is an end of line, too."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1] if states else b""

"""The output of a run's workers, agents and tasks as one stream, in order of time (pure).

A run writes many files: for each attempt of each task, each round and each rank one for standard
output and one for standard error. A `LogSource` is one of them, a `LogLine` is a line of it with
the time at which it was written (`hpc_elastic.run.log_index`). `log_files` reads, `log_follow`
follows.

Two rules hold throughout: lines of one file stay in its order, and lines of several files are
ordered by time, those of the same time by the order of their sources.
"""

from __future__ import annotations

import heapq
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.run.directory import AGENT_LOG, RunDir, Submission
from hpc_elastic.run.log_index import Index
from hpc_elastic.shared_files import names_listed, status_of
from hpc_elastic.slurm.job_state import queue_name
from hpc_elastic.slurm.nodelist import compress_indices
from hpc_elastic.slurm.requeue import current_names

Stream = Literal["out", "err", "agent", "slurm", "local"]

SETTLE_S = 0.5
"""A line that is followed waits so long for earlier ones of other files."""
INDEX_WAIT_S = 1.0
"""What is in a file waits so long for the agent to write down when it came."""

_NAME = re.compile(r"round-(\d+)\.rank-(\d+)\.(out|err)")


@dataclass(frozen=True)
class LogSource:
    """One file of output.

    Attributes:
        path: The file.
        stream: ``agent``: the agent's log; ``slurm``, ``local``: what the launcher of
            that name has captured of the task.
        task: Whose it is.
        attempt: Of the task; None for ``slurm`` and ``local``, where all attempts write into one
            file.
        round: Of the run; None for ``agent``, ``slurm`` and ``local``.
        rank: The worker's global rank, or None.
        host: The node; empty where it is not known, or not the same throughout.
    """

    path: Path
    stream: Stream
    task: str
    attempt: int | None = None
    round: int | None = None
    rank: int | None = None
    host: str = ""

    @property
    def is_worker(self) -> bool:
        """Whether a worker has written it."""
        return self.rank is not None

    @property
    def order(self) -> tuple[int, int, str, int, str]:
        """By which sources are sorted: rounds, then ranks, then the others."""
        rank = 1 << 31 if self.rank is None else self.rank
        return (self.round or 0, rank, self.task, self.attempt or 0, self.stream)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of output.

    Attributes:
        time: Unix seconds at which it was written; never less than that of the line before it.
        source: The file it is in.
        text: Without its end, as it was written: `log_text.cleaned` makes it fit to be shown.
        timed: Whether the time is its own, and not that of the file's last change.
    """

    time: float
    source: LogSource
    text: str
    timed: bool = True


Keep = Callable[[LogLine], bool]


def source_of(file: str, folder: Path, task: str, attempt: int, host: str) -> LogSource | None:
    """Return which output a file in the folder of an attempt is; None: it is none."""
    if file == AGENT_LOG:
        return LogSource(folder / file, "agent", task, attempt, host=host)
    m = _NAME.fullmatch(file)
    if m is None:
        return None
    stream: Stream = "out" if m[3] == "out" else "err"
    return LogSource(folder / file, stream, task, attempt, int(m[1]), int(m[2]), host)


@dataclass(frozen=True)
class Selection:
    """Which sources are wanted; what is None or empty does not select.

    Attributes:
        ranks: Global ranks of workers; agents have none, and go by the other criteria.
        nodes: Hosts.
        attempt: Of the tasks.
        round: Of the run.
        agents: Whether the agents' logs, and what Slurm captured, are wanted as well.
    """

    ranks: frozenset[int] = frozenset()
    nodes: frozenset[str] = frozenset()
    attempt: int | None = None
    round: int | None = None
    agents: bool = False

    def takes(self, source: LogSource) -> bool:
        """Say whether a source is wanted."""
        if not source.is_worker:
            return self.agents and self._is_there(source)
        by_rank = not self.ranks or source.rank in self.ranks
        return by_rank and self.round in (None, source.round) and self._is_there(source)

    def _is_there(self, source: LogSource) -> bool:
        by_attempt = self.attempt is None or source.attempt in (None, self.attempt)
        return by_attempt and (not self.nodes or source.host in self.nodes)


class NothingSelectedError(HpcElasticError, LookupError):
    """What was asked for is not in the run; says what there is."""


def require_there(selection: Selection, sources: Iterable[LogSource]) -> None:
    """Refuse to look for what the run does not have.

    Args:
        selection: What is asked for.
        sources: All that the run has, of workers at least one.

    Raises:
        NothingSelectedError: a rank, node, attempt or round is not there, or not together.
    """
    found = list(sources)
    workers = [s for s in found if s.is_worker]
    _require("rank", selection.ranks, {s.rank for s in workers if s.rank is not None})
    _require("node", selection.nodes, {s.host for s in found if s.host})
    if selection.attempt is not None:
        there = {s.attempt for s in found if s.attempt is not None}
        _require("attempt", {selection.attempt}, there)
    if selection.round is not None:
        _require("round", {selection.round}, {s.round for s in workers if s.round is not None})
    if not any(map(selection.takes, found)):
        raise NothingSelectedError(_not_together(selection, workers))


def _require(option: str, wanted: Iterable[int | str], there: Iterable[int | str]) -> None:
    there = set(there)
    missing = sorted(w for w in wanted if w not in there)
    if missing:
        raise NothingSelectedError(
            f"--{option} {missing[0]}: the run has no such {option}; {_listed(option, there)}"
        )


def _listed(option: str, there: set[int | str]) -> str:
    numbers = [t for t in there if isinstance(t, int)]
    if not there:
        return "it has none so far"
    names = compress_indices(numbers) if numbers else ", ".join(sorted(map(str, there)))
    return f"it has {option if len(there) == 1 else option + 's'} {names}"


def _not_together(selection: Selection, workers: Sequence[LogSource]) -> str:
    places = {s.host for s in workers if not selection.ranks or s.rank in selection.ranks}
    where = f"; these ranks were on {', '.join(sorted(places))}" if selection.ranks else ""
    return f"the run has no output that is all of what was asked for{where}: leave an option out"


def merge(streams: Iterable[tuple[float, Iterator[LogLine]]]) -> Iterator[LogLine]:
    """Yield the lines of several files in order of time; a file is begun when its time comes.

    A run of days has tens of thousands of files, of which few are written at a time.

    Args:
        streams: For each file a time that none of its lines lies before, and its lines.
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


class Settling:
    """Brings lines that arrive from growing files into order, as far as waiting a little does.

    The clocks of nodes may differ: how long a line has waited is told by the reader's own clock,
    and whatever lies before a line that has waited goes with it.
    """

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._waiting: list[tuple[float, LogLine]] = []

    def add(self, lines: Iterable[LogLine], now: float) -> None:
        """Take in lines; of one file in its order.

        Args:
            lines: The lines.
            now: Monotonic seconds.
        """
        self._waiting.extend((now, line) for line in lines)

    def take(self, now: float) -> list[LogLine]:
        """Return those whose turn has come, in order."""
        waited = (line.time for at, line in self._waiting if now - at >= self._settle_s)
        return self._before(max(waited, default=None))

    def take_all(self) -> list[LogLine]:
        """Return all that wait, in order."""
        return self._before(max((line.time for _, line in self._waiting), default=None))

    def _before(self, time_s: float | None) -> list[LogLine]:
        if time_s is None:
            return []
        due = [line for _, line in self._waiting if line.time <= time_s]
        self._waiting = [(at, line) for at, line in self._waiting if line.time > time_s]
        return sorted(due, key=lambda line: line.time)


def readable(*, size: int, read: int, covered: int, waited_s: float) -> int:
    """Return up to which byte a growing file is to be read now.

    Args:
        size: Its length.
        read: What was read so far.
        covered: How far its index reaches.
        waited_s: Since when it has more than the index covers.
    """
    if covered > read:
        return min(covered, size)
    return size if waited_s >= INDEX_WAIT_S else read


def is_over(source: LogSource, newest: LogSource) -> bool:
    """Say whether a file will hardly grow any more: its task has gone on to another one.

    Args:
        source: The file.
        newest: The newest file of the same task, by attempt and round.
    """
    if source.attempt is None:
        return False
    ours, newests = source.attempt, newest.attempt or 0
    earlier = source.round is not None and source.round < (newest.round or 0)
    return ours < newests or (ours == newests and earlier)


def newest_of_tasks(sources: Iterable[LogSource]) -> dict[str, LogSource]:
    """Return the newest source of each task, by attempt and round."""
    newest: dict[str, LogSource] = {}
    for source in sorted(sources, key=lambda s: (s.attempt or 0, s.round or 0)):
        newest[source.task] = source
    return newest


# ---- Finds and reads the files of a run's output, however many and however long they are
# No file is held open, and of each one block is in memory at a time. A file that has vanished, or
# can not be read, is like an empty one: what the others hold is shown.


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
        self._attempts: dict[Path, tuple[list[str], str, list[LogSource]]] = {}
        self._hosts: dict[str, tuple[int, dict[int, str]]] = {}

    def sources(self) -> list[LogSource]:
        """Return all sources that there are now, sorted."""
        tasks = self._names(self._run.tasks)
        found = [source for task in tasks for source in self._of_task(task)]
        return sorted([*found, *self._captured(tasks)], key=lambda source: source.order)

    def _of_task(self, task: str) -> Iterator[LogSource]:
        folder = self._run.tasks / task
        for name in self._names(folder):
            number = name.removeprefix("attempt-")
            if number.isdecimal():
                host = self._host_of(task, int(number))
                yield from self._of_attempt(folder / name, task, int(number), host)

    def _of_attempt(self, folder: Path, task: str, attempt: int, host: str) -> list[LogSource]:
        names = self._names(folder)
        known = self._attempts.get(folder)
        if known is None or known[0] is not names or known[1] != host:
            found = [source_of(file, folder, task, attempt, host) for file in names]
            known = self._attempts[folder] = (names, host, [s for s in found if s is not None])
        return known[2]

    def _captured(self, tasks: Iterable[str]) -> Iterator[LogSource]:
        """Yield what Slurm has captured of the tasks, and of a gang's batch script."""
        submission = Submission(Path(self._spec.submission))
        there = set(self._names(submission.logs))
        names = dict.fromkeys([*tasks, *current_names(self._spec)])
        for name in dict.fromkeys(n for task in names for n in (task, queue_name(task))):
            path = submission.log(name)
            if path.name in there:
                hosts = set(self._hosts.get(name, (0, {}))[1].values())
                host = hosts.pop() if len(hosts) == 1 else ""
                yield LogSource(path, self._spec.launcher, name, host=host)

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


class LogReader:
    """Reads one file forwards, in blocks, also while it grows.

    Args:
        source: The file.
        offset: Where to begin: the beginning of a line.
    """

    def __init__(self, source: LogSource, offset: int = 0) -> None:
        self.source = source
        self.offset = offset
        """Up to where it has been read; a line without an end is held back."""
        self.index = Index(source.path)
        self._splitter = Splitter(offset)
        self._last = 0.0

    def size(self) -> int:
        """Return the length of the file."""
        return size_of(self.source.path)

    def read(self, until: int | None = None) -> list[LogLine] | None:
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

    def redrawn(self) -> LogLine | None:
        """Return what a progress bar shows now that has not come to its end."""
        state = self._splitter.state()
        self._last = max(self._last, changed(self.source.path)) if state else self._last
        return LogLine(self._last, self.source, state, timed=False) if state else None

    def rest(self) -> list[LogLine]:
        """Return the last line, if it has no end."""
        return self._lines(self._splitter.rest())

    def _lines(self, pieces: Iterable[tuple[int, str]]) -> list[LogLine]:
        found: list[LogLine] = []
        otherwise: float | None = None
        for end, text in pieces:
            known = self.index.time_at(end) if otherwise is None else None
            if known is None and otherwise is None:  # nor is any later line in the index
                otherwise = changed(self.source.path)
            self._last = max(self._last, known or otherwise or 0.0)
            found.append(LogLine(self._last, self.source, text, timed=known is not None))
        return found


def lines(source: LogSource, start: int = 0, until: int | None = None) -> Iterator[LogLine]:
    """Yield the lines of a file from the beginning of a line on, up to a byte or its end."""
    reader = LogReader(source, start)
    while (found := reader.read(until)) is not None:
        yield from found
    yield from reader.rest()


def begin_of(source: LogSource, since: float | None) -> float | None:
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


def start_of(source: LogSource, since: float | None) -> int:
    """Return the beginning of the first line that may have been written since a time."""
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

    Args:
        sources: The files, in their order.
        num_lines: So many.
        keep: Which lines count.
        since: Unix seconds before which no line is wanted.
        until: What to take for the end of a file; else its end.
    """
    order = {source.path: number for number, source in enumerate(sources)}
    newest = sorted(sources, key=lambda source: -changed(source.path))
    found: list[LogLine] = []
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
    source: LogSource, num_lines: int, keep: Keep, floor: int, until: int | None
) -> list[LogLine]:
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


# ---- From the bytes of a file of output to text that a terminal can show (pure)
# Progress bars redraw their line with ``\r``: of such a line the last state is shown, as on a
# terminal. What is no text, such as a tensor's bytes, becomes replacement characters. Control
# characters and escape sequences are left out, colours too where nobody sees them: a log must not
# clear the screen, nor set the window's title, of whoever reads it.


MAX_LINE = 1 << 16
"""Bytes; a longer line comes in pieces."""

_ESCAPES = (
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences: colours, the cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # strings: the window's title, links
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
_UNSHOWABLE = re.compile(_ESCAPES)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_PLAIN_AGAIN = "\x1b[0m"


def cleaned(text: str, *, colours: bool) -> str:
    """Return a line without what would disturb a terminal.

    Args:
        text: The line.
        colours: Keep what sets colours and styles; they end with the line.
    """
    if text.isprintable():
        return text

    def shown(m: re.Match[str]) -> str:
        return m[0] if colours and _COLOUR.fullmatch(m[0]) else ""

    found = _UNSHOWABLE.sub(shown, text)
    return found + _PLAIN_AGAIN if "\x1b" in found else found


class Splitter:
    """Takes the bytes of a file piece by piece, and gives its lines.

    Args:
        offset: Where in the file the first piece begins.
    """

    def __init__(self, offset: int = 0) -> None:
        self._held = b""
        self._end = offset
        self._is_redrawn = False

    def feed(self, data: bytes) -> list[tuple[int, str]]:
        """Return the lines that end in a piece, each with the byte at which it ends."""
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

    def state(self) -> str:
        """Return what a progress bar shows now that has no end of line yet; empty for others."""
        return _last_state(self._held).decode(errors="replace") if self._is_redrawn else ""

    def rest(self) -> list[tuple[int, str]]:
        """Return the last line, if it has no end: the file is over."""
        held, self._held = self._held, b""
        return self._pieces(held, self._end) if held else []

    def _overlong(self) -> list[tuple[int, str]]:
        """Return the beginning of a line of which too much is held; a redrawn one has none."""
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
    r"""Return what a terminal shows of a line at its end; ``\r\n`` is an end of line, too."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1] if states else b""

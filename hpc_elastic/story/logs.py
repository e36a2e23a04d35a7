"""The output of a run's workers, agents and tasks as one stream, in order of time (pure).

A run writes many files: for each attempt of each task, each round and each rank one for standard
output and one for standard error. A `Source` is one of them, a `Line` is a line of it with the time
at which it was written (`hpc_elastic.output_index`). `log_files` reads, `log_follow` follows.

Two rules hold throughout: lines of one file stay in its order, and lines of several files are
ordered by time, those of the same time by the order of their sources.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_elastic.errors import HpcElasticError
from hpc_elastic.rundir import AGENT_LOG
from hpc_elastic.slurm.nodelist import compress_indices

Stream = Literal["out", "err", "agent", "slurm", "local"]

SETTLE_S = 0.5
"""A line that is followed waits so long for earlier ones of other files."""
INDEX_WAIT_S = 1.0
"""What is in a file waits so long for the agent to write down when it came."""

_NAME = re.compile(r"round-(\d+)\.rank-(\d+)\.(out|err)")


@dataclass(frozen=True)
class Source:
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
class Line:
    """One line of output.

    Attributes:
        time: Unix seconds at which it was written; never less than that of the line before it.
        source: The file it is in.
        text: Without its end, as it was written: `log_text.cleaned` makes it fit to be shown.
        timed: Whether the time is its own, and not that of the file's last change.
    """

    time: float
    source: Source
    text: str
    timed: bool = True


Keep = Callable[[Line], bool]


def source_of(file: str, folder: Path, task: str, attempt: int, host: str) -> Source | None:
    """Return which output a file in the folder of an attempt is; None: it is none."""
    if file == AGENT_LOG:
        return Source(folder / file, "agent", task, attempt, host=host)
    m = _NAME.fullmatch(file)
    if m is None:
        return None
    stream: Stream = "out" if m[3] == "out" else "err"
    return Source(folder / file, stream, task, attempt, int(m[1]), int(m[2]), host)


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

    def takes(self, source: Source) -> bool:
        """Say whether a source is wanted."""
        if not source.is_worker:
            return self.agents and self._is_there(source)
        by_rank = not self.ranks or source.rank in self.ranks
        return by_rank and self.round in (None, source.round) and self._is_there(source)

    def _is_there(self, source: Source) -> bool:
        by_attempt = self.attempt is None or source.attempt in (None, self.attempt)
        return by_attempt and (not self.nodes or source.host in self.nodes)


class NothingSelectedError(HpcElasticError, LookupError):
    """What was asked for is not in the run; says what there is."""


def require_there(selection: Selection, sources: Iterable[Source]) -> None:
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


def _not_together(selection: Selection, workers: Sequence[Source]) -> str:
    places = {s.host for s in workers if not selection.ranks or s.rank in selection.ranks}
    where = f"; these ranks were on {', '.join(sorted(places))}" if selection.ranks else ""
    return f"the run has no output that is all of what was asked for{where}: leave an option out"


def merge(streams: Iterable[tuple[float, Iterator[Line]]]) -> Iterator[Line]:
    """Yield the lines of several files in order of time; a file is begun when its time comes.

    A run of days has tens of thousands of files, of which few are written at a time.

    Args:
        streams: For each file a time that none of its lines lies before, and its lines.
    """
    heap: list[tuple[float, int, Line | None, Iterator[Line]]]
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
        self._waiting: list[tuple[float, Line]] = []

    def add(self, lines: Iterable[Line], now: float) -> None:
        """Take in lines; of one file in its order.

        Args:
            lines: The lines.
            now: Monotonic seconds.
        """
        self._waiting.extend((now, line) for line in lines)

    def take(self, now: float) -> list[Line]:
        """Return those whose turn has come, in order."""
        waited = (line.time for at, line in self._waiting if now - at >= self._settle_s)
        return self._before(max(waited, default=None))

    def take_all(self) -> list[Line]:
        """Return all that wait, in order."""
        return self._before(max((line.time for _, line in self._waiting), default=None))

    def _before(self, time_s: float | None) -> list[Line]:
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


def is_over(source: Source, newest: Source) -> bool:
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


def newest_of_tasks(sources: Iterable[Source]) -> dict[str, Source]:
    """Return the newest source of each task, by attempt and round."""
    newest: dict[str, Source] = {}
    for source in sorted(sources, key=lambda s: (s.attempt or 0, s.round or 0)):
        newest[source.task] = source
    return newest

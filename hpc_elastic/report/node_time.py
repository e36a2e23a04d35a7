"""Where the node-seconds of a run went, and which share of them was useful training (pure).

Each attempt of each task has a node from its start to its end, and every moment of that is one of

    start       the task's process starts and imports, until it asks for a place in a round
    rendezvous  the group is being formed
    import      the workers start, import and get ready, until their first step
    restore     of that, what the `Checkpointer` takes to look for a checkpoint and to load it
    useful      steps that nobody made before
    replayed    steps that had been made before, and were lost with a node or a worker
    checkpoint  the training stands still for a checkpoint
    idle        others train, and this node does not

What goes on in the queue, before and between the attempts, is counted apart: no node stands still.
*Goodput* is the share of ``useful`` in all node-seconds. A lost step counts twice: as useful when
it was first made, as replayed when it is made again; so what was once said of a moment holds.

The times are the events': ``task`` (a node begins), ``joined``, ``round`` and
``round_stopped`` or a new ``leader`` (who is in a group, from when to when), ``first_step``,
``node_lost``, ``task_exited`` and ``end``; and of progress.jsonl, by which steps and checkpoints
are found in between. Clocks of nodes differ: whatever would end before it begins counts as nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from hpc_elastic.report.attempts import Attempt, Round, Size, attempts_of, rounds_of, sizes_of
from hpc_elastic.report.progress_log import Point

KINDS = (*("useful", "replayed", "checkpoint", "restore", "import", "rendezvous", "start", "idle"),)
"""What a node can be at, the best first."""

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    """A stretch of time.

    Attributes:
        begin: Unix seconds.
        end: Unix seconds.
        kind: What a node was at: one of `KINDS`, as above.
    """

    begin: float
    end: float
    kind: str

    @property
    def length_s(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class NodeTime:
    """One attempt of one task: where its time went.

    Attributes:
        task: Its name.
        attempt: How often it had been requeued.
        host: Its node.
        begin: Unix seconds.
        end: Unix seconds; now, if it has not ended.
        ended_by: What ended it, as in `Attempt`; None if it goes on.
        intervals: In order, without gaps.
    """

    task: str
    attempt: int
    host: str
    begin: float
    end: float
    ended_by: str | None
    intervals: tuple[Interval, ...]


@dataclass(frozen=True)
class Account:
    """Where the time of a run went.

    Attributes:
        nodes: Every attempt of every task, in order of their beginning.
        queued: The time that tasks waited for a node, as intervals of kind ``queue``, by task.
        sizes: How the size of the group changed.
        counted: Whether any step is known; without one, nothing can be said of goodput.
    """

    nodes: tuple[NodeTime, ...]
    queued: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    sizes: tuple[Size, ...] = ()
    counted: bool = False

    @property
    def seconds(self) -> dict[str, float]:
        """Node-seconds by kind, all of `KINDS`."""
        total = dict.fromkeys(KINDS, 0.0)
        for node in self.nodes:
            for interval in node.intervals:
                total[interval.kind] += interval.length_s
        return total

    @property
    def node_s(self) -> float:
        """Node-seconds since each task was started, without its time in the queue."""
        return sum(node.end - node.begin for node in self.nodes)

    @property
    def queue_s(self) -> float:
        """Seconds for which tasks waited for a node, added up."""
        return sum((i.length_s for waited in self.queued.values() for i in waited), 0.0)

    @property
    def goodput(self) -> float | None:
        """The share of useful node-seconds, from 0 to 1; None where nothing is known of it."""
        total = self.node_s
        return self.seconds["useful"] / total if self.counted and total > 0 else None


def account(
    events: Sequence[Event],
    points: Sequence[Point],
    *,
    now: float,
    running: Collection[str] | None = None,
    waiting: Collection[str] = (),
    submitted: float | None = None,
    ft: bool = False,
) -> Account:
    """Return where the time of a run went, so far.

    Args:
        events: Of all tasks, in order of time.
        points: Its progress, in order of time; without them replays and checkpoints are not seen.
        now: Unix seconds; for a run that has ended, when it did.
        running: Tasks that have a node, as the scheduler says; None: it was not asked, or did not
            answer. A task that it does not name has ended when it was last heard of.
        waiting: Tasks that wait for one.
        submitted: When the run was submitted; None: nothing is known of its first wait.
        ft: Each node is a replica that lives on when others come and go (`RunSpec.ft`).
    """
    attempts = attempts_of(events, points, now=now, running=running)
    rounds = rounds_of(events, now=now, ft=ft)
    courses = _courses(rounds, points)
    trained = [Interval(r.trains_from, r.end, "idle") for r in rounds if r.trains_from is not None]
    nodes = tuple(_node_time(attempt, rounds, courses, trained) for attempt in attempts)
    resumed = [float(e["time"]) for e in events if e["kind"] == "resume"]
    queued = _queued(attempts, waiting, now=now, submitted=submitted, resumed=resumed)
    sizes = tuple(sizes_of(rounds, attempts, ft=ft))
    return Account(nodes, queued, sizes, counted=any(r.begun for r in rounds))


# ---- one round, the same for all of its nodes ----------------------------------------------


def _courses(rounds: Sequence[Round], points: Sequence[Point]) -> dict[int, list[Interval]]:
    """Return what each round was at, by its number: useful, replayed, checkpoint."""
    high, courses = 0, {}
    by_round: dict[int, list[Point]] = {}
    for point in points:
        by_round.setdefault(point.round, []).append(point)
    for one in rounds:
        if one.trains_from is None:
            continue
        seen = [p for p in by_round.get(one.number, ()) if one.trains_from <= p.time <= one.end]
        known = -1 if one.counted else high
        made = _steps(one, seen)
        goes_on = one.still_trains or not made  # replicas that live on lose no step
        fresh_from = one.trains_from if goes_on else _passes(made, known)
        kinds = _replayed_first(one.trains_from, one.end, fresh_from)
        courses[one.number] = _under(_blocked(seen), kinds)
        saved = (p.checkpoint for p in seen if p.checkpoint is not None)
        high = max([high, *(step for _, step in made), *saved])
    return courses


def _steps(one: Round, seen: Sequence[Point]) -> list[tuple[float, int]]:
    """Return when which step was made.

    A leader's first looks may still show what was heard of the round before: nothing beyond that.
    """
    first = min(one.begun.values(), key=lambda begun: begun.time, default=None)
    told = [(p.time, p.step) for p in seen if p.step is not None]
    return told if first is None else [(first.time, first.step), *told]


def _passes(made: Sequence[tuple[float, int]], high: int) -> float | None:
    """Return when the first step beyond one was made; None if it was not yet."""
    if made[0][1] > high:
        return made[0][0]
    for (s, before), (t, step) in pairwise(made):
        if step > high:
            return s + (t - s) * max(0, high - before) / (step - before)
    return None


def _replayed_first(begin: float, end: float, fresh_from: float | None) -> list[Interval]:
    """Return what was replayed, up to a moment (None: all of it), and what was useful then."""
    middle = end if fresh_from is None else min(max(begin, fresh_from), end)
    both = (Interval(begin, middle, "replayed"), Interval(middle, end, "useful"))
    return [interval for interval in both if interval.length_s > 0]


def _blocked(seen: Sequence[Point]) -> Iterator[Interval]:
    """Yield when the training stood still for checkpoints, as it was known at the next point."""
    for p, q in pairwise(seen):
        if q.blocked_s > p.blocked_s:
            yield Interval(max(p.time, q.time - q.blocked_s + p.blocked_s), q.time, "checkpoint")


def _under(above: Iterable[Interval], below: Sequence[Interval]) -> list[Interval]:
    """Return intervals laid over others."""
    found: list[Interval] = []
    rest = list(below)
    for top in above:
        keep: list[Interval] = []
        for low in rest:
            if low.begin < top.begin:
                found.append(Interval(low.begin, min(low.end, top.begin), low.kind))
            if low.end > top.end:
                keep.append(Interval(max(low.begin, top.end), low.end, low.kind))
        found.append(top)
        rest = keep
    return [*found, *rest]


# ---- one attempt of one task ---------------------------------------------------------------


def _node_time(
    attempt: Attempt,
    rounds: Sequence[Round],
    courses: Mapping[int, list[Interval]],
    trained: Sequence[Interval],
) -> NodeTime:
    at = attempt.end if attempt.joined is None else max(attempt.begin, attempt.joined)
    found = [Interval(attempt.begin, at, "start")]
    for one in rounds:
        if attempt.key not in one.members or one.end <= at or one.begin >= attempt.end:
            continue
        begin, end = max(at, one.begin), min(one.end, attempt.end)
        found += _waited(at, begin, trained)
        found += _in_round(attempt, one, courses.get(one.number, []), begin, end)
        at = max(at, end)
    found += _waited(at, attempt.end, trained)
    intervals = tuple(_joined(interval for interval in found if interval.length_s > 0))
    return NodeTime(
        attempt.task, attempt.number, attempt.host, attempt.begin, attempt.end, attempt.ended_by,
        intervals,
    )  # fmt: skip


def _in_round(
    attempt: Attempt, one: Round, course: Sequence[Interval], begin: float, end: float
) -> Iterator[Interval]:
    """Yield what a member of a round was at."""
    begun = one.begun.get(attempt.key)
    if begun is None and attempt.key in one.going_on:
        trains = begin
    elif begun is None or begun.time >= end:
        yield Interval(begin, end, "import")
        return
    else:
        trains = max(begin, begun.time)
        restore = max(begin, trains - begun.restore_s)
        yield Interval(begin, restore, "import")
        yield Interval(restore, trains, "restore")
    yield from _cut(course, trains, end)


def _cut(intervals: Sequence[Interval], begin: float, end: float) -> Iterator[Interval]:
    """Yield the parts of intervals, in order, that lie in a stretch of time."""
    first = bisect_right(intervals, begin, key=lambda interval: interval.end)
    for i in islice(intervals, first, None):
        if i.begin >= end:
            return
        yield Interval(max(begin, i.begin), min(end, i.end), i.kind)


def _waited(begin: float, end: float, trained: Sequence[Interval]) -> Iterator[Interval]:
    """Yield what a node was at outside a round: idle while others train, else it is formed."""
    idle = list(_cut(trained, begin, end)) if begin < end else []
    yield from _under(idle, [Interval(begin, end, "rendezvous")] if begin < end else [])


def _joined(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield intervals in order, neighbours of one kind as one."""
    last: Interval | None = None
    for interval in sorted(intervals, key=lambda i: i.begin):
        if last is not None and last.kind == interval.kind and interval.begin <= last.end + 1e-6:
            last = Interval(last.begin, max(last.end, interval.end), last.kind)
            continue
        if last is not None:
            yield last
        last = interval
    if last is not None:
        yield last


_NOTED_WITHIN_S = 5.0
"""A run that is resumed is noted right after the first of its new tasks may have started."""


def _queued(
    attempts: Sequence[Attempt],
    waiting: Collection[str],
    *,
    now: float,
    submitted: float | None,
    resumed: Sequence[float],
) -> dict[str, tuple[Interval, ...]]:
    """Return when each task waited for a node: one of a resumed run from then on."""
    by_task: dict[str, list[Attempt]] = {task: [] for task in waiting}
    for attempt in attempts:
        by_task.setdefault(attempt.task, []).append(attempt)
    queued = {}
    for task, its in by_task.items():
        begins = [*(attempt.begin for attempt in its), now if task in waiting else None]
        first = its[0].begin if its else now
        began = [time for time in resumed if time <= first + _NOTED_WITHIN_S]
        ends = [max(began, default=submitted), *(attempt.end for attempt in its)]
        queued[task] = tuple(
            Interval(end, begin, "queue")
            for end, begin in zip(ends, begins, strict=True)
            if end is not None and begin is not None and begin > end
        )
    return queued

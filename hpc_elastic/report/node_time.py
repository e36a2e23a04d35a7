"""Where the node-seconds of a run went, and which share of them was useful training (pure).

An attempt of a task has its node from its start to its end. Each moment of that is one of `KINDS`.
Time in the queue, before and between attempts, is counted apart: no node is held. *Goodput* is the
share of ``useful`` in all node-seconds. A lost step counts twice: as useful when it is first made,
as replayed when it is made again. So the kind of a past moment does not change.

The times are those of the events: ``task`` (a node starts), ``joined``, ``round`` and
``round_stopped`` or a new ``leader`` (members of a group, from when to when), ``first_step``,
``node_lost``, ``task_exited`` and ``end``. Lines of progress.jsonl show steps and checkpoints in
between. Clocks of nodes differ: an interval that would end before it begins is dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from operator import attrgetter

from hpc_elastic.report import KINDS, grouped
from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt, time_of
from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.events import Event

_BEGIN, _END = attrgetter("begin"), attrgetter("end")


@dataclass(slots=True)  # a run of weeks has 300,000; a frozen one takes thrice as long to make
class Interval:
    """A stretch of time."""

    begin: float  # Unix seconds
    end: float  # Unix seconds
    kind: str  # what the node time was spent on: one of `KINDS`

    @property
    def length_s(self) -> float:
        """Its length in seconds."""
        return self.end - self.begin


@dataclass(frozen=True)
class NodeTime:
    """One attempt of one task, and where its time went."""

    task: str  # its name
    attempt: int  # number of requeues before it
    host: str  # its node
    begin: float  # start of its process, in Unix seconds
    end: float  # Unix seconds; now, if it goes on
    ended_by: str | None
    """``preempted``, ``requeued``, ``cancelled`` or what else SIGTERM meant (`means` of the event
    `task_exited`; ``signal`` if unknown); ``time_limit``, ``asked``; ``agent_failed``;
    ``nodes_requeued``; ``node_lost``: the group lost it; ``silence``: no event of its end; ``end``:
    of the run. None: it goes on."""
    intervals: tuple[Interval, ...]  # in order, without gaps


@dataclass(frozen=True)
class Size:
    """The size of the group from some time on."""

    time: float  # from when on, in Unix seconds
    nodes: int  # its nodes; 0 while it forms again, or is over
    world_size: int  # its workers


@dataclass(frozen=True)
class GivenBack:
    """What a run gave back for jobs of others (``launcher.give_way``)."""

    jobs: int = 0  # number of these jobs
    nodes: int = 0  # number of times that a node was left for one
    node_s: float = 0.0  # node-seconds from then until the tasks had nodes again, or until now


@dataclass(frozen=True)
class Account:
    """Where the time of a run went, by attempts in order of their beginning."""

    nodes: tuple[NodeTime, ...]
    queued: Mapping[str, tuple[Interval, ...]] = field(default_factory=dict)
    """By task, the time that it waited for a node, as intervals of kind ``queue``."""
    sizes: tuple[Size, ...] = ()
    counted: bool = False  # whether any step is known; without one, goodput is unknown
    given_back: GivenBack = field(default_factory=GivenBack)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Node-seconds by kind, all of `KINDS`."""
        total = dict.fromkeys(KINDS, 0.0)
        for node in self.nodes:
            for interval in node.intervals:
                total[interval.kind] += interval.length_s
        return total

    @property
    def node_s(self) -> float:
        """Node-seconds of all attempts, without their time in the queue."""
        return sum(node.end - node.begin for node in self.nodes)

    @property
    def queue_s(self) -> float:
        """Seconds for which tasks waited for a node, added up."""
        return sum((i.length_s for waited in self.queued.values() for i in waited), 0.0)

    @property
    def goodput(self) -> float | None:
        """The share of useful node-seconds, from 0 to 1; None if unknown."""
        total = self.node_s
        return self.seconds["useful"] / total if self.counted and total > 0 else None


def account(
    history: EventIndex,
    points: Sequence[Point],
    *,
    now: float,
    running: Collection[str] | None = None,
    waiting: Collection[str] = (),
    submitted: float | None = None,
) -> Account:
    """Return where the time of a run went, until ``now`` or its end, in Unix seconds.

    Without points, replays and checkpoints are not found. ``running`` and ``waiting`` are tasks as
    the scheduler lists them; if ``running`` is not None, a task outside of it has ended at the last
    sign of the run. Without ``submitted`` its first wait is unknown.
    """
    attempts = _attempts(history, points, now=now, running=running)
    rounds = _rounds(history, now)
    courses = _courses(rounds, points)
    trained = [Interval(r.trains_from, r.end, "idle") for r in rounds if r.trains_from is not None]
    of_member: dict[TaskAttempt, list[_Trained]] = {}
    for one in rounds:
        for member in one.members:
            of_member.setdefault(member, []).append(one)
    nodes = tuple(
        _node_time(held, of_member.get(held.attempt, ()), courses, trained) for held in attempts
    )
    resumed = list(map(time_of, history.of("resume")))
    queued = _queued(attempts, waiting, now=now, submitted=submitted, resumed=resumed)
    sizes = tuple(_sizes(rounds, attempts, has_replicas=history.has_replicas))
    given = [held for held in attempts if held.attempt.given_for and held.ended_by is not None]
    away_s = 0.0
    for held in given:
        waits = (i.length_s for i in queued.get(held.attempt.task, ()) if i.end > held.end)
        away_s += next(waits, 0.0)
    back = GivenBack(len({held.attempt.given_for for held in given}), len(given), away_s)
    return Account(nodes, queued, sizes, any(r.first_steps for r in rounds), back)


# ---- attempts: from when to when they had their nodes


@dataclass(frozen=True)
class _Held:
    """The time for which an attempt had its node; see `NodeTime`."""

    attempt: TaskAttempt
    begin: float
    joined: float | None
    end: float
    ended_by: str | None


def _attempts(
    history: EventIndex, points: Sequence[Point], *, now: float, running: Collection[str] | None
) -> list[_Held]:
    signs = sorted([*(event["time"] for event in history.events), *(p.time for p in points)])
    run_ends, resumes = (list(map(time_of, history.of(kind))) for kind in ("end", "resume"))
    found = []
    for of_task in history.by_task():
        for attempt, following in zip_longest(of_task, of_task[1:]):
            begin = attempt.begin or 0.0
            next_begin = math.inf if following is None else following.begin or 0.0
            # The latest time at which it was over. A run that has ended may be resumed in new
            # tasks, which may start a moment before the event `resume`; older tasks write nothing
            # after it.
            run_end = min((end for end in run_ends if end >= begin), default=math.inf)
            replaced = (math.nextafter(t, 0.0) for t in resumes if t > attempt.last)
            over = min([run_end, *replaced])
            limit = min(now, over, next_begin)
            end, why = attempt.lost_at, None if attempt.lost_at is None else "node_lost"
            if exits := attempt.exits:
                reason = str(exits[-1].get("reason") or exits[-1]["kind"])
                means = exits[-1].get("means") if reason == "signal" else None
                end, why = time_of(exits[0]), str(means or reason)
            may_run = running is None or attempt.task in running
            if end is None and not (
                may_run and over == next_begin == math.inf
            ):  # it ended with the last sign of the run
                at = bisect_right(signs, limit)
                end = signs[at - 1] if at else limit
                why = "end" if over == run_end < math.inf and over <= next_begin else "silence"
            end = max(begin, min(limit, limit if end is None else end))
            joined = None if attempt.joined is None else min(attempt.joined, end)
            found.append(_Held(attempt, begin, joined, end, why))
    return sorted(found, key=lambda held: held.begin)


# ---- rounds: when they trained


@dataclass(frozen=True)
class _Trained:
    round: Round
    members: frozenset[TaskAttempt]
    end: float
    first_steps: Mapping[TaskAttempt, Event]
    """The event of the first step of each member whose workers have made one; of a replica, the
    last that it made during the round."""
    going_on: frozenset[TaskAttempt]  # with ft=true: whose workers trained in the round before
    trains_from: float | None  # when its first node made a step; None if none did
    still_trains: bool  # whether it trains from its beginning, by such members


def _rounds(history: EventIndex, now: float) -> list[_Trained]:
    found: list[_Trained] = []
    attempts = history.attempts if history.has_replicas else ()
    made_by = {a: list(a.first_steps.values()) for a in attempts}  # in order of time
    for round_ in history.rounds:
        members, end = frozenset(round_.members), max(round_.time, min(round_.over, now))
        first_steps, going_on = {}, frozenset[TaskAttempt]()
        for member in round_.members:
            made = member.first_steps.get(round_.number)
            if history.has_replicas:
                at = bisect_right(made_by[member], end, key=time_of)
                last = made_by[member][at - 1] if at else None
                made = last if last is not None and time_of(last) >= round_.time else None
            if made is not None:
                first_steps[member] = made
        before = found[-1] if history.has_replicas and found else None
        if before is not None and before.end >= round_.time:
            at_work = {*before.first_steps, *before.going_on}
            going_on = frozenset(m for m in members if m in at_work and m not in first_steps)
        still = bool(going_on) and before is not None and before.trains_from is not None
        first = min(map(time_of, first_steps.values()), default=None)
        begun = round_.time if still else first
        found.append(_Trained(round_, members, end, first_steps, going_on, begun, still))
    return found


def _sizes(
    rounds: Sequence[_Trained], attempts: Sequence[_Held], *, has_replicas: bool
) -> Iterator[Size]:
    """Yield how the size of the group changed; a group is over with the last of its members."""
    ends = {held.attempt: held.end for held in attempts if held.ended_by is not None}
    for one, following in zip_longest(rounds, rounds[1:]):
        members, world_size = one.round.members, one.round.world_size
        yield Size(one.round.time, len(members), world_size)
        end = min(one.end, max((ends.get(m, one.end) for m in members), default=one.end))
        left = len(members)
        for time in sorted(ends[member] for member in members if member in ends):
            if has_replicas and one.round.time < time < end:  # the others, all of one size, go on
                left -= 1
                yield Size(time, left, world_size * left // len(members))
        goes_on = any if has_replicas else all
        stays = following is None and goes_on(member not in ends for member in members)
        if not stays and (following is None or following.round.time > end):
            yield Size(end, 0, 0)


def _courses(rounds: Sequence[_Trained], points: Sequence[Point]) -> dict[int, list[Interval]]:
    high, courses = 0, {}
    by_round = grouped(points, lambda point: point.round)
    for one in rounds:
        begin, end = one.trains_from, one.end
        if begin is None:
            continue
        seen = [p for p in by_round.get(one.round.number, ()) if begin <= p.time <= end]
        firsts = sorted(one.first_steps.values(), key=time_of)
        made = [(time_of(first), int(first["step"])) for first in firsts[:1]]
        made += [(p.time, p.step) for p in seen if p.step is not None]
        # steps that each worker counts from 0 replay none that are known
        is_counted = any(e.get("counted") and e.get("restored") is None for e in firsts)
        fresh_from: float | None = begin
        if made and not one.still_trains:  # surviving replicas lose no step
            fresh_from = _time_beyond(made, -1 if is_counted else high)
        middle = end if fresh_from is None else min(max(begin, fresh_from), end)
        kinds = (Interval(begin, middle, "replayed"), Interval(middle, end, "useful"))
        blocked = ((q.time, q.blocked_s - p.blocked_s, p.time) for p, q in pairwise(seen))
        waits = [Interval(max(p, t - s), t, "checkpoint") for t, s, p in blocked if s > 0]
        courses[one.round.number] = _under(waits, [i for i in kinds if i.length_s > 0])
        saved = (p.checkpoint for p in seen if p.checkpoint is not None)
        high = max([high, *(step for _, step in made), *saved])
    return courses


def _time_beyond(made: Sequence[tuple[float, int]], high: int) -> float | None:
    if made[0][1] > high:
        return made[0][0]
    for (s, before), (t, step) in pairwise(made):
        if step > high:
            return s + (t - s) * max(0, high - before) / (step - before)
    return None


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


def _node_time(
    held: _Held,
    rounds: Sequence[_Trained],
    courses: Mapping[int, list[Interval]],
    trained: Sequence[Interval],
) -> NodeTime:
    attempt = held.attempt
    at = held.end if held.joined is None else max(held.begin, held.joined)
    found = [Interval(held.begin, at, "start")]
    for one in rounds:
        if one.end <= at or one.round.time >= held.end:
            continue
        begin, end = max(at, one.round.time), min(one.end, held.end)
        found += _waited(at, begin, trained)
        at, first = max(at, end), one.first_steps.get(attempt)
        trains = begin
        if first is not None:
            trains = max(begin, time_of(first))
            if time_of(first) < end:
                restore = max(begin, trains - float(first.get("restore_s") or 0.0))
                found += [Interval(begin, restore, "import"), Interval(restore, trains, "restore")]
        if (first is None and attempt not in one.going_on) or trains >= end:
            found.append(Interval(begin, end, "import"))
        else:
            found += _cut(courses.get(one.round.number, []), trains, end)
    found += _waited(at, held.end, trained)
    intervals = tuple(_joined(interval for interval in found if interval.length_s > 0))
    names = attempt.task, attempt.attempt, attempt.host
    return NodeTime(*names, held.begin, held.end, held.ended_by, intervals)


def _cut(intervals: Sequence[Interval], begin: float, end: float) -> Iterator[Interval]:
    """Yield the parts of intervals, in order, that lie in a stretch of time."""
    for at in range(bisect_right(intervals, begin, key=_END), len(intervals)):
        i = intervals[at]
        if i.begin >= end:
            return
        is_whole = begin <= i.begin and i.end <= end
        yield i if is_whole else Interval(max(begin, i.begin), min(end, i.end), i.kind)


def _waited(begin: float, end: float, trained: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the time of a node outside a round: idle while others train, else rendezvous."""
    if begin < end:
        yield from _under(_cut(trained, begin, end), [Interval(begin, end, "rendezvous")])


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return intervals in order; neighbours of one kind are one."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=_BEGIN):
        last = found[-1] if found else None
        if last is not None and last.kind == interval.kind and interval.begin <= last.end + 1e-6:
            found[-1] = Interval(last.begin, max(last.end, interval.end), last.kind)
        else:
            found.append(interval)
    return found


_RESUMED_WITHIN_S = 5.0  # from the start of the first of the new tasks to the event `resume`


def _queued(
    attempts: Sequence[_Held],
    waiting: Collection[str],
    *,
    now: float,
    submitted: float | None,
    resumed: Sequence[float],
) -> dict[str, tuple[Interval, ...]]:
    """Return when each task waited for a node; tasks of a resumed run from then on."""
    by_task = grouped(attempts, lambda held: held.attempt.task)
    queued = {}
    for task, its in ({task: list[_Held]() for task in waiting} | by_task).items():
        begins = [*(held.begin for held in its), now if task in waiting else None]
        first = its[0].begin if its else now
        began = [time for time in resumed if time <= first + _RESUMED_WITHIN_S]
        ends = [max(began, default=submitted), *(held.end for held in its)]
        queued[task] = tuple(
            Interval(end, begin, "queue")
            for end, begin in zip(ends, begins, strict=True)
            if end is not None and begin is not None and begin > end
        )
    return queued

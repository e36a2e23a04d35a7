"""The events of a run, parsed once: attempts of tasks, rounds, leaders, ends (pure).

`EventIndex` is what the timeline and the account of node time are made of. It assigns each event to
the attempt of a task that it concerns. Events of unknown kinds are ignored, and events may be
missing: the file of a node can be lost, and a leader can fail before it writes.

A run of weeks has a million events: each query is a search in a list by time, and no reader goes
over all rounds for each round, attempt or event.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.events import Event

_EXITS = ("task_exited", "agent_failed", "nodes_requeued")  # an attempt reports its own end
_ENDS = (*_EXITS, "agent_killed", "node_lost", "replica_left")
_BOUNDS = ("round", "round_stopped", "leader", "nodes_requeued", "end")  # a round begins or is over
time_of = itemgetter("time")
"""Returns when an event was written, in Unix seconds."""


@dataclass(eq=False)
class TaskAttempt:
    """One attempt of one task on a node; times in Unix seconds. ``host`` is empty if unknown."""

    task: str
    attempt: int  # number of requeues before it
    host: str = ""
    begin: float | None = None  # start of its process; None if it has written no event of its start
    started: float | None = None
    joined: float | None = None  # when it first asked to join a round; None if it never did
    last: float = -math.inf
    notice: Event | None = None  # the preemption notice; that of its agent, if there is one
    preempted_by: str = ""  # the user who preempted its node by a command; empty if none did
    given_for: str = ""  # the job for which its node was given back; empty if it was not
    ends: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Events of its end, its own and those of leaders, by kind, in order of time. A leader that
    lost its own connections reports members of later rounds as lost."""
    lost_at: float | None = None  # when it was lost, if nothing shows that it came back
    stopped: dict[int, Event] = field(default_factory=dict)
    first_steps: dict[int, Event] = field(default_factory=dict)
    """Of its workers, by round: that they were stopped; their first step."""

    def add(self, event: Event) -> None:
        """Add an event that concerns it, after all earlier ones."""
        kind, time = event["kind"], time_of(event)
        self.host = self.host or str(event.get("host") or "")
        self.last = time
        if kind == "first_step":
            self.first_steps[event["round"]], self.lost_at = event, None
        elif kind == "workers_stopped":
            self.stopped[event["round"]] = event
        elif kind == "joined":
            self.joined, self.lost_at = time if self.joined is None else self.joined, None
        elif kind == "leader":
            self.lost_at = None
        elif kind == "task" and self.started is None:
            made = event.get("started")
            self.started, self.begin = time, time if made is None else min(time, float(made))
        elif kind == "preemption_notice":
            if self.notice is None or _rank(event) > _rank(self.notice):
                self.notice = event
        elif kind in _ENDS and not _is_of_many(event):
            self.ends[kind].append(event)
            self.lost_at = time if kind == "node_lost" else self.lost_at

    @property
    def exits(self) -> list[Event]:
        """The events by which it reported its own end, in order of time."""
        return sorted((e for kind in _EXITS for e in self.ends.get(kind, ())), key=time_of)

    def ends_after(self, time: float, until: float = math.inf) -> dict[str, Event]:
        """Return the first of its ends in ``(time, until]``, by kind."""
        of_kinds = self.ends.items()
        later = {kind: e[bisect_right(e, time, key=time_of) :] for kind, e in of_kinds}
        return {kind: e[0] for kind, e in later.items() if e and time_of(e[0]) <= until}


def _rank(notice: Event) -> tuple[bool, bool]:
    # a signal is above a request, an agent above a leader
    return notice.get("reason") == "signal", "host" not in notice


def _is_of_many(event: Event) -> bool:
    """Return whether this is the leader's event of several requeued nodes."""
    return event["kind"] == "nodes_requeued" and "nodes" in event


@dataclass(frozen=True)
class Round:
    """One agreement on the group."""

    number: int  # from 1 on
    time: float
    term: int  # of the leader that closed it
    members: tuple[TaskAttempt, ...]  # by group rank
    world_size: int
    placed: frozenset[str] | None  # with ft=true: tasks whose workers start; else None
    over: float
    """When it was stopped, its leader was replaced, or another round or the end of the run
    followed; infinity if it goes on."""


class EventIndex:
    """The events of a run by what they concern; points show how far killed workers had come."""

    def __init__(self, events: Iterable[Event], points: Iterable[Point] = ()) -> None:
        self._points = points
        self.events: Sequence[Event] = sorted(events, key=time_of)
        self._attempts: dict[str, dict[int, TaskAttempt]] = defaultdict(dict)
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            kind = event["kind"]
            self._by_kind[kind].append(event)
            if isinstance(number := event.get("attempt"), int):
                self.attempt(event["task"], number).add(event)
            elif kind == "preempt":
                if newest := self._newest(event["node_task"]):
                    newest.preempted_by = str(event["user"])
            elif kind == "nodes_given_back":
                for newest in filter(None, map(self._newest, event["tasks"])):
                    newest.given_for = f"job {event['job']} of {event['user']}"
            elif newest := self._newest(event["task"]):
                newest.add(event)
        self.has_replicas = any("placed" in event for event in self.of("round"))  # with ft=true
        self.rounds = self._parse_rounds()  # the rounds, by number

    def _newest(self, task: str) -> TaskAttempt | None:
        of_task = self._attempts[task]
        return of_task[next(reversed(of_task))] if of_task else None

    def _parse_rounds(self) -> list[Round]:
        found: dict[int, Round] = {}
        over = math.inf
        for event in reversed(self.events):
            kind = event["kind"]
            if kind not in _BOUNDS:
                continue
            time = time_of(event)
            if kind == "round":
                number, members = int(event["number"]), []
                for member in event["members"]:
                    attempt = self.attempt(member["task"], int(member["attempt"]))
                    attempt.host = attempt.host or str(member.get("host") or "")
                    if attempt.lost_at is not None and attempt.lost_at < time:
                        attempt.lost_at = None
                    members.append(attempt)
                placed = frozenset(event.get("placed") or ()) if self.has_replicas else None
                found[number] = Round(
                    number, time, int(event.get("term") or 0), tuple(members),
                    int(event.get("world_size") or 0), placed, max(over, time),
                )  # fmt: skip
            stops = kind in ("round_stopped", "leader")
            if kind in ("round", "end") or (_is_of_many(event) if self.has_replicas else stops):
                over = time
        return [found[number] for number in sorted(found)]

    @cached_property
    def last_points(self) -> dict[int, Point]:
        """The furthest point of each round, by number."""
        found: dict[int, Point] = {}
        for point in self._points:
            step = found[point.round].step if point.round in found else None
            if point.step is not None and point.step >= (step or 0):
                found[point.round] = point
        return found

    def attempt(self, task: str, number: int) -> TaskAttempt:
        """Return an attempt of a task; it is empty if no event mentions it."""
        of_task = self._attempts[task]
        if number not in of_task:
            of_task[number] = TaskAttempt(task, number)
        return of_task[number]

    @property
    def attempts(self) -> Iterator[TaskAttempt]:
        """All attempts of all tasks."""
        return (a for of_task in self._attempts.values() for a in of_task.values())

    def by_task(self) -> Iterator[list[TaskAttempt]]:
        """Yield the attempts of each task whose start is known, in order of time."""
        for of_task in self._attempts.values():
            started = [a for a in of_task.values() if a.started is not None]
            yield sorted(started, key=lambda attempt: attempt.started or 0.0)

    def of(self, *kinds: str, after: float = 0.0, until: float = math.inf) -> list[Event]:
        """Return the events of some kinds in ``(after, until]``, in order of time."""
        found: list[Event] = []
        for events in (self._by_kind.get(kind, []) for kind in kinds):
            end = bisect_right(events, until, key=time_of)
            found += events[bisect_right(events, after, hi=end, key=time_of) : end]
        return found if len(kinds) == 1 else sorted(found, key=time_of)

    @cached_property
    def leaders(self) -> list[Event]:
        """The events of elected leaders, by term."""
        return sorted(self.of("leader"), key=lambda e: int(e["term"]))

    @cached_property
    def leader_of(self) -> dict[int, Event]:
        """The event of the leader of each term."""
        return {int(e["term"]): e for e in reversed(self.leaders)}

    @cached_property
    def successions(self) -> dict[str, list[tuple[Event, Event]]]:
        """Task -> the events of its leaderships that another task ended, each with that one's."""
        found: dict[str, list[tuple[Event, Event]]] = defaultdict(list)
        for before, after in pairwise(self.leaders):
            if before["task"] != after["task"]:
                found[before["task"]].append((before, after))
        return found

    @cached_property
    def excluded(self) -> dict[str, Event]:
        """The exclusions of nodes, by host."""
        return {str(e["host"]): e for e in self.of("excluded")}

    @cached_property
    def ends(self) -> dict[int, Event]:
        """The events that end the run, by generation: a failed run may be resumed."""
        by_generation = {self.generation_at(time_of(e)): e for e in reversed(self.of("end"))}
        return dict(sorted(by_generation.items()))

    @property
    def end_event(self) -> Event | None:
        """The event that ends the run; None if it goes on."""
        return self.ends.get(len(self.of("resume")))

    def generation_at(self, time: float) -> int:
        """Return the number of resumptions until then."""
        return len(self.of("resume", until=time))

    def host_at(self, task: str, time: float) -> str:
        """Return the host of a task at a time; the name of the task if that is unknown."""
        return str(_last(self._hosts.get(task, ()), time) or task)

    @cached_property
    def _hosts(self) -> dict[str, _Course]:
        return {
            task: _course([(a.started or 0.0, a.host) for a in of_task.values() if a.host])
            for task, of_task in self._attempts.items()
        }

    def member_until(self, task: str, time: float) -> TaskAttempt:
        """Return the last attempt of a task that was a member until a time; else its first."""
        return self.attempt(task, _last(self._memberships.get(task, ()), time) or 0)

    @cached_property
    def _memberships(self) -> dict[str, _Course]:
        found: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for round_ in self.rounds:
            for member in round_.members:
                of_task = found[member.task]
                if not of_task or member.attempt > of_task[-1][1]:
                    of_task.append((round_.time, member.attempt))
        return {task: _course(of_task) for task, of_task in found.items()}

    def last_left(self, host: str, until: float) -> float | None:
        """Return when a node last left the group; None if it was no member before."""
        times = self._departures.get(host, [])
        at = bisect_right(times, until)
        return times[at - 1] if at else None

    @cached_property
    def _departures(self) -> dict[str, list[float]]:
        stops: dict[int, list[Event]] = defaultdict(list)
        for event in self.of("round_stopped"):
            stops[int(event.get("round", 0))].append(event)
        found: dict[str, list[float]] = defaultdict(list)
        for before, after in pairwise(self.rounds):
            number = before.number
            stopped = [m.stopped[number] for m in before.members if number in m.stopped]
            of_all = map(time_of, [*stops.get(number, ()), *self.ends.values(), *stopped])
            over = min((t for t in of_all if before.time < t <= after.time), default=math.inf)
            still = set(after.members)
            for member in before.members:
                if member in still and "replica_left" not in member.ends:
                    continue
                ends = member.ends_after(before.time, after.time)
                left = min([over, *map(time_of, ends.values())])
                if left < math.inf and (member not in still or "replica_left" in ends):
                    found[member.host].append(left)
        return {host: sorted(times) for host, times in found.items()}


_Course = Sequence[tuple[float, Any]]  # times in order, and the value from each of them on


def _course(changes: Sequence[tuple[float, Any]]) -> _Course:
    """Return values by the time from which on each holds; a later one is never earlier."""
    times = accumulate((time for time, _ in changes), max)
    return [(time, value) for time, (_, value) in zip(times, changes, strict=True)]


def _last(course: _Course, time: float) -> Any:
    at = bisect_right(course, time, key=itemgetter(0))
    return course[at - 1][1] if at else None

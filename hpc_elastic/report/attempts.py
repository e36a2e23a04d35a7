"""The events of a run, parsed once: attempts of tasks, rounds, leaders, ends (pure).

`EventIndex` is what the timeline and the account of node time are made of. It assigns each event to
the attempt of a task that it concerns. Events of unknown kinds are ignored, and events may be
missing: the file of a node can be lost, and a leader can fail before it writes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from hpc_elastic.run.events import Event

_EXITS = ("task_exited", "agent_failed", "nodes_requeued")
"""Events by which an attempt reports its own end."""
_ENDS = (*_EXITS, "agent_killed", "node_lost", "replica_left")


@dataclass(eq=False)
class TaskAttempt:
    """One attempt of one task on a node; times in Unix seconds.

    Attributes:
        task: The task.
        attempt: Number of requeues before it.
        host: The node; empty if unknown.
        begin: Start of its process; None if it has written no event of its start.
        started: Time of that event; None as above.
        joined: When it first asked to join a round; None if it never did.
        last: Time of its last event.
        notice: The preemption notice; that of its agent, if there is one.
        ends: Events of its end, its own and those of leaders, in order of time. A leader that lost
            its own connections reports members of later rounds as lost.
        lost_at: When it was reported lost, if nothing shows that it came back; else None.
        stopped: Round -> event that its workers were stopped.
        first_steps: Round -> event of its workers' first step.
    """

    task: str
    attempt: int
    host: str = ""
    begin: float | None = None
    started: float | None = None
    joined: float | None = None
    last: float = -math.inf
    notice: Event | None = None
    ends: list[Event] = field(default_factory=list)
    lost_at: float | None = None
    stopped: dict[int, Event] = field(default_factory=dict)
    first_steps: dict[int, Event] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add an event that concerns it."""
        kind, time = event["kind"], float(event["time"])
        self.host = self.host or str(event.get("host") or "")
        self.last = max(self.last, time)
        if kind == "task" and self.started is None:
            made = event.get("started")
            self.started, self.begin = time, time if made is None else min(time, float(made))
        elif kind == "joined":
            self.joined = time if self.joined is None else self.joined
        elif kind == "preemption_notice":
            if self.notice is None or _rank(event) > _rank(self.notice):
                self.notice = event
        elif kind == "workers_stopped":
            self.stopped[int(event["round"])] = event
        elif kind == "first_step":
            self.first_steps[int(event["round"])] = event
        elif kind in _ENDS and not _is_of_many(event):
            self.ends.append(event)
        if kind == "node_lost":
            self.lost_at = time
        elif kind in ("joined", "first_step", "leader"):
            self.lost_at = None

    @property
    def exits(self) -> list[Event]:
        """The events by which it reported its own end, in order of time."""
        return [event for event in self.ends if event["kind"] in _EXITS]

    def ends_after(self, time: float, until: float = math.inf) -> dict[str, Event]:
        """Return the first of its ends in ``(time, until]``, by kind."""
        return {e["kind"]: e for e in reversed(self.ends) if time < float(e["time"]) <= until}


def _rank(notice: Event) -> tuple[bool, bool]:
    """Return the rank of a notice: a signal is above a request, an agent above a leader."""
    return notice.get("reason") == "signal", "host" not in notice


def _is_of_many(event: Event) -> bool:
    """Return whether this is the leader's event of several requeued nodes."""
    return event["kind"] == "nodes_requeued" and "nodes" in event


@dataclass(frozen=True)
class Round:
    """One agreement on the group.

    Attributes:
        number: Its number, from 1 on.
        time: When it was closed.
        term: Of the leader that closed it.
        members: Its members by group rank.
        world_size: Number of their workers.
        placed: With ft=true: tasks whose workers start; else None.
        over: When it was stopped, its leader was replaced, or another round or the end of the run
            followed; infinity if it goes on.
    """

    number: int
    time: float
    term: int
    members: tuple[TaskAttempt, ...]
    world_size: int
    placed: frozenset[str] | None
    over: float


class EventIndex:
    """The events of a run by what they concern.

    Args:
        events: Of all tasks, in any order; see `run.event_schema.valid_events`.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: Sequence[Event] = sorted(events, key=lambda e: float(e["time"]))
        self._attempts: dict[str, list[TaskAttempt]] = defaultdict(list)
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event["kind"]].append(event)
            if "attempt" in event:
                self.attempt(event["task"], int(event["attempt"])).add(event)
            elif self._attempts[event["task"]]:
                self._attempts[event["task"]][-1].add(event)
        self.has_replicas = any("placed" in event for event in self.of("round"))
        """Whether each node is a replica (``ft=true``)."""
        self.rounds = self._parse_rounds()
        """The rounds, by number."""

    def _parse_rounds(self) -> list[Round]:
        found: dict[int, Round] = {}
        over = math.inf
        for event in reversed(self.events):
            kind, time = event["kind"], float(event["time"])
            if kind == "round":
                number, members = int(event["number"]), []
                for member in event["members"]:
                    attempt = self.attempt(member["task"], int(member["attempt"]))
                    attempt.host = attempt.host or str(member.get("host") or "")
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

    # ---- queries ------------------------------------------------------------------------

    def attempt(self, task: str, number: int) -> TaskAttempt:
        """Return an attempt of a task; it is empty if no event mentions it."""
        found = next((a for a in self._attempts[task] if a.attempt == number), None)
        if found is None:
            found = TaskAttempt(task, number)
            self._attempts[task].append(found)
        return found

    @property
    def attempts(self) -> Iterator[TaskAttempt]:
        """All attempts of all tasks."""
        return (attempt for of_task in self._attempts.values() for attempt in of_task)

    def by_task(self) -> Iterator[list[TaskAttempt]]:
        """Yield the attempts of each task whose start is known, in order of time."""
        for of_task in self._attempts.values():
            started = [attempt for attempt in of_task if attempt.started is not None]
            yield sorted(started, key=lambda attempt: attempt.started or 0.0)

    def of(self, *kinds: str, after: float = 0.0, until: float = math.inf) -> list[Event]:
        """Return the events of some kinds in ``(after, until]``, in order of time."""
        found = [e for k in kinds for e in self._by_kind[k] if after < float(e["time"]) <= until]
        return found if len(kinds) == 1 else sorted(found, key=lambda e: float(e["time"]))

    @cached_property
    def leaders(self) -> list[Event]:
        """The events of elected leaders, by term."""
        return sorted(self.of("leader"), key=lambda e: int(e["term"]))

    @cached_property
    def excluded(self) -> dict[str, Event]:
        """The exclusions of nodes, by host."""
        return {str(e["host"]): e for e in self.of("excluded")}

    @cached_property
    def ends(self) -> dict[int, Event]:
        """The events that end the run, by generation: a failed run may be resumed."""
        by_generation = {self.generation_at(float(e["time"])): e for e in reversed(self.of("end"))}
        return dict(sorted(by_generation.items()))

    @property
    def end_event(self) -> Event | None:
        """The event that ends the run; None if it goes on."""
        return self.ends.get(len(self.of("resume")))

    def generation_at(self, time: float) -> int:
        """Return the number of resumptions until then."""
        return sum(float(e["time"]) <= time for e in self.of("resume"))

    def host_at(self, task: str, time: float) -> str:
        """Return the host of a task at a time; the name of the task if that is unknown."""
        of_task = self._attempts[task]
        hosts = [a.host for a in of_task if a.host and (a.started or 0.0) <= time]
        return hosts[-1] if hosts else task

    def last_left(self, host: str, until: float) -> float | None:
        """Return when a node last left the group; None if it was no member before."""
        times = self._departures.get(host, [])
        at = bisect_right(times, until)
        return times[at - 1] if at else None

    @cached_property
    def _departures(self) -> dict[str, list[float]]:
        """When each node left the group, whatever happened to its task afterwards."""
        stops: dict[int, list[Event]] = defaultdict(list)
        for event in self.of("round_stopped"):
            stops[int(event.get("round", 0))].append(event)
        found: dict[str, list[float]] = defaultdict(list)
        for before, after in pairwise(self.rounds):
            number = before.number
            stopped = [m.stopped[number] for m in before.members if number in m.stopped]
            of_all = [*stops.get(number, ()), *self.ends.values(), *stopped]
            for member in before.members:
                ends = member.ends_after(before.time, after.time)
                times = [float(event["time"]) for event in (*ends.values(), *of_all)]
                over = [time for time in times if before.time < time <= after.time]
                if over and (member not in after.members or "replica_left" in ends):
                    found[member.host].append(min(over))
        return {host: sorted(times) for host, times in found.items()}

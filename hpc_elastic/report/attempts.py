"""What happened to each attempt of each task: the events of a run by whom they concern (pure)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

from hpc_elastic.report.progress_log import Point
from hpc_elastic.run.events import Event

_LAST_WORDS = (
    "task_exited", "agent_killed", "agent_failed", "nodes_requeued", "node_lost", "replica_left",
)  # fmt: skip


@dataclass(eq=False)
class TaskAttempt:
    """One attempt of a task on a node.

    Attributes:
        task: The task.
        attempt: Which attempt; None: nobody says.
        host: The node; empty: unknown.
        started: When its agent began; None: nobody says.
        notice: That it is to be left.
        ends: Its last words, and what leaders noticed of its end, in order. A leader that lost its
            own connections takes for gone who is a member of later rounds.
        joined: When the last round that it was a member of began.
        stopped: By round, that its workers were stopped.
        trains: By round, that its workers made their first step.
    """

    task: str
    attempt: int | None = None
    host: str = ""
    started: float | None = None
    notice: Event | None = None
    ends: list[Event] = field(default_factory=list)
    joined: float = 0.0
    stopped: dict[int, Event] = field(default_factory=dict)
    trains: dict[int, Event] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take in an event that concerns it; others are passed over."""
        kind = event["kind"]
        self.host = self.host or str(event.get("host") or "")
        if kind == "preemption_notice":
            self._add_notice(event)
        elif kind in _LAST_WORDS:
            if not (kind == "nodes_requeued" and "nodes" in event):  # the leader's word on many
                self.ends.append(event)
        elif kind == "workers_stopped":
            self.stopped[int(event["round"])] = event
        elif kind == "first_step":
            self.trains[int(event["round"])] = event

    def ends_after(self, time: float, until: float = float("inf")) -> dict[str, Event]:
        """Return the first of its ends in ``(time, until]``, by kind."""
        return {e["kind"]: e for e in reversed(self.ends) if time < float(e["time"]) <= until}

    def _add_notice(self, event: Event) -> None:
        """Keep the first one; but a signal says more, and the agent more than the leader."""
        if self.notice is None or _rank(event) > _rank(self.notice):
            self.notice = event


def _rank(notice: Event) -> tuple[bool, bool]:
    return notice.get("reason") == "signal", "host" not in notice


class EventIndex:
    """All events of a run, in an order in which they can be looked up.

    Args:
        events: Of all tasks; in any order.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: Sequence[Event] = sorted(events, key=lambda e: float(e["time"]))
        self._lives: dict[str, list[TaskAttempt]] = defaultdict(list)
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event["kind"]].append(event)
            self._add(event)
        for round_ in self.rounds:
            for member in round_["members"]:
                life = self.life(member["task"], int(member["attempt"]))
                life.host = life.host or str(member["host"])
                life.joined = max(life.joined, float(round_["time"]))

    def _add(self, event: Event) -> None:
        if event["kind"] == "task":
            life = self.life(event["task"], int(event["attempt"]))
            life.started = life.started or float(event["time"])
            life.add(event)
        elif "attempt" in event:
            self.life(event["task"], int(event["attempt"])).add(event)
        elif self._lives[event["task"]]:
            self._lives[event["task"]][-1].add(event)

    # ---- what can be asked --------------------------------------------------------------

    def life(self, task: str, attempt: int) -> TaskAttempt:
        """Return an attempt of a task; one that nobody has spoken of is empty."""
        found = next((life for life in self._lives[task] if life.attempt == attempt), None)
        if found is None:
            found = TaskAttempt(task, attempt)
            self._lives[task].append(found)
        return found

    def last_left(self, host: str, until: float) -> float | None:
        """Return when a node was last taken out of the group; None: it has not been before."""
        times = self._departures.get(host, [])
        at = bisect_right(times, until)
        return times[at - 1] if at else None

    @cached_property
    def _departures(self) -> dict[str, list[float]]:
        """When each node was taken out of the group, whatever became of its task after that."""
        found: dict[str, list[float]] = defaultdict(list)
        for before, after in pairwise(self.rounds):
            stays = self.members(after)
            for life in self.members(before):
                time = self._departure(life, before, float(after["time"]))
                if time is not None and (life not in stays or "replica_left" in life.ends_after(
                    float(before["time"]), float(after["time"])
                )):  # fmt: skip
                    found[life.host].append(time)
        return {host: sorted(times) for host, times in found.items()}

    def _departure(self, life: TaskAttempt, round_: Event, until: float) -> float | None:
        """Return when a round was over for a member, as far as events before the next one say."""
        since, number = float(round_["time"]), int(round_["number"])
        events = [
            *life.ends_after(since, until).values(),
            *self._stops.get(number, ()), *self.ends.values(),
            *(m.stopped[number] for m in self.members(round_) if number in m.stopped),
        ]  # fmt: skip
        times = [float(event["time"]) for event in events]
        return min((time for time in times if since < time <= until), default=None)

    @cached_property
    def _stops(self) -> dict[int, list[Event]]:
        """The ends of rounds, by the rounds' numbers."""
        found: dict[int, list[Event]] = defaultdict(list)
        for event in self.of("round_stopped"):
            found[int(event.get("round", 0))].append(event)
        return found

    @property
    def lives(self) -> Iterator[TaskAttempt]:
        """All attempts of all tasks."""
        return (life for lives in self._lives.values() for life in lives)

    def members(self, round_: Event) -> list[TaskAttempt]:
        """Return the members of a round, by group rank."""
        return [self.life(m["task"], int(m["attempt"])) for m in round_["members"]]

    def of(self, *kinds: str, after: float = 0.0, until: float = float("inf")) -> list[Event]:
        """Return the events of some kinds in ``(after, until]``, in order of time."""
        found = [e for k in kinds for e in self._by_kind[k] if after < float(e["time"]) <= until]
        return found if len(kinds) == 1 else sorted(found, key=lambda e: float(e["time"]))

    @cached_property
    def rounds(self) -> list[Event]:
        """The rounds, by number."""
        by_number = {int(e["number"]): e for e in reversed(self.of("round"))}
        return [by_number[number] for number in sorted(by_number)]

    @cached_property
    def leaders(self) -> list[Event]:
        """Who has led, by epoch."""
        return sorted(self.of("leader"), key=lambda e: int(e["epoch"]))

    @cached_property
    def ends(self) -> dict[int, Event]:
        """How the run ended, by generation: it may have been let go on after a failure."""
        by_generation = {self.generation_at(float(e["time"])): e for e in reversed(self.of("end"))}
        return dict(sorted(by_generation.items()))

    @property
    def end(self) -> Event | None:
        """The end of the run; None: it goes on."""
        return self.ends.get(len(self.of("resume")))

    def generation_at(self, time: float) -> int:
        """Return how often the run had been let go on by then."""
        return sum(float(e["time"]) <= time for e in self.of("resume"))

    @property
    def has_replicas(self) -> bool:
        """Whether each node is a replica (``ft=true``)."""
        return any("placed" in round_ for round_ in self.rounds)

    def host_at(self, task: str, time: float) -> str:
        """Return where a task ran at a time; its name, where that is unknown."""
        lives = [li for li in self._lives[task] if li.host and (li.started or 0.0) <= time]
        return lives[-1].host if lives else task


def first_of(events: Iterable[Event], key: str) -> Any:
    """Return the first value of a field that is not null; None: there is none."""
    return next((e[key] for e in events if e.get(key) is not None), None)


# ---- Who had a node, and who was in which group, from when to when: read off the events (pure)


AnyEvent = Mapping[str, Any]
Key = tuple[str, int]
"""A task and its attempt."""

_GOES = ("task_exited", "agent_failed", "nodes_requeued")


@dataclass(frozen=True)
class Attempt:
    """One attempt of one task; times in Unix seconds.

    Attributes:
        task: Its name.
        number: How often it had been requeued.
        host: Its node.
        begin: When its process was started.
        joined: When it first asked for a place in a round; None if it never did.
        end: When it was over, or now.
        ended_by: ``preempted``, ``requeued``, ``cancelled`` or what else SIGTERM meant
            (`slurm.exit_action.Meaning`; ``signal``: it is not known); ``time_limit``, ``asked``;
            ``agent_failed``; ``nodes_requeued``; ``node_lost``: the group lost it;
            ``silence``: nobody noted its end; ``end``: of the run. None: it goes on.
    """

    task: str
    number: int
    host: str
    begin: float
    joined: float | None
    end: float
    ended_by: str | None

    @property
    def key(self) -> Key:
        """What its places in rounds go by."""
        return self.task, self.number


@dataclass(frozen=True)
class Begun:
    """The first step of a node's workers: when it was made, which it was, and what came before."""

    time: float
    step: int
    restored: int | None
    restore_s: float
    counted: bool


@dataclass(frozen=True)
class Size:
    """The size of the group from some time on.

    Attributes:
        time: From when on, in Unix seconds.
        nodes: Its nodes; 0 while it is formed anew, or is over.
        world_size: Its workers.
    """

    time: float
    nodes: int
    world_size: int


@dataclass(frozen=True)
class Round:
    """One group.

    Attributes:
        number: The round's.
        begin: When it was closed: its members were given their places.
        end: When it was stopped, or lost its leader; now, if it goes on.
        members: Who was in it.
        world_size: Their workers.
        begun: The first step of each node whose workers have made one.
        going_on: Members whose workers were in the round before, and go on training (``ft``).
        still_trains: Some of them do.
    """

    number: int
    begin: float
    end: float
    members: frozenset[Key]
    world_size: int = 0
    begun: Mapping[Key, Begun] = field(default_factory=dict)
    going_on: frozenset[Key] = frozenset()
    still_trains: bool = False

    @property
    def trains_from(self) -> float | None:
        """When the first of its nodes made a step; None if none did."""
        if self.still_trains:
            return self.begin
        return min((begun.time for begun in self.begun.values()), default=None)

    @property
    def counted(self) -> bool:
        """Whether nobody knows which steps it makes: they are counted from 0 in each worker."""
        return any(begun.counted and begun.restored is None for begun in self.begun.values())


def attempts_of(
    events: Sequence[AnyEvent],
    points: Sequence[Point],
    *,
    now: float,
    running: Collection[str] | None,
) -> list[Attempt]:
    """Return every attempt of every task, in order of their beginning; see `node_time`."""
    signs = sorted([float(e["time"]) for e in events] + [point.time for point in points])
    ends = [float(e["time"]) for e in events if e["kind"] == "end"]
    resumes = [float(e["time"]) for e in events if e["kind"] == "resume"]
    by_task: dict[str, list[AnyEvent]] = {}
    for event in events:
        by_task.setdefault(str(event.get("task")), []).append(event)
    found = []
    for task, its in by_task.items():
        starts = [i for i, e in enumerate(its) if e["kind"] == "task"]
        for i, j in zip_longest(starts, starts[1:]):
            following = math.inf if j is None else _begin(its[j])
            over, ended = _over(its[i:j], ends, resumes)
            limit, last = min(now, over, following), ended and over <= following
            lives = over == following == math.inf and (running is None or task in running)
            found.append(_attempt(its[i:j], limit, signs, lives=lives, run_ended=last))
    return sorted(found, key=lambda attempt: attempt.begin)


def _over(
    its: Sequence[AnyEvent], ends: Sequence[float], resumes: Sequence[float]
) -> tuple[float, bool]:
    """Return when an attempt was over at the latest, by what became of the run; and if that ended.

    Infinity: nothing says that it is over. A run that has ended may go on in new tasks. Those may
    begin a moment before the `resume` is written down; who was before them says nothing after it.
    """
    begin, last = _begin(its[0]), float(its[-1]["time"])
    ended = min((end for end in ends if end >= begin), default=math.inf)
    before = [math.nextafter(time, 0.0) for time in resumes if time > last]
    over = min([ended, *before])
    return over, over == ended < math.inf


def _attempt(
    its: Sequence[AnyEvent], limit: float, signs: Sequence[float], *, lives: bool, run_ended: bool
) -> Attempt:
    """Return one attempt from its events, of which the first is its start.

    Args:
        its: Them, in order.
        limit: When it is over at the latest: the next one begins, the run has ended, or it is now.
        signs: When anything was heard of the run.
        lives: Nothing speaks against it that it still runs.
        run_ended: It is the last, and the run has ended.
    """
    start = its[0]
    begin = _begin(start)
    joined = next((float(e["time"]) for e in its if e["kind"] == "joined"), None)
    end, why = _end(its)
    if end is None and not lives:
        at = bisect_right(signs, limit)
        end = signs[at - 1] if at else limit
        why = "end" if run_ended else "silence"
    end = max(begin, min(limit, limit if end is None else end))
    return Attempt(
        str(start["task"]), int(start.get("attempt", 0)), str(start.get("host", "")), begin,
        None if joined is None else min(joined, end), end, why,
    )  # fmt: skip


def _begin(start: AnyEvent) -> float:
    return min(float(start.get("started", start["time"])), float(start["time"]))


def _end(its: Sequence[AnyEvent]) -> tuple[float | None, str | None]:
    """Return when an attempt said that it goes, or was lost without coming back, and which."""
    gone: float | None = None
    goes = [e for e in its if e["kind"] in _GOES and "nodes" not in e]  # those are a leader's
    if goes:
        return float(goes[0]["time"]), _why(goes[-1])
    for event in its:
        if event["kind"] == "node_lost":
            gone = float(event["time"])
        elif event["kind"] in ("joined", "first_step", "leader"):
            gone = None
    return gone, None if gone is None else "node_lost"


def _why(goes: AnyEvent) -> str:
    """Return why an attempt went; what SIGTERM meant, Slurm was asked."""
    reason = str(goes.get("reason") or goes["kind"])
    return str(goes.get("means") or reason) if reason == "signal" else reason


def rounds_of(events: Sequence[AnyEvent], *, now: float, ft: bool) -> list[Round]:
    """Return the rounds in their order; see `node_time`."""
    found: list[Round] = []
    trains = [event for event in events if event["kind"] == "first_step"]
    of_round: dict[int, list[AnyEvent]] = {}
    for event in trains:
        of_round.setdefault(int(event["round"]), []).append(event)
    for i, event in enumerate(events):
        if event["kind"] != "round":
            continue
        number, begin = int(event["number"]), float(event["time"])
        members = frozenset((str(m["task"]), int(m["attempt"])) for m in event["members"])
        end = next((float(e["time"]) for e in events[i + 1 :] if _ends(e, ft=ft)), now)
        of_ours = trains if ft else of_round.get(number, ())
        begun = _begun(of_ours, members, begin, max(begin, end), ft=ft)
        before = found[-1] if ft and found and found[-1].end >= begin else None
        going_on = _going_on(before, members, begun)
        trained = bool(going_on) and before is not None and before.trains_from is not None
        found.append(
            Round(
                number,
                begin,
                max(begin, end),
                members,
                int(event.get("world_size") or 0),
                begun,
                going_on,
                trained,
            )
        )
    return found


def sizes_of(rounds: Sequence[Round], attempts: Sequence[Attempt], *, ft: bool) -> list[Size]:
    """Return how the size of the group changed; a group is over with the last of its members."""
    ends = {attempt.key: attempt.end for attempt in attempts if attempt.ended_by is not None}
    found: list[Size] = []
    for one, following in zip_longest(rounds, rounds[1:]):
        found.append(Size(one.begin, len(one.members), one.world_size))
        end = min(one.end, max((ends.get(key, one.end) for key in one.members), default=one.end))
        found += _departures(one, ends, end) if ft else ()
        goes_on = any if ft else all
        stays = following is None and goes_on(key not in ends for key in one.members)
        if not stays and (following is None or following.begin > end):
            found.append(Size(end, 0, 0))
    return found


def _departures(one: Round, ends: Mapping[Key, float], end: float) -> Iterator[Size]:
    """Yield how a group shrinks whose replicas go on without those that leave, all of one size."""
    num_left = num_members = len(one.members)
    for time in sorted(ends[key] for key in one.members if key in ends):
        if one.begin < time < end:
            num_left -= 1
            yield Size(time, num_left, one.world_size * num_left // num_members)


def _ends(event: AnyEvent, *, ft: bool) -> bool:
    kinds = (
        ("round", "end", "nodes_requeued") if ft else ("round", "end", "round_stopped", "leader")
    )
    return event["kind"] in kinds and (event["kind"] != "nodes_requeued" or "nodes" in event)


def _begun(
    trains: Sequence[AnyEvent], members: Collection[Key], begin: float, end: float, *, ft: bool
) -> dict[Key, Begun]:  # fmt: skip
    """Return the first steps in a round; of a replica, those that it made while that lasted."""
    found = {}
    for event in trains:
        key, time = (str(event["task"]), int(event["attempt"])), float(event["time"])
        if key in members and (not ft or begin <= time <= end):
            found[key] = Begun(
                time, int(event["step"]), event.get("restored"),
                float(event.get("restore_s") or 0.0), bool(event.get("counted")),
            )  # fmt: skip
    return found


def _going_on(
    before: Round | None, members: frozenset[Key], begun: Mapping[Key, Begun]
) -> frozenset[Key]:
    if before is None:
        return frozenset()
    at_work = {*before.begun, *before.going_on}
    return frozenset(key for key in members if key in at_work and key not in begun)

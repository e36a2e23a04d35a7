"""What happened to each attempt of each task: the events of a run by whom they concern (pure)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from hpc_elastic.events import Event

_LAST_WORDS = ("left", "taken", "gave up", "given back", "gone", "departed")


@dataclass(eq=False)
class Life:
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
        if kind == "notice":
            self._add_notice(event)
        elif kind in _LAST_WORDS:
            if not (kind == "given back" and "nodes" in event):  # the leader's word on many
                self.ends.append(event)
        elif kind in ("stopped", "trains"):
            by_round: dict[int, Event] = getattr(self, kind)
            by_round[int(event["round"])] = event

    def ends_after(self, time: float, until: float = float("inf")) -> dict[str, Event]:
        """Return the first of its ends in ``(time, until]``, by kind."""
        return {e["kind"]: e for e in reversed(self.ends) if time < float(e["time"]) <= until}

    def _add_notice(self, event: Event) -> None:
        """Keep the first one; but a signal says more, and the agent more than the leader."""
        if self.notice is None or _rank(event) > _rank(self.notice):
            self.notice = event


def _rank(notice: Event) -> tuple[bool, bool]:
    return notice.get("reason") == "signal", "host" not in notice


class Chronicle:
    """All events of a run, in an order in which they can be looked up.

    Args:
        events: Of all tasks; in any order.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: Sequence[Event] = sorted(events, key=lambda e: float(e["time"]))
        self._lives: dict[str, list[Life]] = defaultdict(list)
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

    def life(self, task: str, attempt: int) -> Life:
        """Return an attempt of a task; one that nobody has spoken of is empty."""
        found = next((life for life in self._lives[task] if life.attempt == attempt), None)
        if found is None:
            found = Life(task, attempt)
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
                if time is not None and (life not in stays or "departed" in life.ends_after(
                    float(before["time"]), float(after["time"])
                )):  # fmt: skip
                    found[life.host].append(time)
        return {host: sorted(times) for host, times in found.items()}

    def _departure(self, life: Life, round_: Event, until: float) -> float | None:
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
        for event in self.of("stop"):
            found[int(event.get("round", 0))].append(event)
        return found

    @property
    def lives(self) -> Iterator[Life]:
        """All attempts of all tasks."""
        return (life for lives in self._lives.values() for life in lives)

    def members(self, round_: Event) -> list[Life]:
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

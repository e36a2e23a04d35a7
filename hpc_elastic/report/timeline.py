"""Groups the events of a run into episodes: what happened, why, and what it cost (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hpc_elastic.report.attempts import EventIndex, Round, TaskAttempt
from hpc_elastic.report.causes import (
    Cause,
    Cost,
    TimelineEntry,
    cost,
    kind_of,
    ready_s,
    together,
    why_came,
    why_left,
)
from hpc_elastic.run.events import Event


def build_timeline(run: EventIndex) -> list[TimelineEntry]:
    """Return the timeline of a run, in order of time.

    Args:
        run: Its events. Where some are missing, entries have less detail.
    """
    of_group = _of_replicas if run.has_replicas else _of_group
    found = [*_started(run), *of_group(run), *_asides(run), *_never_members(run), *_ended(run)]
    return sorted(found, key=lambda e: (run.generation_at(e.time), e.kind == "ended", e.time))


def _started(run: EventIndex) -> Iterator[TimelineEntry]:
    tasks = run.of("task")
    if tasks:
        first = tasks[0]
        facts = {"host": first.get("host"), "task": first["task"]}
        yield TimelineEntry("started", float(first["time"]), facts=facts)


def _ended(run: EventIndex) -> Iterator[TimelineEntry]:
    begins = [run.events[0], *run.of("resume")] if run.events else []
    for generation, end in run.ends.items():
        lasted_s = round(float(end["time"]) - float(begins[generation]["time"]), 1)
        facts = {key: end.get(key) for key in ("status", "rounds", "restarts")}
        text = str(end.get("failure") or "")
        yield TimelineEntry(
            "ended", float(end["time"]), text=text, facts={**facts, "lasted_s": lasted_s}
        )


# ---- what touches no group ----------------------------------------------------------------


def _asides(run: EventIndex) -> Iterator[TimelineEntry]:
    for event in run.events:
        tell = _ASIDES.get(event["kind"])
        episode = tell(run, event) if tell is not None else None
        if episode is not None:
            yield episode


def _parked(run: EventIndex, event: Event) -> TimelineEntry | None:
    if event.get("admit") != "not now":
        return None
    time = float(event["time"])
    hosts = [run.host_at(task, time) for task in event.get("waiting", ())]
    return _aside("parked", event, {"hosts": hosts})


def _given_back(run: EventIndex, event: Event) -> TimelineEntry | None:
    if "nodes" not in event:
        return None
    keys = ("nodes", "hosts", "all", "delay_s", "why")
    return _aside("nodes_requeued", event, {key: event.get(key) for key in keys})


def _excluded(run: EventIndex, event: Event) -> TimelineEntry:
    facts = {key: event.get(key) for key in ("host", "hosts_left")}
    return _aside("excluded", event, facts)


def _strike(run: EventIndex, event: Event) -> TimelineEntry | None:
    excluded = excluded_hosts(run).get(str(event.get("host")))
    if excluded is not None and float(excluded["time"]) - float(event["time"]) < 1.0:
        return None
    facts = {key: event.get(key) for key in ("host", "strikes")}
    return _aside("host_failure", event, facts)


def _crash_loop(run: EventIndex, event: Event) -> TimelineEntry:
    facts = {key: event.get(key) for key in ("attempts", "checkpoint")}
    return _aside("crash_loop", event, facts)


def _brought_back(run: EventIndex, event: Event) -> TimelineEntry:
    tasks, time = [str(task) for task in event.get("tasks", ())], float(event["time"])
    hosts = [run.host_at(task, time) for task in tasks]
    avoids = [str(host) for host in event.get("avoids", ())]
    return _aside("tasks_restarted", event, {"tasks": tasks, "hosts": hosts, "avoids": avoids})


def _start_failed(run: EventIndex, event: Event) -> TimelineEntry:
    keys = ("task", "host", "state", "reason", "hosts", "again")
    return _aside("start_failed", event, {key: event.get(key) for key in keys})


def _not_saved(run: EventIndex, event: Event) -> TimelineEntry:
    return _aside("checkpoint_failed", event, {"step": event.get("step")})


def _as_it_is(run: EventIndex, event: Event) -> TimelineEntry:
    common = ("v", "time", "kind", "task")
    return _aside(event["kind"], event, {k: v for k, v in event.items() if k not in common})


def _aside(kind: str, event: Event, facts: dict[str, Any]) -> TimelineEntry:
    return TimelineEntry(kind, float(event["time"]), text=str(event.get("why", "")), facts=facts)


# ---- What happened to the group of a run: from each round to the next (pure)
# A round ends for everybody, and the next one has other members: that is one episode, however
# many causes it has. Where no member is left there are two: the run stood still in between.


def excluded_hosts(run: EventIndex) -> dict[str, Event]:
    """Return the exclusions of a run, by host."""
    return {str(e["host"]): e for e in run.of("excluded")}


_ASIDES: dict[str, Callable[[EventIndex, Event], TimelineEntry | None]] = {
    "scale_up_decision": _parked,
    "nodes_requeued": _given_back,
    "excluded": _excluded,
    "host_failure": _strike,
    "crash_loop": _crash_loop,
    "tasks_restarted": _brought_back,
    "hang": _as_it_is,
    "straggler": _as_it_is,
    "preflight": _as_it_is,
    "start_failed": _start_failed,
    "warm_worker_died": _as_it_is,
    "checkpoint_failed": _not_saved,
    "checkpoint_recovered": _as_it_is,
    "cancel": _as_it_is,
    "preempt": _as_it_is,
    "kill": _as_it_is,
    "resume": _as_it_is,
}


def _never_members(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield the attempts that ended without having been in a group."""
    members = {member for round_ in run.rounds for member in round_.members}
    for attempt in run.attempts:
        if attempt not in members:
            yield from _never_member(run, attempt)


def _never_member(run: EventIndex, life: TaskAttempt) -> Iterator[TimelineEntry]:
    end = run.ends.get(run.generation_at(life.started or 0.0))
    if end is not None and (life.started or 0.0) > float(end["time"]):
        return
    told = {
        kind: event
        for kind, event in life.ends_after(0.0).items()
        if kind in ("task_exited", "agent_failed")
    }
    for kind, event in told.items():
        causes: tuple[Cause, ...] = together([why_left(life, {})])
        yield TimelineEntry(kind, float(event["time"]), causes)


_ANNOUNCED = "its node is to be left"
"""So begins why a node is gone that the leader was told of before."""
_AT_ONCE_S = 1.0
"""A leader that gives up a member stops the round in the same moment."""


def _of_group(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield what happened to the group, in order."""
    if not run.rounds:
        return
    yield _formed(run, run.rounds[0])
    for before, after in pairwise(run.rounds):
        yield from _Change(run, before, after).episodes()
    yield from _since(run, run.rounds[-1])


def _formed(run: EventIndex, round_: Round) -> TimelineEntry:
    """Return the episode of the first group."""
    members = round_.members
    return TimelineEntry(
        "formed", round_.time, nodes_after=len(members), workers=round_.world_size,
        round=round_.number, leader=_leads(run, round_),
        facts={"hosts": [member.host for member in members], "ready_s": ready_s(members, round_)},
    )  # fmt: skip


def _leads(run: EventIndex, round_: Round) -> str | None:
    """Return the host that leads when a round has closed."""
    leader = _leader_of(run, round_)
    return run.host_at(leader["task"], float(leader["time"])) if leader is not None else None


def _leader_of(run: EventIndex, round_: Round) -> Event | None:
    return next((e for e in run.leaders if int(e["epoch"]) == round_.epoch), None)


class _Change:
    """The way from one round to the next."""

    def __init__(self, run: EventIndex, before: Round, after: Round) -> None:
        self._run = run
        self._before, self._after = before, after
        self._was, self._is = before.members, after.members
        was, is_ = set(self._was), set(self._is)
        self._departed = [member for member in self._was if member not in is_]
        self._arrived = [member for member in self._is if member not in was]
        self._stop = stop_of(run, before, until=after.time)
        self._excluded = excluded_hosts(run)

    def episodes(self) -> Iterator[TimelineEntry]:
        """Yield one, or two if nobody was left in between."""
        gone = [self._timed(self._left(life)) for life in self._departed]
        came = [self._came(life) for life in self._arrived]
        if len(self._departed) == len(self._was):
            if not self._has_ended():
                yield self._stopped(together(gone))
            yield self._resumed(together(came))
        else:
            yield self._changed(together([*gone, *self._failures(), *came]))

    def _has_ended(self) -> bool:
        """Tell whether the run had ended in between, which is told by itself."""
        ends = [float(end["time"]) for end in self._run.ends.values()]
        return any(self._before.time <= end <= self._after.time for end in ends)

    # ---- causes -------------------------------------------------------------------------

    def _left(self, life: TaskAttempt) -> Cause:
        led = self._led(life)
        return why_left(
            life, self._excluded, since=self._before.time, led=led,
            without_it=self._without(life, led=led),
        )  # fmt: skip

    def _without(self, life: TaskAttempt, *, led: bool) -> float:
        """Return when a member that had not said why was given up, or, if it led, replaced."""
        after, until = self._before.time, self._after.time
        for event in self._run.of("node_lost", after=after, until=until):
            if event["task"] == life.task and not _is_told(event):
                return float(event["time"])
        return until if led else float("inf")

    def _led(self, life: TaskAttempt) -> bool:
        """Tell whether a member led, and another one does now."""
        leader, now = _leader_of(self._run, self._before), _leader_of(self._run, self._after)
        changed = leader is not None and leader is not now
        return changed and leader is not None and leader["task"] == life.task

    def _timed(self, cause: Cause) -> Cause:
        """A leader that died is noted by nobody: the others noticed when they stopped."""
        return cause if cause.time else replace(cause, time=self._broke_at)

    def _came(self, life: TaskAttempt) -> Cause:
        return why_came(life, self._run, self._after.time)

    def _failures(self) -> list[Cause]:
        """Return why the round broke, if not because somebody left or came."""
        known = [*self._known_failures()]
        has_changed = self._departed or self._arrived or self._new_leader
        if known or has_changed or self._stop is None:
            return known
        return [Cause("other", self._broke_at, detail=str(self._stop.get("reason", "")))]

    def _known_failures(self) -> Iterator[Cause]:
        after, until = self._before.time, self._after.time
        for event in self._run.of("restart", after=after, until=until):
            hosts = (str(event["host"]),) if event.get("host") else ()
            yield Cause("worker_failed", self._broke_at, hosts, str(event.get("failure", "")))
        leader = _leader_of(self._run, self._before)
        if not self._departed and leader is not None and self._new_leader is not None:
            host = self._run.host_at(leader["task"], float(leader["time"]))
            yield Cause("leader_changed", self._broke_at, (host,))
        if self._stop is not None and self._stop.get("cause") == "agent_restarted":
            yield Cause("agent_restarted", self._broke_at, detail=str(self._stop["reason"]))
        yield from self._out_of_reach(after, until)

    def _out_of_reach(self, after: float, until: float) -> Iterator[Cause]:
        """Yield which members were given up, and are members again.

        A leader that was replaced may have been cut off itself: its word on others is none, then
        and when it notices later how many it does not hear. So only those count that ended a round.
        """
        if (
            self._new_leader is not None
            or self._stop is None
            or self._stop.get("cause") != "node_lost"
        ):
            return
        after = max(after, float(self._stop["time"]) - _AT_ONCE_S)
        stayed = {life.task: life for life in self._was if life in self._is}
        for event in self._run.of("node_lost", after=after, until=until):
            if event["task"] in stayed and not _is_told(event):
                host = stayed[event["task"]].host
                yield Cause("unreachable", float(event["time"]), (host,))

    # ---- the episode --------------------------------------------------------------------

    @property
    def _new_leader(self) -> str | None:
        """The host that leads now, if another task did."""
        before, after = _leader_of(self._run, self._before), _leader_of(self._run, self._after)
        if before is None or after is None or before["task"] == after["task"]:
            return None
        return self._run.host_at(after["task"], float(after["time"]))

    @property
    def _stopped_events(self) -> list[Event]:
        number = self._before.number
        return [life.stopped[number] for life in self._was if number in life.stopped]

    @property
    def _broke_at(self) -> float:
        """When the round was over."""
        if self._stop is not None:
            return float(self._stop["time"])
        times = [float(e["time"]) for e in self._stopped_events]
        return min(times, default=self._after.time)

    def _cost(self) -> Cost:
        number = self._after.number
        first_steps = [m.first_steps[number] for m in self._is if number in m.first_steps]
        saved = (self._stop or {}).get("step")
        return cost(
            self._stopped_events, first_steps, saved=saved, since=self._broke_at,
            until=self._after.time,
        )  # fmt: skip

    def _changed(self, causes: tuple[Cause, ...]) -> TimelineEntry:
        known = [c.time for c in causes if c.what not in ("arrived", "returned")]
        return TimelineEntry(
            kind_of(self._departed, self._arrived), min([*known, self._broke_at]), causes,
            len(self._was), len(self._is), self._after.world_size, self._after.number,
            self._new_leader, self._cost(),
        )  # fmt: skip

    def _stopped(self, causes: tuple[Cause, ...]) -> TimelineEntry:
        saved = (self._stop or {}).get("step")
        time = min([c.time for c in causes] + [self._broke_at])
        known = replace(self._cost(), pause_s=None, lost_steps=None, resumed_step=None)
        return TimelineEntry("stopped", time, causes, len(self._was), 0, cost=replace(
            known, saved_step=saved, trains=False))  # fmt: skip

    def _resumed(self, causes: tuple[Cause, ...]) -> TimelineEntry:
        return TimelineEntry(
            "resumed", self._after.time, causes, 0, len(self._is),
            self._after.world_size, self._after.number, _leads(self._run, self._after),
            replace(self._cost(), saved_step=None),
        )  # fmt: skip


def _is_told(gone: Event) -> bool:
    """Tell whether the leader was told before that a node would go."""
    return str(gone.get("why", "")).startswith(_ANNOUNCED)


def stop_of(run: EventIndex, round_: Round, until: float = float("inf")) -> Event | None:
    """Return the event that ended a round; None: there is none, for its leader died with it."""
    stops = run.of("round_stopped", after=round_.time, until=until)
    return next((e for e in stops if e.get("round", round_.number) == round_.number), None)


# ---- what has no next round ---------------------------------------------------------------


def _since(run: EventIndex, last: Round) -> Iterator[TimelineEntry]:
    """Yield what goes on still, or what the run has ended by: nodes leave, no round follows."""
    if run.end is not None and run.end["status"] == "succeeded":
        return
    members, stop, since = last.members, stop_of(run, last), last.time
    leaving = [m for m in members if m.notice is not None or m.ends_after(since)]
    if not leaving and (stop is None or run.end is not None):
        return
    causes = together(why_left(life, excluded_hosts(run), since=since) for life in leaving)
    if not causes and stop is not None:
        causes = (Cause("other", float(stop["time"]), detail=str(stop["reason"])),)
    is_all = len(leaving) == len(members)
    saved = stop.get("step") if stop is not None else None
    yield TimelineEntry(
        "stopped" if is_all else kind_of(leaving, ()), min(c.time for c in causes), causes,
        len(members), 0 if is_all else None, cost=Cost(saved_step=saved),
        is_open=run.end is None,
    )  # fmt: skip


# ---- What happened to the replicas of a run with ``ft=true``: nobody stops because of others
# Each replica that goes is an event of its own, and so is each round that places new ones. Those
# that go together are told of together.


_TOGETHER_S = 5.0
"""Replicas that go within so long of each other go together."""
_LEFT_S = 30.0
"""A leader that left in good order was a replica no longer than this before the next one."""


def _of_replicas(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield what happened to the replicas, in order."""
    if not run.rounds:
        return
    yield _formed(run, run.rounds[0])
    for group in _together(_departed(run)):
        yield _gone(run, group)
    for round_ in run.rounds[1:]:
        yield _placed(run, round_)
    yield from _other_leaders(run)


@dataclass(frozen=True)
class _Departed:
    """A replica that has gone."""

    time: float
    nodes: int
    """Replicas that are left."""
    life: TaskAttempt
    cause: Cause
    successor: Event | None
    """Who began to lead in its place; None: it did not lead."""


def _departed(run: EventIndex) -> Iterator[_Departed]:
    excluded = excluded_hosts(run)
    for event in run.of("replica_left"):
        life, time = _who(run, event), float(event["time"])
        successor = _successor(run, life, time)
        cause = why_left(life, excluded, led=successor is not None)
        cause = cause if cause.time else replace(cause, time=time)
        yield _Departed(time, int(event["nodes"]), life, cause, successor)


def _together(departures: Iterable[_Departed]) -> list[list[_Departed]]:
    """Return the departures with those together that have one cause."""
    groups: list[list[_Departed]] = []
    for one in departures:
        found = next((g for g in reversed(groups) if _is_of(one.cause, g[-1].cause)), None)
        if found is None:
            groups.append([one])
        else:
            found.append(one)
    return groups


def _is_of(one: Cause, other: Cause) -> bool:
    return one.what == other.what and abs(one.time - other.time) <= _TOGETHER_S


def _gone(run: EventIndex, group: list[_Departed]) -> TimelineEntry:
    """Return what is to be told of replicas that went together."""
    left = group[-1].nodes
    causes = [one.cause for one in group]
    announced = all(cause.is_announced for cause in causes)
    leads = [one.successor for one in group if one.successor is not None]
    leader = max(leads, key=lambda e: int(e["epoch"])) if leads and left else None
    return TimelineEntry(
        "shrank" if left else "stopped", min(cause.time for cause in causes), together(causes),
        group[0].nodes + 1, left, cost=Cost(lost_steps=0 if announced and left else None),
        leader=_host_of(run, leader), has_replicas=True,
    )  # fmt: skip


def _host_of(run: EventIndex, leader: Event | None) -> str | None:
    return None if leader is None else run.host_at(leader["task"], float(leader["time"]))


def _successor(run: EventIndex, life: TaskAttempt, time: float) -> Event | None:
    """Return who began to lead in place of a replica that has gone; None: it did not lead."""
    for before, after in pairwise(run.leaders):
        led_last = before["task"] == life.task != after["task"]
        in_this_life = (life.started or 0.0) <= float(before["time"])
        if led_last and in_this_life and float(after["time"]) <= time + _TOGETHER_S:
            return after
    return None


def _other_leaders(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield where another agent leads, although the one before is a replica still."""
    for before, after in pairwise(run.leaders):
        time = float(after["time"])
        around = run.of("replica_left", after=time - _LEFT_S, until=time + _TOGETHER_S)
        if before["task"] == after["task"] or before["task"] in {e["task"] for e in around}:
            continue
        cause = Cause("leader_changed", time, (run.host_at(before["task"], time),))
        host = run.host_at(after["task"], time)
        yield TimelineEntry("leader", time, (cause,), leader=host, has_replicas=True)


def _who(run: EventIndex, departed: Event) -> TaskAttempt:
    """Return the attempt that departed: the last that was a member by then."""
    task, time = departed["task"], float(departed["time"])
    rounds = [round_ for round_ in run.rounds if round_.time <= time]
    attempts = [m.attempt for round_ in rounds for m in round_.members if m.task == task]
    return run.attempt(task, max(attempts, default=0))


def _placed(run: EventIndex, round_: Round) -> TimelineEntry:
    """Return what is to be told of a round: replicas that come, or that start again."""
    time, members, before = round_.time, round_.members, _members_before(run, round_)
    placed = [member for member in members if member.task in (round_.placed or ())]
    arrived = [member for member in placed if member not in before]
    again = [member for member in placed if member in before]
    causes = [
        *(_failed(run, member, time) for member in again),
        *(why_came(member, run, time) for member in arrived),
    ]
    return TimelineEntry(
        "resumed" if not before else kind_of((), arrived), time, together(causes),
        len(before), len(members), round_.world_size, round_.number,
        cost=_cost_of_return(run, round_) if not before else Cost(),
        facts={"ready_s": ready_s(members, round_)}, has_replicas=True,
    )  # fmt: skip


def _members_before(run: EventIndex, round_: Round) -> list[TaskAttempt]:
    earlier = [other for other in run.rounds if other.number < round_.number][-1]
    gone = run.of("replica_left", after=earlier.time, until=round_.time)
    departed = [_who(run, event) for event in gone]
    return [member for member in earlier.members if member not in departed]


def _failed(run: EventIndex, life: TaskAttempt, time: float) -> Cause:
    restarts = [e for e in run.of("restart", until=time) if e.get("host") == life.host]
    detail = str(restarts[-1]["failure"]) if restarts else ""
    return Cause("worker_failed", time, (life.host,), detail)


def _cost_of_return(run: EventIndex, round_: Round) -> Cost:
    """Return what it cost that no replica was left for a while."""
    number, time = round_.number, round_.time
    first_steps = [m.first_steps[number] for m in round_.members if number in m.first_steps]
    stopped = [e for a in run.attempts for e in a.stopped.values() if float(e["time"]) <= time]
    gone = run.of("replica_left", until=time)
    since = float(gone[-1]["time"]) if gone else time
    return cost(stopped, first_steps, saved=None, since=since, until=time)

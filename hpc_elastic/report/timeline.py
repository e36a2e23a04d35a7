"""The timeline of a run: its events grouped into entries with cause and cost (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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


# ---- entries that change no group


_FACTS: dict[str, tuple[str, ...]] = {
    "nodes_requeued": ("nodes", "hosts", "all", "delay_s", "why"),
    "excluded": ("host", "hosts_left"),
    "host_failure": ("host", "strikes"),
    "crash_loop": ("attempts", "checkpoint"),
    "start_failed": ("task", "host", "state", "reason", "hosts", "again"),
    "checkpoint_failed": ("step",),
    **dict.fromkeys(("hang", "straggler", "preflight", "warm_worker_died"), ()),
    **dict.fromkeys(("checkpoint_recovered", "cancel", "preempt", "kill", "resume"), ()),
}
"""Kind of event -> the fields that its entry has as facts; none: all of them."""
_COMMON = ("v", "time", "kind", "task")


def _asides(run: EventIndex) -> Iterator[TimelineEntry]:
    excluded = excluded_hosts(run)
    for event in run.events:
        kind, time = event["kind"], float(event["time"])
        if kind == "scale_up_decision" and event.get("admit") == "not now":
            hosts = [run.host_at(task, time) for task in event.get("waiting", ())]
            yield _aside("parked", event, {"hosts": hosts})
        elif kind == "tasks_restarted":
            tasks = [str(task) for task in event.get("tasks", ())]
            hosts = [run.host_at(task, time) for task in tasks]
            avoids = [str(host) for host in event.get("avoids", ())]
            yield _aside(kind, event, {"tasks": tasks, "hosts": hosts, "avoids": avoids})
        elif kind in _FACTS and not _is_part_of_another(event, excluded):
            keys = _FACTS[kind] or [key for key in event if key not in _COMMON]
            yield _aside(kind, event, {key: event.get(key) for key in keys})


def _is_part_of_another(event: Event, excluded: Mapping[str, Event]) -> bool:
    """Return whether an event needs no entry: a node's own requeue, a failure that excludes it."""
    if event["kind"] == "host_failure":
        exclusion = excluded.get(str(event.get("host")))
        return exclusion is not None and float(exclusion["time"]) - float(event["time"]) < 1.0
    return event["kind"] == "nodes_requeued" and "nodes" not in event


def _aside(kind: str, event: Event, facts: dict[str, Any]) -> TimelineEntry:
    return TimelineEntry(kind, float(event["time"]), text=str(event.get("why", "")), facts=facts)


def excluded_hosts(run: EventIndex) -> dict[str, Event]:
    """Return the exclusions of a run, by host."""
    return {str(e["host"]): e for e in run.of("excluded")}


def _never_members(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield the attempts that ended without having been in a group."""
    members = {member for round_ in run.rounds for member in round_.members}
    for attempt in run.attempts:
        if attempt not in members:
            yield from _never_member(run, attempt)


def _never_member(run: EventIndex, attempt: TaskAttempt) -> Iterator[TimelineEntry]:
    started = attempt.started or 0.0
    end = run.ends.get(run.generation_at(started))
    if end is not None and started > float(end["time"]):
        return
    for kind, event in attempt.ends_after(0.0).items():
        if kind in ("task_exited", "agent_failed"):
            causes: tuple[Cause, ...] = together([why_left(attempt, {})])
            yield TimelineEntry(kind, float(event["time"]), causes)


# ---- the group: from each round to the next
# A round ends for all members, and the next one has other members: that is one entry, with all its
# causes. If no member is left there are two entries: the run was stopped in between.


ANNOUNCED = "its node is to be left"
"""Begin of the reason for which a leader reports a node lost that had announced it."""
_AT_ONCE_S = 1.0
"""Time within which a leader that gives up a member stops the round."""


def _of_group(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield the entries of the group, in order of time."""
    if not run.rounds:
        return
    yield _formed(run, run.rounds[0])
    for before, after in pairwise(run.rounds):
        yield from _Change(run, before, after).entries()
    yield from _since(run, run.rounds[-1])


def _formed(run: EventIndex, round_: Round) -> TimelineEntry:
    """Return the entry of the first group."""
    members = round_.members
    return TimelineEntry(
        "formed", round_.time, nodes_after=len(members), workers=round_.world_size,
        round=round_.number, leader=_leads(run, round_),
        facts={"hosts": [member.host for member in members], "ready_s": ready_s(members, round_)},
    )  # fmt: skip


def _leads(run: EventIndex, round_: Round) -> str | None:
    """Return the host of the leader that closed a round."""
    leader = _leader_of(run, round_)
    return run.host_at(leader["task"], float(leader["time"])) if leader is not None else None


def _leader_of(run: EventIndex, round_: Round) -> Event | None:
    return next((e for e in run.leaders if int(e["epoch"]) == round_.epoch), None)


class _Change:
    """The change from one round to the next."""

    def __init__(self, run: EventIndex, before: Round, after: Round) -> None:
        self._run = run
        self._before, self._after = before, after
        self._was, self._is = before.members, after.members
        was, is_ = set(self._was), set(self._is)
        self._departed = [member for member in self._was if member not in is_]
        self._arrived = [member for member in self._is if member not in was]
        self._stop = stop_of(run, before, until=after.time)
        self._excluded = excluded_hosts(run)

    def entries(self) -> Iterator[TimelineEntry]:
        """Yield one entry, or two if no member was left in between."""
        gone = [self._why_left(member) for member in self._departed]
        came = [why_came(member, self._run, self._after.time) for member in self._arrived]
        if len(self._departed) == len(self._was):
            if not self._has_ended():
                yield self._stopped(together(gone))
            yield self._resumed(together(came))
        else:
            yield self._changed(together([*gone, *self._failures(), *came]))

    def _has_ended(self) -> bool:
        """Return whether the run ended in between, which has an entry of its own."""
        ends = [float(end["time"]) for end in self._run.ends.values()]
        return any(self._before.time <= end <= self._after.time for end in ends)

    # ---- causes -------------------------------------------------------------------------

    def _why_left(self, member: TaskAttempt) -> Cause:
        led = self._led(member)
        cause = why_left(
            member, self._excluded, since=self._before.time, led=led,
            without_it=self._given_up_at(member, led=led),
        )  # fmt: skip
        # no event has the time at which a leader died: the others stopped when they noticed
        return cause if cause.time else replace(cause, time=self._broke_at)

    def _given_up_at(self, member: TaskAttempt, *, led: bool) -> float:
        """Return when a member was given up without an announcement, or replaced as leader."""
        after, until = self._before.time, self._after.time
        for event in self._run.of("node_lost", after=after, until=until):
            if event["task"] == member.task and not _was_announced(event):
                return float(event["time"])
        return until if led else float("inf")

    def _led(self, member: TaskAttempt) -> bool:
        """Return whether a member led, and another one leads now."""
        leader, now = _leader_of(self._run, self._before), _leader_of(self._run, self._after)
        changed = leader is not None and leader is not now
        return changed and leader is not None and leader["task"] == member.task

    def _failures(self) -> list[Cause]:
        """Return why the round broke, apart from members that left or came."""
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
        yield from self._unreachable(after, until)

    def _unreachable(self, after: float, until: float) -> Iterator[Cause]:
        """Yield the members that were given up, and are members again.

        A leader that was replaced may have been cut off itself, so its reports of others do not
        count. Those of the present leader count if they ended the round.
        """
        if (
            self._new_leader is not None
            or self._stop is None
            or self._stop.get("cause") != "node_lost"
        ):
            return
        after = max(after, float(self._stop["time"]) - _AT_ONCE_S)
        stayed = {member.task: member for member in self._was if member in self._is}
        for event in self._run.of("node_lost", after=after, until=until):
            if event["task"] in stayed and not _was_announced(event):
                host = stayed[event["task"]].host
                yield Cause("unreachable", float(event["time"]), (host,))

    # ---- the entry --------------------------------------------------------------------

    @property
    def _new_leader(self) -> str | None:
        """The host that leads now, if another task led before."""
        before, after = _leader_of(self._run, self._before), _leader_of(self._run, self._after)
        if before is None or after is None or before["task"] == after["task"]:
            return None
        return self._run.host_at(after["task"], float(after["time"]))

    @property
    def _stopped_events(self) -> list[Event]:
        number = self._before.number
        return [m.stopped[number] for m in self._was if number in m.stopped]

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


def _was_announced(gone: Event) -> bool:
    """Return whether a node had announced that it would leave."""
    return str(gone.get("why", "")).startswith(ANNOUNCED)


def stop_of(run: EventIndex, round_: Round, until: float = float("inf")) -> Event | None:
    """Return the event that ended a round; None if there is none, because its leader died."""
    stops = run.of("round_stopped", after=round_.time, until=until)
    return next((e for e in stops if e.get("round", round_.number) == round_.number), None)


# ---- after the last round ---------------------------------------------------------------


def _since(run: EventIndex, last: Round) -> Iterator[TimelineEntry]:
    """Yield the entry of nodes that leave after the last round."""
    if run.end is not None and run.end["status"] == "succeeded":
        return
    members, stop, since = last.members, stop_of(run, last), last.time
    leaving = [m for m in members if m.notice is not None or m.ends_after(since)]
    if not leaving and (stop is None or run.end is not None):
        return
    causes = together(why_left(m, excluded_hosts(run), since=since) for m in leaving)
    if not causes and stop is not None:
        causes = (Cause("other", float(stop["time"]), detail=str(stop["reason"])),)
    is_all = len(leaving) == len(members)
    saved = stop.get("step") if stop is not None else None
    yield TimelineEntry(
        "stopped" if is_all else kind_of(leaving, ()), min(c.time for c in causes), causes,
        len(members), 0 if is_all else None, cost=Cost(saved_step=saved),
        is_open=run.end is None,
    )  # fmt: skip


# ---- replicas, with ``ft=true``: none stops because of others
# A replica that leaves is an entry of its own, and so is a round that places new replicas. Replicas
# that leave together for one cause are one entry.


_TOGETHER_S = 5.0
"""Time within which replicas leave together."""
_LEFT_S = 30.0
"""Longest time between the departure of a leader that left regularly, and the next leader."""


def _of_replicas(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield the entries of the replicas."""
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
    """A replica that has left."""

    time: float
    nodes: int
    """Number of replicas that are left."""
    cause: Cause
    successor: Event | None
    """The event of the leader that replaced it; None if it did not lead."""


def _departed(run: EventIndex) -> Iterator[_Departed]:
    excluded = excluded_hosts(run)
    for event in run.of("replica_left"):
        attempt, time = _attempt_of(run, event), float(event["time"])
        successor = _successor(run, attempt, time)
        cause = why_left(attempt, excluded, led=successor is not None)
        cause = cause if cause.time else replace(cause, time=time)
        yield _Departed(time, int(event["nodes"]), cause, successor)


def _together(departures: Iterable[_Departed]) -> list[list[_Departed]]:
    """Return the departures, those with one cause together."""
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
    """Return the entry of replicas that left together."""
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


def _successor(run: EventIndex, attempt: TaskAttempt, time: float) -> Event | None:
    """Return the event of the leader that replaced a replica; None if that did not lead."""
    for before, after in pairwise(run.leaders):
        led_last = before["task"] == attempt.task != after["task"]
        by_attempt = (attempt.started or 0.0) <= float(before["time"])
        if led_last and by_attempt and float(after["time"]) <= time + _TOGETHER_S:
            return after
    return None


def _other_leaders(run: EventIndex) -> Iterator[TimelineEntry]:
    """Yield the entries of new leaders whose predecessor is still a replica."""
    for before, after in pairwise(run.leaders):
        time = float(after["time"])
        around = run.of("replica_left", after=time - _LEFT_S, until=time + _TOGETHER_S)
        if before["task"] == after["task"] or before["task"] in {e["task"] for e in around}:
            continue
        cause = Cause("leader_changed", time, (run.host_at(before["task"], time),))
        host = run.host_at(after["task"], time)
        yield TimelineEntry("leader", time, (cause,), leader=host, has_replicas=True)


def _attempt_of(run: EventIndex, departed: Event) -> TaskAttempt:
    """Return the attempt that left: the last one of the task that was a member."""
    task, time = departed["task"], float(departed["time"])
    rounds = [round_ for round_ in run.rounds if round_.time <= time]
    attempts = [m.attempt for round_ in rounds for m in round_.members if m.task == task]
    return run.attempt(task, max(attempts, default=0))


def _placed(run: EventIndex, round_: Round) -> TimelineEntry:
    """Return the entry of a round: replicas that join, or start again."""
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
    departed = [_attempt_of(run, event) for event in gone]
    return [member for member in earlier.members if member not in departed]


def _failed(run: EventIndex, member: TaskAttempt, time: float) -> Cause:
    restarts = [e for e in run.of("restart", until=time) if e.get("host") == member.host]
    detail = str(restarts[-1]["failure"]) if restarts else ""
    return Cause("worker_failed", time, (member.host,), detail)


def _cost_of_return(run: EventIndex, round_: Round) -> Cost:
    """Return the cost of the time without any replica."""
    number, time = round_.number, round_.time
    first_steps = [m.first_steps[number] for m in round_.members if number in m.first_steps]
    stopped = [e for a in run.attempts for e in a.stopped.values() if float(e["time"]) <= time]
    gone = run.of("replica_left", until=time)
    since = float(gone[-1]["time"]) if gone else time
    return cost(stopped, first_steps, saved=None, since=since, until=time)

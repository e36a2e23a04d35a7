"""What happened to the replicas of a run with ``ft=true``: nobody stops because of others (pure).

Each replica that goes is an event of its own, and so is each round that places new ones. Those
that go together are told of together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from hpc_elastic.events import Event
from hpc_elastic.story.causes import Cause, together, why_came, why_left
from hpc_elastic.story.episode import Cost, Episode, cost, kind_of, ready_s
from hpc_elastic.story.groups import excluded_hosts, formed
from hpc_elastic.story.lives import Chronicle, Life

_TOGETHER_S = 5.0
"""Replicas that go within so long of each other go together."""
_LEFT_S = 30.0
"""A leader that left in good order was a replica no longer than this before the next one."""


def replica_episodes(run: Chronicle) -> Iterator[Episode]:
    """Yield what happened to the replicas, in order."""
    if not run.rounds:
        return
    yield formed(run, run.rounds[0])
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
    life: Life
    cause: Cause
    successor: Event | None
    """Who began to lead in its place; None: it did not lead."""


def _departed(run: Chronicle) -> Iterator[_Departed]:
    excluded = excluded_hosts(run)
    for event in run.of("departed"):
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


def _gone(run: Chronicle, group: list[_Departed]) -> Episode:
    """Return what is to be told of replicas that went together."""
    left = group[-1].nodes
    causes = [one.cause for one in group]
    announced = all(cause.is_announced for cause in causes)
    leads = [one.successor for one in group if one.successor is not None]
    leader = max(leads, key=lambda e: int(e["epoch"])) if leads and left else None
    return Episode(
        "shrank" if left else "stopped", min(cause.time for cause in causes), together(causes),
        group[0].nodes + 1, left, cost=Cost(lost_steps=0 if announced and left else None),
        leader=_host_of(run, leader), has_replicas=True,
    )  # fmt: skip


def _host_of(run: Chronicle, leader: Event | None) -> str | None:
    return None if leader is None else run.host_at(leader["task"], float(leader["time"]))


def _successor(run: Chronicle, life: Life, time: float) -> Event | None:
    """Return who began to lead in place of a replica that has gone; None: it did not lead."""
    for before, after in pairwise(run.leaders):
        led_last = before["task"] == life.task != after["task"]
        in_this_life = (life.started or 0.0) <= float(before["time"])
        if led_last and in_this_life and float(after["time"]) <= time + _TOGETHER_S:
            return after
    return None


def _other_leaders(run: Chronicle) -> Iterator[Episode]:
    """Yield where another agent leads, although the one before is a replica still."""
    for before, after in pairwise(run.leaders):
        time = float(after["time"])
        around = run.of("departed", after=time - _LEFT_S, until=time + _TOGETHER_S)
        if before["task"] == after["task"] or before["task"] in {e["task"] for e in around}:
            continue
        cause = Cause("leader changed", time, (run.host_at(before["task"], time),))
        host = run.host_at(after["task"], time)
        yield Episode("leader", time, (cause,), leader=host, has_replicas=True)


def _who(run: Chronicle, departed: Event) -> Life:
    """Return the attempt that departed: the last that was a member by then."""
    task, time = departed["task"], float(departed["time"])
    rounds = [r for r in run.rounds if float(r["time"]) <= time]
    attempts = [m["attempt"] for r in rounds for m in r["members"] if m["task"] == task]
    return run.life(task, int(max(attempts, default=0)))


def _placed(run: Chronicle, round_: Event) -> Episode:
    """Return what is to be told of a round: replicas that come, or that start again."""
    time, number = float(round_["time"]), int(round_["number"])
    before = _members_before(run, round_)
    members = run.members(round_)
    arrived = [li for li in members if li not in before and li.task in round_["placed"]]
    again = [li for li in members if li in before and li.task in round_["placed"]]
    causes = [*(_failed(run, li, time) for li in again), *(_came(run, li, time) for li in arrived)]
    return Episode(
        "resumed" if not before else kind_of((), arrived), time, together(causes),
        len(before), len(members), round_["world_size"], number,
        cost=_cost_of_return(run, round_, members) if not before else Cost(),
        facts={"ready_s": ready_s(members, round_)}, has_replicas=True,
    )  # fmt: skip


def _members_before(run: Chronicle, round_: Event) -> list[Life]:
    earlier = [r for r in run.rounds if int(r["number"]) < int(round_["number"])][-1]
    gone = run.of("departed", after=float(earlier["time"]), until=float(round_["time"]))
    departed = [_who(run, e) for e in gone]
    return [life for life in run.members(earlier) if life not in departed]


def _failed(run: Chronicle, life: Life, time: float) -> Cause:
    restarts = [e for e in run.of("restart", until=time) if e.get("host") == life.host]
    detail = str(restarts[-1]["failure"]) if restarts else ""
    return Cause("worker failed", time, (life.host,), detail)


def _came(run: Chronicle, life: Life, time: float) -> Cause:
    return why_came(life, run, time)


def _cost_of_return(run: Chronicle, round_: Event, members: list[Life]) -> Cost:
    """Return what it cost that no replica was left for a while."""
    number, time = int(round_["number"]), float(round_["time"])
    trains = [li.trains[number] for li in members if number in li.trains]
    stopped = [e for li in run.lives for e in li.stopped.values() if float(e["time"]) <= time]
    gone = run.of("departed", until=time)
    since = float(gone[-1]["time"]) if gone else time
    return cost(stopped, trains, saved=None, since=since, until=time)

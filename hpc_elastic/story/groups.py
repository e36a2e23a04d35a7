"""What happened to the group of a run: from each round to the next (pure).

A round ends for everybody, and the next one has other members: that is one episode, however many
causes it has. Where no member is left there are two: the run stood still in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from hpc_elastic.events import Event
from hpc_elastic.story.causes import Cause, together, why_came, why_left
from hpc_elastic.story.episode import Cost, Episode, cost, kind_of, ready_s
from hpc_elastic.story.lives import Chronicle, Life

_ANNOUNCED = "its node is to be left"
"""So begins why a node is gone that the leader was told of before."""
_AT_ONCE_S = 1.0
"""A leader that gives up a member stops the round in the same moment."""


def group_episodes(run: Chronicle) -> Iterator[Episode]:
    """Yield what happened to the group, in order."""
    if not run.rounds:
        return
    yield formed(run, run.rounds[0])
    for before, after in pairwise(run.rounds):
        yield from _Change(run, before, after).episodes()
    yield from _since(run, run.rounds[-1])


def formed(run: Chronicle, round_: Event) -> Episode:
    """Return the episode of the first group."""
    members = run.members(round_)
    return Episode(
        "formed", float(round_["time"]), nodes_after=len(members), workers=round_["world_size"],
        round=int(round_["number"]), leader=_leads(run, round_),
        facts={"hosts": [life.host for life in members], "ready_s": ready_s(members, round_)},
    )  # fmt: skip


def _leads(run: Chronicle, round_: Event) -> str | None:
    """Return the host that leads when a round has closed."""
    leader = _leader_of(run, round_)
    return run.host_at(leader["task"], float(leader["time"])) if leader is not None else None


def _leader_of(run: Chronicle, round_: Event) -> Event | None:
    return next((e for e in run.leaders if int(e["epoch"]) == int(round_["epoch"])), None)


class _Change:
    """The way from one round to the next."""

    def __init__(self, run: Chronicle, before: Event, after: Event) -> None:
        self._run = run
        self._before, self._after = before, after
        was, is_ = run.members(before), run.members(after)
        self._was, self._is = was, is_
        self._departed = [life for life in was if life not in is_]
        self._arrived = [life for life in is_ if life not in was]
        self._stop = stop_of(run, before, until=float(after["time"]))
        self._excluded = excluded_hosts(run)

    def episodes(self) -> Iterator[Episode]:
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
        times = float(self._before["time"]), float(self._after["time"])
        return any(times[0] <= float(end["time"]) <= times[1] for end in self._run.ends.values())

    # ---- causes -------------------------------------------------------------------------

    def _left(self, life: Life) -> Cause:
        led = self._led(life)
        return why_left(
            life, self._excluded, since=float(self._before["time"]), led=led,
            without_it=self._without(life, led=led),
        )  # fmt: skip

    def _without(self, life: Life, *, led: bool) -> float:
        """Return when a member that had not said why was given up, or, if it led, replaced."""
        after, until = float(self._before["time"]), float(self._after["time"])
        for event in self._run.of("gone", after=after, until=until):
            if event["task"] == life.task and not _is_told(event):
                return float(event["time"])
        return until if led else float("inf")

    def _led(self, life: Life) -> bool:
        """Tell whether a member led, and another one does now."""
        leader, now = _leader_of(self._run, self._before), _leader_of(self._run, self._after)
        changed = leader is not None and leader is not now
        return changed and leader is not None and leader["task"] == life.task

    def _timed(self, cause: Cause) -> Cause:
        """A leader that died is noted by nobody: the others noticed when they stopped."""
        return cause if cause.time else replace(cause, time=self._broke_at)

    def _came(self, life: Life) -> Cause:
        return why_came(life, self._run, float(self._after["time"]))

    def _failures(self) -> list[Cause]:
        """Return why the round broke, if not because somebody left or came."""
        known = [*self._known_failures()]
        has_changed = self._departed or self._arrived or self._new_leader
        if known or has_changed or self._stop is None:
            return known
        return [Cause("other", self._broke_at, detail=str(self._stop.get("reason", "")))]

    def _known_failures(self) -> Iterator[Cause]:
        after, until = float(self._before["time"]), float(self._after["time"])
        for event in self._run.of("restart", after=after, until=until):
            hosts = (str(event["host"]),) if event.get("host") else ()
            yield Cause("worker failed", self._broke_at, hosts, str(event.get("failure", "")))
        leader = _leader_of(self._run, self._before)
        if not self._departed and leader is not None and self._new_leader is not None:
            host = self._run.host_at(leader["task"], float(leader["time"]))
            yield Cause("leader changed", self._broke_at, (host,))
        if self._stop is not None and self._stop.get("cause") == "anew":
            yield Cause("rejoined", self._broke_at, detail=str(self._stop["reason"]))
        yield from self._out_of_reach(after, until)

    def _out_of_reach(self, after: float, until: float) -> Iterator[Cause]:
        """Yield which members were given up, and are members again.

        A leader that was replaced may have been cut off itself: its word on others is none, then
        and when it notices later how many it does not hear. So only those count that ended a round.
        """
        if self._new_leader is not None or self._stop is None or self._stop.get("cause") != "gone":
            return
        after = max(after, float(self._stop["time"]) - _AT_ONCE_S)
        stayed = {life.task: life for life in self._was if life in self._is}
        for event in self._run.of("gone", after=after, until=until):
            if event["task"] in stayed and not _is_told(event):
                host = stayed[event["task"]].host
                yield Cause("out of reach", float(event["time"]), (host,))

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
        number = int(self._before["number"])
        return [life.stopped[number] for life in self._was if number in life.stopped]

    @property
    def _broke_at(self) -> float:
        """When the round was over."""
        if self._stop is not None:
            return float(self._stop["time"])
        times = [float(e["time"]) for e in self._stopped_events]
        return min(times, default=float(self._after["time"]))

    def _cost(self) -> Cost:
        number = int(self._after["number"])
        trains = [life.trains[number] for life in self._is if number in life.trains]
        saved = (self._stop or {}).get("step")
        return cost(
            self._stopped_events, trains, saved=saved, since=self._broke_at,
            until=float(self._after["time"]),
        )  # fmt: skip

    def _changed(self, causes: tuple[Cause, ...]) -> Episode:
        known = [c.time for c in causes if c.what not in ("arrived", "returned")]
        return Episode(
            kind_of(self._departed, self._arrived), min([*known, self._broke_at]), causes,
            len(self._was), len(self._is), self._after["world_size"], int(self._after["number"]),
            self._new_leader, self._cost(),
        )  # fmt: skip

    def _stopped(self, causes: tuple[Cause, ...]) -> Episode:
        saved = (self._stop or {}).get("step")
        time = min([c.time for c in causes] + [self._broke_at])
        known = replace(self._cost(), pause_s=None, lost_steps=None, resumed_step=None)
        return Episode("stopped", time, causes, len(self._was), 0, cost=replace(
            known, saved_step=saved, trains=False))  # fmt: skip

    def _resumed(self, causes: tuple[Cause, ...]) -> Episode:
        return Episode(
            "resumed", float(self._after["time"]), causes, 0, len(self._is),
            self._after["world_size"], int(self._after["number"]), _leads(self._run, self._after),
            replace(self._cost(), saved_step=None),
        )  # fmt: skip


def _is_told(gone: Event) -> bool:
    """Tell whether the leader was told before that a node would go."""
    return str(gone.get("why", "")).startswith(_ANNOUNCED)


def stop_of(run: Chronicle, round_: Event, until: float = float("inf")) -> Event | None:
    """Return the event that ended a round; None: there is none, for its leader died with it."""
    stops = run.of("stop", after=float(round_["time"]), until=until)
    number = int(round_["number"])
    return next((e for e in stops if e.get("round", number) == number), None)


def excluded_hosts(run: Chronicle) -> dict[str, Event]:
    """Return the exclusions of a run, by host."""
    return {str(e["host"]): e for e in run.of("excluded")}


# ---- what has no next round ---------------------------------------------------------------


def _since(run: Chronicle, last: Event) -> Iterator[Episode]:
    """Yield what goes on still, or what the run has ended by: nodes leave, no round follows."""
    if run.end is not None and run.end["status"] == "succeeded":
        return
    members, stop = run.members(last), stop_of(run, last)
    since = float(last["time"])
    leaving = [li for li in members if li.notice is not None or li.ends_after(since)]
    if not leaving and (stop is None or run.end is not None):
        return
    causes = together(why_left(life, excluded_hosts(run), since=since) for life in leaving)
    if not causes and stop is not None:
        causes = (Cause("other", float(stop["time"]), detail=str(stop["reason"])),)
    is_all = len(leaving) == len(members)
    saved = stop.get("step") if stop is not None else None
    yield Episode(
        "stopped" if is_all else kind_of(leaving, ()), min(c.time for c in causes), causes,
        len(members), 0 if is_all else None, cost=Cost(saved_step=saved),
        is_open=run.end is None,
    )  # fmt: skip

"""Groups the events of a run into episodes: what happened, why, and what it cost (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpc_elastic.events import Event
from hpc_elastic.story.causes import Cause, together, why_left
from hpc_elastic.story.episode import Episode
from hpc_elastic.story.groups import excluded_hosts, group_episodes
from hpc_elastic.story.lives import Chronicle, Life
from hpc_elastic.story.replicas import replica_episodes


def episodes(events: Iterable[Event]) -> list[Episode]:
    """Return the episodes of a run, in order of time.

    Args:
        events: Of all its tasks. Those of unknown kinds are passed over; where a field or a kind
            is missing, because the run is of another version, less is told.
    """
    run = Chronicle(events)
    tell = replica_episodes if run.has_replicas else group_episodes
    found = [*_started(run), *tell(run), *_asides(run), *_never_members(run), *_ended(run)]
    return sorted(found, key=lambda e: (run.generation_at(e.time), e.kind == "ended", e.time))


def _started(run: Chronicle) -> Iterator[Episode]:
    tasks = run.of("task")
    if tasks:
        first = tasks[0]
        facts = {"host": first.get("host"), "task": first["task"]}
        yield Episode("started", float(first["time"]), facts=facts)


def _ended(run: Chronicle) -> Iterator[Episode]:
    begins = [run.events[0], *run.of("resume")] if run.events else []
    for generation, end in run.ends.items():
        lasted_s = round(float(end["time"]) - float(begins[generation]["time"]), 1)
        facts = {key: end.get(key) for key in ("status", "rounds", "restarts")}
        text = str(end.get("failure") or "")
        yield Episode("ended", float(end["time"]), text=text, facts={**facts, "lasted_s": lasted_s})


# ---- what touches no group ----------------------------------------------------------------


def _asides(run: Chronicle) -> Iterator[Episode]:
    for event in run.events:
        tell = _ASIDES.get(event["kind"])
        episode = tell(run, event) if tell is not None else None
        if episode is not None:
            yield episode


def _parked(run: Chronicle, event: Event) -> Episode | None:
    if event.get("admit") != "not now":
        return None
    time = float(event["time"])
    hosts = [run.host_at(task, time) for task in event.get("waiting", ())]
    return _aside("parked", event, {"hosts": hosts})


def _given_back(run: Chronicle, event: Event) -> Episode | None:
    if "nodes" not in event:
        return None
    keys = ("nodes", "hosts", "all", "delay_s", "why")
    return _aside("given back", event, {key: event.get(key) for key in keys})


def _excluded(run: Chronicle, event: Event) -> Episode:
    facts = {key: event.get(key) for key in ("host", "hosts_left")}
    return _aside("excluded", event, facts)


def _strike(run: Chronicle, event: Event) -> Episode | None:
    excluded = excluded_hosts(run).get(str(event.get("host")))
    if excluded is not None and float(excluded["time"]) - float(event["time"]) < 1.0:
        return None
    facts = {key: event.get(key) for key in ("host", "strikes")}
    return _aside("strike", event, facts)


def _crash_loop(run: Chronicle, event: Event) -> Episode:
    facts = {key: event.get(key) for key in ("attempts", "checkpoint")}
    return _aside("crash loop", event, facts)


def _brought_back(run: Chronicle, event: Event) -> Episode:
    tasks, time = [str(task) for task in event.get("tasks", ())], float(event["time"])
    hosts = [run.host_at(task, time) for task in tasks]
    avoids = [str(host) for host in event.get("avoids", ())]
    return _aside("brought back", event, {"tasks": tasks, "hosts": hosts, "avoids": avoids})


def _start_failed(run: Chronicle, event: Event) -> Episode:
    keys = ("task", "host", "state", "reason", "hosts", "again")
    return _aside("start failed", event, {key: event.get(key) for key in keys})


def _not_saved(run: Chronicle, event: Event) -> Episode:
    return _aside("not saved", event, {"step": event.get("step")})


def _as_it_is(run: Chronicle, event: Event) -> Episode:
    common = ("v", "time", "kind", "task")
    return _aside(event["kind"], event, {k: v for k, v in event.items() if k not in common})


_ASIDES: dict[str, Callable[[Chronicle, Event], Episode | None]] = {
    "growth": _parked,
    "given back": _given_back,
    "excluded": _excluded,
    "strike": _strike,
    "crash loop": _crash_loop,
    "brought back": _brought_back,
    "hang": _as_it_is,
    "straggler": _as_it_is,
    "preflight": _as_it_is,
    "start failed": _start_failed,
    "spare lost": _as_it_is,
    "not saved": _not_saved,
    "saved again": _as_it_is,
    "cancel": _as_it_is,
    "preempt": _as_it_is,
    "kill": _as_it_is,
    "resume": _as_it_is,
}


def _aside(kind: str, event: Event, facts: dict[str, Any]) -> Episode:
    return Episode(kind, float(event["time"]), text=str(event.get("why", "")), facts=facts)


def _never_members(run: Chronicle) -> Iterator[Episode]:
    """Yield the attempts that ended without having been in a group."""
    members = {(li.task, li.attempt) for round_ in run.rounds for li in run.members(round_)}
    for life in run.lives:
        if (life.task, life.attempt) not in members:
            yield from _came_for_nothing(run, life)


def _came_for_nothing(run: Chronicle, life: Life) -> Iterator[Episode]:
    end = run.ends.get(run.generation_at(life.started or 0.0))
    if end is not None and (life.started or 0.0) > float(end["time"]):
        return
    told = {
        kind: event for kind, event in life.ends_after(0.0).items() if kind in ("left", "gave up")
    }
    for kind, event in told.items():
        causes: tuple[Cause, ...] = together([why_left(life, {})])
        yield Episode(kind, float(event["time"]), causes)

"""Causes as the beginning of a sentence (pure)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpc_elastic.story.causes import Cause
from hpc_elastic.words import duration

_NAMED = 4

_DIED = "its agent or its node died", "their agents or their nodes died"
_SILENT = "it did not answer any more", "they did not answer any more"
_SEEN = {
    "": _SILENT,
    "its connection closed": _DIED,
    "silent": ("nothing was heard of it any more", "nothing was heard of them any more"),
    "has not found the new leader": (
        "it did not come to the new leader", "they did not come to the new leader",
    ),
    "the scheduler says that its task has ended": (
        "the scheduler says that its task has ended",
        "the scheduler says that their tasks have ended",
    ),
    "did not join again in time": (
        "it did not join again in time", "they did not join again in time",
    ),
}  # fmt: skip
"""What the leader notes of a lost node -> what it means, of one and of several."""


def names(hosts: Sequence[str]) -> str:
    """Return names as a list in a sentence; many are cut short."""
    named = sorted((host or "a node" for host in hosts), key=_naturally)
    if len(named) > _NAMED + 1:
        return f"{', '.join(named[:_NAMED])} and {len(named) - _NAMED} more"
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def _naturally(name: str) -> list[tuple[int, str]]:
    """Sort node2 before node10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def because(causes: Sequence[Cause], leader: str | None) -> str:
    """Return what brought a change about, and who leads now if that has changed."""
    told = [_SAYS.get(cause.what, _other)(cause) for cause in causes]
    if leader is not None and any(c.what not in ("arrived", "returned") for c in causes):
        told.append(f"{leader} leads now")
    return ", ".join(told)


def _was(cause: Cause, what: str) -> str:
    return f"{names(cause.hosts)} {'was' if len(cause.hosts) == 1 else 'were'} {what}"


def _announced(what: str) -> Callable[[Cause], str]:
    def say(cause: Cause) -> str:
        grace = None if cause.given_s is None else f"{duration(cause.given_s)} grace"
        how = ", ".join(part for part in (cause.signal, grace) if part)
        stays = ", and does not come back" if cause.comes_back is False else ""
        return _was(cause, what + (f" ({how})" if how else "")) + stays

    return say


def _of_task(what: str) -> Callable[[Cause], str]:
    """Tell what was done to the tasks of nodes, and what Slurm says of a node at that time."""

    def say(cause: Cause) -> str:
        tasks = "the task" if len(cause.hosts) == 1 else "the tasks"
        was = "was" if len(cause.hosts) == 1 else "were"
        node = f", while Slurm had the node as {cause.detail}" if cause.detail else ""
        return f"{tasks} of {names(cause.hosts)} {was} {what} ({cause.signal or 'SIGTERM'}){node}"

    return say


def _time_limit(cause: Cause) -> str:
    left = "" if cause.given_s is None else f", {duration(cause.given_s)} before it"
    several = len(cause.hosts) > 1
    return f"{names(cause.hosts)} left because of {'their' if several else 'its'} time limit{left}"


def _asked(cause: Cause) -> str:
    by = cause.signal or "a notice file, or the script"
    return _was(cause, f"asked to leave ({by})")


def _seen(cause: Cause) -> str:
    of_one, of_several = _SEEN.get(cause.detail, (cause.detail, cause.detail))
    return of_one if len(cause.hosts) == 1 else of_several


def _lost(cause: Cause) -> str:
    return f"{_was(cause, 'lost')} ({_seen(cause)})"


def _leader_lost(cause: Cause) -> str:
    return f"{names(cause.hosts)}, the leader, was lost ({_seen(cause)})"


def _leader_changed(cause: Cause) -> str:
    return f"{names(cause.hosts)}, the leader, was out of reach for a while"


def _worker_failed(cause: Cause) -> str:
    return (
        f"a worker failed: {cause.detail}"
        if cause.detail
        else f"workers failed on {names(cause.hosts)}"
    )


def _returned(cause: Cause) -> str:
    several = "up to " if len(cause.hosts) > 1 else ""
    away = "" if cause.away_s is None else f" after {several}{duration(cause.away_s)} away"
    return f"{names(cause.hosts)} came back{away}"


def _other(cause: Cause) -> str:
    return f"{names(cause.hosts)} {cause.detail}".strip()


_SAYS: dict[str, Callable[[Cause], str]] = {
    "preempted": _announced("preempted"),
    "signalled": _of_task("told to stop"),
    "requeued": _of_task("requeued"),
    "cancelled": _of_task("cancelled"),
    "run ended": _of_task("told to stop, for its run had ended"),
    "time limit": _time_limit,
    "asked": _asked,
    "given back": lambda c: _was(c, "given back to the queue"),
    "excluded": lambda c: f"{_was(c, 'excluded')} ({c.detail})",
    "gave up": lambda c: f"the agent of {names(c.hosts)} gave up ({c.detail})",
    "agent ended": lambda c: f"the agent of {names(c.hosts)} was ended by {c.detail}",
    "lost": _lost,
    "leader lost": _leader_lost,
    "leader changed": _leader_changed,
    "out of reach": lambda c: _was(c, "out of reach for a while"),
    "worker failed": _worker_failed,
    "rejoined": lambda c: c.detail or "an agent joined anew",
    "arrived": lambda c: f"{names(c.hosts)} joined",
    "returned": _returned,
}

"""Finds each fault in what the run's story tells (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from hpc_elastic.report.causes import TimelineEntry
from soak.plan import Fault

_CLOCK_S = 0.5
"""What is written down within that time of a fault may have been seen together with it."""
_CAME = ("arrived", "returned")


class Finding(Enum):
    """What the story has to say of a fault."""

    TOLD = "told"
    SHARED = "shared"  # the run was stopped by another one, thrown together with it
    NOTHING = "nothing"  # nor need it; if the group has changed nevertheless, that is shown
    MISSING = "MISSING"


@dataclass(frozen=True)
class Thrown:
    """A fault that was thrown.

    Attributes:
        fault: Which one.
        hosts: Those that were hit; none: it concerns no node of its own.
        time: When, in Unix seconds.
        until: When the run had got over it, and over all that was thrown with it.
        damaged_step: The step of the checkpoint that was damaged.
        volley: Number of the first fault of those that were thrown together.
    """

    fault: Fault
    hosts: tuple[str, ...]
    time: float
    until: float = float("inf")
    damaged_step: int | None = None
    volley: int = 0


@dataclass(frozen=True)
class Told:
    """What the story says of a fault.

    Attributes:
        finding: In one word.
        episodes: Those that tell of it.
        problem: What is missing, in words; empty: nothing.
    """

    finding: Finding
    episodes: tuple[TimelineEntry, ...] = ()
    problem: str = ""

    @property
    def lost_steps(self) -> int:
        """Steps that were made again."""
        return sum(e.cost.lost_steps or 0 for e in self.episodes)

    @property
    def pause_s(self) -> float:
        """Seconds without a step, together."""
        return sum(e.cost.pause_s or 0.0 for e in self.episodes)


def tell(thrown: Thrown, others: Iterable[Thrown], story: Sequence[TimelineEntry]) -> Told:
    """Return what a story says of a fault.

    Args:
        thrown: The fault.
        others: All faults that were thrown.
        story: The run's episodes.
    """
    together = [o for o in others if o.volley == thrown.volley and o is not thrown]
    began = min(o.time for o in [thrown, *together])
    during = [e for e in story if began - _CLOCK_S <= e.time <= thrown.until + _CLOCK_S]
    changes = tuple(e for e in during if _is_brought_about(e))
    if not (thrown.fault.of.tells or thrown.fault.of.aside):
        return Told(Finding.NOTHING, changes)
    told = tuple(e for e in during if _named(e, thrown) or _is_aside_of(e, thrown))
    problem = _what_is_missing(thrown, told)
    if not problem:
        return Told(Finding.TOLD, told)
    if changes and together:
        return Told(Finding.SHARED, told or changes)
    return Told(Finding.MISSING, told, problem)


def _what_is_missing(thrown: Thrown, told: Sequence[TimelineEntry]) -> str:
    kind, step = thrown.fault.of, thrown.damaged_step
    unnamed = sorted(set(thrown.hosts).difference(*(_named(e, thrown) for e in told)))
    if kind.tells and unnamed:
        return f"no episode says of {', '.join(unnamed)}: {' or '.join(sorted(kind.tells))}"
    if kind.aside and not any(_is_aside_of(e, thrown) for e in told):
        return f"no episode of the kind {kind.aside!r} is told of {', '.join(thrown.hosts) or 'it'}"
    if step is not None and any(e.cost.resumed_step == step for e in told):
        return f"the training went on from step {step}, which was damaged"
    return ""


def _named(episode: TimelineEntry, thrown: Thrown) -> set[str]:
    """Return the hosts of a fault that an episode names for what was done to them."""
    causes = (c for c in episode.causes if c.what in thrown.fault.of.tells)
    return {host for cause in causes for host in cause.hosts} & set(thrown.hosts)


def _is_aside_of(episode: TimelineEntry, thrown: Thrown) -> bool:
    if episode.kind != thrown.fault.of.aside:
        return False
    facts = episode.facts
    hosts = {facts.get("host"), *(rank.get("host") for rank in facts.get("ranks") or ())}
    return not thrown.hosts or not hosts.isdisjoint(thrown.hosts)


def _is_brought_about(episode: TimelineEntry) -> bool:
    """Tell whether the group changed, and not because nodes came."""
    return bool({c.what for c in episode.causes} - set(_CAME))

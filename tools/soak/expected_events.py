"""Search of each injected fault in the run's timeline (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from hpc_elastic.report.timeline import TimelineEntry
from soak.plan import Fault

_CLOCK_S = 0.5
"""Timeline entries within that time of a fault may belong to it."""
_JOINED = ("arrived", "returned")


class ExplanationKind(Enum):
    """What the timeline shows of a fault."""

    EXPLAINED = "explained"
    SHARED = "shared"  # another fault that overlaps it has changed the group
    NOT_EXPECTED = "not expected"  # it need not show; a change of the group is shown nevertheless
    MISSING = "MISSING"


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected.

    Attributes:
        fault: The planned fault.
        hosts: The nodes that were hit; empty if it concerns no node.
        time: When, in Unix seconds.
        until: When the run had recovered from it, and from all that overlap it.
        damaged_step: The step of the checkpoint that was damaged; None if none was.
        group: Number of the first fault of those that overlap.
    """

    fault: Fault
    hosts: tuple[str, ...]
    time: float
    until: float = float("inf")
    damaged_step: int | None = None
    group: int = 0


@dataclass(frozen=True)
class Explanation:
    """What the timeline shows of one fault.

    Attributes:
        kind: In one word.
        entries: The timeline entries that belong to it.
        problem: What is missing, for people; empty if nothing is.
    """

    kind: ExplanationKind
    entries: tuple[TimelineEntry, ...] = ()
    problem: str = ""

    @property
    def lost_steps(self) -> int:
        """Steps that were repeated."""
        return sum(entry.cost.lost_steps or 0 for entry in self.entries)

    @property
    def pause_s(self) -> float:
        """Seconds without a step, in total."""
        return sum(entry.cost.pause_s or 0.0 for entry in self.entries)


@dataclass
class SoakRecord:
    """The course of a soak.

    Attributes:
        run: The run directory.
        companion: The run directory of the companion.
        started: When the first fault could be injected, in Unix seconds.
        injected: The faults that were injected.
        skipped: Faults that had no target when their turn came, and why.
        not_reached: Faults for which there was no time.
        timeline: The timeline of the run.
        companion_timeline: The timeline of the companion.
        status_regressions: Reads of status.json that showed an earlier leader than one before.
        problem: What ended the soak early; empty if nothing did.
    """

    run: Path
    companion: Path
    started: float = 0.0
    injected: list[InjectedFault] = field(default_factory=list)
    skipped: list[tuple[Fault, str]] = field(default_factory=list)
    not_reached: list[Fault] = field(default_factory=list)
    timeline: list[TimelineEntry] = field(default_factory=list)
    companion_timeline: list[TimelineEntry] = field(default_factory=list)
    status_regressions: list[str] = field(default_factory=list)
    problem: str = ""

    def explanations(self) -> list[tuple[InjectedFault, Explanation]]:
        """Return each injected fault with what the timeline of its run shows of it."""
        timelines = {False: self.timeline, True: self.companion_timeline}
        return [
            (each, explain(each, self.injected, timelines[each.fault.kind.companion]))
            for each in self.injected
        ]


def explain(
    injected: InjectedFault, others: Iterable[InjectedFault], timeline: Sequence[TimelineEntry]
) -> Explanation:
    """Return what a timeline shows of a fault.

    Args:
        injected: The fault.
        others: All faults that were injected.
        timeline: The timeline of the run that it has hit.
    """
    overlapping = [o for o in others if o.group == injected.group and o is not injected]
    began = min(o.time for o in [injected, *overlapping])
    during = [e for e in timeline if began - _CLOCK_S <= e.time <= injected.until + _CLOCK_S]
    changes = tuple(
        e for e in during if not e.is_open and {cause.what for cause in e.causes} - set(_JOINED)
    )
    if not (injected.fault.kind.causes or injected.fault.kind.timeline_kind):
        return Explanation(ExplanationKind.NOT_EXPECTED, changes)
    entries = tuple(e for e in during if _named_hosts(e, injected) or _is_own_entry(e, injected))
    problem = _missing_part(injected, entries)
    if not problem:
        return Explanation(ExplanationKind.EXPLAINED, entries)
    if changes and overlapping:
        return Explanation(ExplanationKind.SHARED, entries or changes)
    return Explanation(ExplanationKind.MISSING, entries, problem)


def _missing_part(injected: InjectedFault, entries: Sequence[TimelineEntry]) -> str:
    kind, step = injected.fault.kind, injected.damaged_step
    unnamed = sorted(set(injected.hosts).difference(*(_named_hosts(e, injected) for e in entries)))
    if kind.causes and unnamed:
        return f"no entry on {', '.join(unnamed)} with the cause {' or '.join(sorted(kind.causes))}"
    if kind.timeline_kind and not any(_is_own_entry(e, injected) for e in entries):
        where = f" on {', '.join(injected.hosts)}" if injected.hosts else ""
        return f"no entry of the kind {kind.timeline_kind!r}{where}"
    if step is not None and any(e.cost.resumed_step == step for e in entries):
        return f"the training resumed from step {step}, which was damaged"
    return ""


def _named_hosts(entry: TimelineEntry, injected: InjectedFault) -> set[str]:
    """Return the hosts of a fault that an entry names with a fitting cause."""
    causes = (cause for cause in entry.causes if cause.what in injected.fault.kind.causes)
    return {host for cause in causes for host in cause.hosts} & set(injected.hosts)


def _is_own_entry(entry: TimelineEntry, injected: InjectedFault) -> bool:
    if entry.kind != injected.fault.kind.timeline_kind:
        return False
    facts = entry.facts
    hosts = {facts.get("host"), *(rank.get("host") for rank in facts.get("ranks") or ())}
    return not injected.hosts or not hosts.isdisjoint(injected.hosts)

"""Judge a training by what its replicas told of their steps (pure)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Commit:
    """A committed step: its number (from 1), the state's hash before and after, contributors."""

    step: int
    before: str
    after: str
    participants: int
    at_s: float = 0.0


@dataclass
class Life:
    """One process of a replica.

    Attributes:
        hit: It was killed or stopped at some time.
        failed: Steps that it did not commit, with the reasons.
        wrong: What its gradients' means were not.
        final: The hash of its last state, and its step; None: it did not live to the end.
    """

    name: str
    hit: bool = False
    commits: list[Commit] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    final: tuple[str, int] | None = None


def judge(lives: Sequence[Life]) -> list[str]:
    """Return what is wrong with a training that has ended; empty: nothing."""
    found = [f"{life.name}: {wrong}" for life in lives for wrong in life.wrong]
    finals = {life.final for life in lives if life.final is not None}
    if len(finals) != 1:
        return [*found, f"the last states differ: { {life.name: life.final for life in lives} }"]
    ((last, step),) = finals
    lineage, broken = trace(last, step, [c for life in lives for c in life.commits])
    found += broken
    for life in lives:
        away = [c.step for c in life.commits if lineage.get(c.step) != c.after]
        if away and not life.hit:
            found.append(
                f"{life.name}, which nothing happened to, made steps that are lost: {away}"
            )
    return found


def trace(last: str, step: int, commits: Iterable[Commit]) -> tuple[dict[int, str], list[str]]:
    """Follow the last state back to its origin; return the hash after each step, and complaints."""
    by_state: dict[tuple[int, str], set[str]] = {}
    for commit in commits:
        by_state.setdefault((commit.step, commit.after), set()).add(commit.before)
    lineage: dict[int, str] = {}
    while step > 0:
        befores = by_state.get((step, last), set())
        if not befores:
            return lineage, [f"nobody told of having made step {step} to {last}"]
        if len(befores) > 1:
            return lineage, [f"step {step} to {last} was made from {len(befores)} states"]
        lineage[step] = last
        (last,), step = befores, step - 1
    return lineage, []


def failures(lives: Sequence[Life], bound: int) -> list[str]:
    """Return the failed steps of those that had more of them than others were hit."""
    too_many = [life for life in lives if not life.hit and len(life.failed) > bound]
    return [f"{life.name} failed {why}" for life in too_many for why in life.failed]


def dropped(lives: Sequence[Life], slots: int) -> list[str]:
    """Return whose steps were made by fewer once all had been there."""
    found = []
    for life in lives:
        sizes = [commit.participants for commit in life.commits]
        if slots in sizes and (fewer := [s for s in sizes[sizes.index(slots) :] if s != slots]):
            found.append(f"{life.name} made {len(fewer)} steps without all {slots}: {fewer[:9]}")
    return found

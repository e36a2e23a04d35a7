"""Carries checkpoint boundaries between the workers' control pages and the leader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpc_elastic.control import ControlPage, Progress
from hpc_elastic.rendezvous.boundary import STRAGGLE_S


class Leader(Protocol):
    """The part of `rendezvous.session.Session` that is used here."""

    @property
    def hold(self) -> int:
        """Not 0: workers are to stay at their next checkpoint boundary."""

    def boundary(self, step: int, *, held: int) -> None:
        """Report that all workers have announced the checkpoint of a step."""


class Boundaries:
    """What one node's workers and their leader have told each other in one round."""

    def __init__(self, leader: Leader, pages: Sequence[ControlPage]) -> None:
        self._leader = leader
        self._pages = pages
        self._hold = 0
        self._reported: tuple[int, int] | None = None
        self._held_since: float | None = None

    def look(self, now: float) -> None:
        """Pass on what is new; called every few hundredths of a second. Monotonic seconds."""
        if self._hold != self._leader.hold:
            self._hold = self._leader.hold
            for page in self._pages:
                page.hold(self._hold)
        workers = [page.read() for page in self._pages]
        held = max((w.held for w in workers), default=0)
        if not held:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        straggling = self._held_since is not None and now - self._held_since >= STRAGGLE_S
        step = _announced(workers, by_any=straggling)
        if step is not None and (step, held) != self._reported:
            self._reported = (step, held)
            self._leader.boundary(step, held=held)


def _announced(workers: Sequence[Progress], *, by_any: bool) -> int | None:
    """Return the last boundary that all workers have announced, or any where that has to do."""
    steps = [w.boundary for w in workers if w.boundary is not None]
    if by_any and steps:
        return max(steps)
    return min(steps) if steps and len(steps) == len(workers) else None

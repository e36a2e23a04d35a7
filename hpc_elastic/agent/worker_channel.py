"""Carries what one node's workers and their leader tell each other in a round.

Out of the control pages go checkpoint boundaries and the wish for a checkpoint; in come the request
to hold, proposals of a step to save at, and their confirmation (`hpc_elastic.worker.shared_page`
has the theory).

A proposal is answered once it has been on every page for `SEEN_AFTER_S`: then a worker that has
published an earlier step will see it in time, and one that is at the step either waits there, or
has passed it. A confirmed one is answered once more when all workers have passed its step: the
next proposal would take it off the page of one that has not come to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hpc_elastic._util import ThroughputMeter
from hpc_elastic.rendezvous.group_change import STRAGGLE_S
from hpc_elastic.rendezvous.session import SaveProposal
from hpc_elastic.worker.shared_page import ReadablePage, WorkerStatus

Rule = Callable[[SaveProposal, WorkerStatus], bool | None]

SEEN_AFTER_S = 0.005
"""A store into a page is visible to every core long before."""

_PACE_S = 3.0
"""The pace of the workers is taken over so long."""
_SHORTEST_S = 1.0
"""Over less it would be a matter of chance."""


class BoundaryReporter(Protocol):
    """The part of `rendezvous.session.Session` that is used here."""

    @property
    def hold(self) -> int:
        """Not 0: workers are to stay at their next checkpoint boundary."""

    @property
    def proposal(self) -> SaveProposal | None:
        """The step that all ranks may have to save at; None if there is none."""

    def boundary(self, step: int, *, held: int) -> None:
        """Report that all workers have announced the checkpoint of a step."""

    def answer(self, number: int, *, ok: bool, passed: int | None, rate: float) -> None:
        """Say whether all workers of this node can still save at a proposed step."""

    def want_checkpoint(self) -> None:
        """Ask for a checkpoint of the whole group."""


class SteeredPage(ReadablePage, Protocol):
    """The agent's side of a `hpc_elastic.worker.shared_page.SharedPage`."""

    def hold(self, request: int) -> None:
        """Ask the worker to stay at its next boundary; 0 lets it go."""

    def propose(self, number: int, step: int) -> None:
        """Propose to save at a step; number 0 takes the last proposal back."""

    def confirm(self, number: int) -> None:
        """Say that all ranks will save at the step of a proposal."""


def can_save_at(proposal: SaveProposal, worker: WorkerStatus) -> bool | None:
    """Tell whether a worker will save at a step if it is confirmed (pure).

    Step 0 is proposed to ask who passes steps at all: there, only one that passes none is content.

    Returns:
        None if it has come to that step, and does not wait there: it has passed it, or is about to
        wait.
    """
    if worker.passed is None or worker.passed < proposal.step:
        return True
    if worker.passed > proposal.step or proposal.step == 0:
        return False
    return True if worker.waiting == proposal.number else None


class WorkerChannel:
    """What one node's workers and their leader have told each other in one round.

    Args:
        leader: The session.
        pages: The workers' pages.
        sleep: Waits until a store into a page is visible; the simulator's does not.
        can_save_at: The rule by which a proposal is answered; the simulator breaks it on purpose.
    """

    def __init__(
        self,
        leader: BoundaryReporter,
        pages: Sequence[SteeredPage],
        *,
        sleep: Callable[[float], None] = time.sleep,
        can_save_at: Rule = can_save_at,
    ) -> None:
        self._leader = leader
        self._pages = pages
        self._hold = 0
        self._reported: tuple[int, int] | None = None
        self._held_since: float | None = None
        self._wanted = 0
        self._proposals = _Proposals(leader, pages, sleep, can_save_at)

    def look(self, now: float) -> None:
        """Pass on what is new; called every few hundredths of a second. Monotonic seconds."""
        proposal = self._leader.proposal  # before the hold: the request was sent before it
        self._pass_hold()
        self._proposals.look(proposal, now)
        workers = [page.read() for page in self._pages]
        self._pass_boundary(workers, now)
        self._pass_wish(workers)

    def _pass_hold(self) -> None:
        if self._hold != self._leader.hold:
            self._hold = self._leader.hold
            for page in self._pages:
                page.hold(self._hold)

    def _pass_boundary(self, workers: Sequence[WorkerStatus], now: float) -> None:
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

    def _pass_wish(self, workers: Sequence[WorkerStatus]) -> None:
        wanted = sum(w.wanted for w in workers)
        if wanted != self._wanted:
            self._wanted = wanted
            self._leader.want_checkpoint()


class _Proposals:
    """The proposed step on its way to the workers, and their answer on its way back."""

    def __init__(
        self,
        leader: BoundaryReporter,
        pages: Sequence[SteeredPage],
        sleep: Callable[[float], None],
        rule: Rule,
    ) -> None:
        self._leader = leader
        self._pages = pages
        self._sleep = sleep
        self._can_save_at = rule
        self._shown: SaveProposal | None = None
        self._answered = True
        self._doubted = False
        self._done = True
        self._pace = ThroughputMeter(_PACE_S, _SHORTEST_S)

    def look(self, proposal: SaveProposal | None, now: float) -> None:
        """Show what is new to the workers, and answer for them."""
        if _number(proposal) != _number(self._shown):
            self._show(proposal)
        if proposal is not None and proposal.confirmed and not _is_confirmed(self._shown):
            for page in self._pages:
                page.confirm(proposal.number)
        self._shown = proposal
        workers = [page.read() for page in self._pages]
        self._pace.record_count(_furthest(workers), now)
        if proposal is not None and not self._answered:
            self._answer(proposal, workers)
        elif proposal is not None and proposal.confirmed and not self._done:
            self._tell_when_done(proposal, workers)

    def _show(self, proposal: SaveProposal | None) -> None:
        for page in self._pages:
            page.propose(*((proposal.number, proposal.step) if proposal else (0, 0)))
        self._shown = None
        self._answered, self._doubted, self._done = proposal is None, False, False
        if proposal is not None:
            self._sleep(SEEN_AFTER_S)

    def _answer(self, proposal: SaveProposal, workers: Sequence[WorkerStatus]) -> None:
        can = [self._can_save_at(proposal, worker) for worker in workers]
        if False not in can and None in can and not self._doubted:
            self._doubted = True  # one that has just come to the step is about to wait there
            return
        self._answered = True
        passed, rate = _furthest(workers), self._pace.rate or 0.0
        self._leader.answer(proposal.number, ok=all(can), passed=passed, rate=rate)

    def _tell_when_done(self, proposal: SaveProposal, workers: Sequence[WorkerStatus]) -> None:
        passed = [w.passed for w in workers if w.passed is not None]
        if len(passed) == len(workers) and min(passed) > proposal.step:
            self._done = True
            rate = self._pace.rate or 0.0
            self._leader.answer(proposal.number, ok=True, passed=min(passed), rate=rate)


def _furthest(workers: Sequence[WorkerStatus]) -> int | None:
    return max((w.passed for w in workers if w.passed is not None), default=None)


def _number(proposal: SaveProposal | None) -> int:
    return 0 if proposal is None else proposal.number


def _is_confirmed(proposal: SaveProposal | None) -> bool:
    return proposal is not None and proposal.confirmed


def _announced(workers: Sequence[WorkerStatus], *, by_any: bool) -> int | None:
    """Return the last boundary that all workers have announced, or any where that has to do."""
    steps = [w.boundary for w in workers if w.boundary is not None]
    if by_any and steps:
        return max(steps)
    return min(steps) if steps and len(steps) == len(workers) else None

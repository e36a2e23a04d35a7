"""Step agreement: a step at which all members do something together, without a collective (pure).

Theory of operation
-------------------
Members run ahead of each other, and none may wait for a collective or for the GPU to agree on a
step. So one place, the leader, *proposes* a step that is ahead of all of them. A member that comes
to the proposed step waits there, and goes on when the step is confirmed, moved or withdrawn. Each
member votes

  ok      each of its workers is before the step, or waits there: all of them see the proposal
  not ok  some worker has passed the step, or may be about to without having seen the proposal

and reports how far its workers are. A vote that is not ok is followed by a proposal further ahead.
When every member has voted ok on the *same* proposal, the step is *confirmed*. From its ok to the
confirmation no worker of a member can pass the step, since only the leader moves it. So every
member acts at a confirmed step, and none at another.

The first proposal, of step 0, only asks each member for its step. The next one is ahead of the
furthest member by ``ahead_s`` seconds of the fastest member's steps, and each further one by twice
as much as the one before: the members are overtaken, however wrong the rates are. If no worker has
passed any step, the proposal is withdrawn, and made again after a pause.

A member that does not vote within `VOTE_WITHIN_S` has the proposal withdrawn, so that the others
wait at a step no longer than that.

A confirmed step stands until it is known that every member has *passed* it. Before that another
proposal could overwrite it where a worker has not come to it yet.

`hpc_elastic.rendezvous` agrees so on the step of a checkpoint among the nodes of a round, and
`hpc_elastic.ft` on the call at which the members of a quorum ask for the next one. Events return
what all members are to be sent. Times are monotonic seconds of the leader.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

VOTE_WITHIN_S = 5.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
"""Wait between a withdrawn proposal and the next one: at first, and at most."""
_PAUSE_GROWS = 1.25
_MEMBERS_PER_S = 1000
"""Limits the rate of questions: one costs a message to each member and one back."""
_FASTEST = 1e6
_MOST_DOUBLINGS = 30
_LAST_STEP = 2**40 - 2

M = TypeVar("M", bound=Hashable)


@dataclass(frozen=True)
class Proposal:
    """All members may have to act at this step; number 0 withdraws the proposal before."""

    number: int
    step: int


@dataclass(frozen=True)
class Confirmation:
    """All members act at the step of this proposal."""

    number: int


@dataclass(frozen=True)
class StepVote:
    """A member's vote on a proposal.

    Attributes:
        ok: No worker of the member has passed the step, nor is about to without having seen the
            proposal.
        passed: The largest step that one of its workers has passed; None: none has passed any.
    """

    number: int
    ok: bool
    passed: int | None
    rate: float


class AgreementState(Enum):
    """How far the agreement is."""

    IDLE = "idle"
    ASKING = "asking"
    CONFIRMED = "confirmed"


class StepAgreement(Generic[M]):
    """Agreements of one group of members, one after the other.

    A step is proposed ``ahead_s`` ahead of the furthest member, in seconds of steps. Numbers rise
    from that of the last proposal before.
    """

    def __init__(self, ahead_s: float, number: int = 0) -> None:
        self.state = AgreementState.IDLE
        self.step = 0  # proposed or confirmed; 0: a question
        self.number = number
        self.is_fixed = False  # whether a member acts at the step already, so it cannot be moved
        self.awaited: set[M] = set()  # that have not voted, or not passed the confirmed step
        self.furthest: int | None = None  # the largest step that any worker is known to have passed
        self.since = 0.0  # when the last proposal was made, or confirmed
        self._ahead_s = ahead_s
        self._members: set[M] = set()
        self._rate = 0.0
        self._doublings = 0
        self._due = -math.inf
        self._pause_s = FIRST_PAUSE_S

    @property
    def proposal(self) -> Proposal:
        """The last proposal, for a member that may have missed it."""
        return Proposal(self.number, self.step)

    # ---- events: each returns what all members are to be sent ----------------------------

    def begin_agreement(self, members: Collection[M], now: float) -> Proposal | None:
        """Ask how far the members are, unless an agreement is under way or has to wait."""
        if self.state is not AgreementState.IDLE or now < self._due:
            return None
        self._doublings, self._rate = 0, 0.0
        return self._propose(0, members, now)

    def begin_at(
        self, step: int, members: Collection[M], now: float
    ) -> Proposal | Confirmation | None:
        """Propose a step at which others act already; it is not moved."""
        self.is_fixed = True
        proposal = self._propose(step, members, now)
        return proposal if self.awaited else self._conclude(now)

    def vote(self, member: M, vote: StepVote, now: float) -> Proposal | Confirmation | None:
        """Count a member's vote."""
        is_due = self.state is AgreementState.ASKING and vote.number == self.number
        if not is_due or member not in self.awaited:
            return None
        self.awaited.discard(member)
        if vote.passed is not None:
            self.furthest = max(vote.passed, self.furthest or 0)
        if 0.0 <= vote.rate <= _FASTEST:  # NaN is ignored, too
            self._rate = max(self._rate, vote.rate)
        if self.step and not vote.ok and not self.is_fixed:
            return self._propose(self._further_step(), self._members, now)
        return self._conclude(now)

    def retain(self, members: Collection[M], now: float) -> Proposal | Confirmation | None:
        """Wait for these members only: the others have left, or act already."""
        self._members.intersection_update(members)
        self.awaited.intersection_update(members)
        return self._conclude(now)

    def withdraw(self, now: float) -> Proposal | None:
        """Withdraw the proposal; a confirmed step stands. The next proposal waits for a while."""
        if self.state is not AgreementState.ASKING:
            return None
        self.state, self.is_fixed = AgreementState.IDLE, False
        self.awaited.clear()
        self.pause(max(self._pause_s, len(self._members) / _MEMBERS_PER_S), now)
        self._pause_s = min(LONGEST_PAUSE_S, _PAUSE_GROWS * self._pause_s)
        return Proposal(0, 0)

    def pass_step(self, member: M) -> None:
        """A member has passed the confirmed step; once all have, another may be proposed."""
        self.awaited.discard(member)
        if not self.awaited and self.state is AgreementState.CONFIRMED:
            self.state = AgreementState.IDLE

    def pause(self, for_s: float, now: float) -> None:
        """Let the next agreement begin after a while."""
        self._due = now + for_s

    def hurry(self) -> None:
        """There is a new reason: let the next agreement begin at once."""
        self._due, self._pause_s = -math.inf, FIRST_PAUSE_S

    def is_late(self, now: float) -> bool:
        """Return whether votes have been missing for too long."""
        return self.state is AgreementState.ASKING and now - self.since > VOTE_WITHIN_S

    # ---- rules ---------------------------------------------------------------------------

    def _propose(self, step: int, members: Collection[M], now: float) -> Proposal:
        self.state = AgreementState.ASKING
        self.number += 1
        self.step, self.since = step, now
        self._members = set(members)
        self.awaited = set(members)
        return self.proposal

    def _further_step(self) -> int:
        ahead = (1 + int(self._rate * self._ahead_s)) << self._doublings
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
        return min(max(self.furthest or 0, self.step) + ahead, _LAST_STEP)

    def _conclude(self, now: float) -> Proposal | Confirmation | None:
        if self.state is not AgreementState.ASKING or self.awaited:
            return None
        if self.step == 0 and self.furthest is None:
            return self.withdraw(now)
        if self.step == 0:
            return self._propose(self._further_step(), self._members, now)
        self.state, self.since = AgreementState.CONFIRMED, now
        self.awaited = set(self._members)
        self._pause_s = FIRST_PAUSE_S
        return Confirmation(self.number)

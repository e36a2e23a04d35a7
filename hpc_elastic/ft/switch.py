"""At which call all members of a quorum ask for the next one: proposed, answered, confirmed (pure).

Theory of operation
-------------------
Where somebody joins, or leaves as announced, nothing has failed, and no step shall. The members
are in lockstep but for a call or two, and the keeper hears of their calls only by asking. So it
proposes a call that is ahead of everybody; each member answers whether all of its workers will see
the proposal before they begin that call (ok), and those that come to it wait there. When all have
said ok to the *same* proposal it is confirmed, and all ask at that call.

The first proposal, of call 0, only asks how far everybody is. The next one is ahead of the furthest
by `AHEAD_S` of the fastest's calls, at least by one, and every further one by twice as much, so
that the members are overtaken however wrong the rates are.

A member that does not answer within `ANSWER_WITHIN_S`, because its code holds the interpreter, has
the proposal taken back, so that the others do not wait at it; it is asked again after a pause that
grows. Only answers are waited for in this way, never a call: calls may be an hour apart, and a
confirmed call stands until the quorum is over.

A `Switch` belongs to one quorum. Numbers of proposals rise over all switches and keepers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from enum import Enum

from hpc_elastic.ft.protocol import At, Confirm, Propose

ANSWER_WITHIN_S = 5.0
AHEAD_S = 0.02
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 5.0
_FASTEST = 1e6
_MOST_TRIES = 20


class State(Enum):
    """How far the agreement is."""

    IDLE = "idle"
    ASKING = "asking"
    CONFIRMED = "confirmed"


class Switch:
    """The agreement of one quorum's members on the call at which they ask for the next.

    Attributes:
        state: How far it is.
        call: The call that is proposed or confirmed; 0: only a question.
        number: The last proposal's.
        is_fixed: The call can not be moved, since a member asks there already.
        awaited: Members that have not answered the last proposal.
    """

    def __init__(self, quorum_id: int, number: int = 0, *, pause_s: float = FIRST_PAUSE_S) -> None:
        self.state = State.IDLE
        self.call = 0
        self.number = number
        self.is_fixed = False
        self.awaited: set[str] = set()
        self._quorum_id = quorum_id
        self._members: set[str] = set()
        self._furthest = 0
        self._rate = 0.0
        self._tries = 0
        self._since = 0.0
        self._due = -math.inf
        self._pause_s = pause_s

    @property
    def proposal(self) -> Propose:
        """The last proposal, for a member that may have missed it."""
        return Propose(self._quorum_id, self.number, self.call)

    # ---- events: each returns what all members are told ----------------------------------

    def begin(self, members: Iterable[str], now: float) -> Propose | None:
        """There is reason to switch; it is asked at once, or when the pause is over."""
        if self.state is not State.IDLE or now < self._due:
            return None
        self._tries, self._rate = 0, 0.0
        return self._propose(0, members, now)

    def begin_at(self, call: int, members: Iterable[str], now: float) -> Propose | Confirm | None:
        """Some members ask at this call already; the others, if they can, are to do so as well."""
        self.is_fixed = True
        propose = self._propose(call, members, now)
        return propose if self.awaited else self._conclude(now)

    def answered(self, replica: str, at: At, now: float) -> Propose | Confirm | None:
        """A member has answered; unless ``is_fixed``, it may have passed the call."""
        if self.state is not State.ASKING or at.number != self.number:
            return None
        self._learn(at)
        if self.call and not at.ok and not self.is_fixed:
            return self._propose(self._further(), self._members, now)
        self.awaited.discard(replica)
        return self._conclude(now)

    def forget(self, replica: str, now: float) -> Propose | Confirm | None:
        """A member has left in peace."""
        self._members.discard(replica)
        self.awaited.discard(replica)
        return self._conclude(now)

    def forget_all_but(self, members: Collection[str], now: float) -> Propose | Confirm | None:
        """Only these are waited for; the others ask already."""
        self._members.intersection_update(members)
        self.awaited.intersection_update(members)
        return self._conclude(now)

    def take_back(self, now: float) -> Propose | None:
        """Nobody is to wait at the proposed call; a confirmed one stands."""
        if self.state is not State.ASKING:
            return None
        self.state, self.is_fixed = State.IDLE, False
        self.awaited.clear()
        self._due = now + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        return Propose(self._quorum_id, 0, 0)

    def pause(self, now: float) -> None:
        """Do not begin at once."""
        self._due = now + LONGEST_PAUSE_S

    def hurry(self) -> None:
        """There is a new reason: the pause is over."""
        self._due, self._pause_s = -math.inf, FIRST_PAUSE_S

    def is_late(self, now: float) -> bool:
        """Whether answers have been waited for too long."""
        return self.state is State.ASKING and now - self._since > ANSWER_WITHIN_S

    # ---- rules ----------------------------------------------------------------------------

    def _propose(self, call: int, members: Iterable[str], now: float) -> Propose:
        self.state = State.ASKING
        self.number += 1
        self.call, self._since = call, now
        self._members = set(members)
        self.awaited = set(self._members)
        return Propose(self._quorum_id, self.number, call)

    def _conclude(self, now: float) -> Propose | Confirm | None:
        if self.state is not State.ASKING or self.awaited:
            return None
        if self.call == 0:
            return self._propose(self._further(), self._members, now)
        self.state = State.CONFIRMED
        return Confirm(self._quorum_id, self.number)

    def _learn(self, at: At) -> None:
        self._furthest = max(self._furthest, at.call)
        if 0.0 <= at.rate <= _FASTEST:  # a rate that is no number counts for nothing
            self._rate = max(self._rate, at.rate)

    def _further(self) -> int:
        ahead = max(1, math.ceil(self._rate * AHEAD_S)) << self._tries
        self._tries = min(self._tries + 1, _MOST_TRIES)
        return max(self._furthest, self.call) + ahead

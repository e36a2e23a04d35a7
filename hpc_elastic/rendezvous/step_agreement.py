"""On which step all ranks save: proposed, answered, confirmed (pure).

Theory of operation
-------------------
Ranks run ahead of each other, by as many steps as the script lets them, and nobody may wait for a
collective or for the GPU to agree on a step. So the leader *proposes* a step that is ahead of
everybody, on the page that each worker shares with its agent (`hpc_elastic.worker.shared_page`). A
worker that comes to the proposed step waits there, and goes on when it is confirmed (it saves),
moved or taken back (it does not). Each member answers

  ok      each of its workers is before the step, or waits there: all of them will see the proposal
  not ok  some worker has passed the step, or may be about to without having seen the proposal

and says how far its workers are. One that is not ok is followed by a proposal further ahead. When
every member has said ok to the *same* proposal, the step is *confirmed*. From the first ok to the
confirmation no worker of that member can get past the step, since only the leader moves it; so
every rank saves at a confirmed step, and none at another.

A first proposal, of step 0, only asks how far everybody is. The next is ahead of the furthest by
half a second's steps of the fastest, and every further one by twice as much as the one before: the
ranks are overtaken, however wrong the rates are. If no worker has ever asked whether to save, the
script may not do so, or not yet: the proposal is taken back, and after a while asked again.

A member that does not answer within ``ANSWER_WITHIN_S`` has the proposal taken back, so that nobody
waits at a step for longer; what is asked next begins with step 0 again.

A confirmed step stands until every member says that all of its workers have *passed* it, or has
announced its checkpoint. Before that a new proposal could overwrite it on the page of a worker that
has not come to it yet.

Why a checkpoint is needed is not known here, but for whether the group is to change after it, and
then ranks *hold* there (`group_change`): the request to hold is sent before the confirmation, so
that whoever is to save at a step is also to stay there. `StepAgreement.held_step` is such a step.

Events return the actions to carry out, in order. Times are monotonic seconds of the leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hpc_elastic.rendezvous.effects import ConfirmStep, ProposeStep
from hpc_elastic.rendezvous.log_entry import Agent

ANSWER_WITHIN_S = 5.0
AHEAD_S = 0.5
ASK_AGAIN_S, LONGEST_PAUSE_S = 0.5, 5.0
"""After a proposal that was taken back, the next one comes so much later: at first, and at most."""
NOT_HELD_S = 30.0
"""Ranks that do not hold where they should make no other checkpoint for so long."""
_MEMBERS_PER_S = 1000
"""A query costs a message to each member and one back: so many a second are asked again at most."""
_FASTEST = 1e5
_LAST_STEP = 2**40 - 1

Action = ProposeStep | ConfirmStep


@dataclass(frozen=True)
class StepVote:
    """What a member says to a proposal; see `hpc_elastic.rendezvous.session.Session.answer`."""

    number: int
    ok: bool
    passed: int | None
    rate: float

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> StepVote:
        """Read it out of an agent's message."""
        passed = message["passed"]
        return cls(
            int(message["number"]), bool(message["ok"]), None if passed is None else int(passed),
            float(message["rate"]),
        )  # fmt: skip


class AgreementState(Enum):
    """How far the agreement is."""

    IDLE = "idle"
    ASKING = "asking"
    CONFIRMED = "confirmed"


@dataclass
class StepAgreement:
    """The agreements of one round, one after the other.

    A round begins with a new one: its workers have fresh pages, and have passed nothing.
    """

    members: tuple[Agent, ...] = ()
    state: AgreementState = AgreementState.IDLE
    wanted: bool = False
    """Whether a worker asks for a checkpoint, and no agreement has been reached since."""
    number: int = 0
    """Of the last proposal in this round."""
    step: int = 0
    held_step: int | None = None
    """The last step that was confirmed for a change of the group."""
    since: float = 0.0
    """When the last proposal was made, or confirmed."""
    furthest: int | None = None
    """The largest step that any worker of the round is known to have passed."""
    _awaited: set[Agent] = field(default_factory=set)
    """Who has not answered the last proposal, or not passed the confirmed step."""
    _needed: bool = False
    _rate: float = 0.0
    _tries: int = 0
    _due: float = 0.0
    _pause_s: float = ASK_AGAIN_S

    @property
    def ahead(self) -> int:
        """The step that is proposed or confirmed; 0: none."""
        return 0 if self.state is AgreementState.IDLE else self.step

    # ---- events -------------------------------------------------------------------------

    def want(self) -> None:
        """A worker asks for a checkpoint of the whole group."""
        self.wanted = True

    def hurry(self) -> None:
        """There is a new reason: do not wait to ask again."""
        self._due, self._pause_s = 0.0, ASK_AGAIN_S

    def advance(self, needed: bool, now: float) -> list[Action]:
        """Time has passed; ``needed``: the group is to change at a checkpoint."""
        if needed and not self._needed:
            self.hurry()
        self._needed = needed
        if self.state is AgreementState.IDLE and (needed or self.wanted) and now >= self._due:
            return self._begin(now)
        if self.state is AgreementState.ASKING:
            if not (needed or self.wanted):
                return self.take_back(now)
            if now - self.since > ANSWER_WITHIN_S:
                return self._ask_later(now)
        return []

    def answered(self, agent: Agent, answer: StepVote, now: float) -> list[Action]:
        """A member has answered a proposal."""
        if agent not in self._awaited or answer.number != self.number:
            return []
        if self.state is AgreementState.CONFIRMED:
            self._note_passed(agent, answer, now)
            return []
        self._awaited.discard(agent)
        self._learn(answer)
        if self.step and not answer.ok:
            return self._propose(self._further(), now)
        return [] if self._awaited else self._conclude(now)

    def announced(self, agent: Agent, step: int, now: float) -> None:
        """A member has announced the checkpoint of a step, and may hold there.

        If it is the confirmed one, no proposal can overwrite that any more, and a later one must
        come where other members hold further on.
        """
        if self.state is AgreementState.CONFIRMED and step >= self.step:
            self._is_passed_by(agent, now)

    def take_back(self, now: float) -> list[Action]:
        """Nobody is to save any more, unless the step is confirmed: then all will."""
        if self.state is not AgreementState.ASKING:
            return []
        self.state = AgreementState.IDLE
        self.wanted = False
        self._awaited.clear()
        return [ProposeStep(self.members, 0, 0)]

    # ---- rules --------------------------------------------------------------------------

    def _begin(self, now: float) -> list[Action]:
        self.state = AgreementState.ASKING
        self._rate, self._tries = 0.0, 0
        return self._propose(0, now)

    def _propose(self, step: int, now: float) -> list[Action]:
        self.number += 1
        self.step, self.since = step, now
        self._awaited = set(self.members)
        return [ProposeStep(self.members, self.number, step)]

    def _learn(self, answer: StepVote) -> None:
        if answer.passed is not None:
            known = answer.passed if self.furthest is None else self.furthest
            self.furthest = max(known, answer.passed)
        if 0.0 <= answer.rate <= _FASTEST:  # a rate that is no number counts for nothing
            self._rate = max(self._rate, answer.rate)

    def _further(self) -> int:
        twice = 1 << self._tries
        self._tries = min(self._tries + 1, 30)
        furthest = max(self.furthest or 0, self.step)
        return min(furthest + twice + int(self._rate * AHEAD_S * twice), _LAST_STEP)

    def _conclude(self, now: float) -> list[Action]:
        """Everybody has answered the proposal: all with ok, unless it was the query."""
        if self.furthest is None:
            if not self._needed:
                self.wanted = False
            return self._ask_later(now)
        if self.step == 0:
            return self._propose(self._further(), now)
        self.state, self.since = AgreementState.CONFIRMED, now
        self.wanted = False
        self.held_step = self.step if self._needed else self.held_step
        self._pause_s = ASK_AGAIN_S
        self._awaited = set(self.members)
        return [ConfirmStep(self.members, self.number)]

    def _ask_later(self, now: float) -> list[Action]:
        wanted = self.wanted
        taken_back = self.take_back(now)
        self.wanted = wanted
        self._due = now + max(self._pause_s, len(self.members) / _MEMBERS_PER_S)
        self._pause_s = min(LONGEST_PAUSE_S, 1.25 * self._pause_s)
        return taken_back

    def _note_passed(self, agent: Agent, answer: StepVote, now: float) -> None:
        if answer.passed is not None and answer.passed > self.step:
            self._learn(answer)
            self._is_passed_by(agent, now)

    def _is_passed_by(self, agent: Agent, now: float) -> None:
        self._awaited.discard(agent)
        if not self._awaited:
            self.state = AgreementState.IDLE
            if self.step == self.held_step:
                self._due = now + NOT_HELD_S

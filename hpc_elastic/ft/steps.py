"""What one worker knows of its quorum, and where in it it is (pure; `link` feeds and asks it).

`protocol` has the rules: calls are counted from the one that asked for the quorum (0); whoever has
been told of a change at a call waits there until it is confirmed or taken back. As long as it
waits, it agrees to other proposals for the same call.
"""

from __future__ import annotations

from hpc_elastic.ft.protocol import NO_QUORUM, At, Broken, Confirm, Propose, Verdict

_SMOOTHING = 0.2


class Steps:
    """One worker's calls in its present quorum.

    Attributes:
        quorum_id: The quorum's; `NO_QUORUM`: none.
        call: The number of the step begun last.
        broken: Why the quorum can not go on.
        must_ask: A step that is begun now needs a new quorum.
        proposal: The change that this worker has agreed to.
        confirmed: Its confirmation.
        is_saved: It was the last moment to save when the step begun last was begun.
    """

    def __init__(self, *, alone: bool) -> None:
        """Begin outside of any quorum.

        Args:
            alone: The group has no other worker, so that this one may ask as soon as the quorum is
                broken; else all do after the same verdict.
        """
        self._alone = alone
        self._interval_s: float | None = None
        self._begun_at: float | None = None
        self.enter(NO_QUORUM)
        self.call = -1

    def enter(self, quorum_id: int) -> None:
        """Begin at call 0 of a quorum."""
        self.quorum_id = quorum_id
        self.call = 0
        self.broken: str | None = None
        self._told = False
        """All workers of the group have been told that it is broken, this one too."""
        self.must_ask = quorum_id == NO_QUORUM
        self.proposal: Propose | None = None
        self.confirmed: Confirm | None = None
        self._settled = 0
        """The call up to which nothing new may be agreed to."""
        self._must_save = False
        self.is_saved = False

    def begin(self, now: float) -> None:
        """Count a step."""
        self.is_saved = self.is_last
        self.call += 1
        if self._begun_at is not None:
            took = now - self._begun_at
            before = took if self._interval_s is None else self._interval_s
            self._interval_s = before + (took - before) * _SMOOTHING
        self._begun_at = now
        if self.confirmed is not None and self.proposal is not None:
            self.must_ask = self.must_ask or self.call >= self.proposal.call
        if not self.undecided:
            self.settle(self.call)

    @property
    def undecided(self) -> bool:
        """Whether the step begun is one at which all may have to ask."""
        return self._undecided_at(self.call)

    @property
    def undecided_next(self) -> bool:
        """Whether that can be said of the step after it."""
        return self._undecided_at(self.call + 1)

    @property
    def switches_next(self) -> bool:
        """Whether all members ask in the step after the one begun, as confirmed."""
        proposal = self.proposal
        return (
            self.confirmed is not None
            and proposal is not None
            and self.broken is None
            and self.call + 1 == proposal.call
        )

    @property
    def is_last(self) -> bool:
        """Whether the group goes in the step after the one begun, and the newest state with it."""
        confirmed = self.confirmed if self.switches_next else None
        goes_last = confirmed is not None and confirmed.leaves and confirmed.last
        return self._must_save or goes_last

    def save_first(self) -> None:
        """There is no quorum for the step begun: it is for saving."""
        self._must_save = self.must_ask = True

    def settle(self, call: int) -> None:
        """Agree to no more proposals for the steps up to this one: it goes on there, or asks."""
        self._settled = max(self._settled, call)

    def _undecided_at(self, call: int) -> bool:
        proposal = self.proposal
        return (
            proposal is not None
            and self.confirmed is None
            and not self.must_ask
            and call >= proposal.call
        )

    def rate(self, now: float) -> float:
        """Return the calls a second lately; 0 before the second."""
        if self._interval_s is None or self._begun_at is None:
            return 0.0
        return 1.0 / max(self._interval_s, now - self._begun_at, 1e-6)

    def proposed(self, propose: Propose, now: float) -> At | None:
        """Agree to a proposal, if it is ahead; return the answer. None: there is none."""
        if propose.quorum_id != self.quorum_id:
            return None
        if propose.number == 0:
            self.proposal = None if self.confirmed is None else self.proposal
            return None
        known = self.proposal
        if self.confirmed is not None and known is not None and propose.call != known.call:
            return None  # another keeper's, who has not heard yet what is confirmed: it will
        ok = self._settled < propose.call
        if propose.call > 0 and (ok or self.confirmed is None):
            self.proposal = propose if ok else None
        return At(self.quorum_id, propose.number, ok, self._settled, self.rate(now))

    def confirm(self, confirm: Confirm) -> None:
        """Make sure that the step at the proposed call asks."""
        proposal = self.proposal
        if proposal is None or confirm.quorum_id != self.quorum_id:
            return
        if confirm.number == proposal.number:
            self.confirmed = confirm
            self.must_ask = self.must_ask or self.call >= proposal.call

    def told_broken(self, broken: Broken) -> bool:
        """Take the keeper's word that a quorum is over; return whether it is this one, and news."""
        if broken.quorum_id != self.quorum_id:
            return False
        is_news = self.broken is None
        self.broken = self.broken or broken.why
        self._told = True
        self.must_ask = self.must_ask or self._alone
        return is_news

    def found_broken(self, quorum_id: int, why: str) -> bool:
        """Mark this quorum as broken by this worker; return whether it is news."""
        if quorum_id != self.quorum_id or self.broken is not None:
            return False
        self.broken = why
        self.must_ask = self.must_ask or self._alone
        return True

    def counted(self, verdict: Verdict) -> None:
        """Take the group's verdict on a step: all its workers know the same now."""
        if verdict.quorum_id == self.quorum_id and self._told:
            self.must_ask = True

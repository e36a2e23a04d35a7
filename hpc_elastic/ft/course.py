"""The course of the quorums: one stands, breaks or is switched, and the next is formed (pure).

`keeper` opens with the rules; this is what its messages, and those of a new keeper, have in common.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hpc_elastic.ft import departures, recovery
from hpc_elastic.ft.protocol import (
    EPOCH_SHIFT,
    NO_QUORUM,
    Ask,
    Broken,
    Confirm,
    Farewell,
    Message,
    Placements,
    Propose,
    SaveFirst,
)
from hpc_elastic.ft.quorum import Roll, Rules, Standing
from hpc_elastic.ft.switch import State, Switch


@dataclass(frozen=True)
class Send:
    """A message to a replica group."""

    replica: str
    message: Message


class Course:
    """The quorums of one keeper's epoch; `keeper.Keeper` takes the messages."""

    _place = staticmethod(recovery.place)

    def __init__(self, epoch: int, rules: Rules, lost: Iterable[str]) -> None:
        """Begin with no quorum; see `keeper.Keeper`."""
        self._roll = Roll(rules, lost)
        self._next_id = (epoch << EPOCH_SHIFT) + 1
        self._switch = Switch(NO_QUORUM, epoch << EPOCH_SHIFT)
        self._leaves: frozenset[str] = frozenset()
        """Who has been told that it leaves at the confirmed call."""
        self._answered: dict[str, Ask] = {}
        self._placed: dict[str, Placements] = {}
        self._is_settled = True
        """All members have come to this keeper."""
        self._is_probing = False
        """It asks how far they are, to see who goes on with what a keeper before it confirmed."""
        self._waits_for = ""

    # ---- a quorum breaks, stands, or is formed -------------------------------------------

    @property
    def _standing(self) -> Standing:
        assert self._roll.standing is not None
        return self._roll.standing

    def _break(self, why: str, besides: str = "") -> list[Send]:
        """The quorum is over; all members are told, once.

        Those that ask for another already are told as well: the answer that brought them into this
        one may still have been under way when they asked.
        """
        standing = self._roll.standing
        if standing is None or not standing.stands:
            return []
        standing.over = why
        broken = Broken(standing.quorum_id, why)
        return [Send(r, broken) for r in standing.stay if r != besides]

    def _leaves_quorum(self, replica: str, ask: Ask, standing: Standing, now: float) -> list[Send]:
        """A member asks for the next quorum while this one stands."""
        switch = self._switch
        if switch.state is State.CONFIRMED and ask.call == switch.call:
            return []
        if not standing.is_adopted or ask.commit_failures or switch.state is State.CONFIRMED:
            return self._break(f"{replica} asks for another, after a step that failed")
        return self._follow(now) if self._is_settled else []

    def _follow(self, now: float) -> list[Send]:
        """Members ask at a call that the last keeper must have confirmed: so do the others."""
        standing, switch = self._standing, self._switch
        asks = self._roll.asks
        calls = {a.call for r, a in asks.items() if r in standing.stay}
        if len(calls) > 1 or (switch.is_fixed and switch.call not in calls):
            return self._break(f"members ask at different calls: {sorted(calls)}")
        if switch.is_fixed:
            return self._say(switch.forget_all_but(standing.silent, now), now)
        return self._say(switch.begin_at(calls.pop(), standing.silent, now), now)

    def _advance(self, now: float) -> list[Send]:
        """Go on as far as it goes without time passing."""
        standing = self._roll.standing
        if standing is not None and standing.stands:
            if self._switch.state is not State.CONFIRMED:
                return self._consider_switch(standing, now)
            if standing.silent and not self._is_long_waited_for(now):
                return []
            return [*self._carry_out_switch(standing, now), *self._form(now)]
        return [*self._dismiss(now), *self._form(now)]

    def _form(self, now: float) -> list[Send]:
        members = self._roll.next_quorum(now)
        if isinstance(members, str):
            self._waits_for = members
            return []
        self._answered = {m: self._roll.asks[m] for m in members}
        self._placed = self._place(self._next_id, members, self._answered)
        self._begin(members, now)
        return [Send(m, p) for m, p in self._placed.items()]

    def _begin(self, members: tuple[str, ...], now: float) -> None:
        self._roll.formed(self._next_id, members, now)
        self._switch = Switch(self._next_id, self._switch.number)
        if self._roll.asks:  # left out, as somebody wants nobody to join: do not try all the time
            self._switch.pause(now)
        self._leaves = frozenset()
        self._is_settled, self._is_probing = True, False
        self._next_id += 1

    # ---- switches ------------------------------------------------------------------------

    def _consider_switch(self, standing: Standing, now: float) -> list[Send]:
        """Begin one if somebody joins or leaves, and give it up if nobody does any more."""
        roll, switch = self._roll, self._switch
        if switch.is_fixed:
            return []
        gone = self._dismiss(now)
        self._waits_for = f"the next switch of quorum {standing.quorum_id}"
        if not self._is_settled:
            return gone
        self._is_probing = self._is_probing and switch.state is State.ASKING and not switch.call
        is_needed = (
            self._is_probing
            or roll.has_newcomers
            or not roll.notices.keys().isdisjoint(standing.stay)
        )
        if not is_needed:
            return [*gone, *self._tell_members(switch.take_back(now))]
        if switch.state is State.IDLE:
            return [*gone, *self._tell_members(switch.begin(standing.stay, now))]
        return gone

    def _say(self, step: Propose | Confirm | None, now: float) -> list[Send]:
        """Tell the members what a switch has come to."""
        if not isinstance(step, Confirm):
            return self._tell_members(step)
        standing = self._standing
        self._leaves, last = departures.at_switch(self._roll, now)
        return [
            Send(r, replace(step, leaves=True, last=last) if r in self._leaves else step)
            for r in standing.stay
            if r in standing.silent
        ]

    def _carry_out_switch(self, standing: Standing, now: float) -> list[Send]:
        """All members ask at the call: the quorum is over, and who is to leave leaves."""
        standing.over = "its members ask for the next one"
        dropped = Broken(standing.quorum_id, "did not ask for the next one in time")
        sends = [Send(r, dropped) for r in standing.silent]
        leaving = [r for r in standing.stay if r in self._leaves and r in self._roll.asks]
        if self._is_unsaved(leaving):
            return [*sends, *self._dismiss(now)]
        for replica in leaving:
            sends.append(Send(replica, Farewell()))
            self._roll.retire(replica)
        return sends

    def _is_unsaved(self, leaving: list[str]) -> bool:
        return departures.is_unsaved(self._roll, leaving)

    def _dismiss(self, now: float) -> list[Send]:
        """Let those go that are under notice, ask, and are in no quorum that stands."""
        sends = []
        for replica, must_save in [*departures.outside(self._roll, now)]:
            if must_save:
                self._roll.forget_ask(replica)  # it asks again once it has saved: it is waited for
                sends.append(Send(replica, SaveFirst()))
            else:
                self._roll.retire(replica)
                sends.append(Send(replica, Farewell()))
        return sends

    def _tell_members(self, message: Message | None) -> list[Send]:
        if message is None:
            return []
        standing = self._standing
        return [Send(r, message) for r in standing.stay if r in standing.silent]

    def _is_long_waited_for(self, now: float) -> bool:
        return self._standing.is_long_waited_for(now, self._roll.rules.wait_for_live_s)

"""The keeper of the quorum: what it hears from the replica groups, and what it tells them (pure).

One keeper serves a run, with its leader, or a lighthouse. Whoever drives it hands over events and
sends what is returned, in order. `quorum` has the rules of who is in, `lighthouse_state` how all
members come to ask at one call, `quorum` who heals from whom; here is what follows from each
message.

The quorum is *broken*, and all its members are told at once, when

- one of them is lost: its connection is gone, or its workers are dead or stopped;
- one says so, or asks for another quorum outside of a switch: its step failed, the others would
  wait for it in their collectives for ever;
- one that is known by number alone has not come to a new keeper in time.

A member that is done (`Shutdown`) breaks nothing at first: others may still be receiving its last
bytes. They are told a while later, in case its node was gone before its connections were closed.

A *switch* is begun for newcomers that ask while the quorum stands, and for members under notice:
the members agree on the call at which all ask for the next quorum (`hpc_elastic.step_agreement`),
so that no step fails. Only votes are waited for, never a call: calls may be an hour apart, and a
confirmed call stands until the quorum is over. Numbers of proposals rise over all switches and
keepers. A member that is confirmed to leave gets its farewell at the switch call, when all have
come to it, so that no collective is cut off; who leaves is said below.

A *new keeper* knows nothing but who is dead for certain. Its ids begin with its epoch. Those who
come back say which quorum they are in (`ReplicaStatus`), and it goes on as if it had formed that:
the newest, if they differ. A proposal of the keeper before may have been confirmed to some and not
to others, so none is taken back before all members are there and have answered a question: who has
a confirmation does not answer, but asks at its call. Then the others are asked to do so at the same
call; only if they are past it the quorum is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpc_elastic.ft import quorum
from hpc_elastic.ft.messages import (
    EPOCH_SHIFT,
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    ConfirmSwitch,
    LeaveGranted,
    LeaveNotice,
    Message,
    ProposeSwitch,
    QuorumAborted,
    QuorumRequest,
    QuorumResults,
    QuorumWaiting,
    ReplicaStatus,
    Shutdown,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.ft.quorum import ActiveQuorum, QuorumRules, ReplicaRegistry, name_some
from hpc_elastic.step_agreement import (
    LONGEST_PAUSE_S,
    AgreementState,
    Confirmation,
    Proposal,
    StepAgreement,
    StepVote,
)

_LOST_AFTER_S = 0.3
"""If so few are missing that they may be those that are dead: they may have left before, as well,
and one that lives is on its way."""
_LAST_BYTES_S = 2.0
_TOLD_AFTER_S, _TOLD_EVERY_S = 0.2, 1.0
_AHEAD_S = 0.02
"""A switch is proposed so far ahead of the furthest member; all are in lockstep but for a call."""


# ---- The course of the quorums: one stands, breaks or is switched, and the next is formed (pure)
# The rules are at the head of this module; this is what its messages, and those of a new keeper,
# have in common.


class QuorumCourse:
    """The quorums of one keeper's epoch; `keeper.LighthouseState` takes the messages."""

    _place = staticmethod(quorum.place)

    def __init__(self, epoch: int, rules: QuorumRules, lost: Iterable[str]) -> None:
        """Begin with no quorum; see `keeper.LighthouseState`."""
        self._roll = ReplicaRegistry(rules, lost)
        self._next_id = (epoch << EPOCH_SHIFT) + 1
        self._switch = StepAgreement[str](_AHEAD_S, epoch << EPOCH_SHIFT)
        self._leaves: frozenset[str] = frozenset()
        """Who has been told that it leaves at the confirmed call."""
        self._answered: dict[str, QuorumRequest] = {}
        self._placed: dict[str, QuorumResults] = {}
        self._is_settled = True
        """All members have come to this keeper."""
        self._is_probing = False
        """It asks how far they are, to see who goes on with what a keeper before it confirmed."""
        self._waits_for = ""

    # ---- a quorum breaks, stands, or is formed -------------------------------------------

    @property
    def _standing(self) -> ActiveQuorum:
        assert self._roll.standing is not None
        return self._roll.standing

    def _break(self, why: str, besides: str = "") -> list[ReplicaMessage]:
        """The quorum is over; all members are told, once.

        Those that ask for another already are told as well: the answer that brought them into this
        one may still have been under way when they asked.
        """
        standing = self._roll.standing
        if standing is None or not standing.stands:
            return []
        standing.over = why
        broken = QuorumAborted(standing.quorum_id, why)
        return [ReplicaMessage(r, broken) for r in standing.stay if r != besides]

    def _leaves_quorum(
        self, replica: str, ask: QuorumRequest, standing: ActiveQuorum, now: float
    ) -> list[ReplicaMessage]:
        """A member asks for the next quorum while this one stands."""
        switch = self._switch
        if switch.state is AgreementState.CONFIRMED and ask.call == switch.step:
            return []
        if (
            not standing.is_adopted
            or ask.commit_failures
            or switch.state is AgreementState.CONFIRMED
        ):
            return self._break(f"{replica} asks for another, after a step that failed")
        return self._follow(now) if self._is_settled else []

    def _follow(self, now: float) -> list[ReplicaMessage]:
        """Members ask at a call that the last keeper must have confirmed: so do the others."""
        standing, switch = self._standing, self._switch
        asks = self._roll.asks
        calls = {a.call for r, a in asks.items() if r in standing.stay}
        if len(calls) > 1 or (switch.is_fixed and switch.step not in calls):
            return self._break(f"members ask at different calls: {sorted(calls)}")
        if switch.is_fixed:
            return self._say(switch.retain(standing.silent, now), now)
        return self._say(switch.begin_at(calls.pop(), standing.silent, now), now)

    def _advance(self, now: float) -> list[ReplicaMessage]:
        """Go on as far as it goes without time passing."""
        standing = self._roll.standing
        if standing is not None and standing.stands:
            if self._switch.state is not AgreementState.CONFIRMED:
                return self._consider_switch(standing, now)
            if standing.silent and not self._is_long_waited_for(now):
                return []
            return [*self._carry_out_switch(standing, now), *self._form(now)]
        return [*self._dismiss(now), *self._form(now)]

    def _form(self, now: float) -> list[ReplicaMessage]:
        members = self._roll.next_quorum(now)
        if isinstance(members, str):
            self._waits_for = members
            return []
        self._answered = {m: self._roll.asks[m] for m in members}
        self._placed = self._place(self._next_id, members, self._answered)
        self._begin(members, now)
        return [ReplicaMessage(m, p) for m, p in self._placed.items()]

    def _begin(self, members: tuple[str, ...], now: float) -> None:
        self._roll.formed(self._next_id, members, now)
        self._switch = StepAgreement(_AHEAD_S, self._switch.number)
        if self._roll.asks:  # left out, as somebody wants nobody to join: do not try all the time
            self._switch.pause(LONGEST_PAUSE_S, now)
        self._leaves = frozenset()
        self._is_settled, self._is_probing = True, False
        self._next_id += 1

    # ---- switches ------------------------------------------------------------------------

    def _consider_switch(self, standing: ActiveQuorum, now: float) -> list[ReplicaMessage]:
        """Begin one if somebody joins or leaves, and give it up if nobody does any more."""
        roll, switch = self._roll, self._switch
        if switch.is_fixed:
            return []
        gone = self._dismiss(now)
        self._waits_for = f"the next switch of quorum {standing.quorum_id}"
        if not self._is_settled:
            return gone
        self._is_probing = (
            self._is_probing and switch.state is AgreementState.ASKING and not switch.step
        )
        is_needed = (
            self._is_probing
            or roll.has_newcomers
            or not roll.notices.keys().isdisjoint(standing.stay)
        )
        if not is_needed:
            return [*gone, *self._say(switch.withdraw(now), now)]
        if switch.state is AgreementState.IDLE:
            return [*gone, *self._say(switch.begin(standing.stay, now), now)]
        return gone

    def _say(self, step: Proposal | Confirmation | None, now: float) -> list[ReplicaMessage]:
        """Send the members what a switch has come to."""
        if step is None:
            return []
        standing, message = self._standing, self._switch_message(step)
        told = dict.fromkeys((r for r in standing.stay if r in standing.silent), message)
        if isinstance(message, ConfirmSwitch):
            self._leaves, last = at_switch(self._roll, now)
            leaving = replace(message, leaves=True, last=last)
            told |= dict.fromkeys((r for r in told if r in self._leaves), leaving)
        return [ReplicaMessage(r, m) for r, m in told.items()]

    def _switch_message(self, step: Proposal | Confirmation) -> ProposeSwitch | ConfirmSwitch:
        quorum_id = self._standing.quorum_id
        if isinstance(step, Confirmation):
            return ConfirmSwitch(quorum_id, step.number)
        return ProposeSwitch(quorum_id, step.number, step.step)

    def _carry_out_switch(self, standing: ActiveQuorum, now: float) -> list[ReplicaMessage]:
        """All members ask at the call: the quorum is over, and who is to leave leaves."""
        standing.over = "its members ask for the next one"
        dropped = QuorumAborted(standing.quorum_id, "did not ask for the next one in time")
        sends = [ReplicaMessage(r, dropped) for r in standing.silent]
        leaving = [r for r in standing.stay if r in self._leaves and r in self._roll.asks]
        if self._is_unsaved(leaving):
            return [*sends, *self._dismiss(now)]
        for replica in leaving:
            sends.append(ReplicaMessage(replica, LeaveGranted()))
            self._roll.retire(replica)
        return sends

    def _is_unsaved(self, leaving: list[str]) -> bool:
        return is_unsaved(self._roll, leaving)

    def _dismiss(self, now: float) -> list[ReplicaMessage]:
        """Let those go that are under notice, ask, and are in no quorum that stands."""
        sends = []
        for replica, must_save in [*outside(self._roll, now)]:
            if must_save:
                self._roll.forget_ask(replica)  # it asks again once it has saved: it is waited for
                sends.append(ReplicaMessage(replica, CheckpointBeforeLeave()))
            else:
                self._roll.retire(replica)
                sends.append(ReplicaMessage(replica, LeaveGranted()))
        return sends

    def _is_long_waited_for(self, now: float) -> bool:
        return self._standing.is_long_waited_for(now, self._roll.rules.wait_for_live_s)


class LighthouseState(QuorumCourse):
    """Decides about the quorum of one run. No call blocks, and none looks at a clock.

    ``now`` is in seconds of a monotonic clock, the same one for all calls.
    """

    def __init__(
        self,
        epoch: int,
        *,
        min_replicas: int = 1,
        join_timeout_s: float = 0.1,
        lost_members: Iterable[str] = (),
        rules: QuorumRules | None = None,
    ) -> None:
        """Begin an epoch.

        Args:
            epoch: Higher than that of every keeper of this run before; at least 0.
            min_replicas: The fewest members of a quorum, at least 1; groups may want more.
            join_timeout_s: What the first quorum waits for groups that are connected.
            lost_members: Groups that are known to be dead (the leader before); not waited for.
            rules: All of these and more; instead of ``min_replicas`` and ``join_timeout_s``.
        """
        super().__init__(epoch, rules or QuorumRules(min_replicas, join_timeout_s), lost_members)
        self._told_at = -math.inf
        self._handlers: dict[type, Callable[[str, Any, float], list[ReplicaMessage]]] = {
            ReplicaStatus: self._here,
            QuorumRequest: self._ask,
            CancelRequest: self._withdraw,
            QuorumAborted: self._reported,
            SwitchVote: self._at,
            LeaveNotice: self._notice,
            WorkersLost: self._lost,
            Shutdown: self._bye,
        }

    # ---- events --------------------------------------------------------------------------

    def arrived(self, replica: str, now: float) -> list[ReplicaMessage]:
        """A group has connected, for the first time or again; its status and its request follow."""
        self._roll.start(now)
        self._roll.arrive(replica)
        return []

    def said(self, replica: str, message: Message, now: float) -> list[ReplicaMessage]:
        """A connected group says something; what a keeper can not be told is ignored."""
        handler = self._handlers.get(type(message))
        if handler is None or replica not in self._roll.connected:
            return []
        return [*handler(replica, message, now), *self._advance(now)]

    def left(self, replica: str, why: str, now: float) -> list[ReplicaMessage]:
        """A group's connection is gone, or it is known to be dead, also if it never was here."""
        was_member = self._roll.is_member(replica)
        self._roll.leave(replica)
        broken = self._break(f"{replica}: {why}") if was_member else []
        return [*broken, *self._advance(now)]

    def tick(self, now: float) -> list[ReplicaMessage]:
        """Time has passed; to be called every 20 to 100 ms. Nothing else depends on it."""
        self._roll.start(now)
        sends = [*self._give_up_missing(now), *self._give_up_done(now)]
        sends += [*self._settle(now), *self._hurry_switch(now)]
        return [*sends, *self._advance(now), *self._tell_waiting(now)]

    # ---- what groups say -----------------------------------------------------------------

    def _here(self, replica: str, here: ReplicaStatus, now: float) -> list[ReplicaMessage]:
        if here.quorum_id == NO_QUORUM:
            return []
        adopted = self._adopt(here, now)
        standing = self._standing
        if here.quorum_id != standing.quorum_id:
            why = f"quorum {standing.quorum_id} has been formed without {replica}"
            return [*adopted, ReplicaMessage(replica, QuorumAborted(here.quorum_id, why))]
        self._roll.came_back(replica, here.replica_rank)
        if standing.stands and here.broken:
            return [*adopted, *self._break(f"{replica} came back without it", besides=replica)]
        if standing.stands:
            return [*adopted, *self._resume(replica, now)]
        told = (
            []
            if here.broken
            else [ReplicaMessage(replica, QuorumAborted(here.quorum_id, standing.over or ""))]
        )
        return [*adopted, *told]

    def _ask(self, replica: str, ask: QuorumRequest, now: float) -> list[ReplicaMessage]:
        roll, standing = self._roll, self._roll.standing
        self._next_id = max(self._next_id, ask.quorum_id + 1)
        if standing is None or not standing.stands or not roll.is_member(replica):
            roll.ask(replica, ask, now)
            return []
        if ask == self._answered.get(replica):
            return [
                ReplicaMessage(replica, self._placed[replica])
            ]  # it asked again before it was told
        roll.ask(replica, ask, now)
        return self._leaves_quorum(replica, ask, standing, now)

    def _withdraw(self, replica: str, message: CancelRequest, now: float) -> list[ReplicaMessage]:
        self._roll.forget_ask(replica)
        return []

    def _reported(self, replica: str, broken: QuorumAborted, now: float) -> list[ReplicaMessage]:
        standing = self._roll.standing
        if standing is None or broken.quorum_id != standing.quorum_id:
            return []
        if not self._roll.is_member(replica):
            return []
        return self._break(f"{replica}: {broken.why}", besides=replica)

    def _at(self, replica: str, at: SwitchVote, now: float) -> list[ReplicaMessage]:
        standing, switch = self._roll.standing, self._switch
        if standing is None or not standing.stands or at.quorum_id != standing.quorum_id:
            return []
        if replica not in standing.silent:
            return []  # it asks already, and the proposal reached it after that
        is_answer = switch.state is AgreementState.ASKING and at.number == switch.number
        if is_answer and switch.is_fixed and not at.ok:
            return self._break(f"some ask at call {switch.step}, {replica} is past it")
        vote = StepVote(at.number, at.ok, at.call, at.rate)
        return self._say(switch.vote(replica, vote, now), now)

    def _notice(self, replica: str, notice: LeaveNotice, now: float) -> list[ReplicaMessage]:
        if replica not in self._roll.notices:
            self._switch.hurry()
        self._roll.notices[replica] = now + notice.left_s
        return []

    def _lost(self, replica: str, lost: WorkersLost, now: float) -> list[ReplicaMessage]:
        was_member = self._roll.is_member(replica)
        sends = self._break(f"{replica}: {lost.why}") if was_member else []
        self._roll.retire(replica)
        return sends

    def _bye(self, replica: str, bye: Shutdown, now: float) -> list[ReplicaMessage]:
        standing = self._roll.standing
        was_member = self._roll.is_member(replica)
        self._roll.retire(replica)
        if standing is None or not was_member or not standing.stands:
            return []
        if not standing.stay and not standing.num_missing:
            standing.over = "all its members are done"
            return []
        standing.first_bye = standing.first_bye or (replica, now)
        return self._say(self._switch.retain(standing.silent, now), now)

    # ---- a new keeper --------------------------------------------------------------------

    def _adopt(self, here: ReplicaStatus, now: float) -> list[ReplicaMessage]:
        """Go on with the newest quorum that a keeper before this one has formed."""
        standing = self._roll.standing
        self._next_id = max(self._next_id, here.quorum_id + 1)
        is_ours = standing is not None and not standing.is_adopted
        if is_ours or (standing is not None and here.quorum_id <= standing.quorum_id):
            return []
        sends = self._break(f"quorum {here.quorum_id} has been formed since")
        adopted = ActiveQuorum.adopt(here.quorum_id, here.replica_world_size, now)
        self._roll.standing = adopted
        self._switch = StepAgreement(_AHEAD_S, self._switch.number)
        self._is_settled = False
        self._answered = {}
        return sends

    def _resume(self, replica: str, now: float) -> list[ReplicaMessage]:
        """A member is back that may have missed what it was told."""
        if not self._is_settled:
            return []
        if self._switch.state is AgreementState.CONFIRMED:
            confirm = ConfirmSwitch(self._standing.quorum_id, self._switch.number)
            leaves = replica in self._leaves
            last = leaves and len(self._leaves) == len(self._standing.stay)
            return [ReplicaMessage(replica, replace(confirm, leaves=leaves, last=last))]
        if self._switch.is_fixed:
            return [ReplicaMessage(replica, self._switch_message(self._switch.proposal))]
        return self._say(self._switch.withdraw(now), now) or [
            ReplicaMessage(replica, self._nothing)
        ]

    @property
    def _nothing(self) -> ProposeSwitch:
        return ProposeSwitch(self._standing.quorum_id, 0, 0)

    def _settle(self, now: float) -> list[ReplicaMessage]:
        """All members are back: what the last keeper proposed is followed by all, or is void.

        It is void once all have answered a question, or have had the time for it.
        """
        standing = self._roll.standing
        if self._is_settled or (standing is not None and standing.num_missing):
            return []
        self._is_settled = True
        if standing is None or not standing.stands:
            return []
        if len(standing.silent) < len(standing.stay):
            return self._follow(now)
        self._is_probing = True
        return self._say(self._switch.begin(standing.stay, now), now)

    # ---- time ----------------------------------------------------------------------------

    def _give_up_missing(self, now: float) -> list[ReplicaMessage]:
        """Break the quorum if a member of it has not come to this keeper, and will not."""
        roll, standing = self._roll, self._roll.standing
        if standing is None or not standing.num_missing:
            return []
        if roll.is_back_time_over(now):
            num, standing.num_missing = standing.num_missing, 0
            return self._break(f"{num} members have not come back to the coordinator")
        if not roll.num_missing and now - standing.since >= _LOST_AFTER_S:
            return self._break(f"{name_some(sorted(roll.lost))}: lost with the coordinator")
        return []

    def _give_up_done(self, now: float) -> list[ReplicaMessage]:
        """Break the quorum a while after a member of it was done."""
        standing = self._roll.standing
        if standing is None or standing.first_bye is None:
            return []
        replica, since = standing.first_bye
        return self._break(f"{replica} is done") if now - since >= _LAST_BYTES_S else []

    def _hurry_switch(self, now: float) -> list[ReplicaMessage]:
        switch, standing = self._switch, self._roll.standing
        if standing is None or not standing.stands or not switch.is_late(now):
            return []
        if switch.is_fixed:
            return self._break(f"no answer from {name_some(sorted(switch.awaited))}")
        self._waits_for = f"an answer from {name_some(sorted(switch.awaited))}"
        return self._say(switch.withdraw(now), now)

    def _tell_waiting(self, now: float) -> list[ReplicaMessage]:
        """Tell those that have waited for a while for whom; not often, they may be many."""
        roll = self._roll
        if not roll.asks or now - roll.first_ask_at < _TOLD_AFTER_S:
            return []
        if now - self._told_at < _TOLD_EVERY_S:
            return []
        self._told_at = now
        misfits = roll.misfits()
        return [
            ReplicaMessage(r, QuorumWaiting(misfits.get(r, self._waits_for))) for r in roll.asks
        ]


@dataclass(frozen=True)
class ReplicaMessage:
    """A message to a replica group."""

    replica: str
    message: Message


# ---- Who leaves the quorum as announced, when, and whether the state goes with them (pure)
# A group under notice leaves at a switch. Where no quorum stands that it is in, it is let go when
# it asks; but first it is waited for those previous members that live, to see whether one of them
# has the state that it has. If nobody who stays has it, it is a member once more, so that they
# heal from it, and leaves at the switch after that. That takes a while: with less than
# `ENOUGH_TO_HEAL_S` left it goes at once.
#
# If the newest state leaves with members of a quorum, they are told so before (``is_last``).
# Outside of one, the first of those that have it makes one more step, in which it saves, and asks
# again. Until then it is waited for, as every member that lives: nobody begins anew beside it.


ENOUGH_TO_HEAL_S = 5.0


def at_switch(roll: ReplicaRegistry, now: float) -> tuple[frozenset[str], bool]:
    """Return which members leave at a switch that is confirmed now, and whether they are the last.

    If all are to leave and a newcomer waits, nobody does: the newcomer is let in first.
    """
    assert roll.standing is not None
    stay, notices = roll.standing.stay, roll.notices
    leaves = frozenset(r for r in stay if r in notices)
    is_last = len(leaves) == len(stay)
    has_newcomers = any(r not in stay for r in roll.asks)
    if is_last and has_newcomers and all(_has_time(roll, r, now) for r in leaves):
        return frozenset(), False
    return leaves, is_last


def is_unsaved(roll: ReplicaRegistry, leaving: Collection[str]) -> bool:
    """Whether the newest state would leave with members that were not told that they are the last.

    They came to the switch of a keeper before this one, and all others have left since.
    """
    asks = roll.asks
    kept = [a for r, a in asks.items() if a.is_saved or r not in leaving]
    newest = max((asks[r] for r in leaving), key=lambda a: a.step, default=None)
    return newest is not None and _is_worth_saving(newest, kept)


def outside(roll: ReplicaRegistry, now: float) -> Iterator[tuple[str, bool]]:
    """Yield who of those that ask is let go, in no quorum that stands, and if it has to save."""
    if not roll.notices:
        return
    standing = roll.standing
    stands = standing is not None and standing.stands
    leaving = [r for r in roll.asks if r in roll.notices and not (stands and roll.is_member(r))]
    if not leaving:
        return
    silent = standing.silent if standing is not None else {}
    stays_silent = any(r not in roll.notices for r in silent)
    stayers = [a for r, a in roll.asks.items() if r not in roll.notices]
    newest = max(leaving, key=lambda r: roll.asks[r].step)
    saved = [a for a in roll.asks.values() if a.is_saved]
    must_save = not stays_silent and _is_worth_saving(roll.asks[newest], saved)
    for replica in leaving:
        ask = roll.asks[replica]
        if stands or _is_held(ask, stayers):
            yield replica, False
        elif not _has_time(roll, replica, now) or not (silent or roll.num_missing or stayers):
            yield replica, replica == newest and must_save


def _is_worth_saving(ask: QuorumRequest, kept: list[QuorumRequest]) -> bool:
    return ask.step > 0 and not _is_held(ask, kept)


def _is_held(ask: QuorumRequest, by: list[QuorumRequest]) -> bool:
    same = (ask.step, ask.lineage)
    return any(a.step > ask.step or (a.step, a.lineage) == same for a in by)


def _has_time(roll: ReplicaRegistry, replica: str, now: float) -> bool:
    return roll.notices[replica] - now >= ENOUGH_TO_HEAL_S

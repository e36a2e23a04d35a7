"""The keeper of the quorum: what it hears from the replica groups, and what it tells them (pure).

One keeper serves a run, with its leader, or a lighthouse. Whoever drives it hands over events and
sends what is returned, in order. `quorum` has the rules of who is in, `switch` how all members come
to ask at one call, `recovery` who heals from whom; here is what follows from each message.

The quorum is *broken*, and all its members are told at once, when

- one of them is lost: its connection is gone, or its workers are dead or stopped;
- one says so, or asks for another quorum outside of a switch: its step failed, the others would
  wait for it in their collectives for ever;
- one that is known by number alone has not come to a new keeper in time.

A member that is done (`Bye`) breaks nothing at first: others may still be receiving its last bytes.
They are told a while later, in case its node was gone before its connections were closed.

A *switch* is begun for newcomers that ask while the quorum stands, and for members under notice.
Who is confirmed to leave gets its farewell at the switch call, when all have come to it, so that no
collective is cut off; `departures` says who leaves.

A *new keeper* knows nothing but who is dead for certain. Its ids begin with its epoch. Those who
come back say which quorum they are in (`Here`), and it goes on as if it had formed that: the
newest, if they differ. A proposal of the keeper before may have been confirmed to some and not to
others, so none is taken back before all members are there and have answered a question: who has a
confirmation does not answer, but asks at its call. Then the others are asked to do so at the same
call; only if they are past it the quorum is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from hpc_elastic.ft.course import Course, Send
from hpc_elastic.ft.protocol import (
    NO_QUORUM,
    Ask,
    At,
    Broken,
    Bye,
    Confirm,
    Here,
    Lost,
    Message,
    Notice,
    Propose,
    Waiting,
    Withdraw,
)
from hpc_elastic.ft.quorum import Rules, Standing, name_some
from hpc_elastic.ft.switch import State, Switch

__all__ = ["Keeper", "Send"]

_LOST_AFTER_S = 0.3
"""If so few are missing that they may be those that are dead: they may have left before, as well,
and one that lives is on its way."""
_LAST_BYTES_S = 2.0
_TOLD_AFTER_S, _TOLD_EVERY_S = 0.2, 1.0


class Keeper(Course):
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
        rules: Rules | None = None,
    ) -> None:
        """Begin an epoch.

        Args:
            epoch: Higher than that of every keeper of this run before; at least 0.
            min_replicas: The fewest members of a quorum, at least 1; groups may want more.
            join_timeout_s: What the first quorum waits for groups that are connected.
            lost_members: Groups that are known to be dead (the leader before); not waited for.
            rules: All of these and more; instead of ``min_replicas`` and ``join_timeout_s``.
        """
        super().__init__(epoch, rules or Rules(min_replicas, join_timeout_s), lost_members)
        self._told_at = -math.inf
        self._handlers: dict[type, Callable[[str, Any, float], list[Send]]] = {
            Here: self._here, Ask: self._ask, Withdraw: self._withdraw, Broken: self._reported,
            At: self._at, Notice: self._notice, Lost: self._lost, Bye: self._bye,
        }  # fmt: skip

    # ---- events --------------------------------------------------------------------------

    def arrived(self, replica: str, now: float) -> list[Send]:
        """A group has connected, for the first time or again; its `Here` and `Ask` follow."""
        self._roll.start(now)
        self._roll.arrive(replica)
        return []

    def said(self, replica: str, message: Message, now: float) -> list[Send]:
        """A connected group says something; what a keeper can not be told is ignored."""
        handler = self._handlers.get(type(message))
        if handler is None or replica not in self._roll.connected:
            return []
        return [*handler(replica, message, now), *self._advance(now)]

    def left(self, replica: str, why: str, now: float) -> list[Send]:
        """A group's connection is gone, or it is known to be dead, also if it never was here."""
        was_member = self._roll.is_member(replica)
        self._roll.leave(replica)
        broken = self._break(f"{replica}: {why}") if was_member else []
        return [*broken, *self._advance(now)]

    def tick(self, now: float) -> list[Send]:
        """Time has passed; to be called every 20 to 100 ms. Nothing else depends on it."""
        self._roll.start(now)
        sends = [*self._give_up_missing(now), *self._give_up_done(now)]
        sends += [*self._settle(now), *self._hurry_switch(now)]
        return [*sends, *self._advance(now), *self._tell_waiting(now)]

    # ---- what groups say -----------------------------------------------------------------

    def _here(self, replica: str, here: Here, now: float) -> list[Send]:
        if here.quorum_id == NO_QUORUM:
            return []
        adopted = self._adopt(here, now)
        standing = self._standing
        if here.quorum_id != standing.quorum_id:
            why = f"quorum {standing.quorum_id} has been formed without {replica}"
            return [*adopted, Send(replica, Broken(here.quorum_id, why))]
        self._roll.came_back(replica, here.replica_rank)
        if standing.stands and here.broken:
            return [*adopted, *self._break(f"{replica} came back without it", besides=replica)]
        if standing.stands:
            return [*adopted, *self._resume(replica, now)]
        told = [] if here.broken else [Send(replica, Broken(here.quorum_id, standing.over or ""))]
        return [*adopted, *told]

    def _ask(self, replica: str, ask: Ask, now: float) -> list[Send]:
        roll, standing = self._roll, self._roll.standing
        self._next_id = max(self._next_id, ask.quorum_id + 1)
        if standing is None or not standing.stands or not roll.is_member(replica):
            roll.ask(replica, ask, now)
            return []
        if ask == self._answered.get(replica):
            return [Send(replica, self._placed[replica])]  # it asked again before it was told
        roll.ask(replica, ask, now)
        return self._leaves_quorum(replica, ask, standing, now)

    def _withdraw(self, replica: str, message: Withdraw, now: float) -> list[Send]:
        self._roll.forget_ask(replica)
        return []

    def _reported(self, replica: str, broken: Broken, now: float) -> list[Send]:
        standing = self._roll.standing
        if standing is None or broken.quorum_id != standing.quorum_id:
            return []
        if not self._roll.is_member(replica):
            return []
        return self._break(f"{replica}: {broken.why}", besides=replica)

    def _at(self, replica: str, at: At, now: float) -> list[Send]:
        standing, switch = self._roll.standing, self._switch
        if standing is None or not standing.stands or at.quorum_id != standing.quorum_id:
            return []
        if replica not in standing.silent:
            return []  # it asks already, and the proposal reached it after that
        is_answer = switch.state is State.ASKING and at.number == switch.number
        if is_answer and switch.is_fixed and not at.ok:
            return self._break(f"some ask at call {switch.call}, {replica} is past it")
        return self._say(switch.answered(replica, at, now), now)

    def _notice(self, replica: str, notice: Notice, now: float) -> list[Send]:
        if replica not in self._roll.notices:
            self._switch.hurry()
        self._roll.notices[replica] = now + notice.left_s
        return []

    def _lost(self, replica: str, lost: Lost, now: float) -> list[Send]:
        was_member = self._roll.is_member(replica)
        sends = self._break(f"{replica}: {lost.why}") if was_member else []
        self._roll.retire(replica)
        return sends

    def _bye(self, replica: str, bye: Bye, now: float) -> list[Send]:
        standing = self._roll.standing
        was_member = self._roll.is_member(replica)
        self._roll.retire(replica)
        if standing is None or not was_member or not standing.stands:
            return []
        if not standing.stay and not standing.num_missing:
            standing.over = "all its members are done"
            return []
        standing.first_bye = standing.first_bye or (replica, now)
        return self._say(self._switch.forget(replica, now), now)

    # ---- a new keeper --------------------------------------------------------------------

    def _adopt(self, here: Here, now: float) -> list[Send]:
        """Go on with the newest quorum that a keeper before this one has formed."""
        standing = self._roll.standing
        self._next_id = max(self._next_id, here.quorum_id + 1)
        is_ours = standing is not None and not standing.is_adopted
        if is_ours or (standing is not None and here.quorum_id <= standing.quorum_id):
            return []
        sends = self._break(f"quorum {here.quorum_id} has been formed since")
        adopted = Standing.adopt(here.quorum_id, here.replica_world_size, now)
        self._roll.standing = adopted
        self._switch = Switch(here.quorum_id, self._switch.number)
        self._is_settled = False
        self._answered = {}
        return sends

    def _resume(self, replica: str, now: float) -> list[Send]:
        """A member is back that may have missed what it was told."""
        if not self._is_settled:
            return []
        if self._switch.state is State.CONFIRMED:
            confirm = Confirm(self._standing.quorum_id, self._switch.number)
            leaves = replica in self._leaves
            last = leaves and len(self._leaves) == len(self._standing.stay)
            return [Send(replica, replace(confirm, leaves=leaves, last=last))]
        if self._switch.is_fixed:
            return [Send(replica, self._switch.proposal)]
        return self._tell_members(self._switch.take_back(now)) or [Send(replica, self._nothing)]

    @property
    def _nothing(self) -> Propose:
        return Propose(self._standing.quorum_id, 0, 0)

    def _settle(self, now: float) -> list[Send]:
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
        return self._tell_members(self._switch.begin(standing.stay, now))

    # ---- time ----------------------------------------------------------------------------

    def _give_up_missing(self, now: float) -> list[Send]:
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

    def _give_up_done(self, now: float) -> list[Send]:
        """Break the quorum a while after a member of it was done."""
        standing = self._roll.standing
        if standing is None or standing.first_bye is None:
            return []
        replica, since = standing.first_bye
        return self._break(f"{replica} is done") if now - since >= _LAST_BYTES_S else []

    def _hurry_switch(self, now: float) -> list[Send]:
        switch, standing = self._switch, self._roll.standing
        if standing is None or not standing.stands or not switch.is_late(now):
            return []
        if switch.is_fixed:
            return self._break(f"no answer from {name_some(sorted(switch.awaited))}")
        self._waits_for = f"an answer from {name_some(sorted(switch.awaited))}"
        return self._tell_members(switch.take_back(now))

    def _tell_waiting(self, now: float) -> list[Send]:
        """Tell those that have waited for a while for whom; not often, they may be many."""
        roll = self._roll
        if not roll.asks or now - roll.first_ask_at < _TOLD_AFTER_S:
            return []
        if now - self._told_at < _TOLD_EVERY_S:
            return []
        self._told_at = now
        misfits = roll.misfits()
        return [Send(r, Waiting(misfits.get(r, self._waits_for))) for r in roll.asks]

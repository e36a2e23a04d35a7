"""A leadership of replicas: what differs where nobody is stopped because of others (pure).

See `replicas` for the rules, and `leadership` for everything else.

Reports     of a member are numbered by the record of the round that placed it, under whichever
            leader that was. A member whose leader has died says to the next one that it is *here*,
            and by which record.

Cut off     The leader that hears fewer than half of the members that the last record names takes
            nobody for lost, and lets its keeper make no quorum, for as long as the others need to
            elect another. If nobody did, the silent ones are dead, and it goes on.
"""

from __future__ import annotations

import random

from hpc_elastic.rendezvous import notes
from hpc_elastic.rendezvous.actions import Action, Depart, GiveBack, StartRound
from hpc_elastic.rendezvous.attendance import Liveness
from hpc_elastic.rendezvous.leader_effects import Drop, Effect, Message
from hpc_elastic.rendezvous.leadership import OVERDUE, Leadership
from hpc_elastic.rendezvous.machine import Phase
from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.rendezvous.replicas import Replicas
from hpc_elastic.rendezvous.rules import Rules


class ReplicaLeadership(Leadership):
    """One leader in one epoch of a run with ``ft=true``."""

    machines = Replicas
    machine: Replicas

    def __init__(
        self, claim: Record, rules: Rules, liveness: Liveness, now: float, rng: random.Random
    ) -> None:
        super().__init__(claim, rules, liveness, now, rng)
        self._placed_by: dict[Agent, int] = {}
        """Members, and the record of the round that placed each."""
        self._silent: dict[Agent, str] = {}
        """Who is not heard, and is not taken for lost yet; and what happened."""
        members = self.machine.members
        dead = [a for a in claim.members if a not in members]  # the leader before, if it died
        self.inherited = tuple(notes.departed(Depart(agent, members)) for agent in dead)

    def is_cut_off(self, now: float) -> bool:
        """Tell whether this leader may be the one that nobody hears."""
        return self._yielding and now < self.machine.not_before

    # ---- messages -----------------------------------------------------------------------

    def _events(self, agent: Agent, message: Message, now: float) -> list[Action]:
        if message["type"] == "here":
            self._placed_by[agent] = int(message["record"])
            return self.machine.here(agent, int(message["number"]), now)
        return super()._events(agent, message, now)

    def _record_of(self, agent: Agent) -> int | None:
        return self._placed_by.get(agent)

    def _learn(self, agent: Agent, progress: Message, now: float) -> list[Action]:
        notes = super()._learn(agent, progress, now)
        if progress.get("step") is not None:
            self.machine.stepped(int(progress["step"]))
        return notes

    # ---- decisions ----------------------------------------------------------------------

    def _decided(self, action: Action) -> Record | None:
        match action:
            case StartRound(number, members, restarts):
                enough = len(members) >= self.machine.rules.min_nodes
                given_back = 0 if enough else self.at.given_back
                return self._next(
                    round=number, members=members, restarts=restarts, given_back=given_back
                )
            case Depart(_, members):
                return self._next(members=members)
            case GiveBack(all=True):
                return self._next(given_back=self.at.given_back + 1, members=())
        return super()._decided(action)

    def _carry_out(self, action: Action, now: float) -> list[Effect]:
        if isinstance(action, StartRound):
            self._placed_by |= dict.fromkeys(action.told, self.at.number)
        return super()._carry_out(action, now)

    # ---- who lives ----------------------------------------------------------------------

    @property
    def _num_electors(self) -> int:
        return len(self.at.members)

    def _drop_silent(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for agent in self._attendance.silent(now):
            self._forget(agent)
            self._silent[agent] = "silent"
            effects.append(Drop(agent))
        for agent in self._attendance.take_overdue(now):
            self._silent[agent] = OVERDUE
            effects.append(Drop(agent))
        silent = {a: why for a, why in self._silent.items() if a not in self._attendance.heard}
        for agent in silent:
            if agent in self.machine.roster:
                self._attendance.is_lost_in_silence(agent)
        self._yield_if_cut_off(now)
        cut_off = self.is_cut_off(now)
        self._silent = silent if cut_off else {}
        for agent, why in () if cut_off else silent.items():
            effects += self._do(self.machine.fell_silent(agent, why, now), now)
        return effects

    def _is_below_min(self) -> bool:
        forms = self.machine.phase in (Phase.FORMING, Phase.RUNNING)
        return forms and len(self._attendance.heard) < self.machine.rules.min_nodes

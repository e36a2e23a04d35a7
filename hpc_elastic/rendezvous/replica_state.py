"""The rules of a run whose nodes are replica groups: nobody is stopped because of others (pure).

Theory of operation
-------------------
With ``ft=true`` the workers of each node are a group of their own, a *replica* of the model, and
the replicas' quorum (`hpc_elastic.ft`) sees to it that they train together. What the rendezvous
decides is only who belongs to the run. It goes by the rules of `round_state`, with these
differences once the first round has closed:

RUNNING -> RUNNING  A node that joins is *admitted* at once, as long as there is room: that is a
                    round of its own, whose members are all, and in which it alone is *placed*. Its
                    reports count by that round; those of others by the round that placed them.

                    A node that is gone is not a member any more: that is a decision, so that it can
                    commit no checkpoint (`hpc_elastic.run.fencing`), and the next leader does not
                    wait for it. The others are not told; the quorum's keeper tells their workers.

                    A node whose workers fail starts them again, and is placed anew. Each such
                    failure is judged alone (`failure_policy`); progress is a step that somebody
                    has made.

RUNNING -> RUNNING under the next leader: members say that they are *here*, and go on. Those who do
                    not, within the time that a silent one has, are gone.

RUNNING -> DISBANDED  With fewer than ``min_nodes`` members for too long, as in FORMING. The workers
                    wait meanwhile: the keeper makes no quorum of so few.

RUNNING -> FORMING  The last member is gone.

RUNNING -> ENDED    Those who *take part*, that is, have been in a quorum since they were placed,
                    are done. From the first one that is, nobody is admitted, and whose workers
                    fail is let go: there would be nobody left to learn the state from.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hpc_elastic.rendezvous import leader_state
from hpc_elastic.rendezvous.effects import (
    Action,
    Depart,
    Drop,
    EndRun,
    GiveBack,
    LeaderEffect,
    Message,
    Note,
    StartRound,
    StopCause,
    StopRound,
)
from hpc_elastic.rendezvous.leader_state import OVERDUE, HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules
from hpc_elastic.rendezvous.round_state import RankAssignment, RoundPhase, RoundState
from hpc_elastic.rendezvous.step_agreement import StepVote
from hpc_elastic.slurm.job_state import TaskState


@dataclass
class ReplicaState(RoundState):
    """The leader's state, as `machine.RoundState`."""

    placed: dict[Agent, int] = field(default_factory=dict)
    """Members, and the number of the round that placed each."""
    taking_part: set[Agent] = field(default_factory=set)
    """Members that have been in a quorum since they were placed."""
    short_since: float | None = None
    """Since when there are fewer than min nodes; None: there are not."""
    _judged: dict[Agent, int] = field(default_factory=dict)
    """Whose failures have been judged, and in which round that placed it."""
    _results: str | None = None

    @classmethod
    def resume(
        cls, record: LogEntry, rules: RoundRules, now: float, rng: random.Random
    ) -> ReplicaState:
        """Go on from where the leader before has left off: its members go on meanwhile."""
        machine = super().resume(record, rules, now, rng)
        assert isinstance(machine, ReplicaState)
        living = tuple(a for a in record.members if not machine.muster.is_lost(a))
        machine.roster = RankAssignment(living)
        if machine.end is None and living:
            machine.phase = RoundPhase.RUNNING
            machine._count(now)
        machine.comebacks.look(machine.muster.lost)
        return machine

    # ---- events -------------------------------------------------------------------------

    def here(self, agent: Agent, round_: int, now: float) -> list[Action]:
        """An agent that another leader has placed, in this round, is here; its workers go on."""
        if self.phase is not RoundPhase.RUNNING or agent.host in self.blame.excluded:
            return [StopRound((agent,), "the run has been formed anew", "agent_restarted")]
        self.muster.unsettled.discard(agent)
        if agent in self.roster:
            self.placed[agent] = round_
            return self._advance(now)
        if not self._has_room:
            return [
                StopRound((agent,), "the run has its max nodes, or is nearly done", "at_max_nodes")
            ]
        self.muster.enter(agent, self.roster, now)
        admitted = self._admit((agent,), (), now)
        self.placed[agent] = round_
        return [*admitted, *self._advance(now)]

    def takes_part(self, agent: Agent) -> None:
        """A member is in a quorum."""
        if agent in self.roster:
            self.taking_part.add(agent)

    def stepped(self, step: int) -> None:
        """A member has made this step."""
        self.blame.announced(step)

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Action]:
        """Workers of a member failed; its other workers have been stopped."""
        if agent in self.done:
            return []
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return super().worker_failed(failures, agent, now)
        self.taking_part.discard(agent)
        actions = self._judge_once(failures, agent)
        if self.phase is not RoundPhase.RUNNING:
            return actions
        if self.done or agent.host in self.blame.excluded:
            actions += self._let_go(agent, now)
            if agent.host in self.blame.excluded:
                actions.append(self.patience.send_bad((agent,)))
            return actions + self._advance(now)
        why = "its workers failed, and are started again"
        return [*actions, StopRound((agent,), why, "failed")]

    def finished(self, agent: Agent, now: float) -> list[Action]:
        """All workers of a member have returned."""
        if self.phase is not RoundPhase.RUNNING or agent not in self.roster:
            return []
        if not self.done:
            self._results = results_of(self.placed.get(agent, self.round), agent)
        self.done.add(agent)
        return self._advance(now)

    def boundary(self, agent: Agent, step: int, held: int, now: float) -> list[Action]:
        """A checkpoint of ``step`` is complete."""
        self.blame.announced(step)
        return []

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Action]:
        """A member's node is to be left; its agent arranges that with the quorum's keeper."""
        if agent not in self.roster:
            return []
        fields = {"task": agent.task, "host": agent.host, "reason": reason}
        return [Note("preemption_notice", {**fields, "left_s": round(left_s, 1)})]

    def wants_checkpoint(self, agent: Agent, now: float) -> list[Action]:
        """Nobody asks: the replicas decide by themselves."""
        return []

    def answered(self, agent: Agent, answer: StepVote, now: float) -> list[Action]:
        """Nothing is proposed."""
        return []

    def gone(self, agent: Agent, why: str, now: float) -> list[Action]:
        """An agent was lost (its connection broke, it fell silent), or left on its own."""
        if self.phase is not RoundPhase.RUNNING:
            return super().gone(agent, why, now)
        note = Note("node_lost", {"task": agent.task, "host": agent.host, "why": why})
        self.muster.lose(agent)
        return [note, *self._let_go(agent, now), *self._advance(now)]

    def slurm_says(
        self, view: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Action]:
        """Slurm answered how the tasks of the run are; None: it did not answer."""
        actions = super().slurm_says(view, asked_at, now)
        if self.phase is RoundPhase.RUNNING and self.short_since is not None:
            why = self._hopeless(view or {})
            actions += self._end(EndRun("failed", why)) if why else []
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time has passed; all who fell silent at the same time are known."""
        judged = self.phase is RoundPhase.RUNNING and self.blame.is_due
        return [*(self._judge_alone(self.round) if judged else []), *super().tick(now)]

    # ---- what others may ask ------------------------------------------------------------

    @property
    def wants_slurm(self) -> bool:
        """Whether an answer of Slurm could change anything now."""
        return super().wants_slurm or (
            self.phase is RoundPhase.RUNNING and self.short_since is not None
        )

    # ---- rules --------------------------------------------------------------------------

    @property
    def _has_room(self) -> bool:
        return len(self.members) < self.rules.max_nodes and not self.done

    def _break(
        self, now: float, reason: str, cause: StopCause, step: int | None = None
    ) -> list[Action]:
        """Nobody's round is broken because of others."""
        return []

    def _close_round(self) -> list[Action]:
        """The first round, or one after all were lost: everybody in it is placed."""
        super()._close_round()
        self.placed.clear()
        self.short_since = None
        return self._place(self.members)

    def _admit(
        self, newcomers: tuple[Agent, ...], placed: tuple[Agent, ...], now: float
    ) -> list[Action]:
        """Make these members; those of them whose workers are still to start are placed."""
        tasks = {a.task for a in newcomers}
        replaced = [a for a in self.members if a.task in tasks and a not in newcomers]
        for agent in replaced:
            self._forget(agent)
        self.roster = RankAssignment(tuple(dict.fromkeys((*self.members, *newcomers))))
        self.muster.leave(newcomers)
        self.round += 1
        self.comebacks.look(self.muster.lost)
        self._count(now)
        return self._place(placed)

    def _place(self, placed: tuple[Agent, ...]) -> list[Action]:
        self.placed |= dict.fromkeys(placed, self.round)
        self.taking_part.difference_update(placed)
        return [StartRound(self.round, self.members, self.restarts, placed)]

    def _let_go(self, agent: Agent, now: float) -> list[Action]:
        """Take one out of the run."""
        self.muster.unsettled.discard(agent)
        if agent not in self.roster:
            return []
        self._forget(agent)
        self._count(now)
        self.comebacks.look(self.muster.lost)
        if not self.members and not self.done:
            self.phase, self.forming_since, self.short_since = RoundPhase.FORMING, now, None
            self.muster.expect(())
        return [Depart(agent, self.members)]

    def _forget(self, agent: Agent) -> None:
        self.roster = RankAssignment(tuple(a for a in self.members if a != agent))
        self.placed.pop(agent, None)
        self.taking_part.discard(agent)

    def _count(self, now: float) -> None:
        if len(self.members) >= self.rules.min_nodes:
            self.short_since = None
        elif self.short_since is None:
            self.short_since = now

    def _consider(self, now: float) -> list[Action]:
        if self.done:
            return self._finish(now)
        actions: list[Action] = []
        if self.joined and now >= self.not_before:
            actions += self._admit_those_who_wait(now)
        if self.joined:
            actions += self._send_back_parked(now)
        if self._is_short_for_too_long(now):
            actions += self._disband()
        return actions

    def _finish(self, now: float) -> list[Action]:
        """Somebody is done: let those go who would have to start again, and wait for the others."""
        tasks = {a.task for a in self.joined}
        starting = [a for a in self.members if a.task in tasks]
        actions = [action for agent in starting for action in self._let_go(agent, now)]
        if self._is_done():
            return [*actions, *self._end(EndRun("succeeded", results=self._results))]
        return actions

    def _is_done(self) -> bool:
        """Tell whether nobody is left who takes part and is not done."""
        waited_for = self.taking_part & set(self.members) or set(self.members)
        return waited_for <= self.done

    def _admit_those_who_wait(self, now: float) -> list[Action]:
        again = tuple(a for a in self.joined if a in self.roster)
        tasks = {a.task for a in self.members}
        attempts = tuple(a for a in self.joined if a.task in tasks and a not in self.roster)
        new = [a for a in self.joined if a.task not in tasks]
        room = self.rules.max_nodes - len(self.members)
        wanted = (*again, *attempts, *new[: max(0, room)])
        return self._admit(wanted, wanted, now) if wanted else []

    def _is_short_for_too_long(self, now: float) -> bool:
        if self.short_since is None or not self._would_return:
            return False
        return self.patience.is_over(now - self.short_since)

    @property
    def _would_return(self) -> bool:
        return self.patience.would_return((*self.members, *self.joined))

    @property
    def is_short(self) -> bool:
        """Whether the nodes are fewer than min nodes, and may be given back."""
        waits = self.phase is RoundPhase.RUNNING and self.short_since is not None
        may_go = self.rules.below_min_timeout_s is not None and self._would_return
        return super().is_short or (waits and may_go)

    def _disband(self, why: str = "") -> list[Action]:
        if self.phase is RoundPhase.RUNNING:
            self.muster.joined |= dict.fromkeys(self.members, 0.0)
            self.roster = RankAssignment()
        return super()._disband(why)

    def _judge_once(self, failures: Iterable[Failure], agent: Agent) -> list[Action]:
        """Judge failures of a member, which may tell of them again on another connection."""
        placed_by = self.placed.get(agent, self.round)
        if self._judged.get(agent) == placed_by:
            return []
        self._judged[agent] = placed_by
        self.blame.failures += failures
        self.blame.broke(excused=bool(self.done))
        return self._judge_alone(placed_by)

    def _judge_alone(self, round_: int) -> list[Action]:
        """Judge what has failed since the last time."""
        hosts = {a.host for a in (*self.members, *self.joined)}
        actions = self.blame.judge(round_, hosts)
        self.blame.new_round()
        if actions and isinstance(actions[-1], EndRun):
            return [*actions[:-1], *self._end(actions[-1])]
        return actions


def results_of(round_: int, agent: Agent) -> str:
    """Return the name of the folder with what an agent's workers return, placed by a round."""
    return f"round-{round_}.slot-{agent.slot}"


# ---- A leadership of replicas: what differs where nobody is stopped because of others (pure)
# See `replica_state` for the rules, and `leader_state` for everything else.
#
# Reports     of a member are numbered by the record of the round that placed it, under whichever
# leader that was. A member whose leader has died says to the next one that it is *here*, and by
# which record.
#
# Cut off     The leader that hears fewer than half of the members that the last record names
# takes nobody for lost, and lets its keeper make no quorum, for as long as the others need to
# elect another. If nobody did, the silent ones are dead, and it goes on.


class ReplicaLeaderState(LeaderState):
    """One leader in one epoch of a run with ``ft=true``."""

    machines = ReplicaState
    machine: ReplicaState

    def __init__(
        self,
        claim: LogEntry,
        rules: RoundRules,
        liveness: HeartbeatConfig,
        now: float,
        rng: random.Random,
    ) -> None:
        super().__init__(claim, rules, liveness, now, rng)
        self._placed_by: dict[Agent, int] = {}
        """Members, and the record of the round that placed each."""
        self._silent: dict[Agent, str] = {}
        """Who is not heard, and is not taken for lost yet; and what happened."""
        members = self.machine.members
        dead = [a for a in claim.members if a not in members]  # the leader before, if it died
        self.inherited = tuple(leader_state.departed_note(Depart(agent, members)) for agent in dead)

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

    def _decided(self, action: Action) -> LogEntry | None:
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

    def _carry_out(self, action: Action, now: float) -> list[LeaderEffect]:
        if isinstance(action, StartRound):
            self._placed_by |= dict.fromkeys(action.told, self.at.number)
        return super()._carry_out(action, now)

    # ---- who lives ----------------------------------------------------------------------

    @property
    def _num_electors(self) -> int:
        return len(self.at.members)

    def _drop_silent(self, now: float) -> list[LeaderEffect]:
        effects: list[LeaderEffect] = []
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
        forms = self.machine.phase in (RoundPhase.FORMING, RoundPhase.RUNNING)
        return forms and len(self._attendance.heard) < self.machine.rules.min_nodes

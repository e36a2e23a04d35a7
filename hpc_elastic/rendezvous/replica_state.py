"""Rules of a run whose nodes are replica groups: no node is stopped because of others (pure).

Theory of operation
-------------------
With ``ft=true`` the workers of each unit of nodes (`RoundRules.unit_nodes`, often one node) are a
group of their own, a *replica* of the model, and the quorum of the replicas (`hpc_elastic.ft`)
makes them train together. The rendezvous only decides which nodes belong to the run, and which of
them form a replica. FORMING is that of `round_state`; these rules apply once the first round has
closed:

RUNNING -> RUNNING  Nodes that join are *admitted* as soon as they make a whole unit, as long as
                    there is room: that is a round with all members, in which only the newcomers are
                    *placed*. Until then they are spares. Each member's reports carry the index of
                    the round that placed it.

                    A lost node is no member any more, nor are the other nodes of its unit: they
                    stop their workers and join as spares. That is a decision, so that they can
                    commit no checkpoint (`hpc_elastic.run.fencing`), and the next leader does not
                    wait for them. The leader does not inform the other nodes; the lighthouse
                    informs their workers.

                    A unit with a failed worker starts all its workers again, and is placed anew
                    once all its nodes have joined. Its failures are judged together, once each of
                    its nodes has reported or joined, and apart from those of other units
                    (`failure_policy`); a step of any member is progress.

RUNNING -> RUNNING  under the next leader: members *reattach*, and continue. A member that does not
                    within the heartbeat time-out is lost. No node is admitted before that is
                    known, since a replica keeps its number.

RUNNING -> DISBANDED  With fewer than ``min_nodes`` members for too long, as in FORMING. The workers
                    wait in the meantime: the lighthouse forms no quorum of fewer.

RUNNING -> FORMING  The last member is lost.

RUNNING -> ENDED    All members that *take part* are done: those that have been in a quorum since
                    they were placed. Once a unit is done, no node is admitted, and a unit whose
                    workers fail is released: no replica would be left to heal it from.

RUNNING -> ENDED    The run has failed: too many failures, or too few tasks for ``min_nodes``.

Before the run fails or is disbanded, the replicas save, since the newest state is in their memory
alone. The lighthouse lets all of them leave, as under a preemption notice, and the decision is made
once it has, or after `SAVE_WITHIN_S`.

The index in a member's report is that of the entry that placed it, in whichever term that was.

The lighthouse, which decides about quorums, is pure as well (`hpc_elastic.ft.lighthouse_state`).
It lives with the leader: `QuorumBridge` connects it to the agents.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count

from hpc_elastic.ft import messages as ft
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.rendezvous import messages
from hpc_elastic.rendezvous.effects import Effect, Note, Send, hosts_of
from hpc_elastic.rendezvous.group_change import preemption_note
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules, RunEnding
from hpc_elastic.rendezvous.round_state import (
    RankAssignment,
    RoundPhase,
    RoundState,
    RunState,
    nearest_units,
    stop,
    units_of,
)
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.job_state import TaskState

SAVE_WITHIN_S = 300.0
"""How long the replicas have to save before the run fails or is disbanded: a step, and a save."""


class ReplicaState:
    """Rules of a run whose nodes are replicas. Events return effects, in order."""

    waits_when_cut_off = True
    """Whether members that time out are lost only once the leader is known not to be cut off."""

    def __init__(self, entry: LogEntry, rules: RoundRules, now: float, rng: random.Random) -> None:
        run = self.run = RunState(entry, rules, now, rng)
        self.placed: dict[Agent, messages.Reattach] = {}
        """Members, each with the round and the replica that it would reattach to."""
        self.taking_part: set[Agent] = set()
        """Members that have been in a quorum since they were placed."""
        self.unit_changes: list[tuple[Agent, str | None]] = []
        """First agents of units placed (None) or dissolved (why), for the `QuorumBridge`."""
        self._failures: dict[Agent, list[Failure]] = {}
        """Failures of the workers of members since they were placed."""
        self._judged: dict[int, tuple[Agent, int]] = {}
        """Of each slot the agent whose failures were judged last, and the entry that had placed it:
        it may report them again on another connection, after it was taken for lost."""
        self._returned: set[Agent] = set()  # members whose workers have returned
        self._results: str | None = None
        self.save_by: float | None = None
        """When all replicas must have saved, since the run is about to stop; None: it goes on."""
        self._once_saved: Callable[[], list[Effect]] = list
        """Makes the decision that waits until they have saved."""
        self._has_saved: set[Agent] = set()  # members that the lighthouse has let leave
        units = units_of(entry.members, rules.unit_nodes)
        living = [unit for unit in units if not any(map(run.participants.is_lost, unit))]
        self.inherited_losses = tuple(unit[0] for unit in units if unit not in living)
        """First agents of units that have lost a node together with the leader before."""
        run.ranks = RankAssignment(tuple(chain(*living)))
        run.participants.expect(run.ranks.members)
        self._unheard = {*run.ranks.members}
        """Members that an earlier leader has placed, until they report their quorum."""
        if run.phase is RoundPhase.FORMING and living:  # they have continued to train
            run.phase = RoundPhase.RUNNING
            self._update_short(now)
        run.recovery.update_awaited(run.participants.lost)

    def drop_losses(self) -> list[Effect]:
        """Decide that the other nodes of units that have lost a node are no members any more."""
        members, lost = self.run.ranks.members, self.inherited_losses
        effects: list[Effect] = [departed_note(agent, members) for agent in lost]
        if lost and self.run.rules.unit_nodes > 1:
            effects.insert(0, self.run.decide(members=members))
        return effects

    # ---- events -------------------------------------------------------------------------

    def is_current(self, agent: Agent, report: messages.MemberReport) -> bool:
        """Return whether a report is about the round that placed the member."""
        place = self.placed.get(agent)
        return place is not None and report.index == place.index

    def is_first(self, agent: Agent) -> bool:
        """Return whether an agent represents its replica at the lighthouse."""
        is_alone = self.run.rules.unit_nodes == 1
        return is_alone or (agent in self.run.ranks and self._unit_of(agent)[0] == agent)

    def received(self, agent: Agent, message: messages.RunMessage, now: float) -> list[Effect]:
        """Take in a message of an agent; see `messages`."""
        match message:
            case messages.Reattach():
                return self.reattached(agent, message, now)
            case messages.Notice(reason, left_s):
                return self.noticed(agent, reason, left_s, now)
            case messages.MemberReport() if not self.is_current(agent, message):
                return []
            case messages.Finished():
                return self.finished(agent, now)
            case messages.Failed():
                return self.worker_failed(message.failures, agent, now)
            case messages.CheckpointAnnounced():
                self.run.policy.record_checkpoint(message.step)
        return []

    def join(
        self,
        agent: Agent,
        now: float,
        request: messages.Join = messages.Join(1),  # noqa: B008 - immutable
    ) -> list[Effect]:
        """Take in an agent that is ready for a place."""
        run = self.run
        effects, ending = run.judge_loss(agent)
        if ending is not None:
            return [*effects, *self._save_first(partial(run.end_run, ending), now)]
        refused = run.refuse(agent)
        if refused is not None:
            return [*effects, *refused]
        older = run.ranks.attempt_of(agent.task)
        if older is not None and older != agent and run.is_member(older):
            effects += self._dissolve_unit(older, "another attempt of its task has joined", now)
        effects += run.add(agent, now, request)
        if run.is_member(agent):
            effects += self._stop_unit(agent, f"{agent.host} starts its workers again")
        return [*effects, *self._advance(now)]

    def reattached(self, agent: Agent, place: messages.Reattach, now: float) -> list[Effect]:
        """An agent that an earlier leader has placed reattaches; its workers continue."""
        run, joined = self.run, self.run.participants.joined
        is_over = run.phase is not RoundPhase.RUNNING or agent.host in run.policy.excluded
        if is_over or (agent not in run.ranks and run.rules.unit_nodes > 1):
            why = "the run has been formed anew" if is_over else "its replica has lost a node"
            return stop((agent,), why, "agent_restarted", run.entry.round)
        run.participants.pending_rejoin.discard(agent)
        run.policy.gone.pop(agent.task, None)
        effects: list[Effect] = []
        if agent not in run.ranks:
            if not self._has_room:
                why = "the run has its max nodes, or is nearly done"
                return stop((agent,), why, "at_max_nodes", run.entry.round)
            run.participants.add(agent, run.ranks, now)
            effects = self._admit((agent,), {}, now)
        elif any(other in joined for other in self._unit_of(agent)):
            why = "the workers of its replica are started again"
            return stop((agent,), why, "failed", run.entry.round)
        self.placed[agent] = place
        return [*effects, *self._advance(now)]

    def joined_quorum(self, agent: Agent) -> None:
        """The replica of a member is in a quorum."""
        if agent in self.run.ranks:
            self.taking_part.update(self._unit_of(agent))

    def reported(self, agent: Agent, status: ft.ReplicaStatus) -> None:
        """The replica of a member has reported its quorum to this leader's lighthouse."""
        if agent in self.run.ranks:
            self._unheard.difference_update(self._unit_of(agent))
        if status.quorum_id != ft.NO_QUORUM:
            self.joined_quorum(agent)

    def let_leave(self, agent: Agent) -> None:
        """The replica of a member has left the quorum: its state is saved, or others have it."""
        self._has_saved.update(self._unit_of(agent))

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Effect]:
        """Workers of a member failed; its other workers have been stopped."""
        if agent in self.run.done or not self.run.is_member(agent):
            return []
        self.run.reach.suspect(now)
        self.taking_part.difference_update(self._unit_of(agent))
        self._unheard.difference_update(self._unit_of(agent))
        self._failures.setdefault(agent, list(failures))
        effects = self._advance(now)
        if agent not in self.run.ranks or self.run.phase is not RoundPhase.RUNNING:
            return effects
        why = "its workers failed, and are started again"
        return [*effects, *self._stop_unit(agent, why)]

    def finished(self, agent: Agent, now: float) -> list[Effect]:
        """All workers of a member have returned."""
        if not self.run.is_member(agent):
            return []
        self._returned.add(agent)
        unit = self._unit_of(agent)
        if self._returned.issuperset(unit):
            if not self.run.done:
                place = self._place_of(agent)
                self._results = results_of(place.number, place.replica)
            self.run.done.update(unit)
        return self._advance(now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Effect]:
        """A member has a preemption notice; its agent arranges its leave with the lighthouse."""
        return [preemption_note(agent, reason, left_s)] if agent in self.run.ranks else []

    def agent_lost(
        self, agent: Agent, why: str, now: float, *, announced: bool = False
    ) -> list[Effect]:
        """An agent was lost (its connection broke, or it timed out), or has left by itself."""
        run = self.run
        if run.phase in (RoundPhase.ENDED, RoundPhase.DISBANDED):
            return []
        effects = run.lose(agent, why, announced=announced)
        run.participants.pending_rejoin.discard(agent)
        if run.is_member(agent):
            effects += self._dissolve_unit(agent, why, now)
        return [*effects, *self._advance(now)]

    def slurm_answered(
        self, states: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Effect]:
        """Take in the states of the run's tasks; None: Slurm did not answer."""
        effects, ended = self.run.slurm_answered(states, asked_at, now)
        for agent in ended:
            effects += self.agent_lost(agent, LossReason.TASK_ENDED, now)
        ending = self.run.hopeless_ending()
        if ending is not None:
            effects += self._save_first(partial(self.run.end_run, ending), now)
        return [*effects, *self._advance(now)]

    def sweep_answered(self, why: str | None, now: float) -> list[Effect]:
        """Take in why the run cannot get min nodes at present; None: it may get them."""
        in_vain = self.run.waits_in_vain(why, now)
        return self._save_first(partial(self.run.disband, why or ""), now) if in_vain else []

    def tick(self, now: float) -> list[Effect]:
        """Apply the rules that depend on time; all members that timed out together are known."""
        self.run.pass_time(now)
        judges = self.run.phase is RoundPhase.RUNNING and self.run.policy.is_due
        judged = self._judge_alone(self.run.entry.round, now) if judges else []
        return [*judged, *self._advance(now)]

    # ---- members ------------------------------------------------------------------------

    def _unit_of(self, agent: Agent) -> tuple[Agent, ...]:
        return self.run.ranks.unit_of(agent, self.run.rules.unit_nodes)

    def _place_of(self, agent: Agent) -> messages.Reattach:
        unknown = messages.Reattach(self.run.entry.index, self.run.entry.round, 0)
        return self.placed.get(agent, unknown)

    @property
    def _has_room(self) -> bool:
        run = self.run
        is_stopping = bool(run.done) or self.save_by is not None
        return len(run.ranks.members) < run.rules.max_nodes and not is_stopping

    def _advance(self, now: float) -> list[Effect]:
        run = self.run
        if run.phase is not RoundPhase.RUNNING:
            effects, closes = run.form(now)
            return [*effects, *(self._close_first_round(now) if closes else [])]
        if self.save_by is not None:
            return self._stop_if_saved(now)
        if run.done:
            return self._finish(now)
        effects = [*self._leave_out(now), *(self._judge_units(now) if self._failures else [])]
        if run.phase is not RoundPhase.RUNNING or self.save_by is not None:
            return effects
        if run.participants.joined and now >= run.not_before:
            effects += self._admit_joined(now)
        if run.participants.joined:
            effects += run.requeue_late(now)
        if run.is_short_for_too_long(now):
            effects += self._save_first(run.disband, now)
        return effects

    def _leave_out(self, now: float) -> list[Effect]:
        """Release units with a member that is known not to reach others."""
        run = self.run
        effects = run.probe(now)
        for agent in run.left_out:
            if run.is_member(agent):
                why = "it does not reach all other members"
                effects += self._dissolve_unit(agent, why, now)
                effects += stop((agent,), why, "cut_off", run.entry.round)
        return effects

    def _close_first_round(self, now: float) -> list[Effect]:
        """Close the first round, or one after all members were lost: all are placed."""
        self.run.close_round(now)
        self.placed.clear()
        members, size = self.run.ranks.members, self.run.rules.unit_nodes
        return self._place(self._numbered(units_of(members, size)))

    def _admit_joined(self, now: float) -> list[Effect]:
        """Place units that start again, and whole units of newcomers."""
        run, size = self.run, self.run.rules.unit_nodes
        joined, members = run.participants.joined, run.ranks.members
        if size > 1 and run.participants.pending_rejoin:
            return []
        again = [unit for unit in units_of(members, size) if all(a in joined for a in unit)]
        new = [a for a in run.admissible if a not in run.ranks]
        num_new = run.rules.usable_nodes(len(members) + len(new)) - len(members)
        units = nearest_units(new, size)[: num_new // size]
        replicas = self._numbered((*again, *units))
        newcomers = tuple(chain(*units))
        return self._admit(newcomers, replicas, now) if replicas else []

    def _numbered(self, units: Collection[tuple[Agent, ...]]) -> dict[int, tuple[Agent, ...]]:
        """Give each unit a number that no other replica has; its last one, if it is known."""
        placed = self.placed
        numbered = {placed[a].replica: unit for unit in units for a in unit if a in placed}
        taken = {place.replica for place in placed.values()}
        for unit in units:
            if not any(agent in placed for agent in unit):
                own = unit[0].slot // len(unit)
                number = next(n for n in chain((own,), count()) if n not in taken)
                numbered[number] = unit
                taken.add(number)
        return numbered

    def _admit(
        self, newcomers: tuple[Agent, ...], replicas: Mapping[int, Sequence[Agent]], now: float
    ) -> list[Effect]:
        """Make the newcomers members; ``replicas``: those whose workers have not started yet."""
        run = self.run
        run.ranks = RankAssignment((*run.ranks.members, *newcomers))
        run.participants.remove((*newcomers, *chain(*replicas.values())))
        run.recovery.update_awaited(run.participants.lost)
        run.estimator.on_close(now, len(run.ranks.members))
        self._update_short(now)
        if run.short_since is None:
            run.backoff.times_requeued = 0
        return self._place(replicas)

    def _place(self, replicas: Mapping[int, Sequence[Agent]]) -> list[Effect]:
        effects = self.run.announce(tuple(chain(*replicas.values())), replicas)
        entry = self.run.entry
        for replica, unit in replicas.items():
            place = messages.Reattach(entry.index, entry.round, replica)
            self.placed |= dict.fromkeys(unit, place)
            self._forget(unit)
            if len(unit) > 1:
                self.unit_changes.append((unit[0], None))
        return effects

    def _forget(self, unit: Iterable[Agent]) -> None:
        """Forget what the workers of these agents have done, since they are stopped."""
        for agent in unit:
            for state in (self.taking_part, self._unheard, self._has_saved, self._returned):
                state.discard(agent)
            self._failures.pop(agent, None)

    def _stop_unit(self, agent: Agent, why: str) -> list[Effect]:
        """Let the nodes of a member's unit join again that have not, since workers failed."""
        joined = self.run.participants.joined
        to_stop = tuple(a for a in self._unit_of(agent) if a not in joined)
        return stop(to_stop, why, "failed", self.run.entry.round) if to_stop else []

    def _dissolve_unit(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """Decide that the nodes of a member's unit are no members any more, since it is lost."""
        run = self.run
        unit = self._unit_of(agent)
        if len(unit) > 1:
            self.unit_changes.append((unit[0], why))
        away = (agent, *run.participants.joined)
        to_stop = tuple(a for a in unit if a not in away and not run.participants.is_lost(a))
        run.participants.pending_rejoin.difference_update(unit)
        failures = self._take_failures(unit)
        self._forget(unit)
        run.ranks = RankAssignment(tuple(a for a in run.ranks.members if a not in unit))
        for node in unit:
            self.placed.pop(node, None)
        self._update_short(now)
        run.recovery.update_awaited(run.participants.lost)
        members = run.ranks.members
        if not members and not run.done:
            run.begin_forming(now)
            self.save_by = None
        effects: list[Effect] = [run.decide(members=members), departed_note(agent, members)]
        if to_stop:
            why = f"{agent.host}, a node of its replica, is gone: {why}"
            effects += stop(to_stop, why, "node_lost", run.entry.round)
        if failures:
            run.policy.failures += failures
            effects += self._judge_alone(run.entry.round, now, not_counted=True)
            effects += self._requeue_excluded(a for a in unit if a in run.participants.joined)
        return effects

    def _requeue_excluded(self, agents: Iterable[Agent]) -> list[Effect]:
        """Requeue agents on nodes that failures have excluded: their tasks start elsewhere."""
        run = self.run
        faulty = tuple(a for a in agents if a.host in run.policy.excluded)
        if not faulty or run.phase not in (RoundPhase.FORMING, RoundPhase.RUNNING):
            return []
        run.participants.remove(faulty)
        return run.backoff.requeue_faulty(faulty)

    def _update_short(self, now: float) -> None:
        run = self.run
        if len(run.ranks.members) >= run.rules.min_nodes:
            run.short_since = None
        elif run.short_since is None:
            run.short_since = now
            run.reach.has_changed = True  # members have no precedence over those that wait

    # ---- the end ------------------------------------------------------------------------

    def _save_first(self, stop_run: Callable[[], list[Effect]], now: float) -> list[Effect]:
        """Stop the run once its replicas have saved; the first reason counts."""
        if self.save_by is None:
            self._once_saved, self.save_by = stop_run, now + SAVE_WITHIN_S
        return self._stop_if_saved(now)

    def _stop_if_saved(self, now: float) -> list[Effect]:
        assert self.save_by is not None
        run, may_have_state = self.run, self.taking_part | self._unheard
        awaited = may_have_state.intersection(run.ranks.members) - self._has_saved - run.done
        if awaited and now < self.save_by:
            return []
        self.save_by = None
        effects: list[Effect] = self._finish(now) if run.done else []
        if awaited:
            unsaved = sorted(awaited, key=lambda agent: agent.slot)
            effects.append(Note("state_unsaved", {"hosts": hosts_of(unsaved)}))
        return effects if run.phase is RoundPhase.ENDED else [*effects, *self._once_saved()]

    def _finish(self, now: float) -> list[Effect]:
        """A unit is done: release those that would have to start again; wait for the others."""
        run = self.run
        effects: list[Effect] = []
        for agent in [*run.participants.joined, *self._failures]:
            if agent in run.ranks:
                effects += self._dissolve_unit(agent, "its workers would start again", now)
        members = set(run.ranks.members)
        waited_for = self.taking_part & members or members
        if waited_for <= run.done:
            effects += run.end_run(RunEnding("succeeded", results=self._results))
        return effects

    # ---- failures -----------------------------------------------------------------------

    def _judge_units(self, now: float) -> list[Effect]:
        """Judge the failures of units once all their nodes have reported, or joined again."""
        run = self.run
        effects: list[Effect] = []
        reported = {*run.participants.joined, *self._failures}
        units = {self._unit_of(agent) for agent in self._failures}
        for unit in sorted(units, key=lambda unit: unit[0].slot):
            if run.phase is not RoundPhase.RUNNING or not reported.issuperset(unit):
                continue
            if not (failures := self._take_failures(unit)):
                continue
            run.policy.failures += failures
            effects += self._judge_alone(self._place_of(unit[0]).number, now)
            faulty = [a for a in unit if a.host in run.policy.excluded]
            if faulty and run.phase is RoundPhase.RUNNING:
                effects += self._dissolve_unit(faulty[0], "its node is excluded", now)
                effects += self._requeue_excluded(unit)
        return effects

    def _take_failures(self, unit: Iterable[Agent]) -> list[Failure]:
        """Return the failures of a unit that have not been judged; they are from now on."""
        failures: list[Failure] = []
        for agent in unit:
            judged = agent, self._place_of(agent).index
            if agent in self._failures and self._judged.get(agent.slot) != judged:
                self._judged[agent.slot] = judged
                failures += self._failures[agent]
        return failures

    def _judge_alone(self, round_: int, now: float, *, not_counted: bool = False) -> list[Effect]:
        """Judge what has failed since the last time."""
        run = self.run
        run.policy.not_counted = not_counted or bool(run.done)
        effects, ending = run.policy.judge(round_, run.hosts)
        run.policy.new_round()
        if ending is not None:
            effects += self._save_first(partial(run.end_run, ending), now)
        return effects


Rounds = RoundState | ReplicaState  # the rules of a run, by `RoundRules.ft`


def departed_note(agent: Agent, members: tuple[Agent, ...]) -> Note:
    """Return the event of a replica that has left."""
    return Note("replica_left", {"task": agent.task, "host": agent.host, "nodes": len(members)})


def results_of(round_: int, replica: int) -> str:
    """Return the name of the folder with the return values of a replica, placed by a round."""
    return f"round-{round_}.replica-{replica}"


def replica_name(agent: Agent) -> str:
    """Return the name of an agent's replica: each attempt is another replica."""
    return f"{agent.task}:{agent.attempt}"


SETTLES_WITHIN_S = 2.0
"""Longest time after the end of workers until their agent reports it; usually 0.1 s."""


class QuorumBridge:
    """Connects the agents of one leader to the lighthouse of its term.

    The bridge handles two cases that the lighthouse cannot detect. While the leader may be cut off,
    no message reaches the lighthouse: another leader may have been elected, whose lighthouse forms
    quorums of the other replicas. And while a replica ends, a newcomer that has not been in a
    quorum yet has to wait: if the replica has finished, the run is over, and a newcomer that is
    left alone would train from the start.

    The agent of a unit's first node represents the replica. Agents of other nodes, and of spares,
    are unknown to the lighthouse.
    """

    def __init__(self, lighthouse: LighthouseState, replicas: ReplicaState) -> None:
        self._lighthouse = lighthouse
        self._replicas = replicas
        self._agents: dict[str, Agent] = {}
        self._waiting: deque[Callable[[float], list[ReplicaMessage]]] = deque()
        """Events for the lighthouse, until this leader is known not to be cut off."""
        self._ending: dict[Agent, float] = {}
        """Agents whose workers have ended, since when, until they report how."""
        self._held: dict[Agent, ft.QuorumRequest] = {}
        """Requests of newcomers that wait in the meantime."""
        self._to_leave: set[str] = set()
        """Connected replicas that all have to leave, since the run is about to stop."""

    def connected(self, agent: Agent) -> None:
        """An agent has connected."""
        if not self._replicas.is_first(agent):
            return
        name = replica_name(agent)
        self._agents[name] = agent
        self._waiting.append(partial(self._lighthouse.on_connect, name))

    def received(self, agent: Agent, message: ft.Message, now: float) -> None:
        """An agent has sent a message for the lighthouse."""
        replicas = self._replicas
        if not replicas.is_first(agent):  # of a replica that has lost a node
            return
        self._update_units()
        if isinstance(message, ft.QuorumRequest) and message.commit_failures:
            replicas.run.reach.suspect(now)
        match message:
            case ft.ReplicaStatus():
                replicas.reported(agent, message)
            case ft.Shutdown() | ft.WorkersLost() if agent in replicas.taking_part:
                self._ending[agent] = now
            case ft.QuorumRequest() if agent not in replicas.taking_part and self._is_ending:
                self._held[agent] = message
                return
        if isinstance(message, (ft.CancelRequest, ft.WorkersLost, ft.Shutdown)):
            self._held.pop(agent, None)
        self._waiting.append(partial(self._lighthouse.on_message, replica_name(agent), message))

    def disconnected(self, agent: Agent, why: str) -> None:
        """The connection to an agent has ended, or the agent has timed out."""
        name = replica_name(agent)
        if self._agents.pop(name, None) is None:
            return
        self._held.pop(agent, None)
        self._ending.pop(agent, None)
        self._to_leave.discard(name)
        self._waiting.append(partial(self._lighthouse.on_disconnect, name, why))

    def tick(self, now: float) -> None:
        """Handle the passing of time; call it 20 to 50 times a second."""
        self._ending = {
            agent: since
            for agent, since in self._ending.items()
            if agent in self._replicas.taking_part and now - since < SETTLES_WITHIN_S
        }
        if self._held and not self._is_ending:
            held, self._held = self._held, {}
            for agent, message in held.items():
                name = replica_name(agent)
                self._waiting.append(partial(self._lighthouse.on_message, name, message))
        if (save_by := self._replicas.save_by) is not None:
            for name in self._agents.keys() - self._to_leave:
                notice = ft.LeaveNotice(max(0.0, save_by - now))
                self._waiting.append(partial(self._lighthouse.on_message, name, notice))
                self._to_leave.add(name)
        self._waiting.append(self._lighthouse.on_tick)

    def answer(self, now: float) -> list[Effect]:
        """Let the lighthouse handle the waiting events; return the messages that it sends."""
        self._update_units()
        sends: list[Effect] = []
        while self._waiting:
            for answer in self._waiting.popleft()(now):
                agent = self._agents.get(answer.replica)
                if agent is not None:
                    match answer.message:
                        case ft.QuorumResults():
                            self._replicas.joined_quorum(agent)
                        case ft.LeaveGranted():
                            self._replicas.let_leave(agent)
                    sends.append(Send((agent,), messages.QuorumMessage(answer.message)))
        return sends

    def _update_units(self) -> None:
        """Connect and disconnect the replicas that have been placed or dissolved."""
        changes, self._replicas.unit_changes = self._replicas.unit_changes, []
        for first, why in changes:
            if why is not None:
                self.disconnected(first, why)
            elif replica_name(first) not in self._agents:
                self.connected(first)

    @property
    def _is_ending(self) -> bool:
        return bool(self._ending or self._replicas.run.done)

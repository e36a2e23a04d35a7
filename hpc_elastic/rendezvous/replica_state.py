"""Rules of a run whose nodes are replica groups: no node is stopped because of others (pure).

Theory of operation
-------------------
With ``ft=true`` the workers of each node are a group of their own, a *replica* of the model, and
the quorum of the replicas (`hpc_elastic.ft`) makes them train together. The rendezvous only decides
which nodes belong to the run. FORMING is that of `round_state`; these rules apply once the first
round has closed:

RUNNING -> RUNNING  A node that joins is *admitted* at once, as long as there is room: that is a
                    round with all members, in which only the newcomer is *placed*. Each member's
                    reports carry the index of the round that placed it.

                    A lost node is no member any more. That is a decision, so that it can commit no
                    checkpoint (`hpc_elastic.run.fencing`), and the next leader does not wait for
                    it. The leader does not inform the other nodes; the lighthouse informs their
                    workers.

                    A node whose workers fail starts them again, and is placed anew. Each such
                    failure is judged alone (`failure_policy`); a step of any member is progress.

RUNNING -> RUNNING  under the next leader: members *reattach*, and continue. A member that does not
                    within the heartbeat time-out is lost.

RUNNING -> DISBANDED  With fewer than ``min_nodes`` members for too long, as in FORMING. The workers
                    wait in the meantime: the lighthouse forms no quorum of fewer.

RUNNING -> FORMING  The last member is lost.

RUNNING -> ENDED    All members that *take part* are done: those that have been in a quorum since
                    they were placed. Once one is done, no node is admitted, and a member whose
                    workers fail is released: no replica would be left to heal it from.

The index in a member's report is that of the entry that placed it, in whichever term that was.

The lighthouse, which decides about quorums, is pure as well (`hpc_elastic.ft.lighthouse_state`).
It lives with the leader: `QuorumBridge` connects it to the agents.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    QuorumRequest,
    QuorumResults,
    ReplicaStatus,
    Shutdown,
    WorkersLost,
    to_frame,
)
from hpc_elastic.ft.messages import Message as ReplicaReport
from hpc_elastic.rendezvous.effects import Effect, Message, Note, Send
from hpc_elastic.rendezvous.group_change import preemption_note
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules, RunEnding
from hpc_elastic.rendezvous.round_state import (
    RankAssignment,
    RoundPhase,
    RoundState,
    RunState,
    failures_of,
    stop,
)
from hpc_elastic.slurm.job_state import TaskState


@dataclass(frozen=True)
class Placement:
    """The round that placed a member, and the index of its entry."""

    round: int
    index: int


class ReplicaState:
    """Rules of a run whose nodes are replicas. Events return effects, in order."""

    waits_when_cut_off = True
    """Whether members that time out are lost only once the leader is known not to be cut off."""

    def __init__(self, entry: LogEntry, rules: RoundRules, now: float, rng: random.Random) -> None:
        run = self.run = RunState(entry, rules, now, rng)
        self.placed: dict[Agent, Placement] = {}
        """Members, each with its placement."""
        self.taking_part: set[Agent] = set()
        """Members that have been in a quorum since they were placed."""
        self._judged: dict[Agent, int] = {}
        """Members whose failures have been judged, and the round that had placed each."""
        self._results: str | None = None
        living = tuple(a for a in entry.members if not run.participants.is_lost(a))
        self.inherited_losses = tuple(a for a in entry.members if a not in living)
        """Members that were lost with the leader before."""
        run.ranks = RankAssignment(living)
        if run.phase is RoundPhase.FORMING and living:  # they have continued to train
            run.phase = RoundPhase.RUNNING
            self._update_short(now)
        run.recovery.update_awaited(run.participants.lost)

    # ---- events -------------------------------------------------------------------------

    def is_current(self, agent: Agent, message: Message) -> bool:
        """Return whether a report is about the round that placed the member."""
        placement = self.placed.get(agent)
        return placement is not None and message.get("index") == placement.index

    def received(self, agent: Agent, message: Message, now: float) -> list[Effect]:
        """Take in a report of an agent; see `leader` for the messages."""
        match message["type"]:
            case "reattach":
                placement = Placement(int(message["number"]), int(message["index"]))
                return self.reattached(agent, placement, now)
            case "notice":
                left_s = float(message["left_s"])
                return self.noticed(agent, str(message["reason"]), left_s, now)
            case _ if not self.is_current(agent, message):
                return []
            case "finished":
                return self.finished(agent, now)
            case "failed":
                return self.worker_failed(failures_of(message), agent, now)
            case "checkpoint":
                self.run.policy.record_checkpoint(int(message["step"]))
        return []

    def join(self, agent: Agent, now: float, request: int = 1) -> list[Effect]:
        """Take in an agent that is ready for a place."""
        refused = self.run.refuse(agent)
        if refused is not None:
            return refused
        return [*self.run.add(agent, now, request), *self._advance(now)]

    def reattached(self, agent: Agent, placement: Placement, now: float) -> list[Effect]:
        """An agent that an earlier leader has placed reattaches; its workers continue."""
        run = self.run
        if run.phase is not RoundPhase.RUNNING or agent.host in run.policy.excluded:
            return stop(
                (agent,), "the run has been formed anew", "agent_restarted", run.entry.round
            )
        run.participants.pending_rejoin.discard(agent)
        effects: list[Effect] = []
        if agent not in run.ranks:
            if not self._has_room:
                why = "the run has its max nodes, or is nearly done"
                return stop((agent,), why, "at_max_nodes", run.entry.round)
            run.participants.add(agent, run.ranks, now)
            effects = self._admit((agent,), (), now)
        self.placed[agent] = placement
        return [*effects, *self._advance(now)]

    def joined_quorum(self, agent: Agent) -> None:
        """A member is in a quorum."""
        if agent in self.run.ranks:
            self.taking_part.add(agent)

    def worker_failed(self, failures: Iterable[Failure], agent: Agent, now: float) -> list[Effect]:
        """Workers of a member failed; its other workers have been stopped."""
        run = self.run
        if agent in run.done or not self.run.is_member(agent):
            return []
        self.taking_part.discard(agent)
        effects = self._judge_once(failures, agent)
        if run.phase is not RoundPhase.RUNNING:
            return effects
        is_excluded = agent.host in run.policy.excluded
        if run.done or is_excluded:
            sent_back = run.backoff.requeue_faulty((agent,)) if is_excluded else []
            return [*effects, *self._remove_member(agent, now), *sent_back, *self._advance(now)]
        why = "its workers failed, and are started again"
        return [*effects, *stop((agent,), why, "failed", run.entry.round)]

    def finished(self, agent: Agent, now: float) -> list[Effect]:
        """All workers of a member have returned."""
        if not self.run.is_member(agent):
            return []
        if not self.run.done:
            self._results = results_of(self._round_of(agent), agent)
        self.run.done.add(agent)
        return self._advance(now)

    def noticed(self, agent: Agent, reason: str, left_s: float, now: float) -> list[Effect]:
        """A member has a preemption notice; its agent arranges its leave with the lighthouse."""
        return [preemption_note(agent, reason, left_s)] if agent in self.run.ranks else []

    def agent_lost(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """An agent was lost (its connection broke, or it timed out), or has left by itself."""
        run = self.run
        if run.phase in (RoundPhase.ENDED, RoundPhase.DISBANDED):
            return []
        effects = run.lose(agent, why)
        run.participants.pending_rejoin.discard(agent)
        if run.phase is RoundPhase.RUNNING:
            effects += self._remove_member(agent, now)
        return [*effects, *self._advance(now)]

    def heartbeat_lost(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """An agent has timed out while its connection was open."""
        self.run.note_silence(agent)
        return self.agent_lost(agent, why, now)

    def slurm_answered(
        self, states: Mapping[str, TaskState] | None, asked_at: float, now: float
    ) -> list[Effect]:
        """Take in the states of the run's tasks; None: Slurm did not answer."""
        effects, ended = self.run.slurm_answered(states, asked_at, now)
        for agent in ended:
            effects += self.agent_lost(agent, "the scheduler reports that its task has ended", now)
        return [*effects, *self.run.end_if_hopeless(), *self._advance(now)]

    def progressed(self, agent: Agent, progress: Message, now: float) -> None:
        """Take in the progress in a member's heartbeat: a step of any member is progress."""
        self.run.progressed(agent, progress, now)
        if progress.get("step") is not None:
            self.run.policy.record_checkpoint(int(progress["step"]))

    def tick(self, now: float) -> list[Effect]:
        """Apply the rules that depend on time; all members that timed out together are known."""
        judges = self.run.phase is RoundPhase.RUNNING and self.run.policy.is_due
        judged = self._judge_alone(self.run.entry.round) if judges else []
        return [*judged, *self._advance(now)]

    # ---- members ------------------------------------------------------------------------

    def _round_of(self, agent: Agent) -> int:
        placement = self.placed.get(agent)
        return placement.round if placement is not None else self.run.entry.round

    @property
    def _has_room(self) -> bool:
        run = self.run
        return len(run.ranks.members) < run.rules.max_nodes and not run.done

    def _advance(self, now: float) -> list[Effect]:
        run = self.run
        if run.phase is not RoundPhase.RUNNING:
            effects, closes = run.form(now)
            return [*effects, *(self._close_first_round(now) if closes else [])]
        if run.done:
            return self._finish(now)
        effects = []
        if run.participants.joined and now >= run.not_before:
            effects += self._admit_joined(now)
        if run.participants.joined:
            effects += run.requeue_late(now)
        return [*effects, *run.disband_if_short(now)]

    def _close_first_round(self, now: float) -> list[Effect]:
        """Close the first round, or one after all members were lost: all are placed."""
        self.run.close_round(now)
        self.placed.clear()
        return self._place(self.run.ranks.members)

    def _admit_joined(self, now: float) -> list[Effect]:
        run = self.run
        joined, members = run.participants.joined, run.ranks.members
        again = tuple(a for a in joined if a in run.ranks)
        tasks = {a.task for a in members}
        attempts = tuple(a for a in joined if a.task in tasks and a not in run.ranks)
        new = [a for a in joined if a.task not in tasks]
        room = run.rules.max_nodes - len(members)
        wanted = (*again, *attempts, *new[: max(0, room)])
        return self._admit(wanted, wanted, now) if wanted else []

    def _admit(
        self, newcomers: tuple[Agent, ...], placed: tuple[Agent, ...], now: float
    ) -> list[Effect]:
        """Make the newcomers members; ``placed``: those whose workers have not started yet."""
        run = self.run
        tasks = {a.task for a in newcomers}
        replaced = [a for a in run.ranks.members if a.task in tasks and a not in newcomers]
        for agent in replaced:
            self._forget(agent)
        run.ranks = RankAssignment(tuple(dict.fromkeys((*run.ranks.members, *newcomers))))
        run.participants.remove(newcomers)
        run.recovery.update_awaited(run.participants.lost)
        run.estimator.on_close(now)
        self._update_short(now)
        if run.short_since is None:
            run.backoff.times_requeued = 0
        return self._place(placed)

    def _place(self, placed: tuple[Agent, ...]) -> list[Effect]:
        effects = self.run.announce(placed, alone=True)
        entry = self.run.entry
        self.placed |= dict.fromkeys(placed, Placement(entry.round, entry.index))
        self.taking_part.difference_update(placed)
        return effects

    def _remove_member(self, agent: Agent, now: float) -> list[Effect]:
        """Decide that an agent is no member any more."""
        run = self.run
        run.participants.pending_rejoin.discard(agent)
        if agent not in run.ranks:
            return []
        self._forget(agent)
        self._update_short(now)
        run.recovery.update_awaited(run.participants.lost)
        members = run.ranks.members
        if not members and not run.done:
            run.begin_forming(now)
        return [run.decide(members=members), departed_note(agent, members)]

    def _forget(self, agent: Agent) -> None:
        run = self.run
        run.ranks = RankAssignment(tuple(a for a in run.ranks.members if a != agent))
        self.placed.pop(agent, None)
        self.taking_part.discard(agent)

    def _update_short(self, now: float) -> None:
        run = self.run
        if len(run.ranks.members) >= run.rules.min_nodes:
            run.short_since = None
        elif run.short_since is None:
            run.short_since = now

    # ---- the end ------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        """A member is done: release those that would have to start again; wait for the others."""
        run = self.run
        tasks = {a.task for a in run.participants.joined}
        starting = [a for a in run.ranks.members if a.task in tasks]
        effects = [effect for agent in starting for effect in self._remove_member(agent, now)]
        members = set(run.ranks.members)
        waited_for = self.taking_part & members or members
        if waited_for <= run.done:
            effects += run.end_run(RunEnding("succeeded", results=self._results))
        return effects

    # ---- failures -----------------------------------------------------------------------

    def _judge_once(self, failures: Iterable[Failure], agent: Agent) -> list[Effect]:
        """Judge failures of a member, which may report them again on another connection."""
        placed_by = self._round_of(agent)
        if self._judged.get(agent) == placed_by:
            return []
        self._judged[agent] = placed_by
        self.run.policy.failures += failures
        self.run.policy.not_counted = bool(self.run.done)
        return self._judge_alone(placed_by)

    def _judge_alone(self, round_: int) -> list[Effect]:
        """Judge what has failed since the last time."""
        run = self.run
        hosts = {a.host for a in (*run.ranks.members, *run.participants.joined)}
        effects, ending = run.policy.judge(round_, hosts)
        run.policy.new_round()
        return [*effects, *(run.end_run(ending) if ending is not None else [])]


Rounds = RoundState | ReplicaState
"""The rules of a run, by `RoundRules.ft`."""


def departed_note(agent: Agent, members: tuple[Agent, ...]) -> Note:
    """Return the event of a replica that has left."""
    return Note("replica_left", {"task": agent.task, "host": agent.host, "nodes": len(members)})


def results_of(round_: int, agent: Agent) -> str:
    """Return the name of the folder with an agent's return values, placed by a round."""
    return f"round-{round_}.slot-{agent.slot}"


def replica_name(agent: Agent) -> str:
    """Return the name of an agent's replica: each attempt is another replica."""
    return f"{agent.task}:{agent.attempt}"


# ---- The lighthouse beside its leader (pure)
# The bridge handles two cases that the lighthouse cannot detect. While the leader may be cut off,
# no message reaches the lighthouse: another leader may have been elected, whose lighthouse forms
# quorums of the other replicas. And while a replica ends, a newcomer that has not been in a quorum
# yet has to wait: if the replica has finished, the run is over, and a newcomer that is left alone
# would train from the start.


SETTLES_WITHIN_S = 2.0
"""Longest time after the end of workers until their agent reports it; usually 0.1 s."""


class QuorumBridge:
    """Connects the agents of one leader to the lighthouse of its term.

    Args:
        lighthouse: The lighthouse.
        replicas: The state of its leader.
    """

    def __init__(self, lighthouse: LighthouseState, replicas: ReplicaState) -> None:
        self._lighthouse = lighthouse
        self._replicas = replicas
        self._agents: dict[str, Agent] = {}
        self._waiting: deque[Callable[[float], list[ReplicaMessage]]] = deque()
        """Events for the lighthouse, until this leader is known not to be cut off."""
        self._ending: dict[Agent, float] = {}
        """Agents whose workers have ended, since when, until they report how."""
        self._held: dict[Agent, QuorumRequest] = {}
        """Requests of newcomers that wait in the meantime."""

    def connected(self, agent: Agent) -> None:
        """An agent has connected."""
        name = replica_name(agent)
        self._agents[name] = agent
        self._waiting.append(partial(self._lighthouse.on_connect, name))

    def received(self, agent: Agent, message: ReplicaReport, now: float) -> None:
        """An agent has sent a message for the lighthouse."""
        replicas = self._replicas
        match message:
            case ReplicaStatus() if message.quorum_id != NO_QUORUM:
                replicas.joined_quorum(agent)
            case Shutdown() | WorkersLost() if agent in replicas.taking_part:
                self._ending[agent] = now
            case QuorumRequest() if agent not in replicas.taking_part and self._is_ending:
                self._held[agent] = message
                return
        if isinstance(message, (CancelRequest, WorkersLost, Shutdown)):
            self._held.pop(agent, None)
        self._waiting.append(partial(self._lighthouse.on_message, replica_name(agent), message))

    def disconnected(self, agent: Agent, why: str) -> None:
        """The connection to an agent has ended, or the agent has timed out."""
        name = replica_name(agent)
        self._agents.pop(name, None)
        self._held.pop(agent, None)
        self._ending.pop(agent, None)
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
        self._waiting.append(self._lighthouse.on_tick)

    def answer(self, now: float) -> list[Effect]:
        """Let the lighthouse handle the waiting events; return the messages that it sends."""
        sends: list[Effect] = []
        while self._waiting:
            for answer in self._waiting.popleft()(now):
                agent = self._agents.get(answer.replica)
                if agent is not None:
                    if isinstance(answer.message, QuorumResults):
                        self._replicas.joined_quorum(agent)
                    sends.append(Send((agent,), to_frame(answer.message)))
        return sends

    @property
    def _is_ending(self) -> bool:
        return bool(self._ending or self._replicas.run.done)

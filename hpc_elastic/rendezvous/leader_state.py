"""Leader state: what a leader does in its term, and what it may still decide (pure).

Theory of operation
-------------------
The leader owns the `round_state`, or the `replica_state` of a run with ``ft=true``, and stands
between it and the world:

Liveness   `HeartbeatTracker` has the agents that are heard, and those whose silence means loss.

Decisions  Closing a round, releasing members, sending all nodes back and ending the run are
           *decisions*: each is the next `log_entry` of the run. The leader has the entry appended,
           and all effects behind it wait in order until it was. If the index is taken, or a later
           entry is seen, another agent leads: the leader is fenced and steps down.

Lease      The leader renews a lease on the shared file system while it hears at least half of the
           members that the last entry names, and could form a group with those it hears. Agents
           that cannot reach it elect another only once the lease has run out, so that one node that
           is cut off does not depose a leader that the others follow. A leader that hears fewer may
           be the one that is cut off: it renews no lease and closes no round for as long as the
           others need to elect. If nobody did, they are dead, and it goes on. Replicas train on
           meanwhile: none is taken for lost, and the lighthouse makes no quorum.
           A leader that cannot renew its lease steps down before members that it does not hear may
           elect another; and where it cannot append a decision either, in any case.

Reports    of members are numbered by the entry of the round that they belong to: a report of an
           earlier one is ignored. Requests for a place are numbered by the agent.

Slurm      is queried when `task_recovery` allows it; what its answer means stands there too.

Sweep      A run below min nodes asks whether it waits in vain, for nodes that other runs of its
           sweep hold. A run that trains lets others start (`hpc_elastic.slurm.sweep_queue`).

Events return the effects to carry out, in order. Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.messages import unpack
from hpc_elastic.ft.quorum import QuorumRules
from hpc_elastic.rendezvous import task_recovery
from hpc_elastic.rendezvous.effects import (
    Append,
    ClearHolds,
    Disconnect,
    Effect,
    LetOthersStart,
    Message,
    Note,
    QuerySweep,
    QueryTasks,
    RemoveNotice,
    RenewLease,
    Send,
    StepDown,
)
from hpc_elastic.rendezvous.failure_policy import Stragglers
from hpc_elastic.rendezvous.hang_diagnosis import HangDiagnosis
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry, RoundRules
from hpc_elastic.rendezvous.replica_state import (
    QuorumBridge,
    ReplicaState,
    Rounds,
    departed_note,
    replica_name,
)
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import CONFIRM_LOST_S, SlurmPollSchedule
from hpc_elastic.slurm.job_state import TaskState

OVERDUE = "has not found the new leader"
_SWEEP_EVERY_S, _SWEEP_LONGEST_S = 5.0, 15.0
"""Between two looks at the other runs of the sweep: longer each time, until one shows something."""


class LeaderState:
    """One leader in one term.

    Attributes:
        rounds: The rules of the run, by which its nodes train as one group or as replicas.
        run: The state that these go by.
        at: The last entry of this term that is appended; the next decision is the one after it.
        fenced: Whether another agent leads.
        progress: What the workers of each member reported last.
    """

    round_rules: type[RoundState] = RoundState
    replica_rules: type[ReplicaState] = ReplicaState

    def __init__(
        self,
        claim: LogEntry,
        rules: RoundRules,
        liveness: HeartbeatConfig,
        now: float,
        rng: random.Random,
    ) -> None:
        self.rounds: Rounds
        self._quorum: QuorumBridge | None = None
        self._inherited_notes: list[Effect] = []
        if rules.ft:
            self.rounds = replicas = self.replica_rules(claim, rules, now, rng)
            lost, members = replicas.inherited_losses, replicas.run.ranks.members
            sizes = QuorumRules(min_replicas=rules.min_nodes)
            lost_names = map(replica_name, lost)
            lighthouse = LighthouseState(claim.term, sizes, lost_members=lost_names)
            self._quorum = QuorumBridge(lighthouse, replicas)
            self._inherited_notes += [departed_note(agent, members) for agent in lost]
        else:
            self.rounds = self.round_rules(claim, rules, now, rng)
        self.run = self.rounds.run
        self.at = claim
        self.fenced = False
        self.progress: dict[Agent, Message] = {}
        self.liveness = liveness
        self.stragglers = Stragglers()
        self._hangs = HangDiagnosis()
        self._tracker = HeartbeatTracker(liveness, self.run.participants.pending_rejoin, now)
        self._silent: dict[Agent, str] = {}
        """Agents that are not heard, and are not taken for lost yet; and what happened."""
        self._yielding = False
        self._lease_due = now
        self._unrenewed_since: float | None = None
        """When the renewal of the lease was asked for that has not been done yet."""
        self._pending: LogEntry | None = None
        """The entry that is being appended."""
        self._queue: list[Effect] = []
        """Effects that stand behind it."""
        self._polls = SlurmPollSchedule()
        self._sweep_due, self._sweep_pause_s = now, _SWEEP_EVERY_S
        self._leave_requests = LeaveRequests()

    # ---- events -------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        """The claim is appended: begin to lead."""
        return [Note("leader", {"term": self.at.term}), *self._inherited_notes]

    def connected(self, agent: Agent, now: float) -> list[Effect]:
        """An agent has proved who it is, on a new connection."""
        if self.fenced:
            return []
        effects: list[Effect] = []
        if agent in self._tracker.heard:
            effects.append(Disconnect(agent))
            effects += self.disconnected(agent, "connected anew", now)
        self._tracker.connected(agent, now)
        self._silent.pop(agent, None)
        self.run.recovery.clear_possibly_alive(agent.task)
        self._yield_if_cut_off(now)
        if self._quorum is not None:
            self._quorum.connected(agent)
        return [*effects, *self._answer_replicas(now)]

    def received(self, agent: Agent, message: Message, now: float) -> list[Effect]:
        """An agent has sent a message; see `leader` for the messages.

        Raises:
            ValueError, KeyError, TypeError: it is no message of an agent.
        """
        if self.fenced or agent not in self._tracker.heard:
            return []
        self._tracker.heard[agent] = now
        match message["type"]:
            case "leave":
                knows = self.knows_notice(agent.task)
                return [*knows, *self.disconnected(agent, str(message["why"]), now)]
            case "noticed":
                return self.knows_notice(agent.task)
            case "ft":
                if self._quorum is not None:
                    self._quorum.received(agent, unpack(message["message"]), now)
                return self._answer_replicas(now)
            case "join" | "reattach" if self.at.ending is not None:
                return [Send((agent,), self.at.ending.message)]
            case "join" | "reattach" if self.run.phase is RoundPhase.ENDED:
                return []  # it is sent the end with all others, once that is appended
            case "join":
                self._polls.hurry()
        effects = self._events(agent, message, now)
        return [*self._do(effects), *self._query_tasks(now)]

    def disconnected(self, agent: Agent, why: str, now: float) -> list[Effect]:
        """The connection to an agent is gone."""
        if not self._forget(agent, why):
            return []
        self.run.recovery.clear_possibly_alive(agent.task)
        gone = self._do(self.rounds.gone(agent, why, now))
        return [*gone, *self._answer_replicas(now)]

    def asked_to_leave(self, claimed: Mapping[str, float]) -> list[Effect]:
        """These notices are in this leader's hands, each with the seconds that it leaves."""
        tell, confirmed, in_vain = self._leave_requests.look(claimed, self._tracker.heard)
        told = [Send((agent,), {"type": "notice", "left_s": left_s}) for agent, left_s in tell]
        vain = [RemoveNotice(name, in_vain=True) for name in in_vain]
        return [*told, *map(RemoveNotice, confirmed), *vain]

    def knows_notice(self, task: str) -> list[Effect]:
        """The agent of a task knows that its node is to be left."""
        heard = self._tracker.heard
        requests = self._leave_requests
        known = (requests.confirmed(agent, heard) for agent in heard if agent.task == task)
        return [RemoveNotice(name) for names in known for name in names]

    def slurm_says(self, states: Mapping[str, TaskState] | None, now: float) -> list[Effect]:
        """Slurm answered, or did not (None)."""
        asked_at = self._polls.end_query(len(states or {}), now)
        if self.fenced or not self.run.wants_slurm:
            return []
        known = (states or {}).items()
        self._tracker.have_no_node(t for t, s in known if task_recovery.has_no_node(s))
        effects = self._do(self.rounds.slurm_says(states, asked_at, now))
        if self.run.recovery.are_due:
            self._polls.query_within(CONFIRM_LOST_S, now)
        return effects

    def sweep_says(self, why: str | None, now: float) -> list[Effect]:
        """The run waits in vain for min nodes, and why; None: it may yet get them."""
        longer_s = min(_SWEEP_LONGEST_S, 1.5 * self._sweep_pause_s)
        if why is not None:  # to be seen again soon: then the nodes go back
            self._sweep_pause_s = longer_s = _SWEEP_EVERY_S
        self._sweep_due, self._sweep_pause_s = now + self._sweep_pause_s, longer_s
        return [] if self.fenced else self._do(self.run.sweep_says(why, now))

    def appended(self) -> list[Effect]:
        """The entry exists: carry out what stands behind it."""
        if self.fenced:
            return []
        assert self._pending is not None
        before, self.at, self._pending = self.at, self._pending, None
        if self.at.round > before.round:
            self._tracker.close_round()
        elif len(self.at.members) < len(before.members):
            self._tracker.have_no_node(a.task for a in {*before.members} - {*self.at.members})
        queue, self._queue = self._queue, []
        return self._do(queue)

    def refused(self) -> list[Effect]:
        """The index of the entry is taken."""
        return self._step_down()

    def saw(self, last_number: int) -> list[Effect]:
        """The last entry on the shared file system has this index."""
        newest = self.at if self._pending is None else self._pending
        return self._step_down() if last_number > newest.index else []

    def tick(self, now: float) -> list[Effect]:
        """Time has passed; to be called every `HeartbeatConfig.heartbeat_interval_s` at least."""
        if self.fenced:
            return []
        if late_s := self._tracker.forgive_if_slept(now):
            self.run.add_grace(late_s, now)
        effects = self._lose_silent(now)
        effects += self._do(self.rounds.tick(now))
        effects += self._do(self._hangs.tick(self.rounds, now))
        effects.append(Send(tuple(self._tracker.heard), {"type": "heartbeat"}))
        effects += self._renew_lease(now)
        return [*effects, *self._query_tasks(now), *self._query_sweep(now)]

    def tick_quorum(self, now: float) -> list[Effect]:
        """Time has passed for the lighthouse; to be called every few hundredths of a second."""
        if self._quorum is None or self.fenced:
            return []
        self._quorum.tick(now)
        return self._answer_replicas(now)

    def renewed(self) -> list[Effect]:
        """The lease was renewed."""
        self._unrenewed_since = None
        return []

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is not appended yet."""
        return self._pending is not None and not self.fenced

    def is_cut_off(self, now: float) -> bool:
        """Return whether this leader may be the one that nobody hears."""
        return self._yielding and now < self.run.not_before

    # ---- messages -----------------------------------------------------------------------

    def _events(self, agent: Agent, message: Message, now: float) -> list[Effect]:
        match message["type"]:
            case "join":
                return self.rounds.join(agent, now, message["request"])
            case "close":
                return self.run.close()
            case "heartbeat":
                return self._learn(agent, message["progress"], now) if message["progress"] else []
            case "stalled" | "stacks" if self.rounds.is_current(agent, message):
                return self._hangs.received(self.rounds, agent, message, now)
        return self.rounds.received(agent, message, now)

    def _learn(self, agent: Agent, progress: Message, now: float) -> list[Effect]:
        self.progress[agent] = progress
        self.rounds.progressed(agent, progress, now)
        if "loads" not in progress or agent not in self.run.ranks:
            return []
        return self.stragglers.record_loads(agent, progress["loads"], self.run.entry.round)

    def _answer_replicas(self, now: float) -> list[Effect]:
        """Send what the lighthouse answers, which waits for no entry; nothing if cut off."""
        if self._quorum is None or self.fenced or self.is_cut_off(now):
            return []
        return self._quorum.answer(now)

    # ---- decisions ----------------------------------------------------------------------

    def _do(self, effects: list[Effect]) -> list[Effect]:
        """Return the effects to carry out now; those behind an append wait until it is done.

        Tasks are brought back at once: later the run may have sent them away.
        """
        now: list[Effect] = []
        for effect in effects:
            if self._pending is not None and not isinstance(effect, ClearHolds):
                self._queue.append(effect)
                continue
            if isinstance(effect, Append):
                self._pending = effect.entry
            elif isinstance(effect, Send):
                effect = Send(self._heard_of(effect.agents), effect.message)
            now.append(effect)
        return now

    def _heard_of(self, agents: Collection[Agent] | None) -> tuple[Agent, ...]:
        heard = self._tracker.heard
        return tuple(heard if agents is None else (a for a in agents if a in heard))

    def _step_down(self) -> list[Effect]:
        if self.fenced:
            return []
        self.fenced = True
        return [StepDown()]

    # ---- who lives ----------------------------------------------------------------------

    def _lose_silent(self, now: float) -> list[Effect]:
        """Take agents for lost because nothing is heard of them."""
        effects: list[Effect] = []
        for agent in self._tracker.silent(now):
            self._forget(agent, "silent")
            self._silent[agent] = "silent"
            effects.append(Disconnect(agent))
        self._silent |= dict.fromkeys(self._tracker.take_overdue(now), OVERDUE)
        for agent in self._silent:
            if agent in self.run.ranks:
                self._tracker.note_silence(agent)
        self._yield_if_cut_off(now)
        if self.rounds.waits_when_cut_off and self.is_cut_off(now):
            return effects
        silent, self._silent = self._silent, {}
        for agent, why in silent.items():
            effects += self._do(self.rounds.fell_silent(agent, why, now))
        return effects

    def _forget(self, agent: Agent, why: str) -> bool:
        """Forget an agent that is not connected any more; tell whether it was."""
        if self.fenced or self._tracker.heard.pop(agent, None) is None:
            return False
        self.progress.pop(agent, None)
        if self._quorum is not None:
            self._quorum.disconnected(agent, why)
        return True

    def _hears_half(self) -> bool:
        return self._tracker.hears_half(len(self.at.members))

    def _is_below_min(self) -> bool:
        """Whether this leader could decide nothing: an agent out of its reach may try to lead."""
        forms = self.run.phase in (RoundPhase.FORMING, RoundPhase.RUNNING)
        return forms and len(self._tracker.heard) < self.run.rules.min_nodes

    def _yield_if_cut_off(self, now: float) -> None:
        if self._hears_half():
            self._yielding = False
            self.run.not_before = now
        elif not self._yielding:
            self._yielding = True
            self.run.not_before = now + self.liveness.election_s

    # ---- the lease, and Slurm -----------------------------------------------------------

    def _renew_lease(self, now: float) -> list[Effect]:
        """Renew the lease where that is due; step down where it is in vain."""
        if not self._hears_half() or self._is_below_min():
            self._unrenewed_since = None
            return []
        if now < self._lease_due:
            return []
        if self._unrenewed_since is None:
            self._unrenewed_since = now
        vain_s = now - self._unrenewed_since
        lapses = vain_s > self.liveness.lapse_s - self.liveness.lease_s
        if lapses and self._tracker.misses_somebody:
            return self._step_down()
        if self.is_deciding and vain_s > 2 * self.liveness.heartbeat_timeout_s:
            return self._step_down()
        self._lease_due = now + self.liveness.lease_s - self.liveness.heartbeat_interval_s / 2
        return [RenewLease()]

    def _query_tasks(self, now: float) -> list[Effect]:
        run = self.run
        waiting = bool(run.participants.joined or run.participants.pending_rejoin)
        if not (run.wants_slurm and (waiting or run.awaits_tasks)):
            return []
        about = (run.entry.round, run.forming_since, waiting)
        return [QueryTasks()] if self._polls.begin_query(about, now, gently=not waiting) else []

    def _query_sweep(self, now: float) -> list[Effect]:
        run = self.run
        if not run.rules.in_sweep or now < self._sweep_due:
            return []
        if run.is_short:
            self._sweep_due = math.inf  # until it is answered
            return [QuerySweep(dict(run.participants.lost))]
        self._sweep_pause_s = _SWEEP_EVERY_S
        if run.phase is RoundPhase.RUNNING:
            self._sweep_due = now + _SWEEP_EVERY_S
            return [LetOthersStart(tuple(run.participants.lost))]
        return []


# ---- Heartbeats: which agents a leader hears, and whose silence counts (pure)
# An agent lives as long as it is heard: a broken connection is a loss at once, silence is one
# after ``heartbeat_timeout_s``. Where a tick comes late it was the leader that slept or was busy,
# and nobody's silence counts for that long. A member of the last round that does not find a new
# leader within `HeartbeatConfig.election_s` is lost too.
#
# A leader that hears fewer than half of the last round's members, because the others have fallen
# silent (and not because their connections closed), may itself be the one that is cut off.
#
# Times are monotonic seconds of the leader's node.


_BEATS_PER_S = 5000
_PUNCTUAL_S = 0.1


@dataclass(frozen=True)
class HeartbeatConfig:
    """When silence means loss; seconds."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    stale_s: float = 0.0
    """How old a file may be that is read anew on the run's file system."""

    @property
    def lease_s(self) -> float:
        """Between two renewals of a lease: each is an operation of a shared file system."""
        return 2 * self.heartbeat_interval_s

    @property
    def lapse_s(self) -> float:
        """A lease that was not renewed for so long has lapsed."""
        return 5 * self.heartbeat_interval_s + self.stale_s

    @property
    def election_s(self) -> float:
        """So long it may take others to elect a leader, and to find it."""
        return 2 * self.heartbeat_timeout_s + self.stale_s

    @classmethod
    def of(
        cls,
        heartbeat_interval_s: float,
        heartbeat_timeout_s: float,
        max_nodes: int,
        stale_s: float = 0.0,
    ) -> HeartbeatConfig:
        """Return a run's, from its settings: in a large one each agent beats more seldom.

        A leader is asked to take five thousand heartbeats a second, as long as three of each agent
        are due before its silence counts.
        """
        gentle_s = min(max_nodes / _BEATS_PER_S, heartbeat_timeout_s / 3)
        return cls(max(heartbeat_interval_s, gentle_s), heartbeat_timeout_s, stale_s)


class HeartbeatTracker:
    """Agents that a leader hears, and those whose silence counts."""

    def __init__(self, liveness: HeartbeatConfig, expected: Iterable[Agent], now: float) -> None:
        self.liveness = liveness
        self.heard: dict[Agent, float] = {}
        """Agents that are connected, and when each was heard last."""
        self._expected = {a.task: (a, now + liveness.election_s) for a in expected}
        """Members of the last round that have not found this leader yet, and until when."""
        self._silent: set[str] = set()
        """Tasks of the last round's members that were lost by silence."""
        self._ticked = now

    def connected(self, agent: Agent, now: float) -> None:
        """An agent has proved who it is."""
        self.heard[agent] = now
        self._expected.pop(agent.task, None)
        self._silent.discard(agent.task)

    def close_round(self) -> None:
        """A round has closed: silence in the last one does not matter any more."""
        self._silent.clear()

    def have_no_node(self, tasks: Iterable[str]) -> None:
        """Slurm says that nothing runs of these tasks: their silence is no riddle."""
        self._silent.difference_update(tasks)

    def note_silence(self, agent: Agent) -> None:
        """A member is not heard any more."""
        self._silent.add(agent.task)

    def forgive_if_slept(self, now: float) -> float:
        """Count no silence for the time that the leader itself was not running; return it."""
        late_s, self._ticked = now - self._ticked - self.liveness.heartbeat_interval_s, now
        if late_s <= _PUNCTUAL_S:
            return 0.0
        self.heard = {a: min(now, heard + late_s) for a, heard in self.heard.items()}
        self._expected = {t: (a, until + late_s) for t, (a, until) in self._expected.items()}
        return late_s

    def silent(self, now: float) -> list[Agent]:
        """Return the agents that were not heard for too long."""
        limit = now - self.liveness.heartbeat_timeout_s
        return [a for a, heard in self.heard.items() if heard < limit]

    def take_overdue(self, now: float) -> list[Agent]:
        """Return, once, the members of the last round that have not found this leader in time."""
        overdue = [a for a, until in self._expected.values() if now > until]
        for agent in overdue:
            del self._expected[agent.task]
        return overdue

    @property
    def misses_somebody(self) -> bool:
        """Whether members are unheard that may live, and try to lead."""
        return bool(self._silent or self._expected)

    def hears_half(self, num_members: int) -> bool:
        """Return whether this leader is on the side of the last round's members that may go on."""
        return len(self._silent) + len(self._expected) <= num_members / 2


# ---- Which nodes are asked to be left by notices that a leader has claimed (pure)
# A notice is kept until a node that it names has confirmed it. A message may be lost with its
# connection, and a leader may be cut off from the node without knowing it yet.


PATIENCE = 30
"""A notice that names no agent that is there is removed after this many looks."""


@dataclass
class _Notice:
    told: set[Agent] = field(default_factory=set)
    confirmed: set[Agent] = field(default_factory=set)
    num_vain_looks: int = 0


class LeaveRequests:
    """The notices of one leader."""

    def __init__(self) -> None:
        self._notices: dict[str, _Notice] = {}

    def look(
        self, claimed: Mapping[str, float], heard: Collection[Agent]
    ) -> tuple[list[tuple[Agent, float]], list[str], list[str]]:
        """Return what the notices ask for.

        Args:
            claimed: Notices that the leader has, by task, host or ``all``; and the seconds left.
            heard: Agents that are connected.

        Returns:
            Who is to be told, and the seconds that are left; the notices to remove because they
            are confirmed; and those to remove because they name nobody.
        """
        self._notices = {name: self._notices.get(name, _Notice()) for name in claimed}
        tell: list[tuple[Agent, float]] = []
        confirmed: list[str] = []
        in_vain: list[str] = []
        for name, notice in self._notices.items():
            waiting = [a for a in heard if _names(name, a) and a not in notice.confirmed]
            notice.told.update(waiting)
            tell += [(agent, claimed[name]) for agent in waiting]
            if waiting:
                continue
            if notice.confirmed:
                confirmed.append(name)
                continue
            notice.num_vain_looks += 1
            if notice.num_vain_looks >= PATIENCE:
                in_vain.append(name)
        return tell, self._forget(confirmed), self._forget(in_vain)

    def confirmed(self, agent: Agent, heard: Collection[Agent]) -> list[str]:
        """An agent knows that its node is to be left; return the notices to remove."""
        over: list[str] = []
        for name, notice in self._notices.items():
            if agent in notice.told:
                notice.confirmed.add(agent)
                if not any(a in heard for a in notice.told - notice.confirmed):
                    over.append(name)
        return self._forget(over)

    def _forget(self, over: list[str]) -> list[str]:
        """Forget what is over: another notice of the same name is a new one."""
        for name in over:
            del self._notices[name]
        return over


def _names(name: str, agent: Agent) -> bool:
    return name in (agent.task, agent.host, "all")

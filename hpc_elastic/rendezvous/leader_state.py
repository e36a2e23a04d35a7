"""Leader state: what a leader does in its term, and what it may still decide (pure).

Theory of operation
-------------------
The leader owns the `round_state`, or the `replica_state` of a run with ``ft=true``, and stands
between it and the world:

Liveness   `HeartbeatTracker` has the time of each agent's last heartbeat, and decides which agents
           have timed out.

Decisions  Closing a round, releasing members, sending all nodes back and ending the run are
           *decisions*: each is the next `log_entry` of the run. The leader has the entry appended,
           and all effects behind it wait in order until it was. If the index is taken, or a later
           entry is seen, another agent leads: the leader is fenced and steps down.

Lease      The leader renews a lease on the shared file system while it receives heartbeats from at
           least half of the members that the last entry names, and from at least min nodes. Agents
           that cannot reach it elect another leader only after the lease has expired, so that one
           node that is cut off does not depose a leader that the others follow. A leader that
           reaches fewer members may itself be cut off: it renews no lease and closes no round for
           as long as the others need for an election. If no entry of another leader appears until
           then, the others are dead, and it continues. Replicas continue to train in the meantime:
           none is marked lost, and the lighthouse forms no quorum.
           A leader that cannot renew its lease steps down before the members that it does not reach
           may elect another; if it cannot append a decision either, it steps down in any case.

Failures   A leader that fails by an error of its own appends that to the log as its last decision,
           and steps down, or ends the run (`failure_policy`). It drops the effects that wait.

Reports    of members carry the index of the log entry of their round: the leader ignores reports of
           earlier rounds. The agent numbers its requests for a place.

Slurm      is queried when `task_recovery` allows it; that module also interprets the answer.

The queue  is queried for advice (`hpc_elastic.site.policy`). A run below min nodes asks whether
           other runs of the user hold the nodes that it waits for. A run that trains lets others
           start. Without advice the run goes on.

Events return the effects to carry out, in order. Times are monotonic seconds of the leader's node.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.quorum import QuorumRules
from hpc_elastic.rendezvous import effects, messages, task_recovery
from hpc_elastic.rendezvous.effects import Effect, Note, Send, hosts_of
from hpc_elastic.rendezvous.failure_policy import Stragglers
from hpc_elastic.rendezvous.hang_diagnosis import HangDiagnosis
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, RoundRules
from hpc_elastic.rendezvous.replica_state import QuorumBridge, ReplicaState, Rounds, replica_name
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.rendezvous.task_recovery import CONFIRM_LOST_S, SlurmPollSchedule
from hpc_elastic.run import queue_name
from hpc_elastic.run.events import LossReason
from hpc_elastic.site import NodeReturn, QueueAdvice, QueueQuestion
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.transport.messages import Json

NO_DEADLINE_S = 7 * 24 * 3600.0
"""A node that is drained, or goes back for another job, is left at the next checkpoint."""
_QUEUE_EVERY_S = 5.0  # interval of the queries of the queue
_SHORT_LONGEST_S = 15.0
"""The interval of those of a run that is short of nodes grows to this, until one has a result."""


class LeaderState:
    """One leader in one term; ``at`` is its last entry that is appended."""

    round_rules: type[RoundState] = RoundState
    replica_rules: type[ReplicaState] = ReplicaState
    num_kept = 64
    """Log entries that are kept before the last one, and leases before the present one."""

    def __init__(
        self,
        claim: LogEntry,
        rules: RoundRules,
        heartbeat: HeartbeatConfig,
        now: float,
        rng: random.Random,
    ) -> None:
        self.rounds: Rounds
        self._quorum: QuorumBridge | None = None
        self._inherited: list[Effect] = []
        if rules.ft:
            self.rounds = replicas = self.replica_rules(claim, rules, now, rng)
            sizes = QuorumRules(min_replicas=rules.min_nodes // rules.unit_nodes)
            lost_names = map(replica_name, replicas.inherited_losses)
            lighthouse = LighthouseState(claim.term, sizes, lost_members=lost_names)
            self._quorum = QuorumBridge(lighthouse, replicas)
            self._inherited = replicas.drop_losses()
        else:
            self.rounds = self.round_rules(claim, rules, now, rng)
        self.run = self.rounds.run
        self.at = claim
        self.fenced = False
        self.has_failed = False
        self._attempts = claim.attempts
        """Task -> its newest attempt: an older one has no part in the run."""
        self.progress: dict[Agent, Json] = {}
        self.versions: dict[str, str] = {}  # of Python and packages on the node of each task
        self.last_step: int | None = None
        self.heartbeat = heartbeat
        self.stragglers = Stragglers()
        self._hangs = HangDiagnosis()
        expected = sorted(self.run.participants.pending_rejoin, key=lambda agent: agent.slot)
        self._tracker = HeartbeatTracker(heartbeat, expected, now)
        self._silent: dict[Agent, LossReason] = {}
        """Agents that have timed out and are not marked lost yet."""
        self._yielding = False
        self._lease_due = now
        self._removal_due, self._removable, self._removed = now, 0, 0
        """When old entries are removed next, before which index, and before which they were."""
        self._unrenewed_since: float | None = None
        """When the renewal was requested that is not done yet."""
        self._pending: LogEntry | None = None  # the entry that is being appended
        self._queue: list[Effect] = []  # effects that stand behind it
        self._polls = SlurmPollSchedule()
        self._queue_due = now  # when the queue is queried next; infinite until it has answered
        self._short_due, self._short_pause_s = now, _QUEUE_EVERY_S
        self._leave_requests = LeaveRequests()
        self._noted_round: int | None = None  # the last round whose long wait was noted
        self._left_soon: dict[int, Agent] = {}
        """Of each slot the agent that was asked last to leave at a checkpoint."""

    # ---- events -------------------------------------------------------------------------

    def start_leading(self) -> list[Effect]:
        """The claim is appended: start the term."""
        return self._do([Note("leader", {"term": self.at.term}), *self._inherited])

    def connected(self, agent: Agent, now: float) -> list[Effect]:
        """An agent is authenticated on a new connection."""
        if self.fenced:
            return []
        newest = self._attempts.setdefault(agent.task, agent.attempt)
        if agent.attempt < newest:
            return [Send((agent,), messages.OLDER_ATTEMPT)]
        due: list[Effect] = []
        if agent.attempt > newest:
            self._attempts[agent.task] = agent.attempt
            for other in [a for a in self._tracker.last_heartbeat if a.task == agent.task]:
                due.append(Send((other,), messages.OLDER_ATTEMPT))
                due += self.disconnected(other, LossReason.TASK_RESTARTED, now, announced=True)
        if agent in self._tracker.last_heartbeat:
            due.append(effects.Disconnect(agent))
            due += self.disconnected(agent, LossReason.RECONNECTED, now)
        self._tracker.connected(agent, now)
        self._silent.pop(agent, None)
        self.run.recovery.possibly_alive.pop(agent.task, None)
        self._yield_if_cut_off(now)
        if self._quorum is not None:
            self._quorum.connected(agent)
        return [*due, *self._answer_replicas(now)]

    def received(self, agent: Agent, message: messages.RunMessage, now: float) -> list[Effect]:
        """An agent has sent a message; see `messages`."""
        if self.fenced or agent not in self._tracker.last_heartbeat:
            return []
        self._tracker.last_heartbeat[agent] = now
        match message:
            case messages.Leave(why):
                confirmed = self.notice_confirmed(agent.task)
                return [*confirmed, *self.disconnected(agent, why, now, announced=True)]
            case messages.NoticeConfirmed():
                return self.notice_confirmed(agent.task)
            case messages.QuorumMessage():
                if self._quorum is not None:
                    self._quorum.received(agent, message.message, now)
                return self._answer_replicas(now)
            case messages.Join() | messages.Reattach() if self.at.ending is not None:
                return [Send((agent,), messages.End.of(self.at.ending))]
            case messages.Join() | messages.Reattach() if self.run.phase is RoundPhase.ENDED:
                return []  # it is sent the end with all others, once that is appended
            case messages.Join():
                self._polls.hurry()
        due = self._events(agent, message, now)
        return [*self._do(due), *self._query_tasks(now)]

    def disconnected(
        self, agent: Agent, why: str, now: float, *, announced: bool = False
    ) -> list[Effect]:
        """The connection to an agent has ended; ``announced``: it leaves by itself."""
        if not self._forget(agent, why):
            return []
        self.run.recovery.possibly_alive.pop(agent.task, None)
        due = self._do(self.rounds.agent_lost(agent, why, now, announced=announced))
        return [*due, *self._answer_replicas(now)]

    def notices_claimed(self, claimed: Mapping[str, float]) -> list[Effect]:
        """This leader has claimed these notice files, each with the seconds until its deadline."""
        connected = self._tracker.last_heartbeat
        to_send, confirmed, unmatched = self._leave_requests.match_agents(claimed, connected)
        return [
            *(Send((agent,), messages.NoticeRequest(left_s)) for agent, left_s in to_send),
            *map(effects.RemoveNotice, confirmed),
            *(effects.RemoveNotice(name, matches_no_agent=True) for name in unmatched),
        ]

    def notice_confirmed(self, task: str) -> list[Effect]:
        """The agent of a task has confirmed that its node is to be left."""
        connected, requests = self._tracker.last_heartbeat, self._leave_requests
        over = (requests.confirmed(agent, connected) for agent in connected if agent.task == task)
        return [effects.RemoveNotice(name) for names in over for name in names]

    def slurm_answered(self, states: Mapping[str, TaskState] | None, now: float) -> list[Effect]:
        """Slurm has answered the query of the run's tasks; None: it has not."""
        asked_at = self._polls.end_query(len(states or {}), now)
        if self.fenced or not self.run.wants_slurm:
            return []
        known = (states or {}).items()
        not_running = [task for task, state in known if task_recovery.has_no_node(state)]
        self._tracker.silent.difference_update(not_running)
        due = self._do(self.rounds.slurm_answered(states, asked_at, now))
        if self.run.recovery.are_due:
            self._polls.query_within(CONFIRM_LOST_S, now)
        return due

    def advised(self, advice: QueueAdvice, now: float) -> list[Effect]:
        """The queue was queried: what it lets the run do."""
        self._queue_due, due = now + _QUEUE_EVERY_S, list[Effect]()
        if self._short_due == math.inf:  # that was asked
            why = advice.blocked_why
            longer_s = min(_SHORT_LONGEST_S, 1.5 * self._short_pause_s)
            if why is not None:  # queried again soon: if it is confirmed, the nodes are requeued
                self._short_pause_s = longer_s = _QUEUE_EVERY_S
            self._short_due, self._short_pause_s = now + self._short_pause_s, longer_s
            due = [] if self.fenced else self._do(self.rounds.sweep_answered(why, now))
        if advice.max_nodes is not None:
            self.run.growth.share = advice.max_nodes
        due += self.drained(advice.reserved, keeps_min=False)
        return [*due, *self.drained(advice.drained), *self._give_back(advice.returns)]

    def _give_back(self, returns: Iterable[NodeReturn]) -> list[Effect]:
        connected = {agent.task: agent for agent in self._tracker.last_heartbeat}
        due: list[Effect] = []
        for each in returns:
            agents = [connected[task] for task in each.tasks if task in connected]
            fields = {"job": each.job, "user": each.user, "needs": each.num_nodes}
            named = {"tasks": [a.task for a in agents], "hosts": hosts_of(agents)}
            due += self._let_leave(agents, Note("nodes_given_back", {**fields, **named}))
        return [] if self.fenced else self._do(due)

    def _let_leave(self, agents: Collection[Agent], why: Note) -> list[Effect]:
        """Let agents leave their nodes at the next checkpoint, without a deadline."""
        self._left_soon |= {agent.slot: agent for agent in agents}
        return [why, Send(tuple(agents), messages.NoticeRequest(NO_DEADLINE_S))]

    def _leaves_soon(self, agent: Agent) -> bool:
        return self._left_soon.get(agent.slot) == agent

    def drained(self, states: Mapping[str, str], *, keeps_min: bool = True) -> list[Effect]:
        """Let agents leave, without a deadline, whose nodes are drained: they get no new jobs.

        At least min nodes of the members stay, unless the nodes are reserved: a drained node goes
        on with the job that it has. ``states`` are Slurm's, by host.
        """
        due: list[Effect] = []
        members, rules = self.run.ranks.members, self.run.rules
        num_left = sum(not self._leaves_soon(agent) for agent in members)
        for agent in sorted(self._tracker.last_heartbeat, key=lambda a: a.slot):
            is_due = agent.host in states and not self._leaves_soon(agent)
            if not is_due or queue_name(agent.task) != agent.task:
                continue
            if agent in self.run.ranks:
                if keeps_min and rules.usable_nodes(num_left - 1) < rules.min_nodes:
                    continue
                num_left -= 1
            fields = {"task": agent.task, "host": agent.host, "state": states[agent.host]}
            due += self._let_leave([agent], Note("node_drained", fields))
        return [] if self.fenced else self._do(due)

    def appended(self) -> list[Effect]:
        """The entry exists: carry out what stands behind it."""
        if self.fenced:
            return []
        assert self._pending is not None
        before, self.at, self._pending = self.at, self._pending, None
        if self.at.round > before.round:  # the time-outs of the last one do not count any more
            self._tracker.silent.clear()
        elif len(self.at.members) < len(before.members):
            gone = {*before.members} - {*self.at.members}
            self._tracker.silent.difference_update(agent.task for agent in gone)
        queue, self._queue = self._queue, []
        return self._do(queue)

    def refused(self) -> list[Effect]:
        """The index of the entry is taken."""
        return self._step_down()

    def log_advanced(self, last_index: int) -> list[Effect]:
        """The last entry on the shared file system has this index."""
        newest = self.at if self._pending is None else self._pending
        return self._step_down() if last_index > newest.index else []

    def failed(self, failure: Failure, drops_append: bool) -> list[Effect]:
        """This leader has failed: give up the term, for the next leader or the end of the run.

        ``drops_append``: the entry that is being appended will not exist.
        """
        if self.fenced or self.has_failed:
            return []
        self.has_failed, self._queue = True, []
        if drops_append:
            self._pending = None
        self.run.entry = self._pending or self.at
        if self.run.entry.ending is not None:
            return self._do([effects.StepDown()])  # the agents find the end in the log
        self.run.phase = RoundPhase.FORMING  # an end that was queued is dropped, too
        note, ending = self.run.policy.term_failed(failure)
        if ending is not None:
            return [note, *self._do(self.run.end_run(ending))]
        return [note, *self._do([self.run.decide(gave_up=True), effects.StepDown()])]

    def tick(self, now: float) -> list[Effect]:
        """Handle the passing of time; call it every `HeartbeatConfig.heartbeat_interval_s`."""
        if self.fenced:
            return []
        if late_s := self._tracker.forgive_if_slept(now):
            self.run.add_grace(late_s, now)
        due = self._lose_timed_out(now)
        due += self._do(self.rounds.tick(now))
        due += self._do(self._hangs.tick(self.rounds, now))
        due += self._do(self._note_long_wait(now))
        due.append(Send(tuple(self._tracker.last_heartbeat), messages.Heartbeat()))
        due += self._renew_lease(now) + self._remove_entries(now)
        return [*due, *self._query_tasks(now), *self._query_queue(now)]

    def _note_long_wait(self, now: float) -> list[Effect]:
        """Note, once for each round, that the run has had no group for long."""
        run = self.run
        longest_s, waited_s = run.rules.noted_wait_s, now - run.forming_since
        if longest_s is None or waited_s < longest_s or run.phase is not RoundPhase.FORMING:
            return []
        if run.entry.round == self._noted_round:
            return []
        self._noted_round = run.entry.round
        fields = {"round": run.entry.round, "waited_s": waited_s, "min_nodes": run.rules.min_nodes}
        return [Note("waits_long", {**fields, "nodes": len(run.participants.joined)})]

    def tick_quorum(self, now: float) -> list[Effect]:
        """Handle the passing of time for the lighthouse; call it 20 to 50 times a second."""
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
        """Return whether this leader may be cut off from the other agents."""
        return self._yielding and now < self.run.not_before

    # ---- messages -----------------------------------------------------------------------

    def _events(self, agent: Agent, message: messages.RunMessage, now: float) -> list[Effect]:
        if isinstance(message, (messages.Join, messages.Reattach)):
            self.run.reach.add(agent, message.probes)
            self.versions[agent.task] = message.versions
        match message:
            case messages.Probed():
                self.run.reach.answered(agent, message)
                return self.rounds.tick(now)
            case messages.Join():
                return self.rounds.join(agent, now, message)
            case messages.Close():
                return self.run.close()
            case messages.Heartbeat(progress):
                return self._learn(agent, progress, now) if progress else []
            case messages.Stall() | messages.Stacks() if self.rounds.is_current(agent, message):
                return self._hangs.received(self.rounds, agent, message, now)
        return self.rounds.received(agent, message, now)

    def _learn(self, agent: Agent, progress: Json, now: float) -> list[Effect]:
        self.progress[agent] = progress
        self.last_step = progress.get("step", self.last_step)
        self.run.progressed(agent, progress, now)
        if "loads" not in progress or agent not in self.run.ranks:
            return []
        return self.stragglers.record_loads(agent, progress["loads"], self.run.entry.round)

    def _answer_replicas(self, now: float) -> list[Effect]:
        """Send the lighthouse's answers, which wait for no log entry; none while cut off."""
        if self._quorum is None or self.fenced or self.is_cut_off(now):
            return []
        return self._quorum.answer(now)

    # ---- decisions ----------------------------------------------------------------------

    def _do(self, due: list[Effect]) -> list[Effect]:
        """Return the effects to carry out now; those behind an append wait until it is done.

        Tasks are restarted at once: later, the run may have requeued them itself.
        """
        now: list[Effect] = []
        for effect in due:
            if self._pending is not None and not isinstance(effect, effects.ClearHolds):
                self._queue.append(effect)
                continue
            if isinstance(effect, effects.Append):
                self._pending = effect.entry
            elif isinstance(effect, Send):
                effect = Send(self._connected_of(effect.agents), effect.message)
            now.append(effect)
        return now

    def _connected_of(self, agents: Collection[Agent] | None) -> tuple[Agent, ...]:
        connected = self._tracker.last_heartbeat
        return tuple(connected if agents is None else (a for a in agents if a in connected))

    def _step_down(self) -> list[Effect]:
        was_fenced, self.fenced = self.fenced, True
        return [] if was_fenced else [effects.StepDown()]

    # ---- liveness -----------------------------------------------------------------------

    def _lose_timed_out(self, now: float) -> list[Effect]:
        """Mark agents lost that have timed out, or have not found this leader in time."""
        due: list[Effect] = []
        for agent in self._tracker.timed_out(now):
            self._forget(agent, LossReason.SILENT)
            self._silent[agent] = LossReason.SILENT
            due.append(effects.Disconnect(agent))
        self._silent |= dict.fromkeys(self._tracker.take_overdue(now), LossReason.LEADER_NOT_FOUND)
        self._tracker.silent.update(a.task for a in self._silent if a in self.run.ranks)
        self._yield_if_cut_off(now)
        if self.rounds.waits_when_cut_off and self.is_cut_off(now):
            return due
        silent, self._silent = self._silent, {}
        for agent, why in silent.items():
            self.run.note_silence(agent)
            due += self._do(self.rounds.agent_lost(agent, why, now))
        return due

    def _forget(self, agent: Agent, why: str) -> bool:
        """Forget a disconnected agent; return whether it was connected."""
        if self.fenced or self._tracker.last_heartbeat.pop(agent, None) is None:
            return False
        self.progress.pop(agent, None)
        if self._quorum is not None:
            self._quorum.disconnected(agent, why)
        return True

    def _reaches_half(self) -> bool:
        return self._tracker.reaches_half(len(self.at.members))

    def _is_below_min(self) -> bool:
        """Whether this leader can decide nothing: an agent out of its reach may try to lead."""
        forms = self.run.phase in (RoundPhase.FORMING, RoundPhase.RUNNING)
        return forms and len(self._tracker.last_heartbeat) < self.run.rules.min_nodes

    def _yield_if_cut_off(self, now: float) -> None:
        if self._reaches_half():
            self._yielding = False
            self.run.not_before = now
        elif not self._yielding:
            self._yielding = True
            self.run.not_before = now + self.heartbeat.election_s

    # ---- the lease, and Slurm -----------------------------------------------------------

    def _renew_lease(self, now: float) -> list[Effect]:
        """Renew the lease if that is due; step down if renewals fail for too long."""
        if not self._reaches_half() or self._is_below_min():
            self._unrenewed_since = None
            return []
        if now < self._lease_due:
            return []
        if self._unrenewed_since is None:
            self._unrenewed_since = now
        failing_s = now - self._unrenewed_since
        lapses = failing_s > self.heartbeat.lapse_s - self.heartbeat.lease_s
        if lapses and self._tracker.misses_members:
            return self._step_down()
        if self.is_deciding and failing_s > 2 * self.heartbeat.heartbeat_timeout_s:
            return self._step_down()
        self._lease_due = now + self.heartbeat.lease_s - self.heartbeat.heartbeat_interval_s / 2
        return [effects.RenewLease()]

    def _remove_entries(self, now: float) -> list[Effect]:
        """Remove entries that have had `num_kept` later ones for as long as listings may be late.

        A process that was stalled longer may create their indices again: no listing that it makes
        then is so old that it shows no later entry.
        """
        if now < self._removal_due:
            return []
        self._removal_due = now + self.heartbeat.heartbeat_interval_s + 2 * self.heartbeat.stale_s
        index, self._removable = self._removable, self.at.index - self.num_kept
        if index <= self._removed:
            return []
        self._removed = index
        return [effects.RemoveEntries(index, self.at.term - self.num_kept)]

    def _query_tasks(self, now: float) -> list[Effect]:
        run = self.run
        waiting = bool(run.participants.joined or run.participants.pending_rejoin)
        if not (run.wants_slurm and (waiting or run.awaits_tasks)):
            return []
        about = (run.entry.round, run.forming_since, waiting)
        return (
            [effects.QueryTasks()]
            if self._polls.begin_query(about, now, gently=not waiting)
            else []
        )

    def _query_queue(self, now: float) -> list[Effect]:
        run, in_sweep = self.run, self.run.rules.in_sweep
        if not run.is_short:
            self._short_pause_s = _QUEUE_EVERY_S
        if now < self._queue_due:
            return []
        is_short = in_sweep and run.is_short and now >= self._short_due
        trains = in_sweep and not run.is_short and run.phase is RoundPhase.RUNNING
        gives_way = in_sweep and run.rules.give_way != "off"
        if not (is_short or trains or run.rules.fits_time_limits or gives_way):
            return []
        self._queue_due = math.inf
        if is_short:
            self._short_due = math.inf
        lost, grows = dict(run.participants.lost), not run.growth.holds
        returnable = self._returnable() if gives_way and (trains or run.is_short) else ()
        return [effects.QueryQueue(QueueQuestion(lost, is_short, trains, grows, returnable))]

    def _returnable(self) -> tuple[tuple[str, str], ...]:
        run = self.run
        least = 0 if run.rules.give_way == "all" else run.rules.min_nodes
        ranked = () if run.is_short else run.ranks.members  # those that wait to its minimum
        members = [agent for agent in ranked if not self._leaves_soon(agent)]
        joined = [agent for agent in run.participants.joined if not self._leaves_soon(agent)]
        found = returnable([agent for agent in joined if agent not in members], members, least)
        return tuple((agent.task, agent.host) for agent in found)


def returnable(waiting: Iterable[Agent], members: Iterable[Agent], least: int) -> list[Agent]:
    """Return the agents that may leave their nodes for jobs of others, the best ones first.

    Those without a place in the round (``waiting``), then those of the last ranks. ``least`` of the
    members and the tasks of as many slots stay.
    """
    leaving = sorted(members, key=lambda agent: agent.slot >= least)[least:][::-1]
    return [
        agent
        for agent in (*waiting, *leaving)
        if agent.slot >= least and queue_name(agent.task) == agent.task
    ]


_HEARTBEATS_PER_S = 5000
_PUNCTUAL_S = 0.1


@dataclass(frozen=True)
class HeartbeatConfig:
    """When an agent without heartbeats is lost; seconds."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    stale_s: float = 0.0
    """Greatest age of the content that opening a file of the run again may return."""

    @property
    def lease_s(self) -> float:
        """Between two renewals of a lease: each is an operation on the shared file system."""
        return 2 * self.heartbeat_interval_s

    @property
    def lapse_s(self) -> float:
        """A lease that is not renewed for this time has lapsed."""
        return 5 * self.heartbeat_interval_s + self.stale_s

    @property
    def election_s(self) -> float:
        """Longest time in which the other agents elect a leader and connect to it."""
        return 2 * self.heartbeat_timeout_s + self.stale_s

    @classmethod
    def of(
        cls, interval_s: float, timeout_s: float, max_nodes: int, stale_s: float = 0.0
    ) -> HeartbeatConfig:
        """Return a run's, from its settings: agents of a large run send heartbeats more rarely.

        The leader receives at most 5,000 heartbeats a second, as long as an agent sends three
        within the time-out.
        """
        gentle_s = min(max_nodes / _HEARTBEATS_PER_S, timeout_s / 3)
        return cls(max(interval_s, gentle_s), timeout_s, stale_s)


class HeartbeatTracker:
    """The connected agents of a leader, and the members that have timed out.

    An agent is lost at once when its connection breaks, and after ``heartbeat_timeout_s`` without a
    heartbeat. If a tick is late, the leader itself slept or was busy: that time counts for no
    agent. A member of the last round that does not find a new leader within
    `HeartbeatConfig.election_s` is lost too.

    If more than half of the last round's members have timed out (their connections did not close),
    the leader may itself be cut off.

    Times are monotonic seconds of the leader's node.
    """

    def __init__(self, heartbeat: HeartbeatConfig, expected: Iterable[Agent], now: float) -> None:
        self.heartbeat = heartbeat
        self.last_heartbeat: dict[Agent, float] = {}
        """Connected agents, each with the time of its last message."""
        self._expected = {a.task: (a, now + heartbeat.election_s) for a in expected}
        """Members of the last round that have not connected yet, each with its deadline."""
        self.silent: set[str] = set()
        """Tasks of the last round's members that have timed out, and may run."""
        self._ticked = now

    def connected(self, agent: Agent, now: float) -> None:
        """An agent is authenticated."""
        self.last_heartbeat[agent] = now
        self._expected.pop(agent.task, None)
        self.silent.discard(agent.task)

    def forgive_if_slept(self, now: float) -> float:
        """Move all deadlines by the time that the leader itself was not running; return it."""
        late_s, self._ticked = now - self._ticked - self.heartbeat.heartbeat_interval_s, now
        if late_s <= _PUNCTUAL_S:
            return 0.0
        self.last_heartbeat = {a: min(now, at + late_s) for a, at in self.last_heartbeat.items()}
        self._expected = {t: (a, until + late_s) for t, (a, until) in self._expected.items()}
        return late_s

    def timed_out(self, now: float) -> list[Agent]:
        """Return the connected agents without a message for `heartbeat_timeout_s`."""
        limit = now - self.heartbeat.heartbeat_timeout_s
        return [a for a, at in self.last_heartbeat.items() if at < limit]

    def take_overdue(self, now: float) -> list[Agent]:
        """Return, once, the members of the last round that have not connected in time."""
        overdue = [a for a, until in self._expected.values() if now > until]
        for agent in overdue:
            del self._expected[agent.task]
        return overdue

    @property
    def misses_members(self) -> bool:
        """Whether some members without heartbeats may be alive, and try to lead."""
        return bool(self.silent or self._expected)

    def reaches_half(self, num_members: int) -> bool:
        """Return whether at least half of the last round's members have not timed out."""
        return len(self.silent) + len(self._expected) <= num_members / 2


MAX_UNMATCHED = 30  # a notice that matches no connected agent this many times in a row is removed


@dataclass
class _Notice:
    sent: set[Agent] = field(default_factory=set)
    confirmed: set[Agent] = field(default_factory=set)
    num_unmatched: int = 0


class LeaveRequests:
    """The notices of one leader.

    A notice is kept until a node that it names has confirmed it. A message may be lost with its
    connection, and the leader may be cut off from the node without having detected it.
    """

    def __init__(self) -> None:
        self._notices: dict[str, _Notice] = {}

    def match_agents(
        self, claimed: Mapping[str, float], connected: Collection[Agent]
    ) -> tuple[list[tuple[Agent, float]], list[str], list[str]]:
        """Match notices, with the seconds left by task, host or ``all``, with connected agents.

        Returns the agents to send a notice to, each with the seconds left; the notices to remove
        because they are confirmed; and those to remove because they match no agent.
        """
        self._notices = {name: self._notices.get(name, _Notice()) for name in claimed}
        to_send: list[tuple[Agent, float]] = []
        confirmed: list[str] = []
        unmatched: list[str] = []
        for name, notice in self._notices.items():
            named = (a for a in connected if name in (a.task, a.host, "all"))
            waiting = [agent for agent in named if agent not in notice.confirmed]
            notice.sent.update(waiting)
            to_send += [(agent, claimed[name]) for agent in waiting]
            if notice.confirmed and not waiting:
                confirmed.append(name)
            elif not waiting:
                notice.num_unmatched += 1
                if notice.num_unmatched >= MAX_UNMATCHED:
                    unmatched.append(name)
        return to_send, self._forget(confirmed), self._forget(unmatched)

    def confirmed(self, agent: Agent, connected: Collection[Agent]) -> list[str]:
        """An agent has confirmed that its node is to be left; return the notices to remove."""
        over: list[str] = []
        for name, notice in self._notices.items():
            if agent in notice.sent:
                notice.confirmed.add(agent)
                if not any(a in connected for a in notice.sent - notice.confirmed):
                    over.append(name)
        return self._forget(over)

    def _forget(self, over: list[str]) -> list[str]:
        """Forget notices, so that later ones of the same names count as new."""
        for name in over:
            del self._notices[name]
        return over

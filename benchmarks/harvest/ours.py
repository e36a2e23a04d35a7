"""A run of hpc_elastic in slots, in virtual time: its real leader decides, the rest is modelled.

Real    `LeaderState` with all that it uses: which nodes a round has and when it closes, whether a
        newcomer is worth a restart, when the group saves and who leaves at it, when Slurm is
        queried and what its answer means, the back-off of nodes below the minimum. A leader whose
        node leaves is followed by a new one, from the log entry of the old one. Also real: when a
        node is noticed of its end and by when it leaves (`hpc_elastic.agent.preemption`).
Model   Agents and workers: each answer and each act takes its time of `Costs`, on all nodes alike.
        Workers make steps in lock-step. No message is lost, no node dies without notice.

With ``ft=true`` nodes are replicas: the leader's decisions are real, and the quorum's are not; what
a quorum costs its members is taken from `Costs`.
"""

import heapq
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from harvest.account import Account
from harvest.slots import PASS_S, Slot
from hpc_elastic.agent.preemption import (
    measured_departure_s,
    of_time_limit,
    why_leave_now,
    within,
)
from hpc_elastic.rendezvous.effects import Announce, Append, Effect, QueryTasks, RenewLease, Send
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry, RoundRules, claim
from hpc_elastic.rendezvous.messages import (
    CheckpointAnnounced,
    CheckpointRequested,
    Heartbeat,
    Join,
    Leave,
    MemberReport,
    Notice,
    PreemptionNotice,
    Reattach,
    Requeue,
    RunMessage,
    Stop,
    Vote,
)
from hpc_elastic.rendezvous.round_state import RoundPhase, RoundState
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.worker.shared_page import CheckpointRequest, WorkerStatus

LIVENESS = HeartbeatConfig(0.5, 3.0)
SIGNAL_DELAY_S = 120.0
"""The default of ``launcher.signal_delay_s``."""
GRACE_S = 30.0
"""GraceTime of the preemptible QOS."""


@dataclass(frozen=True)
class Costs:
    """Seconds that acts take, from RESULTS.md.

    Attributes:
        start_s: From the start of a task until its agent requests a place ("Recovery": a node that
            joins is detected after 3.4 s; "Preempted tasks run again": 3.5 s).
        stop_s: From the stop of a round until an agent requests a place in the next one, by warm
            workers; with ``slurm_s`` and twice ``append_s`` it is the rendezvous of a recovery.
        slurm_s: An answer of squeue.
        append_s: A log entry on the shared file system.
        page_s: Until an agent has voted on a checkpoint request.
        first_step_s: From the place in a round to the first step, without the restore.
        save_s: A save of the whole group at which it stays, until it is complete.
        blocked_s: What an ordinary save holds up a training.
        restore_s: Reading the state in every restart.
        elect_s: A new leader, after the one before has left.
        heal_s: With ``ft=true``: until a newcomer has the state and takes part.
        heal_stall_s: What its healing holds up the others, in all.
        quorum_s: What another quorum holds up its members.
    """

    start_s: float = 3.5
    stop_s: float = 0.05
    slurm_s: float = 0.1
    append_s: float = 0.01
    page_s: float = 0.05
    first_step_s: float = 0.06
    save_s: float = 0.22
    blocked_s: float = 0.09
    restore_s: float = 0.0
    elect_s: float = 0.2
    heal_s: float = 0.6
    heal_stall_s: float = 1.0
    quorum_s: float = 0.06


@dataclass(frozen=True)
class Script:
    """The user's script.

    ``save_every_s``: between two of its own checkpoints. It asks `should_checkpoint` each step, so
    that the group may save at any.
    """

    step_s: float = 0.25
    save_every_s: float = 300.0


def rules(num_nodes: int, **changes: Any) -> RoundRules:
    """Return the rules of ``nodes=1:N`` with the default settings."""
    defaults: dict[str, Any] = {
        "min_nodes": 1, "max_nodes": num_nodes, "max_restarts": 3, "straggler_timeout_s": 60.0,
        "last_call_s": 5.0, "below_min_timeout_s": 300.0,
    }  # fmt: skip
    return RoundRules(**{**defaults, **changes})


@dataclass(eq=False)
class Node:
    """A task in its slot."""

    agent: Agent
    slot: Slot
    requests: int = 0
    is_up: bool = False
    """Whether its agent has started, and not left."""
    notice: PreemptionNotice | None = None
    placed: dict[str, int] = field(default_factory=dict)
    """The round that placed it (`ft`)."""
    takes_part: bool = False
    """Whether it trains (`ft`)."""
    departure_s: float | None = None
    """How long it takes to leave it, as measured; None before."""


@dataclass(eq=False)
class Group:
    """The workers of a round, in lock-step; ``index`` is of the round's log entry.

    ``anchor``: a time, and the step that begins then; the step where it stays, if ``runs`` is not.
    ``saved``: the last step of a complete checkpoint. ``hold_at``: a proposed step, which no worker
    passes. ``pauses``: the number of the request to stay at the next checkpoint of the script; 0:
    none.
    """

    index: int
    members: tuple[Agent, ...]
    begin_s: float
    anchor: tuple[float, int]
    saved: int
    first: int
    runs: bool = True
    is_over: bool = False
    hold_at: int | None = None
    pauses: int = 0

    def step(self, now: float, step_s: float) -> int:
        since, done = self.anchor
        if self.runs and now > since:
            done += int((now - since) / step_s + 1e-6)
        return done if self.hold_at is None else min(done, self.hold_at)


class ElasticRun:
    """One run in its slots, which are in order of their begins."""

    def __init__(
        self, slots: Iterable[Slot], rules: RoundRules, costs: Costs, script: Script, *, seed: int
    ) -> None:
        self.account = Account()
        self._rules, self._costs, self._script = rules, costs, script
        self._rng = random.Random(seed)
        self._now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._nodes: dict[Agent, Node] = {}
        self._running: dict[int, Node] = {}
        self._attempts = [-1] * rules.max_nodes
        self._leader: LeaderState | None = None
        self._leads: Node | None = None
        self._last: LogEntry | None = None
        """The last entry of the log."""
        self._ticked, self._beaten, self._is_tick_due = 0.0, 0.0, False
        self._group: Group | None = None
        self._saved = 0
        for slot in slots:
            self._at(slot.begin_s, self._begin_slot, slot)

    def run(self, until_s: float, *, enough_s: float | None = None) -> Account:
        """Run to a time, or until a number of node-seconds is trained; return the account."""
        while self._heap and self._heap[0][0] <= until_s:
            self._now, _, act, args = heapq.heappop(self._heap)
            act(*args)
            self._schedule_tick()
            if enough_s is not None and self.account.trained_s >= enough_s:
                break
        self._now = max(self._now, until_s) if enough_s is None else self._now
        self._end_group(self._step())
        self.account.change(0, self._now)
        return self.account

    def _at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (max(when, self._now), next(self._numbers), act, args))

    def _after(self, pause_s: float, act: Callable[..., None], *args: Any) -> None:
        self._at(self._now + pause_s, act, *args)

    # ---- nodes --------------------------------------------------------------------------

    def _begin_slot(self, slot: Slot) -> None:
        if slot.task in self._running:
            return
        self._attempts[slot.task] += 1
        agent = Agent(f"1_{slot.task}", self._attempts[slot.task], slot.task, f"n{slot.task}", 1)
        node = self._running[slot.task] = Node(agent, slot)
        self._after(self._costs.start_s, self._start_agent, node)
        if slot.is_preempted:
            self._at(slot.end_s, self._notice, node)
            self._at(slot.end_s + GRACE_S, self._leave, node, "killed")
        else:
            self._at(self._of_time_limit(node)[0], self._notice, node)
            self._at(slot.end_s, self._leave, node, "killed")

    def _start_agent(self, node: Node) -> None:
        if self._running.get(node.agent.slot) is not node or node.notice is not None:
            return
        node.is_up = True
        self._nodes[node.agent] = node
        if self._leader is None:
            self._elect()
        else:
            self._deliver(self._leader.connected, node.agent, self._now)
            self._join(node)

    def _notice(self, node: Node) -> None:
        """The node is to be left: its agent decides at once, and at the latest time."""
        if self._running.get(node.agent.slot) is not node:
            return
        if node.slot.is_preempted:
            node.notice = within(Reason.SIGNAL, GRACE_S, self._now)
        else:
            if (passed := self._progress_of(node)) is not None:
                node.departure_s = measured_departure_s([passed]) or node.departure_s
            due_s, notice = self._of_time_limit(node)
            if due_s > self._now:
                self._at(due_s, self._notice, node)
                return
            node.notice = notice
        if self._rules.ft or not self._is_member(node):
            self._leave(node, "its node is to be left")  # with ft at the next quorum
            return
        self._at(node.notice.by, self._obey_notice, node)
        self._send(node, Notice(node.notice.reason.value, node.notice.by - self._now))
        self._obey_notice(node)

    def _of_time_limit(self, node: Node) -> tuple[float, PreemptionNotice]:
        limit_s = node.slot.limit_s
        end_s = node.slot.begin_s + limit_s
        return of_time_limit(end_s, limit_s, SIGNAL_DELAY_S, node.departure_s)

    def _progress_of(self, node: Node) -> WorkerStatus | None:
        """Return what a worker reports that trains; None if it does not."""
        group, step_s = self._group, self._script.step_s
        if self._rules.ft or group is None or not self._is_member(node):
            return None
        if self._step() <= group.first + 1:
            return None
        has_saved = group.saved > group.first
        return worker_status(
            step=self._step(), step_time=self._now, first_step=group.first + 1,
            first_time=self._now - step_s * (self._step() - group.first - 1),
            save_s=self._costs.save_s if has_saved else None, restore_s=self._costs.restore_s,
        )  # fmt: skip

    def _obey_notice(self, node: Node) -> None:
        group = self._group
        if not node.is_up or node.notice is None or not self._is_member(node):
            return
        step = self._step() if group is not None and self._now >= group.begin_s else None
        boundary = None if step is None or group is None else group.saved
        status = worker_status(step=step, passed=step, boundary=boundary)
        begin_s = self._now if group is None else group.begin_s
        if why_leave_now(node.notice, [status], self._now, since=begin_s, saves_itself=True):
            self._leave(node, "it cannot wait")

    def _leave(self, node: Node, why: str) -> None:
        if self._running.get(node.agent.slot) is not node:
            return
        del self._running[node.agent.slot]
        self.account.release(node.slot, self._now)
        if not node.is_up:
            return
        node.is_up = False
        self._end_training(node)
        del self._nodes[node.agent]
        if self._is_member(node) and not self._rules.ft:
            self._end_group(self._group.saved if self._group is not None else 0)
        elif self._rules.ft and node.placed:
            self.account.hold_up(self._costs.quorum_s, self._now)
        if node is self._leads:
            self._lose_leader()
        elif self._leader is not None:
            self._deliver(self._leader.received, node.agent, Leave(why), self._now)

    def _is_member(self, node: Node) -> bool:
        group = self._group
        return group is not None and not group.is_over and node.agent in group.members

    def _join(self, node: Node) -> None:
        if not node.is_up or self._leader is None:
            return
        if node.notice is not None:
            self._leave(node, "its node is to be left")
            return
        node.requests += 1
        self._send(node, Join(node.requests))

    # ---- the leader ---------------------------------------------------------------------

    def _lose_leader(self) -> None:
        assert self._leader is not None
        self._last, self._leader, self._leads = self._leader.at, None, None
        if not self._rules.ft:
            self._end_group(self._group.saved if self._group is not None else 0)
        self._after(self._costs.elect_s, self._elect)

    def _elect(self) -> None:
        """The first node in order of slots claims the next term; the others follow it."""
        if self._leader is not None or not self._nodes:
            return
        node = min(self._nodes.values(), key=lambda node: node.agent.slot)
        index = 1 if self._last is None else self._last.index + 1
        endpoint = Endpoint(node.agent.host, 1, node.agent.task, node.agent.attempt)
        entry = claim(index, self._last, endpoint, self._now)
        self._leader = LeaderState(entry, self._rules, LIVENESS, self._now, self._rng)
        self._leads = node
        self._ticked = self._now
        self._deliver(self._leader.start_leading)
        for each in list(self._nodes.values()):
            self._deliver(self._leader.connected, each.agent, self._now)
        for each in list(self._nodes.values()):
            if self._rules.ft and each.placed:
                self._send(each, Reattach(**each.placed))
            else:
                self._join(each)

    def _report(self, node: Node, report: MemberReport) -> None:
        index = self._group.index if self._group is not None else 0
        self._send(node, replace(report, index=index))

    def _send(self, node: Node, message: RunMessage) -> None:
        if self._leader is not None and node.is_up:
            self._deliver(self._leader.received, node.agent, message, self._now)

    def _deliver(self, event: Callable[..., list[Effect]], *args: Any) -> None:
        """Let the leader handle an event, after a tick if it has had none for long."""
        leader = self._leader
        if leader is None:
            return
        if self._now - self._ticked > LIVENESS.heartbeat_interval_s:
            self._tick()
        self._do(event(*args))

    def _schedule_tick(self) -> None:
        if self._leader is not None and not self._is_tick_due and self._is_busy():
            self._is_tick_due = True
            self._at(self._ticked + LIVENESS.heartbeat_interval_s, self._tick_due)

    def _is_busy(self) -> bool:
        assert self._leader is not None
        run, rounds = self._leader.run, self._leader.rounds
        forms = run.phase is not RoundPhase.RUNNING or bool(run.participants.joined)
        return forms or (isinstance(rounds, RoundState) and not rounds.change.is_quiet)

    def _tick_due(self) -> None:
        self._is_tick_due = False
        if self._leader is not None and self._is_busy():
            self._tick()

    def _tick(self) -> None:
        leader = self._leader
        assert leader is not None
        self._ticked = self._now
        if self._now - self._beaten > LIVENESS.heartbeat_timeout_s / 2:  # enough, and less work
            self._beaten = self._now
            for agent in self._nodes:
                self._do(leader.received(agent, Heartbeat(), self._now))
            if self._group is not None:
                self._progress(self._group)
        self._do(leader.tick(self._now))

    def _do(self, effects: Iterable[Effect]) -> None:
        costs = self._costs
        for effect in effects:
            match effect:
                case Send(agents, Stop()):
                    self._stop(agents or ())
                case Send(_, CheckpointRequested(request)):
                    self._request(request)
                case Send(agents, Requeue(delay_s)):
                    for agent in agents or ():
                        self._requeue(agent, delay_s)
                case Append():
                    self._after(costs.append_s, self._appended, self._leader)
                case Announce():
                    self._place(effect)
                case QueryTasks():
                    self._after(costs.slurm_s, self._slurm_answers, self._leader)
                case RenewLease():
                    assert self._leader is not None
                    self._do(self._leader.renewed())

    def _appended(self, leader: LeaderState) -> None:
        if leader is self._leader:
            self._deliver(leader.appended)

    def _slurm_answers(self, leader: LeaderState) -> None:
        self.account.num_queries += 1
        if leader is not self._leader:
            return
        states = {}
        for task, attempt in enumerate(self._attempts):
            node, name = self._running.get(task), f"1_{task}"
            if node is None:
                states[name] = TaskState(name, "PENDING", "Resources", restarts=attempt + 1)
            else:
                left_s = node.slot.begin_s + node.slot.limit_s - self._now
                states[name] = TaskState(
                    name, "RUNNING", node=node.agent.host, restarts=attempt, time_left_s=left_s
                )
        self._deliver(leader.slurm_answered, states, self._now)

    def _requeue(self, agent: Agent, delay_s: float) -> None:
        """The run sends a node back: its task gets the same node again, once that may start."""
        node = self._nodes.get(agent)
        if node is None:
            return
        self.account.num_requeued += 1
        self._leave(node, "requeued")
        begin_s = self._now + delay_s + PASS_S / 2
        if begin_s < node.slot.end_s:
            end_s, left_s = node.slot.end_s, node.slot.limit_s - (begin_s - node.slot.begin_s)
            again = Slot(agent.slot, begin_s, end_s, left_s)
            self._at(begin_s, self._begin_slot, again)

    # ---- one group ----------------------------------------------------------------------

    def _place(self, announce: Announce) -> None:
        if announce.replicas is not None:
            self._place_replicas(announce)
            return
        costs, entry = self._costs, announce.entry
        begin_s = self._now + costs.first_step_s + costs.restore_s
        self._group = group = Group(
            entry.index, entry.members, begin_s, (begin_s, self._saved), self._saved, self._saved
        )
        self.account.num_rounds += 1
        self._at(begin_s + 2 * self._script.step_s, self._progress, group)
        self._at(begin_s + self._script.save_every_s, self._save, group)
        for agent in entry.members:
            node = self._nodes.get(agent)
            if node is None:  # it has left meanwhile
                self._end_group(group.saved)
            elif node.notice is not None:
                self._leave(node, "its node is to be left")

    def _step(self) -> int:
        return 0 if self._group is None else self._group.step(self._now, self._script.step_s)

    def _end_group(self, kept: int) -> None:
        """The workers stop; of their steps those up to ``kept`` remain."""
        group, step_s = self._group, self._script.step_s
        if group is None or group.is_over:
            return
        group.is_over = True
        self._saved = kept
        trained_s = len(group.members) * step_s * (kept - group.first)
        self.account.add(group.begin_s, self._now, len(group.members), trained_s)

    def _progress(self, group: Group) -> None:
        node = self._nodes.get(group.members[0])
        has_begun = self._now >= group.begin_s + self._script.step_s
        if has_begun and not group.is_over and node is not None and self._leader is not None:
            beat = Heartbeat({"step": self._step(), "total": None})
            self._do(self._leader.received(node.agent, beat, self._now))

    def _stop(self, agents: Collection[Agent]) -> None:
        if self._rules.ft:
            return
        group = self._group
        if group is not None:
            self._end_group(group.saved)
        for agent in agents:
            node = self._nodes.get(agent)
            if node is not None and node.notice is not None:
                self._after(0.0, self._leave, node, "its node is to be left")
            elif node is not None:
                self._after(self._costs.stop_s, self._join, node)

    def _save(self, group: Group) -> None:
        """A checkpoint of the script's own."""
        if group.is_over:
            return
        self._after(self._script.save_every_s, self._save, group)
        if not group.runs or group.hold_at is not None:
            return
        group.saved = self._step()
        number, group.pauses = group.pauses, 0
        if number:
            group.runs = False
            group.anchor = (self._now, group.saved)
            self._after(self._costs.save_s, self._announce_save, group, number)
        else:
            group.anchor = (group.anchor[0] + self._costs.blocked_s, group.anchor[1])
            self._announce_save(group, 0)

    def _announce_save(self, group: Group, number: int) -> None:
        for agent in group.members:
            if group.is_over or group is not self._group:
                return
            self._report_of(agent, CheckpointAnnounced(group.saved, number))

    def _report_of(self, agent: Agent, report: MemberReport) -> None:
        node = self._nodes.get(agent)
        if node is not None:
            self._report(node, report)

    def _request(self, request: CheckpointRequest | None) -> None:
        """All workers have got a checkpoint request."""
        group = self._group
        if group is None or group.is_over:
            return
        if request is None or request.released:
            self._resume(group)
        elif not request.confirmed:
            self._resume(group)
            if request.step and request.step > self._step():
                group.hold_at = request.step
            self._after(self._costs.page_s, self._vote, group, request.number, request.step)
        elif request.step is None:  # each node votes again once its workers poll steps
            group.pauses = request.number
            begin_s = max(self._now, group.begin_s + self._script.step_s)
            self._at(begin_s + self._costs.page_s, self._vote, group, request.number, 0)
        else:
            reached_s = group.anchor[0] + (request.step - group.anchor[1]) * self._script.step_s
            begin_s = max(reached_s, self._now)
            self._at(begin_s + self._costs.save_s, self._save_agreed, group, request)

    def _resume(self, group: Group) -> None:
        """No worker waits at a step, or stays at a checkpoint, any more."""
        step = self._step()
        if not group.runs or step == group.hold_at:
            group.anchor = (self._now, step)
        group.runs, group.hold_at, group.pauses = True, None, 0

    def _vote(self, group: Group, number: int, step: int) -> None:
        if group.is_over:
            return
        has_begun = self._now >= group.begin_s + self._script.step_s
        passed = self._step() if has_begun else None
        can = passed is None or (step > 0 and (passed < step or group.hold_at == step))
        vote = Vote(number, can, passed, 1 / self._script.step_s)
        for agent in group.members:
            if group.is_over:
                return
            self._report_of(agent, vote)

    def _save_agreed(self, group: Group, request: CheckpointRequest) -> None:
        if group.is_over or group.hold_at != request.step:
            return
        group.saved = request.step
        group.anchor, group.hold_at = (self._now, group.saved), None
        group.runs = not request.pause
        self._announce_save(group, request.number if request.pause else 0)

    # ---- replicas (ft) ------------------------------------------------------------------

    def _place_replicas(self, announce: Announce) -> None:
        entry, costs = announce.entry, self._costs
        assert announce.replicas is not None
        is_first = not any(node.takes_part for node in self._nodes.values())
        num_new = 0
        for number, (agent,) in announce.replicas.items():
            node = self._nodes.get(agent)
            if node is None:
                continue
            num_new += 1
            node.placed = {"number": entry.round, "index": entry.index, "replica": number}
            heal_s = costs.restore_s if is_first else costs.heal_s
            self._after(costs.first_step_s + heal_s, self._take_part, node)
        self.account.num_rounds += 1
        if num_new and not is_first:
            self.account.hold_up(costs.heal_stall_s, self._now)

    def _take_part(self, node: Node) -> None:
        if node.is_up and not node.takes_part:
            node.takes_part = True
            self.account.change(1, self._now)

    def _end_training(self, node: Node) -> None:
        if node.takes_part:
            node.takes_part = False
            self.account.change(-1, self._now)


def worker_status(**reported: Any) -> WorkerStatus:
    return WorkerStatus(**{**dict.fromkeys(WorkerStatus.__dataclass_fields__), **reported})

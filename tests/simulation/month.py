"""A month of one run on 64 nodes in virtual time, with every default.

The product's own `LeaderState` leads; agents, hosts and Slurm are models, smaller than those of
`cluster`, which have every message and every file. Nothing happens in most of a month, so the
leader's ticks are half a second apart only around an event. The heartbeats of the time between are
delivered at once, as punctual ones would have been.

Faults     Agents pause for some seconds, Slurm suspends jobs, the file system is away, nodes are
           preempted and killed by the kernel, one host is defective, and at times other users fill
           the cluster, so that a replacement waits for hours. With ``kills``, each round ends
           because the script takes a node with it, before its first checkpoint. With ``is_full``,
           fewer than min nodes are to be had but in the last hours, and leaders are lost while
           the others wait.

Invariants
Blame      No sound host is excluded for longer than `_EXCLUDED_S`.
Waits      No agent waits for a round until it gives up (``join_timeout_s``).
Progress   While min nodes could train, a round runs within `_FORMS_S`.
Sizes      The leader's state, the log entry and the rounds' events stay below a bound.
The end    The run goes on, unless it cannot do without its defective host; with ``kills`` it ends,
           with the reason that Slurm has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

from hpc_elastic.config.schema import NodeRange, RunSettings, SlurmSettings
from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Disconnect,
    Effect,
    Exclude,
    Note,
    Postpone,
    PublishResult,
    QueryTasks,
    RenewLease,
    Send,
    StepDown,
    places,
)
from hpc_elastic.rendezvous.failure_policy import FailurePolicy
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import (
    Agent,
    Endpoint,
    Failure,
    LogEntry,
    RoundRules,
    RunEnding,
    claim,
)
from hpc_elastic.rendezvous.messages import (
    CheckpointAnnounced,
    CheckpointRequested,
    End,
    Failed,
    Heartbeat,
    Join,
    Leave,
    MemberReport,
    Reattach,
    Requeue,
    RunMessage,
    Stop,
    Vote,
    Waiting,
)
from hpc_elastic.rendezvous.round_state import RoundPhase
from hpc_elastic.rendezvous.task_recovery import RequeueBackoff
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.worker.shared_page import CheckpointRequest
from simulation.campaign import Tally
from simulation.invariants import InvariantError
from simulation.world import Process, Slurm, World

DAY_S = 86_400.0
_DEFAULTS = SlurmSettings()

_EXCLUDED_S = 3600.0
_FORMS_S = 2 * 3600.0
_NUM_ITEMS = 25
"""Items of the leader's state for each node."""
_NUM_BYTES = 2_000
"""Bytes of a log entry for each node."""
_CHECK_EVERY_S = 300.0
_SIZES_EVERY = 50
"""Checks of the sizes are rarer, since they take the longest."""


@dataclass(frozen=True)
class Month:
    """The parameters of one run: what differs between runs, not settings that have a default."""

    days: float = 30.0
    num_nodes: int = 64
    min_nodes: int = 48
    num_spare_hosts: int = 8
    ft: bool = False
    kills: bool = False
    """Whether the script takes a node with it in each round."""
    is_full: bool = False
    """Whether other users have most of the cluster, while the leader is lost now and then."""

    @property
    def rules(self) -> RoundRules:
        """The settings: every default."""
        nodes = NodeRange(self.min_nodes, self.num_nodes)
        return RoundRules.of(RunSettings(nodes, 1, _DEFAULTS, self.ft))

    @property
    def heartbeat(self) -> HeartbeatConfig:
        """The same of heartbeats."""
        r = _DEFAULTS.rendezvous
        return HeartbeatConfig.of(r.heartbeat_interval_s, r.heartbeat_timeout_s, self.num_nodes)


@dataclass
class Outcome(Tally):
    """The counts of one month, or of several."""

    rounds: int = 0
    terms: int = 0
    requeues: int = 0
    """Times that all nodes went back to the queue."""
    exclusions: int = 0
    endings: int = 0
    most_items: int = 0
    """The largest size of the state of a leader, in items."""
    trained_s: float = 0.0


class Owner(Enum):
    """Whose a host is."""

    FREE = "free"
    RUN = "the run's"
    OTHER = "another user's"


class Host:
    """A machine of the cluster."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner = Owner.FREE
        self.lent_until = 0.0
        self.is_defective = False
        self.excluded_since: float | None = None


class Node:
    """A task of the run, with the agent of its present attempt."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.task = f"7_{slot}"
        self.attempt = 0
        self.process = Process()
        self.process.alive = False
        self.host: Host | None = None
        self.agent: Agent | None = None
        self.is_connected = False
        self.place: tuple[int, int] | None = None
        """Index of the entry that placed it, and number of its replica."""
        self.waits_since: float | None = None
        self.starts_at: float | None = 0.0
        """When its task may start; None: it runs, or has ended."""
        self.num_requests = 0
        self.checkpoint_request: CheckpointRequest | None = None

    @property
    def lives(self) -> bool:
        """Whether its agent runs, and is not paused."""
        return self.process.alive and not self.process.paused


class MonthSimulator:
    """One run; its seed and its parameters determine it."""

    def __init__(
        self,
        seed: int,
        month: Month | None = None,
        leader_state: type[LeaderState] = LeaderState,
        whole_trace: bool = False,
    ) -> None:
        self.seed = seed
        self.scenario = month or Month()
        self.world = World(seed, whole_trace)
        self.slurm = Slurm(self.world, 0.5, reports_attempts=True)
        self.hosts = [
            Host(f"n{i}") for i in range(self.scenario.num_nodes + self.scenario.num_spare_hosts)
        ]
        self.nodes = [Node(slot) for slot in range(self.scenario.num_nodes)]
        self.entry: LogEntry | None = None
        self.leader: LeaderState | None = None
        self._leading: Node | None = None
        self._leader_state = leader_state
        self._rng: random.Random = self.world.rng
        self._is_electing = False
        self._hot_until = 0.0
        self._num_ticks = 0
        self._outage_until = 0.0
        self._unled_since: float | None = None
        """Since when the outage keeps the run without a leader."""
        self._full_until = 0.0
        self._no_round_since: float | None = 0.0
        self._possible_since: float | None = None
        self._step = 0
        self._num_checks = 0
        self._outcome = Outcome(schedules=1)

    # ---- the schedule -------------------------------------------------------------------

    def run(self) -> None:
        """Run the month.

        Raises:
            InvariantError: an invariant does not hold.
        """
        for node in self.nodes:
            self.slurm.set_state(node.task, "PENDING", 0)
        if self.scenario.is_full:
            self._keep_full()
        self._start_tasks()
        if not (self.scenario.kills or self.scenario.is_full):
            self._plan()
        self._check_regularly()
        self._checkpoint()
        end = self.scenario.days * DAY_S
        while self.world.now < end and not self._has_ended:
            self.world.run(min(end, self.world.now + 3600.0))
        if self.scenario.kills:
            self._require(self._has_ended, "a script that takes its node with it is tried for ever")
        if self._has_ended:
            self._check_end()

    @property
    def _has_ended(self) -> bool:
        return self.entry is not None and self.entry.ending is not None

    def outcome(self) -> Outcome:
        """Return the numbers of the month."""
        out = self._outcome
        out.virtual_s, out.events = self.world.now, self.world.num_events
        out.rounds = self.entry.round if self.entry else 0
        out.terms = self.entry.term if self.entry else 0
        out.endings = int(self._has_ended)
        return out

    # ---- faults -------------------------------------------------------------------------

    def _plan(self) -> None:
        """Draw the times of all faults."""
        kinds: tuple[tuple[float, Callable[[], None]], ...] = (
            (6.0, self._pause_one),
            (24.0, self._suspend_some),
            (12.0, self._take_file_system),
            (3.0, self._preempt_some),
            (16.0, self._kill_one),
            (60.0, self._fill_cluster),
        )
        hours = 24 * self.scenario.days
        for every, fault in kinds:
            for n in range(int(hours / every)):
                at = 3600.0 * every * (n + self._rng.random())
                self.world.after(at, None, fault)
        self.world.after(0.3 * self.scenario.days * DAY_S, None, self._break_host)

    def _living(self) -> list[Node]:
        return [node for node in self.nodes if node.lives]

    def _sample(self, most: int) -> list[Node]:
        here = self._living()
        return self._rng.sample(here, min(len(here), self._rng.randint(1, most)))

    def _count(self, kind: str, nodes: Sequence[Node] = ()) -> None:
        self._deliver_heartbeats()
        self._report_step()
        self._outcome.faults[kind] += 1
        self.world.log_event("fault", kind, [node.task for node in nodes])
        self._touch()

    def _pause_one(self) -> None:
        nodes = self._sample(1)
        self._count("pause", nodes)
        for node in nodes:
            self._freeze(node, self._rng.uniform(3.5, 15.0))

    def _suspend_some(self) -> None:
        nodes = self._sample(self._rng.choice((1, 4, len(self.nodes))))
        self._count("suspension", nodes)
        for_s = self._rng.uniform(600.0, 7200.0)
        for node in nodes:
            self.slurm.set_state(node.task, "SUSPENDED", node.attempt, node=_name(node))
            self._freeze(node, for_s)

    def _take_file_system(self) -> None:
        """Take the file system away; nodes that are preempted meanwhile cannot start."""
        nodes = self._sample(2)
        self._count("outage", nodes)
        self._outage_until = self.world.now + self._rng.uniform(300.0, 1500.0)
        for node in nodes:
            self._lose(node, "PENDING", held_s=120.0)
            self._start_tasks()

    def _preempt_some(self) -> None:
        nodes = self._sample(4)
        self._count("preemption", nodes)
        for node in nodes:
            self._send_to_leader(node, Leave("preempted"))
            until = self.world.now + self._rng.uniform(600.0, 4 * 3600.0)
            self._lend(node.host, max(until, self._full_until))
            self._lose(node, "PENDING", held_s=120.0)

    def _kill_one(self) -> None:
        nodes = self._sample(1)
        self._count("OOM", nodes)
        for node in nodes:
            self._lose(node, "OUT_OF_MEMORY")

    def _fill_cluster(self) -> None:
        """Let other users fill the cluster: they take some nodes, and all that become free."""
        nodes = self._sample(max(2, int(0.6 * len(self.nodes))))
        self._count("full cluster", nodes)
        until = self.world.now + self._rng.uniform(4 * 3600.0, 30 * 3600.0)
        self._full_until = max(self._full_until, until)
        for host in self.hosts:
            if host.owner is not Owner.RUN:
                self._lend(host, self._full_until)
        for node in nodes:
            self._lend(node.host, self._full_until)
            self._lose(node, "PENDING", held_s=120.0)

    def _keep_full(self) -> None:
        until = self.scenario.days * DAY_S - 3 * _FORMS_S
        for host in self.hosts[self.scenario.min_nodes - 2 :]:
            self._lend(host, until)
        at = 0.0
        while (at := at + self._rng.uniform(300.0, 3600.0)) < until:
            self.world.after(at, None, self._lose_leader)

    def _lose_leader(self) -> None:
        if (node := self._leading) is not None and node.lives:
            self._count("lost leader", [node])
            self._lose(node, "PENDING", held_s=120.0)

    def _break_host(self) -> None:
        """Make a host defective: each of its workers fails soon."""
        host = self._rng.choice(self.hosts)
        host.is_defective = True
        self._count("defective host")
        self.world.log_event("fault", "is defective", host.name)
        for node in self.nodes:
            if node.host is host and node.place is not None:
                self._fail_worker(node, node.place)

    # ---- hosts and tasks ----------------------------------------------------------------

    def _lend(self, host: Host | None, until: float) -> None:
        """Give a host to another user."""
        if host is not None:
            host.owner, host.lent_until = Owner.OTHER, until
            self.world.after(until - self.world.now, None, self._start_tasks)

    def _freeze(self, node: Node, for_s: float) -> None:
        node.process.paused = True
        if node.waits_since is not None:
            node.waits_since += for_s
        self.world.after(for_s, None, self._thaw, node, node.attempt)
        if node is self._leading:
            self.world.after(self.scenario.heartbeat.election_s, None, self._elect, node)

    def _thaw(self, node: Node, attempt: int) -> None:
        if node.attempt != attempt or not node.process.paused:
            return
        if node.process.alive:
            self.slurm.set_state(node.task, "RUNNING", node.attempt, node=_name(node))
        self._touch()
        node.process.resume(timers_last=True)

    def _lose(self, node: Node, state: str, *, held_s: float | None = None) -> None:
        """End the agent and its workers; Slurm reports this state, and may hold the task."""
        if not node.process.alive:
            return
        agent, was_connected, host = node.agent, node.is_connected, node.host
        node.process.alive = node.is_connected = False
        node.agent = node.host = node.place = node.waits_since = None
        if host is not None and host.owner is Owner.RUN:
            host.owner = Owner.FREE
            if self.world.now < self._full_until:
                self._lend(host, self._full_until)
        if held_s is None:
            self.slurm.set_state(node.task, state, node.attempt, node=host.name if host else "")
        else:
            self._enqueue(node, held_s)
        if node is self._leading:
            self.leader = None
            self.world.after(2.0, None, self._elect, node)
        elif was_connected and agent is not None:
            self._call_leader(0.05, lambda x, now: x.disconnected(agent, "connection closed", now))
        self._touch()

    def _enqueue(self, node: Node, delay_s: float) -> None:
        """Put the next attempt of a task into the queue, which may not start before a time."""
        node.attempt += 1
        node.starts_at = self.world.now + delay_s
        self.slurm.set_state(node.task, "PENDING", node.attempt, delay_s or None)
        self.world.after(delay_s + 0.5, None, self._start_tasks)

    def _start_tasks(self) -> None:
        """Start waiting tasks on free hosts, as Slurm does."""
        now = self.world.now
        earliest = self.slurm.postponed_until
        if now < earliest:
            self.world.after(earliest - now, None, self._start_tasks)
            return
        for host in self.hosts:
            if host.owner is Owner.OTHER and now >= host.lent_until:
                host.owner = Owner.FREE
        free = [
            h for h in self.hosts if h.owner is Owner.FREE and h.name not in self.slurm.excluded
        ]
        self._rng.shuffle(free)
        for node in self.nodes:
            if free and node.starts_at is not None and now >= node.starts_at:
                self._boot(node, free.pop())

    def _boot(self, node: Node, host: Host) -> None:
        node.starts_at, node.host, host.owner = None, host, Owner.RUN
        node.process = Process()
        node.agent = Agent(node.task, node.attempt, node.slot, host.name, 8)
        node.num_requests, node.checkpoint_request = 0, None
        self.slurm.set_state(node.task, "RUNNING", node.attempt, node=host.name)
        out_s = max(0.0, self._outage_until - self.world.now)
        takes_s = self._rng.uniform(5.0, 15.0)
        if out_s and self.leader is not None:
            self.world.after(takes_s, node.process, self._fail_start, node)
        else:  # without a leader nothing would start it again
            self.world.after(out_s + takes_s, node.process, self._join, node)

    def _fail_start(self, node: Node) -> None:
        """Fail before the agent joins: its files are not there."""
        self._lose(node, "FAILED")

    # ---- agents -------------------------------------------------------------------------

    def _join(self, node: Node) -> None:
        """Connect to the leader, and request a place."""
        if node.waits_since is None:
            node.place, node.waits_since = None, self.world.now
        if not self._connect(node):
            return
        node.num_requests += 1
        waited_s = self.world.now - node.waits_since
        self._send_to_leader(node, Join(node.num_requests, waited_s=waited_s))

    def _connect(self, node: Node) -> bool:
        if self.leader is None or not (self._leading and self._leading.lives):
            self.world.after(3.0, None, self._elect, self._leading)
            return False
        if not node.is_connected:
            node.is_connected, agent = True, node.agent
            assert agent is not None
            self._handle(self.leader.connected(agent, self.world.now))
        return True

    def _reconnect(self, node: Node) -> None:
        """Find the leader again: a replica continues, other workers are stopped before."""
        if node.is_connected:
            return
        if self.scenario.ft and node.place is not None:
            index, replica = node.place
            if self._connect(node):
                self._send_to_leader(node, Reattach(index, 1, replica))
        else:
            self._stop(node)

    def _stop(self, node: Node) -> None:
        node.place = None
        self.world.after(self._rng.uniform(1.0, 5.0), node.process, self._join, node)

    def _send_to_leader(self, node: Node, message: RunMessage) -> None:
        agent = node.agent
        if node.is_connected and agent is not None:
            self._call_leader(0.01, lambda x, now: x.received(agent, message, now))

    def _message(self, node: Node, message: RunMessage) -> None:
        """Handle a message of the leader."""
        match message:
            case Stop():
                self._stop(node)
            case Requeue(delay_s):
                self._lose(node, "PENDING", held_s=delay_s)
            case End():
                self._lose(node, "COMPLETED")
            case CheckpointRequested(request):
                node.checkpoint_request = request
                if request is not None and request.step is not None and not request.confirmed:
                    self._report(node, Vote(request.number, True, None, 0.0))

    def _report(self, node: Node, report: MemberReport) -> None:
        if node.place is not None:
            self._send_to_leader(node, replace(report, index=node.place[0]))

    def _placed(self, node: Node, index: int, replica: int) -> None:
        node.place, node.waits_since = (index, replica), None
        if node.host is not None and node.host.is_defective:
            self._fail_worker(node, node.place)

    def _fail_worker(self, node: Node, place: tuple[int, int]) -> None:
        def fail() -> None:
            if node.place == place and node.agent is not None:
                failure = Failure(
                    node.task, node.agent.host, 0, 0, self.world.now,
                    "CUDA error: uncorrectable ECC error encountered",
                )  # fmt: skip
                self._report(node, Failed([failure]))
                self._stop(node)

        self.world.after(self._rng.uniform(60.0, 600.0), node.process, fail)

    def _checkpoint(self) -> None:
        """Let all workers save every half hour, if a round has run for long enough."""
        self.world.after(1800.0, None, self._checkpoint)
        since = self._no_round_since
        if since is not None or self.scenario.kills or self.world.now < self._outage_until:
            return
        self._step += 1000
        for node in self._living():
            paused, request = 0, node.checkpoint_request
            if request is not None and request.confirmed and request.pause:
                paused = request.number if request.step is None and not request.released else 0
            self._report(node, CheckpointAnnounced(self._step, paused))
        self._touch()

    # ---- the leader ---------------------------------------------------------------------

    def _elect(self, former: Node | None) -> None:
        """Elect a leader in place of one that is dead, paused, or has stepped down."""
        here = self._living()
        if former is not self._leading or self._has_ended or not here:
            return
        if self.leader is not None and former is not None and former.lives:
            return
        if self.world.now < self._outage_until:
            self._unled_since = self._unled_since or self.world.now
            self.world.after(self._outage_until - self.world.now + 1.0, None, self._elect, former)
            return
        self._forgive_waits()
        node = self._rng.choice(here)
        agent = node.agent
        assert agent is not None
        index = 1 if self.entry is None else self.entry.index + 1
        endpoint = Endpoint("10.0.0.1", index, agent.task, agent.attempt)
        is_alive = former is not None and former.process.alive
        self.entry = claim(index, self.entry, endpoint, self.world.now, possibly_alive=is_alive)
        self._leading = node
        args = (self.entry, self.scenario.rules, self.scenario.heartbeat, self.world.now, self._rng)
        self.leader = self._leader_state(*args)
        self.world.log_event(node.task, "leads", self.entry.term)
        if not self.scenario.ft and self._no_round_since is None:
            self._no_round_since = self.world.now
        for other in self.nodes:
            other.is_connected = False
            if other.process.alive and other.agent is not None and other.waits_since is None:
                if other.place is None:
                    continue  # it starts, or stops its workers
                delay_s = self._rng.uniform(0.1, 1.0)
                self.world.after(delay_s, other.process, self._reconnect, other)
            elif other.process.alive and other.waits_since is not None:
                self.world.after(self._rng.uniform(0.1, 1.0), other.process, self._join, other)
        self._handle(self.leader.start_leading())
        self._touch()

    def _forgive_waits(self) -> None:
        """The waits of agents do not contain the time in which no file and no leader answers."""
        since, self._unled_since = self._unled_since, None
        for node in self.nodes:
            if since is not None and node.waits_since is not None:
                node.waits_since += self.world.now - max(since, node.waits_since)

    def _touch(self) -> None:
        """Let the leader tick every half second for a while, since something happens."""
        self._hot_until = self.world.now + 20.0
        self._num_ticks += 1
        pause_s = self.scenario.heartbeat.heartbeat_interval_s
        self.world.after(pause_s, None, self._tick, self._num_ticks)

    def _tick(self, number: int) -> None:
        if number != self._num_ticks:
            return
        leader, node, now = self.leader, self._leading, self.world.now
        pause_s = self.scenario.heartbeat.heartbeat_interval_s
        if leader is not None and node is not None and node.lives:
            self._deliver_heartbeats()
            leader._tracker._ticked = now - pause_s
            self._handle(leader.tick(now))
            is_quiet = leader.run.phase is RoundPhase.RUNNING and not leader.run.participants.joined
            if now > self._hot_until:
                pause_s = 60.0 if is_quiet else 5.0
        elif now > self._hot_until:
            pause_s = 60.0
        self.world.after(pause_s, None, self._tick, number)

    def _deliver_heartbeats(self) -> None:
        """Deliver the heartbeats since the last tick, without their messages."""
        if self.leader is not None:
            known = self.leader._tracker.last_heartbeat
            here = (n.agent for n in self.nodes if n.is_connected and n.lives and n.agent in known)
            known.update((agent, self.world.now) for agent in here if agent is not None)

    def _report_step(self) -> None:
        """Report a step of the first member that trains, unless the script never makes one."""
        node = next((n for n in self.nodes if n.lives and n.is_connected and n.place), None)
        if node is not None and not self.scenario.kills and self._no_round_since is None:
            self._step += 1
            self._send_to_leader(node, Heartbeat({"step": self._step}))

    def _call_leader(
        self, delay_s: float, event: Callable[[LeaderState, float], list[Effect]]
    ) -> None:
        leader, node = self.leader, self._leading

        def handle() -> None:
            if leader is not None and self.leader is leader:
                self._handle(event(leader, self.world.now))

        self.world.after(delay_s, node.process if node else None, handle)

    def _handle(self, effects: Iterable[Effect]) -> None:
        """Carry out effects of the leader."""
        for effect in effects:
            match effect:
                case Send(agents, message):
                    self._send(agents, message)
                case RenewLease():
                    if self.world.now >= self._outage_until and self.leader is not None:
                        self.leader.renewed()
                case Append(entry):
                    self._append(entry)
                case Note():
                    self._record_note(effect)
                case _:
                    self._handle_rarely(effect)

    def _handle_rarely(self, effect: Effect) -> None:
        match effect:
            case Announce():
                self._announce(effect)
            case Disconnect(agent):
                for node in self.nodes:
                    if node.agent == agent and agent is not None:
                        node.is_connected = False
                        self.world.after(1.0, node.process, self._reconnect, node)
            case QueryTasks():
                process = self._leading.process if self._leading else Process()
                self.slurm.query_tasks(process, partial(self._slurm_answered, self.leader))
            case Exclude(hosts, _, until):
                self.slurm.excluded.update(dict.fromkeys(hosts, until))
            case Postpone(delay_s):
                self.slurm.postponed_until = self.world.now + delay_s
            case ClearHolds(tasks):
                for node in self.nodes:
                    if node.task in tasks:
                        self._restart(node)
            case StepDown():
                self.leader = None
                for node in self.nodes:
                    node.is_connected = False
                self.world.after(1.0, None, self._elect, self._leading)
            case PublishResult(entry):
                self.entry = entry

    def _restart(self, node: Node) -> None:
        if node.process.alive:
            return
        if node.starts_at is None:
            self._enqueue(node, 2.0)
        else:
            node.starts_at = min(node.starts_at, self.world.now + 2.0)
            self.world.after(2.5, None, self._start_tasks)

    def _slurm_answered(
        self, asked: LeaderState | None, states: dict[str, TaskState] | None
    ) -> None:
        if asked is not None and asked is self.leader:
            self._handle(asked.slurm_answered(states, self.world.now))

    def _send(self, agents: Iterable[Agent] | None, message: RunMessage) -> None:
        if isinstance(message, (Heartbeat, Waiting)):
            return
        wanted = None if agents is None else set(agents)
        for node in self.nodes:
            if node.is_connected and (wanted is None or node.agent in wanted):
                delay_s = self._rng.uniform(0.01, 0.1)
                self.world.after(delay_s, node.process, self._message, node, message)
        if not isinstance(message, CheckpointRequested):
            self._touch()

    def _append(self, entry: LogEntry) -> None:
        leader = self.leader
        delay_s = max(0.05, self._outage_until - self.world.now)

        def append() -> None:
            if leader is None or self.leader is not leader:
                return
            self.entry = entry
            if entry.ending is not None:
                self.world.log_event("run", "ends", entry.ending)
            if not self.scenario.ft and leader.run.phase is not RoundPhase.RUNNING:
                self._no_round_since = self._no_round_since or self.world.now
            self._handle(leader.appended())

        self.world.after(delay_s, self._leading.process if self._leading else None, append)

    def _announce(self, announce: Announce) -> None:
        entry = announce.entry
        self._no_round_since = None
        by_agent = {node.agent: node for node in self.nodes if node.agent is not None}
        for agent, place in places(announce):
            if (node := by_agent.get(agent)) is not None:
                args = (node, entry.index, place.replica)
                self.world.after(0.05, node.process, self._placed, *args)
        if self.scenario.kills:
            self.world.after(60.0, None, self._kill_member, entry.members)

    def _kill_member(self, members: Sequence[Agent]) -> None:
        here = [node for node in self.nodes if node.lives and node.agent in members]
        if here and self.entry is not None and self.entry.members == tuple(members):
            node = self._rng.choice(here)
            self._count("OOM", [node])
            self._lose(node, "OUT_OF_MEMORY")

    def _record_note(self, note: Note) -> None:
        kind = note.kind
        if kind != "joined":
            short = {k: v for k, v in note.fields.items() if isinstance(v, str | int | float)}
            self.world.log_event("leader", kind, short)
        if kind == "round_stopped" and not self.scenario.ft:
            self._no_round_since = self.world.now
        self._outcome.exclusions += kind == "excluded"
        self._outcome.requeues += kind == "nodes_requeued" and len(self._living()) > 0

    # ---- invariants ---------------------------------------------------------------------

    def _require(self, holds: bool, what: str, *facts: object) -> None:
        self._outcome.checks += 1
        if not holds:
            day = self.world.now / DAY_S
            raise InvariantError(f"day {day:.1f}: {what}: {', '.join(map(str, facts))}")

    def _check_regularly(self) -> None:
        if self._has_ended:
            return
        if self.leader is not None and self._leading and self._leading.lives:
            self.slurm.end_exclusions()
        self.world.after(_CHECK_EVERY_S, None, self._check_regularly)
        self._start_tasks()
        self._report_step()
        if self.scenario.ft:
            run = self.leader.run if self.leader is not None else None
            trains = run is not None and run.phase is RoundPhase.RUNNING and not run.short_since
            self._no_round_since = None if trains else self._no_round_since or self.world.now
        if self._no_round_since is None:
            self._outcome.trained_s += _CHECK_EVERY_S
        self._check_exclusions()
        self._check_waits()
        self._check_progress()
        self._num_checks += 1
        if self._num_checks % _SIZES_EVERY == 0:
            self._check_sizes()

    def _check_sizes(self) -> None:
        if self.leader is None or self.entry is None:
            return
        num = count_items(self.leader)
        self._outcome.most_items = max(self._outcome.most_items, num)
        bound = _NUM_ITEMS * (len(self.nodes) + 10)
        self._require(num <= bound, "the leader's state grows", num)
        size = len(self.entry.encode_signed(b"secret"))
        self._require(size <= _NUM_BYTES * (len(self.nodes) + 5), "an entry grows", size)

    def _check_exclusions(self) -> None:
        excluded = set(self.slurm.excluded)
        if self.leader is not None:
            excluded |= set(self.leader.run.policy.excluded)
        for host in self.hosts:
            if host.name not in excluded:
                host.excluded_since = None
            elif host.excluded_since is None:
                host.excluded_since = self.world.now
        long = [
            h.name
            for h in self.hosts
            if not h.is_defective and self.world.now - (h.excluded_since or math.inf) > _EXCLUDED_S
        ]
        self._require(not long, "sound hosts are excluded for more than an hour", long)

    def _check_waits(self) -> None:
        limit_s = _DEFAULTS.rendezvous.join_timeout_s
        for node in self.nodes:
            if node.lives and node.waits_since is not None:
                waited_s = (self._unled_since or self.world.now) - node.waits_since
                self._require(waited_s <= limit_s, "an agent gives up", node.task, waited_s)

    def _check_progress(self) -> None:
        usable = sum(host.owner is not Owner.OTHER for host in self.hosts)
        usable -= sum(node.process.alive and node.process.paused for node in self.nodes)
        is_possible = usable - 1 >= self.scenario.min_nodes
        if not is_possible or self._no_round_since is None or self.world.now < self._outage_until:
            self._possible_since = None
        elif self._possible_since is None:
            self._possible_since = self.world.now
        since = self._possible_since
        held_up = since is not None and self.world.now - since > _FORMS_S
        states = [node.task for node in self.nodes if node.lives]
        self._require(not held_up, "no round runs, and min nodes could", usable, len(states))

    def _check_end(self) -> None:
        assert self.entry is not None and self.entry.ending is not None
        failure = self.entry.ending.failure
        text = "" if failure is None else failure.summary()
        if self.scenario.kills:
            self._require("OUT_OF_MEMORY" in text, "the end does not name its reason", text)
            return
        defective = failure is not None and any(
            host.is_defective and host.name == failure.host for host in self.hosts
        )
        is_true = defective and "uncorrectable ECC" in text  # it was needed for min nodes
        self._require(is_true, "the run ends, and its script is sound", text)


def _name(node: Node) -> str:
    return "" if node.host is None else node.host.name


def count_items(value: object, seen: set[int] | None = None) -> int:
    """Return how many items the containers hold that are reachable from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, str | bytes | int | float | type | random.Random):
        return 0
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
        return len(value) + sum(count_items(item, seen) for item in inner)
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) + sum(count_items(item, seen) for item in value)
    if isinstance(value, Agent | Enum) or callable(value):
        return 0
    if is_dataclass(value):
        return sum(count_items(getattr(value, f.name, None), seen) for f in fields(value))
    parts = getattr(value, "__dict__", {})
    return sum(count_items(part, seen) for part in parts.values())


# ---- Planted bugs: what each default did when nothing ran for long


def _with_policy(policy: type[FailurePolicy]) -> type[LeaderState]:
    """Return a leader that blames hosts so."""

    class Leader(LeaderState):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.run.policy = policy.resume(self.at, self.run.rules)

    return Leader


class _NeverForgives(FailurePolicy):
    """A silence is a strike even if the agent comes back; no strike fades, no exclusion ends."""

    def advance(self, now: float) -> None:
        self.now = now

    def _exclude(self, *args: Any) -> list[Effect]:
        note, exclude = super()._exclude(*args)
        assert isinstance(exclude, Exclude)
        self.exclusions[exclude.hosts[0]] = math.inf
        return [note, replace(exclude, until=math.inf)]

    def judge(self, number: int, hosts: Collection[str]) -> tuple[list[Effect], RunEnding | None]:
        silent = dict.fromkeys(self._silent, (1, "fell silent"))
        effects, ending = super().judge(number, hosts)
        return [*effects, *self._strike(silent, hosts)], ending


class _LossesAreFree(FailurePolicy):
    """A round that a lost node broke costs nothing, however often."""

    def judge_loss(self, *args: Any) -> tuple[list[Effect], RunEnding | None]:
        return [], None


class _GrowingWait(RequeueBackoff):
    """Each requeue of all nodes lets the next wait be longer, without a limit."""

    def __post_init__(self) -> None:
        self._wait_factor = self.rng.uniform(1.0, 2.0 + self.times_requeued)

    def is_over(self, waited_s: float, *, longest: bool = False) -> bool:
        return super().is_over(waited_s)


class _WaitsLonger(LeaderState):
    """A leader with such waits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        parts = (f.name for f in fields(RequeueBackoff) if f.init)
        self.run.backoff = _GrowingWait(**{n: getattr(self.run.backoff, n) for n in parts})


class _CountsFromZero(LeaderState):
    """A wait begins with the leader."""

    def received(self, agent: Agent, message: RunMessage, now: float) -> list[Effect]:
        if isinstance(message, Join):
            message = replace(message, waited_s=0.0)
        return super().received(agent, message, now)


SMALL = Month(days=6.0, num_nodes=16, min_nodes=12, num_spare_hosts=2)
"""A few days of a few nodes."""
KILLING = Month(days=0.25, num_nodes=8, min_nodes=4, num_spare_hosts=2, kills=True)
"""A script whose nodes run out of memory."""
FULL = Month(days=2.0, num_nodes=8, min_nodes=6, num_spare_hosts=1, is_full=True)
"""A cluster that is full for more than a day."""

MUTANTS: Mapping[str, tuple[Month, type[LeaderState], str]] = {
    "never forgives": (SMALL, _with_policy(_NeverForgives), "sound hosts are excluded|no round"),
    "losses are free": (KILLING, _with_policy(_LossesAreFree), "is tried for ever"),
    "waits grow": (FULL, _WaitsLonger, "an agent gives up"),
    "waits begin with the leader": (FULL, _CountsFromZero, "an agent gives up"),
}
"""Name -> a run, a leader with the bug, and a pattern for the message of the simulator."""

"""Nodes, agents and leaders in virtual time, around the real protocol.

A node runs the attempts of its task. An agent is the adapter around a `FollowerState`; a leader is
the adapter around a `Term` and its `LeaderState`. Messages between a worker and the leader pass
through the product's own `hpc_elastic.agent.worker_channel`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from hpc_elastic.agent.worker_channel import Rule, WorkerChannel, can_save_at
from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    Claim,
    ClearHolds,
    Connect,
    Deliver,
    Disconnect,
    Effect,
    Exclude,
    Lead,
    Note,
    Postpone,
    ProbePeers,
    PublishResult,
    QuerySlurm,
    QueryTasks,
    ReadLog,
    Readmit,
    RemoveEntries,
    RemoveNotice,
    RenewLease,
    Send,
    SendToLeader,
    Show,
    places,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, Failure, LogEntry, LogSteps, claim
from hpc_elastic.rendezvous.messages import (
    CheckpointRequested,
    Departed,
    End,
    Failed,
    Finished,
    Heartbeat,
    Leave,
    MemberReport,
    NoticeRequest,
    PreemptionNotice,
    Probe,
    Probed,
    RankState,
    Requeue,
    RoundInfo,
    RunMessage,
    Stacks,
    StacksRequest,
    Stall,
    Stop,
    Waiting,
)
from hpc_elastic.rendezvous.reachability import PROBE_S
from hpc_elastic.rendezvous.round_state import units_of
from hpc_elastic.rendezvous.session import Session, SessionState
from hpc_elastic.rendezvous.term import Term, TermFolder
from hpc_elastic.run.events import LossReason
from hpc_elastic.slurm.exit_action import Reason
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.worker.shared_page import CheckpointRequest, SharedPage, WorkerStatus
from simulation.invariants import Monitor
from simulation.scenario import CONNECT_TIMEOUT_S, LONGEST_AWAY_S, SLOWEST_FILES_S, Scenario, draw
from simulation.storage import (
    LeadersFiles,
    Mount,
    NodeFiles,
    NodeRegister,
    Register,
    SharedFiles,
    SharedMonitor,
    Storage,
)
from simulation.workload import Rank, Work
from simulation.world import CLIENT, SERVER, Connection, Host, Network, Process, Slurm, World


@dataclass(frozen=True)
class Components:
    """The classes and rules of the protocol, which a test replaces to plant a bug."""

    draw: Callable[[random.Random], Scenario] = draw
    leader_state: type[LeaderState] = LeaderState
    following: Callable[[Agent, HeartbeatConfig, float], FollowerState] = FollowerState
    can_save_at: Rule = can_save_at
    """How an agent votes on a checkpoint request."""
    places: Callable[[Announce], Iterator[tuple[Agent, RoundInfo]]] = places
    term: type[Term] = Term
    folder: type[TermFolder] = TermFolder
    entries: Callable[[NodeRegister], LogSteps] = LogSteps
    """How a node finds and creates entries."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    has_succeeded: Callable[[int, WorkerStatus], bool] = lambda _, worker: worker.returned
    """Whether a worker with an exit code and a last status has succeeded."""
    exclusive_create: bool = True
    """Whether an entry that exists cannot be created again."""


SOUND = Components()
"""The product."""


class Env:
    """The objects that all nodes of one schedule share.

    Args:
        seed: The seed of the schedule.
        world: Clock and random generator.
        scenario: The schedule's parameters.
        components: The classes under test.
        monitor: Checks the invariants.
        agent_type: Class of the agents.
        alone: The workers of each unit of nodes are a group of their own.
    """

    def __init__(
        self,
        seed: int,
        world: World,
        scenario: Scenario,
        components: Components,
        monitor: Monitor,
        *,
        agent_type: type[AgentProcess],
        alone: bool,
    ) -> None:
        self.world = world
        self.scenario = scenario
        self.components = components
        self.monitor = monitor
        self.agent_type = agent_type
        self.network = Network(world, scenario.longest_delay_s)
        self.storage = Storage(world, random.Random(f"storage {seed}"), SLOWEST_FILES_S)
        self.register = Register(
            self.storage, monitor, components.entries, components.exclusive_create
        )
        shared_monitor = SharedMonitor(monitor.check, self.is_named_alive)
        self.shared = SharedFiles(self.storage, shared_monitor, components.fenced_files)
        self.slurm = Slurm(world, scenario.longest_answer_s, scenario.reports_attempts)
        self.severing = random.Random(f"severing {seed}")
        self.failing = random.Random(f"failing {seed}")
        self.stalling = random.Random(f"stalling {seed}")
        self.num_kept = self.stalling.choice((0, 0, 1, 2, LeaderState.num_kept))
        """Old entries that leaders keep: fewer than are made while a process is stalled."""
        self.slurm.down += scenario.is_slurm_silent
        self.nodes = [Node(self, slot) for slot in range(scenario.num_nodes)]
        self.works: dict[int, Work] = {}
        """Index of a round's entry -> its workers; empty if the nodes are replicas."""
        self._replicas: dict[tuple[int, Agent], Work] = {}
        """Index of a round's entry and first agent of a replica -> its workers."""
        self._alone = alone
        self.num_ports = 0
        """Number of ports that leaders have used; each has a new one."""

    def work_of(self, entry: LogEntry, member: Agent) -> Work:
        """Return the workers of a member's round."""
        args = (self.world, self.network, self.scenario.training, self.monitor)
        if self._alone:
            unit = unit_with(member, entry.members, self.scenario.rules.unit_nodes)
            if (entry.index, unit[0]) not in self._replicas:
                work = Work(replace(entry, members=unit), *args)
                self._replicas[entry.index, unit[0]] = work
            return self._replicas[entry.index, unit[0]]
        if entry.index not in self.works:
            self.works[entry.index] = Work(entry, *args)
        return self.works[entry.index]

    def is_named_alive(self, name: str, since: float = math.inf) -> bool:
        """Return whether a notice names a live node that a leader can reach.

        Attempts that started after ``since`` are ignored: the notice concerns an earlier one.
        """
        return any(
            name in (n.task, n.hostname, "all")
            and n.lives
            and n.slot != self.network.isolated
            and n.started_at <= since
            for n in self.nodes
        )


def unit_with(member: Agent, members: tuple[Agent, ...], size: int) -> tuple[Agent, ...]:
    """Return the unit of a member of a round."""
    return next(unit for unit in units_of(members, size) if member in unit)


_LATE_DETECTION_S = 12.0
"""Slurm reports the task of a dead node as RUNNING for this long at most."""
_RESERVE_S = 0.2
"""An agent leaves this long before the end of its grace, whatever its round does."""
_HOLD_S = 120.0
"""Slurm reports that a requeued task that it holds starts in this time."""


class Node(Host):
    """One task of the array, and its node."""

    def __init__(self, env: Env, slot: int) -> None:
        rng = env.world.rng
        super().__init__(slot)
        self.task = f"7_{slot}"
        self.attempt = -1
        self.started_at = 0.0
        self.nproc = rng.choice((1, 1, 2))
        storage, stale_s = env.storage, env.scenario.stale_s
        life_s = 0.0 if stale_s else env.scenario.attributes_s * storage.rng.random()
        by_time = env.scenario.detects_by_time and not stale_s
        self.mount = Mount(storage, slot, life_s=life_s, stale_s=stale_s, by_time=by_time)
        self.register = NodeRegister(env.register, self.mount)
        self.ended = False
        """Whether the task has failed or ended for good."""
        self.makes_no_store = 0
        """Number of present faults that make its leader fail when a round needs a store."""
        self.agent: AgentProcess | None = None
        self.hostname = f"node{slot}"
        """Host that Slurm chose for the task."""
        self._boots = 0
        self._held = False
        """Whether Slurm holds its task after a requeue."""
        self._env = env
        self._offset = rng.uniform(0.0, 1e6)
        self._rate = rng.uniform(0.99, 1.01)

    def clock(self) -> float:
        """Return the node's monotonic time."""
        return self._offset + self._rate * self._env.world.now

    def listener(self, port: int) -> Leader | None:
        """Return the leader that listens on a port."""
        leaders = self.agent.leaders if self.agent is not None else []
        return next((x for x in leaders if x.is_open and x.endpoint.port == port), None)

    @property
    def lives(self) -> bool:
        """Whether an agent runs on it."""
        return self.agent is not None and not self.agent.over

    def boot(self) -> None:
        """Slurm starts the task."""
        self._boot(self._boots)

    def _boot(self, number: int) -> None:
        if number != self._boots:
            return  # another boot came first
        world, slurm = self._env.world, self._env.slurm
        wait = slurm.postponed_until - world.now
        if wait > 0:
            world.after(wait, None, self._boot, number)
            return
        self._env.monitor.nodes_changed()
        self._boots += 1
        self._held = False
        self.attempt += 1
        if self.hostname in slurm.excluded:
            self.hostname = f"node{self.slot}-{self.attempt}"
        self.up = True
        self._env.network.came_back(self)
        self._env.slurm.set_state(self.task, "RUNNING", self.attempt)
        world.after(0.1 + world.rng.random(), None, self._start)

    def _start(self) -> None:
        self._env.world.log_event(self.task, "starts", self.attempt)
        self.started_at = self._env.world.now
        self.agent = self._env.agent_type(self._env, self)
        self.agent.start()

    def crash(self, is_requeued: bool) -> None:
        """Kill the agent's process: its task fails, or is requeued."""
        if self.agent is not None:
            self._env.world.log_event(self.task, "process crashes")
            self._end_process(silently=False)
            self._requeue(LONGEST_AWAY_S * self._env.world.rng.random() if is_requeued else None)

    def vanish(self, is_requeued: bool) -> None:
        """Kill the node; Slurm detects that late."""
        if self.agent is None:
            return
        self._env.world.log_event(self.task, "node dies")
        self._end_process(silently=True)
        self.mount.drop_caches()
        self.up = False
        late = _LATE_DETECTION_S * self._env.world.rng.random()
        away_s = 2.0 if is_requeued else None
        held = is_requeued and self._env.world.rng.random() < 0.5
        self._env.world.after(late, None, partial(self._requeue, away_s, held=held))

    def preempt(self) -> None:
        """Preempt the node without grace: its agent can only announce that it leaves."""
        if self.agent is not None and not self.agent.process.paused:
            self._env.world.log_event(self.task, "is preempted")
            self.agent.over = True
            self.agent.announce_leave("preempted")
            self.task_left(2.0)

    def notice(self, grace_s: float) -> None:
        """Announce the preemption of the node after this grace."""
        agent, world = self.agent, self._env.world
        if agent is None or agent.over or agent.process.paused:
            return
        world.log_event(self.task, "is noticed", grace_s)
        self._env.monitor.nodes_changed()
        agent.notice(grace_s)
        in_time = max(0.0, grace_s - _RESERVE_S)
        world.after(in_time, agent.process, self._leave_before_kill, agent, grace_s)
        world.after(grace_s, None, self._kill_agent, agent)

    def _leave_before_kill(self, agent: AgentProcess, grace_s: float) -> None:
        if not agent.over:
            self._env.monitor.leaves_too_late(agent.me, grace_s)
        agent.leave_now()

    def _kill_agent(self, agent: AgentProcess) -> None:
        """Kill an agent that still runs after its grace; Slurm requeues the task."""
        if self.agent is agent:
            self._env.world.log_event(self.task, "is killed")
            self._end_process(silently=False)
            self._requeue(self.draw_requeue_time(), held=self._env.world.rng.random() < 0.5)

    def draw_requeue_time(self) -> float:
        """Draw the seconds that the task spends in the queue if it leaves."""
        rng = self._env.world.rng
        is_long = self._env.scenario.is_quiet and rng.random() < 0.5
        return LONGEST_AWAY_S if is_long else 0.5 + 2.0 * rng.random()

    def clear_hold(self) -> None:
        """A leader lets the task start although Slurm holds it."""
        if self._held:
            self._held = False
            self._boots += 1
            self._env.world.after(2.0, None, self._boot, self._boots)

    def task_left(self, away_s: float | None) -> None:
        """The agent has exited by itself, for good (None) or for a while."""
        self._end_process(silently=False)
        self._requeue(away_s)

    def _end_process(self, silently: bool) -> None:
        assert self.agent is not None
        self.agent.end_process(silently)
        self.agent = None

    def _requeue(self, away_s: float | None, *, held: bool = False) -> None:
        """Requeue the task for this time, or let it fail if ``away_s`` is None."""
        slurm, world = self._env.slurm, self._env.world
        if away_s is None:
            self.ended = True
            slurm.set_state(self.task, "FAILED", self.attempt)
            return
        slurm.set_state(self.task, "COMPLETING", self.attempt)
        departs_in_s = world.rng.random()
        if held:
            away_s = LONGEST_AWAY_S

        def enter_queue() -> None:
            self._held = held
            slurm.set_state(self.task, "PENDING", self.attempt + 1, _HOLD_S if held else None)

        world.after(departs_in_s, None, enter_queue)
        world.after(departs_in_s + 0.5 + away_s, None, self._boot, self._boots)


# ---- The agent's adapter: a `FollowerState` and its node's workers


_TICK_S = 0.25
"""Period of an agent without a leader."""
_LINGER_S = 1.0
"""Time for which a leader's process stays after the end, to send its last messages."""
_PAGE_POLL_S = 0.1
_SIGTERM_HANDLER_S = 0.02


class AgentProcess:
    """One attempt of one task."""

    def __init__(self, env: Env, host: Node) -> None:
        self.env = env
        self.host = host
        self.process = Process()
        self.me = Agent(host.task, host.attempt, host.slot, host.hostname, host.nproc)
        self.over = False
        """Whether it leaves the run, or the run has ended."""
        self.work: Work | None = None
        self.rank: Rank | None = None
        """Its worker, once that has started."""
        self.leaders: list[Leader] = []
        self._session = SessionState()
        self._channel: WorkerChannel | None = None
        self._is_poll_scheduled = False
        self.busy_until = 0.0
        """Its main thread polls no page before this time."""
        self._stopping = False
        self._has_failed = False
        self._is_noticed = False
        self._connection: Connection | None = None
        self._attempt: Attempt | None = None
        self._dead_tasks: set[str] = set()
        """Tasks that do not run according to Slurm."""
        self._following = env.components.following(self.me, env.scenario.heartbeat, host.clock())
        self._following.probe_ports = [(str(host.slot), 1)]

    def start(self) -> None:
        """Request a place in the next round."""
        self._do(self._following.join())
        self._tick()

    def end_process(self, silently: bool = False) -> None:
        """End the process, or (``silently``) its whole node."""
        self.process.alive = False
        if self.work is not None:
            self.work.leave(self, secondary_failures=not silently)
            self.env.monitor.stopped(self.me)
            self.work = self.rank = None
        rng = self.env.world.rng
        lossy = self.env.scenario.loses_at_reset and not self.over
        self.env.network.crashed(self.process, silently, lambda: lossy and rng.random() < 0.5)

    def announce_leave(self, why: str) -> None:
        """Announce to the leader that this node leaves."""
        self._send_to_leader(Leave(why))

    # ---- notice -------------------------------------------------------------------------

    def notice(self, left_s: float) -> None:
        """Handle a notice that the node is preempted in ``left_s`` seconds."""
        if self.over:
            return
        self._is_noticed = True
        now = self.host.clock()
        self._do(self._following.add_notice(PreemptionNotice(Reason.SIGNAL, now + left_s), now))
        self._obey_notice()

    def _obey_notice(self) -> None:
        """Leave at once if the worker has made no step, and so loses none."""
        if self.rank is None or (self.work is not None and self.rank.at == self.work.start):
            self.leave_now()
        elif self.env.scenario.exits_at_sigterm:
            self.env.world.after(_SIGTERM_HANDLER_S, self.process, self.ended, self.work, 0)

    def leave_now(self) -> None:
        """Leave without a checkpoint, because the time is over."""
        if not self.over:
            self._do(self._following.leave_now())

    def _tick(self) -> None:
        if not self.over:
            self._do(self._following.tick(self.host.clock()))
            beat_s = self._following.heartbeat.heartbeat_interval_s
            pause = _TICK_S if self._connection is None else beat_s
            self.env.world.after(pause, self.process, self._tick)

    # ---- the connection -----------------------------------------------------------------

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of the leader, or a late one of a former leader."""
        if isinstance(message, Attempt):  # the leader's greeting
            if not message.is_over:
                message.is_over = True
                self._attempt, self._connection = None, connection
                connection.send(CLIENT, self.me)
                self._do(self._following.connected(self.host.clock()))
        elif connection is self._connection:
            if isinstance(message, NoticeRequest):
                names = (self.me.task, self.me.host, "all")
                self.env.shared.monitor.notice_received(names, self.env.world.now)
            self._do(self._following.received(message, self.host.clock()))

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self._connection:
            self._connection = None
            self._do(self._following.disconnected("connection reset", self.host.clock()))

    def not_connected(self, attempt: Attempt, why: str, refused: bool) -> None:
        """An attempt to connect has failed."""
        attempt.abandon()
        self._attempt = None
        self._do(self._following.not_connected(why, self.host.clock(), refused=refused))

    def _connect(self, entry: LogEntry) -> None:
        self._attempt = attempt = Attempt(self, entry.leader)
        world = self.env.world
        world.after(self.env.network.delay(), None, attempt.reach)
        world.after(CONNECT_TIMEOUT_S, self.process, attempt.fail, "timed out", False)

    def _send_to_leader(self, message: RunMessage) -> None:
        if self._connection is None:
            return
        if isinstance(message, Heartbeat):
            total, rank = self.env.scenario.training.total_steps, self.rank
            message = Heartbeat({"step": rank.at, "total": total} if rank is not None else {})
        self._connection.send(CLIENT, message)

    # ---- effects ------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is SendToLeader:
                self._send_to_leader(effect.message)
            else:
                self._do_rarely(effect)

    def _do_rarely(self, effect: Effect) -> None:
        env = self.env
        match effect:
            case Deliver(message):
                self._handle_message(message)
            case ReadLog():
                register = self.host.register
                register.last_with_lease(self.process, self._log_read, self._log_unreadable)
            case Connect(entry):
                self._connect(entry)
            case Disconnect():
                if self._attempt is not None:
                    self._attempt.abandon()
                if self._connection is not None:
                    self._connection.close(CLIENT)
                self._attempt = self._connection = None
            case ProbePeers(probe):
                self._probe(probe)
            case QuerySlurm(task):
                env.slurm.query_task(self.process, task, partial(self._slurm_answered, task))
            case Claim():
                self._claim(effect)
            case PublishResult(entry):
                env.monitor.published(entry)
            case Lead(entry):
                env.world.log_event(self.host.task, "leads", entry)
                self.leaders[-1].lead(entry)

    def _probe(self, query: Probe) -> None:
        """Probe other agents; one that is reached later than at once takes the whole time."""
        world, connection = self.env.world, self._connection

        def out_of_reach(tasks: Sequence[str]) -> list[str]:
            nodes = {node.task: node for node in self.env.nodes}
            return [task for task in tasks if not self._reaches(nodes[task])]

        def send(failed: list[str]) -> None:
            if self._connection is connection:
                self._send_to_leader(Probed(query.number, failed))

        if failed := out_of_reach(list(query.peers)):
            world.after(PROBE_S, self.process, lambda: send(out_of_reach(failed)))
        else:
            world.after(self.env.network.delay(), self.process, send, [])

    def _reaches(self, node: Node) -> bool:
        network, agent = self.env.network, node.agent
        if network.is_cut(self.host, node) or (self.host.slot, node.slot) in network.severed:
            return False
        return node.up and agent is not None and not agent.process.paused

    def _log_read(self, number: int, entry: LogEntry | None, lease: int | None) -> None:
        self._do(self._following.log_read(number, entry, lease, self.host.clock()))

    def _log_unreadable(self, why: Exception) -> None:
        self._do(self._following.log_unreadable(str(why), self.host.clock()))

    def _slurm_answered(self, task: str, runs: bool | None) -> None:
        if runs is False:
            self._dead_tasks.add(task)
        self._do(self._following.slurm_answered(task, runs, self.host.clock()))

    def _claim(self, wanted: Claim) -> None:
        before = wanted.before
        if (
            before is not None
            and before.index == wanted.number - 1
            and not before.is_vacant
            and wanted.possibly_alive
            and before.leader.task not in self._dead_tasks
        ):  # only the lease suggests that the leader is dead
            self.host.register.check_claim(before, self.env.scenario.heartbeat)
        self.env.num_ports += 1
        endpoint = Endpoint(
            str(self.host.slot), self.env.num_ports, self.host.task, self.host.attempt
        )
        self.leaders.append(Leader(self, endpoint))
        now, possibly_alive = self.env.world.now, wanted.possibly_alive
        entry = claim(wanted.number, before, endpoint, now, possibly_alive=possibly_alive)
        self.env.world.log_event(self.host.task, "claims", entry)
        self._put(entry)

    def _put(self, entry: LogEntry) -> None:
        self.host.register.create(self.process, entry, partial(self._claimed, entry))

    def _claimed(self, entry: LogEntry, done: bool | None) -> None:
        if done is None and self.env.world.rng.random() < 0.5:
            self._put(entry)
            return
        leader = self.leaders[-1]
        self._do(self._following.claimed(entry if done else None, self.host.clock()))
        if not leader.leads:
            leader.disconnect_all()

    # ---- the agent's main thread --------------------------------------------------------

    def _handle_message(self, message: RunMessage) -> None:
        if not isinstance(message, Waiting):
            self.env.world.log_event(self.host.task, "told", message)
        match message:
            case RoundInfo():
                self._begin_round(message)
            case Stop():
                self._stop_workers()
            case StacksRequest(number):
                ranks = [RankState(0, 0, "moves", "script.py")]
                self._do(self._following.report(Stacks(number, ranks)))
            case CheckpointRequested():
                self._session.handle_message(message)
                self.touch()
            case PreemptionNotice():
                left_s = message.by - self.host.clock()
                self.env.world.after(0.001, self.process, self._obey_notice)
                self.env.world.after(left_s, self.process, self.leave_now)
            case Departed():
                self._leave_run()
            case End(status):
                self.env.monitor.received_end(self.me, status, self.env.register.entries)
                self._leave_node(None)
            case Requeue(delay_s):
                self._leave_node(delay_s)

    def _begin_round(self, place: RoundInfo) -> None:
        entry = self.env.monitor.accepted(self.me, place)
        self.work, self.rank = self.env.work_of(entry, self.me), None
        self._session, self._channel = SessionState(), None
        self._has_failed = self._stopping = False
        delay = 0.1 + 0.5 * self.env.world.rng.random()
        self.env.world.after(delay, self.process, self._start_workers, self.work)

    def _start_workers(self, work: Work) -> None:
        if self.work is work and not self._stopping and not self.over:
            self.rank = work.enter(self)
            rule = self.env.components.can_save_at
            # a page changes at once, so the channel needs no sleep
            page = cast(SharedPage, self.rank.page)
            self._channel = WorkerChannel(
                cast(Session, self), [page], sleep=lambda _: None, can_save_at=rule
            )
            self.touch()

    def _draw_stop_time(self) -> float:
        world = self.env.world
        return self.env.scenario.longest_stop_at(world.now) * world.rng.random() ** 2

    def _stop_workers(self) -> None:
        if self.work is None or self._stopping or self.over:
            return
        self._stopping = True
        self.work.leave(self, secondary_failures=True)
        self.env.world.after(self._draw_stop_time(), self.process, self._workers_stopped)

    def _workers_stopped(self) -> None:
        if self.over:
            return
        self.work, self.rank, self._stopping = None, None, False
        self.env.monitor.stopped(self.me)
        self._do(self._following.join())

    def _leave_node(self, away_s: float | None) -> None:
        """Exit because the run has ended (None), or requeue the node for a while."""
        self.over = True
        delay = _LINGER_S if any(leader.leads for leader in self.leaders) else 0.2
        self.env.world.after(delay, self.process, self.host.task_left, away_s)

    def _leave_run(self) -> None:
        """End the session and the terms of its leaders, then stop the workers."""
        self.over = True
        for leader in self.leaders:
            leader.stop()
        if self.work is not None:
            self.work.leave(self, secondary_failures=True)
        delay, away_s = 0.05 + self._draw_stop_time(), self.host.draw_requeue_time()
        self.env.world.after(delay, self.process, self.host.task_left, away_s)

    # ---- the workers --------------------------------------------------------------------

    def touch(self) -> None:
        """Schedule a poll, because the worker's page or the leader's request has changed."""
        if not self._is_poll_scheduled:
            self._is_poll_scheduled = True
            busy_s = max(0.0, self.busy_until - self.env.world.now)
            delay = _PAGE_POLL_S * self.env.world.rng.random()
            self.env.world.after(busy_s + delay, self.process, self._poll_page)

    def _poll_page(self) -> None:
        self._is_poll_scheduled = False
        if self.env.world.now < self.busy_until:
            self.touch()
            return
        if self._channel is None or self.work is None or not self._is_at(self.work):
            return
        self._channel.poll(self.host.clock())
        request = self.checkpoint_request
        if request is not None and not request.confirmed:
            self.touch()

    @property
    def checkpoint_request(self) -> CheckpointRequest | None:
        """See `hpc_elastic.rendezvous.session.Session`."""
        return self._session.checkpoint_request

    def report(self, report: MemberReport) -> None:
        """See `hpc_elastic.rendezvous.session.Session`."""
        self._do(self._following.report(report))

    def ended(self, work: Work, exit_code: int) -> None:
        """The worker of this node has exited by itself, without an error."""
        if not self._is_at(work) or self.rank is None:
            return
        worker = self.rank.page.read()
        if not worker.returned:
            work.leave(self, secondary_failures=True)
        how = "returned" if worker.returned else "exits"
        self.env.world.log_event(self.host.task, how, exit_code)
        if self.env.components.has_succeeded(exit_code, worker):
            self._do(self._following.report(Finished()))
        elif self._is_noticed:
            self.leave_now()
        else:
            self.worker_failed(work, f"exited with code {exit_code}", itself=True)

    def stalled(self, work: Work) -> None:
        """The worker of this node has made no step for a while."""
        if self._is_at(work):
            self._do(self._following.report(Stall(0.0, 1.0)))

    def worker_failed(self, work: Work, message: str, *, itself: bool) -> None:
        """A worker of this node has failed; stop its other workers."""
        if not self._is_at(work):
            return
        self._has_failed = True
        if itself:
            self.env.monitor.own_failures += 1
        work.leave(self, secondary_failures=True)
        failure = Failure(
            self.me.task, self.me.host, 0, 0, self.env.world.now, message, exit_code=1
        )
        self.env.world.log_event(self.host.task, "failed", message)
        self._do(self._following.report(Failed([failure])))

    def _is_at(self, work: Work) -> bool:
        at = self.work is work and not self._stopping
        return at and not self._has_failed and not self.over


class Attempt:
    """One attempt of an agent to connect to a leader: greeted, refused, or unanswered."""

    __slots__ = ("client", "connection", "endpoint", "is_over")

    def __init__(self, client: AgentProcess, endpoint: Endpoint) -> None:
        self.client = client
        self.endpoint = endpoint
        self.connection: Connection | None = None
        self.is_over = False

    def reach(self) -> None:
        """Deliver the request to the leader's node, if the network lets it through."""
        client = self.client
        node = client.env.nodes[int(self.endpoint.address)]
        if not node.up or client.env.network.is_cut(client.host, node):
            return
        listener = node.listener(self.endpoint.port)
        if listener is None:
            self.refuse()
        else:
            listener.process.call(listener.accept, self)

    def refuse(self) -> None:
        """Refuse the connection, because no process listens on the port."""
        world = self.client.env.world
        world.after(0.001, self.client.process, self.fail, "connection refused", True)

    def fail(self, why: str, refused: bool) -> None:
        """Report the failure to the agent, unless the attempt is over."""
        if not self.is_over:
            self.client.not_connected(self, why, refused)

    def abandon(self) -> None:
        """End the attempt and its connection."""
        self.is_over = True
        if self.connection is not None:
            self.connection.close(CLIENT)


# ---- The leader's adapter: it passes events to a `Term`, and carries out the effects


_RETRY_S = 0.5
_SHOW_EVERY_S = 1.0
_READMIT_EVERY_S = 10.0


class Leader:
    """A listener, and, once its claim is recorded, the leader of a term."""

    def __init__(self, agent: AgentProcess, endpoint: Endpoint) -> None:
        self.agent = agent
        self.process = agent.process
        self.host = agent.host
        self.endpoint = endpoint
        self.is_open = True
        self._env = agent.env
        self._early: list[Attempt] = []
        """Attempts of agents before this process leads."""
        self._connections: dict[Agent, Connection] = {}
        self._all: list[Connection] = []
        self._creating: LogEntry | None = None
        self._has_started = False
        self._renewing = False
        self._beats = 0
        self._num_notice_polls = 0
        self._is_polling_notices = self._is_confirmed = False
        """Whether a notice was confirmed since the last poll of the notices began."""

    # ---- its life -----------------------------------------------------------------------

    def lead(self, entry: LogEntry) -> None:
        """Start to lead, because the claim is in the log."""
        env = self._env
        self.leader_state = env.components.leader_state(
            entry, env.scenario.rules, env.scenario.heartbeat, self._now(), env.world.rng
        )
        self.leader_state.num_kept = env.num_kept
        self._term = entry.term
        self.term = env.components.term(self.leader_state, self, env.scenario.show_s)
        mount = self.host.mount
        folder = env.components.folder(entry.term, NodeFiles(env.shared, mount))
        args = (env.shared, folder, mount, self.process, self.term.end_term)
        self._files = LeadersFiles(*args)
        self._has_started = True
        self._round = entry.index
        self.term.handle(self.leader_state.start_leading)
        early, self._early = self._early, []
        for attempt in early:
            self._greet(attempt)
        self._tick()
        self._poll_log()
        self._show_status()
        self._poll_notices()
        env.world.after(_READMIT_EVERY_S, self.process, self._readmit_hosts)

    def stop(self) -> None:
        """End the term, because this node leaves."""
        if self.leads:
            self.term.handle(self.leader_state.notice_confirmed, self.endpoint.task)
            self.term.end_term()
            self._files.remove_confirmed()
        self.disconnect_all()

    def fail(self, *, drops_append: bool = False) -> None:
        """Fail by an error of its own; ``drops_append``: it has made no store for the round."""
        self._env.world.log_event(self.endpoint.task, "fails as the leader")
        self._env.monitor.leader_failed()
        task, host, now = self.endpoint.task, self.host.hostname, self._env.world.now
        failure = Failure(task, host, 0, 0, now, "planted", "TypeError", phase="lead")
        self.term.handle(self.leader_state.failed, failure, drops_append)

    def disconnect_all(self) -> None:
        """Stop listening, and disconnect all agents; see `Executor`."""
        if self.is_open and self._has_started:
            self._env.monitor.fenced += self.leader_state.fenced and not self.agent.over
        self.is_open = False
        for connection in self._all:
            connection.close(SERVER)
        self._connections.clear()

    @property
    def leads(self) -> bool:
        """Whether it has not detected yet that its term is over."""
        return self.is_open and self._has_started

    def _now(self) -> float:
        return self.host.clock()

    def _tick(self) -> None:
        if self.is_open:
            self.term.handle(self.leader_state.tick, self._now())
            beat_s = self.leader_state.heartbeat.heartbeat_interval_s
            self._env.world.after(beat_s, self.process, self._tick)

    def _poll_log(self) -> None:
        if self.is_open:
            register = self.host.register
            register.last_index(self.process, self._log_read, lambda _: self._poll_log_later())

    def _log_read(self, number: int) -> None:
        self.term.handle(self.leader_state.log_advanced, number)
        self._poll_log_later()

    def _poll_log_later(self) -> None:
        self._env.world.after(self._env.scenario.poll_s, self.process, self._poll_log)

    # ---- duties -------------------------------------------------------------------------

    def _show_status(self) -> None:
        if not self.term.is_over:
            self.term.show(self._env.world.now)
            self._env.world.after(_SHOW_EVERY_S, self.process, self._show_status)

    def _readmit_hosts(self) -> None:
        if not self.term.is_over:
            self.term.readmit()
            self._env.world.after(_READMIT_EVERY_S, self.process, self._readmit_hosts)

    def _poll_notices(self, number: int = 0) -> None:
        if not self.term.is_over and number == self._num_notice_polls:
            self._num_notice_polls += 1
            self._is_polling_notices, self._is_confirmed = True, False
            self._files.claim_notices(self._notices_claimed)

    def _notices_claimed(self, notices: Mapping[str, float]) -> None:
        self._is_polling_notices = False
        self.term.handle(self.leader_state.notices_claimed, notices)
        pause = 0.0 if self._is_confirmed else self._env.scenario.poll_s
        self._env.world.after(pause, self.process, self._poll_notices, self._num_notice_polls)

    # ---- agents -------------------------------------------------------------------------

    def accept(self, attempt: Attempt) -> None:
        """Greet an agent that connects, at the latest when this process leads; or refuse it."""
        if not self.is_open:
            attempt.refuse()
        elif self.leads:
            self._greet(attempt)
        else:
            self._early.append(attempt)

    def _greet(self, attempt: Attempt) -> None:
        connection = self._env.network.connect(attempt.client, self)
        attempt.connection = connection
        self._all.append(connection)
        connection.send(SERVER, attempt)  # the greeting: it is the right leader

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of an agent."""
        if not self.is_open:
            return
        if isinstance(message, Agent):
            self._admit(message, connection)
        elif self._connections.get(connection.peer) is connection:
            self.term.handle(self.leader_state.received, connection.peer, message, self._now())

    def _admit(self, agent: Agent, connection: Connection) -> None:
        old = self._connections.get(agent)
        effects = self.leader_state.connected(agent, self._now())
        if old is not None:
            old.close(SERVER)
        connection.peer = agent
        self._connections[agent] = connection
        self.term.do([e for e in effects if type(e) is not Disconnect])

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        agent = connection.peer
        if self.is_open and agent is not None and self._connections.get(agent) is connection:
            del self._connections[agent]
            why = LossReason.CONNECTION_CLOSED
            self.term.handle(self.leader_state.disconnected, agent, why, self._now())

    # ---- effects ------------------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        """See `Executor`."""
        monitor = self._env.shared.monitor
        monitor.check_term(self._term, effect, is_fenced=self.leader_state.fenced)
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, RenewLease):
            self._renew_lease()
        elif isinstance(effect, Show):
            self._files.show(effect.status, effect.lines)
        else:
            self._carry_out_rarely(effect)

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """See `Executor`."""
        self._env.world.log_event(self.endpoint.task, "publishes", entry)
        self._env.monitor.published(entry)
        self.term.do(afterwards)

    def _carry_out_rarely(self, effect: Effect) -> None:
        env = self._env
        env.world.log_event(self.endpoint.task, "leader", effect)
        match effect:
            case Disconnect(agent):
                if agent in self._connections:
                    self._connections.pop(agent).close(SERVER)
            case Append(entry, needs_store):
                env.monitor.appends(entry, self.leader_state.run)
                if needs_store and self.host.makes_no_store:
                    env.world.after(0.0, self.process, partial(self.fail, drops_append=True))
                    return
                self._creating = entry
                self._create()
            case Announce():
                self._announce(effect)
            case Postpone(delay_s):
                env.slurm.postponed_until = env.world.now + delay_s
            case ClearHolds(tasks):
                env.monitor.restarted(tasks, self.leader_state.run)
                for node in env.nodes:
                    if node.task in tasks:
                        node.clear_hold()
            case Note("excluded", fields):
                env.monitor.excluded(str(fields["host"]), int(str(fields["hosts_left"])))
            case Exclude(hosts, _, until):
                env.slurm.excluded.update(dict.fromkeys(hosts, until))
            case Readmit():
                env.slurm.end_exclusions()
            case QueryTasks():
                env.slurm.query_tasks(self.process, self._slurm_answered)
            case RemoveEntries(index, term):
                self.host.register.remove_old(self.process, index, term)
            case RemoveNotice(name):  # at once, or right after the poll that is under way
                self._files.confirm(name)
                self._is_confirmed = True
                if not self._is_polling_notices:
                    env.world.after(0.0, self.process, self._poll_notices, self._num_notice_polls)

    def _send(self, send: Send) -> None:
        monitor = self._env.monitor
        work = self._env.works.get(self._round) if send.agents else None
        match send.message:
            case Stop(reason) if work is not None:
                monitor.round_stopped(reason, self._round, work.steps, work.staying_members)
            case CheckpointRequested(CheckpointRequest() as request) if work is not None:
                if request.confirmed and not request.released:
                    monitor.confirmed(self._round, request, work.ranks_at())
        for agent in self._connections if send.agents is None else send.agents:
            self._send_to_agent(agent, send.message)

    def _send_to_agent(self, agent: Agent, message: RunMessage) -> None:
        connection = self._connections.get(agent)
        if connection is not None:
            connection.send(SERVER, message)

    def _renew_lease(self) -> None:
        if not self._renewing:  # the file system may hang
            self._renewing = True
            self._beats += 1
            register = self.host.register
            register.renew_lease(self.process, self._term, self._beats, self._renewed)

    def _renewed(self, done: bool) -> None:
        self._renewing = False
        if done:
            self.term.handle(self.leader_state.renewed)

    def _announce(self, announce: Announce) -> None:
        self._env.monitor.announced(self.endpoint, announce)
        self._round = announce.entry.index
        for agent, place in self._env.components.places(announce):
            self._send_to_agent(agent, place)

    def _create(self) -> None:
        if self._creating is not None:
            self.host.register.create(self.process, self._creating, self._created)

    def _created(self, outcome: bool | None) -> None:
        if outcome is None:
            self._env.world.after(_RETRY_S, self.process, self._create)
            return
        self._creating = None
        self.term.handle(self.leader_state.appended if outcome else self.leader_state.refused)

    def _slurm_answered(self, view: dict[str, TaskState] | None) -> None:
        if self.is_open:
            self.term.handle(self.leader_state.slurm_answered, view, self._now())

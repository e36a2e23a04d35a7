"""Cluster: nodes, agents and leaders in virtual time, around the real protocol.

A node runs the attempts of its task. An agent is the adapter around a `FollowerState`, and a leader
the one around a `Term`, and through it a `LeaderState`. What a node's worker and the leader send
each other goes through the product's own `hpc_elastic.agent.worker_channel`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hpc_elastic.agent.worker_channel import Rule, WorkerChannel, can_save_at
from hpc_elastic.agent.worker_failures import has_succeeded
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
    PublishResult,
    QuerySlurm,
    QueryTasks,
    ReadLog,
    RemoveNotice,
    RenewLease,
    RoundInfo,
    Send,
    SendToLeader,
    Show,
    place_message,
    places,
)
from hpc_elastic.rendezvous.follower_state import FollowerState
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig, LeaderState
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, Failure, LogEntry, LogSteps, claim
from hpc_elastic.rendezvous.session import SessionState
from hpc_elastic.rendezvous.term import Term, TermFolder
from hpc_elastic.slurm.job_state import TaskState
from hpc_elastic.worker.shared_page import CheckpointRequest, WorkerStatus
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
    """The protocol's classes, and what its adapters must take care of: a test can plant a bug."""

    draw: Callable[[random.Random], Scenario] = draw
    """Draws what a schedule is made of."""
    leadership: type[LeaderState] = LeaderState
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
    has_succeeded: Callable[[int, WorkerStatus], bool] = has_succeeded
    """How an agent judges a worker that has ended with an exit code."""
    exclusive_create: bool = True
    """Whether an entry that exists cannot be created again."""


SOUND = Components()
"""The product."""


class Env:
    """What all nodes of one schedule share.

    Args:
        seed: The schedule's.
        world: Time and chance.
        scenario: The schedule's parameters.
        components: The classes under test.
        monitor: What must hold.
        agent_type: Makes one attempt of a node's task.
        alone: The workers of each node are a group of their own.
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
        self.slurm = Slurm(world, scenario.longest_answer_s, scenario.tells_attempts)
        self.slurm.down += scenario.is_slurm_silent
        self.nodes = [Node(self, slot) for slot in range(scenario.num_nodes)]
        self.works: dict[int, Work] = {}
        """Entry of a round -> its workers; none where each node is alone."""
        self._alone = alone
        self._num_ports = 0

    def new_endpoint(self, host: Node) -> Endpoint:
        """Return an endpoint that was never used before."""
        self._num_ports += 1
        return Endpoint(str(host.slot), self._num_ports, host.task, host.attempt)

    def work_of(self, entry: LogEntry, member: Agent) -> Work:
        """Return the workers of a member's round."""
        args = (self.world, self.network, self.scenario.training, self.monitor)
        if self._alone:
            return Work(replace(entry, members=(member,)), *args)
        if entry.index not in self.works:
            self.works[entry.index] = Work(entry, *args)
        return self.works[entry.index]

    def told_to_stop(self, number: int, reason: str) -> None:
        """A leader breaks the round of an entry."""
        work = self.works.get(number)
        if work is not None:
            self.monitor.told_to_stop(reason, number, work.steps, work.staying_members)

    def confirmed(self, number: int, request: CheckpointRequest) -> None:
        """A leader confirms a checkpoint request in the round of an entry."""
        work = self.works.get(number)
        if work is not None:
            self.monitor.confirmed(number, request, work.ranks_at())

    def asked_to_leave(self, agent: Agent) -> None:
        """A leader has sent an agent a notice."""
        self.shared.monitor.notice_received((agent.task, agent.host, "all"), self.world.now)

    def clear_holds(self, tasks: Sequence[str]) -> None:
        """A leader brings tasks back that Slurm holds."""
        for node in self.nodes:
            if node.task in tasks:
                node.clear_hold()

    def is_named_alive(self, name: str, since: float = math.inf) -> bool:
        """Return whether a live node that a leader can reach matches a notice.

        ``since``: its attempt has started by then: a notice written before concerns the last one.
        """
        nodes = (n for n in self.nodes if name in (n.task, n.hostname, "all"))
        heard = (n for n in nodes if n.lives and n.slot != self.network.isolated)
        return any(n.started_at <= since for n in heard)


_STILL_RUNNING_S = 12.0
"""So long at most Slurm calls the task of a dead node RUNNING."""
_RESERVE_S = 0.2
"""So long before the end of its grace an agent leaves, whatever its round does."""
_TWO_MINUTES_S = 120.0
"""Slurm's state of a task that it holds after a requeue."""


class Node(Host):
    """One task of the array, and the node that it has."""

    def __init__(self, env: Env, slot: int) -> None:
        rng = env.world.rng
        super().__init__(slot)
        self.task = f"7_{slot}"
        self.attempt = -1
        self.started_at = 0.0
        self.nproc = rng.choice((1, 1, 2))
        storage, stale_s = env.storage, env.scenario.stale_s
        life_s = 0.0 if stale_s else env.scenario.attributes_s * storage.rng.random()
        by_time = env.scenario.sees_ticks and not stale_s
        self.mount = Mount(storage, slot, life_s=life_s, stale_s=stale_s, by_time=by_time)
        self.register = NodeRegister(env.register, self.mount)
        self.ended = False
        """Whether the task never comes back."""
        self.agent: AgentProcess | None = None
        self.hostname = f"node{slot}"
        """Of the machine that its task runs on, as Slurm chose it."""
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
        """Return what listens on a port."""
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
            return  # it was started earlier than was planned then
        world, slurm = self._env.world, self._env.slurm
        wait = slurm.postponed_until - world.now
        if wait > 0:
            world.after(wait, None, self._boot, number)
            return
        self._env.monitor.changed()
        self._boots += 1
        self._held = False
        self.attempt += 1
        if self.hostname in slurm.excluded:
            self.hostname = f"node{self.slot}-{self.attempt}"
        self.up = True
        self._env.network.came_back(self)
        self._env.slurm.believe(self.task, "RUNNING", self.attempt)
        world.after(0.1 + world.rng.random(), None, self._start)

    def _start(self) -> None:
        self._env.world.log_event(self.task, "starts", self.attempt)
        self.started_at = self._env.world.now
        self.agent = self._env.agent_type(self._env, self)
        self.agent.start()

    def crash(self, comes_back: bool) -> None:
        """The agent's process ends: its task has failed, or is requeued."""
        if self.agent is not None:
            self._env.world.log_event(self.task, "process crashes")
            self._end_process(silently=False)
            self._requeue(LONGEST_AWAY_S * self._env.world.rng.random() if comes_back else None)

    def vanish(self, comes_back: bool) -> None:
        """The node dies; Slurm detects that late."""
        if self.agent is None:
            return
        self._env.world.log_event(self.task, "node dies")
        self._end_process(silently=True)
        self.mount.forget()
        self.up = False
        late = _STILL_RUNNING_S * self._env.world.rng.random()
        requeued = 2.0 if comes_back else None
        held = comes_back and self._env.world.rng.random() < 0.5
        self._env.world.after(late, None, partial(self._requeue, requeued, held=held))

    def preempt(self) -> None:
        """Slurm takes the node without grace: the agent can only announce that it leaves."""
        if self.agent is not None and not self.agent.process.paused:
            self._env.world.log_event(self.task, "is preempted")
            self.agent.over = True
            self.agent.leave("preempted")
            self.task_left(2.0)

    def notice(self, grace_s: float) -> None:
        """Slurm announces that it will take the node."""
        agent, world = self.agent, self._env.world
        if agent is None or agent.over or agent.process.paused:
            return
        world.log_event(self.task, "is noticed", grace_s)
        self._env.monitor.changed()
        agent.notice(grace_s)
        in_time = max(0.0, grace_s - _RESERVE_S)
        world.after(in_time, agent.process, self._hurry, agent, grace_s)
        world.after(grace_s, None, self._kill, agent)

    def _hurry(self, agent: AgentProcess, grace_s: float) -> None:
        if not agent.over:
            self._env.monitor.leaves_too_late(agent.me, grace_s)
        agent.leave_now()

    def _kill(self, agent: AgentProcess) -> None:
        """The grace is over: what is still there is killed, and Slurm requeues it."""
        if self.agent is agent:
            self._env.world.log_event(self.task, "is killed")
            self._end_process(silently=False)
            self._requeue(self.away_s(), held=self._env.world.rng.random() < 0.5)

    def away_s(self) -> float:
        """Return how long its task is away if it leaves."""
        rng = self._env.world.rng
        is_long = self._env.scenario.is_quiet and rng.random() < 0.5
        return LONGEST_AWAY_S if is_long else 0.5 + 2.0 * rng.random()

    def clear_hold(self) -> None:
        """Somebody lets the task start although Slurm holds it."""
        if self._held:
            self._held = False
            self._boots += 1
            self._env.world.after(2.0, None, self._boot, self._boots)

    def task_left(self, away_s: float | None) -> None:
        """The agent has gone by itself, for good (None) or for a while."""
        self._end_process(silently=False)
        self._requeue(away_s)

    def _end_process(self, silently: bool) -> None:
        assert self.agent is not None
        self.agent.end_process(silently)
        self.agent = None

    def _requeue(self, away_s: float | None, *, held: bool = False) -> None:
        """Requeue the task, so that it starts after a while; None: it has failed."""
        slurm, world = self._env.slurm, self._env.world
        if away_s is None:
            self.ended = True
            slurm.believe(self.task, "FAILED", self.attempt)
            return
        slurm.believe(self.task, "COMPLETING", self.attempt)
        departs_in_s = world.rng.random()
        if held:
            away_s = LONGEST_AWAY_S
        world.after(departs_in_s, None, self._queued, held)
        world.after(departs_in_s + 0.5 + away_s, None, self._boot, self._boots)

    def _queued(self, held: bool) -> None:
        self._held = held
        starts_in_s = _TWO_MINUTES_S if held else None
        self._env.slurm.believe(self.task, "PENDING", self.attempt + 1, starts_in_s)


# ---- The agent's adapter in the simulation: a `FollowerState`, and the workers that it is for
# Messages between the node's worker and the leader pass through the product's own
# `hpc_elastic.agent.worker_channel`, as in a session.


_TICK_S = 0.25
"""How often an agent without a leader wakes up."""
_LINGER_S = 1.0
"""Time for which a leader's process stays after the end, to send its last messages."""
_LOOKS_EVERY_S = 0.1
_HANDLED_S = 0.02
"""A script's own handler of SIGTERM has exited after so long."""


def _sleep_not(seconds: float) -> None:
    """Return at once: what is written to a simulated page is seen by everybody."""


class AgentProcess:
    """One attempt of one task."""

    def __init__(self, env: Env, host: Node) -> None:
        self.env = env
        self.host = host
        self.process = Process()
        self.me = Agent(host.task, host.attempt, host.slot, host.hostname, host.nproc)
        self.over = False
        """Whether it has received that it is to leave, or that the run has ended."""
        self.work: Work | None = None
        self.rank: Rank | None = None
        """Its worker, once that has started."""
        self.leaders: list[Leader] = []
        self._heard = SessionState()
        self._channel: WorkerChannel | None = None
        self._will_look = False
        self.busy_until = 0.0
        """Its own thread looks at no page before this time."""
        self._stopping = False
        self._has_failed = False
        self._is_noticed = False
        self._connection: Connection | None = None
        self._attempt: Attempt | None = None
        self._said_dead: set[str] = set()
        """Tasks that do not run according to Slurm."""
        self._following = env.components.following(self.me, env.scenario.liveness, host.clock())

    def start(self) -> None:
        """Ask for a place in the next round."""
        self._do(self._following.join())
        self._tick()

    def end_process(self, silently: bool = False) -> None:
        """The process ends: on its own, by a crash, or (``silently``) together with its node."""
        self.process.alive = False
        if self.work is not None:
            self.work.leave(self, secondary_failures=not silently)
            self.env.monitor.stopped(self.me)
            self.work = self.rank = None
        rng = self.env.world.rng
        lossy = self.env.scenario.lose_at_break and not self.over
        self.env.network.crashed(self.process, silently, lambda: lossy and rng.random() < 0.5)

    def leave(self, why: str) -> None:
        """Send the leader that this node leaves."""
        self._send_to_leader({"type": "leave", "why": why})

    # ---- notice -------------------------------------------------------------------------

    def notice(self, left_s: float) -> None:
        """The node has to be left within so long; nothing is lost if its worker made no step."""
        if self.over:
            return
        self._is_noticed = True
        self._do(self._following.add_notice("signal", left_s, self.host.clock()))
        self._obey()

    def _obey(self) -> None:
        if self.rank is None or (self.work is not None and self.rank.at == self.work.start):
            self.leave_now()
        elif self.env.scenario.exits_at_sigterm:
            self.env.world.after(_HANDLED_S, self.process, self.ended, self.work, 0)

    def leave_now(self) -> None:
        """The time is over."""
        if not self.over:
            self._do(self._following.leave_now())

    def _tick(self) -> None:
        if not self.over:
            self._do(self._following.tick(self.host.clock()))
            pause = (
                _TICK_S
                if self._connection is None
                else self._following.liveness.heartbeat_interval_s
            )
            self.env.world.after(pause, self.process, self._tick)

    # ---- the connection -----------------------------------------------------------------

    def received(self, connection: Connection, message: Any) -> None:
        """A message of the leader, or of a former one, arrives."""
        if isinstance(message, Attempt):
            self._greeted(connection, message)
        elif connection is self._connection:
            if message["type"] == "notice":
                self.env.asked_to_leave(self.me)
            self._do(self._following.received(message, self.host.clock()))

    def _greeted(self, connection: Connection, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        attempt.is_over = True
        self._attempt, self._connection = None, connection
        connection.send(CLIENT, self.me)
        self._do(self._following.connected(self.host.clock()))

    def lost(self, connection: Connection) -> None:
        """A connection has ended."""
        if connection is self._connection:
            self._connection = None
            self._do(self._following.disconnected("connection reset", self.host.clock()))

    def not_connected(self, attempt: Attempt, why: str, refused: bool) -> None:
        """An attempt came to nothing."""
        attempt.abandon()
        self._attempt = None
        self._do(self._following.not_connected(why, self.host.clock(), refused=refused))

    def _connect(self, entry: LogEntry) -> None:
        self._attempt = attempt = Attempt(self, entry.leader)
        world = self.env.world
        world.after(self.env.network.delay(), None, attempt.reach)
        world.after(CONNECT_TIMEOUT_S, self.process, attempt.fail, "timed out", False)

    def _hang_up(self) -> None:
        if self._attempt is not None:
            self._attempt.abandon()
        if self._connection is not None:
            self._connection.close(CLIENT)
        self._attempt = self._connection = None

    def _send_to_leader(self, message: dict[str, Any]) -> None:
        if self._connection is None:
            return
        if message["type"] == "heartbeat":
            message = {**message, "progress": self._progress()}
        self._connection.send(CLIENT, message)

    def _progress(self) -> dict[str, Any]:
        total = self.env.scenario.training.total_steps
        return {"step": self.rank.at, "total": total} if self.rank is not None else {}

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
                self.host.register.last_with_lease(self.process, self._looked, self._blind)
            case Connect(entry):
                self._connect(entry)
            case Disconnect():
                self._hang_up()
            case QuerySlurm(task):
                env.slurm.inquire(self.process, task, lambda runs: self._slurm_says(task, runs))
            case Claim():
                self._claim(effect)
            case PublishResult(entry):
                env.monitor.published(entry)
            case Lead(entry):
                env.world.log_event(self.host.task, "leads", entry)
                self.leaders[-1].lead(entry)

    def _looked(self, number: int, entry: LogEntry | None, lease: int | None) -> None:
        self._do(self._following.log_read(number, entry, lease, self.host.clock()))

    def _blind(self, why: Exception) -> None:
        self._do(self._following.log_unreadable(str(why), self.host.clock()))

    def _slurm_says(self, task: str, runs: bool | None) -> None:
        if runs is False:
            self._said_dead.add(task)
        self._do(self._following.slurm_answered(task, runs, self.host.clock()))

    def _claim(self, wanted: Claim) -> None:
        if self._goes_by_the_lease(wanted):
            self.host.register.check_claim(wanted, self.env.scenario.liveness)
        endpoint = self.env.new_endpoint(self.host)
        self.leaders.append(Leader(self, endpoint))
        number, before, possibly_alive = wanted.number, wanted.before, wanted.possibly_alive
        entry = claim(number, before, endpoint, self.env.world.now, possibly_alive=possibly_alive)
        self.env.world.log_event(self.host.task, "claims", entry)
        self._put(entry)

    def _goes_by_the_lease(self, wanted: Claim) -> bool:
        """Return whether nothing but the leader's silence speaks for its death."""
        number, before = wanted.number - 1, wanted.before
        if before is None or before.index != number or before.is_vacant:
            return False
        return wanted.possibly_alive and before.leader.task not in self._said_dead

    def _put(self, entry: LogEntry) -> None:
        self.host.register.create(self.process, entry, lambda done: self._claimed(entry, done))

    def _claimed(self, entry: LogEntry, done: bool | None) -> None:
        if done is None and self.env.world.rng.random() < 0.5:
            self._put(entry)
            return
        leader = self.leaders[-1]
        self._do(self._following.claimed(entry if done else None, self.host.clock()))
        if not leader.leads:
            leader.disconnect_all()

    # ---- the agent's own thread ---------------------------------------------------------

    def _handle_message(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind not in ("news", "waiting"):
            self.env.world.log_event(self.host.task, "told", message)
        match kind:
            case "round":
                self._begin_round(message)
            case "stop":
                self._stop()
            case "checkpoint_request":
                self._heard.handle_message(message)
                self.touch()
            case "noticed" if message["reason"] == "asked":
                self.env.world.after(0.001, self.process, self._obey)
                in_time = float(message["left_s"])
                self.env.world.after(in_time, self.process, self.leave_now)
            case "departed":
                self._leave_the_run()
            case "end":
                self.env.monitor.received_end(self.me, message["status"], self.env.register.entries)
                self._leave_node(None)
            case "requeue":
                self._leave_node(message["delay_s"])

    def _begin_round(self, message: dict[str, Any]) -> None:
        entry = self.env.monitor.accepted(self.me, message)
        self.work, self.rank = self.env.work_of(entry, self.me), None
        self._heard, self._channel = SessionState(), None
        self._has_failed = self._stopping = False
        delay = 0.1 + 0.5 * self.env.world.rng.random()
        self.env.world.after(delay, self.process, self._enter, self.work)

    def _enter(self, work: Work) -> None:
        if self.work is work and not self._stopping and not self.over:
            self.rank = work.enter(self)
            self._channel = WorkerChannel(
                self,
                [self.rank.page],
                sleep=_sleep_not,
                can_save_at=self.env.components.can_save_at,
            )
            self.touch()

    def _stop(self) -> None:
        if self.work is None or self._stopping or self.over:
            return
        self._stopping = True
        self.work.leave(self, secondary_failures=True)
        world = self.env.world
        delay = self.env.scenario.longest_stop_at(world.now) * world.rng.random() ** 2
        world.after(delay, self.process, self._stopped)

    def _stopped(self) -> None:
        if self.over:
            return
        self.work, self.rank, self._stopping = None, None, False
        self.env.monitor.stopped(self.me)
        self._do(self._following.join())

    def _leave_node(self, away_s: float | None) -> None:
        """Leave: the run has ended (None), or the node goes back to the queue for a while."""
        self.over = True
        delay = _LINGER_S if any(leader.leads for leader in self.leaders) else 0.2
        self.env.world.after(delay, self.process, self.host.task_left, away_s)

    def _leave_the_run(self) -> None:
        """The session is over, and with it what it led; the workers are stopped after that."""
        self.over = True
        for leader in self.leaders:
            leader.stop()
        if self.work is not None:
            self.work.leave(self, secondary_failures=True)
        world = self.env.world
        delay = self.env.scenario.longest_stop_at(world.now) * world.rng.random() ** 2
        world.after(0.05 + delay, self.process, self.host.task_left, self.host.away_s())

    # ---- the workers --------------------------------------------------------------------

    def touch(self) -> None:
        """Something has changed on the worker's page, or in what the leader asks."""
        if not self._will_look:
            self._will_look = True
            busy_s = max(0.0, self.busy_until - self.env.world.now)
            delay = _LOOKS_EVERY_S * self.env.world.rng.random()
            self.env.world.after(busy_s + delay, self.process, self._read_log)

    def _read_log(self) -> None:
        self._will_look = False
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
        """See `hpc_elastic.rendezvous.session.Session`, as for what follows."""
        return self._heard.checkpoint_request

    def report_checkpoint(self, step: int, *, paused: int) -> None:
        """The worker has announced a checkpoint."""
        self._do(self._following.report("checkpoint", step=step, paused=paused))

    def vote(self, number: int, *, ok: bool, passed: int | None, rate: float) -> None:
        """The vote on a checkpoint request."""
        fields = {"number": number, "ok": ok, "passed": passed, "rate": rate}
        self._do(self._following.report("step_vote", **fields))

    def want_checkpoint(self) -> None:
        """The worker asks for a checkpoint of the group."""
        self._do(self._following.report("request_checkpoint"))

    def ended(self, work: Work, exit_code: int) -> None:
        """The worker of this node has ended by itself, and not with an error."""
        if not self._is_at(work) or self.rank is None:
            return
        worker = self.rank.page.read()
        if not worker.returned:
            work.leave(self, secondary_failures=True)
        how = "returned" if worker.returned else "exits"
        self.env.world.log_event(self.host.task, how, exit_code)
        if self.env.components.has_succeeded(exit_code, worker):
            self._do(self._following.report("finished"))
        elif self._is_noticed:
            self.leave_now()
        else:
            self.worker_failed(work, f"exited with code {exit_code}", itself=True)

    def worker_failed(self, work: Work, message: str, *, itself: bool) -> None:
        """A worker of this node has failed; the node's others are ended."""
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
        self._do(self._following.report("failed", failures=[failure.to_json()]))

    def _is_at(self, work: Work) -> bool:
        at = self.work is work and not self._stopping
        return at and not self._has_failed and not self.over


# ---- One attempt of an agent to connect to a leader: greeted, refused, or unanswered


class Attempt:
    """One attempt of an agent to connect."""

    __slots__ = ("client", "connection", "endpoint", "is_over")

    def __init__(self, client: AgentProcess, endpoint: Endpoint) -> None:
        self.client = client
        self.endpoint = endpoint
        self.connection: Connection | None = None
        self.is_over = False

    def reach(self) -> None:
        """The request arrives, or not, at the leader's node."""
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
        """No process listens there."""
        world = self.client.env.world
        world.after(0.001, self.client.process, self.fail, "connection refused", True)

    def fail(self, why: str, refused: bool) -> None:
        """It has come to nothing."""
        if not self.is_over:
            self.client.not_connected(self, why, refused)

    def abandon(self) -> None:
        """No agent waits for it any more."""
        self.is_over = True
        if self.connection is not None:
            self.connection.close(CLIENT)


# ---- The leader's adapter in the simulation: carries out a `Term`'s effects, and passes it events


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
        """Agents that came before this one leads."""
        self._connections: dict[Agent, Connection] = {}
        self._all: list[Connection] = []
        self._creating: LogEntry | None = None
        self._has_begun = False
        self._renewing = False
        self._beats = 0
        self._num_looks = 0
        self._is_looking = self._is_confirmed = False
        """Whether a notice was confirmed since the last look for them began."""

    # ---- its life -----------------------------------------------------------------------

    def lead(self, entry: LogEntry) -> None:
        """Begin: the claim was recorded."""
        env = self._env
        self.leadership = env.components.leadership(
            entry, env.scenario.rules, env.scenario.liveness, self._now(), env.world.rng
        )
        self._term = entry.term
        self.term = env.components.term(self.leadership, self, env.scenario.show_s)
        mount = self.host.mount
        folder = env.components.folder(entry.term, NodeFiles(env.shared, mount))
        args = (env.shared, folder, mount, self.process, self.term.end_term)
        self._files = LeadersFiles(*args)
        self._has_begun = True
        self._round = entry.index
        self.term.handle(self.leadership.start_leading)
        early, self._early = self._early, []
        for attempt in early:
            self._greet(attempt)
        self._tick()
        self._watch()
        self._show()
        self._look_for_notices()
        self._env.world.after(_READMIT_EVERY_S, self.process, self._readmit)

    def stop(self) -> None:
        """Lead no more, because this node leaves."""
        if self.leads:
            self.term.handle(self.leadership.notice_confirmed, self.endpoint.task)
            self.term.end_term()
            self._files.remove_confirmed()
        self.disconnect_all()

    def disconnect_all(self) -> None:
        """Stop listening, and let go of everybody; see `Executor`."""
        if self.is_open and self._has_begun:
            self._env.monitor.fenced += self.leadership.fenced and not self.agent.over
        self.is_open = False
        for connection in self._all:
            connection.close(SERVER)
        self._connections.clear()

    @property
    def leads(self) -> bool:
        """Whether it leads still, as far as it knows."""
        return self.is_open and self._has_begun

    def _now(self) -> float:
        return self.host.clock()

    def _tick(self) -> None:
        if self.is_open:
            self.term.handle(self.leadership.tick, self._now())
            self._env.world.after(
                self.leadership.liveness.heartbeat_interval_s, self.process, self._tick
            )

    def _watch(self) -> None:
        if self.is_open:
            self.host.register.look_for_number(self.process, self._looked, self._blind)

    def _looked(self, number: int) -> None:
        self.term.handle(self.leadership.log_advanced, number)
        self._env.world.after(self._env.scenario.look_s, self.process, self._watch)

    def _blind(self, why: Exception) -> None:
        self._env.world.after(self._env.scenario.look_s, self.process, self._watch)

    # ---- duties -------------------------------------------------------------------------

    def _show(self) -> None:
        if not self.term.is_over:
            self.term.show(self._env.world.now)
            self._env.world.after(_SHOW_EVERY_S, self.process, self._show)

    def _readmit(self) -> None:
        if not self.term.is_over:
            self.term.readmit()
            self._env.world.after(_READMIT_EVERY_S, self.process, self._readmit)

    def _look_for_notices(self, number: int = 0) -> None:
        if not self.term.is_over and number == self._num_looks:
            self._num_looks += 1
            self._is_looking, self._is_confirmed = True, False
            self._files.claim_notices(self._claimed)

    def _claimed(self, notices: Mapping[str, float]) -> None:
        self._is_looking = False
        self.term.handle(self.leadership.notices_claimed, notices)
        pause = 0.0 if self._is_confirmed else self._env.scenario.look_s
        self._env.world.after(pause, self.process, self._look_for_notices, self._num_looks)

    def _confirm(self, name: str) -> None:
        """Let a notice be removed, with a look that begins now or right after the present one."""
        self._files.confirm(name)
        self._is_confirmed = True
        if not self._is_looking:
            self._env.world.after(0.0, self.process, self._look_for_notices, self._num_looks)

    # ---- agents -------------------------------------------------------------------------

    def accept(self, attempt: Attempt) -> None:
        """Somebody connects."""
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
        """A message came over one of the connections."""
        if not self.is_open:
            return
        if isinstance(message, Agent):
            self._admit(message, connection)
        elif self._connections.get(connection.peer) is connection:
            self.term.handle(self.leadership.received, connection.peer, message, self._now())

    def _admit(self, agent: Agent, connection: Connection) -> None:
        old = self._connections.get(agent)
        effects = self.leadership.connected(agent, self._now())
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
            why = "its connection closed"
            self.term.handle(self.leadership.disconnected, agent, why, self._now())

    # ---- effects ------------------------------------------------------------------------

    def carry_out(self, effect: Effect) -> None:
        """See `Executor`."""
        knows_over = self.leadership.fenced
        self._env.shared.monitor.acts(self._term, effect, knows_over=knows_over)
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
            case Append(entry):
                self._creating = entry
                self._create()
            case Announce():
                self._announce(effect)
            case Postpone(delay_s):
                env.slurm.postponed_until = env.world.now + delay_s
            case ClearHolds(tasks):
                env.monitor.restarted(tasks, self.leadership.run)
                env.clear_holds(tasks)
            case Note("excluded", fields):
                env.monitor.excluded(str(fields["host"]), int(str(fields["hosts_left"])))
            case Exclude(hosts, _):
                env.slurm.excluded.update(hosts)
            case QueryTasks():
                env.slurm.query_tasks(self.process, self._slurm_says)
            case RemoveNotice(name):
                self._confirm(name)

    def _send(self, send: Send) -> None:
        kind = send.message["type"]
        if kind == "stop" and send.agents:
            self._env.told_to_stop(self._round, send.message["reason"])
        elif kind == "checkpoint_request" and send.agents and send.message["request"]:
            request = CheckpointRequest(**send.message["request"])
            if request.confirmed and not request.released:
                self._env.confirmed(self._round, request)
        for agent in self._connections if send.agents is None else send.agents:
            self._send_to_agent(agent, send.message)

    def _send_to_agent(self, agent: Agent, message: dict[str, Any]) -> None:
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
            self.term.handle(self.leadership.renewed)

    def _announce(self, announce: Announce) -> None:
        self._env.monitor.announced(self.endpoint, announce)
        self._round = announce.entry.index
        for agent, place in self._env.components.places(announce):
            self._send_to_agent(agent, place_message(announce, agent, place))

    def _create(self) -> None:
        if self._creating is not None:
            self.host.register.create(self.process, self._creating, self._created)

    def _created(self, outcome: bool | None) -> None:
        if outcome is None:
            self._env.world.after(_RETRY_S, self.process, self._create)
            return
        self._creating = None
        if outcome:
            self.term.handle(self.leadership.appended)
        else:
            self.term.handle(self.leadership.refused)

    def _slurm_says(self, view: dict[str, TaskState] | None) -> None:
        if self.is_open:
            self.term.handle(self.leadership.slurm_answered, view, self._now())

"""The agent's adapter in the simulation: a `FollowerState`, and the workers that it is for.

What the node's worker and the leader tell each other goes through the product's own
`hpc_elastic.agent.worker_channel`, as through the session's `heard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpc_elastic.agent.worker_channel import WorkerChannel
from hpc_elastic.rendezvous.effects import (
    Claim,
    Connect,
    Deliver,
    Disconnect,
    Effect,
    Lead,
    PublishResult,
    QuerySlurm,
    ReadLog,
    SendToLeader,
)
from hpc_elastic.rendezvous.log_entry import Agent, Failure, LogEntry, claim
from hpc_elastic.rendezvous.session import SaveProposal, SessionState
from simulation.attempt import Attempt
from simulation.leader import Leader
from simulation.network import CLIENT, Connection
from simulation.rank import Rank
from simulation.scenario import CONNECT_TIMEOUT_S
from simulation.training import Work
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.simulator import Simulator

_TICK_S = 0.25
"""How often an agent without a leader wakes up."""
_LINGER_S = 1.0
"""A leader's process stays this long after the run's end, or its own, to tell everybody."""
_LOOKS_EVERY_S = 0.1
_HANDLED_S = 0.02
"""A script's own handler of SIGTERM has exited after so long."""


def _sleep_not(seconds: float) -> None:
    """Return at once: what is written to a simulated page is seen by everybody."""


class AgentProcess:
    """One attempt of one task."""

    def __init__(self, sim: Simulator, host: Node) -> None:
        self.sim = sim
        self.host = host
        self.process = Process()
        self.me = Agent(host.task, host.attempt, host.slot, host.hostname, host.nproc)
        self.over = False
        """Whether it was told to go, or that the run has ended."""
        self.work: Work | None = None
        self.rank: Rank | None = None
        """Its worker, once that has started."""
        self.leaders: list[Leader] = []
        self._heard = SessionState()
        self._boundaries: WorkerChannel | None = None
        self._will_look = False
        self.busy_until = 0.0
        """Its own thread looks at no page before this time."""
        self._stopping = False
        self._has_failed = False
        self._is_noticed = False
        self._connection: Connection | None = None
        self._attempt: Attempt | None = None
        self._said_dead: set[str] = set()
        """Tasks of which Slurm has said that they do not run."""
        self._following = sim.parts.following(self.me, sim.scenario.liveness, host.clock())

    def start(self) -> None:
        """Ask for a place in the next round."""
        self._do(self._following.join())
        self._tick()

    def end(self, silently: bool = False) -> None:
        """The process ends: on its own, by a crash, or (``silently``) together with its node."""
        self.process.alive = False
        if self.work is not None:
            self.work.leave(self, victims=not silently)
            self.sim.monitor.stopped(self.me)
            self.work = self.rank = None
        rng = self.sim.world.rng
        lossy = self.sim.scenario.lose_at_break and not self.over
        self.sim.network.crashed(self.process, silently, lambda: lossy and rng.random() < 0.5)

    def leave(self, why: str) -> None:
        """Tell the leader that this node goes."""
        self._say({"type": "leave", "why": why})

    # ---- notice -------------------------------------------------------------------------

    def notice(self, left_s: float) -> None:
        """The node has to be left within so long; nothing is lost if its worker made no step."""
        if self.over:
            return
        self._is_noticed = True
        self._do(self._following.notice("signal", left_s, self.host.clock()))
        self._obey()

    def _obey(self) -> None:
        if self.rank is None or (self.work is not None and self.rank.at == self.work.start):
            self.leave_now()
        elif self.sim.scenario.exits_at_sigterm:
            self.sim.world.after(_HANDLED_S, self.process, self.ended, self.work, 0)

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
            self.sim.world.after(pause, self.process, self._tick)

    # ---- the connection -----------------------------------------------------------------

    def received(self, connection: Connection, message: Any) -> None:
        """The leader, or one that was, says something."""
        if isinstance(message, Attempt):
            self._greeted(connection, message)
        elif connection is self._connection:
            if message["type"] == "notice":
                self.sim.asked_to_leave(self.me)
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

    def _connect(self, record: LogEntry) -> None:
        self._attempt = attempt = Attempt(self, record.leader)
        world = self.sim.world
        world.after(self.sim.network.delay(), None, attempt.reach)
        world.after(CONNECT_TIMEOUT_S, self.process, attempt.fail, "timed out", False)

    def _hang_up(self) -> None:
        if self._attempt is not None:
            self._attempt.abandon()
        if self._connection is not None:
            self._connection.close(CLIENT)
        self._attempt = self._connection = None

    def _say(self, message: dict[str, Any]) -> None:
        if self._connection is None:
            return
        if message["type"] == "beat":
            message = {**message, "progress": self._progress()}
        self._connection.send(CLIENT, message)

    def _progress(self) -> dict[str, Any]:
        total = self.sim.scenario.training.total_steps
        return {"step": self.rank.at, "total": total} if self.rank is not None else {}

    # ---- effects ------------------------------------------------------------------------

    def _do(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if type(effect) is SendToLeader:
                self._say(effect.message)
            else:
                self._do_rarely(effect)

    def _do_rarely(self, effect: Effect) -> None:
        sim = self.sim
        match effect:
            case Deliver(message):
                self._told(message)
            case ReadLog():
                self.host.register.look(self.process, self._looked, self._blind)
            case Connect(record):
                self._connect(record)
            case Disconnect():
                self._hang_up()
            case QuerySlurm(task):
                sim.slurm.inquire(self.process, task, lambda runs: self._slurm_says(task, runs))
            case Claim():
                self._claim(effect)
            case PublishResult(record):
                sim.monitor.published(record)
            case Lead(record):
                sim.world.note(self.host.task, "leads", record)
                self.leaders[-1].lead(record)

    def _looked(self, number: int, record: LogEntry | None, lease: int | None) -> None:
        self._do(self._following.looked(number, record, lease, self.host.clock()))

    def _blind(self, why: Exception) -> None:
        self._do(self._following.blind(str(why), self.host.clock()))

    def _slurm_says(self, task: str, runs: bool | None) -> None:
        if runs is False:
            self._said_dead.add(task)
        self._do(self._following.slurm_says(task, runs, self.host.clock()))

    def _claim(self, wanted: Claim) -> None:
        if self._goes_by_the_lease(wanted):
            self.host.register.check_claim(wanted, self.sim.scenario.liveness)
        endpoint = self.sim.new_endpoint(self.host)
        self.leaders.append(Leader(self, endpoint))
        number, before, unseen = wanted.number, wanted.before, wanted.unseen
        record = claim(number, before, endpoint, self.sim.world.now, unseen=unseen)
        self.sim.world.note(self.host.task, "claims", record)
        self._put(record)

    def _goes_by_the_lease(self, wanted: Claim) -> bool:
        """Tell whether nothing but the leader's silence speaks for its death."""
        number, before = wanted.number - 1, wanted.before
        if before is None or before.number != number or before.is_vacant:
            return False
        return wanted.unseen and before.leader.task not in self._said_dead

    def _put(self, record: LogEntry) -> None:
        self.host.register.create(self.process, record, lambda done: self._claimed(record, done))

    def _claimed(self, record: LogEntry, done: bool | None) -> None:
        if done is None and self.sim.world.rng.random() < 0.5:
            self._put(record)
            return
        leader = self.leaders[-1]
        self._do(self._following.claimed(record if done else None, self.host.clock()))
        if not leader.leads:
            leader.let_go()

    # ---- the agent's own thread ---------------------------------------------------------

    def _told(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind not in ("news", "waiting"):
            self.sim.world.note(self.host.task, "told", message)
        match kind:
            case "round":
                self._begin(message)
            case "stop":
                self._stop()
            case "hold" | "propose" | "confirm":
                self._heard.hear(message)
                self.touch()
            case "noticed" if message["reason"] == "asked":
                self.sim.world.after(0.001, self.process, self._obey)
                in_time = float(message["left_s"])
                self.sim.world.after(in_time, self.process, self.leave_now)
            case "leaving":
                self._leave_the_run()
            case "end":
                self.sim.monitor.told_the_end(self.me, message["status"], self.sim.register.records)
                self._go(None)
            case "give back":
                self._go(message["delay_s"])

    def _begin(self, message: dict[str, Any]) -> None:
        record = self.sim.monitor.accepted(self.me, message)
        self.work, self.rank = self.sim.work_of(record, self.me), None
        self._heard, self._boundaries = SessionState(), None
        self._has_failed = self._stopping = False
        delay = 0.1 + 0.5 * self.sim.world.rng.random()
        self.sim.world.after(delay, self.process, self._enter, self.work)

    def _enter(self, work: Work) -> None:
        if self.work is work and not self._stopping and not self.over:
            self.rank = work.enter(self)
            self._boundaries = WorkerChannel(
                self, [self.rank.page], sleep=_sleep_not, can_save_at=self.sim.parts.can_save_at
            )
            self.touch()

    def _stop(self) -> None:
        if self.work is None or self._stopping or self.over:
            return
        self._stopping = True
        self.work.leave(self, victims=True)
        world = self.sim.world
        delay = self.sim.scenario.longest_stop_at(world.now) * world.rng.random() ** 2
        world.after(delay, self.process, self._stopped)

    def _stopped(self) -> None:
        if self.over:
            return
        self.work, self.rank, self._stopping = None, None, False
        self.sim.monitor.stopped(self.me)
        self._do(self._following.join())

    def _go(self, away_s: float | None) -> None:
        """Leave: the run has ended (None), or the node goes back to the queue for a while."""
        self.over = True
        delay = _LINGER_S if any(leader.leads for leader in self.leaders) else 0.2
        self.sim.world.after(delay, self.process, self.host.left, away_s)

    def _leave_the_run(self) -> None:
        """The session is over, and with it what it led; the workers are stopped after that."""
        self.over = True
        for leader in self.leaders:
            leader.stop()
        if self.work is not None:
            self.work.leave(self, victims=True)
        world = self.sim.world
        delay = self.sim.scenario.longest_stop_at(world.now) * world.rng.random() ** 2
        world.after(0.05 + delay, self.process, self.host.left, self.host.away_s())

    # ---- the workers --------------------------------------------------------------------

    def touch(self) -> None:
        """Something has changed on the worker's page, or in what the leader asks."""
        if not self._will_look:
            self._will_look = True
            busy_s = max(0.0, self.busy_until - self.sim.world.now)
            delay = _LOOKS_EVERY_S * self.sim.world.rng.random()
            self.sim.world.after(busy_s + delay, self.process, self._look)

    def _look(self) -> None:
        self._will_look = False
        if self.sim.world.now < self.busy_until:
            self.touch()
            return
        if self._boundaries is None or self.work is None or not self._is_at(self.work):
            return
        self._boundaries.look(self.host.clock())
        if self.proposal is not None and not self.proposal.confirmed:
            self.touch()

    @property
    def hold(self) -> int:
        """See `hpc_elastic.rendezvous.session.Session`, as for what follows."""
        return self._heard.hold

    @property
    def proposal(self) -> SaveProposal | None:
        """The step that may have to be saved."""
        return self._heard.proposal

    def boundary(self, step: int, *, held: int) -> None:
        """The worker has announced a checkpoint."""
        self._do(self._following.report("boundary", step=step, held=held))

    def answer(self, number: int, *, ok: bool, passed: int | None, rate: float) -> None:
        """The answer to a proposal."""
        self._do(self._following.report("answer", number=number, ok=ok, passed=passed, rate=rate))

    def want_checkpoint(self) -> None:
        """The worker asks for a checkpoint of the group."""
        self._do(self._following.report("want"))

    def ended(self, work: Work, exit_code: int) -> None:
        """The worker of this node has ended by itself, and not with an error."""
        if not self._is_at(work) or self.rank is None:
            return
        worker = self.rank.page.read()
        if not worker.returned:
            work.leave(self, victims=True)
        self.sim.world.note(self.host.task, "returned" if worker.returned else "exits", exit_code)
        if self.sim.parts.has_succeeded(exit_code, worker):
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
            self.sim.monitor.own_failures += 1
        work.leave(self, victims=True)
        failure = Failure(
            self.me.task, self.me.host, 0, 0, self.sim.world.now, message, exit_code=1
        )
        self.sim.world.note(self.host.task, "failed", message)
        self._do(self._following.report("failed", failures=[failure.to_json()]))

    def _is_at(self, work: Work) -> bool:
        at = self.work is work and not self._stopping
        return at and not self._has_failed and not self.over

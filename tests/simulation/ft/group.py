"""A replica group: a node, its server (as `ft.manager_server`), and the life of its worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_elastic.ft.messages import (
    NO_QUORUM,
    CancelRequest,
    CheckpointBeforeLeave,
    LeaveGranted,
    LeaveNotice,
    Message,
    QuorumAborted,
    QuorumRequest,
    QuorumResults,
    ReplicaStatus,
    Shutdown,
    SwitchVote,
    WorkersLost,
)
from hpc_elastic.rendezvous.log_entry import Agent
from simulation.ft.worker import Worker
from simulation.network import CLIENT, Connection, Host
from simulation.world import Process

if TYPE_CHECKING:
    from simulation.ft.simulator import Simulator


@dataclass(frozen=True)
class AskedToLeave:
    """A leader tells a node's agent that the node is to be left."""


@dataclass(frozen=True)
class Noticed:
    """The agent confirms it."""


_LOCAL_S = 0.0003
_RECONNECT_S = 0.05
_STOPPED_S = 0.6


class Server:
    """One life of a group's server: outlives workers, and keepers."""

    def __init__(self, group: Group) -> None:
        self.process = Process()
        self.up_since = math.inf
        self.has_left = False
        self.connection: Connection | None = None
        self.notice_at: float | None = None
        self._group = group
        group.num_boots += 1
        self.agent = Agent(group.name, group.num_boots, group.slot, f"host{group.slot}", 1)
        self._world = group.sim.world
        self._place: Any = None
        self._is_aborted = False
        self._ask: QuorumRequest | None = None
        self._workers_number = 0
        self._num_asks = 0
        self._lost: str | None = None
        self._is_done = False

    @property
    def host(self) -> Host:
        """The node that it is on."""
        return self._group

    # ---- the keeper -----------------------------------------------------------------------

    def connect(self) -> None:
        """Look for a keeper, until there is one."""
        keeper = self._group.sim.coordinator.reachable_from(self._group)
        if keeper is None:
            self._world.after(_RECONNECT_S, self.process, self.connect)
            return
        self.connection = keeper.accept(self)
        self.up_since = self._world.now
        place = self._place
        if place is not None and self._group.sim.parts.says_here:
            self._tell(
                ReplicaStatus(
                    place.quorum_id,
                    place.replica_rank,
                    place.replica_world_size,
                    0,
                    self._is_aborted,
                )
            )
        else:
            self._tell(ReplicaStatus(NO_QUORUM, 0, 0, 0, is_aborted=False))
        self._tell_again()

    def _tell_again(self) -> None:
        if self._lost is not None:
            self._tell(WorkersLost(self._lost))
        if self.notice_at is not None:
            self._tell(LeaveNotice(self.notice_at - self._world.now))
        if self._is_done:
            self._tell(Shutdown())
        if self._ask is not None:
            self._tell(self._ask)

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection is self.connection:
            self.connection, self.up_since = None, math.inf
            self._world.after(_RECONNECT_S, self.process, self.connect)

    def received(self, connection: Connection, message: Any) -> None:
        """The keeper says something."""
        if connection is not self.connection:
            return
        if isinstance(message, AskedToLeave):
            self._asked_to_leave()
        elif isinstance(message, QuorumResults):
            self._placed(message)
        elif isinstance(message, QuorumAborted):
            self._break(message)
        else:
            if isinstance(message, LeaveGranted):
                self._ask, self.has_left = None, True
                self._group.farewell()
            elif isinstance(message, CheckpointBeforeLeave):
                self._ask = None
            self._to_worker(message)

    def _asked_to_leave(self) -> None:
        sim = self._group.sim
        sim.shared.monitor.heard((self._group.name,), self._world.now)
        if self.connection is not None:
            self.connection.send(CLIENT, Noticed())
        if self.notice_at is None:
            sim.faults.announce(self._group)

    def _placed(self, placements: QuorumResults) -> None:
        (place,) = placements.ranks
        if self._place is not None and place.quorum_id == self._place.quorum_id:
            return  # it asked again before it was told
        if self._ask is None:
            self._tell(QuorumAborted(place.quorum_id, "given up"))
            return
        if placements.number != self._ask.number:
            return  # the keeper breaks that quorum when it hears of the later ask
        self._ask = None
        self._place, self._is_aborted = place, False
        self._to_worker(QuorumResults((place,), self._workers_number))

    def _break(self, aborted: QuorumAborted) -> None:
        place = self._place
        if place is not None and aborted.quorum_id == place.quorum_id and not self._is_aborted:
            self._is_aborted = True
            self._to_worker(aborted)

    def _tell(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(CLIENT, message)

    # ---- the worker -----------------------------------------------------------------------

    def expect(self) -> None:
        """Another worker is started."""
        self._place, self._ask, self._lost = None, None, None
        self._is_aborted = self._is_done = False

    def said(self, worker: Worker, message: Message) -> None:
        """The worker says something."""
        if worker is not self._group.worker or not worker.process.alive:
            return
        match message:
            case QuorumRequest():
                self._num_asks += 1
                self._workers_number = message.number
                self._ask, self._lost = replace(message, number=self._num_asks), None
                self._tell(self._ask)
            case CancelRequest():
                self._ask = None
                self._tell(message)
            case QuorumAborted():
                self._report(message)
            case SwitchVote():
                self._tell(message)
            case Shutdown():
                self._is_done = True
                self._tell(message)

    def _report(self, aborted: QuorumAborted) -> None:
        place = self._place
        if place is not None and place.quorum_id == aborted.quorum_id and not self._is_aborted:
            self._is_aborted = True
            self._tell(aborted)

    def lose(self, why: str) -> None:
        """The worker is dead or stopped."""
        if self._is_done or self.has_left:
            return
        self._lost = why
        self._tell(WorkersLost(why))
        if self._place is not None:
            self._break(QuorumAborted(self._place.quorum_id, why))

    def goes_on(self) -> None:
        """The worker was stopped, and is not any more."""
        if self._ask is not None and self._lost is not None:
            self._lost = None
            self._tell(self._ask)

    def give_notice(self, left_s: float) -> None:
        """The node is to be left."""
        self.notice_at = self._world.now + left_s
        self._tell(LeaveNotice(left_s))

    def _to_worker(self, message: Message) -> None:
        worker = self._group.worker
        if worker is not None:
            self._world.after(_LOCAL_S, worker.process, worker.heard, message)


class Group(Host):
    """A node of the array, and what runs there."""

    def __init__(self, sim: Simulator, slot: int) -> None:
        super().__init__(slot)
        self.sim = sim
        self.name = f"r{slot}"
        self.server: Server | None = None
        self.worker: Worker | None = None
        self.is_over = False
        """It does not come back."""
        self.step_s = sim.scenario.step_s * sim.world.rng.choice((1.0, 1.0, 1.0, 3.0))
        self.num_boots = 0
        self._lives = 0

    @property
    def up_since(self) -> float:
        """Since when it has been connected to a keeper."""
        return math.inf if self.server is None else self.server.up_since

    @property
    def takes_part(self) -> bool:
        """Whether its worker lives, and is not stopped, or done."""
        worker, server = self.worker, self.server
        if worker is None or server is None or server.has_left or self.is_over:
            return False
        return self.up and worker.process.alive and not worker.process.paused

    @property
    def is_done(self) -> bool:
        """Whether its worker ends, or has ended, in peace."""
        return self.worker is not None and self.worker.process.alive and self.worker.ends_next

    # ---- a node ---------------------------------------------------------------------------

    def boot(self) -> None:
        """The node starts."""
        if self.up or self.is_over:
            return
        self.up = True
        self.server = Server(self)
        self.server.connect()
        self.start_worker()

    def start_worker(self) -> None:
        """Start a worker; it imports for a while."""
        if self.server is None or not self.server.process.alive or self.server.has_left:
            return
        if self.worker is not None and self.worker.process.alive:
            return
        self._lives += 1
        self.server.expect()
        self.worker = worker = Worker(self, self._lives)
        self.sim.world.note(self.name, "starts a worker")
        self.sim.world.after(0.2 + self.sim.world.rng.random(), worker.process, worker.begin)

    def kill_worker(self) -> None:
        """The worker dies; the server sees it."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.alive = False
        worker.died()
        self.sim.world.after(0.005, server.process, server.lose, "its worker is dead")

    def crash(self, silently: bool) -> None:
        """The node dies."""
        worker, server = self.worker, self.server
        if not self.up or server is None:
            return
        self.up = False
        if worker is not None and worker.process.alive:
            worker.process.alive = False
            if not silently:
                worker.died()
        server.process.alive = False
        self.sim.network.crashed(server.process, silently, lambda: False)
        self.sim.coordinator.host_died(self, silently)
        if silently:
            self.sim.world.after(5.0, None, self.sim.coordinator.silent, self, server)

    def pause_worker(self, stopped: bool) -> None:
        """The worker is stopped, or (so that nobody sees it) holds the interpreter's lock."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        worker.process.paused = True
        if stopped:
            self.sim.world.after(_STOPPED_S, server.process, self._see_stopped, worker)

    def _see_stopped(self, worker: Worker) -> None:
        if worker is self.worker and worker.process.alive and worker.process.paused:
            assert self.server is not None
            self.server.lose("its worker is stopped")

    def resume_worker(self) -> None:
        """The worker goes on."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.paused:
            return
        worker.process.resume(timers_last=self.sim.world.rng.random() < 0.5)
        self.sim.world.after(0.1, server.process, server.goes_on)

    # ---- its end --------------------------------------------------------------------------

    def farewell(self) -> None:
        """The keeper has let the group go."""
        self.sim.world.after(0.05, None, self.leave)

    def dismissed(self) -> None:
        """The keeper lets the group go: it says so, and that has not come yet."""
        others = [
            g.worker.state for g in self.sim.groups
            if g is not self and g.takes_part and g.worker is not None
        ]  # fmt: skip
        if self.worker is not None:
            self.sim.monitor.farewell(self.worker, others)

    def leave(self) -> None:
        """Its node is left, for good."""
        self.is_over = True
        self.crash(silently=False)

    def from_worker(self, worker: Worker, message: Message) -> None:
        """The worker writes to its socket."""
        self.sim.world.note(worker.name, "says", message)
        server = self.server
        if server is not None:
            self.sim.world.after(_LOCAL_S, server.process, server.said, worker, message)

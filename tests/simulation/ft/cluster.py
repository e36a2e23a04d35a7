"""Replica groups in virtual time: nodes, their manager servers and relays, and spares.

The state of each server and relay is the real `ft.manager_state`; models replace its sockets. What
a run's leader does for its replicas is a model too: it starts the workers of a group again when one
of them has failed, and completes a group with a spare when a node is lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hpc_elastic.ft.lighthouse_state import LighthouseState
from hpc_elastic.ft.manager_client import QuorumSteps
from hpc_elastic.ft.manager_state import ManagerState, RemoteNodes
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    LeaveGranted,
    Message,
    QuorumResult,
    RunReport,
    StateMismatch,
    to_frame,
    unpack,
)
from hpc_elastic.ft.quorum import CommittedProgress
from hpc_elastic.ft.state_check import Mismatch
from hpc_elastic.rendezvous.log_entry import Agent
from hpc_elastic.rendezvous.term import Gate
from simulation.ft.invariants import Kind, Monitor, Scenario
from simulation.ft.workers import LOCAL_S, Doing, Meeting, Placement, Worker
from simulation.scenario import SLOWEST_FILES_S
from simulation.storage import SharedFiles, SharedMonitor, Storage
from simulation.world import CLIENT, SERVER, Connection, Host, Network, Process, World


@dataclass(frozen=True)
class Components:
    """The classes and rules of the protocol, which a test replaces to plant a bug."""

    keeper: type[LighthouseState] = LighthouseState
    steps: type[QuorumSteps] = QuorumSteps
    gate: type[Gate] = Gate
    """Passes the effects of a keeper's leader."""
    fenced_files: bool = True
    """Whether a rename out of a folder fails that another leader has renamed."""
    terms_rise: bool = True
    """Whether each keeper has a higher term than the one before."""
    manager: type[ManagerState] = ManagerState
    """The state of a manager server, or of a relay."""
    relays: type[RemoteNodes] = RemoteNodes
    """The relays of a group, as its server sees them."""
    progress: type[CommittedProgress] = CommittedProgress
    conclude: Callable[[Sequence[Sequence[int]], Sequence[str]], Mismatch] = Mismatch.of
    """Draws the conclusion from the digests of all members."""
    marks_corrupted: bool = True
    """Whether a corrupted state gets a version of its own."""
    waits_in_runs: bool = True
    """Whether a worker of a run leaves it to the leader to end its wait for a quorum."""
    counts_failed_heals: bool = True
    """Whether a request carries the number of heals in a row that have failed."""


SOUND = Components()
"""The product."""


class Keeper(Protocol):
    """A keeper of the quorum, as groups use it (`simulation.ft.lighthouse`)."""

    @property
    def host(self) -> Host:
        """The node that it is on."""

    def accept(self, server: Server) -> Connection:
        """Connect a group."""


class Keepers(Protocol):
    """The present keeper, and the elections of the next ones."""

    @property
    def keeper(self) -> Keeper | None:
        """The present keeper."""

    def reachable_from(self, node: Node) -> Keeper | None:
        """Return the keeper, or None if there is none or a partition separates it."""

    def host_died(self, node: Node, silently: bool) -> None:
        """A node is dead, and so is a keeper on it."""

    def timed_out(self, node: Node, server: Server | None = None) -> None:
        """A node was out of reach for the keeper's timeout."""


class Env:
    """The objects that all groups of one schedule share.

    Args:
        seed: The seed of the schedule.
        world: Clock and random generator.
        scenario: The schedule's parameters.
        components: The classes under test.
        monitor: Checks the invariants.
    """

    keepers: Keepers
    """Set before any group starts."""

    def __init__(
        self, seed: int, world: World, scenario: Scenario, components: Components, monitor: Monitor
    ) -> None:
        self.seed = seed
        self.catches_up = seed % 3 == 0 and scenario.kind is not Kind.LASTING
        """Whether states are large: a replica takes one over beside the training."""
        self.world = world
        self.scenario = scenario
        self.components = components
        self.monitor = monitor
        self.num_cuts = 0
        """Partitions so far."""
        self.network = Network(world, scenario.longest_delay_s)
        self.storage = Storage(world, random.Random(f"storage {seed}"), SLOWEST_FILES_S)
        shared_monitor = SharedMonitor(monitor.check, self.is_named_alive)
        self.shared = SharedFiles(self.storage, shared_monitor, components.fenced_files)
        num = scenario.num_groups * scenario.num_nodes
        self.nodes = [Node(self, slot) for slot in range(num + scenario.num_spares)]
        self.spares = self.nodes[num:]
        """Nodes that are of no group."""
        self.groups = [
            Group(self, index, self.nodes[index : num : scenario.num_groups])
            for index in range(scenario.num_groups)
        ]
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._entries = 0

    def meeting(self, place: QuorumResult, group_rank: int) -> Meeting:
        """Return the process group of a quorum over the workers of one rank."""
        key = place.quorum_id, group_rank
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(place, self)
        return meeting

    def next_entry(self) -> int:
        """Return the index of the log entry that places a group."""
        self._entries += 1
        return self._entries

    def group(self, name: str) -> Group | None:
        """Return the group whose first node has this name."""
        return next((g for g in self.groups if g.name == name), None)

    def is_named_alive(self, name: str, since: float = math.inf) -> bool:
        """Return whether a notice names a live node that has represented a group ``since`` then.

        Other nodes have no keeper here, so a notice for them matches none.
        """
        group = self.group(name)
        server = None if group is None else group.server
        if server is None or not server.is_first:
            return False
        return server.first_since <= since and server.node.up

    def watch_lost_member(
        self, lost: Worker, silent_s: float = 0.0, *, is_node_silent: bool = False
    ) -> None:
        """Check that a lost member does not hold up others for long.

        Args:
            lost: It is dead, or stopped.
            silent_s: Time that it takes to detect that, beside the messages.
            is_node_silent: Its node was lost, and closed no connection.
        """
        quorum_id, keeper = lost.steps.quorum_id, self.keepers.keeper
        if quorum_id == NO_QUORUM or keeper is None or lost.link is not lost.group.link_of(lost):
            return
        since, cuts, stopped_since = self.world.now, self.num_cuts, lost.stopped_since
        servers = {g: [n.server for n in g.nodes if n.server is not None] for g in self.groups}
        is_cut = self.network.is_any_cut([keeper.host, *(n for g in self.groups for n in g.nodes)])
        if lost.group.up_since > since or is_cut or not servers[lost.group][0].process.alive:
            return  # only a time-out of the network shows that
        waiting = [w for g in self.groups for w in g.workers]

        def is_silent(group: Group) -> bool:
            return any(server.is_silent for server in servers[group])

        def is_held_up(worker: Worker) -> bool:
            is_own = worker.group is lost.group
            return (
                worker.process.alive
                and not worker.process.paused
                and worker.is_settled
                and worker.steps.quorum_id == quorum_id
                and worker.doing in (Doing.CONFIGURING, Doing.HEALING, Doing.REDUCING)
                and worker.group.up_since <= since
                and (is_own or not is_silent(worker.group))
            )

        def check() -> None:
            if self.keepers.keeper is not keeper or self.num_cuts != cuts:
                return
            if lost.stopped_since != stopped_since:
                return  # it has continued
            if not is_node_silent and is_silent(lost.group):
                return  # a node has been lost since
            held_up = [w.name for w in waiting if is_held_up(w)]
            self.monitor.check(not held_up, "a lost member holds up others", lost.name, held_up)

        bound_s = silent_s + self.scenario.lost_bound_s
        self.world.after(bound_s, None, check)


@dataclass(frozen=True)
class NoticeSent:
    """The notice of a leader to a node's agent."""


@dataclass(frozen=True)
class NoticeConfirmed:
    """The agent's answer."""


_RECONNECT_S = 0.05
_STOPPED_S = 0.6
_LOOK_S = 0.03
_SILENCE_S = 5.0
_STOP_S = 1.5
"""Longest time until a run's leader has stopped the workers of a group."""


# ---- a node: its server or relay, and the connections of its workers


class LocalPort:
    """The server's end of a worker of its node; see `manager_state.Worker`."""

    pid = 1

    def __init__(self, server: Server, worker: Worker) -> None:
        self.rank: int | None = None
        self.is_open = True
        self._server = server
        self._worker = worker

    def send(self, message: Message) -> None:
        """Send a message to the worker."""
        if self.is_open:
            worker = self._worker
            self._server.world.after(
                LOCAL_S, worker.process, worker.message_received, message
            )  # fmt: skip

    def close(self) -> None:
        """Drop the connection."""
        if self.is_open:
            self.is_open = False
            worker = self._worker
            self._server.world.after(LOCAL_S, worker.process, worker.server_lost)

    def is_stopped(self, now: float) -> bool | None:
        """Return whether the process is stopped for long."""
        since = self._worker.stopped_since
        return False if since is None else now - since >= _STOPPED_S or None

    def receive(self, message: Message) -> None:
        """Pass a message of the worker to the server."""
        if self.is_open:
            self._server.state.on_worker_message(self, message)

    def on_worker_end(self) -> None:
        """The worker's process has ended."""
        if self.is_open:
            self.is_open = False
            self._server.state.on_worker_disconnect(self, "its worker is dead")


_TRIES, _RETRY_S = 20, 0.25


class RelayClient:
    """A relay's connection to the server of its group; see `manager_server.Relay`."""

    def __init__(self, server: Server, first: Server, entry: int) -> None:
        self.process = server.process
        self.host = server.host
        self._server = server
        self._first = first
        self._hello = {"entry": entry, "host": server.node.name}
        self._unsent: list[dict[str, Any]] = []
        self._connection: Connection | None = None
        self._is_open = True
        server.world.after(server.env.network.delay(), self.process, self._connect, _TRIES)

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame."""
        if self._connection is None:
            self._unsent.append(frame)
        else:
            self._connection.send(CLIENT, frame)

    def send_message(self, rank: int, message: Message) -> None:
        """Queue the message of a worker."""
        self.send({**to_frame(message), "rank": rank})

    def close(self) -> None:
        """End the connection."""
        self._is_open = False
        if self._connection is not None:
            self._connection.close(CLIENT)

    def reset(self) -> None:
        """Lose the connection."""
        if self._connection is not None:
            self._connection.reset()

    def _connect(self, tries_left: int) -> None:
        if not self._is_open:
            return
        first, network = self._first, self._server.env.network
        if first.process.alive and first.node.up and not network.is_cut(self.host, first.host):
            self._connection = network.connect(self, RelayedNode(first))
            for frame in (self._hello, *self._unsent):
                self._connection.send(CLIENT, frame)
        elif tries_left:
            self._server.world.after(_RETRY_S, self.process, self._connect, tries_left - 1)
        else:
            self._end_connection("it does not answer")

    def received(self, connection: Connection, frame: dict[str, Any]) -> None:
        """Handle a frame of the server."""
        if self._is_open:
            self._server.state.on_relayed(int(frame["rank"]), unpack(frame["message"]))

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        self._end_connection("the connection is lost")

    def _end_connection(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            self._server.state.on_relay_end(reason)


class RelayedNode:
    """The server's end of a relay's connection; see `transport.connection.ServerConnection`."""

    def __init__(self, server: Server) -> None:
        self.process = server.process
        self.host = server.host
        self._server = server
        self._connection: Connection | None = None
        self._is_known = False
        self._is_open = True

    def send(self, frame: dict[str, Any]) -> None:
        """Send a frame."""
        if self._is_open and self._connection is not None:
            self._connection.send(SERVER, frame)

    def close(self) -> None:
        """Close the connection."""
        self._end_connection("closed by the server")

    def abort(self, reason: str) -> None:
        """Drop the connection."""
        self._end_connection(reason)

    def received(self, connection: Connection, frame: dict[str, Any]) -> None:
        """Handle a frame of the relay; the first one is its hello."""
        if not self._is_open:
            return
        self._connection = connection
        relays = self._server.relays
        try:
            if self._is_known:
                relays.on_message(self, frame)
            else:
                self._is_known = True
                relays.on_connect(self, frame)
        except ValueError as e:
            self._server.world.log_event(self._server.node.name, "refuses a relay", e)
            self._end_connection(str(e))
        if frame.get("type") == "stopped":
            self._server.look_at_workers()

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        self._end_connection("the connection is lost")

    def _end_connection(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            if self._connection is not None:
                self._connection.close(SERVER)
            relays = self._server.relays
            self._server.world.after(0.0, self.process, relays.on_disconnect, self, reason)


class Server:
    """The manager server or relay of one boot of a node: it outlives workers and keepers.

    Attributes:
        first_since: Since when its node is the first of a group, which connects to the keeper;
            infinity if it is not.
        up_since: When it connected to the present keeper; infinity if it is not connected.
        relay: Its connection to the server of the group, if it is a relay.
    """

    def __init__(self, node: Node) -> None:
        self.process = Process()
        self.env = node.env
        self.world = node.env.world
        self.node = node
        self.host: Host = node
        self.first_since = math.inf
        self.is_silent = False
        """Its node is lost, and no other has noticed."""
        self.up_since = math.inf
        self.connection: Connection | None = None
        self.relay: RelayClient | None = None
        node.num_boots += 1
        self.agent = Agent(node.name, node.num_boots, node.slot, f"host{node.slot}", 1)
        components = node.env.components
        self.relays = components.relays()
        self.state = components.manager(
            node.name, self._send, relays=self.relays, clock=lambda: self.world.now
        )
        self.state.on_report = self._on_report
        self.relays.start(self.state)
        self._has_session = True
        self.state.on_connect()  # to the run's leader; only first nodes have a keeper

    # ---- the keeper -----------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Whether its node is the first of a group."""
        return self.first_since < math.inf

    def set_first(self, is_first: bool) -> None:
        """Let the node represent a group at the keeper, or not any more."""
        if is_first == self.is_first:
            return
        self.first_since = self.world.now if is_first else math.inf
        if is_first:
            self.connect()
        elif self.connection is not None:
            self.connection.close(CLIENT)
            self.connection, self.up_since = None, math.inf

    def connect(self) -> None:
        """Connect to a keeper, as soon as there is one."""
        if not self.is_first or self.connection is not None:
            return
        keeper = self.env.keepers.reachable_from(self.node)
        if keeper is None:
            self._has_session = False
            self.state.on_disconnect()
            self.world.after(_RECONNECT_S, self.process, self.connect)
            return
        self.connection = keeper.accept(self)
        self.up_since = self.world.now
        if not self._has_session:
            self._has_session = True
            self.state.on_connect()

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        if connection is self.connection:
            self.connection, self.up_since = None, math.inf
            self._has_session = False
            self.state.on_disconnect()
            self.world.after(_RECONNECT_S, self.process, self.connect)

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of the keeper."""
        if connection is not self.connection:
            return
        if isinstance(message, NoticeSent):
            self.env.shared.monitor.notice_received((self.node.name,), self.world.now)
            connection.send(CLIENT, NoticeConfirmed())
            if self.node.notice_at is None:
                self.node.give_notice(self.env.scenario.long_notice_s)
            return
        self.state.on_message(message)
        if isinstance(message, LeaveGranted) and self.node.group is not None:
            self.world.after(0.05, None, self.node.group.leave_nodes, self)

    def _send(self, message: Message) -> None:
        if self.connection is not None:
            self.world.log_event(self.node.name, "reports", message)
            self.connection.send(CLIENT, message)

    # ---- its workers ----------------------------------------------------------------------

    def expect(self, placement: Placement, entry: int, first: Server, rank: int) -> None:
        """Let the workers of this node connect, which are about to be started."""
        node, group = self.node, self.node.group
        if group is None or group.placement is not placement:
            return  # it has failed in the meantime

        def relay() -> RelayClient:
            self.relay = RelayClient(self, first, entry)
            return self.relay

        self.relay = None
        self.state.expect_workers(placement.size, entry, relay if first is not self else None)
        if node.notice_at is not None:  # the agent announces it to the new group
            self.state.announce_leave(node.notice_at - self.world.now)
        node.worker = worker = Worker(self.env, placement, rank, group, self.process)
        worker.link = LocalPort(self, worker)
        self.world.log_event(worker.name, "starts, a worker of", node.name)
        self.state.add_connection(worker.link)
        self.world.after(0.2 + self.world.rng.random(), worker.process, worker.connect)

    def look_at_workers(self) -> None:
        """Look soon whether workers are stopped, as the server does many times a second."""
        self.world.after(_LOOK_S, self.process, self.state.check_workers)

    def _on_report(self, mismatch: RunReport) -> None:
        assert isinstance(mismatch, StateMismatch)
        self.env.monitor.named(mismatch)


class Node(Host):
    """A node of the array: its server, and a worker if it is of a group."""

    def __init__(self, env: Env, slot: int) -> None:
        super().__init__(slot)
        self.env = env
        self.name = f"r{slot}"
        self.group: Group | None = None
        self.server: Server | None = None
        self.worker: Worker | None = None
        self.is_over = False
        """Whether it was left for good."""
        self.cannot_heal = False
        """Whether each state that comes to it is lost."""
        self.notice_at: float | None = None
        """When it will be lost."""
        self.num_boots = 0

    def boot(self) -> None:
        """The node starts."""
        if self.up or self.is_over:
            return
        self.up = True
        self.server = Server(self)
        if self.group is not None:
            self.group.node_started(self)

    def stop_worker(self) -> None:
        """Kill the worker; the server detects that."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive:
            return
        self.env.watch_lost_member(worker)
        worker.process.alive = False
        worker.leave_meeting()
        if isinstance(worker.link, LocalPort):
            self.env.world.after(0.005, server.process, worker.link.on_worker_end)

    def crash(self, silently: bool) -> None:
        """The node dies."""
        worker, server = self.worker, self.server
        if not self.up or server is None:
            return
        self.up = False
        if worker is not None and worker.process.alive:
            silent_s = _SILENCE_S + _STOP_S if silently else 0.0
            self.env.watch_lost_member(worker, silent_s, is_node_silent=silently)
            worker.process.alive = False
            if not silently:
                worker.leave_meeting()
        server.process.alive, server.is_silent = False, silently
        self.env.network.crashed(server.process, silently, lambda: False)
        self.env.keepers.host_died(self, silently)
        after_s = _SILENCE_S if silently else 0.0
        if silently:
            self.env.world.after(after_s, None, self.env.keepers.timed_out, self, server)
        if self.group is not None:
            self.env.world.after(after_s, None, self.group.node_lost, self, server)

    def pause_worker(self, stopped: bool) -> None:
        """Stop the worker, or let it hold the interpreter's lock, which others cannot detect."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.alive or worker.process.paused:
            return
        worker.process.paused = True
        if stopped:
            worker.stopped_since = self.env.world.now
            self.env.world.after(_STOPPED_S, server.process, server.look_at_workers)
            self.env.watch_lost_member(worker, _STOPPED_S)

    def resume_worker(self) -> None:
        """Let the worker continue."""
        worker, server = self.worker, self.server
        if worker is None or server is None or not worker.process.paused:
            return
        worker.stopped_since = None
        worker.process.resume(timers_last=self.env.world.rng.random() < 0.5)
        server.look_at_workers()

    def give_notice(self, left_s: float) -> None:
        """Announce that the node is left within this time, at the latest at its end."""
        if self.server is None or self.notice_at is not None:
            return
        self.notice_at = self.env.world.now + left_s
        if self.group is not None and self.group.placement is not None:
            self.server.state.announce_leave(left_s)
        self.env.world.after(left_s, None, self.leave)

    def leave(self) -> None:
        """Leave the node for good."""
        if not self.is_over:
            self.is_over = True
            self.crash(silently=False)


class Group:
    """A replica group, its nodes, and what a run's leader does for them.

    Attributes:
        nodes: By rank; the first one has the server.
        placement: The workers that were started last; None while they are being started again.
        is_over: It has too few nodes for good.
    """

    def __init__(self, env: Env, index: int, nodes: list[Node]) -> None:
        self.env = env
        self.index = index
        self.nodes = nodes
        self.placement: Placement | None = None
        self.is_over = False
        self.step_s = env.scenario.step_s * env.world.rng.choice((1.0, 1.0, 1.0, 3.0))
        self._world = env.world
        self._num_starts = 0
        self._is_placing = False
        for node in nodes:
            node.group = self

    @property
    def first(self) -> Node:
        """The node with its server."""
        return self.nodes[0]

    @property
    def name(self) -> str:
        """Its name at the keeper."""
        return self.first.name

    @property
    def server(self) -> Server | None:
        """Its server."""
        return self.first.server

    @property
    def workers(self) -> list[Worker]:
        """The workers that were started last, by rank."""
        at = self.placement
        return [n.worker for n in self.nodes if n.worker is not None and n.worker.placement is at]

    @property
    def up_since(self) -> float:
        """When it connected to the present keeper; infinity if it is not connected."""
        return math.inf if self.server is None else self.server.up_since

    @property
    def is_complete(self) -> bool:
        """Whether all of its workers live."""
        live = [w for w in self.workers if w.process.alive]
        return self.placement is not None and len(live) == len(self.nodes)

    @property
    def takes_part(self) -> bool:
        """Whether its workers live and are neither stopped nor done."""
        server = self.server
        if server is None or server.state.has_left or self.is_over or not self.is_complete:
            return False
        return all(n.up for n in self.nodes) and not any(w.process.paused for w in self.workers)

    @property
    def is_partial(self) -> bool:
        """Whether one of its workers has not the whole state."""
        return any(w.is_partial for w in self.workers)

    @property
    def is_done(self) -> bool:
        """Whether its workers end, or have ended, without a failure."""
        return self.is_complete and all(w.ends_next for w in self.workers)

    def link_of(self, worker: Worker) -> object:
        """Return the connection of a worker, if it is one of the present ones."""
        return next((w.link for w in self.workers if w is worker), None)

    # ---- its failures -----------------------------------------------------------------------

    def worker_died(self, worker: Worker) -> None:
        """A worker has ended with an error."""
        node = next((n for n in self.nodes if n.worker is worker), None)
        if node is not None:
            node.stop_worker()
            self.restart()

    def node_started(self, node: Node) -> None:
        """A node of the group has started, perhaps again: it has no workers."""
        del node
        self.restart()

    def node_lost(self, node: Node, server: Server) -> None:
        """The leader has detected that a node is lost."""
        if node.server is server and node.group is self:
            self.restart(lacks_nodes=True)

    def restart(self, *, lacks_nodes: bool = False) -> None:
        """Start all workers again, since one of them has failed, or the group lacks nodes."""
        self.placement = None
        if lacks_nodes and self.first.server is not None:
            self.first.server.set_first(False)  # it has no group for now
        if self._is_placing or self.is_over:
            return
        self._is_placing = True
        rng = self._world.rng
        if not self._num_starts:
            self._world.after(0.1, None, self._place)
            return
        for node in self.nodes:
            self._world.after(_STOP_S * rng.random(), None, node.stop_worker)
        # a node that is gone has closed its connections before the leader places others
        closing_s = 2 * self.env.scenario.longest_delay_s if lacks_nodes else 0.0
        self._world.after(_STOP_S + closing_s + 2 * rng.random(), None, self._place)

    def _place(self) -> None:
        """Place the group on its live nodes and on spares, once there are enough."""
        env, num = self.env, len(self.nodes)
        nodes = [n for n in self.nodes if n.up]
        spares = [n for n in env.spares if n.up]
        nodes += spares[: num - len(nodes)]
        if len(nodes) < num:
            left = [n for n in (*self.nodes, *env.spares) if not n.is_over]
            if len(left) < num:
                self._dissolve()
            else:
                self._world.after(0.3, None, self._place)
            return
        self._is_placing = False
        out = [n for n in self.nodes if n not in nodes]
        env.monitor.completed += sum(n in env.spares for n in nodes)
        env.spares = [n for n in (*env.spares, *out) if n not in nodes]
        for node in out:
            self._release(node)
        if out and self.first.server is not None:  # the unit is dissolved that has lost a node
            self.first.server.set_first(False)
        self.nodes = nodes
        self._num_starts += 1
        entry = env.next_entry()
        label = f"g{self.index}.{self._num_starts}"
        self.placement = placement = Placement(label, num, self.step_s)
        first = nodes[0].server
        assert first is not None
        first.set_first(True)
        for rank, node in enumerate(nodes):
            node.group = self
            server = node.server
            assert server is not None
            args = placement, entry, first, rank
            self._world.after(0.3 * self._world.rng.random(), server.process, server.expect, *args)

    def _release(self, node: Node) -> None:
        node.stop_worker()
        node.group = node.worker = None
        if node.server is not None:
            node.server.set_first(False)

    def _dissolve(self) -> None:
        self.is_over = True
        for node in self.nodes:
            self._release(node)
        self.env.spares += [n for n in self.nodes if not n.is_over]

    # ---- its end --------------------------------------------------------------------------

    def leave_granted(self) -> None:
        """The keeper has granted the leave, and its message has not arrived yet."""
        others = [w.state for g in self.env.groups if g is not self and g.takes_part
                  for w in g.workers[:1] if not g.is_partial]  # fmt: skip
        for worker in self.workers[:1] if not self.is_partial else ():
            saved = worker.saved if worker.saves else worker.state
            self.env.monitor.leave_granted(worker.name, worker.state, saved, others)

    def leave_nodes(self, server: Server) -> None:
        """The group has left the quorum: nodes under notice are left, the others go on."""
        if server is not self.server or not server.state.has_left:
            return
        leavers = [n for n in self.nodes if n.notice_at is not None]
        self.env.monitor.check(bool(leavers), "a group leaves without a notice", self.name)
        for node in leavers:
            node.leave()
        self.restart(lacks_nodes=True)

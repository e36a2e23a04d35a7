"""Keepers of the quorum: the adapter around `ft.lighthouse_state`, and its successors.

A keeper's leader writes the status and forwards notices, as `simulation.cluster.Leader` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpc_elastic.ft.lighthouse_state import ReplicaMessage
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    ConfirmSwitch,
    LeaveGranted,
    ProposeSwitch,
    QuorumResults,
    WorkersLost,
)
from hpc_elastic.ft.quorum import MAX_HEAL_FAILURES
from hpc_elastic.rendezvous.effects import Effect, Show
from hpc_elastic.rendezvous.leader_state import LeaveRequests
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.term import TermFolder
from simulation.ft.cluster import Env, Group, Node, NoticeConfirmed, NoticeSent, Server
from simulation.storage import LeadersFiles, Mount, NodeFiles
from simulation.world import SERVER, Connection, Host, Process

_LIGHTHOUSE_SLOT = 1000
_DUTIES_EVERY_S = 1.0


class KeeperProcess:
    """One keeper, in its term."""

    def __init__(
        self, env: Env, keepers: Coordinator, host: Host, term: int, lost: list[str]
    ) -> None:
        self.process = Process()
        self.host = host
        self.fenced = False
        self._env = env
        self._keepers = keepers
        self._term = term
        self._num_formed = 0
        self._gate = env.components.gate(self, self)
        mount = Mount(env.storage, host.slot)
        folder = TermFolder(term, NodeFiles(env.shared, mount))
        args = (env.shared, folder, mount, self.process, self._gate.end_term)
        self._files = LeadersFiles(*args)
        self._leave_requests = LeaveRequests()
        self._agents: dict[str, Agent] = {}
        rules = env.scenario.rules
        self.keeper = env.components.keeper(term, lost_members=lost, rules=rules)
        self._connections: dict[str, Connection] = {}
        self._members: tuple[str, ...] = ()
        self._absent: set[str] = set()
        """Groups that lost their connection or worker, or may leave, since the last quorum."""
        self._formed = NO_QUORUM
        self._tick()
        self._show_status()
        self._claim_notices()

    def _tick(self) -> None:
        if not self._gate.is_over:
            self._send(self.keeper.on_tick(self._env.world.now))
            self._env.world.after(self._env.scenario.tick_s, self.process, self._tick)

    # ---- its leader -----------------------------------------------------------------------

    def _show_status(self) -> None:
        """Write the status, unless another keeper leads."""
        if self._keepers.term > self._term:
            self._gate.end_term()
        if not self._gate.is_over:
            status = {"term": self._term, "round": self._num_formed}
            self._gate.do([Show(status, (status,))])
            self._env.world.after(_DUTIES_EVERY_S, self.process, self._show_status)

    def _claim_notices(self) -> None:
        if not self._gate.is_over:
            self._files.claim_notices(self._notices_claimed)

    def _notices_claimed(self, notices: Mapping[str, float]) -> None:
        if self._gate.is_over:
            return
        connected = [self._agents[name] for name in self._connections]
        sends, confirmed, unmatched = self._leave_requests.match_agents(notices, connected)
        for agent, _ in sends:
            self._connections[agent.task].send(SERVER, NoticeSent())
        for name in (*confirmed, *unmatched):
            self._files.confirm(name)
        self._env.world.after(_DUTIES_EVERY_S, self.process, self._claim_notices)

    def carry_out(self, effect: Effect) -> None:
        """See `rendezvous.term.Executor`."""
        assert isinstance(effect, Show)
        self._env.shared.monitor.check_term(self._term, effect, is_fenced=self.fenced)
        self._files.show(effect.status, effect.lines)

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """Do nothing: a quorum has no result."""

    def disconnect_all(self) -> None:
        """Do nothing: all groups are connected to another keeper."""

    # ---- groups ---------------------------------------------------------------------------

    def accept(self, server: Server) -> Connection:
        """Connect a group."""
        connection = self._env.network.connect(server, self)
        name = server.node.name
        connection.peer = name
        before = self._connections.get(name)
        if before is not None:
            is_noticed = self._env.world.rng.random() < 0.5
            if is_noticed or before.ends[0] is not server:
                self.lost(before)
        self._connections[name] = connection
        self._agents[name] = server.agent
        self._send(self.keeper.on_connect(name, self._env.world.now))
        return connection

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message of a group."""
        if self._connections.get(connection.peer) is not connection:
            return
        if isinstance(message, NoticeConfirmed):
            connected = [self._agents[name] for name in self._connections]
            agent = self._agents[connection.peer]
            for name in self._leave_requests.confirmed(agent, connected):
                self._files.confirm(name)
            return
        if isinstance(message, WorkersLost):  # even if the worker resumes before the quorum forms
            self._absent.add(connection.peer)
        self._send(self.keeper.on_message(connection.peer, message, self._env.world.now))

    def lost(self, connection: Connection, why: str = "its connection is gone") -> None:
        """A connection has ended."""
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._absent.add(connection.peer)
            self._send(self.keeper.on_disconnect(connection.peer, why, self._env.world.now))

    def timed_out(self, name: str, server: Server | None = None) -> None:
        """The connection of a group has timed out."""
        connection = self._connections.get(name)
        if connection is not None and server in (None, connection.ends[0]):
            connection.close(SERVER)
            self.lost(connection, "it is silent")

    def node_lost(self, name: str) -> None:
        """The run has detected that a group's node is dead."""
        if name not in self._connections:
            self._send(self.keeper.on_disconnect(name, "its node is dead", self._env.world.now))

    def _send(self, sends: list[ReplicaMessage]) -> None:
        if not sends or self is not self._keepers.keeper:
            return  # no group is connected to a deposed keeper
        placed = {
            s.replica: s.message.ranks[0] for s in sends if isinstance(s.message, QuorumResults)
        }
        for send in sends:
            if isinstance(send.message, LeaveGranted):
                self._absent.add(send.replica)
                group = self._env.group(send.replica)
                if group is not None:
                    group.leave_granted()
        self._check_quorum(placed)
        for send in sends:
            self._env.world.log_event("keeper", f"to {send.replica}", send.message)
            self._env.monitor.switches += isinstance(send.message, ProposeSwitch)
            connection = self._connections.get(send.replica)
            if connection is not None:
                connection.send(SERVER, send.message)
        if any(isinstance(send.message, ConfirmSwitch) for send in sends):
            self._keepers.on_confirmation()

    def _check_quorum(self, placed: dict[str, Any]) -> None:
        if not placed:
            return
        first = next(iter(placed.values()))
        if len(placed) < first.replica_world_size or first.quorum_id == self._formed:
            return  # results that the keeper sends again
        self._formed = first.quorum_id
        self._num_formed += 1
        monitor = self._env.monitor
        groups = self._env.groups
        live = [g.name for g in groups if self._could_request(g) and g.name not in placed]
        monitor.formed(first.quorum_id, list(placed), live)
        monitor.placed([*placed.values()])
        self._members = tuple(placed)
        self._absent.clear()

    def _could_request(self, group: Group) -> bool:
        name = group.name
        if name not in self._members or name in self._absent or name not in self._connections:
            return False
        if any(w.ends_next or w.failed_heals >= MAX_HEAL_FAILURES for w in group.workers):
            return False
        return group.takes_part and all(w.is_settled for w in group.workers)


class Coordinator:
    """The present keeper, and the elections of the next ones."""

    def __init__(self, env: Env) -> None:
        self.keeper: KeeperProcess | None = None
        self.term = 0
        self.on_confirmation: Callable[[], None] = lambda: None
        """Called when a keeper has sent the confirmation of a switch."""
        self._env = env
        self._lighthouse = Host(_LIGHTHOUSE_SLOT)
        self._deposed: list[KeeperProcess] = []

    def elect(self, lost: tuple[str, ...] = ()) -> None:
        """Start another keeper on a live node; retry later if there is none."""
        if self.keeper is not None:
            return
        host: Host = self._lighthouse
        if self._env.scenario.is_run:
            live = [n for n in self._env.nodes if n.up]
            if not live:
                self._env.world.after(0.2, None, self.elect, lost)
                return
            host = self._env.world.rng.choice(live)
        self.term += 1 if self._env.components.terms_rise or not self.term else 0
        dead = [name for name in lost if not any(n.name == name and n.up for n in self._env.nodes)]
        self._env.world.log_event("keeper", f"term {self.term} on {host.slot}, lost", dead)
        self.keeper = KeeperProcess(self._env, self, host, self.term, dead)

    def kill(self, lost: tuple[str, ...] = ()) -> None:
        """Kill the keeper; another is elected."""
        keeper, self.keeper = self.keeper, None
        if keeper is None:
            return
        self._env.world.log_event("keeper", "dies")
        keeper.process.alive = False
        self._env.network.crashed(keeper.process, False, lambda: self._env.world.rng.random() < 0.5)
        self._env.world.after(0.1 + 2 * self._env.world.rng.random(), None, self.elect, lost)

    def depose(self, for_s: float) -> None:
        """Pause the keeper's process for a time in which another is elected."""
        keeper, self.keeper = self.keeper, None
        if keeper is None:
            return
        self._env.world.log_event("keeper", "is paused", for_s)
        keeper.process.paused = True
        self._deposed.append(keeper)
        self._env.network.crashed(keeper.process, False, lambda: False)
        self._env.world.after(for_s, None, self._resume, keeper)
        self._env.world.after(0.1 + 2 * self._env.storage.rng.random(), None, self.elect)

    def _resume(self, keeper: KeeperProcess) -> None:
        if keeper.process.alive and keeper.process.paused:
            self._env.world.log_event("keeper", "is resumed, deposed")
            keeper.process.resume(timers_last=self._env.storage.rng.random() < 0.5)

    def resume_all(self) -> None:
        """Resume all deposed keepers."""
        for keeper in self._deposed:
            self._resume(keeper)

    def host_died(self, node: Node, silently: bool) -> None:
        """A node is dead, and so is a keeper on it."""
        for deposed in self._deposed:
            deposed.process.alive = deposed.process.alive and deposed.host is not node
        is_first = node.group is not None and node.group.first is node
        if self.keeper is not None and self.keeper.host is node:
            self.kill((node.name,) if is_first else ())
        elif not silently and is_first and self._env.scenario.is_run:
            self._env.world.after(1.0, None, self._report_lost_node, node)

    def _report_lost_node(self, node: Node) -> None:
        if self.keeper is not None and not node.up:
            self.keeper.node_lost(node.name)

    def timed_out(self, node: Node, server: Server | None = None) -> None:
        """A node was out of reach for the keeper's timeout."""
        if self.keeper is not None:
            self.keeper.timed_out(node.name, server)

    def reachable_from(self, node: Node) -> KeeperProcess | None:
        """Return the keeper, or None if there is none or a partition separates it."""
        keeper = self.keeper
        if keeper is None or self._env.network.is_cut(node, keeper.host):
            return None
        return keeper

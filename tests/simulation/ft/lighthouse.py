"""The adapter around `ft.lighthouse_state`, and who keeps the quorum after it.

A keeper's leader shows the status and passes notices on, as `simulation.cluster.Leader` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_elastic.ft.lighthouse_state import ReplicaMessage
from hpc_elastic.ft.messages import (
    NO_QUORUM,
    LeaveGranted,
    ProposeSwitch,
    QuorumResults,
    WorkersLost,
)
from hpc_elastic.rendezvous.effects import Effect, Show
from hpc_elastic.rendezvous.leader_state import LeaveRequests
from hpc_elastic.rendezvous.log_entry import Agent, LogEntry
from hpc_elastic.rendezvous.term import TermFolder
from simulation.ft.cluster import AskedToLeave, Env, Group, Noticed, Server
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
        self._asked = LeaveRequests()
        self._agents: dict[str, Agent] = {}
        rules = env.scenario.rules
        self.keeper = env.components.keeper(term, lost_members=lost, rules=rules)
        self._connections: dict[str, Connection] = {}
        self._members: tuple[str, ...] = ()
        self._dismissed: set[str] = set()
        self._formed = NO_QUORUM
        self._tick()
        self._attend()
        self._look_for_notices()

    def _tick(self) -> None:
        if not self._gate.is_over:
            self._send(self.keeper.on_tick(self._env.world.now))
            self._env.world.after(self._env.scenario.tick_s, self.process, self._tick)

    # ---- its leader -----------------------------------------------------------------------

    def _attend(self) -> None:
        """See whether another leads; show the status."""
        if self._keepers.term > self._term:
            self._gate.end_term()
        if not self._gate.is_over:
            status = {"term": self._term, "round": self._num_formed}
            self._gate.do([Show(status, (status,))])
            self._env.world.after(_DUTIES_EVERY_S, self.process, self._attend)

    def _look_for_notices(self) -> None:
        if not self._gate.is_over:
            self._files.claim_notices(self._claimed)

    def _claimed(self, notices: Mapping[str, float]) -> None:
        if self._gate.is_over:
            return
        heard = [self._agents[name] for name in self._connections]
        tell, confirmed, in_vain = self._asked.match_agents(notices, heard)
        for agent, _ in tell:
            self._connections[agent.task].send(SERVER, AskedToLeave())
        for name in (*confirmed, *in_vain):
            self._files.confirm(name)
        self._env.world.after(_DUTIES_EVERY_S, self.process, self._look_for_notices)

    def carry_out(self, effect: Effect) -> None:
        """See `rendezvous.term.Executor`."""
        assert isinstance(effect, Show)
        self._env.shared.monitor.acts(self._term, effect, knows_over=self.fenced)
        self._files.show(effect.status, effect.lines)

    def publish(self, entry: LogEntry, afterwards: list[Effect]) -> None:
        """Nothing ends here."""

    def disconnect_all(self) -> None:
        """Another keeper has all the groups already."""

    # ---- groups ---------------------------------------------------------------------------

    def accept(self, server: Server) -> Connection:
        """A group connects."""
        connection = self._env.network.connect(server, self)
        name = server.host.name  # type: ignore[attr-defined]
        connection.peer = name
        before = self._connections.get(name)
        if before is not None and self._env.world.rng.random() < 0.5:
            self.lost(before)
        self._connections[name] = connection
        self._agents[name] = server.agent
        self._send(self.keeper.on_connect(name, self._env.world.now))
        return connection

    def received(self, connection: Connection, message: Any) -> None:
        """A message of a group arrives."""
        if self._connections.get(connection.peer) is connection:
            if isinstance(message, Noticed):
                heard = [self._agents[name] for name in self._connections]
                for name in self._asked.confirmed(self._agents[connection.peer], heard):
                    self._files.confirm(name)
                return
            if isinstance(
                message, WorkersLost
            ):  # it may go on again, but its word for that comes later
                self._dismissed.add(connection.peer)
            self._send(self.keeper.on_message(connection.peer, message, self._env.world.now))

    def lost(self, connection: Connection, why: str = "its connection is gone") -> None:
        """A connection has ended."""
        if self._connections.get(connection.peer) is connection:
            del self._connections[connection.peer]
            self._dismissed.add(connection.peer)
            self._send(self.keeper.on_disconnect(connection.peer, why, self._env.world.now))

    def silent(self, name: str, server: Server | None = None) -> None:
        """A group has timed out."""
        connection = self._connections.get(name)
        if connection is not None and server in (None, connection.ends[0]):
            connection.close(SERVER)
            self.lost(connection, "it is silent")

    def known_lost(self, name: str) -> None:
        """The run knows that a group's node is dead."""
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
                self._dismissed.add(send.replica)
                self._env.group(send.replica).dismissed()
        self._check(placed)
        for send in sends:
            self._env.world.log_event("keeper", f"to {send.replica}", send.message)
            self._env.monitor.switches += isinstance(send.message, ProposeSwitch)
            connection = self._connections.get(send.replica)
            if connection is not None:
                connection.send(SERVER, send.message)

    def _check(self, placed: dict[str, Any]) -> None:
        if not placed:
            return
        first = next(iter(placed.values()))
        if len(placed) < first.replica_world_size or first.quorum_id == self._formed:
            return  # sent again
        self._formed = first.quorum_id
        self._num_formed += 1
        monitor = self._env.monitor
        live = [g.name for g in self._env.groups if self._could_ask(g) and g.name not in placed]
        monitor.formed(first.quorum_id, list(placed), live)
        monitor.placed(placed)
        self._members = tuple(placed)
        self._dismissed.clear()

    def _could_ask(self, group: Group) -> bool:
        worker = group.worker
        name, members = group.name, self._members
        if name not in members or name in self._dismissed or name not in self._connections:
            return False
        return group.takes_part and worker is not None and worker.is_settled and not worker.is_done


class Coordinator:
    """The keeper of the moment, and the elections."""

    def __init__(self, env: Env) -> None:
        self.keeper: KeeperProcess | None = None
        self.term = 0
        self._env = env
        self._lighthouse = Host(_LIGHTHOUSE_SLOT)
        self._deposed: list[KeeperProcess] = []

    def elect(self, lost: tuple[str, ...] = ()) -> None:
        """Another keeper begins, on a node that lives; later, if there is none."""
        if self.keeper is not None:
            return
        host: Host = self._lighthouse
        if self._env.scenario.is_run:
            live = [g for g in self._env.groups if g.up]
            if not live:
                self._env.world.after(0.2, None, self.elect, lost)
                return
            host = self._env.world.rng.choice(live)
        self.term += 1 if self._env.components.terms_rise or not self.term else 0
        dead = [n for n in lost if not any(g.name == n and g.up for g in self._env.groups)]
        self._env.world.log_event("keeper", f"term {self.term} on {host.slot}, lost", dead)
        self.keeper = KeeperProcess(self._env, self, host, self.term, dead)

    def kill(self, lost: tuple[str, ...] = ()) -> None:
        """The keeper dies."""
        keeper, self.keeper = self.keeper, None
        if keeper is None:
            return
        self._env.world.log_event("keeper", "dies")
        keeper.process.alive = False
        self._env.network.crashed(keeper.process, False, lambda: self._env.world.rng.random() < 0.5)
        self._env.world.after(0.1 + 2 * self._env.world.rng.random(), None, self.elect, lost)

    def depose(self, for_s: float) -> None:
        """The keeper's process stands still until another was elected, and goes on then."""
        keeper, self.keeper = self.keeper, None
        if keeper is None:
            return
        self._env.world.log_event("keeper", "stands still", for_s)
        keeper.process.paused = True
        self._deposed.append(keeper)
        self._env.network.crashed(keeper.process, False, lambda: False)
        self._env.world.after(for_s, None, self._go_on, keeper)
        self._env.world.after(0.1 + 2 * self._env.storage.rng.random(), None, self.elect)

    def _go_on(self, keeper: KeeperProcess) -> None:
        if keeper.process.alive and keeper.process.paused:
            self._env.world.log_event("keeper", "goes on, deposed")
            keeper.process.resume(timers_last=self._env.storage.rng.random() < 0.5)

    def resume_all(self) -> None:
        """Whatever stands still goes on."""
        for keeper in self._deposed:
            self._go_on(keeper)

    def host_died(self, group: Group, silently: bool) -> None:
        """A node is dead; the keeper may have been on it."""
        for deposed in self._deposed:
            deposed.process.alive = deposed.process.alive and deposed.host is not group
        if self.keeper is not None and self.keeper.host is group:
            self.kill((group.name,))
        elif not silently and self._env.scenario.is_run:
            self._env.world.after(1.0, None, self._known_lost, group)

    def _known_lost(self, group: Group) -> None:
        if self.keeper is not None and not group.up:
            self.keeper.known_lost(group.name)

    def silent(self, group: Group, server: Server | None = None) -> None:
        """A group was out of reach for as long as a keeper waits."""
        if self.keeper is not None:
            self.keeper.silent(group.name, server)

    def reachable_from(self, group: Group) -> KeeperProcess | None:
        """Return the keeper, if there is one and nothing is in the way."""
        keeper = self.keeper
        if keeper is None or self._env.network.is_cut(group, keeper.host):
            return None
        return keeper

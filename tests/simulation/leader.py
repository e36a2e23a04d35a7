"""The leader's adapter in the simulation: carries a `Term`'s effects out, tells it events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpc_elastic.rendezvous.effects import (
    Announce,
    Append,
    ClearHolds,
    Disconnect,
    Effect,
    Exclude,
    Note,
    Postpone,
    QueryTasks,
    RemoveNotice,
    RenewLease,
    Send,
    Show,
    place_message,
)
from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry
from hpc_elastic.slurm.job_state import TaskState
from simulation.network import SERVER, Connection
from simulation.shared import LeadersFiles, NodeFiles

if TYPE_CHECKING:
    from simulation.agent import AgentProcess
    from simulation.attempt import Attempt

_RETRY_S = 0.5
_SHOW_EVERY_S = 1.0
_READMIT_EVERY_S = 10.0


class Leader:
    """A listener, and, once its claim is recorded, the leader of an epoch."""

    def __init__(self, agent: AgentProcess, endpoint: Endpoint) -> None:
        self.agent = agent
        self.process = agent.process
        self.host = agent.host
        self.endpoint = endpoint
        self.is_open = True
        self._sim = agent.sim
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

    def lead(self, record: LogEntry) -> None:
        """Begin: the claim was recorded."""
        sim = self._sim
        self.leadership = sim.parts.leadership(
            record, sim.scenario.rules, sim.scenario.liveness, self._now(), sim.world.rng
        )
        self._epoch = record.epoch
        self.term = sim.parts.term(self.leadership, self, sim.scenario.show_s)
        mount = self.host.mount
        folder = sim.parts.folder(record.epoch, NodeFiles(sim.shared, mount))
        args = (sim.shared, folder, mount, self.process, self.term.end)
        self._files = LeadersFiles(*args)
        self._has_begun = True
        self._round = record.number
        self.term.handle(self.leadership.begin)
        early, self._early = self._early, []
        for attempt in early:
            self._greet(attempt)
        self._tick()
        self._watch()
        self._show()
        self._look_for_notices()
        self._sim.world.after(_READMIT_EVERY_S, self.process, self._readmit)

    def stop(self) -> None:
        """Lead no more, because this node leaves."""
        if self.leads:
            self.term.handle(self.leadership.knows_notice, self.endpoint.task)
            self.term.end()
            self._files.remove_confirmed()
        self.let_go()

    def let_go(self) -> None:
        """Stop listening, and let go of everybody; see `Hands`."""
        if self.is_open and self._has_begun:
            self._sim.monitor.fenced += self.leadership.fenced and not self.agent.over
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
            self._sim.world.after(
                self.leadership.liveness.heartbeat_interval_s, self.process, self._tick
            )

    def _watch(self) -> None:
        if self.is_open:
            self.host.register.look_for_number(self.process, self._looked, self._blind)

    def _looked(self, number: int) -> None:
        self.term.handle(self.leadership.saw, number)
        self._sim.world.after(self._sim.scenario.look_s, self.process, self._watch)

    def _blind(self, why: Exception) -> None:
        self._sim.world.after(self._sim.scenario.look_s, self.process, self._watch)

    # ---- duties -------------------------------------------------------------------------

    def _show(self) -> None:
        if not self.term.is_over:
            self.term.show(self._sim.world.now)
            self._sim.world.after(_SHOW_EVERY_S, self.process, self._show)

    def _readmit(self) -> None:
        if not self.term.is_over:
            self.term.readmit()
            self._sim.world.after(_READMIT_EVERY_S, self.process, self._readmit)

    def _look_for_notices(self, number: int = 0) -> None:
        if not self.term.is_over and number == self._num_looks:
            self._num_looks += 1
            self._is_looking, self._is_confirmed = True, False
            self._files.claim_notices(self._claimed)

    def _claimed(self, notices: Mapping[str, float]) -> None:
        self._is_looking = False
        self.term.handle(self.leadership.asked_to_leave, notices)
        pause = 0.0 if self._is_confirmed else self._sim.scenario.look_s
        self._sim.world.after(pause, self.process, self._look_for_notices, self._num_looks)

    def _confirm(self, name: str) -> None:
        """Let a notice be removed, with a look that begins now or right after the present one."""
        self._files.confirm(name)
        self._is_confirmed = True
        if not self._is_looking:
            self._sim.world.after(0.0, self.process, self._look_for_notices, self._num_looks)

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
        connection = self._sim.network.connect(attempt.client, self)
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
        """See `Hands`."""
        knows_over = self.leadership.fenced
        self._sim.shared.monitor.acts(self._epoch, effect, knows_over=knows_over)
        if isinstance(effect, Send):
            self._send(effect)
        elif isinstance(effect, RenewLease):
            self._renew_lease()
        elif isinstance(effect, Show):
            self._files.show(effect.status, effect.lines)
        else:
            self._carry_out_rarely(effect)

    def publish(self, record: LogEntry, afterwards: list[Effect]) -> None:
        """See `Hands`."""
        self._sim.world.note(self.endpoint.task, "publishes", record)
        self._sim.monitor.published(record)
        self.term.do(afterwards)

    def _carry_out_rarely(self, effect: Effect) -> None:
        sim = self._sim
        sim.world.note(self.endpoint.task, "leader", effect)
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
                sim.slurm.postponed_until = sim.world.now + delay_s
            case ClearHolds(tasks):
                sim.monitor.brought_back(tasks, self.leadership.run)
                sim.clear_holds(tasks)
            case Note("excluded", fields):
                sim.monitor.excluded(str(fields["host"]), int(str(fields["hosts_left"])))
            case Exclude(hosts, _):
                sim.slurm.excluded.update(hosts)
            case QueryTasks():
                sim.slurm.ask(self.process, self._slurm_says)
            case RemoveNotice(name):
                self._confirm(name)

    def _send(self, send: Send) -> None:
        kind = send.message["type"]
        if kind == "stop" and send.agents:
            self._sim.told_to_stop(self._round, send.message["reason"])
        elif kind == "confirm" and send.agents:
            self._sim.confirmed(self._round, send.message["number"])
        for agent in self._connections if send.agents is None else send.agents:
            self._tell(agent, send.message)

    def _tell(self, agent: Agent, message: dict[str, Any]) -> None:
        connection = self._connections.get(agent)
        if connection is not None:
            connection.send(SERVER, message)

    def _renew_lease(self) -> None:
        if not self._renewing:  # the file system may hang
            self._renewing = True
            self._beats += 1
            register = self.host.register
            register.renew_lease(self.process, self._epoch, self._beats, self._renewed)

    def _renewed(self, done: bool) -> None:
        self._renewing = False
        if done:
            self.term.handle(self.leadership.renewed)

    def _announce(self, announce: Announce) -> None:
        self._sim.monitor.announced(self.endpoint, announce)
        self._round = announce.entry.number
        for agent, place in self._sim.parts.places(announce):
            self._tell(agent, place_message(announce, agent, place))

    def _create(self) -> None:
        if self._creating is not None:
            self.host.register.create(self.process, self._creating, self._created)

    def _created(self, outcome: bool | None) -> None:
        if outcome is None:
            self._sim.world.after(_RETRY_S, self.process, self._create)
            return
        self._creating = None
        if outcome:
            self.term.handle(self.leadership.appended)
        else:
            self.term.handle(self.leadership.refused)

    def _slurm_says(self, view: dict[str, TaskState] | None) -> None:
        if self.is_open:
            self.term.handle(self.leadership.slurm_says, view, self._now())

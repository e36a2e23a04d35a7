"""One random schedule: a run of a few nodes in virtual time, with all that can go wrong.

The protocol's own classes run here (`rendezvous.follower_state`, `rendezvous.leader_state`, and
through it `rendezvous.round_state`), under adapters of the simulation. All chance comes from one
seed, so a schedule that fails fails again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpc_elastic.rendezvous.log_entry import Agent, Endpoint, LogEntry
from simulation.agent import AgentProcess
from simulation.faults import Faults
from simulation.invariants import InvariantError, Monitor
from simulation.network import Network
from simulation.node import Node
from simulation.parts import SOUND, Parts
from simulation.register import Register
from simulation.scenario import SLOWEST_FILES_S, Scenario
from simulation.schedule import Tally
from simulation.shared import SharedFiles, SharedMonitor
from simulation.slurm import Slurm
from simulation.storage import Storage
from simulation.training import Work
from simulation.world import World

_LOOK_EVERY_S = 1.0
"""How often it is checked, in the calm, whether a round stands."""


@dataclass
class Outcome(Tally):
    """What became of one schedule, or of many."""

    rounds: int = 0
    elections: int = 0
    fenced: int = 0
    growths: int = 0
    """Rounds broken at a checkpoint."""
    agreements: int = 0
    departures: int = 0
    """Rounds broken so that nodes could leave."""
    endings: int = 0
    shown: int = 0
    """How often a leader replaced the status."""
    notices: int = 0
    """Notice files that were obeyed."""
    silent: int = 0
    """Leaders that were taken for dead by their lease alone."""
    late_appends: int = 0
    """Appends to the progress by a leader that was stopped in between."""
    late_statuses: int = 0
    """Statuses of such a leader, by a name that the folder had before."""
    storage: Counter[str] = field(default_factory=Counter)
    """How often the shared file system has shown a node what is not so."""
    stood_after: Counter[int] = field(default_factory=Counter)
    """Whole seconds from calm until a round began to stand -> in how many schedules."""


class Simulator:
    """The world of one schedule."""

    def __init__(self, seed: int, parts: Parts = SOUND, whole_trace: bool = False) -> None:
        self.seed = seed
        self.parts = parts
        self.world = World(seed, whole_trace)
        self.scenario = self.draw()
        self.monitor = self.make_monitor()
        self.network = Network(self.world, self.scenario.longest_delay_s)
        self.storage = Storage(self.world, random.Random(f"storage {seed}"), SLOWEST_FILES_S)
        self.register = Register(self.storage, self.monitor, parts.records, parts.exclusive_create)
        monitor = SharedMonitor(self.monitor.check, self._is_named_alive)
        self.shared = SharedFiles(self.storage, monitor, parts.fenced_files)
        self.slurm = Slurm(self.world, self.scenario.longest_answer_s, self.scenario.tells_attempts)
        self.slurm.down += self.scenario.is_slurm_silent
        self.nodes = [Node(self, slot) for slot in range(self.scenario.num_nodes)]
        self.faults = Faults(self)
        self._works: dict[int, Work] = {}
        self._num_ports = 0
        self._stands_since: float | None = None
        self._standing: Work | None = None
        self._stood_after: Counter[int] = Counter()

    # ---- what it is made of -------------------------------------------------------------

    def draw(self) -> Scenario:
        """Draw the schedule's parameters."""
        return self.parts.draw(self.world.rng)

    def make_monitor(self) -> Monitor:
        """Make what sees to the invariants."""
        return Monitor(self.scenario, self.world)

    def make_agent(self, host: Node) -> AgentProcess:
        """Make one attempt of a node's task."""
        return AgentProcess(self, host)

    # ---- what the nodes use -------------------------------------------------------------

    def new_endpoint(self, host: Node) -> Endpoint:
        """Return an endpoint that was never used before."""
        self._num_ports += 1
        return Endpoint(str(host.slot), self._num_ports, host.task, host.attempt)

    def work_of(self, record: LogEntry, member: Agent) -> Work:
        """Return the workers of a member's round."""
        work = self._works.get(record.number)
        if work is None:
            training = self.scenario.training
            args = (self.world, self.network, training, self.monitor)
            work = self._works[record.number] = Work(record, *args)
        return work

    def told_to_stop(self, number: int, reason: str) -> None:
        """A leader breaks the round of a record."""
        work = self._works.get(number)
        if work is not None:
            self.monitor.told_to_stop(reason, work)

    def asked_to_leave(self, agent: Agent) -> None:
        """An agent hears from a leader that its node is to be left."""
        self.shared.monitor.heard((agent.task, agent.host, "all"), self.world.now)

    def confirmed(self, number: int, proposal: int) -> None:
        """A leader confirms a proposal in the round of a record."""
        work = self._works.get(number)
        if work is not None:
            self.monitor.confirmed(work, proposal)

    def clear_holds(self, tasks: Sequence[str]) -> None:
        """A leader brings tasks back that Slurm holds."""
        for node in self.nodes:
            if node.task in tasks:
                node.clear_hold()

    # ---- the schedule -------------------------------------------------------------------

    def run(self) -> None:
        """Run the schedule.

        Raises:
            InvariantError: something happened that must never happen.
        """
        self._start_nodes()
        self.faults.plan()
        self.world.run(self.scenario.calm_after_s)
        self._calm()
        end = self.world.now + self.scenario.bound_s
        while not self._is_well():
            if self.world.now > end:
                raise InvariantError(self._complaint())
            self.world.run(self.world.now + _LOOK_EVERY_S)

    def _start_nodes(self) -> None:
        rng = self.world.rng
        late_from = len(self.nodes) - self.scenario.late
        for node in self.nodes:
            latest = self.scenario.calm_after_s if node.slot >= late_from else 1.5
            self.slurm.believe(node.task, "PENDING", 0)
            self.world.after(latest * rng.random(), None, node.boot)

    def _calm(self) -> None:
        self.world.note("world", "is calm from now on")
        self.faults.heal()

    # ---- progress -----------------------------------------------------------------------

    def _is_well(self) -> bool:
        """Tell whether all that must come to pass in the calm has come to pass."""
        if self.register.records and self.register.records[-1].ending is not None:
            heard = not any(n.lives for n in self.nodes)
            return heard and (self.monitor.is_published or all(n.ended for n in self.nodes))
        return not self._is_enough() or (self._stands() and self._is_told_of())

    def _stands(self) -> bool:
        """Tell whether the last round has stood for long enough, whole."""
        work = next((w for w in reversed(self._works.values()) if w.is_whole), None)
        if work is None or work is not self._standing or self._is_any_left_behind(work):
            self._standing, self._stands_since = work, self.world.now
            return False
        assert self._stands_since is not None
        if self.world.now - self._stands_since < self.scenario.confirm_s:
            return False
        self._stood_after[int(self._stands_since - self.scenario.calm_after_s)] += 1
        return True

    def _is_told_of(self) -> bool:
        """Tell whether the status is the last leader's, and no node has an open notice."""
        shown, last = self.shared.shown, self.register.records[-1]
        isolated = last.leader.address == str(self.network.isolated)
        told = shown is not None and shown["epoch"] == last.epoch
        return told and (isolated or not any(map(self._is_named_alive, self.shared.notices)))

    def _is_named_alive(self, name: str) -> bool:
        """Tell whether a node lives that a notice names, and that a leader may hear."""
        nodes = (n for n in self.nodes if name in (n.task, n.hostname, "all"))
        return any(n.lives and n.slot != self.network.isolated for n in nodes)

    def _is_any_left_behind(self, standing: Work) -> bool:
        """Tell whether an agent still has workers in another round than the one that stands."""
        agents = [n.agent for n in self.nodes if n.agent is not None and not n.agent.over]
        return any(a.work is not None and a.work is not standing for a in agents)

    def _is_enough(self) -> bool:
        """Tell whether at least min nodes that reach each other live, or will again."""
        reachable = [n for n in self.nodes if n.slot != self.network.isolated and not n.ended]
        return len(reachable) >= self.scenario.rules.min_nodes

    def _complaint(self) -> str:
        records = self.register.records
        last = records[-1] if records else None
        alive = [n.task for n in self.nodes if n.lives]
        what = "not everybody hears of the end" if last and last.ending else "no round stands"
        if self._stands() and not (last and last.ending):
            what = f"a round stands, with the notices {self.shared.notices}, and the status of "
            what += f"epoch {self.shared.shown and self.shared.shown['epoch']}"
        return f"{what} {self.scenario.bound_s:.0f} s after all was healed: {alive} live, {last}"

    def outcome(self) -> Outcome:
        """Return the numbers of the schedule."""
        monitor, records = self.monitor, self.register.records
        ended = bool(records) and records[-1].ending is not None
        return Outcome(
            schedules=1, virtual_s=self.world.now, events=self.world.num_events,
            checks=monitor.num_checks, faults=self.faults.count, rounds=monitor.rounds,
            elections=monitor.elections, fenced=monitor.fenced, growths=monitor.growths,
            agreements=monitor.agreements, departures=monitor.departures, endings=int(ended),
            shown=self.shared.monitor.shown, notices=self.shared.monitor.obeyed,
            silent=self.monitor.silent, late_appends=self.shared.monitor.late,
            late_statuses=self.shared.monitor.late_statuses, storage=self.storage.hits,
            stood_after=self._stood_after,
        )  # fmt: skip

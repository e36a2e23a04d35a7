"""One random schedule: a run of a few nodes in virtual time, with faults.

The protocol's own classes (`rendezvous.follower_state`, `rendezvous.leader_state`, and through it
`rendezvous.round_state`) run under adapters of the simulation. All random numbers come from one
seed, so a failure is reproducible.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulation.campaign import Tally
from simulation.cluster import SOUND, AgentProcess, Components, Env
from simulation.faults import Faults
from simulation.invariants import InvariantError, Monitor
from simulation.scenario import LONGEST_PAUSE_S, Scenario, with_sizes, with_units
from simulation.workload import Work
from simulation.world import World

_CHECK_EVERY_S = 1.0
"""Period of the checks, in the calm, whether a round stands."""


@dataclass
class Outcome(Tally):
    """The counts of one schedule, or of many."""

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
    """Statuses that leaders have written."""
    notices: int = 0
    """Notice files that were obeyed."""
    silent: int = 0
    """Leaders that were taken for dead by their lease alone."""
    late_appends: int = 0
    """Appends to the progress by deposed leaders."""
    late_statuses: int = 0
    """Statuses of deposed leaders, by an old name of the folder."""
    storage: Counter[str] = field(default_factory=Counter)
    """Differences between the views of a node and of the server, by kind."""
    stood_after: Counter[int] = field(default_factory=Counter)
    """Whole seconds from calm until a round stood -> number of schedules."""


class Simulator:
    """The world of one schedule."""

    agent_type = AgentProcess
    monitor_type = Monitor
    alone = False
    """Whether the workers of each node are a group of their own."""

    def __init__(
        self, seed: int, components: Components = SOUND, whole_trace: bool = False
    ) -> None:
        self.seed = seed
        self.components = components
        self.world = World(seed, whole_trace)
        self.scenario = self.draw()
        self.monitor = self.monitor_type(self.scenario, self.world)
        self.env = Env(
            seed, self.world, self.scenario, components, self.monitor,
            agent_type=self.agent_type, alone=self.alone,
        )  # fmt: skip
        self.faults = Faults(self.env)
        self._stands_since: float | None = None
        self._standing: Work | None = None
        self._stood_after: Counter[int] = Counter()

    def draw(self) -> Scenario:
        """Draw the schedule's parameters."""
        return self.components.draw(self.world.rng)

    # ---- the schedule -------------------------------------------------------------------

    def run(self) -> None:
        """Run the schedule.

        Raises:
            InvariantError: an invariant does not hold.
        """
        rng = self.world.rng
        late_from = len(self.env.nodes) - self.scenario.late
        for node in self.env.nodes:
            latest = self.scenario.calm_after_s if node.slot >= late_from else 1.5
            self.env.slurm.set_state(node.task, "PENDING", 0)
            self.world.after(latest * rng.random(), None, node.boot)
        self.faults.plan()
        self.world.run(self.scenario.calm_after_s)
        self.world.log_event("world", "is calm from now on")
        self.faults.heal()
        end = self.world.now + self.scenario.bound_s
        if self.faults.count["failing leader"] or self.faults.count["node without stores"]:
            end += LONGEST_PAUSE_S
        while not self._has_progressed():
            if self.world.now > end:
                raise InvariantError(self._complaint())
            self.world.run(self.world.now + _CHECK_EVERY_S)

    # ---- progress -----------------------------------------------------------------------

    def _has_progressed(self) -> bool:
        """Return whether the run has reached the state that the calm must lead to."""
        nodes, entries = self.env.nodes, self.env.register.entries
        if entries and entries[-1].ending is not None:
            is_published = self.monitor.is_published or all(n.ended for n in nodes)
            return is_published and not any(n.lives for n in nodes)
        reachable = [n for n in nodes if n.slot != self.env.network.isolated and not n.ended]
        complete = self.env.network.num_complete([n.slot for n in reachable])
        is_enough = complete >= self.scenario.rules.min_nodes
        return not is_enough or (self._stands() and self._is_status_current())

    def _stands(self) -> bool:
        """Return whether the last round has been whole, and the only one, for long enough."""
        work = next((w for w in reversed(self.env.works.values()) if w.is_whole), None)
        agents = [n.agent for n in self.env.nodes if n.agent is not None and not n.agent.over]
        is_alone = all(a.work is None or a.work is work for a in agents)
        if work is None or work is not self._standing or not is_alone:
            self._standing, self._stands_since = work, self.world.now
            return False
        assert self._stands_since is not None
        if self.world.now - self._stands_since < self.scenario.confirm_s:
            return False
        self._stood_after[int(self._stands_since - self.scenario.calm_after_s)] += 1
        return True

    def _is_status_current(self) -> bool:
        """Return whether the status is the last leader's, and no live node has an open notice."""
        shared, last = self.env.shared, self.env.register.entries[-1]
        if shared.shown is None or shared.shown["term"] != last.term:
            return False
        is_isolated = last.leader.address == str(self.env.network.isolated)
        return is_isolated or not any(map(self.env.is_named_alive, shared.notices))

    def _complaint(self) -> str:
        entries = self.env.register.entries
        last = entries[-1] if entries else None
        alive = [n.task for n in self.env.nodes if n.lives]
        what = "not all agents receive the end" if last and last.ending else "no round stands"
        if self._stands() and not (last and last.ending):
            what = f"a round stands, with the notices {self.env.shared.notices}, and the status of "
            what += f"term {self.env.shared.shown and self.env.shared.shown['term']}"
        return f"{what} {self.scenario.bound_s:.0f} s after all was healed: {alive} live, {last}"

    def outcome(self) -> Outcome:
        """Return the numbers of the schedule."""
        monitor, entries = self.monitor, self.env.register.entries
        ended = bool(entries) and entries[-1].ending is not None
        return Outcome(
            schedules=1, virtual_s=self.world.now, events=self.world.num_events,
            checks=monitor.num_checks, faults=self.faults.count, rounds=monitor.rounds,
            elections=monitor.elections, fenced=monitor.fenced, growths=monitor.growths,
            agreements=monitor.agreements, departures=monitor.departures, endings=int(ended),
            shown=self.env.shared.monitor.shown, notices=self.env.shared.monitor.obeyed,
            silent=self.monitor.silent, late_appends=self.env.shared.monitor.late,
            late_statuses=self.env.shared.monitor.late_statuses, storage=self.env.storage.hits,
            stood_after=self._stood_after,
        )  # fmt: skip


class UnitSimulator(Simulator):
    """The world of one schedule of a run whose nodes only work together in units."""

    def draw(self) -> Scenario:
        """Draw the parameters of a schedule."""
        return with_units(super().draw(), self.world.rng)


class SizesSimulator(Simulator):
    """The world of one schedule of a run with some numbers of nodes only."""

    def draw(self) -> Scenario:
        """Draw the parameters of a schedule."""
        return with_sizes(super().draw(), self.world.rng)

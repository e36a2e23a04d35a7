"""One random schedule: a run of a few nodes in virtual time, with all that can go wrong.

The protocol's own classes run here (`rendezvous.follower_state`, `rendezvous.leader_state`, and
through it `rendezvous.round_state`), under adapters of the simulation. All chance comes from one
seed, so a schedule that fails fails again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from simulation.campaign import Tally
from simulation.cluster import SOUND, AgentProcess, Components, Env
from simulation.faults import Faults
from simulation.invariants import InvariantError, Monitor
from simulation.scenario import Scenario
from simulation.workload import Work
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

    agent_type = AgentProcess
    alone = False
    """Whether the workers of each node are a group of their own."""

    def __init__(
        self, seed: int, components: Components = SOUND, whole_trace: bool = False
    ) -> None:
        self.seed = seed
        self.components = components
        self.world = World(seed, whole_trace)
        self.scenario = self.draw()
        self.monitor = self.make_monitor()
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

    def make_monitor(self) -> Monitor:
        """Make what sees to the invariants."""
        return Monitor(self.scenario, self.world)

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
        late_from = len(self.env.nodes) - self.scenario.late
        for node in self.env.nodes:
            latest = self.scenario.calm_after_s if node.slot >= late_from else 1.5
            self.env.slurm.believe(node.task, "PENDING", 0)
            self.world.after(latest * rng.random(), None, node.boot)

    def _calm(self) -> None:
        self.world.log_event("world", "is calm from now on")
        self.faults.heal()

    # ---- progress -----------------------------------------------------------------------

    def _is_well(self) -> bool:
        """Return whether all that must come to pass in the calm has come to pass."""
        if self.env.register.entries and self.env.register.entries[-1].ending is not None:
            heard = not any(n.lives for n in self.env.nodes)
            return heard and (self.monitor.is_published or all(n.ended for n in self.env.nodes))
        return not self._is_enough() or (self._stands() and self._is_told_of())

    def _stands(self) -> bool:
        """Return whether the last round has stood for long enough, whole."""
        work = next((w for w in reversed(self.env.works.values()) if w.is_whole), None)
        if work is None or work is not self._standing or self._is_any_left_behind(work):
            self._standing, self._stands_since = work, self.world.now
            return False
        assert self._stands_since is not None
        if self.world.now - self._stands_since < self.scenario.confirm_s:
            return False
        self._stood_after[int(self._stands_since - self.scenario.calm_after_s)] += 1
        return True

    def _is_told_of(self) -> bool:
        """Return whether the status is the last leader's, and no node has an open notice."""
        shown, last = self.env.shared.shown, self.env.register.entries[-1]
        isolated = last.leader.address == str(self.env.network.isolated)
        told = shown is not None and shown["term"] == last.term
        return told and (isolated or not any(map(self.env.is_named_alive, self.env.shared.notices)))

    def _is_any_left_behind(self, standing: Work) -> bool:
        """Return whether an agent still has workers in another round than the one that stands."""
        agents = [n.agent for n in self.env.nodes if n.agent is not None and not n.agent.over]
        return any(a.work is not None and a.work is not standing for a in agents)

    def _is_enough(self) -> bool:
        """Return whether at least min nodes that reach each other live, or will again."""
        reachable = [
            n for n in self.env.nodes if n.slot != self.env.network.isolated and not n.ended
        ]
        return len(reachable) >= self.scenario.rules.min_nodes

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

"""One random schedule: a few replica groups in virtual time, with faults.

The protocol's own classes run here: `ft.lighthouse_state`, `ft.manager_state`, `ft.manager_client`,
`ft.state_check` and, through them, `ft.quorum`. Models replace the sockets, the process groups, the
Manager, and what a run's leader does for the nodes of its replicas. All random numbers come from
one seed, so a failure is reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulation.campaign import Tally
from simulation.ft.cluster import SOUND, Components, Env, Group
from simulation.ft.faults import Faults
from simulation.ft.invariants import Monitor, draw, draw_lasting
from simulation.ft.lighthouse import Coordinator
from simulation.ft.workers import Doing, Worker
from simulation.invariants import InvariantError
from simulation.world import World

_CHECK_EVERY_S = 0.5
_COMMITS = 2


@dataclass
class Outcome(Tally):
    """The counts of one schedule, or of many."""

    quorums: int = 0
    commits: int = 0
    failed_steps: int = 0
    heals: int = 0
    caught_up: int = 0
    """Workers that have taken a state over beside the training."""
    corrupted: int = 0
    """States that a check has found to be wrong, and that have healed."""
    named: int = 0
    """The same, as the servers have received their names, healed or not."""
    completed: int = 0
    """Spares that have completed a group."""
    relayed: int = 0
    """Schedules with groups of several nodes."""
    proposals: int = 0
    leaves_granted: int = 0
    dropped: int = 0
    """Quorums that left live members out."""
    shown: int = 0
    """Statuses that keepers' leaders have written."""
    notices: int = 0
    """Notice files that were obeyed."""
    keepers: int = 0
    stood: int = 0
    """Schedules in which all were in one quorum in the end."""


class Simulator:
    """The world of one schedule."""

    _draw = staticmethod(draw)

    def __init__(
        self, seed: int, components: Components = SOUND, whole_trace: bool = False
    ) -> None:
        self.seed = seed
        self.world = World(seed, whole_trace)
        self.scenario = self._draw(self.world.rng)
        self.monitor = Monitor(self.scenario, self.world)
        self.env = Env(seed, self.world, self.scenario, components, self.monitor)
        self.coordinator = self.env.keepers = Coordinator(self.env)
        self.faults = Faults(self.env, self.coordinator)
        self._stood = False

    def run(self) -> None:
        """Run the schedule.

        Raises:
            InvariantError: an invariant does not hold.
        """
        scenario, rng = self.scenario, self.world.rng
        for group in self.env.groups:
            late = group.index >= len(self.env.groups) - scenario.num_late
            latest = scenario.calm_after_s if late else 1.0
            for node in group.nodes:
                self.world.after(latest * rng.random(), None, node.boot)
        for node in self.env.spares:
            self.world.after(1.0 * rng.random(), None, node.boot)
        self.world.after(1.0 * rng.random(), None, self.coordinator.elect)
        self.faults.plan()
        self.world.run(scenario.calm_after_s)
        self.world.log_event("world", "is calm from now on")
        self.faults.heal()
        begun = {w: w.commits for g in self.env.groups for w in g.workers}
        end = self.world.now + self.scenario.bound_s
        while not self._has_progressed(begun):
            if self.world.now > end:
                raise InvariantError(self._complaint())
            self.world.run(self.world.now + _CHECK_EVERY_S)

    def _live_groups(self) -> list[Group]:
        return [g for g in self.env.groups if not g.is_over and not g.is_done]

    def _has_progressed(self, begun: Mapping[Worker, int]) -> bool:
        """Return whether all live groups are in one quorum and have made steps there."""
        live = self._live_groups()
        if any(map(self.env.is_named_alive, self.env.shared.notices)):
            return False
        if any(n.notice_at is not None for g in live for n in g.nodes):
            return False
        if len(live) < self.scenario.rules.min_replicas:
            return True
        if not all(g.is_complete for g in live):
            return False
        workers = [w for g in live for w in g.workers]
        ids = {w.steps.quorum_id for w in workers}
        made = all(w.commits >= _COMMITS + begun.get(w, 0) for w in workers)
        same = len(ids) <= 1 and all(w.is_settled and w.is_full for w in workers)
        self._stood = same and made and bool(workers)
        return same and made

    def _complaint(self) -> str:
        at = [
            (w.name, w.doing.value, w.steps.quorum_id & 0xFFFFF, w.steps.quorum_step, w.commits)
            for g in self._live_groups()
            for w in g.workers
            if w.doing is not Doing.OVER
        ]
        notices = self.env.shared.notices
        if any(map(self.env.is_named_alive, notices)):
            return f"a notice is not obeyed: {notices}"
        return f"not all make steps {self.scenario.bound_s:.0f} s after all was healed: {at}"

    def outcome(self) -> Outcome:
        """Return the numbers of the schedule."""
        m = self.monitor
        return Outcome(
            schedules=1, virtual_s=self.world.now, events=self.world.num_events,
            checks=m.num_checks, faults=self.faults.count, quorums=m.quorums, commits=m.commits,
            failed_steps=m.failed_steps, heals=m.heals, caught_up=m.caught_up,
            corrupted=m.corrupted, proposals=m.switches, named=m.named_wrong,
            completed=m.completed, relayed=int(self.scenario.num_nodes > 1),
            shown=self.env.shared.monitor.shown, notices=self.env.shared.monitor.obeyed,
            leaves_granted=m.leaves_granted, dropped=m.dropped, keepers=self.coordinator.term,
            stood=int(self._stood),
        )  # fmt: skip


class LastingSimulator(Simulator):
    """A schedule of minutes, in which things stay wrong for longer than a minute."""

    _draw = staticmethod(draw_lasting)

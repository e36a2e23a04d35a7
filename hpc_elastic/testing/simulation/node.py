"""A node: its clock, its share of the file system, and the attempts of its task."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_elastic.testing.simulation.agent import AgentProcess
from hpc_elastic.testing.simulation.files import Access
from hpc_elastic.testing.simulation.network import Host
from hpc_elastic.testing.simulation.scenario import LONGEST_AWAY_S

if TYPE_CHECKING:
    from hpc_elastic.testing.simulation.leader import Leader
    from hpc_elastic.testing.simulation.simulator import Simulator

_STILL_RUNNING_S = 12.0
"""So long at most Slurm calls the task of a dead node RUNNING."""


class Node(Host):
    """One task of the array, and the node that it has."""

    def __init__(self, sim: Simulator, slot: int) -> None:
        rng = sim.world.rng
        super().__init__(slot)
        self.task = f"7_{slot}"
        self.attempt = -1
        self.nproc = rng.choice((1, 1, 2))
        self.access = Access(slot)
        self.ended = False
        """Whether the task never comes back."""
        self.agent: AgentProcess | None = None
        self._sim = sim
        self._offset = rng.uniform(0.0, 1e6)
        self._rate = rng.uniform(0.99, 1.01)

    def clock(self) -> float:
        """Return the node's monotonic time."""
        return self._offset + self._rate * self._sim.world.now

    def listener(self, port: int) -> Leader | None:
        """Return what listens on a port."""
        leaders = self.agent.leaders if self.agent is not None else []
        return next((x for x in leaders if x.is_open and x.endpoint.port == port), None)

    @property
    def lives(self) -> bool:
        """Whether an agent runs on it."""
        return self.agent is not None and not self.agent.over

    def boot(self) -> None:
        """Slurm starts the task."""
        world = self._sim.world
        wait = self._sim.slurm.postponed_until - world.now
        if wait > 0:
            world.after(wait, None, self.boot)
            return
        self.attempt += 1
        self.up = True
        self._sim.network.came_back(self)
        self._sim.slurm.believe(self.task, "RUNNING", self.attempt)
        world.after(0.1 + world.rng.random(), None, self._start)

    def _start(self) -> None:
        self._sim.world.note(self.task, "starts", self.attempt)
        self.agent = AgentProcess(self._sim, self)
        self.agent.start()

    def crash(self, comes_back: bool) -> None:
        """The agent's process ends: its task has failed, or is requeued."""
        if self.agent is not None:
            self._sim.world.note(self.task, "process crashes")
            self._end(silently=False)
            self._requeue(LONGEST_AWAY_S * self._sim.world.rng.random() if comes_back else None)

    def vanish(self, comes_back: bool) -> None:
        """The node dies; Slurm learns of it late."""
        if self.agent is None:
            return
        self._sim.world.note(self.task, "node dies")
        self._end(silently=True)
        self.up = False
        late = _STILL_RUNNING_S * self._sim.world.rng.random()
        away = 2.0 if comes_back else None
        self._sim.world.after(late, None, self._requeue, away)

    def preempt(self) -> None:
        """Slurm takes the node: the agent says that it leaves."""
        if self.agent is not None and not self.agent.process.paused:
            self._sim.world.note(self.task, "is preempted")
            self.agent.over = True
            self.agent.leave("preempted")
            self.left(2.0)

    def left(self, away_s: float | None) -> None:
        """The agent has gone by itself, for good (None) or for a while."""
        self._end(silently=False)
        self._requeue(away_s)

    def _end(self, silently: bool) -> None:
        assert self.agent is not None
        self.agent.end(silently)
        self.agent = None

    def _requeue(self, away_s: float | None) -> None:
        slurm, world = self._sim.slurm, self._sim.world
        if away_s is None:
            self.ended = True
            slurm.believe(self.task, "FAILED", self.attempt)
            return
        slurm.believe(self.task, "COMPLETING", self.attempt)
        leaving_s = world.rng.random()
        world.after(leaving_s, None, slurm.believe, self.task, "PENDING", self.attempt + 1)
        world.after(leaving_s + 0.5 + away_s, None, self.boot)

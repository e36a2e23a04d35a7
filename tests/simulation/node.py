"""A node: its clock, its share of the file system, and the attempts of its task."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simulation.network import Host
from simulation.register import NodeRegister
from simulation.scenario import LONGEST_AWAY_S
from simulation.storage import Mount

if TYPE_CHECKING:
    from simulation.agent import AgentProcess
    from simulation.leader import Leader
    from simulation.simulator import Simulator

_STILL_RUNNING_S = 12.0
"""So long at most Slurm calls the task of a dead node RUNNING."""
_RESERVE_S = 0.2
"""So long before the end of its grace an agent leaves, whatever its round does."""
_TWO_MINUTES_S = 120.0
"""What Slurm says of a task that it holds after a requeue."""


class Node(Host):
    """One task of the array, and the node that it has."""

    def __init__(self, sim: Simulator, slot: int) -> None:
        rng = sim.world.rng
        super().__init__(slot)
        self.task = f"7_{slot}"
        self.attempt = -1
        self.nproc = rng.choice((1, 1, 2))
        storage, stale_s = sim.storage, sim.scenario.stale_s
        life_s = 0.0 if stale_s else sim.scenario.attributes_s * storage.rng.random()
        by_time = sim.scenario.sees_ticks and not stale_s
        self.mount = Mount(storage, slot, life_s=life_s, stale_s=stale_s, by_time=by_time)
        self.register = NodeRegister(sim.register, self.mount)
        self.ended = False
        """Whether the task never comes back."""
        self.agent: AgentProcess | None = None
        self.hostname = f"node{slot}"
        """Of the machine that its task runs on, as Slurm chose it."""
        self._boots = 0
        self._held = False
        """Whether Slurm holds its task after a requeue."""
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
        self._boot(self._boots)

    def _boot(self, number: int) -> None:
        if number != self._boots:
            return  # it was started earlier than was planned then
        world, slurm = self._sim.world, self._sim.slurm
        wait = slurm.postponed_until - world.now
        if wait > 0:
            world.after(wait, None, self._boot, number)
            return
        self._sim.monitor.changed()
        self._boots += 1
        self._held = False
        self.attempt += 1
        if self.hostname in slurm.excluded:
            self.hostname = f"node{self.slot}-{self.attempt}"
        self.up = True
        self._sim.network.came_back(self)
        self._sim.slurm.believe(self.task, "RUNNING", self.attempt)
        world.after(0.1 + world.rng.random(), None, self._start)

    def _start(self) -> None:
        self._sim.world.note(self.task, "starts", self.attempt)
        self.agent = self._sim.make_agent(self)
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
        self.mount.forget()
        self.up = False
        late = _STILL_RUNNING_S * self._sim.world.rng.random()
        away = 2.0 if comes_back else None
        held = comes_back and self._sim.world.rng.random() < 0.5
        self._sim.world.after(late, None, partial(self._requeue, away, held=held))

    def preempt(self) -> None:
        """Slurm takes the node without any grace: the agent has just time to say that it leaves."""
        if self.agent is not None and not self.agent.process.paused:
            self._sim.world.note(self.task, "is preempted")
            self.agent.over = True
            self.agent.leave("preempted")
            self.left(2.0)

    def notice(self, grace_s: float) -> None:
        """Slurm is going to take the node, and says so."""
        agent, world = self.agent, self._sim.world
        if agent is None or agent.over or agent.process.paused:
            return
        world.note(self.task, "is noticed", grace_s)
        self._sim.monitor.changed()
        agent.notice(grace_s)
        in_time = max(0.0, grace_s - _RESERVE_S)
        world.after(in_time, agent.process, self._hurry, agent, grace_s)
        world.after(grace_s, None, self._kill, agent)

    def _hurry(self, agent: AgentProcess, grace_s: float) -> None:
        if not agent.over:
            self._sim.monitor.leaves_too_late(agent, grace_s)
        agent.leave_now()

    def _kill(self, agent: AgentProcess) -> None:
        """The grace is over: what is still there is killed, and Slurm requeues it."""
        if self.agent is agent:
            self._sim.world.note(self.task, "is killed")
            self._end(silently=False)
            self._requeue(self.away_s(), held=self._sim.world.rng.random() < 0.5)

    def away_s(self) -> float:
        """Return how long its task is away if it leaves."""
        rng = self._sim.world.rng
        is_long = self._sim.scenario.is_quiet and rng.random() < 0.5
        return LONGEST_AWAY_S if is_long else 0.5 + 2.0 * rng.random()

    def clear_hold(self) -> None:
        """Somebody lets the task start although Slurm holds it."""
        if self._held:
            self._held = False
            self._boots += 1
            self._sim.world.after(2.0, None, self._boot, self._boots)

    def left(self, away_s: float | None) -> None:
        """The agent has gone by itself, for good (None) or for a while."""
        self._end(silently=False)
        self._requeue(away_s)

    def _end(self, silently: bool) -> None:
        assert self.agent is not None
        self.agent.end(silently)
        self.agent = None

    def _requeue(self, away_s: float | None, *, held: bool = False) -> None:
        """Requeue the task, so that it starts after a while; None: it has failed."""
        slurm, world = self._sim.slurm, self._sim.world
        if away_s is None:
            self.ended = True
            slurm.believe(self.task, "FAILED", self.attempt)
            return
        slurm.believe(self.task, "COMPLETING", self.attempt)
        leaving_s = world.rng.random()
        if held:
            away_s = LONGEST_AWAY_S
        world.after(leaving_s, None, self._queued, held)
        world.after(leaving_s + 0.5 + away_s, None, self._boot, self._boots)

    def _queued(self, held: bool) -> None:
        self._held = held
        starts_in_s = _TWO_MINUTES_S if held else None
        self._sim.slurm.believe(self.task, "PENDING", self.attempt + 1, starts_in_s)

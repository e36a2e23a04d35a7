"""A round's workers: steps that all members make together, checkpoint boundaries, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hpc_elastic.rendezvous.record import Agent, Record
from hpc_elastic.testing.simulation.network import Host, Network
from hpc_elastic.testing.simulation.scenario import Training
from hpc_elastic.testing.simulation.world import Process, World


class Member(Protocol):
    """An agent, as the workers of its round know it."""

    me: Agent
    process: Process

    @property
    def host(self) -> Host:
        """The node that it is on."""

    def boundary(self, work: Work, step: int, held: int) -> None:
        """All workers of the node have announced a checkpoint."""

    def worker_failed(self, work: Work, message: str) -> None:
        """A worker of the node has failed."""

    def finished(self, work: Work) -> None:
        """All workers of the node have returned."""


class Work:
    """The workers of all members of one round; nobody in the simulation sees it whole."""

    __slots__ = (
        "_held", "_holding", "_network", "_training", "_waits", "_world", "complete_since",
        "members", "over", "record", "steps",
    )  # fmt: skip

    def __init__(self, record: Record, world: World, network: Network, training: Training) -> None:
        self.record = record
        self.members: dict[Agent, Member] = {}
        self.steps = 0
        """Steps that all members have made."""
        self.over = False
        """Whether some worker has ended: no further step will be complete."""
        self.complete_since: float | None = None
        self._held: set[Agent] = set()
        self._holding: dict[Agent, int] = {}
        self._waits = False
        self._world = world
        self._network = network
        self._training = training

    @property
    def is_whole(self) -> bool:
        """Whether all members are at work, alive, and reach each other."""
        if self.over or self.complete_since is None:
            return False
        hosts = [m.host for m in self.members.values()]
        alive = all(m.process.alive and not m.process.paused for m in self.members.values())
        return alive and not any(self._network.is_cut(a, b) for a in hosts for b in hosts)

    def enter(self, member: Member) -> None:
        """A member's workers have started."""
        self.members[member.me] = member
        if len(self.members) == len(self.record.members) and not self.over:
            self.complete_since = self._world.now
            self._next_step()
        if self._world.rng.random() < self._training.failure_rate:
            delay = 6 * self._world.rng.random()
            self._world.after(delay, member.process, self._fail, member)

    def leave(self, member: Member, victims: bool) -> None:
        """A member's workers are ended; the others lose a peer and may (``victims``) fail of it."""
        was_over, self.over = self.over, True
        if not victims or was_over:
            return
        for other in self.members.values():
            if other is not member and self._world.rng.random() < 0.5:
                args = (self, "Connection reset by peer")
                self._world.after(0.05 + 0.3 * self._world.rng.random(), other.process,
                                  other.worker_failed, *args)  # fmt: skip

    def hold(self, member: Member, number: int) -> None:
        """A member's workers are asked to hold at their next boundary, or (0) not to any more."""
        self._holding[member.me] = number
        if number:
            return
        self._held.discard(member.me)
        if self._waits and not self._held:
            self._next_step()

    def _fail(self, member: Member) -> None:
        if not self.over and self._world.now < self._training.fails_until_s:
            member.worker_failed(self, "out of luck")

    def _next_step(self) -> None:
        self._waits = False
        self._world.after(self._training.step_s, None, self._step)

    def _step(self) -> None:
        if self.over:
            return
        if self._held:
            self._waits = True
        elif not self.is_whole:
            self._next_step()  # a collective waits for whoever is cut off or paused
        else:
            self.steps += 1
            self._after_step()

    def _after_step(self) -> None:
        training, step = self._training, self.steps
        if training.total_steps is not None and step >= training.total_steps:
            self._each(self._finish, len(self.record.members))
            return
        if step % training.boundary_every == 0:
            announcing = {"all": len(self.record.members), "first": 1, "nobody": 0}
            self._each(self._boundary, announcing[training.announced_by])
        self._next_step()

    def _each(self, what: Callable[[Member, int], None], first: int) -> None:
        """Let the first members do something, each a little apart."""
        for agent in self.record.members[:first]:
            member = self.members[agent]
            delay = 0.3 * self._training.step_s * self._world.rng.random()
            self._world.after(delay, member.process, what, member, self.steps)

    def _boundary(self, member: Member, step: int) -> None:
        if self.over or step != self.steps:
            return
        held = self._holding.get(member.me, 0)
        if held:
            self._held.add(member.me)
        member.boundary(self, step, held)

    def _finish(self, member: Member, step: int) -> None:
        member.finished(self)

"""The process group of one quorum: collectives that need all members, connections that break."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_elastic.ft.messages import QuorumResult
from simulation.ft.monitor import Monitor
from simulation.world import World

if TYPE_CHECKING:
    from simulation.ft.worker import State, Worker

_LOOK_S = 0.002

Given = tuple["Worker", "State | None", int]


class Meeting:
    """Members meet, by rank, and reduce at one call after the other.

    Only neighbours on the ring see that a member closes its connections: the others wait on.
    """

    def __init__(self, placement: QuorumResult, world: World, monitor: Monitor) -> None:
        self.quorum_id = placement.quorum_id
        self.size = placement.replica_world_size
        self.members: dict[int, Worker] = {}
        self.gone: set[int] = set()
        self._world = world
        self._monitor = monitor
        self._given: dict[int, Given] = {}
        self._call = 0

    def join(self, rank: int, worker: Worker) -> None:
        """A member wants to be configured; all are, once the last one comes."""
        self.members[rank] = worker
        if len(self.members) == self.size and not self.gone:
            for member in self.members.values():
                self._world.after(self._delay(), member.process, member.configured, self.quorum_id)
        elif self._is_cut_off(rank):
            self._fail(rank)

    def reduce(self, rank: int, call: int, state: State | None, divisor: int) -> None:
        """A member comes to a collective, with a gradient of its state or (None) with zero."""
        worker = self.members[rank]
        if not self._given:
            self._call = call
        self._monitor.check(call == self._call, "calls are mixed", worker.name, call, self._call)
        self._given[rank] = (worker, state, divisor)
        if self._is_cut_off(rank):
            self._fail(rank)
        if len(self._given) == self.size:
            self._complete(call)

    def leave(self, rank: int) -> None:
        """A member closes its connections, or dies."""
        if rank in self.gone:
            return
        self.gone.add(rank)
        for neighbour in ((rank - 1) % self.size, (rank + 1) % self.size):
            if neighbour in self.members and neighbour not in self.gone:
                self._fail(neighbour)

    def _complete(self, call: int) -> None:
        given, self._given = self._given, {}
        states = [(worker, state) for worker, state, _ in given.values() if state is not None]
        self._monitor.reduced(call, states, {divisor for _, _, divisor in given.values()})
        names = tuple(sorted(worker.name for worker, _ in states))
        for rank, (worker, _, _) in given.items():
            self._world.after(self._delay(), worker.process, self._deliver, rank, call, names)

    def _deliver(self, rank: int, call: int, names: tuple[str, ...]) -> None:
        """The last bytes come, unless who sends them has closed its connection before."""
        worker = self.members[rank]
        if self._is_cut_off(rank) and self._world.rng.random() < 0.5:
            worker.failed(self.quorum_id, call, "a peer has closed the connection")
        else:
            worker.reduced(self.quorum_id, call, names)

    def _is_cut_off(self, rank: int) -> bool:
        return not self.gone.isdisjoint(((rank - 1) % self.size, (rank + 1) % self.size))

    def _fail(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given or len(self.members) < self.size:
            self._world.after(_LOOK_S, worker.process, self._cut, rank)

    def _cut(self, rank: int) -> None:
        worker = self.members[rank]
        if rank in self._given:
            worker.failed(self.quorum_id, self._call, "a peer has closed the connection")
        elif len(self.members) < self.size:
            worker.failed(self.quorum_id, 0, "a peer did not come")

    def _delay(self) -> float:
        chance = self._world.rng.random()
        return 0.002 + (0.3 * self._world.rng.random() if chance < 0.05 else 0.002 * chance)

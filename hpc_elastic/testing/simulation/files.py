"""The shared file system: the run's records, created once each, and the leaders' leases."""

from __future__ import annotations

from collections.abc import Callable

from hpc_elastic.rendezvous.record import Record
from hpc_elastic.testing.simulation.invariants import Monitor
from hpc_elastic.testing.simulation.scenario import SLOWEST_FILES_S
from hpc_elastic.testing.simulation.world import Process, World


class Access:
    """How one node sees the file system."""

    __slots__ = ("failing", "slot", "slow")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.slow = 0
        """How many faults at present make it slow."""
        self.failing = 0


class Files:
    """Records by number, with the time at which each came to be, and who made it."""

    __slots__ = ("_leases", "_made", "_monitor", "_stale_s", "_world", "exclusive", "records")

    def __init__(self, world: World, monitor: Monitor, stale_s: float, exclusive: bool) -> None:
        self.records: list[Record] = []
        self.exclusive = exclusive
        self._made: list[tuple[float, int]] = []
        self._leases: dict[int, int] = {}
        self._world = world
        self._monitor = monitor
        self._stale_s = stale_s

    def look(
        self,
        access: Access,
        process: Process,
        answer: Callable[[int, Record | None, int | None], None],
        fail: Callable[[str], None],
    ) -> None:
        """Read the last record and its epoch's lease."""
        self._world.after(self._latency(access), None, self._look, access, process, answer, fail)

    def create(
        self,
        access: Access,
        process: Process,
        record: Record,
        answer: Callable[[bool | None], None],
    ) -> None:
        """Create a record; the answer is None where the file system gave none."""
        latency = self._latency(access)
        before = self._world.rng.random() * latency
        args = (access, process, record, answer, latency - before)
        self._world.after(before, None, self._create, *args)

    def renew(
        self,
        access: Access,
        process: Process,
        epoch: int,
        beats: int,
        answer: Callable[[bool], None],
    ) -> None:
        """Renew a lease; a request that is under way outlives whoever made it."""
        args = (access, process, epoch, beats, answer)
        self._world.after(self._latency(access), None, self._renew, *args)

    # ---- when the request arrives -------------------------------------------------------

    def _latency(self, access: Access) -> float:
        chance = self._world.rng.random()
        return SLOWEST_FILES_S * chance * chance if access.slow else 0.002 + 0.02 * chance

    def _look(
        self,
        access: Access,
        process: Process,
        answer: Callable[[int, Record | None, int | None], None],
        fail: Callable[[str], None],
    ) -> None:
        if access.failing:
            process.call(fail, "input/output error")
            return
        number = self._seen_by(access.slot)
        whole = number - 1 if self._is_torn(number, access.slot) else number
        record = self.records[whole - 1] if whole else None
        lease = self._leases.get(record.epoch) if record else None
        process.call(answer, number, record, lease)

    def _seen_by(self, slot: int) -> int:
        """Return the number of the last record that a node sees: a cache may hide younger ones."""
        number = len(self.records)
        if self._stale_s:
            since = self._world.now - self._stale_s * self._world.rng.random()
            while (
                number and self._made[number - 1][0] > since and self._made[number - 1][1] != slot
            ):
                number -= 1
        return number

    def _is_torn(self, number: int, slot: int) -> bool:
        """Tell whether a node sees that a record is there, but not yet all of it."""
        if not (self._stale_s and number) or self._made[number - 1][1] == slot:
            return False
        age = self._world.now - self._made[number - 1][0]
        return age < self._stale_s and self._world.rng.random() < 0.2

    def _create(
        self,
        access: Access,
        process: Process,
        record: Record,
        answer: Callable[[bool | None], None],
        rest_s: float,
    ) -> None:
        outcome: bool | None = None
        if not access.failing or self._world.rng.random() < 0.3:  # done, but the answer is lost
            outcome = self._put(access, record)
        if access.failing:
            outcome = None
        self._world.after(rest_s, process, answer, outcome)

    def _put(self, access: Access, record: Record) -> bool:
        at = record.number - 1
        if at < len(self.records):
            if self.records[at] is record:
                return True
            if self.exclusive:
                return False
        self._monitor.record_created(self.records, record)
        self.records[at : at + 1] = [record]
        self._made[at : at + 1] = [(self._world.now, access.slot)]
        return True

    def _renew(
        self,
        access: Access,
        process: Process,
        epoch: int,
        beats: int,
        answer: Callable[[bool], None],
    ) -> None:
        if not access.failing:
            self._leases[epoch] = beats
        process.call(answer, not access.failing)

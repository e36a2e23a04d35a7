"""The run's records and leases in virtual time, by the product's own procedures.

What must hold of them:

Look       It shows every record that was there when it began; where a listing may be late, every
           one that was there so long before.
Answer     Who hears that his record was created has created it, and who hears that the number is
           taken has not. No answer waits for what may hang.
Lease      Nobody takes a leader for silent whose lease was renewed within
`HeartbeatConfig.lapse_s`, by
           any clock, before what was read of it last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hpc_elastic.rendezvous.effects import Claim
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import LogEntry, LogSteps
from simulation.invariants import Monitor
from simulation.storage import File, Mount, Name, Storage, alone
from simulation.world import Process

_FASTEST_CLOCK = 1.02
"""A node's clock shows this much more at most of the time that has passed."""
_LONGEST_ANSWER_S = 60.0
"""Slow calls take less together, and so does a process that stands still meanwhile."""
_SYNCED_AFTER_S = 0.015
"""A file is on the server's disk so long after it was written."""
_TORN = 0.2
"""Where a listing may be late, so many of the reads of young records find but a part."""

Seen = tuple[int, LogEntry | None, int | None]


class Register:
    """All records that were created.

    Args:
        storage: Where they are.
        monitor: Checks what they say.
        procedures: How they are found and created.
        exclusive: Whether a number that is taken can not be taken again; False: a planted bug.
    """

    def __init__(
        self,
        storage: Storage,
        monitor: Monitor,
        procedures: Callable[[NodeRegister], LogSteps],
        exclusive: bool,
    ) -> None:
        self.records: list[LogEntry] = []
        self.storage = storage
        self.monitor = monitor
        self.procedures = procedures
        self.exclusive = exclusive
        self._files: list[File] = []

    def created(self, record: LogEntry, file: File) -> None:
        """A record has come to be."""
        self.monitor.record_created(self.records, record)
        at = record.number - 1
        self.records[at : at + 1], self._files[at : at + 1] = [record], [file]

    def num_made_by(self, time: float) -> int:
        """Return how many records there were at some time."""
        number = len(self._files)
        while number and self._files[number - 1].made_at > time:
            number -= 1
        return number

    def made_at(self, record: LogEntry) -> float:
        """Return when a record that is there was created."""
        return self._files[record.number - 1].made_at


class NodeRegister:
    """What one node does with the records; see `rendezvous.log_entry.LogFiles` for the calls."""

    def __init__(self, register: Register, mount: Mount) -> None:
        self.mount = mount
        self.rdzv = register.storage.rdzv
        self.staged: File | None = None
        """The file of the record that this node has put last."""
        self._register = register
        self._storage = register.storage
        self._records = register.procedures(self)
        self._num_staged = 0
        self._staged: dict[int, tuple[Name, File]] = {}
        """What is written under another name, and not linked yet."""
        self._leases: dict[int, tuple[int | None, float]] = {}
        """Epoch -> what was read of its lease, and until when that is read again."""
        self._lease_age_s: dict[int, float] = {}
        """Epoch -> for how long its lease had not changed when the server was asked last."""

    # ---- for agents and leaders ---------------------------------------------------------

    def look(
        self,
        process: Process,
        answer: Callable[[int, LogEntry | None, int | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Read the last record and its epoch's lease."""
        checked = self._checked(lambda seen: answer(*seen), lambda seen: seen[0])
        self._carry_out(process, self._records.look(), checked, fail)

    def look_for_number(
        self, process: Process, answer: Callable[[int], None], fail: Callable[[Exception], None]
    ) -> None:
        """Read the last record's number."""
        checked = self._checked(answer, lambda number: number)
        self._carry_out(process, self._records.last_number(), checked, fail)

    def create(
        self, process: Process, record: LogEntry, answer: Callable[[bool | None], None]
    ) -> None:
        """Create a record; the answer is None where the file system gave none."""

        def done(created: bool) -> None:
            self._check_answer(record, created)
            answer(created)

        self._carry_out(process, self._records.create(record), done, lambda _: answer(None))

    def renew_lease(
        self, process: Process, epoch: int, beats: int, answer: Callable[[bool], None]
    ) -> None:
        """Renew a lease; the answer tells whether that has worked."""
        steps = alone(partial(self._write_lease, epoch, beats))
        self._carry_out(process, steps, lambda _: answer(True), lambda _: answer(False))

    def check_claim(self, claim: Claim, liveness: HeartbeatConfig) -> None:
        """A leader is taken for dead, and nothing but its silence speaks for that."""
        assert claim.before is not None
        age_s = self._lease_age_s[claim.before.epoch]
        self._register.monitor.silent += 1
        lapsed = age_s * _FASTEST_CLOCK >= liveness.lapse_s - liveness.stale_s
        what = "a leader was taken for silent that renews its lease"
        self._register.monitor.check(lapsed, what, claim.before.epoch, age_s)

    def _carry_out(self, process: Process, *rest: Any) -> None:
        self._storage.carry_out(self.mount, process, *rest)

    def _checked(
        self, answer: Callable[[Any], None], number_of: Callable[[Any], int]
    ) -> Callable[[Any], None]:
        """Return what hears of a look that begins now."""
        register = self._register
        there = register.num_made_by(self._storage.world.now - self.mount.stale_s)

        def looked(seen: Any) -> None:
            number, what = number_of(seen), "a look has missed a record"
            register.monitor.check(number >= there, what, number, there)
            answer(seen)

        return looked

    def _check_answer(self, record: LogEntry, created: bool) -> None:
        register = self._register
        its_own = register.records[record.number - 1] is record
        what = "its own record was denied" if its_own else "another's record was taken for its own"
        register.monitor.check(its_own == created, what, record)
        waited_s = self._storage.world.now - register.made_at(record) if created else 0.0
        what = "a decision that was made waited"
        register.monitor.check(waited_s <= _LONGEST_ANSWER_S, what, record, waited_s)

    # ---- see `LogFiles` ----------------------------------------------------------------

    def numbers(self, *, anew: bool = True) -> frozenset[int]:
        """List the folder; see `Mount.names_in`."""
        names = self.mount.names_in(self.rdzv, anew=anew)
        return frozenset(number for kind, number, *_ in names if kind == "record")

    def read(self, number: int) -> LogEntry | None:
        """Open a record; it may not be whole yet where a listing may be late."""
        try:
            file = self.mount.open(self.rdzv, ("record", number))
        except FileNotFoundError:
            return None
        is_young = self._storage.world.now - file.made_at < self.mount.stale_s
        if is_young and file.maker != self.mount.slot and self._storage.rng.random() < _TORN:
            return None
        record: LogEntry = file.content
        return record

    def put(self, record: LogEntry) -> None:
        """Write a record under another name, and a moment later link it to its own."""
        if id(record) not in self._staged:
            self._num_staged += 1
            staged: Name = ("staged", self._num_staged, self.mount.slot)
            self._staged[id(record)] = staged, self.mount.write(self.rdzv, staged, record)
        staged, file = self._staged[id(record)]
        self.mount.hold_up(self.rdzv, staged, _SYNCED_AFTER_S)
        del self._staged[id(record)]
        self.staged, name = file, ("record", record.number)
        file.made_at = self._storage.world.now
        if not self._register.exclusive:
            self.rdzv.entries.pop(name, None)
        try:
            if name not in self.rdzv.entries:
                self._register.created(record, file)
            self.mount.link(file, self.rdzv, name)
        finally:
            self.mount.remove_behind(self.rdzv, staged)

    def exists(self, number: int) -> bool:
        """Tell whether a record is there, as far as memory goes."""
        return self.mount.find(self.rdzv, ("record", number)) is not None

    def remove_staged(self) -> None:
        """Remove the file of the record that was put last, and wait for that."""
        self.mount.unlink(self.rdzv, ("staged", self._num_staged, self.mount.slot))

    def lease(self, epoch: int) -> int | None:
        """Open a lease; what is read of it may be old."""
        register, now = self._register, self._storage.world.now
        beats, until = self._leases.get(epoch, (None, -1.0))
        if now < until:
            return beats
        claim = next(r for r in register.records if r.epoch == epoch)
        self._lease_age_s[epoch] = now - register.made_at(claim)
        try:
            file = self.mount.open(self.rdzv, ("lease", epoch))
        except FileNotFoundError:
            return None
        self._lease_age_s[epoch] = min(self._lease_age_s[epoch], now - file.changed_at)
        until = now + self.mount.stale_s * self._storage.rng.random()
        self._leases[epoch] = file.content, until
        return self._leases[epoch][0]

    def _write_lease(self, epoch: int, beats: int) -> None:
        self.mount.write(self.rdzv, ("lease", epoch), beats)

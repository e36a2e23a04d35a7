"""How the run's records are found and created, whatever a file system's caches say (pure).

- A record is made complete under another name and then linked to its own: link(2) fails if the name
  exists, on NFS too, so that exactly one agent creates each number (`record` says what follows from
  that).
- Where the reply to link(2) is lost, the record that is there tells whose it is: it names its
  leader, and what that one has decided. A count of links may come from a cache, and the numbers of
  inodes may change.
- The last record is found by a listing, never by a look for the next one's path: a client remembers
  for a minute that a name was not there.
- The file under the other name is removed *behind*: a removal may hang for as long as a dead node
  holds a delegation, and a decision that is made waits for nothing.
- A lease is a counter that the leader of an epoch raises as long as it lives. Only whether it
  changes matters, seen on the reader's own clock: no two clocks are ever compared.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Protocol

from hpc_elastic.rendezvous.record import Record
from hpc_elastic.rendezvous.steps import Steps


class RecordFiles(Protocol):
    """A run's records and leases. Each call may block, and may raise `OSError`."""

    def numbers(self) -> Collection[int]:
        """Return the numbers of all records, from a fresh listing."""

    def read(self, number: int) -> Record | None:
        """Open a record anew and return it; None if it is damaged or not there."""

    def put(self, record: Record) -> None:
        """Link a record to its number; `FileExistsError`: that is taken, or the reply was lost."""

    def lease(self, epoch: int) -> int | None:
        """Open a lease anew; return what the leader wrote last, None if nothing of his is there."""


class Records:
    """What is done with the records of one run.

    Args:
        files: Where it is done.
    """

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    def last_number(self) -> Steps[int]:
        """Return the number of the last record; 0 if there is none.

        Raises:
            OSError: the file system does not answer.
        """
        return max((yield self._files.numbers), default=0)

    def last(self) -> Steps[tuple[int, Record | None]]:
        """Return the number of the last record, and the newest record that verifies.

        Raises:
            OSError: the file system does not answer.
        """
        last = yield from self.last_number()
        for number in range(last, 0, -1):
            record: Record | None = yield partial(self._files.read, number)
            if record is not None:
                return last, record
        return last, None

    def look(self) -> Steps[tuple[int, Record | None, int | None]]:
        """Return the same, and the lease of that record's epoch.

        Raises:
            OSError: the file system does not answer.
        """
        number, record = yield from self.last()
        if record is None:
            return number, None, None
        return number, record, (yield partial(self._files.lease, record.epoch))

    def create(self, record: Record) -> Steps[bool]:
        """Create a record; False if its number is taken.

        Raises:
            OSError: it failed; the record may be tried again.
        """
        try:
            yield partial(self._files.put, record)
        except OSError:
            if record.number not in (yield self._files.numbers):
                raise
            found: Record | None = yield partial(self._files.read, record.number)
            return found == record
        return True

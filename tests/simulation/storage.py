"""The shared file system: a server, and the mount of each node with the caches of an NFS client.

- A client caches names, absent ones too, while the attributes of their folder are valid, at most
  60 s. If the folder has changed when they are fetched again, it drops the names. So it uses a
  folder that another node has renamed by its old name for a while.
- Listing a folder opens it, and opening fetches its attributes; an opened file has its present
  content. A late listing (`Mount.stale_s`) shows an earlier state.
- A client detects a change of a folder by a count of its changes, or (NFS 3) by the time of the
  last one. That has coarse ticks: of two changes in one tick the client misses the second, unless
  it requests a new listing.
- The count of links is cached, and the number of an inode may differ from call to call.
- A reply may be lost after the operation. Then the client retries and finds the name taken, or
  gone; or the call fails, done or not.
- A removal may hang for `REMOVAL_HANGS_S`: the server recalls a delegation from a dead client.

A mount executes the product's own procedures (`rendezvous.log_entry`) step by step. A step arrives
at the server after a while, even if the process dies; the next one waits for the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import LogEntry, LogSteps
from hpc_elastic.rendezvous.term import RunFiles, TermFolder, TermOverError
from hpc_elastic.shared_files import Steps
from hpc_elastic.transport.messages import Json
from simulation.invariants import Monitor
from simulation.world import Process, World

REMOVAL_HANGS_S = 100.0
TICK_S = 0.018
"""Resolution of a server's clock."""
_ROUNDING_S = 1e-6
Name = tuple[Any, ...]
"""Name of a file in its folder, such as ``("entry", 5)``."""


class File:
    """One file of the server."""

    __slots__ = ("changed_at", "content", "links", "made_at", "maker")

    def __init__(self, content: Any, now: float, maker: int) -> None:
        self.content = content
        self.links = 0
        self.made_at = self.changed_at = now
        self.maker = maker
        """Slot of the node that created the file."""


class Folder:
    """One folder of the server."""

    __slots__ = ("changed_at", "changes", "entries")

    def __init__(self) -> None:
        self.changes = 0
        self.changed_at = 0.0
        self.entries: dict[Name, File | Folder] = {}


class _Cache:
    """A client's cache of a folder."""

    __slots__ = ("listed", "listed_until", "names", "stamp", "until")

    def __init__(self) -> None:
        self.stamp = -1
        """Version of the folder, to detect a change."""
        self.until = self.listed_until = -1.0
        """End of the validity of the attributes, and of the listing."""
        self.names: dict[Name, File | Folder | None] = {}
        self.listed: set[Name] | None = None
        """The names in the last listing, or None if a new one is needed."""


class _HeldUpError(Exception):
    """The step must be retried after this many seconds."""


class Storage:
    """The server, and the steps on their way to it.

    Args:
        world: The clock.
        rng: A random generator for the file system alone.
        slowest_s: Longest duration of a step on a slow mount.
    """

    def __init__(self, world: World, rng: random.Random, slowest_s: float) -> None:
        self.world = world
        self.rng = rng
        self.run, self.rdzv, self.notices = Folder(), Folder(), Folder()
        self.hits: Counter[str] = Counter()
        """Kinds of differences between the views of a client and the server -> counts."""
        self._slowest_s = slowest_s

    def carry_out(
        self,
        mount: Mount,
        process: Process,
        steps: Steps[Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Execute a procedure for a process, and pass it the result or the error."""

        def execute_next(result: Any) -> None:
            try:
                step = steps.throw(result) if isinstance(result, OSError) else steps.send(result)
            except StopIteration as over:
                done(over.value)
            except (OSError, TermOverError) as e:
                failed(e)
            else:
                chance = self.rng.random()
                slow = self._slowest_s * chance * chance
                latency = slow if mount.slow else 0.001 + 0.01 * chance
                before = latency * self.rng.random()
                self.world.after(before, None, arrive, step, latency - before)

        def arrive(step: Callable[[], Any], rest_s: float) -> None:
            result: Any = OSError(errno.EIO, os.strerror(errno.EIO))
            if not mount.failing or self.rng.random() < 0.3:
                try:
                    output = step()
                except OSError as e:
                    output = e
                except _HeldUpError as e:
                    self.world.after(e.args[0], None, arrive, step, rest_s)
                    return
                self.hits["calls that fail after the operation"] += bool(mount.failing)
                result = result if mount.failing else output
            self.world.after(rest_s, process, execute_next, result)

        execute_next(None)


class Mount:
    """The client of one node.

    Args:
        storage: The server.
        slot: Slot of the node.
        life_s: Validity of attributes.
        stale_s: Largest age of a listing.
        by_time: Whether the client detects a change of a folder by its time alone.
    """

    def __init__(
        self,
        storage: Storage,
        slot: int,
        *,
        life_s: float = 0.0,
        stale_s: float = 0.0,
        by_time: bool = False,
    ) -> None:
        self.slot = slot
        self.stale_s = stale_s
        self.slow = self.failing = self.losing = self.hanging = 0
        """Number of present faults that slow calls down, let them fail, lose replies, hang."""
        self._storage = storage
        self._world = storage.world
        self._life_s = life_s
        self.by_time = by_time
        self._caches: dict[Folder, _Cache] = {}
        self._held_until: dict[tuple[Folder, Name], float] = {}
        self._removing: set[tuple[Folder, Name]] = set()

    def drop_caches(self) -> None:
        """Drop all caches, because the node reboots."""
        self._caches.clear()

    # ---- reading ------------------------------------------------------------------------

    def names_in(self, folder: Folder, *, anew: bool = True) -> Collection[Name]:
        """List a folder, which opens it; ``anew`` drops the last listing.

        See `hpc_elastic.shared_files.names_listed`.
        """
        cache = self._caches.get(folder)
        if cache is None or self._world.now >= cache.listed_until:
            cache = self._fetch(folder)
            cache.listed = None if anew else cache.listed
            cache.listed_until = self._world.now + self.stale_s * self._storage.rng.random()
        listed = cache.listed
        if listed is None:
            listed = cache.listed = set(folder.entries)
        self._storage.hits["listings that are late"] += len(listed) != len(folder.entries)
        return listed

    def find(self, folder: Folder, name: Name) -> File | Folder | None:
        """Look a name up, in the cache first; None if it does not exist, or did not."""
        cache = self._caches.get(folder)
        if cache is None or self._world.now >= cache.until:
            cache = self._fetch(folder)
        there = folder.entries.get(name)
        found = cache.names.setdefault(name, there)
        if found is not there:
            what = "absent from the cache" if found is None else "found by an old name"
            self._storage.hits[f"names that are {what}"] += 1
        return found

    def forget_absence(self, folder: Folder, name: Name) -> None:
        """Ask the server about a name; see `hpc_elastic.shared_files.forget_absence`."""
        cache = self._caches.get(folder)
        if cache is not None:
            cache.names.pop(name, None)

    def open(self, folder: Folder, name: Name) -> File:
        """Open a file by its path; if the cached one was removed, look the name up again."""
        found = self.find(folder, name)
        if isinstance(found, File) and not found.links:
            found = folder.entries.get(name)
        if not isinstance(found, File):
            raise _not_there(name)
        return found

    def num_links(self, file: File) -> int:
        """Return the cached number of a file's links."""
        return 1 if self._life_s else file.links

    def inode(self, file: File) -> int:
        """Return the number of a file's inode, which changes now and then."""
        return id(file) + (self._storage.rng.random() < 0.2)

    # ---- writing ------------------------------------------------------------------------

    def write(self, folder: Folder, name: Name, content: Any) -> File:
        """Write a file in place; create it if it does not exist."""
        file = folder.entries.get(name)
        if not isinstance(file, File):
            file = File(content, self._world.now, self.slot)
            self._set_entry(folder, name, file)
        file.content, file.changed_at = content, self._world.now
        return file

    def link(self, file: File, folder: Folder, name: Name) -> None:
        """Give a file another name."""
        exists = FileExistsError(errno.EEXIST, "it exists", name)
        if name in folder.entries:
            raise exists
        self._set_entry(folder, name, file)
        self._reply(exists)

    def rename(self, source: tuple[Folder, Name], target: tuple[Folder, Name]) -> None:
        """Move a file or a folder, by its present name on the server."""
        folder, name = source
        if source == target:
            return
        there = folder.entries.get(name)
        if there is None or self.find(folder, name) is None:
            raise _not_there(name)
        self._set_entry(*target, there)
        self._set_entry(folder, name, None)
        self._reply(_not_there(name))

    def unlink(self, folder: Folder, name: Name) -> None:
        """Remove a file."""
        if name not in folder.entries:
            raise _not_there(name)
        if self.hanging or (folder, name) in self._held_until:
            self._storage.hits["removals that hang"] += (folder, name) not in self._held_until
            self.hold_up(folder, name, REMOVAL_HANGS_S)
        self._set_entry(folder, name, None)
        self._reply(_not_there(name))

    def remove_behind(
        self, folder: Folder, name: Name, removed: Callable[[File], None] | None = None
    ) -> None:
        """Start to remove a file, unless that is under way, and do not wait.

        See `hpc_elastic.shared_files.remove_behind`. Calls ``removed`` with the removed file.
        """
        if (folder, name) in self._removing:
            return
        self._removing.add((folder, name))

        def over(_: object) -> None:
            self._removing.discard((folder, name))

        def unlink() -> None:
            file = folder.entries.get(name)
            try:
                self.unlink(folder, name)
            finally:
                if removed is not None and isinstance(file, File) and name not in folder.entries:
                    removed(file)

        is_well = not (self.slow or self.failing or self.losing or self.hanging)
        if is_well and (folder, name) not in self._held_until:
            with contextlib.suppress(OSError):
                unlink()
            over(None)
        else:
            self._storage.carry_out(self, Process(), single_step(unlink), over, over)

    def _set_entry(self, folder: Folder, name: Name, what: File | Folder | None) -> None:
        """Replace or remove a name of a folder; its cache stays valid if no other changed it."""
        before = folder.entries.pop(name, None)
        if isinstance(before, File):
            before.links -= 1
        if what is not None:
            folder.entries[name] = what
        if isinstance(what, File):
            what.links += 1
        stamp = self._stamp(folder)
        folder.changes += 1
        folder.changed_at = self._world.now
        cache = self._caches.get(folder)
        if cache is not None:
            if not self.stale_s:
                cache.listed, cache.listed_until = None, self._world.now
            elif cache.listed is not None:  # a late listing shows the client's own changes
                cache.listed = cache.listed - {name} if what is None else {*cache.listed, name}
            if cache.stamp == stamp:
                cache.stamp = self._stamp(folder)
            else:
                cache.until = self._world.now
            cache.names[name] = what

    def _stamp(self, folder: Folder) -> int:
        return int(folder.changed_at / TICK_S) if self.by_time else folder.changes

    def hold_up(self, folder: Folder, name: Name, for_s: float) -> None:
        """Raise until this time has passed since the first attempt of a step."""
        now = self._world.now
        left_s = self._held_until.setdefault((folder, name), now + for_s) - now
        if left_s > _ROUNDING_S:
            raise _HeldUpError(left_s)
        del self._held_until[folder, name]

    def _reply(self, again: OSError) -> None:
        """Lose the reply now and then, so that the client retries with this result."""
        if self.losing and self._storage.rng.random() < 0.7:
            self._storage.hits["replies lost after the operation"] += 1
            raise again

    def _fetch(self, folder: Folder) -> _Cache:
        """Fetch a folder's attributes, and drop its names if it has changed."""
        cache = self._caches.get(folder)
        if cache is None:
            cache = self._caches[folder] = _Cache()
        if cache.stamp != self._stamp(folder):
            cache.names.clear()
            cache.listed, cache.stamp = None, self._stamp(folder)
        cache.until = self._world.now + self._life_s
        return cache


def _not_there(name: Name) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not there", name)


def single_step(step: Callable[[], object]) -> Steps[None]:
    """Return a procedure of one step."""
    yield step


# ---- The run's entries and leases, by the product's own procedures. The invariants:
#
# Read       A read returns every entry that existed when it started; with late listings, every one
#            that existed ``stale_s`` before. It takes no removed entry for a damaged one.
# Answer     If the answer is that an entry was created, its agent has created it, and first; if it
#            is that the index is taken, it has not, or a later one follows already. No answer waits
#            for an operation that may hang.
# Lease      No agent takes a leader for dead whose lease was renewed within
#            `HeartbeatConfig.lapse_s`, by any clock, before the lease was last read.


_FASTEST_CLOCK = 1.02
"""Largest ratio of a node's clock to the true time."""
_LONGEST_ANSWER_S = 60.0
"""More than slow calls and a pause of the process take together."""
_SYNCED_AFTER_S = 0.015
"""Time until a written file is on the server's disk."""
_TORN = 0.2
"""If listings may be late: share of the reads of young entries that return only a part."""


class Register:
    """All entries that were created.

    Args:
        storage: The file system.
        monitor: Checks the entries.
        procedures: Class of the procedures that read and create entries.
        exclusive: Whether an index cannot be taken twice; False plants a bug.
    """

    def __init__(
        self,
        storage: Storage,
        monitor: Monitor,
        procedures: Callable[[NodeRegister], LogSteps],
        exclusive: bool,
    ) -> None:
        self.entries: list[LogEntry] = []
        self.storage = storage
        self.monitor = monitor
        self.procedures = procedures
        self.exclusive = exclusive
        self.before_create: Callable[[Process], None] = lambda _: None
        """Called with each process that is about to create an entry."""
        self._files: list[File] = []

    def add_entry(self, entry: LogEntry, file: File) -> None:
        """Add an entry that was created."""
        self.monitor.entry_created(self.entries, entry)
        at = entry.index - 1
        self.entries[at : at + 1], self._files[at : at + 1] = [entry], [file]

    def num_made_by(self, time: float) -> int:
        """Return the number of entries at some time."""
        number = len(self._files)
        while number and self._files[number - 1].made_at > time:
            number -= 1
        return number

    def made_at(self, entry: LogEntry) -> float:
        """Return the time at which an entry was created."""
        return self._files[entry.index - 1].made_at


class NodeRegister:
    """The entries as one node reads and creates them; see `rendezvous.log_entry.LogFiles`."""

    def __init__(self, register: Register, mount: Mount) -> None:
        self.mount = mount
        self.rdzv = register.storage.rdzv
        self.staged: File | None = None
        """The file of the entry that this node put last."""
        self._register = register
        self._storage = register.storage
        self._entries = register.procedures(self)
        self._num_staged = 0
        self._staged: dict[int, tuple[Name, File]] = {}
        """Files written under another name, and not linked yet."""
        self._leases: dict[int, tuple[int | None, float]] = {}
        """Term -> its cached lease, and the end of its validity."""
        self._lease_age_s: dict[int, float] = {}
        """Term -> age of its lease when it was last read from the server."""

    # ---- for agents and leaders ---------------------------------------------------------

    def last_with_lease(
        self,
        process: Process,
        answer: Callable[[int, LogEntry | None, int | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Read the last entry and its term's lease."""

        def check_answer(seen: tuple[int, LogEntry | None, int | None]) -> None:
            index, entry, _ = seen
            is_read = index == 0 or entry is self._register.entries[index - 1]
            what = "a removed entry was taken for a damaged one"
            self._register.monitor.check(is_read or self.mount.stale_s > 0, what, seen)
            answer(*seen)

        checked = self._checked(check_answer, lambda seen: seen[0])
        self._carry_out(process, self._entries.last_with_lease(), checked, fail)

    def last_index(
        self, process: Process, answer: Callable[[int], None], fail: Callable[[Exception], None]
    ) -> None:
        """Read the index of the last entry."""
        checked = self._checked(answer, lambda number: number)
        self._carry_out(process, self._entries.last_index(), checked, fail)

    def create(
        self, process: Process, entry: LogEntry, answer: Callable[[bool | None], None]
    ) -> None:
        """Create an entry; the answer is None if the file system gives none."""

        def done(created: bool) -> None:
            register = self._register
            is_own = register.entries[entry.index - 1] is entry
            what = "its own entry was denied" if is_own else "another's entry was taken for its own"
            is_true = is_own == created or (is_own and register.entries[-1] is not entry)
            register.monitor.check(is_true, what, entry)
            waited_s = self._storage.world.now - register.made_at(entry) if created else 0.0
            what = "a decision that was made waited"
            register.monitor.check(waited_s <= _LONGEST_ANSWER_S, what, entry, waited_s)
            answer(created)

        self._register.before_create(process)
        steps = self._entries.create(entry)
        process.call(self._carry_out, process, steps, done, lambda _: answer(None))

    def renew_lease(
        self, process: Process, term: int, beats: int, answer: Callable[[bool], None]
    ) -> None:
        """Renew a lease; ``answer`` receives whether that has worked."""
        steps = single_step(partial(self.mount.write, self.rdzv, ("lease", term), beats))
        self._carry_out(process, steps, lambda _: answer(True), lambda _: answer(False))

    def remove_old(self, process: Process, index: int, term: int) -> None:
        """Begin to remove old entries and leases; see `DecisionLog.remove_old`."""
        before = {"entry": index, "lease": term}

        def remove() -> None:
            for name in sorted(self.mount.names_in(self.rdzv)):
                if name[1] < before.get(name[0], 0):
                    self._storage.hits["entries and leases that are removed"] += 1
                    self.mount.remove_behind(self.rdzv, name)

        self._carry_out(process, single_step(remove), lambda _: None, lambda _: None)

    def check_claim(self, before: LogEntry, heartbeat: HeartbeatConfig) -> None:
        """Check a claim after this entry, whose leader is dead according to its lease alone."""
        age_s = self._lease_age_s[before.term]
        self._register.monitor.silent += 1
        lapsed = age_s * _FASTEST_CLOCK >= heartbeat.lapse_s - heartbeat.stale_s
        what = "a leader was taken for silent that renews its lease"
        self._register.monitor.check(lapsed, what, before.term, age_s)

    def _carry_out(self, process: Process, *rest: Any) -> None:
        self._storage.carry_out(self.mount, process, *rest)

    def _checked(
        self, answer: Callable[[Any], None], number_of: Callable[[Any], int]
    ) -> Callable[[Any], None]:
        """Return the callback of a read that starts now."""
        register = self._register
        existing = register.num_made_by(self._storage.world.now - self.mount.stale_s)

        def check_answer(seen: Any) -> None:
            number, what = number_of(seen), "a read has missed an entry"
            register.monitor.check(number >= existing, what, number, existing)
            answer(seen)

        return check_answer

    # ---- see `LogFiles` ----------------------------------------------------------------

    def indices(self, *, anew: bool = True) -> frozenset[int]:
        """List the folder; see `Mount.names_in`."""
        names = self.mount.names_in(self.rdzv, anew=anew)
        return frozenset(number for kind, number, *_ in names if kind == "entry")

    def read(self, number: int) -> LogEntry | None:
        """Open an entry; it may not be whole yet where a listing may be late."""
        try:
            file = self.mount.open(self.rdzv, ("entry", number))
        except FileNotFoundError:
            return None
        is_young = self._storage.world.now - file.made_at < self.mount.stale_s
        if is_young and file.maker != self.mount.slot and self._storage.rng.random() < _TORN:
            return None
        entry: LogEntry = file.content
        return entry

    def put(self, entry: LogEntry) -> None:
        """Write an entry under another name, and a moment later link it to its own."""
        if id(entry) not in self._staged:
            self._num_staged += 1
            staged: Name = ("staged", self._num_staged, self.mount.slot)
            self._staged[id(entry)] = staged, self.mount.write(self.rdzv, staged, entry)
        staged, file = self._staged[id(entry)]
        self.mount.hold_up(self.rdzv, staged, _SYNCED_AFTER_S)
        del self._staged[id(entry)]
        self.staged, name = file, ("entry", entry.index)
        file.made_at = self._storage.world.now
        is_there = name in self.rdzv.entries
        if not self._register.exclusive:
            self.rdzv.entries.pop(name, None)
        try:
            if not is_there and entry.index <= len(self._register.entries):
                self._storage.hits["indices that are taken again"] += 1
            elif name not in self.rdzv.entries:
                self._register.add_entry(entry, file)
            self.mount.link(file, self.rdzv, name)
        finally:
            self.mount.remove_behind(self.rdzv, staged)

    def exists(self, number: int) -> bool:
        """Return whether an entry exists according to the cache."""
        return self.mount.find(self.rdzv, ("entry", number)) is not None

    def remove_staged(self) -> None:
        """Remove the file of the entry that was put last, and wait for that."""
        self.mount.unlink(self.rdzv, ("staged", self._num_staged, self.mount.slot))

    def lease(self, term: int) -> int | None:
        """Open a lease; its content may be stale."""
        register, now = self._register, self._storage.world.now
        beats, until = self._leases.get(term, (None, -1.0))
        if now < until:
            return beats
        claim = next(r for r in register.entries if r.term == term)
        self._lease_age_s[term] = now - register.made_at(claim)
        try:
            file = self.mount.open(self.rdzv, ("lease", term))
        except FileNotFoundError:
            return None
        self._lease_age_s[term] = min(self._lease_age_s[term], now - file.changed_at)
        until = now + self.mount.stale_s * self._storage.rng.random()
        self._leases[term] = file.content, until
        return self._leases[term][0]


# ---- The files that leaders share: status, progress, notices, and the term folder, by the
# product's own procedures (`rendezvous.term`)


STATUS: Name = ("status",)
NOTICE_LEFT_S = 5.0
"""Time that a notice file leaves."""


class SharedMonitor:
    """Checks the invariants of the files that leaders share.

    Status     It never goes back to an earlier term, nor within a term to an earlier round. One
               status of a deposed leader is allowed: it read the folder's name before another
               leader took the folder, and its node caches the old name.
    Progress   At most one append of a leader, which showed its status before, follows the lines
               of a later term.
    Notices    A notice is removed only if a node that it names has received it, or if no such node
               that started before the notice lives.
    Terms      A leader that has detected the end of its term does nothing more.
    """

    def __init__(
        self, check: Callable[..., None], is_named_alive: Callable[[str, float], bool]
    ) -> None:
        self.shown = 0
        self.obeyed = 0
        self.late = 0
        """Number of late appends to the progress."""
        self.late_statuses = 0
        self._check = check
        self._is_named_alive = is_named_alive
        self._status = (0, 0)
        self._term = 0
        self._late_append_terms: set[int] = set()
        self._late_status_terms: set[int] = set()
        self._received: dict[str, float] = {}
        """Name in a notice -> when an agent last received one."""

    def check_term(self, term: int, what: object, *, is_fenced: bool) -> None:
        """A leader acts in a term."""
        self._check(not is_fenced, "a leader acts though its term is over", term, what)

    def status_replaced(self, status: Json, *, is_late: bool) -> None:
        """Check a new status; ``is_late`` if it was written by an old name of the folder."""
        at = int(status["term"]), int(status.get("round") or 0)
        if is_late and at < self._status:
            self._check(at[0] not in self._late_status_terms, "the status went back again", at)
            self._late_status_terms.add(at[0])
            self.late_statuses += 1
            return
        self._check(at >= self._status, "the status went back", self._status, at)
        self._status = at
        self.shown += 1

    def progress_appended(self, lines: Sequence[Json]) -> None:
        """Check new lines of the progress."""
        term = max(int(line["term"]) for line in lines)
        if term < self._term:
            self.late += 1
            self._check(term not in self._late_append_terms, "the progress went back again", term)
            self._late_append_terms.add(term)
        self._term = max(self._term, term)

    def notice_received(self, names: Sequence[str], now: float) -> None:
        """An agent with these names has received a notice."""
        self._received.update(dict.fromkeys(names, now))

    def notice_removed(self, name: str, written_at: float) -> None:
        """Check the removal of a notice."""
        received = self._received.get(name, -1.0) >= written_at
        lives = self._is_named_alive(name, written_at)
        self._check(received or not lives, "a notice was lost", name)
        self.obeyed += received


class SharedFiles:
    """The files that leaders share.

    Args:
        storage: The file system.
        monitor: Checks the invariants.
        is_fenced: Whether the folder's old name fails after another leader has taken the folder,
            unless it is cached; False plants a bug.
    """

    def __init__(self, storage: Storage, monitor: SharedMonitor, is_fenced: bool = True) -> None:
        self.storage = storage
        self.monitor = monitor
        self.is_fenced = is_fenced
        self.folder = Folder()
        """The term folder, whatever its name."""
        storage.rdzv.entries[_term(0)] = self.folder

    @property
    def shown(self) -> Json | None:
        """The content of status.json."""
        file = self.storage.run.entries.get(STATUS)
        return file.content if isinstance(file, File) else None

    @property
    def notices(self) -> set[str]:
        """The names of the notices that exist."""
        return {name for (name,) in (*self.storage.notices.entries, *self.folder.entries)}

    def add_notice(self, name: str) -> None:
        """Write a notice file."""
        world, folder = self.storage.world, self.storage.notices
        Mount(self.storage, -1).write(folder, (name,), world.now)
        world.log_event("user", "writes a notice", name)


class NodeFiles(RunFiles):
    """The shared files as one node accesses them; see `rendezvous.term.RunFiles`."""

    def __init__(self, files: SharedFiles, mount: Mount) -> None:
        self.mount = mount
        self._files = files
        self._storage = files.storage
        self._has_listed = False
        """Whether it has listed the parent of the term folder since its last status."""

    def current_term(self) -> int:
        """List the parent of the term folder."""
        self._has_listed = True
        names = self.mount.names_in(self._storage.rdzv)
        return max(int(number) for kind, number, *_ in names if kind == "term")

    def take_over(self, before: int, term: int) -> None:
        """Rename the folder."""
        rdzv = self._storage.rdzv
        if not self._files.is_fenced:
            before = next(n for kind, n, *_ in rdzv.entries if kind == "term")
        self._storage.world.log_event(f"slot {self.mount.slot}", "takes the term folder", term)
        self.mount.rename((rdzv, _term(before)), (rdzv, _term(term)))

    def status(self) -> Json | None:
        """Return the status."""
        try:
            status: Json = self.mount.open(self._storage.run, STATUS).content
        except FileNotFoundError:
            self.mount.names_in(self._storage.run)
            return self._files.shown
        return status

    def replace_status(self, term: int, status: Json) -> None:
        """Stage the status in the folder, and rename it."""
        folder = self._of_term(term)
        by_old_name = self._storage.rdzv.entries.get(_term(term)) is not folder
        is_late, self._has_listed = by_old_name and self._has_listed, False
        staged = ("staged", term)
        self.mount.write(folder, staged, status)
        self._files.monitor.status_replaced(status, is_late=is_late and self._files.is_fenced)
        self.mount.rename((folder, staged), (self._storage.run, STATUS))

    def append_progress(self, lines: Sequence[Json], *, maybe_torn: bool) -> None:
        """Append without a fence."""
        self._files.monitor.progress_appended(lines)

    def new_notices(self) -> list[str]:
        """Return the notices that no leader has claimed."""
        return sorted(name for (name,) in self.mount.names_in(self._storage.notices))

    def claim_notice(self, term: int, name: str) -> None:
        """Rename the notice into the folder."""
        self.mount.rename((self._storage.notices, (name,)), (self._of_term(term), (name,)))

    def forget_absence(self, name: str) -> None:
        """Make the client ask the server about the notice."""
        self.mount.forget_absence(self._storage.notices, (name,))

    def claimed_notices(self, term: int) -> Mapping[str, float]:
        """List the folder."""
        names = self.mount.names_in(self._of_term(term))
        return dict.fromkeys(sorted(name for (name,) in names), NOTICE_LEFT_S)

    def remove_notice(self, term: int, name: str) -> None:
        """Start to remove the notice from the folder."""
        monitor = self._files.monitor
        self.mount.remove_behind(
            self._of_term(term), (name,), lambda file: monitor.notice_removed(name, file.content)
        )

    def _of_term(self, term: int) -> Folder:
        if not self._files.is_fenced:
            return self._files.folder
        found = self.mount.find(self._storage.rdzv, _term(term))
        if not isinstance(found, Folder):
            raise FileNotFoundError(2, "no such folder", _term(term))
        return found


def _term(term: int) -> Name:
    return ("term", term)


class LeadersFiles:
    """The shared files as one leader uses them, with one procedure of a kind at a time.

    Args:
        files: The files.
        folder: The procedures under test.
        mount: The client of the leader's node.
        process: The leader's process.
        end_term: Called when the leader detects that its term is over.
    """

    def __init__(
        self,
        files: SharedFiles,
        folder: TermFolder,
        mount: Mount,
        process: Process,
        end_term: Callable[[], None],
    ) -> None:
        self._storage = files.storage
        self._folder = folder
        self._mount = mount
        self._process = process
        self._end_term = end_term
        self._status: Json | None = None
        """The next status, and the lines of progress to write with it."""
        self._lines: list[Json] = []
        self._showing = False
        self.confirm = folder.confirm

    def show(self, status: Json, lines: Sequence[Json]) -> None:
        """Write a status, or the newest one after a write that is under way."""
        self._status = {**status, "updated": self._storage.world.now}
        self._lines += lines
        self._write_status()

    def _write_status(self) -> None:
        if self._showing or self._status is None:
            return
        self._showing = True
        steps = self._folder.show(self._status, self._lines)
        self._status, self._lines = None, []
        self._carry_out(steps, self._status_written, self._status_written)

    def _status_written(self, error: Exception | None) -> None:
        self._showing = False
        if isinstance(error, TermOverError):
            self._status = None
            self._end_term()
        else:
            self._write_status()

    def claim_notices(self, done: Callable[[Mapping[str, float]], None]) -> None:
        """Claim notices, and pass them to ``done``; none if that fails."""

        def failed(error: Exception) -> None:
            if isinstance(error, TermOverError):
                self._end_term()
            else:
                done({})

        self._carry_out(self._folder.claim_notices(), done, failed)

    def remove_confirmed(self) -> None:
        """Try to remove the confirmed notices at once."""
        self._carry_out(self._folder.remove_confirmed(), lambda _: None, lambda _: None)

    def _carry_out(
        self, steps: Steps[Any], done: Callable[[Any], None], failed: Callable[[Exception], None]
    ) -> None:
        self._storage.carry_out(self._mount, self._process, steps, done, failed)

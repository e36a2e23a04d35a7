"""The shared file system: a server, and each node's mount, with the caches of a client of NFS.

- A name, an absent one too, is found in memory for as long as the attributes of its folder are
  valid, which is up to 60 s. When they are fetched anew, the names are dropped if the folder has
  changed. So a folder that another node has renamed is used by its old name for a while.
- Listing a folder opens it, and opening fetches its attributes; a file that is opened is read as it
  is. Where a listing may be late (`Mount.stale_s`) it shows what was there a while ago.
- Whether a folder has changed is seen by a count of its changes, or (NFS 3) by the time of the last
  one, which has coarse ticks: of two changes in one tick the second is not seen, unless a listing
  is asked for anew.
- A count of links comes from memory, and the number of an inode may differ from call to call.
- A reply may be lost after the operation. The client retries, and learns that the name is taken
  already, or gone; or the call fails, done or not.
- A removal may hang for `REMOVAL_HANGS_S`: the server recalls a delegation from a dead client.

The product's own procedures (`rendezvous.log_entry`) are carried out here, one step after the
other.
Each step arrives at the server after a while. A step that is under way arrives whatever becomes of
the process; the next one waits until the process goes on.
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

from hpc_elastic.rendezvous.effects import Message
from hpc_elastic.rendezvous.leader_state import HeartbeatConfig
from hpc_elastic.rendezvous.log_entry import LogEntry, LogSteps, Steps
from hpc_elastic.rendezvous.term import TermFolder, TermOverError
from simulation.invariants import Monitor
from simulation.world import Process, World

REMOVAL_HANGS_S = 100.0
TICK_S = 0.018
"""A server's clock shows another time so often."""
_ROUNDING_S = 1e-6
Name = tuple[Any, ...]
"""Of a file in its folder, such as ``("entry", 5)``."""


class File:
    """One file of the server."""

    __slots__ = ("changed_at", "content", "links", "made_at", "maker")

    def __init__(self, content: Any, now: float, maker: int) -> None:
        self.content = content
        self.links = 0
        self.made_at = self.changed_at = now
        self.maker = maker
        """The slot of the node that has made it."""


class Folder:
    """One folder of the server."""

    __slots__ = ("changed_at", "changes", "entries")

    def __init__(self) -> None:
        self.changes = 0
        """How often it has changed."""
        self.changed_at = 0.0
        self.entries: dict[Name, File | Folder] = {}


class _Memory:
    """What a client remembers of a folder."""

    __slots__ = ("listed", "listed_until", "names", "stamp", "until")

    def __init__(self) -> None:
        self.stamp = -1
        """By what it is seen whether the folder has changed."""
        self.until = self.listed_until = -1.0
        """Until when the attributes are valid, and the listing."""
        self.names: dict[Name, File | Folder | None] = {}
        self.listed: set[Name] | None = None
        """What a listing has shown; None: it is to be asked for."""


class _HeldUpError(Exception):
    """The step is to be tried again after this many seconds."""


class Storage:
    """The server, and what is under way to it.

    Args:
        world: The schedule's.
        rng: Of its own.
        slowest_s: A step on a slow mount takes so long at most.
    """

    def __init__(self, world: World, rng: random.Random, slowest_s: float) -> None:
        self.world = world
        self.rng = rng
        self.run, self.rdzv, self.notices = Folder(), Folder(), Folder()
        self.hits: Counter[str] = Counter()
        """What has shown that a client's view is not the server's."""
        self._slowest_s = slowest_s

    def carry_out(
        self,
        mount: Mount,
        process: Process,
        steps: Steps[Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Carry a procedure out for a process, and pass it the result or the error."""
        self._go_on(None, mount, process, steps, done, failed)

    def _go_on(
        self,
        result: Any,
        mount: Mount,
        process: Process,
        steps: Steps[Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
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
            args = (step, latency - before, mount, process, steps, done, failed)
            self.world.after(before, None, self._arrive, *args)

    def _arrive(
        self, step: Callable[[], Any], rest_s: float, mount: Mount, process: Process, *rest: Any
    ) -> None:
        result: Any = OSError(errno.EIO, os.strerror(errno.EIO))
        if not mount.failing or self.rng.random() < 0.3:
            try:
                done = step()
            except OSError as e:
                done = e
            except _HeldUpError as e:
                again = (step, rest_s, mount, process, *rest)
                self.world.after(e.args[0], None, self._arrive, *again)
                return
            self.hits["calls that fail though they are done"] += bool(mount.failing)
            result = result if mount.failing else done
        self.world.after(rest_s, process, self._go_on, result, mount, process, *rest)


class Mount:
    """One node's client.

    Args:
        storage: The server.
        slot: The node's.
        life_s: So long attributes are valid.
        stale_s: So old a listing may be.
        by_time: Whether a change of a folder is seen by its time alone.
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
        """How many faults at present make calls slow, fail, lose replies, removals hang."""
        self._storage = storage
        self._world = storage.world
        self._life_s = life_s
        self.by_time = by_time
        self._memories: dict[Folder, _Memory] = {}
        self._held_until: dict[tuple[Folder, Name], float] = {}
        self._removing: set[tuple[Folder, Name]] = set()

    def forget(self) -> None:
        """The node starts anew."""
        self._memories.clear()

    # ---- reading ------------------------------------------------------------------------

    def names_in(self, folder: Folder, *, anew: bool = True) -> Collection[Name]:
        """List a folder, which opens it; ``anew``: forget what a listing has shown before.

        See `hpc_elastic.shared_files.names_listed`.
        """
        memory = self._memories.get(folder)
        if memory is None or self._world.now >= memory.listed_until:
            memory = self._fetch(folder)
            memory.listed = None if anew else memory.listed
            memory.listed_until = self._world.now + self.stale_s * self._storage.rng.random()
        listed = memory.listed
        if listed is None:
            listed = memory.listed = set(folder.entries)
        self._storage.hits["listings that are late"] += len(listed) != len(folder.entries)
        return listed

    def find(self, folder: Folder, name: Name) -> File | Folder | None:
        """Search a name, in memory first; None: it is not there, or was not."""
        memory = self._memories.get(folder)
        if memory is None or self._world.now >= memory.until:
            memory = self._fetch(folder)
        there = folder.entries.get(name)
        found = memory.names.setdefault(name, there)
        if found is not there:
            what = "absent from memory" if found is None else "found by an old name"
            self._storage.hits[f"names that are {what}"] += 1
        return found

    def forget_absence(self, folder: Folder, name: Name) -> None:
        """Ask the server about a name; see `hpc_elastic.shared_files.forget_absence`."""
        memory = self._memories.get(folder)
        if memory is not None:
            memory.names.pop(name, None)

    def open(self, folder: Folder, name: Name) -> File:
        """Open a file by its path; where memory leads to one that was removed, search again."""
        found = self.find(folder, name)
        if isinstance(found, File) and not found.links:
            found = folder.entries.get(name)
        if not isinstance(found, File):
            raise _not_there(name)
        return found

    def num_links(self, file: File) -> int:
        """Return the count of a file's links, as it was when its attributes were fetched last."""
        return 1 if self._life_s else file.links

    def inode(self, file: File) -> int:
        """Return the number of a file's inode: another one now and then."""
        return id(file) + (self._storage.rng.random() < 0.2)

    # ---- writing ------------------------------------------------------------------------

    def write(self, folder: Folder, name: Name, content: Any) -> File:
        """Write a file in place; make it if it is not there."""
        file = folder.entries.get(name)
        if not isinstance(file, File):
            file = File(content, self._world.now, self.slot)
            self._enter(folder, name, file)
        file.content, file.changed_at = content, self._world.now
        return file

    def link(self, file: File, folder: Folder, name: Name) -> None:
        """Give a file another name."""
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "it exists", name)
        self._enter(folder, name, file)
        self._reply(FileExistsError(errno.EEXIST, "it exists", name))

    def rename(self, source: tuple[Folder, Name], target: tuple[Folder, Name]) -> None:
        """Move a file or a folder; the server goes by the names that it has."""
        folder, name = source
        if source == target:
            return
        there = folder.entries.get(name)
        if there is None or self.find(folder, name) is None:
            raise _not_there(name)
        self._enter(*target, there)
        self._enter(folder, name, None)
        self._reply(_not_there(name))

    def unlink(self, folder: Folder, name: Name) -> None:
        """Remove a file."""
        if name not in folder.entries:
            raise _not_there(name)
        if self.hanging or (folder, name) in self._held_until:
            self._storage.hits["removals that hang"] += (folder, name) not in self._held_until
            self.hold_up(folder, name, REMOVAL_HANGS_S)
        self._enter(folder, name, None)
        self._reply(_not_there(name))

    def remove_behind(
        self, folder: Folder, name: Name, removed: Callable[[File], None] | None = None
    ) -> None:
        """Begin to remove a file, unless that is under way; no process waits for it.

        See `hpc_elastic.shared_files.remove_behind`. ``removed`` is called with the file that was
        removed.
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
            self._storage.carry_out(self, Process(), alone(unlink), over, over)

    def _enter(self, folder: Folder, name: Name, what: File | Folder | None) -> None:
        """Change a folder."""
        before = folder.entries.pop(name, None)
        if isinstance(before, File):
            before.links -= 1
        if what is not None:
            folder.entries[name] = what
        if isinstance(what, File):
            what.links += 1
        memory = self._changed(folder)
        if memory is not None:
            memory.names[name] = what

    def _changed(self, folder: Folder) -> _Memory | None:
        """Count a change of this client's. If no other client made one, its cache stays valid."""
        before = self._stamp(folder)
        folder.changes += 1
        folder.changed_at = self._world.now
        memory = self._memories.get(folder)
        if memory is not None:
            memory.listed, memory.listed_until = None, self._world.now
            if memory.stamp == before:
                memory.stamp = self._stamp(folder)
            else:
                memory.until = self._world.now
        return memory

    def _stamp(self, folder: Folder) -> int:
        return int(folder.changed_at / TICK_S) if self.by_time else folder.changes

    def hold_up(self, folder: Folder, name: Name, for_s: float) -> None:
        """Let a step be over only so long after its first try."""
        now = self._world.now
        left_s = self._held_until.setdefault((folder, name), now + for_s) - now
        if left_s > _ROUNDING_S:
            raise _HeldUpError(left_s)
        del self._held_until[folder, name]

    def _reply(self, again: OSError) -> None:
        """Lose the reply now and then: then the client retries, with this result."""
        if self.losing and self._storage.rng.random() < 0.7:
            self._storage.hits["replies lost after the deed"] += 1
            raise again

    def _fetch(self, folder: Folder) -> _Memory:
        """Fetch a folder's attributes, and drop its names if it has changed."""
        memory = self._memories.get(folder)
        if memory is None:
            memory = self._memories[folder] = _Memory()
        if memory.stamp != self._stamp(folder):
            memory.names.clear()
            memory.listed, memory.stamp = None, self._stamp(folder)
        memory.until = self._world.now + self._life_s
        return memory


def _not_there(name: Name) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not there", name)


def alone(step: Callable[[], object]) -> Steps[None]:
    """Return a procedure of one step."""
    yield step


# ---- The run's entries and leases in virtual time, by the product's own procedures
# What must hold of them:
#
# Look       It shows every entry that was there when it began; where a listing may be late, every
#            one that was there so long before.
# Answer     If the answer is that an entry was created, its agent has created it; if it is that the
#            index is taken, it has not. No answer waits for an operation that may hang.
# Lease      No agent takes a leader for dead whose lease was renewed within
# `HeartbeatConfig.lapse_s`, by
#            any clock, before what was read of it last.


_FASTEST_CLOCK = 1.02
"""A node's clock shows this much more at most of the time that has passed."""
_LONGEST_ANSWER_S = 60.0
"""Slow calls take less together, and so does a process that stands still meanwhile."""
_SYNCED_AFTER_S = 0.015
"""A file is on the server's disk so long after it was written."""
_TORN = 0.2
"""If listings may be late: share of the reads of young entries that return only a part."""

Seen = tuple[int, LogEntry | None, int | None]


class Register:
    """All entries that were created.

    Args:
        storage: Where they are.
        monitor: Checks their results.
        procedures: How they are found and created.
        exclusive: Whether a number that is taken cannot be taken again; False: a planted bug.
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
        self._files: list[File] = []

    def created(self, entry: LogEntry, file: File) -> None:
        """An entry has come to be."""
        self.monitor.entry_created(self.entries, entry)
        at = entry.index - 1
        self.entries[at : at + 1], self._files[at : at + 1] = [entry], [file]

    def num_made_by(self, time: float) -> int:
        """Return how many entries there were at some time."""
        number = len(self._files)
        while number and self._files[number - 1].made_at > time:
            number -= 1
        return number

    def made_at(self, entry: LogEntry) -> float:
        """Return when an entry that is there was created."""
        return self._files[entry.index - 1].made_at


class NodeRegister:
    """What one node does with the entries; see `rendezvous.log_entry.LogFiles` for the calls."""

    def __init__(self, register: Register, mount: Mount) -> None:
        self.mount = mount
        self.rdzv = register.storage.rdzv
        self.staged: File | None = None
        """The file of the entry that this node has put last."""
        self._register = register
        self._storage = register.storage
        self._entries = register.procedures(self)
        self._num_staged = 0
        self._staged: dict[int, tuple[Name, File]] = {}
        """What is written under another name, and not linked yet."""
        self._leases: dict[int, tuple[int | None, float]] = {}
        """Term -> what was read of its lease, and until when that is read again."""
        self._lease_age_s: dict[int, float] = {}
        """Term -> for how long its lease had not changed when the server was asked last."""

    # ---- for agents and leaders ---------------------------------------------------------

    def last_with_lease(
        self,
        process: Process,
        answer: Callable[[int, LogEntry | None, int | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Read the last entry and its term's lease."""
        checked = self._checked(lambda seen: answer(*seen), lambda seen: seen[0])
        self._carry_out(process, self._entries.last_with_lease(), checked, fail)

    def last_index(
        self, process: Process, answer: Callable[[int], None], fail: Callable[[Exception], None]
    ) -> None:
        """Read the last entry's number."""
        checked = self._checked(answer, lambda number: number)
        self._carry_out(process, self._entries.last_index(), checked, fail)

    def create(
        self, process: Process, entry: LogEntry, answer: Callable[[bool | None], None]
    ) -> None:
        """Create an entry; the answer is None where the file system gave none."""

        def done(created: bool) -> None:
            self._check_answer(entry, created)
            answer(created)

        self._carry_out(process, self._entries.create(entry), done, lambda _: answer(None))

    def renew_lease(
        self, process: Process, term: int, beats: int, answer: Callable[[bool], None]
    ) -> None:
        """Renew a lease; ``answer`` is called with whether that has worked."""
        steps = alone(partial(self._write_lease, term, beats))
        self._carry_out(process, steps, lambda _: answer(True), lambda _: answer(False))

    def check_claim(self, before: LogEntry, liveness: HeartbeatConfig) -> None:
        """Check a claim after this entry, whose leader is dead according to its lease alone."""
        age_s = self._lease_age_s[before.term]
        self._register.monitor.silent += 1
        lapsed = age_s * _FASTEST_CLOCK >= liveness.lapse_s - liveness.stale_s
        what = "a leader was taken for silent that renews its lease"
        self._register.monitor.check(lapsed, what, before.term, age_s)

    def _carry_out(self, process: Process, *rest: Any) -> None:
        self._storage.carry_out(self.mount, process, *rest)

    def _checked(
        self, answer: Callable[[Any], None], number_of: Callable[[Any], int]
    ) -> Callable[[Any], None]:
        """Return the callback of a read that begins now."""
        register = self._register
        there = register.num_made_by(self._storage.world.now - self.mount.stale_s)

        def looked(seen: Any) -> None:
            number, what = number_of(seen), "a look has missed an entry"
            register.monitor.check(number >= there, what, number, there)
            answer(seen)

        return looked

    def _check_answer(self, entry: LogEntry, created: bool) -> None:
        register = self._register
        its_own = register.entries[entry.index - 1] is entry
        what = "its own entry was denied" if its_own else "another's entry was taken for its own"
        register.monitor.check(its_own == created, what, entry)
        waited_s = self._storage.world.now - register.made_at(entry) if created else 0.0
        what = "a decision that was made waited"
        register.monitor.check(waited_s <= _LONGEST_ANSWER_S, what, entry, waited_s)

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
        if not self._register.exclusive:
            self.rdzv.entries.pop(name, None)
        try:
            if name not in self.rdzv.entries:
                self._register.created(entry, file)
            self.mount.link(file, self.rdzv, name)
        finally:
            self.mount.remove_behind(self.rdzv, staged)

    def exists(self, number: int) -> bool:
        """Return whether an entry is there, as far as memory goes."""
        return self.mount.find(self.rdzv, ("entry", number)) is not None

    def remove_staged(self) -> None:
        """Remove the file of the entry that was put last, and wait for that."""
        self.mount.unlink(self.rdzv, ("staged", self._num_staged, self.mount.slot))

    def lease(self, term: int) -> int | None:
        """Open a lease; what is read of it may be old."""
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

    def _write_lease(self, term: int, beats: int) -> None:
        self.mount.write(self.rdzv, ("lease", term), beats)


# ---- The files that leaders share, in virtual time: status, progress, notices, and the term folder
# The product's own procedures (`rendezvous.term`) are carried out on a `storage`.


STATUS: Name = ("status",)
ASKED_LEFT_S = 5.0
"""A notice leaves this much time."""


class SharedMonitor:
    """What must hold of the files that leaders share, at every step.

    Status     It never goes back to an earlier term, nor within a term to an earlier round; except
               for at most one status of a leader that had read the folder's name and was about to
               write when another took it, on a node that caches the folder's old name.
    Progress   A line of an earlier term follows those of a later one only where its leader had
               shown its status before: one append of a leader at most.
    Notices    A notice is removed once a node that it names has received it, or no such node lives
               that has started before the notice was written.
    Terms      A leader that knows that its term is over does nothing more.
    """

    def __init__(
        self, check: Callable[..., None], is_named_alive: Callable[[str, float], bool]
    ) -> None:
        self.shown = 0
        self.obeyed = 0
        self.late = 0
        """Appends to the progress that came too late."""
        self.late_statuses = 0
        self._check = check
        self._is_named_alive = is_named_alive
        self._status = (0, 0)
        self._term = 0
        self._is_late: set[int] = set()
        self._is_shown_late: set[int] = set()
        self._heard: dict[str, float] = {}

    def check_term(self, term: int, what: object, *, is_fenced: bool) -> None:
        """A leader acts in a term."""
        self._check(not is_fenced, "a leader acts though its term is over", term, what)

    def replaced(self, status: Message, *, is_late: bool) -> None:
        """Another status can be read.

        ``is_late``: the folder was found by a name that it had, but its leader has looked before.
        """
        at = int(status["term"]), int(status.get("round") or 0)
        if is_late and at < self._status:
            self._check(at[0] not in self._is_shown_late, "the status went back again", at)
            self._is_shown_late.add(at[0])
            self.late_statuses += 1
            return
        self._check(at >= self._status, "the status went back", self._status, at)
        self._status = at
        self.shown += 1

    def appended(self, lines: Sequence[Message]) -> None:
        """Further lines of the progress can be read."""
        term = max(int(line["term"]) for line in lines)
        if term < self._term:
            self.late += 1
            self._check(term not in self._is_late, "the progress went back again", term)
            self._is_late.add(term)
        self._term = max(self._term, term)

    def notice_received(self, names: Sequence[str], now: float) -> None:
        """An agent of this task, on this host, has received a notice."""
        self._heard.update(dict.fromkeys(names, now))

    def removed(self, name: str, asked_at: float) -> None:
        """A notice is gone that was written at this time."""
        heard = self._heard.get(name, -1.0) >= asked_at
        lives = self._is_named_alive(name, asked_at)
        self._check(heard or not lives, "a notice was lost", name)
        self.obeyed += heard


class SharedFiles:
    """What is on the file system.

    Args:
        storage: Where it is.
        monitor: Checks it.
        is_fenced: Whether a name leads nowhere once another leader has taken the folder, as far as
            memory goes; False: a planted bug.
    """

    def __init__(self, storage: Storage, monitor: SharedMonitor, is_fenced: bool = True) -> None:
        self.storage = storage
        self.monitor = monitor
        self.is_fenced = is_fenced
        self.folder = Folder()
        """The term folder, whatever its name."""
        storage.rdzv.entries[_term(0)] = self.folder

    @property
    def shown(self) -> Message | None:
        """What status.json holds."""
        file = self.storage.run.entries.get(STATUS)
        return file.content if isinstance(file, File) else None

    @property
    def notices(self) -> set[str]:
        """The names of those that are not removed."""
        return {name for (name,) in (*self.storage.notices.entries, *self.folder.entries)}

    def add_notice(self, name: str) -> None:
        """Write a notice file."""
        world, folder = self.storage.world, self.storage.notices
        Mount(self.storage, -1).write(folder, (name,), world.now)
        world.log_event("user", "asks to leave", name)


class NodeFiles:
    """The shared files, as one node sees them; see `rendezvous.term.SharedFiles`."""

    def __init__(self, files: SharedFiles, mount: Mount) -> None:
        self.mount = mount
        self._files = files
        self._storage = files.storage
        self._has_looked = False
        """Whether it has listed the folder since it wrote a status."""

    def current_term(self) -> int:
        """List the folder in which the term folder is."""
        self._has_looked = True
        names = self.mount.names_in(self._storage.rdzv)
        return max(int(number) for kind, number, *_ in names if kind == "term")

    def take_over(self, before: int, term: int) -> None:
        """Rename the folder."""
        rdzv = self._storage.rdzv
        if not self._files.is_fenced:
            before = next(n for kind, n, *_ in rdzv.entries if kind == "term")
        self._storage.world.log_event(f"slot {self.mount.slot}", "takes the term folder", term)
        self.mount.rename((rdzv, _term(before)), (rdzv, _term(term)))

    def status(self) -> Message | None:
        """Return the status."""
        try:
            status: Message = self.mount.open(self._storage.run, STATUS).content
        except FileNotFoundError:
            self.mount.names_in(self._storage.run)
            return self._files.shown
        return status

    def replace_status(self, term: int, status: Message) -> None:
        """Stage the status in the folder, and rename it."""
        folder = self._folder(term)
        by_old_name = self._storage.rdzv.entries.get(_term(term)) is not folder
        is_late, self._has_looked = by_old_name and self._has_looked, False
        staged = ("staged", term)
        self.mount.write(folder, staged, status)
        self._files.monitor.replaced(status, is_late=is_late and self._files.is_fenced)
        self.mount.rename((folder, staged), (self._storage.run, STATUS))

    def append_progress(self, lines: Sequence[Message], *, maybe_torn: bool) -> None:
        """Append; nothing guards it."""
        self._files.monitor.appended(lines)

    def new_notices(self) -> list[str]:
        """Return the notices that no leader has claimed."""
        return sorted(name for (name,) in self.mount.names_in(self._storage.notices))

    def claim_notice(self, term: int, name: str) -> None:
        """Rename it into the folder."""
        self.mount.rename((self._storage.notices, (name,)), (self._folder(term), (name,)))

    def forget_absence(self, name: str) -> None:
        """Make the client ask the server about the notice."""
        self.mount.forget_absence(self._storage.notices, (name,))

    def claimed_notices(self, term: int) -> Mapping[str, float]:
        """List the folder."""
        names = self.mount.names_in(self._folder(term))
        return dict.fromkeys(sorted(name for (name,) in names), ASKED_LEFT_S)

    def remove_notice(self, term: int, name: str) -> None:
        """Begin to remove it from the folder."""
        monitor = self._files.monitor
        self.mount.remove_behind(
            self._folder(term), (name,), lambda file: monitor.removed(name, file.content)
        )

    def _folder(self, term: int) -> Folder:
        if not self._files.is_fenced:
            return self._files.folder
        found = self.mount.find(self._storage.rdzv, _term(term))
        if not isinstance(found, Folder):
            raise FileNotFoundError(2, "no such folder", _term(term))
        return found


def _term(term: int) -> Name:
    return ("term", term)


class LeadersFiles:
    """What one simulated leader does with the shared files, one procedure of a kind at a time."""

    def __init__(
        self,
        files: SharedFiles,
        folder: TermFolder,
        mount: Mount,
        process: Process,
        is_over: Callable[[], None],
    ) -> None:
        self._storage = files.storage
        self._folder = folder
        self._mount = mount
        self._process = process
        self._is_over = is_over
        """Called when it finds that another leads."""
        self._status: Message | None = None
        """What is to be shown next; with the lines of the progress that go with it."""
        self._lines: list[Message] = []
        self._showing = False

    def show(self, status: Message, lines: Sequence[Message]) -> None:
        """Write a status, or, if one is under way, the newest after that: as the journal does."""
        self._status = {**status, "updated": self._storage.world.now}
        self._lines += lines
        self._show()

    def _show(self) -> None:
        if self._showing or self._status is None:
            return
        self._showing = True
        steps = self._folder.show(self._status, self._lines)
        self._status, self._lines = None, []
        self._carry_out(steps, self._shown, self._not_shown)

    def _shown(self, _: None) -> None:
        self._showing = False
        self._show()

    def _not_shown(self, error: Exception) -> None:
        self._showing = False
        if isinstance(error, TermOverError):
            self._status = None
            self._is_over()
        else:
            self._show()

    def claim_notices(self, done: Callable[[Mapping[str, float]], None]) -> None:
        """Claim notices; nothing where that fails."""
        self._carry_out(self._folder.claim_notices(), done, lambda e: self._failed(e, done))

    def _failed(self, error: Exception, done: Callable[[Mapping[str, float]], None]) -> None:
        if isinstance(error, TermOverError):
            self._is_over()
        else:
            done({})

    def confirm(self, name: str) -> None:
        """A notice is to be removed with the next look."""
        self._folder.confirm(name)

    def remove_confirmed(self) -> None:
        """Remove at once what is confirmed, as far as that works."""
        self._carry_out(self._folder.remove_confirmed(), lambda _: None, lambda _: None)

    def _carry_out(
        self, steps: Steps[Any], done: Callable[[Any], None], failed: Callable[[Exception], None]
    ) -> None:
        self._storage.carry_out(self._mount, self._process, steps, done, failed)

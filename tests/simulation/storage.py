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
- A reply may be lost after the deed. The client asks again, and is told that the name is taken
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
from collections.abc import Callable, Collection
from typing import Any

from hpc_elastic.rendezvous.log_entry import Steps
from hpc_elastic.rendezvous.term import TermOverError
from simulation.world import Process, World

REMOVAL_HANGS_S = 100.0
TICK_S = 0.018
"""A server's clock shows another time so often."""
_ROUNDING_S = 1e-6
Name = tuple[Any, ...]
"""Of a file in its folder, such as ``("record", 5)``."""


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
    """The step is to be tried again after so many seconds."""


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
        """Carry a procedure out for a process; it hears the result, or what went wrong."""
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
        """Begin to remove a file, unless that is under way; nobody waits for it.

        See `hpc_elastic.shared_files.remove_behind`. ``removed`` hears of the file that was
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
        """Count a change of this client's. Where nobody else made one, its memory stays valid."""
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
        """Lose the reply now and then: then the client asks again, and hears this."""
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

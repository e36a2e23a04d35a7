"""The files that leaders share, in virtual time: status, progress, notices, and the term folder.

The product's own procedures (`rendezvous.term`) are carried out on a `storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpc_elastic.rendezvous.effects import Message
from hpc_elastic.rendezvous.log_entry import Steps
from hpc_elastic.rendezvous.term import TermFolder, TermOverError
from simulation.storage import File, Folder, Mount, Name, Storage
from simulation.world import Process

STATUS: Name = ("status",)
ASKED_LEFT_S = 5.0
"""A notice leaves this much time."""


class SharedMonitor:
    """What must hold of the files that leaders share, at every step.

    Status     It never goes back to an earlier term, nor within a term to an earlier round; but for
               one status of a leader at most, that had looked whose the folder is and was about to
               write when another took it, on a node that remembers the folder's old name.
    Progress   A line of an earlier term follows those of a later one only where its leader had
               shown its status before: one append of a leader at most.
    Notices    A notice is removed once a node that it names has heard of it, or no such node lives.
    Terms      A leader that knows that its term is over does nothing more.
    """

    def __init__(self, check: Callable[..., None], is_named_alive: Callable[[str], bool]) -> None:
        self.shown = 0
        self.obeyed = 0
        self.late = 0
        """Appends to the progress that came too late."""
        self.late_statuses = 0
        self._check = check
        self._is_named_alive = is_named_alive
        self._status = (0, 0)
        self._epoch = 0
        self._is_late: set[int] = set()
        self._is_shown_late: set[int] = set()
        self._heard: dict[str, float] = {}

    def acts(self, epoch: int, what: object, *, knows_over: bool) -> None:
        """A leader does something."""
        self._check(not knows_over, "a leader acts though its term is over", epoch, what)

    def replaced(self, status: Message, *, is_late: bool) -> None:
        """Another status can be read.

        ``is_late``: the folder was found by a name that it had, but its leader has looked before.
        """
        at = int(status["epoch"]), int(status.get("round") or 0)
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
        epoch = max(int(line["epoch"]) for line in lines)
        if epoch < self._epoch:
            self.late += 1
            self._check(epoch not in self._is_late, "the progress went back again", epoch)
            self._is_late.add(epoch)
        self._epoch = max(self._epoch, epoch)

    def heard(self, names: Sequence[str], now: float) -> None:
        """An agent of this task, on this host, has been told that it is to leave."""
        self._heard.update(dict.fromkeys(names, now))

    def removed(self, name: str, asked_at: float) -> None:
        """A notice is gone that was written at this time."""
        heard = self._heard.get(name, -1.0) >= asked_at
        self._check(heard or not self._is_named_alive(name), "a notice was lost", name)
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

    def ask(self, name: str) -> None:
        """Write a notice file."""
        world, folder = self.storage.world, self.storage.notices
        Mount(self.storage, -1).write(folder, (name,), world.now)
        world.note("user", "asks to leave", name)


class NodeFiles:
    """The shared files, as one node sees them; see `rendezvous.term.SharedFiles`."""

    def __init__(self, files: SharedFiles, mount: Mount) -> None:
        self.mount = mount
        self._files = files
        self._storage = files.storage
        self._has_looked = False
        """Whether it has listed the folder since it wrote a status."""

    def term(self) -> int:
        """List the folder in which the term folder is."""
        self._has_looked = True
        names = self.mount.names_in(self._storage.rdzv)
        return max(int(number) for kind, number, *_ in names if kind == "term")

    def take_over(self, before: int, epoch: int) -> None:
        """Rename the folder."""
        rdzv = self._storage.rdzv
        if not self._files.is_fenced:
            before = next(n for kind, n, *_ in rdzv.entries if kind == "term")
        self._storage.world.note(f"slot {self.mount.slot}", "takes the term folder", epoch)
        self.mount.rename((rdzv, _term(before)), (rdzv, _term(epoch)))

    def status(self) -> Message | None:
        """Return the status."""
        try:
            status: Message = self.mount.open(self._storage.run, STATUS).content
        except FileNotFoundError:
            self.mount.names_in(self._storage.run)
            return self._files.shown
        return status

    def replace_status(self, epoch: int, status: Message) -> None:
        """Stage the status in the folder, and rename it."""
        folder = self._folder(epoch)
        by_old_name = self._storage.rdzv.entries.get(_term(epoch)) is not folder
        is_late, self._has_looked = by_old_name and self._has_looked, False
        staged = ("staged", epoch)
        self.mount.write(folder, staged, status)
        self._files.monitor.replaced(status, is_late=is_late and self._files.is_fenced)
        self.mount.rename((folder, staged), (self._storage.run, STATUS))

    def append_progress(self, lines: Sequence[Message], *, maybe_torn: bool) -> None:
        """Append; nothing guards it."""
        self._files.monitor.appended(lines)

    def new_notices(self) -> list[str]:
        """Return what nobody has claimed."""
        return sorted(name for (name,) in self.mount.names_in(self._storage.notices))

    def claim_notice(self, epoch: int, name: str) -> None:
        """Rename it into the folder."""
        self.mount.rename((self._storage.notices, (name,)), (self._folder(epoch), (name,)))

    def claimed_notices(self, epoch: int) -> Mapping[str, float]:
        """List the folder."""
        names = self.mount.names_in(self._folder(epoch))
        return dict.fromkeys(sorted(name for (name,) in names), ASKED_LEFT_S)

    def remove_notice(self, epoch: int, name: str) -> None:
        """Begin to remove it from the folder."""
        monitor = self._files.monitor
        self.mount.remove_behind(
            self._folder(epoch), (name,), lambda file: monitor.removed(name, file.content)
        )

    def _folder(self, epoch: int) -> Folder:
        if not self._files.is_fenced:
            return self._files.folder
        found = self.mount.find(self._storage.rdzv, _term(epoch))
        if not isinstance(found, Folder):
            raise FileNotFoundError(2, "no such folder", _term(epoch))
        return found


def _term(epoch: int) -> Name:
    return ("term", epoch)


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

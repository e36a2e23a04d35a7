"""The files that leaders share, in virtual time: status, progress, notices, and the term folder.

The product's own procedures (`rendezvous.term_folder`) are carried out here, one step after the
other. Each step arrives at the file system after a while. A step that is under way arrives whatever
becomes of the process; the next one waits until the process goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_elastic.rendezvous.term_folder import Message, Steps, TermFolder, TermOverError
from hpc_elastic.testing.simulation.files import Access
from hpc_elastic.testing.simulation.world import Process, World

ASKED_LEFT_S = 5.0
"""A notice leaves this much time."""


class SharedMonitor:
    """What must hold of the files that leaders share, at every step.

    Status     It never goes back to an earlier term, nor within a term to an earlier round.
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
        self._check = check
        self._is_named_alive = is_named_alive
        self._status = (0, 0)
        self._epoch = 0
        self._is_late: set[int] = set()
        self._heard: dict[str, float] = {}

    def acts(self, epoch: int, what: object, *, knows_over: bool) -> None:
        """A leader does something."""
        self._check(not knows_over, "a leader acts though its term is over", epoch, what)

    def replaced(self, status: Message) -> None:
        """Another status can be read."""
        at = int(status["epoch"]), int(status.get("round") or 0)
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


@dataclass
class SharedFiles:
    """What is on the file system."""

    world: World
    rng: random.Random
    """Of its own, so that these files change nothing of a schedule without notices."""
    monitor: SharedMonitor
    slowest_s: float
    stale_s: float = 0.0
    is_fenced: bool = True
    """Whether a rename fails whose folder another leader has taken; False: a planted bug."""
    epoch: int = 0
    moved: tuple[float, int, int] = (-1e9, 0, -1)
    """When the folder was moved last, from which epoch, by which node."""
    shown: Message | None = None
    new: dict[str, float] = field(default_factory=dict)
    """Notices, and when each was written."""
    claimed: dict[str, float] = field(default_factory=dict)

    @property
    def notices(self) -> set[str]:
        """Those that are not removed."""
        return {*self.new, *self.claimed}

    def ask(self, name: str) -> None:
        """Write a notice file."""
        self.new[name] = self.world.now
        self.world.note("user", "asks to leave", name)

    def carry_out(
        self,
        access: Access,
        process: Process,
        steps: Steps[Any],
        done: Callable[[Any], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Carry a procedure out for a process; it hears the result, or what went wrong."""
        self._go_on(None, access, process, steps, done, failed)

    def _go_on(
        self,
        result: Any,
        access: Access,
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
            slow = self.slowest_s * chance * chance
            latency = slow if access.slow else 0.001 + 0.01 * chance
            before = latency * self.rng.random()
            args = (step, latency - before, access, process, steps, done, failed)
            self.world.after(before, None, self._arrive, *args)

    def _arrive(
        self,
        step: Callable[[], Any],
        rest_s: float,
        access: Access,
        process: Process,
        *rest: Any,
    ) -> None:
        result: Any = OSError(5, "input/output error")
        if not access.failing or self.rng.random() < 0.3:  # done, but the answer is lost
            try:
                done = step()
            except OSError as e:
                done = e
            result = result if access.failing else done
        self.world.after(rest_s, process, self._go_on, result, access, process, *rest)


@dataclass(frozen=True)
class NodeFiles:
    """The shared files, as one node sees them; see `rendezvous.term_folder.SharedFiles`."""

    files: SharedFiles
    slot: int

    def term(self) -> int:
        """Return the epoch of the folder, as far as this node sees: a cache may be stale."""
        files = self.files
        moved_at, before, mover = files.moved
        if mover != self.slot and files.world.now - moved_at < files.stale_s * files.rng.random():
            return before
        return files.epoch

    def take_over(self, before: int, epoch: int) -> None:
        """Rename the folder."""
        self._require(before)
        files = self.files
        files.moved = (files.world.now, files.epoch, self.slot)
        files.epoch = epoch
        files.world.note(f"slot {self.slot}", "takes the term folder", epoch)

    def status(self) -> Message | None:
        """Return the status."""
        return self.files.shown

    def replace_status(self, epoch: int, status: Message) -> None:
        """Rename a staged status."""
        self._require(epoch)
        self.files.shown = status
        self.files.monitor.replaced(status)

    def append_progress(self, lines: Sequence[Message], *, maybe_torn: bool) -> None:
        """Append; nothing guards it."""
        self.files.monitor.appended(lines)

    def new_notices(self) -> list[str]:
        """Return what nobody has claimed."""
        return sorted(self.files.new)

    def claim_notice(self, epoch: int, name: str) -> None:
        """Rename it into the folder."""
        self._require(epoch)
        if name not in self.files.new:
            raise FileNotFoundError(2, "no such notice", name)
        self.files.claimed[name] = self.files.new.pop(name)

    def claimed_notices(self, epoch: int) -> Mapping[str, float]:
        """List the folder."""
        self._require(epoch)
        return dict.fromkeys(sorted(self.files.claimed), ASKED_LEFT_S)

    def remove_notice(self, epoch: int, name: str) -> None:
        """Remove it from the folder."""
        self._require(epoch)
        if name in self.files.claimed:
            self.files.monitor.removed(name, self.files.claimed.pop(name))

    def _require(self, epoch: int) -> None:
        if self.files.is_fenced and epoch != self.files.epoch:
            raise FileNotFoundError(2, "no such folder", f"term.{epoch}")


class LeadersFiles:
    """What one simulated leader does with the shared files, one procedure of a kind at a time."""

    def __init__(
        self,
        files: SharedFiles,
        folder: TermFolder,
        access: Access,
        process: Process,
        is_over: Callable[[], None],
    ) -> None:
        self._files = files
        self._folder = folder
        self._access = access
        self._process = process
        self._is_over = is_over
        """Called when it finds that another leads."""
        self._status: Message | None = None
        """What is to be shown next; with the lines of the progress that go with it."""
        self._lines: list[Message] = []
        self._showing = False

    def show(self, status: Message, lines: Sequence[Message]) -> None:
        """Write a status, or, if one is under way, the newest after that: as the journal does."""
        self._status = {**status, "updated": self._files.world.now}
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
        self._files.carry_out(self._access, self._process, steps, done, failed)

"""One save of one rank: write this rank's part, then commit (rank 0) or see it committed.

Theory of operation
-------------------
All ranks write into one staging folder, whose name only their group knows (`RankGroup.token`) and
which is new for each save. A rank's part counts once ``part-<rank>.json`` is there. Rank 0 waits
for all parts, writes the manifest, asks the fence, and renames the folder: that is the commit. The
others look at the directory until the staging folder is gone; then the step is there, or was given
up.

A rank that can not write its part, or skips a save because it is busy, leaves
``failed-<rank>.json`` and removes what it wrote. Rank 0 that sees one gives the step up, and says
so in the same way; so nobody waits for what will not come. If even that can not be written, they
wait for `timeout_s`. A folder that was given up is removed at rank 0's next save. A part that is
complete is rank 0's to commit: whoever only tires of waiting for that leaves it where it is.

With near memory, most saves stay there (`to_store`), but one goes to the directory if the group is
about to change. The ranks learn of that within moments of each other, and no step is agreed on: the
save of one rank may begin right after the news, and that of another right before. So a rank whose
save stayed near *looks out* until its next one, from the thread that wrote it, for its training may
stand in a collective by then: at the news it stores its part after all. A rank that cannot, as it
has no snapshot any more, leaves its mark. Should the news be taken back before all have heard it,
who waits for the others soon gives up.

Nothing here is collective, and everything runs in whatever thread calls `Save.run`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic.checkpoint import store as store_module
from hpc_elastic.checkpoint.collectives import RankGroup
from hpc_elastic.checkpoint.files import HostSnapshot, write_part, write_text
from hpc_elastic.checkpoint.manifest import MANIFEST, RankPart, merge, name_ranks
from hpc_elastic.checkpoint.store import Cleaner, Retention, Store
from hpc_elastic.errors import CheckpointError
from hpc_elastic.run import fencing
from hpc_elastic.shared_files import is_there, names_in

EXIT_PATIENCE_S = 30.0
"""How long the other ranks are waited for at the end of a program."""

_log = logging.getLogger(__name__)

_ALMOST_ALL = 0.9
"""The share of a save from which on it is finished, whatever comes."""
_LOOK_S = (0.002, 0.25)
"""Seconds between two looks at the directory, at first and at most."""
_LOOKS_TO_BE_SURE = 4
"""A listing may miss a folder that is renamed meanwhile."""
_LOOK_OUT_S = 0.05
"""Seconds between two looks at whether the group is about to change."""
_LET_GO_S = 5.0
"""How long the others are waited for once it is not about to change any more."""


class AbandonedSaveError(CheckpointError):
    """A save was given up: an urgent one took its place, or its reason is gone."""


@dataclass(frozen=True)
class SaveContext:
    """What all saves of one Checkpointer share.

    Attributes:
        store: Where the checkpoints are.
        group: Who saves.
        rule: What is kept of the earlier ones.
        timeout_s: How long one rank waits for another.
        cleaner: Removes what is not kept.
        near: Stores a part in near memory (`memory_tier`); None without it.
        is_held: Tells whether this rank has heard that the group is about to change.
        damaged: Steps that did not verify when the state was restored.
    """

    store: Store
    group: RankGroup
    rule: Retention
    timeout_s: float
    cleaner: Cleaner
    damaged: set[int] = field(default_factory=set)
    near: Callable[[int, Callable[[Path], RankPart]], object] | None = None
    is_held: Callable[[], bool] = lambda: False


@dataclass
class Save:
    """One save, from the snapshot on.

    Attributes:
        context: What it has in common with others.
        step: What is saved.
        number: Of the save, the same on every rank.
        snapshot: This rank's part.
        urgent: Leave out what can wait.
        to_store: Whether it goes to the shared directory; otherwise to near memory only.
        for_hold: Whether it goes there only because the group is about to change.
        looks_out: Whether it is stored later, if the group is about to change then.
        committed: Called once the step is known to be committed.
        is_stored: Whether it is known to be committed in the shared directory.
    """

    context: SaveContext
    step: int
    number: int
    snapshot: HostSnapshot | None
    urgent: bool
    to_store: bool = True
    for_hold: bool = False
    looks_out: bool = False
    committed: Callable[[int], object] = lambda step: None
    is_stored: bool = False
    error: CheckpointError | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _over: threading.Event = field(default_factory=threading.Event)
    _called: threading.Event = field(default_factory=threading.Event)
    _give_up: threading.Event = field(default_factory=threading.Event)
    _written: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not; it may still look out."""
        return self._done.is_set()

    @property
    def problem(self) -> CheckpointError | None:
        """What went wrong; None for a save that was given up on purpose."""
        return None if isinstance(self.error, AbandonedSaveError) else self.error

    def wait(self) -> None:
        """Wait until it has ended; it may still look out."""
        self._done.wait()

    def store_now(self) -> bool:
        """Do at once what it looks out for; tell whether it is stored."""
        self._called.set()
        self._over.wait()
        return self.is_stored

    def stop(self) -> None:
        """End the look-out of a save that is done, and whatever came of it."""
        self._give_up.set()
        self._over.wait()

    def abort_if_unfinished(self) -> None:
        """End soon, for an urgent save: finish if almost all is written, else give up.

        The urgent one is written faster, for it shares the cores as the training does.
        """
        snapshot = self.snapshot
        if snapshot is not None and self._written < _ALMOST_ALL * snapshot.layout.num_bytes:
            self._give_up.set()

    def run(self) -> None:
        """Do all of it; what goes wrong is in `error` then. `end` is to follow."""
        begin = time.monotonic()
        try:
            self._run()
            _log.debug("step %d: written in %.2f s", self.step, time.monotonic() - begin)
        except CheckpointError as e:
            self.error = e
        except OSError as e:
            self.error = CheckpointError(f"{self._what}: {e}")
            self.error.__cause__ = e
        except Exception as e:
            _log.exception("%s", self._what)
            self.error = CheckpointError(f"{self._what}: {e!r}")
            self.error.__cause__ = e

    def look_out(self) -> None:
        """Store what stayed near, should the group be about to change (in a thread of its own)."""
        if not self.looks_out:
            return
        if self.error is None and self._hears():
            self._store_after_all()
        elif self.error is not None or self.context.is_held():
            self.mark_failed(str(self.error or "it is at a later step"))

    def end(self) -> None:
        """Let those go on who wait; nothing is committed any more."""
        self.snapshot, self.committed = None, lambda step: None
        self._done.set()
        self._over.set()

    def clean_up(self) -> None:
        """Begin to remove what is not kept any more (rank 0).

        An urgent save leaves it to the next one.
        """
        context, is_for_store = self.context, self.to_store or self.is_stored
        if context.group.rank == 0 and is_for_store and not self.urgent:
            context.cleaner.begin(self._retire if self.is_stored else lambda: None)

    def mark_failed(self, reason: str) -> None:
        """Tell the other ranks that this one does not take part in the save."""
        self._staging.mark_failed(reason)

    @property
    def _what(self) -> str:
        return (
            f"the checkpoint of step {self.step} was not written to {self.context.store.directory}"
        )

    @property
    def _staging(self) -> Staging:
        store, group = self.context.store, self.context.group
        return Staging(store, store.staging(self.step, group.token, self.number), group)

    def _run(self) -> None:
        assert self.snapshot is not None
        snapshot = self.snapshot
        if self.context.near is not None and not self.urgent:
            self._write_near(snapshot)
        if self.to_store:
            self._store(snapshot)
        self.committed(self.step)

    def _hears(self) -> bool:
        """Wait until the group is about to change; False if the look-out has to end before."""
        self._done.set()
        while not (self._called.is_set() or self.context.is_held()):
            if self._give_up.wait(_LOOK_OUT_S) or not threading.main_thread().is_alive():
                return False
        return True

    def _store_after_all(self) -> None:
        assert self.snapshot is not None
        self.for_hold = not self._called.is_set()
        try:
            self._store(self.snapshot)
            self.committed(self.step)
        except AbandonedSaveError:
            _log.debug("step %d stays in near memory only", self.step)
        except Exception as e:  # the save itself was good
            _log.warning("step %d stays in near memory only: %s", self.step, e)

    def _write_near(self, snapshot: HostSnapshot) -> None:
        near, step = self.context.near, self.step
        assert near is not None
        try:
            near(step, lambda folder: self._write(folder, snapshot, sync=False))
        except (OSError, CheckpointError) as e:
            if not self.to_store or isinstance(e, AbandonedSaveError):
                raise
            _log.warning("step %d is not in near memory: %s", step, e)

    def _store(self, snapshot: HostSnapshot) -> None:
        """Write this rank's part, and see it committed."""
        is_first = self.context.group.rank == 0
        try:
            part = self._write_part(snapshot)
            if is_first:
                self._commit(part)
        except BaseException as e:
            self._staging.retract_part(str(e))
            raise
        if not is_first:
            self._await_commit()
        self.is_stored = True

    def _write_part(self, snapshot: HostSnapshot) -> RankPart:
        context = self.context
        if context.group.rank == 0 and not self.urgent:
            context.store.sweep(context.group.token, self.number)
        self._staging.folder.mkdir(exist_ok=True)
        return self._write(self._staging.folder, snapshot, sync=True)

    def _commit(self, part: RankPart) -> None:
        """Make one checkpoint of all ranks' parts (rank 0)."""
        context, folder = self.context, self._staging.folder
        manifest = merge(
            [part, *self._await_parts()],
            step=self.step,
            world_size=context.group.world_size,
            created=time.time(),
        )
        write_text(folder / MANIFEST, manifest.to_json())
        self._see_that_all_stands()
        context.store.commit(folder, self.step)
        context.damaged.discard(self.step)

    def _write(self, folder: Path, snapshot: HostSnapshot, *, sync: bool) -> RankPart:
        self._written = 0
        return write_part(
            folder, self.context.group.rank, snapshot, sync=sync, on_block=self._on_block
        )

    def _on_block(self, num_bytes: int) -> None:
        self._written += num_bytes
        if self._give_up.is_set():
            raise AbandonedSaveError(f"{self._what}: an urgent one took its place")

    def _await_parts(self) -> Iterator[RankPart]:
        """Give the other ranks' parts as they come (rank 0)."""
        staging = self._staging
        missing = set(staging.others)
        for names in self._looks("parts", lambda: sorted(missing)):
            self._see_that_none_failed(names, staging.others)
            for rank in [rank for rank in missing if f"part-{rank}.json" in names]:
                yield staging.part(rank)
                missing.discard(rank)
            if not missing:
                return

    def _see_that_none_failed(self, names: Container[str], ranks: Iterable[int]) -> None:
        failure = self._staging.failure(names, ranks)
        if failure is not None:
            raise CheckpointError(f"{self._what}: {failure}")

    def _see_that_all_stands(self) -> None:
        """Raise if a rank has taken its part back since it was read (rank 0)."""
        names, others = self._staging.names(), self._staging.others
        self._see_that_none_failed(names, others)
        gone = [rank for rank in others if f"part-{rank}.json" not in names]
        if gone:
            raise CheckpointError(f"{self._what}: the part of rank {name_ranks(gone)} is gone")

    def _await_commit(self) -> None:
        """Return once the step is there (other ranks)."""
        store, looks = self.context.store, 0
        for names in self._looks("commit", lambda: [0]):
            failure = self._staging.failure(names, [0])
            if failure is not None:
                self._staging.retract_part(failure)
                raise CheckpointError(f"{self._what}: {failure}")
            if names:
                continue
            with contextlib.suppress(OSError):
                if self.step in store.steps():
                    return
                looks += 1
            if looks == _LOOKS_TO_BE_SURE:
                fencing.check_fence()
                raise CheckpointError(f"{self._what}: rank 0 gave up")

    def _looks(self, what: str, missing: Callable[[], list[int]]) -> Iterator[set[str]]:
        """Give the names in the staging folder, again and again, for as long as it is allowed.

        A look that fails, as with too many open files, is no reason to end.
        """
        deadline = time.monotonic() + self.context.timeout_s
        pause, longest = _LOOK_S
        problem = ""
        while time.monotonic() < deadline:
            try:
                names = self._staging.names()
            except OSError as e:
                problem = f" ({e})"
            else:
                yield names
            if self._give_up.wait(pause):
                raise AbandonedSaveError(f"{self._what}: an urgent one took its place")
            pause = min(2 * pause, longest)
            deadline = min(deadline, time.monotonic() + self._patience_s)
        if self._is_pointless:
            raise AbandonedSaveError(f"{self._what}: the group is not about to change any more")
        raise CheckpointError(
            f"{self._what}: no {what} from rank {name_ranks(missing())} within "
            f"{self.context.timeout_s:g} s{problem}. Every rank has to call save(), at the same "
            "steps, and the directory has to be on a file system that all of them share"
        )

    @property
    def _is_pointless(self) -> bool:
        return self.for_hold and not self.context.is_held()

    @property
    def _patience_s(self) -> float:
        """For how long from now the others are waited for at most."""
        if self._is_pointless:
            return _LET_GO_S
        return math.inf if threading.main_thread().is_alive() else EXIT_PATIENCE_S

    def _retire(self) -> None:
        """Set the checkpoints aside that are not kept any more."""
        store, context = self.context.store, self.context
        going = store_module.removable(
            store.steps(), committed=self.step, rule=context.rule, damaged=context.damaged
        )
        for step in going:
            _log.debug("removing the checkpoint of step %d", step)
            with contextlib.suppress(OSError):
                store.set_aside(store.folder(step))


# ---- The folder in which the ranks of a group write one save, before it is committed (`save`)


@dataclass(frozen=True)
class Staging:
    """One save's folder, as one rank sees it.

    Attributes:
        store: The directory that it is in.
        folder: Its name is known to the group only.
        group: Who writes there.
    """

    store: Store
    folder: Path
    group: RankGroup

    @property
    def others(self) -> range:
        """The ranks that rank 0 waits for."""
        return range(1, self.group.world_size)

    def names(self) -> set[str]:
        """Return the names in it; none if it is not there.

        A client of NFS goes on to list a folder that rank 0 has renamed, unless its parent is
        listed first (`shared_files`).
        """
        return {".", *names_in(self.folder)} if is_there(self.folder) else set()

    def part(self, rank: int) -> RankPart:
        """Read what a rank wrote."""
        return RankPart.from_json((self.folder / f"part-{rank}.json").read_text())

    def failure(self, names: Container[str], ranks: Iterable[int]) -> str | None:
        """Say which of the ranks gave up, and why; None if none of them did.

        Args:
            names: What is in the folder.
            ranks: Whose marks count.
        """
        for rank in ranks:
            if f"failed-{rank}.json" in names:
                return f"rank {rank} gave up: {self._reason(rank)}"
        return None

    def mark_failed(self, reason: str) -> None:
        """Tell the other ranks that this one does not take part in the save."""
        if self.group.world_size == 1:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            mark = self.folder / f"failed-{self.group.rank}.json"
            write_text(mark, json.dumps({"reason": reason}), sync=False)

    def retract_part(self, reason: str) -> None:
        """Remove what this rank has written, and leave its mark; the folder, if it is alone.

        The part goes first: rank 0 may have read it, and looks for it again before it commits.
        """
        with contextlib.suppress(OSError):
            if self.group.world_size == 1:
                self.store.remove(self.folder)
                return
            for name in (f"part-{self.group.rank}.json", f"shard-{self.group.rank}.safetensors"):
                (self.folder / name).unlink(missing_ok=True)
        self.mark_failed(reason)

    def _reason(self, rank: int) -> str:
        try:
            return str(json.loads((self.folder / f"failed-{rank}.json").read_text())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return "no reason given"

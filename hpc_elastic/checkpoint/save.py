"""One save of one rank: write this rank's part, then commit (rank 0) or see it committed.

Theory of operation
-------------------
All ranks write into one staging folder, whose name only their group knows (`RankGroup.token`) and
which is new for each save. A rank's part counts once ``part-<rank>.json`` is there. Rank 0 waits
for all parts, writes the manifest, asks the fence, and renames the folder: that is the commit. The
others look at the directory until the staging folder is gone; then the step is there, or was given
up.

A rank that cannot write its part, or skips a save because it is busy, leaves
``failed-<rank>.json`` and removes what it wrote. Rank 0 that sees one abandons the
step, and marks it in the same way; so no rank waits for nothing. If even that cannot be written,
they wait for `timeout_s`. A folder that was given up is removed at rank 0's next save. A part that
is complete is rank 0's to commit: a rank whose wait for it ends leaves it where it is.

A step that is saved again may have another state by then. It is written again; a rank whose tensors
are the same gives its shard a second name instead. If all is the same, rank 0 lets the earlier
checkpoint stand, and otherwise replaces it (`store`).

With a memory tier most saves stay in the nodes' memory; `to_store` is the same on every rank.
Nothing here is collective, and everything runs in whatever thread calls `Save.run`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_elastic.checkpoint.equality import merge, name_ranks
from hpc_elastic.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, RankPart
from hpc_elastic.checkpoint.memory_tier import MemoryStore
from hpc_elastic.checkpoint.owner import Owner, RankGroup
from hpc_elastic.checkpoint.prune import Retention
from hpc_elastic.checkpoint.shard_file import HostSnapshot, write_part, write_text
from hpc_elastic.checkpoint.store import Cleaner, Store
from hpc_elastic.errors import CheckpointError, CheckpointMismatchError
from hpc_elastic.run import fencing
from hpc_elastic.shared_files import is_there, make_folder, names_in, parse_json, read_text

EXIT_TIMEOUT_S = 30.0  # how long the other ranks are waited for at the end of a program

_log = logging.getLogger(__name__)

_ALMOST_ALL = 0.9  # the share of a save from which on it is finished, whatever comes
_LOOK_S = (0.002, 0.25)  # seconds between two looks at the directory, at first and at most
_LOOKS_TO_BE_SURE = 4  # a listing may miss a folder that is renamed meanwhile


class AbandonedSaveError(CheckpointError):
    """A save was given up: an urgent one took its place."""


@dataclass(frozen=True)
class SaveContext:
    """What all saves of one Checkpointer share."""

    store: Store
    group: RankGroup
    owner: Owner
    rule: Retention
    timeout_s: float  # how long one rank waits for another
    cleaner: Cleaner
    damaged: set[int] = field(default_factory=set)  # steps that did not verify
    memory: MemoryStore | None = None  # the nodes' memory; None without a memory tier
    remarks: set[str] = field(default_factory=set)  # what was logged already

    def remark(self, what: str, text: str) -> None:
        """Log a harmless difference between the ranks once."""
        if what not in self.remarks:
            self.remarks.add(what)
            _log.warning("%s", text)


@dataclass
class Save:
    """One save, from the snapshot on."""

    context: SaveContext
    step: int
    number: int  # of the save, the same on every rank
    urgent: bool = False  # leave out what can wait
    to_store: bool = True
    replaces: bool = False  # whether it may replace a checkpoint of this step
    snapshot: HostSnapshot | None = None  # this rank's part; None once the save has ended
    is_stored: bool = False  # whether it is known to be committed in the shared directory
    error: CheckpointError | None = None
    duration_s: float = 0.0  # from the snapshot to the commit
    folder: Path = field(init=False)  # where all ranks write; only their group knows its name
    done: threading.Event = field(default_factory=threading.Event)  # set once it has ended
    _aborted: threading.Event = field(default_factory=threading.Event)
    _num_written: int = 0

    def __post_init__(self) -> None:
        store, group = self.context.store, self.context.group
        self.folder = store.staging(self.step, group.token, self.number)

    @property
    def problem(self) -> CheckpointError | None:
        """What went wrong; None for a save that was given up on purpose."""
        return None if isinstance(self.error, AbandonedSaveError) else self.error

    def abort_if_unfinished(self) -> None:
        """Give up for an urgent save, which is written faster, unless almost all is written."""
        snapshot = self.snapshot
        if snapshot and self._num_written < _ALMOST_ALL * snapshot.layout.num_bytes:
            self._aborted.set()

    def run(self) -> None:
        """Do all of it; what goes wrong is in `error` then. `finish` is to follow."""
        begin, memory, snapshot = time.monotonic(), self.context.memory, self.snapshot
        assert snapshot is not None
        try:
            if memory is not None and not self.urgent:
                self._write_to_memory(memory, snapshot)
            if self.to_store:
                self._write_to_store(snapshot)
            self.duration_s = time.monotonic() - begin
            _log.debug("step %d: written in %.2f s", self.step, self.duration_s)
        except CheckpointError as e:
            self.error = e
        except Exception as e:
            if not isinstance(e, OSError):
                _log.exception("step %d", self.step)
            self.error = self._failure(str(e) if isinstance(e, OSError) else repr(e))
            self.error.__cause__ = e

    def give_up(self, why: str) -> None:
        """Record that there is nothing to write, and let the other ranks see it."""
        self.error = self._failure(why)
        self.mark_failed(why)

    def finish(self) -> None:
        """Release those that wait; removals are left to the next save if this one is urgent."""
        context = self.context
        if context.group.rank == 0 and self.to_store and not self.urgent:
            context.cleaner.start_removal(self._retire if self.is_stored else lambda: None)
        self.snapshot = None
        self.done.set()

    def _failure(self, why: str) -> CheckpointError:
        directory = self.context.store.directory
        return CheckpointError(
            f"the checkpoint of step {self.step} was not written to {directory}: {why}"
        )

    def _raise_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise AbandonedSaveError(str(self._failure("an urgent one took its place")))

    def _write_to_memory(self, memory: MemoryStore, snapshot: HostSnapshot) -> None:
        try:
            memory.store(self.step, lambda folder: self._write(folder, snapshot, sync=False))
        except (OSError, CheckpointError) as e:
            if not self.to_store or isinstance(e, AbandonedSaveError):
                raise
            _log.warning("step %d is not in memory: %s", self.step, e)

    def _write_to_store(self, snapshot: HostSnapshot) -> None:
        context = self.context
        is_first = context.group.rank == 0
        try:
            if is_first and not self.urgent:
                context.store.sweep(context.group.token, self.number)
            make_folder(self.folder)
            replaced = context.store.stored(self.step) if self.replaces else None
            part = self._write(self.folder, snapshot, sync=True, replaced=replaced)
            if is_first:
                self._commit(part)
        except BaseException as e:
            self._retract_part(str(e), mismatch=isinstance(e, CheckpointMismatchError))
            raise
        if not is_first:
            self._await_commit()
        self.is_stored = True

    def _write(
        self, folder: Path, snapshot: HostSnapshot, *, sync: bool, replaced: Path | None = None
    ) -> RankPart:
        def on_block(num_bytes: int) -> None:
            if num_bytes:  # one thread writes
                self._num_written += num_bytes
            self._raise_if_aborted()

        self._num_written = 0
        rank = self.context.group.rank
        return write_part(folder, rank, snapshot, sync=sync, on_block=on_block, replaced=replaced)

    def _commit(self, part: RankPart) -> None:
        """Make one checkpoint of all ranks' parts as they come (rank 0)."""
        context, parts = self.context, [part]
        world_size = context.group.world_size
        others = range(1, world_size)
        missing = set(others)
        for names in self._poll_staging("parts", lambda: sorted(missing)):
            self._check_none_failed(names)
            for rank in [rank for rank in missing if f"part-{rank}.json" in names]:
                text = read_text(self.folder / f"part-{rank}.json", MANIFEST_BYTES)
                parts.append(RankPart.from_json(text))
                missing.discard(rank)
            if not missing:
                break
        now, remark = time.time(), context.remark
        manifest = merge(parts, step=self.step, world_size=world_size, created=now, remark=remark)
        manifest = replace(manifest, run=context.owner.run)
        write_text(self.folder / MANIFEST, manifest.to_json())
        names = self._staged_names()
        self._check_none_failed(names)
        gone = [rank for rank in others if f"part-{rank}.json" not in names]
        if gone:  # retracted since it was read
            raise self._failure(f"the part of rank {name_ranks(gone)} is gone")
        context.store.commit(self.folder, manifest, context.owner, replaces=self.replaces)
        context.damaged.discard(self.step)

    def _check_none_failed(self, names: Container[str]) -> None:
        failure = self._failed_rank(names, range(1, self.context.group.world_size))
        if failure is not None:
            raise failure

    def _await_commit(self) -> None:
        store, looks = self.context.store, 0
        for names in self._poll_staging("commit", lambda: [0]):
            failure = self._failed_rank(names, [0])
            if failure is not None:
                self._retract_part(str(failure))
                raise failure
            if names:
                continue
            with contextlib.suppress(OSError):
                if self.step in store.steps():
                    return
                looks += 1
            if looks == _LOOKS_TO_BE_SURE:
                fencing.check_fence()
                raise self._failure("rank 0 gave up")

    def _poll_staging(self, what: str, missing: Callable[[], list[int]]) -> Iterator[set[str]]:
        """Yield the staging folder's names while it is allowed; a failed look ends nothing."""
        deadline = time.monotonic() + self.context.timeout_s
        pause, longest = _LOOK_S
        problem = ""
        while time.monotonic() < deadline:
            try:
                names = self._staged_names()
            except OSError as e:
                problem = f" ({e})"
            else:
                yield names
            self._aborted.wait(pause)
            self._raise_if_aborted()
            pause = min(2 * pause, longest)
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT_S)
        raise self._failure(
            f"no {what} from rank {name_ranks(missing())} within "
            f"{self.context.timeout_s:g} s{problem}. Every rank has to call save(), at the same "
            "steps, and the directory has to be on a file system that all of them share"
        )

    def _retire(self) -> None:
        context, store = self.context, self.context.store
        steps = store.steps()
        for step in context.rule.removable(steps, committed=self.step, damaged=context.damaged):
            _log.debug("removing the checkpoint of step %d", step)
            with contextlib.suppress(OSError):
                store.set_aside(store.folder(step))

    def _staged_names(self) -> set[str]:
        """Return the names in the staging folder; none if it is not there.

        A client of NFS goes on to list a folder that was renamed, unless its parent is listed
        first.
        """
        return {".", *names_in(self.folder)} if is_there(self.folder) else set()

    def _failed_rank(self, names: Container[str], ranks: Iterable[int]) -> CheckpointError | None:
        for rank in ranks:
            name = f"failed-{rank}.json"
            if name in names:
                try:
                    file = self.folder / name
                    mark = parse_json(read_text(file), file)
                    reason = str(mark["reason"])
                    if mark.get("mismatch"):
                        return CheckpointMismatchError(reason)
                except (OSError, ValueError, KeyError, TypeError):
                    reason = "no reason given"
                return self._failure(f"rank {rank} gave up: {reason}")
        return None

    def mark_failed(self, reason: str, *, mismatch: bool = False) -> None:
        """Let the other ranks see that this one does not take part in the save."""
        group = self.context.group
        if group.world_size > 1:
            with contextlib.suppress(OSError):
                make_folder(self.folder)
                mark = self.folder / f"failed-{group.rank}.json"
                write_text(mark, json.dumps({"reason": reason, "mismatch": mismatch}), sync=False)

    def _retract_part(self, reason: str, *, mismatch: bool = False) -> None:
        """Remove what this rank has written, and mark it failed; the folder, if it is alone.

        The part goes first: rank 0 may have read it, and looks for it again before it commits.
        """
        group = self.context.group
        with contextlib.suppress(OSError):
            if group.world_size == 1:
                self.context.store.remove(self.folder)
                return
            for name in (f"part-{group.rank}.json", f"shard-{group.rank}.safetensors"):
                (self.folder / name).unlink(missing_ok=True)
        self.mark_failed(reason, mismatch=mismatch)

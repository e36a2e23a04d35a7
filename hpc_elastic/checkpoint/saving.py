"""One save of one rank: write this rank's part, then commit (rank 0) or see it committed.

Theory of operation
-------------------
All ranks write into one staging folder, whose name only their group knows (`Group.token`) and which
is new for each save. A rank's part counts once ``part-<rank>.json`` is there. Rank 0 waits for all
parts, writes the manifest, asks the fence, and renames the folder: that is the commit. The others
look at the directory until the staging folder is gone; then the step is there, or was given up.

A rank that fails, or skips a save because it is busy, removes what it wrote and leaves
``failed-<rank>.json``. Rank 0 that sees one gives the step up, and says so in the same way; so
nobody waits for what will not come. If even that can not be written, they wait for `timeout_s`. A
folder that was given up is removed at rank 0's next save.

Nothing here is collective, and everything runs in whatever thread calls `Save.run`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpc_elastic import fence
from hpc_elastic.checkpoint import retention
from hpc_elastic.checkpoint.group import Group
from hpc_elastic.checkpoint.manifest import MANIFEST, Part, merge, name_ranks
from hpc_elastic.checkpoint.retention import Retention
from hpc_elastic.checkpoint.store import Store
from hpc_elastic.checkpoint.writer import Image, write_part, write_text
from hpc_elastic.errors import CheckpointError

EXIT_PATIENCE_S = 30.0
"""How long the other ranks are waited for once the program itself has ended."""

_log = logging.getLogger(__name__)

_ALMOST_ALL = 0.9
"""The share of a save from which on it is finished, whatever comes."""
_LOOK_S = (0.002, 0.25)
"""Seconds between two looks at the directory, at first and at most."""
_LOOKS_TO_BE_SURE = 4
"""A listing may miss a folder that is renamed meanwhile."""


class AbandonedSaveError(CheckpointError):
    """A save was given up in favour of an urgent one."""


@dataclass(frozen=True)
class Context:
    """What all saves of one Checkpointer share.

    Attributes:
        store: Where the checkpoints are.
        group: Who saves.
        rule: What is kept of the earlier ones.
        timeout_s: How long one rank waits for another.
        near: Stores a part in near memory (`tiers`); None without it.
        damaged: Steps that did not verify when the state was restored.
    """

    store: Store
    group: Group
    rule: Retention
    timeout_s: float
    damaged: set[int] = field(default_factory=set)
    near: Callable[[int, Callable[[Path], Part]], object] | None = None


@dataclass
class Save:
    """One save, from the image on.

    Attributes:
        context: What it has in common with others.
        step: What is saved.
        number: Of the save, the same on every rank.
        image: This rank's part.
        urgent: Leave out what can wait.
        to_store: Whether it goes to the shared directory; otherwise to near memory only.
        committed: Called once the step is known to be committed.
    """

    context: Context
    step: int
    number: int
    image: Image | None
    urgent: bool
    to_store: bool = True
    committed: Callable[[int], object] = lambda step: None
    error: CheckpointError | None = None
    _done: threading.Event = field(default_factory=threading.Event)
    _give_up: threading.Event = field(default_factory=threading.Event)
    _written: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    @property
    def problem(self) -> CheckpointError | None:
        """What went wrong; None for a save that was given up on purpose."""
        return None if isinstance(self.error, AbandonedSaveError) else self.error

    def wait(self) -> None:
        """Wait until it has ended."""
        self._done.wait()

    def make_way(self) -> None:
        """End soon, for an urgent save: finish if almost all is written, else give up.

        The urgent one is written faster, for it shares the cores as the training does.
        """
        image = self.image
        if image is not None and self._written < _ALMOST_ALL * image.layout.num_bytes:
            self._give_up.set()

    def run(self) -> None:
        """Do all of it; what goes wrong is in `error` then. `end` is to follow."""
        begin = time.monotonic()
        try:
            self._run()
            _log.info("step %d: written in %.2f s", self.step, time.monotonic() - begin)
        except CheckpointError as e:
            self.error = e
        except OSError as e:
            self.error = CheckpointError(f"{self._what}: {e}")
            self.error.__cause__ = e
        except Exception as e:
            _log.exception("%s", self._what)
            self.error = CheckpointError(f"{self._what}: {e!r}")
            self.error.__cause__ = e

    def end(self) -> None:
        """Let those go on who wait."""
        self.image = None
        self._done.set()

    def leave_mark(self, reason: str) -> None:
        """Tell the other ranks that this one does not take part in the save."""
        if self.context.group.world_size == 1:
            return
        with contextlib.suppress(OSError):
            self._staging.mkdir(exist_ok=True)
            name = f"failed-{self.context.group.rank}.json"
            write_text(self._staging / name, json.dumps({"reason": reason}), sync=False)

    @property
    def _what(self) -> str:
        return (
            f"the checkpoint of step {self.step} was not written to {self.context.store.directory}"
        )

    @property
    def _staging(self) -> Path:
        return self.context.store.staging(self.step, self.context.group.token, self.number)

    def _run(self) -> None:
        assert self.image is not None
        image = self.image
        if self.context.near is not None and not self.urgent:
            self._write_near(image)
        if self.to_store:
            try:
                self._write_and_commit(image)
            except BaseException as e:
                self._clean_up(str(e))
                raise
        self.committed(self.step)

    def _write_near(self, image: Image) -> None:
        near, step = self.context.near, self.step
        assert near is not None
        try:
            near(step, lambda folder: self._write(folder, image, sync=False))
        except (OSError, CheckpointError) as e:
            if not self.to_store or isinstance(e, AbandonedSaveError):
                raise
            _log.warning("step %d is not in near memory: %s", step, e)

    def _write_and_commit(self, image: Image) -> None:
        context = self.context
        if context.group.rank == 0 and not self.urgent:
            context.store.sweep(context.group.token, self.number)
        self._staging.mkdir(exist_ok=True)
        part = self._write(self._staging, image, sync=True)
        if context.group.rank != 0:
            self._await_commit()
            return
        manifest = merge(
            [part, *self._await_parts()],
            step=self.step,
            world_size=context.group.world_size,
            created=time.time(),
        )
        write_text(self._staging / MANIFEST, manifest.to_json())
        context.store.commit(self._staging, self.step)
        context.damaged.discard(self.step)
        if not self.urgent:
            self._retire()

    def _write(self, folder: Path, image: Image, *, sync: bool) -> Part:
        self._written = 0
        return write_part(folder, self.context.group.rank, image, sync=sync, watch=self._watch)

    def _watch(self, num_bytes: int) -> None:
        self._written += num_bytes
        if self._give_up.is_set():
            raise AbandonedSaveError(f"{self._what}: an urgent one took its place")

    def _await_parts(self) -> Iterator[Part]:
        """Give the other ranks' parts as they come (rank 0)."""
        missing = set(range(1, self.context.group.world_size))
        for names in self._looks("parts", lambda: sorted(missing)):
            failed = [rank for rank in missing if f"failed-{rank}.json" in names]
            if failed:
                reason = _reason(self._staging / f"failed-{failed[0]}.json")
                raise CheckpointError(f"{self._what}: rank {failed[0]} gave up: {reason}")
            for rank in [rank for rank in missing if f"part-{rank}.json" in names]:
                yield Part.from_json((self._staging / f"part-{rank}.json").read_text())
                missing.discard(rank)
            if not missing:
                return

    def _await_commit(self) -> None:
        """Return once the step is there (other ranks)."""
        store, looks = self.context.store, 0
        for names in self._looks("the commit", lambda: [0]):
            if "failed-0.json" in names:
                reason = _reason(self._staging / "failed-0.json")
                raise CheckpointError(f"{self._what}: rank 0 gave up: {reason}")
            if names:
                continue
            if self.step in store.steps():
                return
            looks += 1
            if looks == _LOOKS_TO_BE_SURE:
                fence.check()
                raise CheckpointError(f"{self._what}: rank 0 gave up")

    def _looks(self, what: str, missing: Callable[[], list[int]]) -> Iterator[list[str]]:
        """Give the names in the staging folder, again and again, for as long as it is allowed.

        The folder is opened anew each time, which makes a client of NFS ask the server.
        """
        deadline = time.monotonic() + self.context.timeout_s
        pause, longest = _LOOK_S
        while time.monotonic() < deadline:
            yield _names_in(self._staging)
            time.sleep(pause)
            pause = min(2 * pause, longest)
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + EXIT_PATIENCE_S)
            if self._give_up.is_set():
                raise AbandonedSaveError(f"{self._what}: an urgent one took its place")
        raise CheckpointError(
            f"{self._what}: no {what} from rank {name_ranks(missing())} within "
            f"{self.context.timeout_s:g} s. Every rank has to call save(), at the same steps, and "
            "the directory has to be on a file system that all of them share"
        )

    def _retire(self) -> None:
        """Remove the checkpoints that are not kept any more (rank 0)."""
        store, context = self.context.store, self.context
        going = retention.removable(
            store.steps(), committed=self.step, rule=context.rule, damaged=context.damaged
        )
        for step in going:
            _log.info("removing the checkpoint of step %d", step)
            with contextlib.suppress(OSError):
                store.remove(store.folder(step))

    def _clean_up(self, reason: str) -> None:
        """Remove what this rank has written; the folder too, if it is alone."""
        with contextlib.suppress(OSError):
            if self.context.group.world_size == 1:
                self.context.store.remove(self._staging)
                return
            rank = self.context.group.rank
            for name in (f"shard-{rank}.safetensors", f"part-{rank}.json"):
                (self._staging / name).unlink(missing_ok=True)
        self.leave_mark(reason)


def _names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return [".", *(entry.name for entry in entries)]
    except FileNotFoundError:
        return []


def _reason(mark: Path) -> str:
    try:
        return str(json.loads(mark.read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return "no reason given"

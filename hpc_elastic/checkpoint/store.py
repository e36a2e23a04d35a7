"""The folders of a checkpoint directory: what is there, whether it is good, commit and removal.

Everything that a reader may see is there from one rename on. A step that is saved again with
another state replaces its checkpoint, which has the name ``step-<n>.replaced`` meanwhile: a reader
takes that where the other is missing. Nothing here needs torch, so that the command line can use
it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpc_elastic.checkpoint import owner
from hpc_elastic.checkpoint.manifest import MANIFEST, MANIFEST_BYTES, FileEntry, Manifest
from hpc_elastic.checkpoint.shard_file import ShardFile
from hpc_elastic.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
)
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import make_folder, names_in, open_file, read_text, write_atomic

_COMMIT_ATTEMPTS = 3
LEFTOVER_AGE_S = 3600.0
"""A staging folder of a group that may still run is removed after this long."""

_log = logging.getLogger(__name__)

_REPLACED = ".replaced"
_STEP = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_REPLACED)})?")
STAGING = re.compile(r"\.staging-step-\d+-(?P<token>[0-9a-z]+)-(?P<number>\d+)")
TRASH = ".trash-"


@dataclass(frozen=True)
class Store:
    """A directory of checkpoints."""

    directory: Path
    """On a file system that all ranks share."""

    def steps(self) -> list[int]:
        """Return the committed steps, newest first; none if there is no such directory."""
        found = [_STEP.fullmatch(name) for name in names_in(self.directory)]
        return sorted({int(m[1]) for m in found if m}, reverse=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a committed step."""
        return self.directory / f"step-{step:08d}"

    def stored(self, step: int) -> Path:
        """Return the folder in which a committed step is, as long as no save goes on: `folder`.

        A save that was killed while it replaced the checkpoint has left that under a second name.
        """
        folder, second = self.folder(step), self._second_name(step)
        names = names_in(self.directory)
        return second if folder.name not in names and second.name in names else folder

    def _second_name(self, step: int) -> Path:
        return self.directory / f"{self.folder(step).name}{_REPLACED}"

    def staging(self, step: int, token: str, number: int) -> Path:
        """Return the folder in which all ranks of a group write a save.

        Args:
            step: What is saved.
            token: The group's; no other group's.
            number: Of the save, counted in the group.
        """
        return self.directory / f".staging-step-{step}-{token}-{number}"

    def prepare(self) -> None:
        """Make the directory, and see that it can be written.

        Raises:
            ConfigError: it cannot.
        """
        probe = self.directory / f".probe-{uuid.uuid4().hex}"
        try:
            make_folder(self.directory, parents=True)
            probe.mkdir()
            probe.rmdir()
        except OSError as e:
            remedy = f"checkpoints cannot be written there ({e.strerror}): give another directory"
            raise ConfigError("directory", str(self.directory), remedy) from e

    def commit(
        self, staging: Path, manifest: Manifest, mine: owner.Owner, *, replaces: bool = False
    ) -> bool:
        """Make a complete staging folder the checkpoint of its step (rank 0).

        Where there is one of that step already:

        - A damaged one is moved out of the way.
        - With ``replaces``, one of another content is replaced. There is no moment without one of
          the two.
        - Another good one stays. Two groups of a run may have written the same step; the first
          wins. Where another run has written it, this save has failed.

        Returns:
            Whether this one became the checkpoint.

        Raises:
            CheckpointFencedError: the group is over; nothing was committed.
            CheckpointError: the directory, or this step in it, is another run's.
            OSError: nothing was committed.
        """
        _sync_folder(staging)
        target, second = self.folder(manifest.step), self._second_name(manifest.step)
        for attempt in range(_COMMIT_ATTEMPTS):
            fencing.check_fence()
            owner.require(self.directory, mine)
            try:
                staging.rename(target)
                break
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                if attempt == _COMMIT_ATTEMPTS - 1:
                    raise CheckpointError(f"{target} was made by another writer meanwhile") from e
            if not self._make_room(target, second, manifest, replaces):
                self.set_aside(staging)
                return False
        _sync_folder(self.directory)
        if replaces:
            self.set_aside(second)
        return True

    def _make_room(self, target: Path, second: Path, manifest: Manifest, replaces: bool) -> bool:
        """Move a checkpoint out of the way of another of its step; return False if it stays."""
        try:
            there = read_manifest(target)
        except CheckpointError as e:
            problems, wrote = [str(e)], ""
        else:
            if replaces:
                if _content(there) == _content(manifest):
                    return False
                _log.debug("%s is replaced: the state has changed since", target)
                self.set_aside(second)
                target.rename(second)
                return True
            problems, wrote = problems_of(target, there), there.run
        if problems:
            _log.warning("%s is replaced: %s", target, problems[0])
            self.set_aside(target)
            return True
        if wrote not in ("", manifest.run):
            raise CheckpointError(
                f"{target} was saved by {wrote}, and this training has not restored it: call "
                "load_latest() before the first save, or give another directory"
            )
        _log.warning("%s is there already, and good: it is kept", target)
        return False

    def set_aside(self, folder: Path) -> Path:
        """Give a folder a name that does not count, until `empty_trash` deletes it; return that."""
        trash = self.directory / f"{TRASH}{folder.name.lstrip('.')}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(trash)
        return trash

    def remove(self, folder: Path) -> None:
        """Remove a folder: it is out of sight at once, and then deleted as far as that works."""
        shutil.rmtree(self.set_aside(folder), ignore_errors=True)

    def empty_trash(self) -> Iterator[None]:
        """Delete what was set aside, one file at each turn.

        A file that a dead node holds open takes minutes (an NFS 4 delegation), and so does then
        every look into its folder.
        """
        for folder in (self.directory / name for name in names_in(self.directory)):
            if folder.name.startswith(TRASH) and not folder.is_symlink():  # no save makes one
                for name in names_in(folder):
                    with contextlib.suppress(OSError):
                        (folder / name).unlink()
                    yield
                shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, token: str, number: int) -> None:
        """Set aside what dead groups and earlier saves have left (rank 0, before a save).

        Args:
            token: Of the group.
            number: Of the save that begins. Another rank may be at a later one already.
        """
        names = names_in(self.directory)
        for name in names:
            committed, staged = _STEP.fullmatch(name), STAGING.fullmatch(name)
            if committed and name.endswith(_REPLACED):
                self._settle_replaced(int(committed[1]), names)
            elif staged and staged["token"] == token:
                if int(staged["number"]) < number:
                    self.set_aside(self.directory / name)
            elif staged and self._is_over(self.directory / name, staged["token"], token):
                _log.info("removing %s, which was never committed", name)
                self.set_aside(self.directory / name)

    def _is_over(self, folder: Path, theirs: str, mine: str) -> bool:
        """Return whether another group, whose staging folder this is, cannot commit any more."""
        their_index, my_index = _index_of(theirs), _index_of(mine)
        if _run_of(theirs) == _run_of(mine) and their_index is not None and my_index is not None:
            return their_index < my_index  # fenced by our log entry
        return _is_old(folder)

    def _settle_replaced(self, step: int, names: Collection[str]) -> None:
        """End a replacement that a killed save has left half done."""
        folder, second = self.folder(step), self._second_name(step)
        if folder.name in names:
            self.set_aside(second)
        else:
            with contextlib.suppress(OSError):  # another save has committed the step meanwhile
                second.rename(folder)


def _is_old(folder: Path) -> bool:
    """Return whether nothing was written to a staging folder for `LEFTOVER_AGE_S`."""
    with contextlib.suppress(OSError):
        touched = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
        return time.time() - touched > LEFTOVER_AGE_S
    return False


_TOKEN = re.compile(r"(?:r(?P<index>\d+)|f\d+s\d+)u(?P<run>[0-9a-f]{8})")


def _index_of(token: str) -> int | None:
    """Return the index of the log entry that formed a group; None for a group without a run."""
    m = _TOKEN.fullmatch(token)
    return int(m["index"]) if m and m["index"] else None


def _run_of(token: str) -> str | None:
    """Return the `owner.tag` of a group's run; None for a group without one."""
    m = _TOKEN.fullmatch(token)
    return m["run"] if m else None


def _content(manifest: Manifest) -> str:
    """Return what two checkpoints of one state have in common."""
    return replace(manifest, created=0.0, run="").to_json()


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint holds.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CheckpointCorruptError: its manifest is missing, or damaged, or another step's.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint {folder}")
    try:
        manifest = Manifest.from_json(read_text(folder / MANIFEST, MANIFEST_BYTES))
    except (OSError, CheckpointCorruptError) as e:
        raise CheckpointCorruptError(f"{folder / MANIFEST}: {e}") from e
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointCorruptError(f"{folder / MANIFEST} is of step {manifest.step}")
    return manifest


def verify(folder: Path) -> list[str]:
    """Check all of a checkpoint.

    Returns:
        What is wrong, a line each; nothing if it is good.
    """
    try:
        return problems_of(folder, read_manifest(folder))
    except CheckpointError as e:
        return [str(e)]


def problems_of(
    folder: Path, manifest: Manifest, files: Sequence[FileEntry] | None = None
) -> list[str]:
    """Check files of a checkpoint: their bytes, and where the boxes of the tensors lie in them.

    Args:
        folder: The checkpoint.
        manifest: Its manifest.
        files: Files of it; None for all.

    Returns:
        What is wrong, a line each; nothing if they are good.
    """
    pieces = manifest.pieces()
    found = (
        file_problem(folder, entry) or _layout_problem(folder / entry.name, pieces[entry.name])
        for entry in (manifest.files if files is None else files)
    )
    return [problem for problem in found if problem]


def _layout_problem(path: Path, pieces: Mapping[str, int]) -> str | None:
    """Return what differs between the header of a file and the manifest; None if nothing does.

    Args:
        path: The file.
        pieces: The bytes of the boxes that it holds by the manifest, by name.
    """
    if not pieces:
        return None
    try:
        with closing(ShardFile(path)) as file:
            for name, num_bytes in pieces.items():
                begin, end = file.tensors.get(name, (0, -1))
                if end - begin != num_bytes and num_bytes:
                    found = f"{end - begin} bytes" if name in file.tensors else "nothing"
                    return f"{path} should have {num_bytes} bytes of {name:.80}, but has {found}"
    except CheckpointCorruptError as e:
        return str(e)
    return None


def file_problem(folder: Path, entry: FileEntry) -> str | None:
    """Check one file of a checkpoint; return what is wrong, None if it is good."""
    path = folder / entry.name
    try:
        with open_file(path) as f:
            num_bytes = os.fstat(f.fileno()).st_size
            if num_bytes != entry.num_bytes:
                return f"{path} has {num_bytes} bytes instead of {entry.num_bytes}"
            checksum = hashlib.file_digest(f, xxhash.xxh3_64).hexdigest()
    except OSError as e:
        return f"{path} cannot be read: {e.strerror or e}"
    if f"xxh3_64:{checksum}" != entry.checksum:
        return f"{path} was changed: its checksum does not match"
    return None


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ---- Removals from a directory of checkpoints, for which no save waits
# A server of NFS 4 holds a removal up for minutes where it has to recall a delegation of the file
# from a node that is dead.


_GETS_ON_S = 5.0
"""A program's end waits no longer for removals if none ends in this time."""


class Cleaner:
    """Removes in a daemon thread, one thing after another."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._num_removed = 0

    def start_removal(self, set_aside: Callable[[], object]) -> None:
        """Begin to set things aside and to delete all that was, after what was begun before."""
        with self._lock:
            self._waiting.append(set_aside)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="checkpoint-cleaner", daemon=True)
                try:
                    thread.start()
                except RuntimeError as e:
                    _log.warning("%s: old checkpoints stay for now", e)
                    return
                self._thread = thread

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all is done.

        Args:
            timeout_s: How long at most; None: for as long as it gets on.
        """
        thread, before = self._thread, -1
        if thread is not None and timeout_s is not None:
            thread.join(timeout_s)
            return
        while thread is not None and thread.is_alive() and before < self._num_removed:
            before = self._num_removed
            thread.join(_GETS_ON_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                set_aside = self._waiting.popleft()
            try:
                set_aside()
                for _ in self._store.empty_trash():
                    self._num_removed += 1
            except OSError as e:
                _log.warning("old checkpoints stay in %s for now: %s", self._store.directory, e)


# ---- Which checkpoints of a run a user may do without, and their removal
# A checkpoint counts as good once all of its bytes were read and their checksums are right. The
# newest ``keep_last`` good ones stay, and so does whatever is newer than the oldest of them,
# damaged or not: what a run restores now is never older. Nodes' memory is left alone.


@dataclass(frozen=True)
class Item:
    """A folder that goes, or that could not be removed, and the bytes of its files."""

    folder: Path
    num_bytes: int


@dataclass(frozen=True)
class Cleaning:
    """What is to go from one directory of checkpoints."""

    directory: Path
    kept: list[int]
    """The good steps that stay, newest first."""
    damaged: Mapping[int, str]
    """What is wrong with those that were read and are not good, by step."""
    going: list[Item]
    """What goes: old checkpoints first, then leftovers of aborted saves."""


def plan(directory: Path, *, keep_last: int, run_id: str, last_index: int | None) -> Cleaning:
    """Return what may go; nothing is changed.

    Args:
        directory: Of the checkpoints.
        keep_last: This many of the newest good ones stay; 0: none.
        run_id: Of the run that has saved there.
        last_index: Index of the run's last log entry; None if no task of the run may be there.

    Raises:
        CheckpointError: the directory cannot be read.
    """
    store = Store(directory)
    kept: list[int] = []
    damaged: dict[int, str] = {}
    try:
        steps = store.steps()
        for step in steps:
            if len(kept) == keep_last:
                break
            problems = verify(store.stored(step))
            if problems:
                damaged[step] = problems[0]
            else:
                kept.append(step)
        old = [store.stored(step) for step in choose(steps, kept, keep_last)]
        names = [path.name for path in directory.iterdir()]
        left = [directory / name for name in leftovers(names, run_id, last_index)]
        strange = [directory / name for name in names if STAGING.fullmatch(name)]
        left += [folder for folder in sorted(strange) if folder not in left and _is_old(folder)]
        going = [Item(folder, _num_bytes(folder)) for folder in old + left]
    except OSError as e:
        raise CheckpointError(f"{e.filename or directory}: {e.strerror or e}") from e
    return Cleaning(directory, kept, damaged, going)


def choose(steps: Iterable[int], kept: list[int], keep_last: int) -> list[int]:
    """Return the steps to remove, oldest first (pure).

    Args:
        steps: All that there are.
        kept: The newest good ones.
        keep_last: How many of these are to stay: where there are fewer, none is removed.
    """
    if len(kept) < keep_last:
        return []
    return sorted(step for step in steps if not kept or step < min(kept))


def leftovers(names: Iterable[str], run_id: str, last_index: int | None) -> list[str]:
    """Return the folders that a run's saves have left which will never be committed (pure).

    Args:
        names: All names in the directory.
        run_id: See `plan`. What others have left is known by its age alone.
        last_index: See `plan`. A group of an earlier entry is fenced; while the run goes on, it
            is unknown whether a group without an entry is over.
    """

    def is_over(token: str) -> bool:
        index = _index_of(token)
        is_fenced = last_index is None or (index is not None and index < last_index)
        return is_fenced and _run_of(token) == owner.tag(run_id)

    staged = ((name, STAGING.fullmatch(name)) for name in names)
    return sorted(
        name for name, m in staged if name.startswith(TRASH) or (m and is_over(m["token"]))
    )


def remove(cleaning: Cleaning) -> list[Item]:
    """Remove what is to go, the oldest first; return what is left of it.

    A checkpoint is out of sight by one rename, before the first of its bytes goes.
    """
    store = Store(cleaning.directory)
    for item in cleaning.going:
        try:
            store.remove(item.folder)
        except OSError:
            continue  # found below
    gone = {item.folder.name.lstrip(".") for item in cleaning.going}
    return [
        Item(path, _num_bytes(path))
        for path in sorted(cleaning.directory.iterdir())
        if path.name.lstrip(".") in gone or any(f"{TRASH}{g}-" in path.name for g in gone)
    ]


def _num_bytes(folder: Path) -> int:
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many files
    return total


# ---- Where the checkpoints of a run are: the one home of that fact, for workers and for commands
# A script chooses the directory of its Checkpointer. Where that is not ``<run>/checkpoints``,
# rank 0 writes it down in the run directory at the first checkpoint that it commits there:
#
#     <run>/saves_to/<hash of the path>     the path of the directory, one line


def remember(directory: Path) -> None:
    """Write down that this worker's run saves to a directory (rank 0; outside of a run: nothing).

    Args:
        directory: The Checkpointer's, as an absolute path.

    Raises:
        OSError: the run directory cannot be written.
    """
    entry = fencing.own_entry()
    if entry is None:
        return
    run = RunDir(entry.parent.parent)
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    if directory != run.checkpoints and not (run.saves_to / name).exists():
        make_folder(run.saves_to)
        write_atomic(run.saves_to / name, f"{directory}\n")


def directories(run: RunDir) -> list[Path]:
    """Return the directories that hold checkpoints of a run: the customary one first.

    Raises:
        OSError: the run directory, or one of them, cannot be read.
    """
    try:
        notes = sorted(run.saves_to.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        notes = []
    known = [Path(read_text(note).rstrip("\n")) for note in notes if note.name[0] != "."]
    found = dict.fromkeys([run.checkpoints, *known])
    return [directory for directory in found if Store(directory).steps()]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: How many of the newest checkpoints, at least 1.
        keep_every: Checkpoints of steps that are a multiple of this stay for ever; None: none do.
    """

    keep_last: int = 2
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for key in ("keep_last", "keep_every"):
            value = getattr(self, key)
            if (key, value) != ("keep_every", None) and (type(value) is not int or value < 1):
                raise ConfigError(key, value, "give a whole number of at least 1")

    def removable(
        self, steps: Collection[int], *, committed: int, damaged: Collection[int] = ()
    ) -> list[int]:
        """Return the steps to remove, oldest first (pure).

        Args:
            steps: Of all checkpoints there are.
            committed: The one that was written just now, and so is good. It stays in any case.
            damaged: Steps that did not verify. They do not count among the last, and go once there
                is a newer good one.
        """
        good = sorted(set(steps) - set(damaged) | {committed})
        kept = {committed, *good[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {step for step in good if step % self.keep_every == 0}
        return [s for s in sorted(steps) if s not in kept and (s in good or s < committed)]

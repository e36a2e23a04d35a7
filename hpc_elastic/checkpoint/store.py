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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpc_elastic.checkpoint import owner
from hpc_elastic.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES,
    FileEntry,
    Manifest,
    checksum_text,
)
from hpc_elastic.checkpoint.shard_file import ShardFile
from hpc_elastic.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
)
from hpc_elastic.run import fencing
from hpc_elastic.run.directory import RunDir
from hpc_elastic.shared_files import (
    make_folder,
    names_in,
    open_file,
    read_text,
    sync_to_disk,
    write_atomic,
)

_COMMIT_ATTEMPTS = 3
LEFTOVER_AGE_S = 3600.0  # a staging folder of a group that may still run is removed after this long
_GETS_ON_S = 5.0  # a program's end waits no longer for removals if none ends in this time

_log = logging.getLogger(__name__)

_REPLACED = ".replaced"
_STEP = re.compile(rf"step-(\d{{8,}})(?:{re.escape(_REPLACED)})?")
STAGING = re.compile(r"\.staging-step-\d+-(?P<token>[0-9a-z]+)-(?P<number>\d+)")
TRASH = ".trash-"


@dataclass(frozen=True)
class Store:
    """A directory of checkpoints."""

    directory: Path  # on a file system that all ranks share

    def steps(self) -> list[int]:
        """Return the committed steps, newest first; none if there is no such directory."""
        found = [_STEP.fullmatch(name) for name in names_in(self.directory)]
        return sorted({int(m[1]) for m in found if m}, reverse=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a committed step."""
        return self.directory / f"step-{step:08d}"

    def stored(self, step: int) -> Path:
        """Return the folder of a committed step, as long as no save goes on.

        A save that was killed while it replaced the checkpoint has left that under a second name.
        """
        folder, second = self.folder(step), self._second_name(step)
        names = names_in(self.directory)
        return second if folder.name not in names and second.name in names else folder

    def _second_name(self, step: int) -> Path:
        return self.directory / f"{self.folder(step).name}{_REPLACED}"

    def staging(self, step: int, token: str, number: int) -> Path:
        """Return the folder in which all ranks of a group write its ``number``-th save."""
        return self.directory / f".staging-step-{step}-{token}-{number}"

    def prepare(self) -> None:
        """Make the directory; raise ConfigError if it cannot be written."""
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
        """Make a complete staging folder the checkpoint of its step (rank 0); return whether it is.

        Of that step, a damaged checkpoint is moved out of the way. With ``replaces``, one of
        another content is replaced, and there is no moment without one of the two. Another good one
        stays: two groups of a run may have written the same step, and the first wins.

        Raises CheckpointFencedError if the group is over, CheckpointError if the directory, or this
        step in it, is another run's.
        """
        sync_to_disk(staging)
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
        sync_to_disk(self.directory)
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
                same = replace(there, created=manifest.created, run=manifest.run)
                if same.to_json() == manifest.to_json():  # 1 is not True, and 0.0 not -0.0
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
        """Delete what was set aside, one file at each turn; each may take minutes (`Cleaner`)."""
        for folder in (self.directory / name for name in names_in(self.directory)):
            if folder.name.startswith(TRASH) and not folder.is_symlink():  # no save makes one
                for name in names_in(folder):
                    with contextlib.suppress(OSError):
                        (folder / name).unlink()
                    yield
                shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, token: str, number: int) -> None:
        """Set aside what dead groups and earlier saves than ``number`` have left (rank 0)."""
        names = names_in(self.directory)
        for name in names:
            committed, staged = _STEP.fullmatch(name), STAGING.fullmatch(name)
            if committed and name.endswith(_REPLACED):
                self._settle_replaced(int(committed[1]), names)
            elif staged and staged["token"] == token:
                if int(staged["number"]) < number:
                    self.set_aside(self.directory / name)
            elif staged:
                is_over = is_fenced(staged["token"], *parse_token(token))
                if is_old(self.directory / name) if is_over is None else is_over:
                    _log.info("removing %s, which was never committed", name)
                    self.set_aside(self.directory / name)

    def _settle_replaced(self, step: int, names: Collection[str]) -> None:
        """End a replacement that a killed save has left half done."""
        folder, second = self.folder(step), self._second_name(step)
        if folder.name in names:
            self.set_aside(second)
        else:
            with contextlib.suppress(OSError):  # another save has committed the step meanwhile
                second.rename(folder)


class Cleaner:
    """Removes in a daemon thread, one thing after another: no save waits for it.

    A server of NFS 4 holds a removal up for minutes, and each look into its folder, where it has to
    recall a delegation of the file from a node that is dead.
    """

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
        """Wait until all is done, for as long as removals get on, or ``timeout_s`` at most."""
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


def num_bytes_in(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for path, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 - many files
    return total


def is_old(folder: Path) -> bool:
    """Return whether nothing was written to a staging folder for `LEFTOVER_AGE_S`."""
    with contextlib.suppress(OSError):
        touched = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
        return time.time() - touched > LEFTOVER_AGE_S
    return False


_TOKEN = re.compile(r"(?:r(?P<index>\d+)|f\d+s\d+)u(?P<run>[0-9a-f]{8})")


def parse_token(token: str) -> tuple[str | None, int | None]:
    """Return a group's run, as its `owner.tag`, and the index of the log entry that formed it."""
    m = _TOKEN.fullmatch(token)
    return (m["run"], int(m["index"]) if m["index"] else None) if m else (None, None)


def is_fenced(token: str, run: str | None, newest: int | None) -> bool | None:
    """Return whether a group is of an earlier log entry of a run, so that it cannot commit.

    None if unknown: it is another run's, or was formed by no entry.
    """
    theirs, index = parse_token(token)
    return None if theirs != run or index is None or newest is None else index < newest


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint holds; CheckpointNotFoundError or CheckpointCorruptError."""
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


def verify_checkpoint(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint, a line each; nothing if it is good."""
    try:
        return problems_of(folder, read_manifest(folder))
    except CheckpointError as e:
        return [str(e)]


def problems_of(
    folder: Path,
    manifest: Manifest,
    files: Sequence[FileEntry] | None = None,
    *,
    contents: bool = True,
) -> list[str]:
    """Return what is wrong with files of a checkpoint, by default all of them, a line each.

    Their sizes, the places of the tensors' boxes and, with ``contents``, all bytes are checked.
    """
    pieces = manifest.pieces()
    found = (
        file_problem(folder, entry, contents=contents)
        or _layout_problem(folder / entry.name, pieces[entry.name])
        for entry in (manifest.files if files is None else files)
    )
    return [problem for problem in found if problem]


def _layout_problem(path: Path, pieces: Mapping[str, int]) -> str | None:
    """Return what differs in the header of a file from its boxes by the manifest."""
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


def file_problem(folder: Path, entry: FileEntry, *, contents: bool = True) -> str | None:
    """Check a file's size and, with ``contents``, bytes; return what is wrong, None if good."""
    path = folder / entry.name
    try:
        with open_file(path) as f:
            num_bytes = os.fstat(f.fileno()).st_size
            if num_bytes != entry.num_bytes:
                return f"{path} has {num_bytes} bytes instead of {entry.num_bytes}"
            if not contents:
                return None
            checksum = hashlib.file_digest(f, xxhash.xxh3_64).hexdigest()
    except OSError as e:
        return f"{path} cannot be read: {e.strerror or e}"
    if checksum_text(checksum) != entry.checksum:
        return f"{path} was changed: its checksum does not match"
    return None


def remember_directory(directory: Path) -> None:
    """Write down that this worker's run saves to a directory (rank 0; outside of a run: nothing).

    Where that is not ``<run>/checkpoints``, ``<run>/saves_to/<hash of the path>`` has its absolute
    path in one line.
    """
    path = fencing.own_run_dir()
    if path is None:
        return
    run = RunDir(path)
    name = hashlib.sha256(str(directory).encode()).hexdigest()[:16]
    if directory != run.checkpoints and not (run.saves_to / name).exists():
        make_folder(run.saves_to)
        write_atomic(run.saves_to / name, f"{directory}\n")


def directories_of(run: RunDir) -> list[Path]:
    """Return the directories that hold a run's checkpoints, the customary one first; or OSError."""
    try:
        notes = sorted(run.saves_to.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        notes = []
    known = [Path(read_text(note).rstrip("\n")) for note in notes if note.name[0] != "."]
    found = dict.fromkeys([run.checkpoints, *known])
    return [directory for directory in found if Store(directory).steps()]

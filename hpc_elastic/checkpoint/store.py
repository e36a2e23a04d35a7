"""The folders of a checkpoint directory: what is there, whether it is good, commit and removal.

Everything that a reader may see is there from one rename on. Nothing here needs torch, so that the
command line can use it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpc_elastic import fence
from hpc_elastic.checkpoint.manifest import MANIFEST, FileEntry, Manifest
from hpc_elastic.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
)
from hpc_elastic.files import names_in

LEFTOVER_AGE_S = 3600.0
"""A staging folder of a group that nobody can tell to be over is removed after this long."""

_log = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{8,})")
STAGING = re.compile(r"\.staging-step-\d+-(?P<token>[0-9a-z]+)-(?P<number>\d+)")
TRASH = ".trash-"
_BLOCK_BYTES = 512 << 10
"""Read and checksummed at a time: what fits into a core's own cache."""


@dataclass(frozen=True)
class Store:
    """A directory of checkpoints.

    Attributes:
        directory: On a file system that all ranks share.
    """

    directory: Path

    def steps(self) -> list[int]:
        """Return the committed steps, newest first; none if there is no such directory."""
        found = [_STEP.fullmatch(name) for name in names_in(self.directory)]
        return sorted((int(m[1]) for m in found if m), reverse=True)

    def folder(self, step: int) -> Path:
        """Return the folder of a committed step."""
        return self.directory / f"step-{step:08d}"

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
            ConfigError: it can not.
        """
        probe = self.directory / f".probe-{uuid.uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.mkdir()
            probe.rmdir()
        except OSError as e:
            remedy = f"checkpoints can not be written there ({e.strerror}): give another directory"
            raise ConfigError("directory", str(self.directory), remedy) from e

    def commit(self, staging: Path, step: int) -> bool:
        """Make a complete staging folder the checkpoint of its step (rank 0).

        A good checkpoint of that step that is there already stays: two groups may have written
        the same step, and the first one wins. A damaged one is moved out of the way.

        Returns:
            Whether this one became the checkpoint.

        Raises:
            CheckpointFencedError: the group is over; nothing was committed.
            OSError: nothing was committed.
        """
        sync_folder(staging)
        fence.check()
        target = self.folder(step)
        if not _rename_to_new(staging, target):
            problems = verify(target)
            if not problems:
                _log.warning("%s is there already, and good: it is kept", target)
                self.set_aside(staging)
                return False
            _log.warning("%s is replaced: %s", target, problems[0])
            self.set_aside(target)
            fence.check()
            if not _rename_to_new(staging, target):
                raise CheckpointError(f"{target} was made by another writer meanwhile")
        sync_folder(self.directory)
        return True

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
            if folder.name.startswith(TRASH):
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
        for name in names_in(self.directory):
            staged = STAGING.fullmatch(name)
            if staged and staged["token"] == token:
                if int(staged["number"]) < number:
                    self.set_aside(self.directory / name)
            elif staged and self._is_over(staged["token"], token, name):
                _log.info("removing %s, which was never committed", name)
                self.set_aside(self.directory / name)

    def _is_over(self, theirs: str, mine: str, name: str) -> bool:
        """Tell whether another group can not commit any more."""
        their_record, my_record = record_of(theirs), record_of(mine)
        if their_record is not None and my_record is not None:
            return their_record < my_record  # fenced by our record
        with contextlib.suppress(OSError):
            folder = self.directory / name
            touched = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
            return time.time() - touched > LEFTOVER_AGE_S
        return False


def record_of(token: str) -> int | None:
    """Return the number of the record that formed a group; None for a group without a run."""
    return int(token[1:]) if re.fullmatch(r"r\d+", token) else None


def read_manifest(folder: Path) -> Manifest:
    """Return what a checkpoint holds.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CheckpointCorruptError: its manifest is missing, or damaged, or another step's.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint {folder}")
    try:
        manifest = Manifest.from_json((folder / MANIFEST).read_text())
    except (OSError, UnicodeDecodeError, CheckpointCorruptError) as e:
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
        manifest = read_manifest(folder)
    except CheckpointError as e:
        return [str(e)]
    found = (file_problem(folder, entry) for entry in manifest.files)
    return [problem for problem in found if problem]


def file_problem(folder: Path, entry: FileEntry) -> str | None:
    """Check one file of a checkpoint; return what is wrong, None if it is good."""
    path = folder / entry.name
    try:
        with path.open("rb", buffering=0) as f:
            num_bytes = os.fstat(f.fileno()).st_size
            if num_bytes != entry.num_bytes:
                return f"{path} has {num_bytes} bytes instead of {entry.num_bytes}"
            checksum, block = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK_BYTES))
            while got := f.readinto(block):
                checksum.update(block[:got])
    except OSError as e:
        return f"{path} can not be read: {e.strerror}"
    if f"xxh3_64:{checksum.hexdigest()}" != entry.checksum:
        return f"{path} was changed: its checksum does not match"
    return None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename_to_new(source: Path, target: Path) -> bool:
    """Rename a folder unless the target is there; tell whether it was done."""
    try:
        source.rename(target)
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True

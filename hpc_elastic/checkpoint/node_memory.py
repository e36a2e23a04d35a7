"""Checkpoints in the memory of a node: folders, what is good in them, room, and copies elsewhere.

    <folder>/step-<step>-<token>-<world size>/part-<rank>.json
                                              shard-<rank>.safetensors

A rank's part file is written last: its files are complete if it is there. No node knows whether a
save is complete, since it has the files of its own ranks and of a neighbour's; that is found out
together, when a checkpoint is restored.

A rank's files are copied to a worker on another node, over TCP, beside the training. The process
group is not used: its operations belong to the training's thread. Each worker has a `Receiver`, to
which `push` connects, over the authenticated connections of `transport`. Messages are of bounded
size; names of files are checked, and the contents of files are compared with the checksums in the
signed message. Without torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

import xxhash

from hpc_elastic.checkpoint.manifest import MANIFEST_BYTES, FileEntry, RankPart, checksum_text
from hpc_elastic.checkpoint.store import file_problem, num_bytes_in
from hpc_elastic.errors import CheckpointCorruptError, CheckpointError, ConfigError
from hpc_elastic.shared_files import make_folder, open_file, read_text, write_atomic
from hpc_elastic.transport.auth import FrameSigner
from hpc_elastic.transport.connection import SignedSocket, SocketServer
from hpc_elastic.worker import shared_page

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "hpc_elastic-"
NUM_KEPT = 2
"""Steps that are kept while another is written: of the last one, other ranks may still be writing
their parts."""

_log = logging.getLogger(__name__)

_IDENTITY_BITS = 60
_IDENTITY = ".memory-id"
_DIRECTORY = "directory"
_SAVE = re.compile(r"step-(\d+)-([0-9a-f]+)-(\d+)")
_PART = re.compile(r"part-(\d+)\.json")
_OWNER = "owner"
_SHARD = re.compile(r"shard-\d+[A-Za-z0-9_.-]*")

_COPY_TIMEOUT_S = 30.0  # silence of this long ends a connection
COPY_CONTEXT = "checkpoint copies"
_COPY_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, order=True)
class MemorySave:
    """One save of one worker group, whose token, from 0 to 2^63 - 1, no other group has."""

    step: int
    token: int
    world_size: int


@dataclass(frozen=True)
class NodeMemory:
    """The saves in one node's memory."""

    folder: Path  # on a memory file system; all workers of the node have the same

    @classmethod
    def of(cls, base: Path, number: int, directory: Path) -> NodeMemory:
        """Return the memory of a directory, by its `identity`; that of removed directories goes."""
        memory = cls(base / f"{number:015x}")
        make_folder(memory.folder)
        write_atomic(memory.folder / _DIRECTORY, str(directory.absolute()))
        for name in _names(base):
            with contextlib.suppress(OSError):
                owner = Path(read_text(base / name / _DIRECTORY))
                if name == memory.folder.name or not owner.is_absolute():
                    continue
                if owner.parent.is_dir() and f"{read_identity(owner):015x}" != name:
                    shutil.rmtree(base / name, ignore_errors=True)
        return memory

    def saves(self) -> dict[MemorySave, list[int]]:
        """Return the ranks whose files are here, for each save."""
        found = {}
        for name in _names(self.folder):
            m = _SAVE.fullmatch(name)
            if m:
                ranks = [_PART.fullmatch(n) for n in _names(self.folder / name)]
                save = MemorySave(int(m[1]), int(m[2], 16), int(m[3]))
                found[save] = sorted(int(r[1]) for r in ranks if r)
        return found

    def path(self, save: MemorySave) -> Path:
        """Return the folder of a save; it may not exist."""
        return self.folder / f"step-{save.step:08d}-{save.token:x}-{save.world_size}"

    def make(self, save: MemorySave) -> Path:
        """Return the folder of a save, which exists."""
        path = self.path(save)
        for folder in (self.folder.parent, self.folder, path):  # they may have been removed since
            make_folder(folder, mode=0o700)
        return path

    def good_parts(self, save: MemorySave, ranks: Iterable[int]) -> dict[int, RankPart]:
        """Return the parts of some ranks whose files are good; log errors of others."""
        good = {}
        for rank in ranks:
            try:
                part = RankPart.from_json(
                    read_text(self.path(save) / f"part-{rank}.json", MANIFEST_BYTES)
                )
            except (OSError, CheckpointCorruptError) as e:
                _log.warning("step %d in memory, rank %d: %s", save.step, rank, e)
                continue
            problems = [file_problem(self.path(save), file) for file in part.files]
            for problem in filter(None, problems):
                _log.warning("step %d in memory: %s", save.step, problem)
            if part.rank == rank and not any(problems):
                good[rank] = part
        return good

    def prune(self, step: int) -> None:
        """Remove what is not needed once a step is saved."""
        older = sorted({save.step for save in self.saves() if save.step < step}, reverse=True)
        kept = older[:NUM_KEPT]
        self._remove(save for save in self.saves() if save.step < step and save.step not in kept)

    def forget_newer(self, step: int) -> None:
        """Remove the saves of later steps, whose history was given up."""
        self._remove(save for save in self.saves() if save.step > step)

    def num_bytes(self) -> int:
        """Return how much memory the saves take."""
        total = 0
        for save in self.saves():
            with contextlib.suppress(OSError):  # other ranks wait for this one
                total += num_bytes_in(self.path(save))
        return total

    def _remove(self, saves: Iterable[MemorySave]) -> None:
        for save in saves:
            shutil.rmtree(self.path(save), ignore_errors=True)


def identity(directory: Path) -> int:
    """Return the number of a directory of checkpoints; it gets one if it has none (rank 0)."""
    number = read_identity(directory)
    if number < 0:
        number = secrets.randbits(_IDENTITY_BITS)
        write_atomic(directory / _IDENTITY, f"{number:015x}\n")
    return number


def read_identity(directory: Path) -> int:
    """Return the number of a directory of checkpoints; -1 if it has none; OSError if unknown."""
    try:
        return int(read_text(directory / _IDENTITY), 16) % (1 << _IDENTITY_BITS)
    except (FileNotFoundError, ValueError):
        return -1


def base_folder(wanted: Path | None = None) -> Path:
    """Return where this node's workers keep checkpoints in memory; it exists, for this user only.

    In a run it is in the folder of the node's agent: it survives the workers, and goes with the
    agent. Outside of one it is in ``/dev/shm``, and survives everything but a reboot. ``wanted`` is
    another place, which only this user may write.

    Anybody may make a folder in ``/dev/shm``: one that is there already must be a folder, no link,
    and its owner, this user, must be the only one who may enter it; else ConfigError.
    """
    control_folder = os.environ.get(shared_page.DIRECTORY_VARIABLE)
    if wanted is not None:
        folder = Path(wanted)
    elif control_folder is not None:
        folder = Path(control_folder) / "checkpoints"
    else:
        folder = SHARED_MEMORY / f"{PREFIX}{os.getuid()}"
    try:
        make_folder(folder, parents=True, mode=0o700)
        found = folder.lstat() if wanted is None else folder.stat()
    except OSError as e:
        remedy = f"checkpoints cannot be kept there ({e.strerror}): give another folder"
        raise ConfigError("memory_tier.memory", str(folder), remedy) from e
    problem = None
    if not stat.S_ISDIR(found.st_mode):
        problem = "it is a link: remove it"
    elif found.st_uid != os.getuid():
        problem = f"it belongs to user {found.st_uid}"
    elif found.st_mode & (0o077 if wanted is None else 0o022):
        problem = f"it is open to others (mode {stat.S_IMODE(found.st_mode):04o}): chmod 700 it"
    if problem is not None:
        raise ConfigError("memory_tier.memory", str(folder), f"{problem}, or give another folder")
    return folder


def free_bytes(folder: Path) -> int:
    """Return how much may be written to a memory folder: what is free there, and in the machine."""
    free = os.statvfs(folder)
    limits = [free.f_bavail * free.f_frsize, *_left_in_cgroup()]
    with contextlib.suppress(OSError, ValueError):
        m = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        if m:
            limits.append(int(m[1]) * 1024)
    return max(0, min(limits))


class AgentFolder:
    """A folder in memory that goes with this process (every agent, at its start); a context.

    Folders of agents that were killed are removed first. An agent holds a lock on a file in its
    folder: it ends with the process, however that ends, and in other containers, too.
    """

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        remove_leftovers(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        self._owner = self._lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._owner.close()

    def restore(self) -> None:
        """Make the folder again if its files were removed, or OSError.

        systemd-logind does that when a user's last session on a node ends (RemoveIPC), within a
        job, too. The copies of checkpoints are lost; those that neighbours keep are not.
        """
        if os.fstat(self._owner.fileno()).st_nlink:
            return
        self.path.mkdir(0o700, exist_ok=True)
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise FileExistsError(f"{self.path} was removed, and is somebody else's now")
        self._owner.close()
        self._owner = self._lock()
        _log.error(
            "%s was cleared, and is made again: set RemoveIPC=no in logind.conf of this node, or "
            "run `loginctl enable-linger`", self.path,
        )  # fmt: skip

    def _lock(self) -> TextIO:
        # Locked before it has its name, so that the folder is not taken for a leftover. The folder
        # itself is not renamed: another user could take the new name first.
        staged = self.path / f".{_OWNER}"
        owner = staged.open("w")
        fcntl.flock(owner, fcntl.LOCK_EX)
        staged.rename(self.path / _OWNER)
        return owner


def remove_leftovers(parent: Path) -> None:
    """Remove the folders of this user's agents that live no more."""
    for name in _names(parent):
        folder = parent / name
        if not name.startswith(PREFIX):
            continue
        try:
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _OWNER).open("r+") as owner:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _log.info("removing %s, which a killed agent left", folder)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it lives; it is not ours; it is no agent's; another one removes it
            continue


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _left_in_cgroup() -> Iterator[int]:
    """Yield what the limits of this process's control groups leave: memory files count there.

    Cached files are not counted as used: the kernel drops them if memory is short.
    """
    names = [  # of version 2, and of version 1
        ("memory.max", "memory.current", r"^inactive_file (\d+)"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", r"^total_inactive_file (\d+)"),
    ]
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root = Path("/sys/fs/cgroup") / controllers
            own = root / path.strip("/")
            groups = [group for group in [own, *own.parents] if group.is_relative_to(root)]
            for group, (limit, usage, cached) in itertools.product(groups, names):
                with contextlib.suppress(OSError, ValueError):
                    left = int((group / limit).read_text()) - int((group / usage).read_text())
                    m = re.search(cached, (group / "memory.stat").read_text(), re.M)
                    yield left + (int(m[1]) if m else 0)


def push(address: tuple[str, int], key: bytes, save: MemorySave, folder: Path, rank: int) -> None:
    """Copy a rank's files of a save to a worker on another node, at the address of its `Receiver`.

    Raises OSError without a connection, CheckpointError if the other side refused.
    """
    text = read_text(folder / f"part-{rank}.json", MANIFEST_BYTES)
    with contextlib.closing(
        SignedSocket.connect(address, key, COPY_CONTEXT, timeout_s=_COPY_TIMEOUT_S)
    ) as connection:
        connection.send({"save": [save.step, save.token, save.world_size], "part": text})
        for file in RankPart.from_json(text).files:
            with open_file(folder / file.name) as f:
                if connection.send_file(f, file.num_bytes) != file.num_bytes:
                    raise CheckpointCorruptError(f"{folder / file.name} was cut short")
        answer = connection.receive()
    if answer.get("problem") is not None:
        raise CheckpointError(f"the neighbour did not take the copy: {answer['problem']}")


class Receiver:
    """Takes the copies that other workers push, in threads of its own."""

    def __init__(self, memory: NodeMemory, key: bytes, addresses: Iterable[str]) -> None:
        self._memory = memory
        self._server = SocketServer(
            addresses, key, COPY_CONTEXT, self._serve, name="checkpoint-copy"
        )
        self.address = self._server.address

    def close(self) -> None:
        """Take no more copies."""
        self._server.close()

    def _serve(self, sock: socket.socket, signer: FrameSigner) -> None:
        connection = SignedSocket(sock, signer, _COPY_TIMEOUT_S)
        connection.send({"problem": self._receive_files(connection, connection.receive())})

    def _receive_files(self, connection: SignedSocket, message: dict[str, Any]) -> str | None:
        """Receive the files that a message announces; return the error, if any."""
        try:
            numbers, part = message["save"], RankPart.from_json(message["part"])
            is_number = [type(n) is int and 0 <= n < 1 << 63 for n in numbers]
            if is_number != [True] * 3:
                raise ValueError(f"{numbers!r:.80} is no save")
            save = MemorySave(*numbers)
            if not 0 <= part.rank < save.world_size:
                raise ValueError(f"rank {part.rank} of {save.world_size}")
            for file in part.files:
                if not _SHARD.fullmatch(file.name) or not 0 <= file.num_bytes < 1 << 63:
                    raise ValueError(f"{file.name!r:.80} is no name of a shard")
            folder = self._memory.make(save)
            num_bytes = sum(file.num_bytes for file in part.files)
            if num_bytes > free_bytes(folder):
                return f"{folder} has no room for {num_bytes} bytes"
            for file in part.files:
                _receive_file(connection, folder / file.name, file)
            write_atomic(folder / f"part-{part.rank}.json", message["part"])
            self._memory.prune(save.step)
        except (CheckpointCorruptError, KeyError, TypeError, ValueError, OSError) as e:
            return f"{type(e).__name__}: {e}"
        return None


def _receive_file(connection: SignedSocket, path: Path, file: FileEntry) -> None:
    """Receive one file; it has its name once it is complete and as it should be."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    checksum, left = xxhash.xxh3_64(), file.num_bytes
    block = memoryview(bytearray(_COPY_BLOCK_BYTES))
    try:
        with staged.open("xb") as f:
            while left:
                got = connection.receive_into(block[: min(left, _COPY_BLOCK_BYTES)])
                checksum.update(block[:got])
                f.write(block[:got])
                left -= got
        if checksum_text(checksum.hexdigest()) != file.checksum:
            raise CheckpointCorruptError(f"{path.name} was changed on its way")
        staged.rename(path)
    finally:
        staged.unlink(missing_ok=True)

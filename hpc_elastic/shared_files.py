"""Files of a folder that several machines share: how they are written, found and read.

Writers replace a file in one step, so a reader sees a whole file or none.

A client of a shared file system remembers names, also the names of files that were not there. NFS
asks the server again when a folder or a file is *opened*; `exists`, `stat`, and the search for a
path's last name are answered from memory, for up to a minute. So:

**Absence is never concluded from a path. The folder is listed first, and what the listing names is
opened.** `names_in`, `is_there` and `read_json` keep that rule; whatever waits for a file of a run
uses them. The same holds for the folder itself where others may rename or make it: list its parent.
Whether a file or a folder has changed is seen by `status_of`, which opens it.

Two kinds of mounts need more than that, as measured with Linux's NFS client. Without close-to-open
consistency (``nocto``) not even opening asks the server: `refresh` makes the client do so, by
statx(2) with AT_STATX_FORCE_SYNC. And a client of NFS 3 knows a change of a folder by its time
alone, so that it may never see a change within the same tick of the server's clock as its last
request: posix_fadvise(2) with POSIX_FADV_DONTNEED drops its cache of a folder.

**A file of a run directory is opened by `open_file` alone**, here or by a caller. The run may be
another user's: a FIFO would block the reader for ever, a link would lead to the reader's own
private files or to a device without end, and a sparse file of terabytes costs its writer nothing.
So only a regular file is opened, never through a link in its own place, and each kind of file has a
size beyond which it is not read. The folders above it may be links. Whatever reads a file raises
DamagedFileError if something else has its name, it is too large, or does not hold what it should,
and OSError if it is missing, or may not be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, TypeVar

from hpc_elastic.errors import DamagedFileError

_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS, _STATX_BYTES = -100, 0x2000, 0x7FF, 256
_LIBC = ctypes.CDLL(None, use_errno=True) if hasattr(ctypes.CDLL(None), "statx") else None
"""None if the C library is older than statx(2)."""

TEXT_BYTES = 16 << 20
"""Largest file that is read at once, such as run.json; its value may be forty times as large."""
VALUE_BYTES = 64 << 20
"""Largest return value of a worker."""
CONFIG_BYTES = 1 << 20
"""Largest file of YAML: reading it takes ten seconds."""
LINES_BYTES = 256 << 20
"""Largest file of lines, such as an event log; it is read line by line."""
LINE_BYTES = 4 << 20
"""Longest of these lines; a longer one is left out."""
NESTED = 200
"""Deepest nesting of JSON: Python fails at some hundred levels."""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""Errors of link(2) on a file system without hard links."""
LATEST_TIME = 1e11
"""Unix seconds; a later time in a file of a run is invalid."""
_OPENING_S = 5.0
"""Longest wait for a lease on a file, which its holder gives back at once."""
_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


def write_atomic(
    path: Path, content: str | bytes, *, mode: int = 0o644, staged_in: Path | None = None
) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    It is written first in ``staged_in``, a folder of the same file system; None: its own. If that
    folder is renamed meanwhile, the file is not replaced, and `FileNotFoundError` is raised.
    """
    staged = _stage(path, content, mode, staged_in or path.parent)
    try:
        staged.replace(path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise


def create_atomic(path: Path, text: str, *, mode: int = 0o644) -> bool:
    """Create a file in one step; return False if another process has created it.

    The text differs from that of any other caller. Raises OSError if the file is not there, and
    could not be made.
    """
    staged = _stage(path, text, mode, path.parent)
    put, read = partial(os.link, staged, path), partial(read_bytes, path)
    steps = create_once(put, partial(names_in, path.parent), path.name, read, text.encode())
    try:
        return carried_out(steps)
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


def owner_writes(path: str, flags: int) -> int:
    """Open a file that only its owner may write, whatever the umask (``open(opener=...)``)."""
    return os.open(path, flags, 0o644)


def sync_to_disk(path: Path) -> None:
    """Have a file, or the names in a folder, survive a loss of power."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(
    folder: Path, *, parents: bool = False, mode: int = 0o755, closed: bool = False
) -> None:
    """Make a folder that only its owner may write, whatever the umask; it may exist.

    A user who may write a folder of a run decides what the commands and tasks of the run do. If the
    folder around it has a default ACL and belongs to this user or to root, the users and groups
    that the ACL names may write the new folder too.

    ``parents`` makes the folders around it by the same rule. ``closed`` takes away the write
    permission of group and others from one that exists, if it is this user's, is no link and has no
    ACL. Raises OSError if it is not there, and could not be made.
    """
    try:
        _make_folder(folder, mode)
    except FileNotFoundError:
        if not parents or folder.parent == folder:
            raise
        make_folder(folder.parent, parents=True)
        make_folder(folder, mode=mode)
    except OSError:
        if not folder.is_dir():
            raise
        found = folder.lstat()
        is_open = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022
        if closed and is_open and found.st_uid == os.geteuid() and not has_acl(folder):
            folder.chmod(stat.S_IMODE(found.st_mode) & ~0o022)


def _make_folder(folder: Path, mode: int) -> None:
    around = folder.parent
    if not _has_attribute(around, _DEFAULT_ACL):
        folder.mkdir(mode & ~0o022)
    elif around.stat().st_uid in (0, os.geteuid()):
        folder.mkdir(mode & ~0o002 | (mode & 0o040) >> 1)  # no less than the ACL grants
    else:
        folder.mkdir(mode & ~0o022)
        os.removexattr(folder, _DEFAULT_ACL)


_ACCESS_ACL, _DEFAULT_ACL = "system.posix_acl_access", "system.posix_acl_default"


def has_acl(path: Path) -> bool:
    """Return whether a path has an ACL; then its group's bits are the most that is granted."""
    return any(_has_attribute(path, name) for name in (_ACCESS_ACL, _DEFAULT_ACL))


def _has_attribute(path: Path, name: str) -> bool:
    try:
        return bool(os.getxattr(path, name))
    except OSError:  # none; or none on this file system
        return False


def names_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder by its server, none if it is missing; OSError if unknown."""
    try:
        return frozenset(names_listed(folder))
    except FileNotFoundError:
        return frozenset()


def names_listed(folder: Path) -> list[str]:
    """Return the names in a folder by its server; FileNotFoundError if it is missing."""
    mount = _mount_of(folder)
    if not mount.opened_is_fresh:
        _ask_about(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # with NFS 3 a change of a folder is known by its time alone, which has coarse ticks
        is_nfs3 = mount.kind == "nfs" and mount.options.get("vers", "").startswith("3")
        if is_nfs3 or not mount.opened_is_fresh:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.listdir(fd)  # noqa: PTH208 - not by its path
    finally:
        os.close(fd)


def refresh(path: Path) -> None:
    """Have the client ask the server about a path, no mount point, where opening would not."""
    if not _mount_of(path.parent).opened_is_fresh:
        _ask_about(path)


def _ask_about(path: Path) -> None:
    if _LIBC is None:
        return
    args = (_AT_FDCWD, os.fsencode(path), _AT_STATX_FORCE_SYNC, _STATX_BASIC_STATS)
    if _LIBC.statx(*args, ctypes.create_string_buffer(_STATX_BYTES)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))


@functools.lru_cache(1)
def _known_mounts(second: int) -> dict[Path | int, Mount]:
    """Return what is known of mounts in a second, by path and by device.

    A device number is reused: a mount that goes may leave its number to one with other options.
    """
    return {}


def _mount_of(path: Path) -> Mount:
    known = _known_mounts(int(time.monotonic()))
    if path in known:
        return known[path]
    with contextlib.suppress(OSError):
        device = path.stat().st_dev
        known[path] = known.get(device) or known.setdefault(device, Mount.of(path))
        return known[path]
    return Mount.of(path)


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists by its server; raise OSError if that is unknown."""
    return path.name in names_in(path.parent)


REMOVED_AFTER_S = 60.0
"""A folder that was absent for this long, in fresh listings of its parent, was removed for good."""


class RemovalWatch:
    """Observes whether a folder, which exists now, was removed for good.

    A listing of its parent shows its absence; if the parent is missing too, one of the next folder
    above it that exists. That folder must be on the file system on which the watched one was: an
    empty mount point is no removal. A folder that cannot be listed shows nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Path(os.path.realpath(folder))
        self._absent_since: float | None = None
        self._stale_s = Mount.of(folder).refreshed_stale_s
        try:
            self._device: int | None = self._folder.stat().st_dev
        except OSError:
            self._device = None

    def is_removed(self, now: float) -> bool:
        """Return whether the folder was absent in all calls of the last time; may block."""
        try:
            is_absent = self._is_absent()
        except OSError:
            is_absent = False
        if not is_absent:
            self._absent_since = None
            return False
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since >= REMOVED_AFTER_S + self._stale_s

    def _is_absent(self) -> bool:
        missing = self._folder
        for parent in missing.parents:
            try:
                names = names_listed(parent)
            except FileNotFoundError:
                missing = parent
                continue
            return missing.name not in names and parent.stat().st_dev == self._device
        return False


def status_of(path: Path) -> os.stat_result:
    """Return a file's or folder's attributes by its server; DamagedFileError if it is neither."""
    refresh(path)
    fd = _open(path)
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISDIR(status.st_mode):
        _require_file(path, status)
    return status


def remove_behind(*paths: Path, wait_s: float = 0.0) -> None:
    """Begin to remove files that are not needed any more, in order; they stay if that fails.

    The removal runs in a thread: an NFS server delays it by 100 s while it recalls a delegation
    from a dead client. If the first file is being removed already, nothing is begun. ``wait_s`` is
    the longest wait for the end of the removal.
    """
    name = f"removal of {next(iter(paths), None)}"
    if not paths or any(thread.name == name for thread in threading.enumerate()):
        return

    def remove() -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()

    thread = threading.Thread(target=remove, name=name, daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads: it stays
        thread.start()
        thread.join(wait_s)


def forget_absence(path: Path) -> None:
    """Make the client ask the server about a name that it remembers as absent.

    A client of NFS 3 that has moved a file away does not see another file of that name which comes
    within the same tick of the server's clock: listings show it, and each call on it fails. The
    server decides mkdir(2); where that fails since the name exists, the client drops its memory.
    """
    with contextlib.suppress(OSError):
        path.mkdir()
        path.rmdir()


def _stage(path: Path, content: str | bytes, mode: int, folder: Path) -> Path:
    """Write to a hidden file of a folder, beside the one that it is for as a rule."""
    staged = folder / f".{path.name}.{os.urandom(8).hex()}"
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            remaining = memoryview(content.encode() if isinstance(content, str) else content)
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            if os.fstat(fd).st_mode & 0o777 != mode:  # the umask is stricter
                os.fchmod(fd, mode)
        finally:
            os.close(fd)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    return staged


# ---- Reading what may be somebody else's


def open_file(path: Path) -> BufferedReader:
    """Open a file of a run for reading; the only way in which one is opened.

    Raises DamagedFileError if something else has its name (a link, a FIFO, a device), and OSError
    if it is missing, a folder, or may not be read.
    """
    fd = _open(path)
    try:
        _require_file(path, os.fstat(fd))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def _open(path: Path) -> int:
    """Open a file or folder, not through a link, and without a wait for a writer.

    A file server's own kernel refuses to open a file without a wait as long as a client has a
    lease on it, which it calls back.
    """
    until = time.monotonic() + _OPENING_S
    while True:
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except OSError as e:
            if e.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
                _refuse_other_kind(path)
            raise


def _refuse_other_kind(path: Path) -> None:
    _require_file(path, path.lstat())


def _require_file(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        remedy = "a run has only files there, so nothing is read from it"
        raise DamagedFileError(f"{path} is {kind}, not a file: {remedy}")


def _require_size(path: Path, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        what = f"{path} has {num_bytes:,} bytes, and {limit:,} are the most that are read"
        raise DamagedFileError(f"{what}: no run writes such a file")


def read_bytes(path: Path, limit: int = TEXT_BYTES) -> bytes:
    """Return the content of a file of a run."""
    with open_file(path) as file:
        _require_size(path, os.fstat(file.fileno()).st_size, limit)
        data = file.read(limit + 1)  # it may have grown
    _require_size(path, len(data), limit)
    return data


def read_text(path: Path, limit: int = TEXT_BYTES, errors: str = "strict") -> str:
    """Return the text of a file of a run."""
    try:
        return read_bytes(path, limit).decode(errors=errors)
    except UnicodeDecodeError as e:
        raise DamagedFileError(f"{path} is damaged: {e}") from e


def read_tail(path: Path, *, at_most_bytes: int = 1 << 16) -> str:
    """Return the last 20 lines of a file; empty if it cannot be read."""
    try:
        with open_file(path) as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - at_most_bytes))
            text = f.read(at_most_bytes).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-20:]).strip()


def lines_in(path: Path, *, unfinished: bool = False, newest: bool = False) -> Iterator[bytes]:
    """Yield the lines of a file of a run, each with its end, as `blocks_in` reads them."""
    for _, block in blocks_in(path, unfinished=unfinished, newest=newest):
        yield from BytesIO(block)


def blocks_in(
    path: Path, start: int = 0, *, unfinished: bool = False, newest: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file of a run, many at once, each time with the byte after their end.

    A line of more than `LINE_BYTES` is left out. ``start`` is the first byte of a line.
    ``unfinished``: a last line without an end is one too. Of more than `LINES_BYTES`, ``newest``
    yields the last lines; otherwise the file is refused.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        is_begun = newest and size - start > LINES_BYTES
        if is_begun:
            start = size - LINES_BYTES
        elif not newest:
            _require_size(path, size, LINES_BYTES)
        file.seek(start)
        end, rest = start, b""
        while data := file.read(LINE_BYTES - len(rest)):
            end += len(data)
            block, line_end, rest = (rest + data).rpartition(b"\n")
            block += line_end
            if is_begun and block:
                _, _, block = block.partition(b"\n")
                is_begun = False
            if block:
                yield end - len(rest), block
            if len(rest) == LINE_BYTES:
                rest, is_begun = b"", True
        if unfinished and rest and not is_begun:
            yield end, rest


def parse_json(
    text: str | bytes, what: object, loads: Callable[[str | bytes], Any] = json.loads
) -> Any:
    """Return the value of JSON text of a file; ``loads`` raises ValueError at what it refuses."""
    try:
        value = loads(text)
    except (ValueError, RecursionError) as e:
        raise DamagedFileError(f"{what} is damaged: {e}") from e
    encoded = text if isinstance(text, bytes) else text.encode()
    if encoded.count(b"[") + encoded.count(b"{") <= NESTED:  # the usual case, a million times
        return value
    level = [value]
    for _ in range(NESTED):
        lists = [item for item in level if isinstance(item, list)]
        objects = [item.values() for item in level if isinstance(item, dict)]
        level = [item for inner in (*lists, *objects) for item in inner]
        if not level:
            return value
    raise DamagedFileError(f"{what} is damaged: it is nested more than {NESTED} deep")


def parse_yaml(text: str, path: Path) -> Any:
    """Return the value of YAML text of a run, as `parse_json` does; an alias in it is refused.

    A few bytes of aliases could name each other so often that no memory holds the value; the files
    of a run have none.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias")
            return super().compose_node(parent, index)

    _require_size(path, len(text), CONFIG_BYTES)
    try:
        return yaml.load(text, Loader)
    except (ValueError, RecursionError, OverflowError, yaml.YAMLError) as e:
        raise DamagedFileError(f"{path} is damaged: {e}") from e


def read_json(path: Path, read: Callable[[Path], str] = read_text) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None; with `read_undelegated` if others change it."""
    try:
        text = read_listed(path, read)
    except IsADirectoryError as e:
        raise DamagedFileError(f"{path} is a folder, not a file") from e
    value = None if text is None else parse_json(text, path)
    return value if isinstance(value, dict) else None


def read_undelegated(path: Path, num_bytes: int | None = None) -> str:
    """Return the text of a file that another node removes or appends to after this one's death.

    A server of NFS 4 gives a delegation of what is read. It would have to recall that from the dead
    node, which takes 100 s; the other node waits for that, and if it removes the file, so do all
    who use its folder there. So this client gives it back at once: Linux's does so before it
    changes a mode. ``num_bytes`` are read from its end; None: the whole file.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = 0 if num_bytes is None else max(0, size - num_bytes)
        _require_size(path, size - begin, TEXT_BYTES)
        file.seek(begin)
        text = file.read(TEXT_BYTES).decode(errors="replace")
        with contextlib.suppress(OSError):  # another user's file, or a read-only disk
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    return text


def read_listed(path: Path, read: Callable[[Path], str] = read_text) -> str | None:
    """Return the text of a file; None if it is not there."""
    try:
        refresh(path)
        return read(path)
    except FileNotFoundError:
        if not is_there(path):
            return None
    try:
        return read(path)
    except FileNotFoundError:  # it was removed since
        return None


# ---- Procedures on the shared file system, as generators (pure)


T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""Yields its steps on the file system one by one, and is sent the result of each, or thrown its
`OSError`. So one procedure runs on real files, in a thread that may block (`carried_out`), and in
virtual time (`tests/simulation`), where other nodes act between any two steps."""


def carried_out(steps: Steps[T]) -> T:
    """Carry a procedure out on real files, in this thread."""
    try:
        step = next(steps)
        while True:
            try:
                result = step()
            except OSError as e:
                step = steps.throw(e)
            else:
                step = steps.send(result)
    except StopIteration as over:
        value: T = over.value
        return value


def create_once(
    put: Callable[[], None],
    names: Callable[[], Collection[object]],
    name: object,
    read: Callable[[], object],
    content: object,
) -> Steps[bool]:
    """Create a file that exactly one process creates; return False if another process has done so.

    link(2) fails if the name exists, on NFS too. If its reply is lost, the file is there although
    the call failed. Only its content identifies its creator: a count of links may come from a
    cache, and inode numbers may change.

    ``put`` writes the file under another name, and links it to its own, which is ``name`` among
    those that ``names`` lists anew; ``read`` returns its content, which no other process has.
    Raises OSError if the file is not there, and could not be made; it may be tried again.
    """
    try:
        yield put
    except OSError:
        if name not in (yield names):
            raise
        return bool((yield read) == content)
    return True


def numbers_in(names: Iterable[str], prefix: str, suffix: str = "") -> set[int]:
    """Return each n of the names ``<prefix><n><suffix>``."""
    found = (n for n in names if n.startswith(prefix) and n.endswith(suffix))
    numbers = (n[len(prefix) : len(n) - len(suffix)] for n in found)
    return {int(number) for number in numbers if number.isdecimal()}


# ---- The mount of a folder: its file system, and how old an answer may be there


LOCAL = frozenset(
    [
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "squashfs"),
        *("vfat", "f2fs", "bcachefs", "jfs", "reiserfs", "devtmpfs"),
    ]
)
"""File systems that belong to one machine, unless it exports them."""

SANDBOX = "fuse.hpc_elastic_nfs"
"""The sandbox's model of an NFS client, which shows its options in the place of its source."""

_NFS = frozenset(["nfs", "nfs4", SANDBOX])
_NFS_DEFAULTS_S = {"acregmin": 3.0, "acregmax": 60.0, "acdirmin": 30.0, "acdirmax": 60.0}
_BOUNDS_S = {
    **dict.fromkeys(("lustre", "gpfs", "ceph", "fuse.ceph", "fuse.ceph-fuse"), 0.0),
    **dict.fromkeys(("ocfs2", "gfs2"), 0.0),
    **dict.fromkeys(("beegfs", "fuse.glusterfs", "glusterfs", "virtiofs"), 1.0),
}
"""Of file systems that are not NFS: how old an answer may be with their default settings."""
_UNKNOWN_S = 60.0
"""Of all others, and of a mount that is not found: as on an NFS without close-to-open."""
_TELLING = (
    *("vers", "cto", "nocto", "noac", "acregmin", "acregmax", "acdirmin", "acdirmax"),
    *("lookupcache", "hard", "soft", "softerr", "timeo", "retrans", "sync"),
    *("local_lock", "nolock", "flock", "localflock", "noflock"),
)


@dataclass(frozen=True)
class Mount:
    """The mount that a path lies on, and how old an answer of its file system may be.

    An NFS client answers from its caches for as long as its mount options allow. With close-to-open
    consistency, the default, opening a file or a folder asks the server. With ``nocto`` what is
    opened may be as old as attributes may be: 60 s by default. Other file systems are coherent by
    locks or tokens of their servers, or name a time in their manuals. The kernel shows the options
    that differ from the defaults, so those of nfs(5) are above.

    Attributes:
        kind: Type of the file system, such as ``nfs4``, as the kernel names it; empty if unknown.
        options: The options of the mount and of its file system, as far as the kernel shows them,
            by name; empty values where an option has none.
    """

    kind: str = ""
    source: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Mount:
        """Return the mount of a path, or of the nearest folder above; it may be unknown."""
        for place in (path, *path.absolute().parents):
            with contextlib.suppress(OSError, ValueError):
                fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
                try:
                    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                finally:
                    os.close(fd)
                number = int(dict(line.split(":", 1) for line in lines)["mnt_id"])
                return find(Path("/proc/self/mountinfo").read_text(errors="replace"), number)
        return cls()

    @property
    def is_local(self) -> bool:
        """Whether its operations ask no server."""
        return self.kind in LOCAL

    @property
    def is_nfs(self) -> bool:
        """Whether the options of nfs(5) hold for it."""
        return self.kind in _NFS

    @property
    def is_known(self) -> bool:
        """Whether it is known how old an answer may be on such a file system."""
        return self.is_nfs or self.is_local or self.kind in _BOUNDS_S

    @property
    def telling(self) -> dict[str, str]:
        """The options that matter to a run: how names, times, writes and locks behave."""
        return {name: self.options[name] for name in _TELLING if name in self.options}

    @property
    def opened_is_fresh(self) -> bool:
        """Whether a file or folder that is opened anew is as its server has it."""
        return self.stale_s == 0

    @property
    def stale_s(self) -> float:
        """How old the content of a file or folder may be that is opened anew, in seconds.

        An upper bound: what another node had written and closed so long before is seen. 0 where
        each opening asks the server.
        """
        if not self.is_nfs:
            return self._bound_s()
        if "nocto" not in self.options:
            return 0.0
        return max(self._nfs_s("acregmax"), self._nfs_s("acdirmax"))

    @property
    def refreshed_stale_s(self) -> float:
        """The same of one that is opened after `refresh`, which an NFS client obeys."""
        return 0.0 if self.is_nfs else self.stale_s

    @property
    def path_stale_s(self) -> float:
        """How long a path may be answered from memory, its absence too, if no folder is opened.

        An upper bound, in seconds: for the look-ups of a name, as by ``stat`` or ``exists``.
        """
        if not self.is_nfs:
            return self._bound_s()
        return 0.0 if self.options.get("lookupcache") == "none" else self._nfs_s("acdirmax")

    @property
    def keeps_writes(self) -> bool:
        """Whether a node may keep what it writes into an open file, unseen by others, for long."""
        return self.is_nfs or self._bound_s() > 0

    def _bound_s(self) -> float:
        return 0.0 if self.is_local else _BOUNDS_S.get(self.kind, _UNKNOWN_S)

    def _nfs_s(self, name: str) -> float:
        """Return the value of one of the four times for which NFS keeps attributes."""
        if "noac" in self.options:
            return 0.0
        return float(self.options.get(name, _NFS_DEFAULTS_S[name]))


def find(mountinfo: str, mount_id: int) -> Mount:
    """Return a mount of ``/proc/self/mountinfo`` by its number; of unknown kind if it has none.

    The kernel names the mount of every open file, so bind mounts, nested and hidden mounts need no
    rules here.
    """
    for line in mountinfo.splitlines():
        words = line.split(" ")
        if words[0] != str(mount_id):
            continue
        kind, source, shown = (*words[words.index("-") + 1 :], "", "", "")[:3]
        given = [words[5], shown, source if kind == SANDBOX else ""]
        pairs = (option.partition("=") for part in given for option in part.split(",") if option)
        options = {name: _unescape(value) for name, _, value in pairs}
        return Mount(_unescape(kind), _unescape(source), options)
    return Mount()


def _unescape(text: str) -> str:
    r"""Return a word of the kernel's tables as it was: ``\040`` is a blank."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)

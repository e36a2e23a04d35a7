"""What a client sees of another one's changes, and when: functions that run in a machine.

Times are seconds since the epoch by the machine's own clock, which may be a second off. Which
system calls are made is what is measured: so `os`, not `pathlib`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from hpc_elastic import shared_files

_POLL_S = 0.1
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _AT_STATX_FORCE_SYNC, _STATX_BASIC = -100, 0x2000, 0x7FF
_SIZE_OFFSET, _NLINK_OFFSET = 40, 16  # of struct statx


def statx_sync(path: str) -> tuple[int, int]:
    """Return st_size and st_nlink by statx(2) with AT_STATX_FORCE_SYNC."""
    buffer = ctypes.create_string_buffer(256)
    code = _LIBC.statx(_AT_FDCWD, path.encode(), _AT_STATX_FORCE_SYNC, _STATX_BASIC, buffer)
    if code:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    size = int.from_bytes(buffer.raw[_SIZE_OFFSET : _SIZE_OFFSET + 8], "little")
    nlink = int.from_bytes(buffer.raw[_NLINK_OFFSET : _NLINK_OFFSET + 4], "little")
    return size, nlink


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except OSError:
        return False
    return True


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except OSError:
        return False
    return True


def _open_parent(path: str) -> None:
    os.close(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY))


def _listed_then_opened(path: str) -> bool:
    return os.path.basename(path) in os.listdir(os.path.dirname(path)) and _opens(path)


def _touched(path: str) -> bool:
    os.utime(os.path.dirname(path))
    return _exists(path)


def _synced_parent(path: str) -> bool:
    statx_sync(os.path.dirname(path))
    return _exists(path)


def _synced(path: str) -> bool:
    try:
        statx_sync(path)
    except OSError:
        return False
    return True


def _listed_afresh(path: str) -> list[str]:
    """List the parent, after its cached listing has been dropped."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _own_change(path: str) -> bool:
    probe = os.path.join(os.path.dirname(path), f".probe-{os.getpid()}")
    os.close(os.open(probe, os.O_CREAT | os.O_WRONLY))
    os.unlink(probe)
    return _exists(path)


def _linked(path: str) -> bool:
    """Ask by link(2) to a name that exists: the client cannot answer that from its cache."""
    try:
        os.link(path, path + ".probe")
    except OSError:
        return False
    os.unlink(path + ".probe")
    return True


NAMES: dict[str, Callable[[str], bool]] = {
    "stat": _exists,
    "open": _opens,
    "O_DIRECT open": lambda path: _direct(path) is not None,
    "open the parent, stat": lambda path: (_open_parent(path), _exists(path))[1],
    "list the parent": lambda path: os.path.basename(path) in os.listdir(os.path.dirname(path)),
    "list the parent, stat": lambda path: (os.listdir(os.path.dirname(path)), _exists(path))[1],
    "list the parent, open what it names": _listed_then_opened,
    "statx FORCE_SYNC": _synced,
    "statx FORCE_SYNC of the parent, stat": _synced_parent,
    "statx FORCE_SYNC of the parent, list it": lambda path: (
        statx_sync(os.path.dirname(path)),
        os.path.basename(path) in os.listdir(os.path.dirname(path)),
    )[1],
    "statx FORCE_SYNC of the parent, open": lambda path: (
        statx_sync(os.path.dirname(path)),
        _opens(path),
    )[1],
    "fadvise DONTNEED of the parent, list it": lambda path: (
        os.path.basename(path) in _listed_afresh(path)
    ),
    "fadvise DONTNEED of the parent, list it, stat": lambda path: (
        _listed_afresh(path),
        _exists(path),
    )[1],
    "fadvise DONTNEED of the parent, list it, open what it names": lambda path: (
        os.path.basename(path) in _listed_afresh(path) and _opens(path)
    ),
    "statx FORCE_SYNC and fadvise DONTNEED of the parent, list it, stat": lambda path: (
        statx_sync(os.path.dirname(path)),
        _listed_afresh(path),
        _exists(path),
    )[2],
    "utime of the parent, stat": _touched,
    "make and remove a file beside it, stat": _own_change,
    "link(2) to it": _linked,
}
"""Ways to ask whether there is a file of a name."""


def _direct(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    try:
        import mmap

        buffer = mmap.mmap(-1, 4096)
        count = os.preadv(descriptor, [buffer], 0)
        return bytes(buffer[:count])
    finally:
        os.close(descriptor)


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _dropped(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _locked(path: str, flags: int = os.O_RDWR) -> bytes:
    descriptor = os.open(path, flags)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX if flags == os.O_RDWR else fcntl.LOCK_SH)
        data = os.read(descriptor, 4096)
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
        return data
    finally:
        os.close(descriptor)


def _flocked(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _for_writing(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


CONTENT: dict[str, Callable[[str], bytes]] = {
    "open and read": _read,
    "open O_RDWR and read": _for_writing,
    "list the parent, open and read": lambda p: (os.listdir(os.path.dirname(p)), _read(p))[1],
    "O_DIRECT open and read": lambda path: _direct(path) or b"",
    "statx FORCE_SYNC, open and read": lambda p: (_synced(p), _read(p))[1],
    "statx FORCE_SYNC of the parent, open and read": lambda p: (
        statx_sync(os.path.dirname(p)),
        _read(p),
    )[1],
    "fadvise DONTNEED of the parent, list it, open and read": lambda p: (
        _listed_afresh(p),
        _read(p),
    )[1],
    "both of these, of the parent, open and read": lambda p: (
        statx_sync(os.path.dirname(p)),
        _listed_afresh(p),
        _read(p),
    )[2],
    "stat, open and read": lambda p: (_exists(p), _read(p))[1],
    "open, fadvise DONTNEED, read": _dropped,
    "open, fcntl write lock, read": _locked,
    "open, fcntl read lock, read": lambda path: _locked(path, os.O_RDONLY),
    "open, flock, read": _flocked,
    "utime of it, open and read": lambda p: (os.utime(p), _read(p))[1],
    "chmod of it, open and read": lambda p: (os.chmod(p, 0o644), _read(p))[1],
}
"""Ways to read what a file contains now."""


def _held(path: str) -> Callable[[], bytes]:
    file = open(path, "rb")  # noqa: SIM115
    return lambda: (file.seek(0), file.read())[1]


def warm(paths: list[str]) -> None:
    """Fill this client's caches with what there is: attributes of the parent, the name, pages."""
    for path in paths:
        os.listdir(os.path.dirname(path))
        if _exists(path) and os.path.isfile(path):
            _read(path)


def read_undelegated(path: str) -> str:
    """Read a file as the product reads what other nodes remove."""
    return shared_files.read_undelegated(Path(path))


def look_in(path: str) -> None:
    os.listdir(os.path.dirname(path))


def seen(way: str, path: str, there: bool, limit_s: float) -> dict[str, float | bool]:
    """Wait until a file is there (or is not), asking in one way; see `_until`."""

    def found() -> bool:
        try:
            return NAMES[way](path)
        except OSError:  # such as ESTALE, as one reads what is gone
            return False

    return _until(lambda: found() == there, limit_s)


def contains(way: str, path: str, text: str, limit_s: float) -> dict[str, float | bool]:
    """Wait until a file contains a text, reading in one way; see `_until`."""
    read = _held(path) if way == "held open, read" else lambda: CONTENT[way](path)

    def there() -> bool:
        try:
            return text.encode() in read()
        except OSError:
            return False

    return _until(there, limit_s)


def _until(condition: Callable[[], bool], limit_s: float) -> dict[str, float | bool]:
    """Look until a condition holds.

    Returns ``vain``: when the last look began that did not find it, which a machine without time to
    run does not put off; ``ended``: whether a look found it.
    """
    deadline, vain = time.time() + limit_s, 0.0
    while time.time() < deadline:
        began = time.time()
        if condition():
            return {"vain": vain, "ended": True}
        vain = began
        time.sleep(_POLL_S)
    return {"vain": vain, "ended": False}


def make(path: str, text: str = "x") -> float:
    """Write a file anew, in place of one that is there; return when that was done."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return time.time()


def append(path: str, text: str) -> float:
    """Append to a file; return when that was done."""
    with open(path, "a") as file:
        file.write(text)
    return time.time()


def replace(path: str, text: str) -> float:
    """Rename a new file into its place; return when that was done."""
    make(path + ".new", text)
    os.replace(path + ".new", path)
    return time.time()


def rename(source: str, target: str) -> float:
    """Rename; return when that was done."""
    os.rename(source, target)
    return time.time()


def remove(path: str) -> float:
    """Remove a file; return when that was done."""
    os.unlink(path)
    return time.time()


def prepare(paths: list[str], kind: str) -> None:
    """Make the parents of paths, and what is there: see `visibility.Change.kind`."""
    for path in paths:
        os.makedirs(os.path.dirname(path))
        if kind in ("file", "linked"):
            make(path, "old")
            if kind == "linked":
                os.link(path, path + ".too")
        elif kind == "folder":
            os.mkdir(path)


def compete(folder: str, name: str, at: float, rounds: int) -> list[str]:
    """Link own files to `rounds` names, each at its moment, as another machine does.

    Returns what came of each: ``made``, ``exists``, or the error; then st_nlink of the own file, by
    stat and by statx with AT_STATX_FORCE_SYNC.
    """
    found = []
    for number in range(rounds):
        own = os.path.join(folder, f"{name}-{number}")
        make(own, name)
        os.stat(own)
        time.sleep(max(0.0, at + 0.3 * number - time.time()))
        try:
            os.link(own, os.path.join(folder, f"target-{number}"))
            word = "made"
        except FileExistsError:
            word = "exists"
        except OSError as e:
            word = str(e)
        found.append(f"{word} {os.stat(own).st_nlink} {statx_sync(own)[1]}")
    return found


def two_at_once(folder: str, rounds: int, at: float, apart_s: float) -> None:
    """In each round's folder make two files, one just after the other, each round at its moment."""
    for number in range(rounds):
        time.sleep(max(0.0, at + apart_s * number - time.time()))
        for name in ("first", "second"):
            os.close(os.open(f"{folder}/{number}/{name}", os.O_CREAT | os.O_WRONLY))


def list_two(folder: str, rounds: int, at: float, apart_s: float) -> None:
    """In each round list its folder until it has both files; look the second one up before that."""
    for number in range(rounds):
        end = at + apart_s * (number + 1) - 0.05
        while time.time() < end:
            names = os.listdir(f"{folder}/{number}")
            if len(names) == 2:
                break
            if names:
                _exists(f"{folder}/{number}/second")


_TICK_WAYS = (
    "list the parent",
    "stat",
    "statx FORCE_SYNC of the parent, list it",
    "fadvise DONTNEED of the parent, list it",
    "fadvise DONTNEED of the parent, list it, stat",
    "make and remove a file beside it, stat",
)


def unseen(folder: str, rounds: int, after_s: float) -> dict[str, list[int]]:
    """Say which ways of asking tell of second files that listings do not show, after a while.

    Under ``""`` how many were unlisted at first, and are so now; then for each way in how many
    folders it told of the file, and in how many it was tried. Each folder is for one way only.
    """
    paths = [f"{folder}/{number}/second" for number in range(rounds)]
    lists = NAMES["list the parent"]
    first = [path for path in paths if not lists(path)]
    time.sleep(after_s)
    left = [path for path in first if not lists(path)]
    found = {"": [len(first), len(left)]}
    for number, path in enumerate(left):
        way = _TICK_WAYS[number % len(_TICK_WAYS)]
        counts = found.setdefault(way, [0, 0])
        counts[0] += NAMES[way](path)
        counts[1] += 1
    return found

"""What a client sees of another one's changes, and when: functions that run in a machine.

Times are seconds since the epoch by the machine's own clock, which may be a second off. Which
system calls are made is what is measured: so `os`, not `pathlib`.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


_parent, _exists = os.path.dirname, os.path.exists


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _drop(descriptor: int) -> None:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _opens(path: str) -> bool:
    os.close(os.open(path, os.O_RDONLY))
    return True


def _open_parent(path: str) -> None:
    os.close(os.open(_parent(path), os.O_RDONLY | os.O_DIRECTORY))


def _listed(path: str) -> bool:
    return os.path.basename(path) in os.listdir(_parent(path))


def _synced(path: str) -> bool:
    with contextlib.suppress(OSError):
        statx_sync(path)
        return True
    return False


def _sync_parent(path: str) -> None:
    statx_sync(_parent(path))


def _listed_afresh(path: str) -> bool:
    """List the parent, after its cached listing has been dropped."""
    with _opened(_parent(path), os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        _drop(descriptor)
        return os.path.basename(path) in os.listdir(descriptor)


def _make_beside(path: str) -> None:
    probe = os.path.join(_parent(path), f".probe-{os.getpid()}")
    os.close(os.open(probe, os.O_CREAT | os.O_WRONLY))
    os.unlink(probe)


def _linked(path: str) -> bool:
    """Ask by link(2) to a name that exists: the client cannot answer that from its cache."""
    os.link(path, path + ".probe")
    os.unlink(path + ".probe")
    return True


def _after(*steps: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a way that does all of these, and answers as the last one does."""
    return lambda path: [step(path) for step in steps][-1]


NAMES: dict[str, Callable[[str], bool]] = {
    "stat": _exists,
    "open": _opens,
    "O_DIRECT open": lambda path: _direct(path) is not None,
    "open the parent, stat": _after(_open_parent, _exists),
    "list the parent": _listed,
    "list the parent, stat": _after(_listed, _exists),
    "list the parent, open what it names": lambda path: _listed(path) and _opens(path),
    "statx FORCE_SYNC": _synced,
    "statx FORCE_SYNC of the parent, stat": _after(_sync_parent, _exists),
    "statx FORCE_SYNC of the parent, list it": _after(_sync_parent, _listed),
    "statx FORCE_SYNC of the parent, open": _after(_sync_parent, _opens),
    "fadvise DONTNEED of the parent, list it": _listed_afresh,
    "fadvise DONTNEED of the parent, list it, stat": _after(_listed_afresh, _exists),
    "fadvise DONTNEED of the parent, list it, open what it names": lambda path: (
        _listed_afresh(path) and _opens(path)
    ),
    "statx FORCE_SYNC and fadvise DONTNEED of the parent, list it, stat": _after(
        _sync_parent, _listed_afresh, _exists
    ),
    "utime of the parent, stat": _after(lambda path: os.utime(_parent(path)), _exists),
    "make and remove a file beside it, stat": _after(_make_beside, _exists),
    "link(2) to it": _linked,
}
"""Ways to ask whether there is a file of a name; an OSError is a no."""


def _direct(path: str) -> bytes:
    buffer = mmap.mmap(-1, 4096)  # O_DIRECT wants aligned memory
    with _opened(path, os.O_RDONLY | os.O_DIRECT) as descriptor:
        return bytes(buffer[: os.preadv(descriptor, [buffer], 0)])


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _read_by(flags: int, *around: Callable[[int], object]) -> Callable[[str], bytes]:
    """Return a way that opens and reads; ``around`` has what it does before that, and after."""

    def read(path: str) -> bytes:
        with _opened(path, flags) as descriptor:
            for act in around[:1]:
                act(descriptor)
            data = os.read(descriptor, 4096)
            for act in around[1:]:
                act(descriptor)
            return data

    return read


def _lock(kind: int) -> Callable[[int], object]:
    return lambda descriptor: fcntl.lockf(descriptor, kind)


CONTENT: dict[str, Callable[[str], bytes]] = {
    "open and read": _read,
    "open O_RDWR and read": _read_by(os.O_RDWR),
    "list the parent, open and read": _after(_listed, _read),
    "O_DIRECT open and read": _direct,
    "statx FORCE_SYNC, open and read": _after(_synced, _read),
    "statx FORCE_SYNC of the parent, open and read": _after(_sync_parent, _read),
    "fadvise DONTNEED of the parent, list it, open and read": _after(_listed_afresh, _read),
    "both of these, of the parent, open and read": _after(_sync_parent, _listed_afresh, _read),
    "stat, open and read": _after(_exists, _read),
    "open, fadvise DONTNEED, read": _read_by(os.O_RDONLY, _drop),
    "open, fcntl write lock, read": _read_by(os.O_RDWR, _lock(fcntl.LOCK_EX), _lock(fcntl.LOCK_UN)),
    "open, fcntl read lock, read": _read_by(
        os.O_RDONLY, _lock(fcntl.LOCK_SH), _lock(fcntl.LOCK_UN)
    ),
    "open, flock, read": _read_by(os.O_RDWR, lambda d: fcntl.flock(d, fcntl.LOCK_EX)),
    "utime of it, open and read": _after(os.utime, _read),
    "chmod of it, open and read": _after(lambda path: os.chmod(path, 0o644), _read),
}
"""Ways to read what a file contains now."""


def _held(path: str) -> Callable[[], bytes]:
    file = open(path, "rb")  # noqa: SIM115
    return lambda: (file.seek(0), file.read())[1]


def warm(paths: list[str]) -> None:
    """Fill this client's caches with what there is: attributes of the parent, the name, pages."""
    for path in paths:
        os.listdir(_parent(path))
        if _exists(path) and os.path.isfile(path):
            _read(path)


def read_undelegated(path: str) -> str:
    """Read a file as the product reads what other nodes remove."""
    return shared_files.read_undelegated(Path(path))


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


def make(path: str, text: str = "x") -> None:
    """Write a file anew, in place of one that is there."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def replace(path: str, text: str) -> None:
    make(path + ".new", text)
    os.replace(path + ".new", path)


DEEDS: dict[str, Callable[..., object]] = {
    "make": make, "append": append, "replace": replace, "rename": os.rename, "remove": os.unlink,
    "list": lambda path: os.listdir(_parent(path)),
}  # fmt: skip


def act(deed: str, *arguments: str) -> float:
    """Do something to a file or its folder; return when that was done."""
    DEEDS[deed](*arguments)
    return time.time()


def prepare(paths: list[str], kind: str) -> None:
    """Make the parents of paths, and what is there: see `visibility.Change.kind`."""
    for path in paths:
        os.makedirs(_parent(path))
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

"""ProcessGroupGloo: gloo in a process that outlives its peers, aborted and reconfigured in place.

gloo's collectives can neither be interrupted (not by its `abort` either) nor notice that a peer is
lost; they fail only when a connection breaks, or at their time-out. So this group keeps duplicates
of its own connections, and breaks them to abort. The next `configure` makes a new group of torch's
with a listener of its own; the old one's threads are ended in the background.

Private to torch, and named in a test: ``ProcessGroupGloo._Options`` with ``_devices``,
``_timeout`` and ``_threads``; ``_set_default_timeout``; ``ProcessGroup._register_backend`` and
``_set_default_backend``; that gloo writes one value per rank into the store, with its address in
it.
"""

# ruff: noqa: D102  (the methods override documented ones)

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed.distributed_c10d import Work

from hpc_elastic.ft import reconfigurable
from hpc_elastic.ft.process_group import (
    DEFAULT_TIMEOUT,
    AbortedError,
    LiveGroup,
    ManagedWork,
    MemberPlace,
)
from hpc_elastic.transport.interface import own_address

_log = logging.getLogger(__name__)
# All members have published their addresses when gloo connects them; it tries five times.
_CONNECT = timedelta(seconds=2)
_THREADS = 2
_REST_S = 0.25
"""gloo's threads end within 60 ms of a broken connection, on a busy node too; later they are
stuck."""
_WAIT_MOVES_DATA = {"send", "recv", "recv_anysource"}
"""Operations whose `wait` cannot be repeated."""


class ProcessGroupGloo(reconfigurable.ReconfigurableProcessGroup):
    """A reconfigurable group over TCP, for tensors on CPUs (and, copied, on GPUs).

    The environment's ``GLOO_SOCKET_IFNAME`` names the interface; else it is the one by which the
    store is reached.
    """

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-gloo"

    def _build_group(
        self, task: reconfigurable.CancellableTask[LiveGroup], place: MemberPlace
    ) -> LiveGroup:
        store = self._open_store(task, place)
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        host = store.address.host
        own = {"interface": interface} if interface else {"hostname": own_address(host)}
        options: Any = TorchGloo._Options()  # type: ignore[attr-defined]
        options._devices = [TorchGloo.create_device(**own, lazy_init=False)]
        options._timeout = _CONNECT
        options._threads = _THREADS
        reconfigurable.name_group(options, place)
        backend = TorchGloo(store, place.rank, place.world_size, options)
        backend._set_default_timeout(self._timeout)
        pg = TorchProcessGroup(place.rank, place.world_size)  # type: ignore[call-arg]
        gloo = TorchProcessGroup.BackendType.GLOO
        pg._set_default_backend(gloo)
        for device in ("cpu", "cuda", "xpu"):
            if device == "cpu" or getattr(torch, device).is_available():
                pg._register_backend(torch.device(device), gloo, backend)
        published = {key.rpartition("/")[2]: value for key, value in store.values.items()}
        listener = published.pop(str(place.rank), b"")
        found = find_connections(listener, published.values())
        if len(found) < place.world_size - 1:
            _log.warning(
                "%s: %d connections of gloo's found instead of %d: abort() cannot interrupt its "
                "operations before their time-out. This release of torch (%s) may not be "
                "supported.", place, len(found), place.world_size - 1, torch.__version__,
            )  # fmt: skip
        return GlooGroup(place, pg, found)


class ProcessGroupBabyGloo(ProcessGroupGloo):
    """`ProcessGroupGloo`, under the name of torchft's group in a subprocess.

    torchft needs the subprocess to abort gloo; here no operation needs one.
    """

    def __init__(self, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
        """Create the group, without members; the time-out may be in seconds, as torchft's."""
        super().__init__(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))


class GlooGroup(LiveGroup):
    """One group of torch's, and its connections."""

    def __init__(
        self, place: MemberPlace, pg: TorchProcessGroup, connections: list[socket.socket]
    ) -> None:
        super().__init__(place)
        self._held = [pg]
        self._connections = connections

    @property
    def pg(self) -> TorchProcessGroup:
        try:
            return self._held[0]
        except IndexError:
            raise self.end_error or AbortedError(f"{self.place} has just ended") from None

    def set_timeout(self, timeout: timedelta) -> None:
        self.pg.set_timeout(timeout)

    def watch_work(self, work: Work, operation: str) -> ManagedWork:
        return ManagedWork(work, operation, self, is_abortable=operation not in _WAIT_MOVES_DATA)

    def end_group(self, error: Exception, *, finish_pending: bool) -> None:
        """Break the connections, and wait until gloo's threads have ended."""
        self.end_error = error
        connections, self._connections = self._connections, []
        break_connections(connections)
        is_done = destroy_in_background(self._held)
        if isinstance(threading.current_thread(), threading._DummyThread):
            # A callback, on one of the very threads that are to end: it must not wait for itself.
            args = (is_done, error)
            threading.Thread(target=self._await_rest, args=args, daemon=True).start()
        else:
            self._await_rest(is_done, error)

    def _await_rest(self, is_done: threading.Event, error: Exception) -> None:
        in_time = is_done.wait(_REST_S)
        self.is_at_rest = True
        if not in_time:
            _log.debug("%s: gloo is stuck; its operations are given up", self.place)
            for work in list(self.pending):
                work.end_future(None, error)


# ---- destroying gloo's groups
# The destructor of a gloo group joins its threads, which takes 10 to 30 ms; called by one of those
# threads (in a callback of a future) it would end the process. So the last reference is dropped by
# a thread of its own, and only once there is no other.
#
# A thread that returns from C++ while Python ends could crash the process, so the end of Python
# waits for these threads; but not for one whose group is stuck until a time-out.


_OTHER_REFERENCES_S = 10.0
_REFERENCE_POLL_S = 0.001
_AT_EXIT_S = 0.5
_OWN_REFERENCES = 2  # the list's, and getrefcount's argument

_destroyers: set[threading.Thread] = set()


def destroy_in_background(held: list[Any]) -> threading.Event:
    """Empty a list of groups, and destroy them in the background; return an event for the end."""
    is_done = threading.Event()
    groups = held[:]
    held.clear()

    def destroy() -> None:
        until = time.monotonic() + _OTHER_REFERENCES_S
        while groups:
            if sys.getrefcount(groups[-1]) > _OWN_REFERENCES and time.monotonic() < until:
                time.sleep(_REFERENCE_POLL_S)  # another thread is inside an operation
            else:
                groups.pop()
        is_done.set()
        _destroyers.discard(threading.current_thread())

    thread = threading.Thread(target=destroy, name="hpc-elastic-ft-destroy", daemon=True)
    _destroyers.add(thread)
    thread.start()
    return is_done


@atexit.register
def _await_destroyers() -> None:
    until = time.monotonic() + _AT_EXIT_S
    for thread in list(_destroyers):
        thread.join(max(0.0, until - time.monotonic()))


# ---- the TCP connections of one gloo group, found among all of this process, to break them
# They are found exactly: gloo publishes the address on which it listens (a ``sockaddr``, somewhere
# in what it writes to the store), and a connection of the group has either the own listener as its
# own end, or a peer's as the other. The group keeps duplicates, so it never touches a descriptor
# that gloo has closed and other code has opened again. It leaves the listener alone: gloo ends the
# process if that is shut.
#
# Where several ranks are in one process, a connection of one may fit another: both lead to the same
# peer. So only those count that the own listener's epoll instance watches: each group has a gloo
# device of its own, whose one loop watches the listener and all its connections.


_FDS = Path("/proc/self/fd")
_FD_INFOS = Path("/proc/self/fdinfo")
_EPOLL = "anon_inode:[eventpoll]"
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)
_NO_IP = OSError, ValueError, TypeError, IndexError
"""Of a descriptor that is no socket, or one without an address of the Internet."""
_DRAIN_BYTES = 1 << 20
_CLOSE_S = 0.02


def raw_address(family: int, address: tuple[object, ...]) -> bytes:
    """Return the bytes with which a ``sockaddr`` of this address starts; empty if it is no IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    start = struct.pack("=H", family) + struct.pack("!H", address[1])
    ip = socket.inet_pton(family, str(address[0]).partition("%")[0])
    return start + ip if family == socket.AF_INET else start + b"\0\0\0\0" + ip


def find_connections(own: bytes, peers: Collection[bytes]) -> list[socket.socket]:
    """Return a duplicate of each connection of a group, by the addresses that gloo publishes."""
    found: dict[int, socket.socket] = {}
    watched = _find_watched(own)
    for fd, target in _descriptors():
        # Only sockets: closing a duplicate of a file would drop the process's locks on it.
        if (watched and fd not in watched) or not target.startswith("socket:"):
            continue
        with suppress(OSError):  # closed meanwhile
            if not _is_of_group(fd, own, peers):
                continue
            sock = socket.socket(fileno=os.dup(fd))
            inode = os.fstat(sock.fileno()).st_ino
            # another duplicate may be one made here, or by other code that does the same
            if inode not in found and _is_of_group(sock.fileno(), own, peers):
                found[inode] = sock
            else:
                sock.close()
    return list(found.values())


def break_connections(connections: Collection[socket.socket]) -> None:
    """Shut connections down, and close them.

    What was sent still arrives. gloo itself reads what has arrived already, up to the end, and
    closes its descriptors; nothing is written into a tensor after that. This function reads only
    after gloo has closed: gloo would take the rest of a message for the start of one, and end the
    process.

    Reading is shut down first, and writing once gloo has noticed: a send that fails in gloo's own
    loop is lost, and its waiter would wait for its time-out.
    """
    for sock in connections:
        with suppress(OSError):  # the peer was faster
            sock.shutdown(socket.SHUT_RD)
    has_closed = _await_close_by_gloo(connections)
    for sock in connections:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if has_closed:  # a connection closed with unread bytes loses what was sent
            with suppress(OSError):
                while sock.recv(_DRAIN_BYTES, socket.MSG_DONTWAIT):
                    pass
        sock.close()


def _await_close_by_gloo(connections: Collection[socket.socket]) -> bool:
    """Wait briefly until gloo closes its own descriptors; return whether it has."""
    names = {f"socket:[{os.fstat(sock.fileno()).st_ino}]" for sock in connections}
    until = time.monotonic() + _CLOSE_S
    while True:
        num_open = sum(target in names for _, target in _descriptors())
        if num_open <= len(connections) or time.monotonic() >= until:
            return num_open <= len(connections)
        time.sleep(_CLOSE_S / 50)


def _find_watched(own: bytes) -> set[int]:
    """Return what the loop of the own listener watches; nothing if there is no such loop."""
    for fd, target in _descriptors():
        with suppress(OSError):  # closed meanwhile
            if target == _EPOLL:
                text = (_FD_INFOS / str(fd)).read_text()
                watched = {int(number) for number in _WATCHED.findall(text)}
                if any(_is_listener(number, own) for number in watched):
                    return watched
    return set()


def _descriptors() -> Iterator[tuple[int, str]]:
    """Yield the descriptors of this process, and what they stand for."""
    for entry in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            yield int(entry.name), str(entry.readlink())


def _is_listener(fd: int, own: bytes) -> bool:
    with suppress(*_NO_IP), _borrowed(fd) as sock:
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        here = raw_address(sock.family, sock.getsockname())
        return bool(is_listening and here) and here in own
    return False


def _is_of_group(fd: int, own: bytes, peers: Collection[bytes]) -> bool:
    with suppress(*_NO_IP), _borrowed(fd) as sock:
        there = raw_address(sock.family, sock.getpeername())
        here = raw_address(sock.family, sock.getsockname())
        return bool(here) and (here in own or any(there in peer for peer in peers))
    return False


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Look at a descriptor as a socket; it stays open."""
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()

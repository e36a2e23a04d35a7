"""Gloo in a process that outlives its peers: aborted at once, configured again in place.

Gloo's collectives can neither be interrupted nor told that a peer is gone; they fail only when a
connection breaks, or at their time-out. So this group keeps hold of its own connections
(`gloo`), and breaks them to abort. The next `configure` makes a new group of torch's, with a
listener of its own; the old one's threads are ended in the background.

Private to torch, and named in a test: ``ProcessGroupGloo._Options`` with ``_devices``,
``_timeout`` and ``_threads``; ``_set_default_timeout``; ``ProcessGroup._register_backend`` and
``_set_default_backend``; that gloo writes one value a rank into the store, with its address in it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from hpc_elastic.ft import reconfigurable
from hpc_elastic.ft.process_group import (
    AbortedError,
    CollectiveTimeoutError,
    NamedGroup,
    NamedWork,
    named,
)
from hpc_elastic.ft.reconfigurable import (
    CancellableTask,
    LiveGroup,
    MemberPlace,
    ReconfigurableProcessGroup,
    retire,
)
from hpc_elastic.transport.addresses import address_towards

_log = logging.getLogger(__name__)
# All members have published their addresses when gloo connects them; it tries five times.
_CONNECT = timedelta(seconds=2)
_THREADS = 2
# Their `wait` moves the data, and may not be repeated.
_BY_THE_CALLER = {"send", "recv", "recv_anysource"}


class ProcessGroupGloo(ReconfigurableProcessGroup):
    """A reconfigurable group over TCP, for tensors on CPUs (and, copied, on GPUs).

    The environment's ``GLOO_SOCKET_IFNAME`` names the interface; else it is the one by which the
    store is reached.
    """

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return "hpc-elastic-gloo"

    def _build(self, attempt: CancellableTask[LiveGroup], place: MemberPlace) -> LiveGroup:
        where = reconfigurable.parse(place.store_addr)
        store = reconfigurable.connect(where, attempt)
        met = reconfigurable.AbortableStore(store, where.prefix, place.world_size, attempt)
        options = _options(place, where.host)
        backend = TorchGloo(met, place.rank, place.world_size, options)
        backend._set_default_timeout(self._timeout)
        return GlooGroup(place, _group(backend, place), _own_connections(met, place))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Work:
        live, parent = self._live, self.parent
        assert isinstance(live, GlooGroup)
        try:
            work = getattr(parent, name)(*args, **kwargs)
        except RuntimeError as e:
            raise named(e, name, live) from e
        return (NamedWork if name in _BY_THE_CALLER else GlooWork)(work, name, live)


class GlooGroup:
    """One group of torch's, and its connections.

    Attributes:
        place: This member's.
        over: Why it has ended; None as long as it has not.
        futures: Of operations that are pending.
        at_rest: It has ended, and what has not failed yet is stuck in gloo.
    """

    def __init__(
        self, place: MemberPlace, pg: TorchProcessGroup, kept: list[socket.socket]
    ) -> None:
        self.place = place
        self.over: Exception | None = None
        self.futures: set[Handed] = set()
        self.at_rest = False
        self._held = [pg]
        self._kept = kept

    @property
    def pg(self) -> TorchProcessGroup:
        """What does the operations."""
        try:
            return self._held[0]
        except IndexError:
            raise self.over or AbortedError(f"{self.place} has just ended") from None

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""
        self.pg.set_timeout(timeout)

    def end(self, error: Exception, *, peacefully: bool) -> None:
        """Break the connections, and wait until gloo's threads have come to rest.

        There is no gentler way to end in peace: what was sent arrives in any case.
        """
        self.over = error
        kept, self._kept = self._kept, []
        cut(kept)
        quiet = retire(self._held)
        if isinstance(threading.current_thread(), threading._DummyThread):
            # A callback, on one of the very threads that are to end: it must not wait for itself.
            threading.Thread(target=self._settle, args=(quiet, error), daemon=True).start()
        else:
            self._settle(quiet, error)

    def _settle(self, quiet: threading.Event, error: Exception) -> None:
        is_quiet = quiet.wait(STUCK_S)
        self.at_rest = True
        if not is_quiet:
            _log.debug("%s: gloo is stuck; its operations are given up", self.place)
            for future in list(self.futures):
                future.fail(error)


def _options(place: MemberPlace, store_host: str) -> Any:
    options = TorchGloo._Options()  # type: ignore[attr-defined]
    options._devices = [_device(store_host)]
    options._timeout = _CONNECT
    options._threads = _THREADS
    if place.global_ranks:
        options.global_ranks_in_group = place.global_ranks
    if place.quorum_id is not None:
        options.group_name = f"ft_quorum_{place.quorum_id}_rank_{place.group_rank or 0}"
    return options


def _device(store_host: str) -> Any:
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        return TorchGloo.create_device(interface=name, lazy_init=False)
    return TorchGloo.create_device(hostname=_address(store_host), lazy_init=False)


def _address(store_host: str) -> str:
    """Return this node's address for its peers, who reach the store as well."""
    address = address_towards(store_host)
    if address.startswith("127.") and store_host not in ("localhost", address):
        return _outward() or address  # a hosts file may name this host 127.0.1.1
    return address


def _outward() -> str | None:
    addresses = (a for known in psutil.net_if_addrs().values() for a in known)
    usable = (a.address for a in addresses if a.family == socket.AF_INET)
    return next((a for a in usable if not a.startswith("127.")), None)


def _group(backend: TorchGloo, place: MemberPlace) -> TorchProcessGroup:
    pg = TorchProcessGroup(place.rank, place.world_size)  # type: ignore[call-arg]
    pg._set_default_backend(TorchProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda", "xpu"):
        if device == "cpu" or getattr(torch, device).is_available():
            pg._register_backend(torch.device(device), TorchProcessGroup.BackendType.GLOO, backend)
    return pg


def _own_connections(met: reconfigurable.AbortableStore, place: MemberPlace) -> list[socket.socket]:
    said = {key.rpartition("/")[2]: value for key, value in met.said.items()}
    own = said.get(str(place.rank), b"")
    peers = [value for rank, value in said.items() if rank != str(place.rank)]
    kept = connections(own, peers)
    if len(kept) < place.world_size - 1:
        _log.warning(
            "%s: %d connections of gloo's found instead of %d: abort() can not interrupt its "
            "operations before their time-out. This release of torch (%s) may not be supported.",
            place, len(kept), place.world_size - 1, torch.__version__,
        )  # fmt: skip
    return kept


# ---- A gloo operation that ends when its group is aborted, even if gloo forgets it
# A send that fails in gloo's own loop is lost: nobody is told, and the operation hangs until its
# time-out, with no connection left that could be broken. It is rare, and happens when a
# connection breaks just as the peer announces that it is ready. So who waits looks now and then
# whether the group has ended, and futures are handed on through one that the group can fail
# itself.


STUCK_S = (
    0.25  # gloo's threads come to rest within 60 ms of a broken connection, on a busy node too
)
_LOOK = timedelta(seconds=0.1)


class GroupWithFutures(NamedGroup, Protocol):
    """A group that can fail the futures of its operations.

    Attributes:
        futures: Of those that are pending.
        at_rest: It has ended, and what has not failed yet is stuck.
    """

    futures: set[Handed]
    at_rest: bool


class GlooWork(NamedWork):
    """A collective on gloo's own threads."""

    _group: GroupWithFutures

    def __init__(self, work: Work, operation: str, group: GroupWithFutures) -> None:
        super().__init__(work, operation, group)
        self._handed: Handed | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the operation; see `NamedWork.wait`.

        Args:
            timeout: None, and 0 as in torch's C++ code (``kNoTimeout``): the group's.
        """
        timeout = timeout or None
        until = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            if self._group.at_rest and self._group.over and not self._work.is_completed():
                raise self._group.over
            try:
                return self._work.wait(_LOOK if until is None else _shorter(until))
            except RuntimeError as e:
                if self._work.is_completed():
                    return super().wait()
                if self._group.at_rest and self._group.over is not None:
                    raise self._group.over from e
            if timeout is not None and until is not None and time.monotonic() >= until:
                raise CollectiveTimeoutError(
                    f"{self._operation} timed out after {timeout.total_seconds():g} s "
                    f"in {self._group.place}"
                )

    def get_future(self) -> Any:
        """Return a future of its tensors."""
        if self._handed is None:
            self._handed = Handed(self._work, self._operation, self._group)
        return self._handed.future


class Handed:
    """A future that ends with gloo's, or when the group fails it.

    Attributes:
        future: For the user.
    """

    def __init__(self, work: Work, operation: str, group: GroupWithFutures) -> None:
        self.future: Future[Any] = Future()
        self._operation = operation
        self._group = group
        self._lock = threading.Lock()
        self._ended = False
        group.futures.add(self)
        work.get_future().add_done_callback(self._hand_on)

    def fail(self, error: Exception) -> None:
        """End it with an error, unless it has ended."""
        if self._first():
            self.future.set_exception(error)

    def _hand_on(self, done: Future[Any]) -> None:
        try:
            value = done.value()
        except RuntimeError as e:
            self.fail(named(e, self._operation, self._group))
            return
        if self._first():
            self.future.set_result(value)

    def _first(self) -> bool:
        self._group.futures.discard(self)
        with self._lock:
            first, self._ended = not self._ended, True
        return first


def _shorter(until: float) -> timedelta:
    return max(timedelta(milliseconds=1), min(_LOOK, timedelta(seconds=until - time.monotonic())))


# ---- The TCP connections of one gloo group, found among all of this process, to cut them
# Gloo can not be interrupted: its `abort` leaves a collective waiting for a peer that is silent.
# But it fails at once when a connection breaks, and so we break our own. They are found exactly:
# gloo publishes the address on which it listens (a ``sockaddr``, somewhere in what it writes to
# the store); a connection of the group has either our listener as its own end, or a peer's as the
# other. Kept are duplicates, so that the number of a descriptor that gloo has closed, and
# somebody else opened, is never touched. The listener itself is left alone: gloo ends the process
# if it is shut.
#
# Where several ranks of a group live in one process, their connections can not be told apart:
# whoever aborts one of them aborts all.


_FDS = Path("/proc/self/fd")
_DRAIN_BYTES = 1 << 20
_NOTICE_S = 0.02


def raw_address(family: int, address: tuple[object, ...]) -> bytes:
    """Return the bytes with which a ``sockaddr`` of this address begins; empty if it is no IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    start = struct.pack("=H", family) + struct.pack("!H", address[1])
    ip = socket.inet_pton(family, str(address[0]).partition("%")[0])
    return start + ip if family == socket.AF_INET else start + b"\0\0\0\0" + ip


def connections(own: bytes, peers: Collection[bytes]) -> list[socket.socket]:
    """Return a duplicate of each connection of a group.

    Args:
        own: What gloo published for this rank; it holds its listener's address.
        peers: What it published for the others.
    """
    found: dict[int, socket.socket] = {}
    for sock in _duplicates(own, peers):
        inode = os.fstat(sock.fileno()).st_ino
        if inode in found:  # a duplicate of ours, or of somebody who does the same
            sock.close()
        else:
            found[inode] = sock
    return list(found.values())


def cut(kept: Collection[socket.socket]) -> None:
    """Break connections, and forget them.

    What was sent still arrives. Gloo itself reads what has come already, up to the end, and closes
    its descriptors; nothing is written into a tensor after that. We do not read as long as gloo
    may: it would take the rest of a message for the beginning of one, and end the process.

    Reading ends first, and writing once gloo has seen that: a send that fails in gloo's own loop is
    lost, and who waits for it would wait for its time-out.
    """
    for sock in kept:
        with suppress(OSError):  # the peer was faster
            sock.shutdown(socket.SHUT_RD)
    is_ours_alone = _await_owner(kept)
    for sock in kept:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        if is_ours_alone:
            _drain(sock)  # a connection that is closed with bytes unread loses what was sent
        sock.close()


def _drain(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(_DRAIN_BYTES, socket.MSG_DONTWAIT):
            pass


def _await_owner(kept: Collection[socket.socket]) -> bool:
    """Wait a moment for gloo to close its own descriptors of these connections; tell if it has."""
    names = {f"socket:[{os.fstat(sock.fileno()).st_ino}]" for sock in kept}
    until = time.monotonic() + _NOTICE_S
    while (num_open := _num_open(names)) > len(kept) and time.monotonic() < until:
        time.sleep(_NOTICE_S / 50)
    return num_open <= len(kept)


def _num_open(names: Collection[str]) -> int:
    count = 0
    for entry in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            count += str(entry.readlink()) in names
    return count


def _duplicates(own: bytes, peers: Collection[bytes]) -> Iterator[socket.socket]:
    for entry in list(_FDS.iterdir()):
        with suppress(OSError):  # closed meanwhile
            # Only sockets: to close a duplicate of a file would drop the process's locks on it.
            is_socket = str(entry.readlink()).startswith("socket:")
            if not is_socket or not _ours(int(entry.name), own, peers):
                continue
            sock = socket.socket(fileno=os.dup(int(entry.name)))
            if _ours(sock.fileno(), own, peers):
                yield sock
            else:
                sock.close()


def _ours(fd: int, own: bytes, peers: Collection[bytes]) -> bool:
    sock = socket.socket(fileno=fd)
    try:
        there = raw_address(sock.family, sock.getpeername())
        here = raw_address(sock.family, sock.getsockname())
    except (OSError, ValueError, TypeError, IndexError):  # not connected, or no IP
        return False
    finally:
        sock.detach()
    return bool(here) and (here in own or any(there in peer for peer in peers))

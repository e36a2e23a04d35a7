"""Gloo in a process that outlives its peers: aborted at once, configured again in place.

Gloo's collectives can neither be interrupted nor told that a peer is gone; they fail only when a
connection breaks, or at their time-out. So this group keeps hold of its own connections
(`sockets`), and breaks them to abort. The next `configure` makes a new group of torch's, with a
listener of its own; the old one's threads are ended in the background.

Private to torch, and named in a test: ``ProcessGroupGloo._Options`` with ``_devices``,
``_timeout`` and ``_threads``; ``_set_default_timeout``; ``ProcessGroup._register_backend`` and
``_set_default_backend``; that gloo writes one value a rank into the store, with its address in it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from datetime import timedelta
from typing import Any

import psutil
import torch
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo
from torch.distributed.distributed_c10d import Work

from hpc_elastic.ft import meeting, sockets
from hpc_elastic.ft.attempt import Attempt
from hpc_elastic.ft.broken import AbortedError
from hpc_elastic.ft.gloo_work import STUCK_S, GlooWork, Handed
from hpc_elastic.ft.named_work import NamedWork, named
from hpc_elastic.ft.reconfigure import Live, Place, ReconfigurableProcessGroup
from hpc_elastic.ft.retire import retire
from hpc_elastic.net.addresses import address_towards

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

    def _build(self, attempt: Attempt[Live], place: Place) -> Live:
        where = meeting.parse(place.store_addr)
        store = meeting.connect(where, attempt)
        met = meeting.Meeting(store, where.prefix, place.world_size, attempt)
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

    def __init__(self, place: Place, pg: TorchProcessGroup, kept: list[socket.socket]) -> None:
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
        sockets.cut(kept)
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


def _options(place: Place, store_host: str) -> Any:
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


def _group(backend: TorchGloo, place: Place) -> TorchProcessGroup:
    pg = TorchProcessGroup(place.rank, place.world_size)  # type: ignore[call-arg]
    pg._set_default_backend(TorchProcessGroup.BackendType.GLOO)
    for device in ("cpu", "cuda", "xpu"):
        if device == "cpu" or getattr(torch, device).is_available():
            pg._register_backend(torch.device(device), TorchProcessGroup.BackendType.GLOO, backend)
    return pg


def _own_connections(met: meeting.Meeting, place: Place) -> list[socket.socket]:
    said = {key.rpartition("/")[2]: value for key, value in met.said.items()}
    own = said.get(str(place.rank), b"")
    peers = [value for rank, value in said.items() if rank != str(place.rank)]
    kept = sockets.connections(own, peers)
    if len(kept) < place.world_size - 1:
        _log.warning(
            "%s: %d connections of gloo's found instead of %d: abort() can not interrupt its "
            "operations before their time-out. This release of torch (%s) may not be supported.",
            place, len(kept), place.world_size - 1, torch.__version__,
        )  # fmt: skip
    return kept

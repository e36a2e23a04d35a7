"""torch's TCPStore of each round, in a process of its own: no agent imports torch.

The agent opens the port, so a round is announced without torch. Connections wait in the port's
queue until the process has imported torch and accepts them. The import takes seconds, so an agent
starts the process before it needs a store: when it leads, when it joins as a replica, and once its
workers train, since it may lead next.

    agent to process   {"contents": {...}} as JSON, with the descriptor of a port: host a store
                       {"read": [address, port], "key": key}: read the store of another node
    process to agent   the value that was read, or nothing if that store is gone

The end of the stream ends the process, and each store ends the one before.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hpc_elastic.transport import socket_filter

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=60)
CONNECT_S = 15.0  # a store listens before its round is announced; after this time its host has died
_IMPORT_TIMEOUT = timedelta(minutes=5)
"""Longest wait for the host of a store that listens, which may still import torch."""
_BACKLOG = 1 << 12
"""Workers that may wait until the store is hosted; the kernel's own limit is somaxconn."""
_RETRY_S = 1.0
_MAX_BYTES = 1 << 16


def open_port(address: str) -> socket.socket:
    """Listen at an address of this node, for a store.

    The socket has the address's own family. torch opens a socket for IPv6 and IPv4; there its
    server resolves each client's name before it serves the next client. The hosts file has no
    ``::ffff:10.0.0.7``, so the server hangs if no name server answers. Raises OSError if the
    address is not one of this node's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    socket_filter.apply(listening)
    return listening


def host_store(listening: socket.socket, contents: Mapping[str, str]) -> TCPStore:
    """Host a store with ``contents``; raises OSError if torch cannot start it now."""
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    address, port = listening.getsockname()[:2]
    try:
        store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT,
            master_listen_fd=os.dup(listening.fileno()),
        )  # fmt: skip
        for key, text in contents.items():
            store.set(key, text)
    except DistError as e:  # out of file descriptors, for one
        raise OSError(f"no store for the round: {e}") from e
    return store


class RoundStores:
    """Opens the store of each round, at an address of this node (any thread)."""

    def __init__(self, address: str) -> None:
        self.contents: Mapping[str, str] = {}  # what each store has from the start
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()

    def make(self) -> tuple[str, int]:
        """Open a fresh store; return its address and port. Raises OSError, as `open_port`."""
        with open_port(self._address) as listening:
            request = json.dumps({"contents": dict(self.contents)}).encode()
            with self._lock:
                socket.send_fds(self._started(), [request], [listening.fileno()])
            return self._address, int(listening.getsockname()[1])

    def read(self, store: tuple[str, int], key: str) -> str:
        """Return what a store of another node has for a key; raises OSError if it is gone."""
        with self._lock:
            channel = self._started()
            channel.send(json.dumps({"read": store, "key": key}).encode())
            value = channel.recv(_MAX_BYTES)
        if not value:
            raise OSError(f"the store at {store} does not answer")
        return value.decode()

    def prepare(self) -> None:
        """Start the process, if it does not run; an error is only logged."""
        with self._lock:
            try:
                self._started()
            except OSError as e:
                _log.warning("the process of stores is started later: %s", e)

    def close(self) -> None:
        """End the process, and with it the last store."""
        with self._lock:
            if self._process is not None and self._channel is not None:
                self._channel.close()
                self._process.kill()
                self._process.wait()

    def _started(self) -> socket.socket:
        if self._channel is None or self._process is None or self._process.poll() is not None:
            if self._channel is not None:
                self._channel.close()
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                )
        return self._channel


def _serve(channel: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # Slurm may send a notice to each process of a task
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    store = None
    while True:
        request, ports, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
        if not request:
            return
        match json.loads(request):
            case {"read": [address, port], "key": key}:
                value = b""
                with suppress(DistError, OSError):
                    socket.create_connection((address, port), CONNECT_S).close()
                    value = TCPStore(address, port, is_master=False, timeout=_IMPORT_TIMEOUT).get(
                        key
                    )
                channel.send(value)
            case {"contents": contents}:
                with socket.socket(fileno=ports[0]) as listening:
                    store = None  # the last one
                    while store is None:
                        try:
                            store = host_store(listening, contents)
                        except OSError as e:
                            print(e, file=sys.stderr)
                            time.sleep(_RETRY_S)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

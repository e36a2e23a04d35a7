"""Relay: connects the workers of one node to the manager server of their replica group.

A replica group of several nodes has one server (`manager_server`), on its first node. On each other
node the agent relays: it passes on what its workers send and what the server answers, over one
authenticated connection, and watches its workers, whose processes only their own node can see. So a
worker needs no other connection than the Unix socket of its node.

Frames of this connection, beside messages with the ``rank`` of a worker:

``lost``     ``rank``, ``why``: a worker's connection has ended.
``stopped``  ``rank``, ``now``: whether a worker is stopped for long, or runs again.
``leave``    ``left_s``: the relay's node is lost within this number of seconds.

The relay names the log entry that placed its group. A connection of a group that the server does
not expect yet waits; one of an earlier group is closed. If the connection ends, the group has lost
its workers on that node, and they have lost their group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpc_elastic.ft import messages
from hpc_elastic.transport.auth import sign
from hpc_elastic.transport.connection import (
    BUFFER_BYTES,
    CONNECTION_ERRORS,
    ClientConnection,
    Listener,
    ServerConnection,
    connect,
)

STORE_KEY = "hpc_elastic/ft/server"
"""Key in a group's store: where its server accepts relays, as ``[address, port]`` in JSON."""
_SESSION = 0
_TRIES, _RETRY_S = 20, 0.25

_log = logging.getLogger(__name__)


def _secret(secret: bytes) -> bytes:
    return sign(secret, "relay of a replica group").encode()


class Relay:
    """The relaying end: one connection to the server of a group.

    Args:
        address: Of the server.
        port: The same.
        secret: The run's.
        entry: Index of the log entry that placed the group.
        host: This node's name.
        on_message: Called with each answer for a worker, and its rank.
        on_end: Called once, with the reason, when the connection has ended.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        entry: int,
        host: str,
        on_message: Callable[[int, messages.Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._where = address, port
        self._secret = _secret(secret)
        self._hello = {"entry": entry, "host": host}
        self._on_message = on_message
        self._on_end = on_end
        self._unsent: list[dict[str, Any]] = []
        """Frames until there is a connection."""
        self._stream: ClientConnection | None = None
        self._running = asyncio.get_running_loop().create_task(self._run())

    def send(self, frame: dict[str, Any]) -> None:
        """Queue a frame."""
        if self._stream is None:
            self._unsent.append(frame)
        else:
            self._stream.send(frame)

    def send_message(self, rank: int, message: messages.Message) -> None:
        """Queue the message of a worker."""
        self.send({**messages.to_frame(message), "rank": rank})

    def close(self) -> None:
        """End the connection, without a report. May be repeated."""
        self._running.cancel()

    async def _run(self) -> None:
        try:
            stream = await self._connect()
        except OSError as e:
            address, port = self._where
            self._on_end(f"the server of the replica group at {address}:{port}: {e}")
            return
        try:
            self._stream = stream
            for frame in self._unsent:
                stream.send(frame)
            self._unsent.clear()
            while True:
                frame = await stream.receive()
                if frame["type"] == "ft":
                    self._on_message(int(frame["rank"]), messages.unpack(frame["message"]))
        except CONNECTION_ERRORS as e:
            self._on_end(f"the connection to the server of the replica group is lost: {e}")
        finally:
            await stream.close()

    async def _connect(self) -> ClientConnection:
        for tries_left in reversed(range(_TRIES)):
            try:
                return await connect(*self._where, self._secret, _SESSION, self._hello)
            except OSError:
                if not tries_left:
                    raise
                await asyncio.sleep(_RETRY_S)
        raise AssertionError


# ---- the server's end


class RemoteWorker:
    """A worker on another node; see `manager_server.WorkerConnection`.

    Attributes:
        rank: Its rank.
        pid: A description of its process.
    """

    def __init__(self, node: RemoteNode, rank: int) -> None:
        self.rank: int | None = None
        self.pid = f"of rank {rank} on {node.host}"
        self._node = node
        self._number = rank
        self._is_stopped = False

    def send(self, message: messages.Message) -> None:
        """Queue a message."""
        self._node.connection.send({**messages.to_frame(message), "rank": self._number})

    def close(self) -> None:
        """Drop the connection to its node, without a report. May be repeated."""
        self._node.close()

    def is_stopped(self, now: float) -> bool:
        """Return whether its node has reported that it is stopped for long."""
        return self._is_stopped

    def set_stopped(self, *, is_stopped: bool) -> None:
        """Record what its node reports."""
        self._is_stopped = is_stopped


@dataclass(eq=False)
class RemoteNode:
    """A relay's connection, and the workers behind it."""

    connection: ServerConnection
    host: str
    entry: int
    workers: dict[int, RemoteWorker] = field(default_factory=dict)
    early: list[dict[str, Any]] = field(default_factory=list)
    """Frames that came before the server expected the group."""
    is_open: bool = True

    def close(self) -> None:
        """Drop the connection."""
        self.is_open = False
        self.connection.close()


class WorkerOwner(Protocol):
    """What `RelayPort` needs of the server of a group."""

    def on_worker_message(self, worker: RemoteWorker, message: messages.Message) -> None:
        """Handle a message of a worker; raise ValueError if it is none, or out of order."""

    def on_worker_disconnect(self, worker: RemoteWorker, reason: str) -> None:
        """Handle the end of a worker."""

    def announce_leave(self, left_s: float) -> None:
        """Announce that a node of the group is lost within this number of seconds."""


class RelayPort:
    """The port of a server for the relays of the other nodes of its group.

    Args:
        address: Address of this node in the network of the run.
        secret: The run's.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._secret = _secret(secret)
        self._listener = Listener(address)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._nodes: dict[ServerConnection, RemoteNode] = {}
        self._connections: set[ServerConnection] = set()
        """All, also those that are not authenticated yet."""
        self._opening: set[asyncio.Task[None]] = set()
        self._entry = -1
        self._owner: WorkerOwner | None = None

    @property
    def where(self) -> tuple[str, int]:
        """Its address and port."""
        return self._address, self._listener.port

    def start(self, owner: WorkerOwner) -> None:
        """Accept relays from now on, in the running event loop."""
        self._owner = owner
        self._listener.serve(self._accept)

    def stop(self) -> None:
        """Close the port and all connections. May be repeated."""
        self._listener.close()
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._connections):
            connection.abort("the server ends")

    def expect(self, entry: int) -> None:
        """Serve the relays of the group that an entry has placed, and of no earlier one."""
        self._entry = entry
        for node in list(self._nodes.values()):
            if node.entry < entry:
                node.close()
            elif node.entry == entry:
                early, node.early = node.early, []
                for frame in early:
                    self._handle(node, frame)

    # ---- what the connections call ------------------------------------------------------

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        entry = int(hello["entry"])
        if entry < self._entry:
            raise ValueError(f"a relay of entry {entry}, and the group is of entry {self._entry}")
        self._nodes[connection] = RemoteNode(connection, str(hello["host"]), entry)

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        node = self._nodes[connection]
        if node.entry > self._entry:
            node.early.append(message)
        elif node.is_open:
            self._handle(node, message)

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
        self._connections.discard(connection)
        node = self._nodes.pop(connection, None)
        if node is None or not node.is_open or self._owner is None:
            return
        node.is_open = False
        for worker in node.workers.values():
            self._owner.on_worker_disconnect(worker, f"{node.host}: {reason}")

    def _handle(self, node: RemoteNode, frame: dict[str, Any]) -> None:
        owner = self._owner
        assert owner is not None
        if frame["type"] == "leave":
            owner.announce_leave(float(frame["left_s"]))
            return
        rank = int(frame["rank"])
        match frame["type"]:
            case "ft":
                worker = node.workers.setdefault(rank, RemoteWorker(node, rank))
                owner.on_worker_message(worker, messages.unpack(frame["message"]))
            case "lost" if rank in node.workers:
                owner.on_worker_disconnect(node.workers.pop(rank), str(frame["why"]))
            case "stopped" if rank in node.workers:
                node.workers[rank].set_stopped(is_stopped=bool(frame["now"]))

    def _accept(self, sock: socket.socket) -> None:
        connection = ServerConnection(self._secret, _SESSION, self, self._buffer)
        self._connections.add(connection)
        task = asyncio.get_running_loop().create_task(self._open(connection, sock))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: ServerConnection, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, sock)
        except OSError as e:
            with contextlib.suppress(OSError):
                sock.close()
            self.on_disconnect(connection, f"it ended as soon as it was accepted: {e}")

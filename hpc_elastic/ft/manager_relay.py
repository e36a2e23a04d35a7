"""Relay: connects the workers of one node to the manager server of their replica group.

A replica group of several nodes has one server (`manager_server`), on its first node. On each other
node the agent relays: it passes on what its workers send and what the server answers, over one
authenticated connection, and watches its workers, whose processes only their own node can see. So a
worker needs no other connection than the Unix socket of its node.

Frames of this connection, beside messages with the ``rank`` of a worker:

``lost``     ``rank``, ``why``: a worker's connection has ended.
``stopped``  ``rank``, ``now``: whether a worker is stopped for long, or runs again.
``leave``    ``left_s``: the relay's node is lost within this number of seconds.

`manager_state` has the rules of both ends; this module has their connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

from hpc_elastic.ft import messages
from hpc_elastic.ft.manager_state import ManagerState, NodeConnection, RemoteNodes
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


class RelayPort(RemoteNodes):
    """The port of a server for the relays of the other nodes of its group.

    Args:
        address: Address of this node in the network of the run.
        secret: The run's.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        super().__init__()
        self._address = address
        self._secret = _secret(secret)
        self._listener = Listener(address)
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._connections: set[ServerConnection] = set()
        """All, also those that are not authenticated yet."""
        self._opening: set[asyncio.Task[None]] = set()

    @property
    def where(self) -> tuple[str, int]:
        """Its address and port."""
        return self._address, self._listener.port

    def start(self, owner: ManagerState) -> None:
        """Accept relays from now on, in the running event loop."""
        super().start(owner)
        self._listener.serve(self._accept)

    def stop(self) -> None:
        """Close the port and all connections. May be repeated."""
        self._listener.close()
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._connections):
            connection.abort("the server ends")

    def on_disconnect(self, connection: NodeConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
        self._connections -= {connection}
        super().on_disconnect(connection, reason)

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

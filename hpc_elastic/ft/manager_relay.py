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

In a run, the leader notices that a node is lost. Elsewhere a relay is a process of its own
(`manager_server`), and both ends send heartbeats:

``beat``     answered by the server; one that receives none for `SILENCE_S` gives up the other end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from hpc_elastic.ft import messages
from hpc_elastic.ft.manager_state import ManagerState, NodeConnection, RemoteNodes
from hpc_elastic.transport.auth import AuthenticationError, sign
from hpc_elastic.transport.connection import (
    BEATS_PER_SILENCE,
    CONNECTION_ERRORS,
    ClientConnection,
    Listener,
    connect,
)

STORE_KEY = "hpc_elastic/ft/server"
"""Key in a group's store: where its server accepts relays, as ``[address, port]`` in JSON."""
SILENCE_S = 5.0
"""How long one end waits for a sign of the other, where there is no leader."""
_SESSION = 0
_TRIES, _RETRY_S = 20, 0.25

_log = logging.getLogger(__name__)


def _secret(secret: bytes) -> bytes:
    return sign(secret, "relay of a replica group").encode()


class Relay:
    """The relaying end: one connection to the server of a group.

    ``entry`` is the index of the log entry that placed the group. ``on_message`` is called with
    each answer for a worker and its rank, ``on_end`` once, with the reason, when the connection has
    ended. A server that is silent for ``silence_s`` is given up, and gets heartbeats; None: a
    leader does that.
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
        *,
        silence_s: float | None = None,
    ) -> None:
        self._silence_s = silence_s
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
            reason = f"the server of the replica group at {address}:{port}: {e}"
            if self._silence_s is not None and isinstance(e, AuthenticationError):
                reason += ". Hosts with homes of their own need the same ~/.config/hpc_elastic/key"
            self._on_end(reason)
            return
        beating = None
        try:
            self._stream = stream
            for frame in self._unsent:
                stream.send(frame)
            self._unsent.clear()
            if self._silence_s is not None:
                beating = asyncio.create_task(self._send_heartbeats(stream, self._silence_s))
            while True:
                frame = await stream.receive()
                if frame["type"] == "ft":
                    self._on_message(int(frame["rank"]), messages.unpack(frame["message"]))
        except CONNECTION_ERRORS as e:
            self._on_end(f"the connection to the server of the replica group is lost: {e}")
        finally:
            if beating is not None:
                beating.cancel()
            await stream.close()

    async def _send_heartbeats(self, stream: ClientConnection, silence_s: float) -> None:
        await stream.send_heartbeats("beat", lambda: silence_s)
        _log.warning("the server of the replica group is silent for %g s", silence_s)

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

    A relay that is silent for ``silence_s`` is lost; None: a leader detects that. ``listener`` is
    the port, if it is open already.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        *,
        listener: Listener | None = None,
        silence_s: float | None = None,
    ) -> None:
        super().__init__()
        self._address = address
        self._secret = _secret(secret)
        self._listener = listener or Listener(address)
        self._silence_s = silence_s
        self._heard_at: dict[NodeConnection, float] = {}
        self._checker: asyncio.TimerHandle | None = None

    @property
    def where(self) -> tuple[str, int]:
        """Its address and port."""
        return self._address, self._listener.port

    def start(self, owner: ManagerState) -> None:
        """Accept relays from now on, in the running event loop."""
        super().start(owner)
        self._listener.serve(self._secret, _SESSION, self)
        if self._silence_s is not None:
            self._check_for_silence(self._silence_s)

    def stop(self) -> None:
        """Close the port and all connections. May be repeated."""
        self._listener.close()
        if self._checker is not None:
            self._checker.cancel()

    def on_connect(self, connection: NodeConnection, hello: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        super().on_connect(connection, hello)
        self._heard_at[connection] = asyncio.get_running_loop().time()

    def on_message(self, connection: NodeConnection, message: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""
        self._heard_at[connection] = asyncio.get_running_loop().time()
        if message["type"] == "beat":
            connection.send(message)
        else:
            super().on_message(connection, message)

    def _check_for_silence(self, silence_s: float) -> None:
        loop = asyncio.get_running_loop()
        for connection, heard_at in list(self._heard_at.items()):
            if loop.time() - heard_at >= silence_s:
                connection.abort(f"it is silent for {silence_s:g} s")
        pause_s = silence_s / BEATS_PER_SILENCE
        self._checker = loop.call_later(pause_s, self._check_for_silence, silence_s)

    def on_disconnect(self, connection: NodeConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
        self._heard_at.pop(connection, None)
        super().on_disconnect(connection, reason)

"""Authenticated connections over asyncio, both ends: the handshake and frames of `auth`.

The client's end is a `ClientConnection`, which a task reads; the server's is a `ServerConnection`,
which calls back.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from hpc_elastic.transport.auth import (
    HANDSHAKE_TIMEOUT_S,
    MAX_FRAME_BYTES,
    MAX_UNPROVED_BYTES,
    WELCOME,
    AuthenticationError,
    FrameSigner,
    ServerHandshake,
    answer_greeting,
)

CONNECT_TIMEOUT_S = 1.5
"""A node that takes longer is down: the system accepts connections even of a busy process."""
WELCOME_TIMEOUT_S = 30.0
"""A leader that ten thousand agents come to at once must not be asked twice by each."""
_CLOSE_TIMEOUT_S = 1.0
BUFFER_BYTES = 1 << 16

CONNECTION_ERRORS = (OSError, ValueError, KeyError, TypeError)
"""Raised where a connection has ended, or its peer is none of ours (`AuthenticationError`)."""


class ClientConnection:
    """Sends and receives messages; a message is a JSON object with a ``type``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, signer: FrameSigner
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._signer = signer

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; a connection that is gone shows when the next one is received."""
        if not self._writer.is_closing():
            self._writer.write(self._signer.seal(message))

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ConnectionError: the peer is gone.
            AuthenticationError: the frame is not the peer's.
        """
        return self._signer.open(await _line(self._reader))

    async def close(self) -> None:
        """Send what was queued and close the connection; drop it if the peer does not read.

        The transport is gone when this returns, which takes further turns of the event loop.
        """
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except OSError:
            pass
        finally:
            self._writer.transport.abort()  # out of time or cancelled; else it changes nothing

    def abort(self) -> None:
        """Drop the connection at once: the peer does not read any more."""
        self._writer.transport.abort()


async def connect(
    address: str, port: int, secret: bytes, epoch: int, hello: dict[str, Any]
) -> ClientConnection:
    """Connect to the leader of an epoch; return once it has proved that it holds the secret.

    Raises:
        OSError: nobody listens there, or nobody answers in time.
        AuthenticationError: another process listens there.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_FRAME_BYTES)
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            first = {"type": "hello", "agent": hello}
            answer, signer = answer_greeting(await _line(reader), secret, epoch, first)
            writer.write(answer)
            connection = ClientConnection(reader, writer, signer)
            await connection.receive()  # the welcome
            return connection
    except BaseException:  # cancelled, too: nobody else knows of the connection yet
        writer.transport.abort()
        raise


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as e:
        raise AuthenticationError("longer than a frame may be") from e
    except asyncio.IncompleteReadError as e:
        raise ConnectionResetError("the peer closed the connection") from e
    return line


class ConnectionOwner(Protocol):
    """The leader, as a `ServerConnection` reports to it. An error that it raises ends that one."""

    def arrived(self, visitor: ServerConnection, hello: dict[str, Any]) -> None:
        """A visitor has proved to be an agent, which says this of itself."""

    def said(self, visitor: ServerConnection, message: dict[str, Any]) -> None:
        """An agent has sent a message."""

    def left(self, visitor: ServerConnection, why: str) -> None:
        """A connection has ended, whether it was an agent's or not."""


class ServerConnection(asyncio.BufferedProtocol):
    """The server's end of a connection: unauthenticated, until the client's hello has been read.

    No task waits for each, and all read into one buffer of the server (by default, asyncio makes
    one of 256 KiB for each message, which costs more than its signature): ten thousand come at
    once.
    """

    def __init__(
        self, secret: bytes, epoch: int, host: ConnectionOwner, buffer: memoryview
    ) -> None:
        self._handshake = ServerHandshake(secret, epoch)
        self._host = host
        self._buffer = buffer
        self._pending = b""
        self._signer: FrameSigner | None = None
        """None until the client has proved that it holds the secret."""
        self._deadline: asyncio.TimerHandle | None = None
        """Until when it must have."""
        self._transport: asyncio.Transport | None = None
        self._ending: str | None = None
        """Why the connection is being ended from this side."""

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; a connection that is gone is reported by `ConnectionOwner.left`."""
        if self._ending is None:
            assert self._transport is not None and self._signer is not None
            self._transport.write(self._signer.seal(message))

    def close(self) -> None:
        """Send what was queued and close the connection; drop it if the peer does not read."""
        self._ending = self._ending or "closed by the leader"
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, why: str) -> None:
        """Drop the connection at once; nothing that it still says is heard."""
        self._ending = self._ending or why
        if self._transport is not None:
            self._transport.abort()

    # ---- what asyncio calls -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._ending is not None:
            transport.abort()
            return
        transport.set_write_buffer_limits(MAX_FRAME_BYTES)
        later = asyncio.get_running_loop().call_later
        self._deadline = later(HANDSHAKE_TIMEOUT_S, self.abort, "no handshake in time")
        transport.write(self._handshake.greeting)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Read into the common buffer, which `buffer_updated` leaves free again."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read every line that is complete."""
        *lines, self._pending = (self._pending + self._buffer[:nbytes]).split(b"\n")
        try:
            for line in lines:
                if self._ending is None:
                    self._read(line)
            if len(self._pending) > (MAX_FRAME_BYTES if self._signer else MAX_UNPROVED_BYTES):
                raise AuthenticationError("longer than a frame may be")
        except CONNECTION_ERRORS as e:
            self.abort(str(e) or type(e).__name__)

    def pause_writing(self) -> None:
        """A whole frame's worth of messages waits: the peer does not read."""
        self.abort("it does not read")

    def connection_lost(self, error: Exception | None) -> None:
        """Report it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._ending = self._ending or (str(error) if error else "its connection closed")
        self._host.left(self, self._ending)

    def _read(self, line: bytes) -> None:
        if self._signer is not None:
            self._host.said(self, self._signer.open(line))
        elif (hello := self._handshake.read(line)) is not None:
            agent, self._signer = hello["agent"], self._handshake.signer
            if self._deadline is not None:
                self._deadline.cancel()
            self.send(WELCOME)
            self._host.arrived(self, agent)


# ---- The leader's port: takes connections, from before an epoch is claimed until its leader goes


_BACKLOG = 65_535
"""As many as the system allows (net.core.somaxconn): ten thousand agents come at once."""
_ACCEPTS_A_TURN = 64
_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


class Listener:
    """An open port; `asyncio.Server` would lose a connection that comes just before its end."""

    def __init__(self, address: str, port: int = 0) -> None:
        """Open the port (0: any free one); ``::`` takes IPv4 as well.

        Raises:
            OSError: the address is not this node's, or the port is taken.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server(
            (address, port),
            family=family,
            backlog=_BACKLOG,
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
        self._socket.setblocking(False)
        self._open = True

    @property
    def port(self) -> int:
        """The port's number."""
        return int(self._socket.getsockname()[1])

    def serve(self, take: Callable[[socket.socket], None]) -> None:
        """Hand every connection to ``take``, from now on, in the running event loop."""
        asyncio.get_running_loop().add_reader(self._socket, self._accept, take)

    def close(self) -> None:
        """Close the port. May be repeated."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _accept(self, take: Callable[[socket.socket], None]) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                connection, _peer = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:  # most likely too many open files: the port would stay readable
                _log.warning("no connection can be taken for now: %s", e)
                self._pause(take)
                return
            connection.setblocking(False)
            # asyncio does so only for sockets that name their protocol, which accepted ones do not
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            take(connection)

    def _pause(self, take: Callable[[socket.socket], None]) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.call_later(_PAUSE_S, lambda: self.serve(take) if self._open else None)

"""One authenticated connection, both ends of it: signed frames (`auth`) over asyncio.

The agent's end is a `ClientConnection`, which a task reads; the leader's is a `ServerConnection`,
which calls back.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable
from typing import Any, Protocol

from hpc_elastic.transport.auth import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    BadFrameError,
    FrameSigner,
    new_nonce,
    session_key,
)

HANDSHAKE_TIMEOUT_S = 5.0
"""A visitor that takes longer to prove who it is is none of the run's agents."""
CONNECT_TIMEOUT_S = 1.5
"""A node that takes longer is down: the system accepts connections even of a busy process."""
WELCOME_TIMEOUT_S = 30.0
"""A leader that ten thousand agents come to at once must not be asked twice by each."""
_CLOSE_TIMEOUT_S = 1.0
BUFFER_BYTES = 1 << 16
_STRANGER_BYTES = 4096
"""Nobody may make the leader keep more before it has proved who it is."""

NO_AGENT_OF_OURS = (OSError, BadFrameError, ValueError, KeyError, TypeError)
"""What a connection shows that has ended, or never was an agent's."""


class ClientConnection:
    """Sends and receives messages; a message is a JSON object with a ``type``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cipher: FrameSigner
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._cipher = cipher

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; a connection that is gone shows when the next one is received."""
        if not self._writer.is_closing():
            self._writer.write(self._cipher.seal(message))

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ConnectionError: the peer is gone.
            BadFrameError: the frame is not the peer's.
        """
        return self._cipher.open(await _line(self._reader))

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
    """Connect to the leader of an epoch; return once he has proved that he is.

    Raises:
        OSError: nobody listens there, or nobody answers in time.
        BadFrameError: somebody else listens there.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_FRAME_BYTES)
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            return await _introduce(reader, writer, secret, epoch, hello)
    except BaseException:  # cancelled, too: nobody else knows of the connection yet
        writer.transport.abort()
        raise


async def _introduce(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    epoch: int,
    hello: dict[str, Any],
) -> ClientConnection:
    mine = new_nonce()
    try:
        theirs = str(json.loads(await _line(reader))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise BadFrameError("no greeting") from e
    if not re.fullmatch(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}", theirs):
        raise BadFrameError("no nonce")
    writer.write(mine.encode() + b"\n")
    stream = ClientConnection(
        reader, writer, FrameSigner(session_key(secret, epoch, theirs, mine), "agent")
    )
    stream.send({"type": "hello", "agent": hello})
    await stream.receive()  # the welcome, under the key that only the run's leader can have
    return stream


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as e:
        raise BadFrameError("longer than a frame may be") from e
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
    """The leader's end of a connection: a stranger, until it has proved to be an agent.

    No task waits for each, and all read into the leader's one buffer (by default, asyncio makes one
    of 256 KiB for each message, which costs more than its signature): ten thousand come at once.
    """

    def __init__(
        self, secret: bytes, epoch: int, host: ConnectionOwner, buffer: memoryview
    ) -> None:
        self._secret = secret
        self._epoch = epoch
        self._host = host
        self._buffer = buffer
        self._nonce = new_nonce()
        self._pending = b""
        self._cipher: FrameSigner | None = None
        self._deadline: asyncio.TimerHandle | None = None
        """Until when it must have proved who it is; None once it has."""
        self._transport: asyncio.Transport | None = None
        self._ending: str | None = None
        """Why the connection is being ended from this side."""

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; a connection that is gone is reported by `ConnectionOwner.left`."""
        if self._ending is None:
            assert self._transport is not None and self._cipher is not None
            self._transport.write(self._cipher.seal(message))

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
        greeting = {"nonce": self._nonce, "epoch": self._epoch}
        transport.write(json.dumps(greeting).encode() + b"\n")

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
            if len(self._pending) > (MAX_FRAME_BYTES if self._is_agent else _STRANGER_BYTES):
                raise BadFrameError("longer than a frame may be")
        except NO_AGENT_OF_OURS as e:
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

    # ---- the handshake, and after -------------------------------------------------------

    @property
    def _is_agent(self) -> bool:
        return self._cipher is not None and self._deadline is None

    def _read(self, line: bytes) -> None:
        if self._cipher is None:
            if len(line) != 2 * NONCE_BYTES:
                raise BadFrameError("no nonce")
            key = session_key(self._secret, self._epoch, self._nonce, line.decode())
            self._cipher = FrameSigner(key, "leader")
        elif self._deadline is not None:
            hello = self._cipher.open(line)["agent"]
            self._deadline.cancel()
            self._deadline = None
            self.send({"type": "welcome"})
            self._host.arrived(self, hello)
        else:
            self._host.said(self, self._cipher.open(line))


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

"""One authenticated connection, both ends of it: signed frames (`wire`) over asyncio.

The agent's end is a `Stream`, which a task reads; the leader's is a `Visitor`, which calls back.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Protocol

from hpc_elastic.net.wire import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    BadFrameError,
    Cipher,
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


class Stream:
    """Sends and receives messages; a message is a JSON object with a ``type``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cipher: Cipher
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
) -> Stream:
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
) -> Stream:
    mine = new_nonce()
    try:
        theirs = str(json.loads(await _line(reader))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise BadFrameError("no greeting") from e
    if not re.fullmatch(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}", theirs):
        raise BadFrameError("no nonce")
    writer.write(mine.encode() + b"\n")
    stream = Stream(reader, writer, Cipher(session_key(secret, epoch, theirs, mine), "agent"))
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


class Host(Protocol):
    """The leader, as a `Visitor` reports to it. An error that it raises ends that connection."""

    def arrived(self, visitor: Visitor, hello: dict[str, Any]) -> None:
        """A visitor has proved to be an agent, which says this of itself."""

    def said(self, visitor: Visitor, message: dict[str, Any]) -> None:
        """An agent has sent a message."""

    def left(self, visitor: Visitor, why: str) -> None:
        """A connection has ended, whether it was an agent's or not."""


class Visitor(asyncio.BufferedProtocol):
    """The leader's end of a connection: a stranger, until it has proved to be an agent.

    No task waits for each, and all read into the leader's one buffer (by default, asyncio makes one
    of 256 KiB for each message, which costs more than its signature): ten thousand come at once.
    """

    def __init__(self, secret: bytes, epoch: int, host: Host, buffer: memoryview) -> None:
        self._secret = secret
        self._epoch = epoch
        self._host = host
        self._buffer = buffer
        self._nonce = new_nonce()
        self._pending = b""
        self._cipher: Cipher | None = None
        self._deadline: asyncio.TimerHandle | None = None
        """Until when it must have proved who it is; None once it has."""
        self._transport: asyncio.Transport | None = None
        self._ending: str | None = None
        """Why the connection is being ended from this side."""

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; a connection that is gone is reported by `Host.left`."""
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
            self._cipher = Cipher(key, "leader")
        elif self._deadline is not None:
            hello = self._cipher.open(line)["agent"]
            self._deadline.cancel()
            self._deadline = None
            self.send({"type": "welcome"})
            self._host.arrived(self, hello)
        else:
            self._host.said(self, self._cipher.open(line))

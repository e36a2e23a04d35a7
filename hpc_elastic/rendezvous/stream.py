"""One authenticated connection: signed frames over an asyncio stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hpc_elastic.rendezvous.wire import (
    MAX_FRAME_BYTES,
    NONCE_BYTES,
    BadFrameError,
    Cipher,
    new_nonce,
    session_key,
)

HANDSHAKE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


class Stream:
    """Sends and receives messages; a message is a JSON object with a ``type``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cipher: Cipher
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._cipher = cipher

    def send(self, type_: str, **fields: Any) -> None:
        """Queue a message; a connection that is gone shows when the next one is received."""
        if not self._writer.is_closing():
            self._writer.write(self._cipher.seal({"type": type_, **fields}))

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            ConnectionError: the peer is gone.
            BadFrameError: the frame is not the peer's.
        """
        return self._cipher.open(await _line(self._reader))

    async def close(self) -> None:
        """Send what was queued and close the connection; drop it if the peer does not read."""
        self._writer.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        except OSError:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once: the peer does not read any more."""
        self._writer.transport.abort()


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, epoch: int
) -> Stream:
    """Take the leader's part of the handshake (see `wire`); the first message proves the agent.

    Raises:
        ConnectionError, TimeoutError, BadFrameError: whoever connected is none of the run's agents.
    """
    mine = new_nonce()
    writer.write(json.dumps({"nonce": mine, "epoch": epoch}).encode() + b"\n")
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        theirs = (await _line(reader)).decode(errors="replace").strip()
    if len(theirs) != 2 * NONCE_BYTES:
        raise BadFrameError("no nonce")
    return Stream(reader, writer, Cipher(session_key(secret, epoch, mine, theirs), "leader"))


async def connect(address: str, port: int, secret: bytes, epoch: int) -> Stream:
    """Connect to the leader of an epoch; its first message proves that it is.

    Raises:
        OSError: nobody listens there.
        TimeoutError: no answer in time.
        BadFrameError: somebody else listens there.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_FRAME_BYTES)
        greeting = await _line(reader)
    mine = new_nonce()
    try:
        theirs = str(json.loads(greeting)["nonce"])
    except (ValueError, KeyError, TypeError) as e:
        writer.close()
        raise BadFrameError("no greeting") from e
    writer.write(mine.encode() + b"\n")
    return Stream(reader, writer, Cipher(session_key(secret, epoch, theirs, mine), "agent"))


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as e:
        raise BadFrameError("longer than a frame may be") from e
    except asyncio.IncompleteReadError as e:
        raise ConnectionResetError("the peer closed the connection") from e
    return line

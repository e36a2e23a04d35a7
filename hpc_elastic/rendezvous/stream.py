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
        """Send what was queued and close the connection; drop it if the peer does not read."""
        await close(self._writer)

    def abort(self) -> None:
        """Drop the connection at once: the peer does not read any more."""
        self._writer.transport.abort()


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, epoch: int
) -> tuple[Stream, dict[str, Any]]:
    """Take the leader's part of the handshake (see `wire`).

    Returns:
        The connection, and what the agent says of itself.

    Raises:
        OSError, BadFrameError, ValueError, KeyError: whoever connected is none of the run's agents.
    """
    mine = new_nonce()
    writer.write(json.dumps({"nonce": mine, "epoch": epoch}).encode() + b"\n")
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        theirs = (await _line(reader)).decode(errors="replace").strip()
        if len(theirs) != 2 * NONCE_BYTES:
            raise BadFrameError("no nonce")
        key = session_key(secret, epoch, mine, theirs)
        stream = Stream(reader, writer, Cipher(key, "leader"))
        hello: dict[str, Any] = (await stream.receive())["agent"]
    stream.send({"type": "welcome"})
    return stream, hello


async def connect(
    address: str, port: int, secret: bytes, epoch: int, hello: dict[str, Any]
) -> Stream:
    """Connect to the leader of an epoch; return once he has proved that he is.

    Raises:
        OSError: nobody listens there, or nobody answers in time.
        BadFrameError: somebody else listens there.
    """
    async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_FRAME_BYTES)
        try:
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
    except (ValueError, KeyError, TypeError) as e:
        raise BadFrameError("no greeting") from e
    writer.write(mine.encode() + b"\n")
    stream = Stream(reader, writer, Cipher(session_key(secret, epoch, theirs, mine), "agent"))
    stream.send({"type": "hello", "agent": hello})
    await stream.receive()  # the welcome, under the key that only the run's leader can have
    return stream


async def close(writer: asyncio.StreamWriter) -> None:
    """Send what was queued and close a connection; drop it if the peer does not read.

    The transport is gone when this returns, which takes further turns of the event loop.
    """
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await writer.wait_closed()
    except OSError:
        pass
    finally:
        writer.transport.abort()  # out of time or cancelled; else it changes nothing


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as e:
        raise BadFrameError("longer than a frame may be") from e
    except asyncio.IncompleteReadError as e:
        raise ConnectionResetError("the peer closed the connection") from e
    return line

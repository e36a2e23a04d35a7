"""Authenticated connections over blocking sockets: the handshake and frames of `auth`.

Between two messages either side may send bytes that are not signed, if a message has named their
checksum.
"""

from __future__ import annotations

import socket
import time
from typing import Any, BinaryIO

from hpc_elastic.transport.auth import (
    HANDSHAKE_TIMEOUT_S,
    MAX_UNPROVED_BYTES,
    WELCOME,
    AuthenticationError,
    FrameSigner,
    ServerHandshake,
    answer_greeting,
)

MAX_MESSAGE_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 5.0


class SignedSocket:
    """One end of a connection; both ends have proved that they hold a secret.

    Any method raises an OSError if the connection has ended, or the peer is silent for longer
    than the timeout. After an error the connection is unusable.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._pending = bytearray()
        self._signer: FrameSigner

    @classmethod
    def connect(
        cls, address: tuple[str, int], secret: bytes, context: str, *, timeout_s: float
    ) -> SignedSocket:
        """Connect to a server.

        Args:
            address: Host and port.
            secret: The secret of both sides.
            context: Purpose of the connection; the same on both sides.
            timeout_s: Limit of the handshake, and of the peer's silence later.

        Raises:
            AuthenticationError: The server does not hold the secret.
        """
        self = cls(socket.create_connection(address, _CONNECT_TIMEOUT_S), timeout_s)
        try:
            until = time.monotonic() + timeout_s
            greeting = self._line(MAX_UNPROVED_BYTES, until)
            answer, self._signer = answer_greeting(greeting, secret, context, {})
            self._signer.max_bytes = MAX_MESSAGE_BYTES
            self._sock.sendall(answer)
            self._signer.open(self._line(MAX_UNPROVED_BYTES, until))
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def accept(
        cls, sock: socket.socket, secret: bytes, context: str, *, timeout_s: float
    ) -> SignedSocket:
        """Authenticate a client that has connected; the arguments are those of `connect`.

        Raises:
            AuthenticationError: The client does not hold the secret.
            TimeoutError: It has not proved that it does within `HANDSHAKE_TIMEOUT_S`.
        """
        self = cls(sock, timeout_s)
        handshake, until = ServerHandshake(secret, context), time.monotonic() + HANDSHAKE_TIMEOUT_S
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock.sendall(handshake.greeting)
        while handshake.read(self._line(MAX_UNPROVED_BYTES, until)) is None:
            pass
        self._signer = handshake.signer
        self._signer.max_bytes = MAX_MESSAGE_BYTES
        self.send(WELCOME)
        return self

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises a ValueError if it is too long."""
        self._sock.settimeout(self._timeout_s)
        self._sock.sendall(self._signer.seal(message))

    def receive(self) -> dict[str, Any]:
        """Return the next message; raises an AuthenticationError if it is not the peer's."""
        return self._signer.open(self._line(MAX_MESSAGE_BYTES))

    def send_file(self, file: BinaryIO, num_bytes: int) -> int:
        """Send the next bytes of a file, unsigned; return their number, less at its end."""
        self._sock.settimeout(self._timeout_s)
        return self._sock.sendfile(file, count=num_bytes)

    def receive_into(self, block: memoryview) -> int:
        """Receive unsigned bytes into a block; return their number, at least 1."""
        if not self._pending:
            self._sock.settimeout(self._timeout_s)
            return self._receive(block)
        got = min(len(block), len(self._pending))
        block[:got] = self._pending[:got]
        del self._pending[:got]
        return got

    def close(self) -> None:
        """Close the connection. May be repeated."""
        self._sock.close()

    def _line(self, max_bytes: int, until: float | None = None) -> bytes:
        """Return the next line without its end, all of it received by a time if one is given."""
        searched, block = 0, memoryview(bytearray(1 << 16))
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > max_bytes:
                raise AuthenticationError("longer than a message may be")
            left_s = self._timeout_s if until is None else until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the peer has not proved in time that it holds the secret")
            self._sock.settimeout(left_s)
            self._pending += block[: self._receive(block)]
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line

    def _receive(self, block: memoryview) -> int:
        num_bytes = self._sock.recv_into(block)
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        return num_bytes

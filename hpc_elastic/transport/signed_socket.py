"""Authenticated connections over blocking sockets: the handshake and frames of `auth`.

Between two messages either side may send bytes that are not signed, if a message has named their
checksum. A `SocketServer` has a thread for each connection that is authenticated; until then all of
them are handled by the event loop of its `Listener`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

from hpc_elastic.transport.auth import (
    MAX_UNPROVED_BYTES,
    AuthenticationError,
    FrameSigner,
    answer_greeting,
)
from hpc_elastic.transport.connection import Listener, ServerConnection

MAX_MESSAGE_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 5.0
_TRIES = 5
_RETRY_S = 0.05

_log = logging.getLogger(__name__)


def prove(sock: socket.socket, secret: bytes, context: object, *, timeout_s: float) -> FrameSigner:
    """Carry out the client's part of the handshake on a connection (blocking).

    Raises:
        AuthenticationError: The server does not hold the secret.
        ConnectionResetError: It has ended the connection: this side does not hold the secret, or
            strangers have taken its places. Connect again.
        OSError: It does not answer in time.
    """
    pending, until = bytearray(), time.monotonic() + timeout_s

    def read_line() -> bytes:
        while (end := pending.find(b"\n")) < 0:
            if len(pending) > MAX_UNPROVED_BYTES:
                raise AuthenticationError("longer than a message may be")
            if (left_s := until - time.monotonic()) <= 0:
                raise TimeoutError("the peer has not proved in time that it holds the secret")
            sock.settimeout(left_s)
            received = sock.recv(MAX_UNPROVED_BYTES)
            if not received:
                raise ConnectionResetError("the peer closed the connection")
            pending.extend(received)
        line = bytes(pending[:end])
        del pending[: end + 1]
        return line

    answer, signer = answer_greeting(read_line(), secret, context, {"type": "hello", "agent": {}})
    sock.sendall(answer)
    signer.open(read_line())
    return signer


class SignedSocket:
    """One end of a connection; both ends have proved that they hold a secret.

    Any method raises an OSError if the connection has ended, or the peer is silent for longer than
    the timeout. After an error the connection is unusable.
    """

    def __init__(self, sock: socket.socket, signer: FrameSigner, timeout_s: float) -> None:
        self._sock = sock
        self._signer = signer
        signer.max_bytes = MAX_MESSAGE_BYTES
        self._timeout_s = timeout_s
        self._pending = bytearray()
        sock.settimeout(timeout_s)

    @classmethod
    def connect(
        cls, address: tuple[str, int], secret: bytes, context: str, *, timeout_s: float
    ) -> SignedSocket:
        """Connect to a `SocketServer`; both sides give the same secret and purpose (``context``).

        The timeout limits the handshake, and the peer's silence later. Raises AuthenticationError
        if one side does not hold the secret.
        """

        def connected() -> socket.socket:
            return socket.create_connection(address, _CONNECT_TIMEOUT_S)

        sock, signer = connect_and_prove(connected, secret, context, timeout_s=timeout_s)
        return cls(sock, signer, timeout_s)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises a ValueError if it is too long."""
        self._sock.sendall(self._signer.seal(message))

    def receive(self) -> dict[str, Any]:
        """Return the next message; raises an AuthenticationError if it is not the peer's."""
        searched, block = 0, memoryview(bytearray(1 << 16))
        while (end := self._pending.find(b"\n", searched)) < 0:
            searched = len(self._pending)
            if searched > MAX_MESSAGE_BYTES:
                raise AuthenticationError("longer than a message may be")
            self._pending += block[: self._receive(block)]
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return self._signer.open(line)

    def send_file(self, file: BinaryIO, num_bytes: int) -> int:
        """Send the next bytes of a file, unsigned; return their number, less at its end."""
        return self._sock.sendfile(file, count=num_bytes)

    def receive_into(self, block: memoryview) -> int:
        """Receive unsigned bytes into a block; return their number, at least 1."""
        if not self._pending:
            return self._receive(block)
        got = min(len(block), len(self._pending))
        block[:got] = self._pending[:got]
        del self._pending[:got]
        return got

    def close(self) -> None:
        """Close the connection. May be repeated."""
        self._sock.close()

    def _receive(self, block: memoryview) -> int:
        num_bytes = self._sock.recv_into(block)
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        return num_bytes


def connect_and_prove(
    connected: Callable[[], socket.socket], secret: bytes, context: object, *, timeout_s: float
) -> tuple[socket.socket, FrameSigner]:
    """Return a connection after the handshake; try again if strangers have taken all places.

    ``connected`` returns a fresh connection; the other arguments are those of `prove`. Raises
    AuthenticationError if one side does not hold the secret, and OSError if there is no connection.
    """
    number = 0
    while True:
        sock = connected()
        try:
            return sock, prove(sock, secret, context, timeout_s=timeout_s)
        except ConnectionResetError as e:
            sock.close()
            number += 1
            if number == _TRIES:
                raise AuthenticationError("it does not accept our key") from e
            time.sleep(_RETRY_S)
        except BaseException:
            sock.close()
            raise


class SocketServer:
    """A port whose connections are served by a thread each, once they are authenticated.

    The port is opened on the first of these numeric addresses that is this machine's; OSError is
    raised if none is. ``serve`` is called with a connection and the signer of this end in a thread;
    the connection is closed when it returns. An OSError or ValueError ends the connection, too.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        secret: bytes,
        context: object,
        serve: Callable[[socket.socket, FrameSigner], None],
        *,
        name: str,
    ) -> None:
        self._serve, self._name = serve, name
        self._listener, address = _open_first(addresses)
        self.address = (address, self._listener.port)
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._listener.serve, secret, context, self)
        self._acceptor = threading.Thread(target=self._run_loop, name=f"{name}-accept", daemon=True)
        self._acceptor.start()

    def close(self, *, cut: bool = False, wait: bool = False) -> None:
        """Accept no more connections. May be repeated.

        ``cut`` ends those that are served, too; ``wait`` returns once their threads have ended.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._listener.close)
            self._loop.call_soon_threadsafe(self._loop.stop)
        if wait:
            self._acceptor.join()
        with self._lock:
            serving = dict(self._serving)
        for thread, sock in serving.items():
            if cut:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            if wait:
                thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._listener.wait_closed())
        finally:
            self._loop.close()

    # ---- `ConnectionOwner`

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """Serve an authenticated connection in a thread."""
        sock, signer = connection.detach()
        thread = threading.Thread(
            target=self._serve_one, args=(sock, signer), name=self._name, daemon=True
        )
        with self._lock:
            self._serving[thread] = sock
        try:
            thread.start()
        except RuntimeError as e:
            _log.warning("a connection cannot be served: %s", e)
            self._end_connection(thread, sock)

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """Its thread has the connection."""

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """Its thread has the connection."""

    def _serve_one(self, sock: socket.socket, signer: FrameSigner) -> None:
        try:
            self._serve(sock, signer)
        except (OSError, ValueError) as e:
            _log.debug("a connection has ended: %s", e)
        finally:
            self._end_connection(threading.current_thread(), sock)

    def _end_connection(self, thread: threading.Thread, sock: socket.socket) -> None:
        with self._lock:
            self._serving.pop(thread, None)
        with contextlib.suppress(OSError):  # for both sides, even if a forked process has it too
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def _open_first(addresses: Iterable[str]) -> tuple[Listener, str]:
    error = OSError("no address was given")
    for address in addresses:
        try:
            return Listener(address), address
        except OSError as e:
            error = e
    raise error

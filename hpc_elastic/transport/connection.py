"""Authenticated connections, both ends: the handshake and frames of `auth`.

Over asyncio the client's end is a `ClientConnection`, which a task reads; the server's is a
`ServerConnection`, which calls back. All ports are a `Listener`'s.

Over blocking sockets both ends are a `SignedSocket`. Between two messages either side may send
bytes that are not signed, if a message has named their checksum. A `SocketServer` has a thread for
each connection that is authenticated; until then the event loop of its `Listener` handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, BinaryIO, Protocol

from hpc_elastic.transport import socket_filter
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
WELCOME_TIMEOUT_S = 30.0  # long, so that ten thousand agents that connect at once do not all retry
_CLOSE_TIMEOUT_S = 1.0
BEATS_PER_SILENCE = 5
BUFFER_BYTES = 1 << 16
_ACCEPTS_A_TURN = 64
_ACCEPT_PAUSE_S = 0.2
MAX_MESSAGE_BYTES = 256 << 20
_SOCKET_CONNECT_S = 5.0
_TRIES, _RETRY_S = 5, 0.05
_MOST_UNPROVED = 4096
"""Connections to one port whose peers have not proved yet that they hold the secret. Thousands of
agents may connect to a leader at once."""

_log = logging.getLogger(__name__)

CONNECTION_ERRORS = (OSError, ValueError, KeyError, TypeError)
"""Raised where a connection has ended, or its peer is foreign (`AuthenticationError`)."""


class ClientConnection:
    """Sends and receives messages; a message is a JSON object with a ``type``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, signer: FrameSigner
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._signer = signer
        self._has_received = False

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; the end of the connection shows when the next one is received."""
        if not self._writer.is_closing():
            self._writer.write(self._signer.seal(message))

    async def receive(self) -> dict[str, Any]:
        """Return the next message; ConnectionError at the end, AuthenticationError if forged."""
        message = self._signer.open(await _read_line(self._reader))
        self._has_received = True
        return message

    async def send_heartbeats(self, type_: str, silence_s: Callable[[], float]) -> None:
        """Send heartbeats; drop the connection, and return, if the peer is silent for this long."""
        silent_s = 0.0
        while silent_s < silence_s():
            self.send({"type": type_})
            self._has_received = False
            pause_s = silence_s() / BEATS_PER_SILENCE
            await asyncio.sleep(pause_s)
            silent_s = 0.0 if self._has_received else silent_s + pause_s
        self.abort()

    async def close(self) -> None:
        """Send what was queued and close; drop the connection if the peer does not read.

        The transport is closed when this returns, which takes further turns of the event loop.
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
        """Drop the connection at once."""
        self._writer.transport.abort()


async def connect(
    address: str, port: int, secret: bytes, term: int, hello: dict[str, Any]
) -> ClientConnection:
    """Connect to the leader of a term; return once it has proved that it holds the secret.

    Raises OSError if no process listens there, or none answers in time; AuthenticationError if a
    foreign process does.
    """
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(address, port, limit=MAX_FRAME_BYTES)
    try:
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            first = {"type": "hello", "agent": hello}
            answer, signer = answer_greeting(await _read_line(reader), secret, term, first)
            writer.write(answer)
            connection = ClientConnection(reader, writer, signer)
            await connection.receive()  # the welcome
            return connection
    except BaseException:  # cancelled, too: no caller can close the connection yet
        writer.transport.abort()
        raise


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as e:
        raise AuthenticationError("longer than a frame may be") from e
    except asyncio.IncompleteReadError as e:
        raise ConnectionResetError("the peer closed the connection") from e


class ConnectionOwner(Protocol):
    """A server of authenticated connections: an error ends one, and nothing is done by default."""

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """Handle a client that is authenticated; ``hello`` describes it."""
        return

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """Handle a message of an authenticated client."""
        return

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """Handle the end of a connection, also of one for which `on_connect` has failed."""
        return


class ServerConnection(asyncio.BufferedProtocol):
    """The server's end of a connection: unauthenticated, until the client's hello has been read.

    For ten thousand connections at once: none has a task, and all read into one buffer of the
    server. By default, asyncio makes one of 256 KiB for each message, which costs more than its
    signature.
    """

    def __init__(
        self, secret: bytes, context: object, owner: ConnectionOwner, buffer: memoryview
    ) -> None:
        self._handshake = ServerHandshake(secret, context)
        self._owner = owner
        self._buffer = buffer
        self._pending = b""
        self._signer: FrameSigner | None = None
        """None until the client has proved that it holds the secret."""
        self._deadline: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._ending: str | None = None

    @property
    def is_proved(self) -> bool:
        """Whether the client has proved that it holds the secret."""
        return self._signer is not None

    def send(self, message: dict[str, Any] | bytes) -> None:
        """Queue a message, or its text; `ConnectionOwner.on_disconnect` reports the end."""
        if self._ending is None:
            assert self._transport is not None and self._signer is not None
            self._transport.write(self._signer.seal(message))

    def close(self) -> None:
        """Send what was queued and close; drop the connection if the peer does not read."""
        self._ending = self._ending or "closed by this side"
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Drop the connection at once, with what it has still sent."""
        self._ending = self._ending or reason
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> tuple[socket.socket, FrameSigner]:
        """Return a blocking socket with the key of the connection, and drop this end of it.

        For `on_connect`: the client sends nothing between its hello and the welcome.
        """
        assert self._transport is not None and self._signer is not None
        sock: socket.socket = self._transport.get_extra_info("socket").dup()
        sock.setblocking(True)
        self.abort("it is served elsewhere")
        return sock, self._signer

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
                if self._ending is not None:
                    continue
                if self._signer is not None:
                    self._owner.on_message(self, self._signer.open(line))
                elif (hello := self._handshake.read(line)) is not None:
                    agent, self._signer = hello["agent"], self._handshake.signer
                    if self._deadline is not None:
                        self._deadline.cancel()
                    self.send(WELCOME)
                    self._owner.on_connect(self, agent)
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
        self._owner.on_disconnect(self, self._ending)


class Listener:
    """An open port and the connections to it; `asyncio.Server` would lose one just before its end.

    A stranger who opens connections and sends nothing is not to keep others out, nor to take the
    file descriptors that the process needs for its files: `HANDSHAKE_TIMEOUT_S` after it was
    accepted a connection is authenticated, or ended. Beyond `_MOST_UNPROVED` others, or a quarter
    of the process's descriptors, the oldest one that is not authenticated is ended for a new one. A
    peer needs one round trip, so it is through long before its turn has come. Where the last
    descriptors are about to go, all that are not authenticated are ended.
    """

    def __init__(self, address: str, port: int = 0, *, opened: socket.socket | None = None) -> None:
        """Open the port (0: any free one), unless it is ``opened``; ``::`` takes IPv4 as well.

        Raises OSError if the address is not this node's, or the port is taken.
        """
        self._socket = opened or socket.create_server(
            (address, port),
            family=socket.AF_INET6 if ":" in address else socket.AF_INET,
            backlog=65_535,  # the system's limit applies (net.core.somaxconn)
            dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6(),
        )
        self._socket.setblocking(False)
        socket_filter.apply(self._socket)
        self._open = True
        self._terms: tuple[bytes, object, ConnectionOwner]
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._connections: set[ServerConnection] = set()
        """All, authenticated or not, until they have ended."""
        self._unproved: dict[ServerConnection, None] = {}
        """Those that are neither authenticated nor being ended, the oldest first."""
        self._opening: set[asyncio.Task[None]] = set()
        self.num_refused = 0  # connections that have ended without being authenticated

    @property
    def port(self) -> int:
        """The port's number."""
        return int(self._socket.getsockname()[1])

    def fileno(self) -> int:
        """Return the descriptor, for a process that is to inherit the port."""
        return self._socket.fileno()

    def detach(self) -> int:
        """Give the descriptor up, to be closed by the caller; `serve` was not called."""
        self._open = False
        return self._socket.detach()

    def serve(self, secret: bytes, context: object, owner: ConnectionOwner) -> None:
        """Authenticate connections for a purpose (``context``), in the running event loop."""
        self._terms = secret, context, owner
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Close the port and the connections; what was sent arrives. May be repeated."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._socket)
            with contextlib.suppress(OSError):  # even if a forked process has it, too
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            for connection in self._connections:
                connection.close()

    async def wait_closed(self) -> None:
        """Wait until all connections have ended, a second at most after `close`."""
        while self._connections:
            await asyncio.sleep(0.01)

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """Pass an authenticated connection on."""
        self._unproved.pop(connection, None)
        self._terms[2].on_connect(connection, hello)

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """Pass a message on."""
        self._terms[2].on_message(connection, message)

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """Pass the end of an authenticated connection on."""
        self._connections.discard(connection)
        self._unproved.pop(connection, None)
        if connection.is_proved:
            self._terms[2].on_disconnect(connection, reason)
        else:
            self.num_refused += 1

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as e:  # most likely too many open files: the port would stay readable
                _log.warning("no connection can be taken for now: %s", e)
                self._end_oldest(len(self._unproved))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._socket)
                loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
                return
            accepted.setblocking(False)
            # asyncio does so only for sockets that name their protocol, unlike accepted ones
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open_connection(accepted)

    def _accept_again(self) -> None:
        if self._open:
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _open_connection(self, accepted: socket.socket) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(_MOST_UNPROVED, limit // 4)
        self._end_oldest(len(self._unproved) + 1 - most)
        if accepted.fileno() >= limit - limit // 8:  # a new descriptor has the lowest free number
            self._end_oldest(len(self._unproved))
        secret, context, _ = self._terms
        connection = ServerConnection(secret, context, self, self._buffer)
        self._connections.add(connection)
        self._unproved[connection] = None

        async def open_transport() -> None:
            try:
                loop = asyncio.get_running_loop()
                await loop.connect_accepted_socket(lambda: connection, accepted)
            except OSError as e:
                accepted.close()
                self.on_disconnect(connection, f"it ended as soon as it was accepted: {e}")

        task = asyncio.get_running_loop().create_task(open_transport())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _end_oldest(self, number: int) -> None:
        """End connections that are not authenticated; each only once."""
        for connection in [*self._unproved][: max(0, number)]:
            del self._unproved[connection]
            connection.abort("too many unauthenticated connections")


_PROBE_TERM = 0  # context of a probe's handshake: the terms of leaders begin with 1
_ATTEMPT_S, _NEXT_ATTEMPT_S = 1.5, 0.5


async def reaches(address: str, port: int, secret: bytes, within_s: float) -> bool:
    """Return whether a peer's `ProbePorts` can be reached, with messages in both directions.

    Another attempt begins every half a second, beside the last ones: one lost packet of a handshake
    delays it by a second.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    attempts: set[asyncio.Task[None]] = set()
    try:
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            attempts.add(asyncio.create_task(_exchange(address, port, secret)))
            ended, attempts = await asyncio.wait(
                attempts, timeout=min(left_s, _NEXT_ATTEMPT_S), return_when=asyncio.FIRST_COMPLETED
            )
            if any(attempt.exception() is None for attempt in ended):
                return True
            if ended:  # refused, for one
                await asyncio.sleep(min(left_s, _NEXT_ATTEMPT_S))
        return False
    finally:
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)


async def _exchange(address: str, port: int, secret: bytes) -> None:
    async with asyncio.timeout(_ATTEMPT_S):
        (await connect(address, port, secret, _PROBE_TERM, {})).abort()


class ProbePorts(ConnectionOwner):
    """Open ports at which peers probe whether they reach this node.

    Of the addresses those count that are this node's. The peer ends a connection.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._listeners: list[Listener] = []
        self.where: list[tuple[str, int]] = []
        for address in dict.fromkeys(addresses):
            try:
                listener = Listener(address)
            except OSError as e:
                _log.warning("no port for probes at %s: %s", address, e)
                continue
            self._listeners.append(listener)
            self.where.append((address, listener.port))

    def serve(self, secret: bytes) -> None:
        """Accept probes from now on, in the running event loop."""
        for listener in self._listeners:
            listener.serve(secret, _PROBE_TERM, self)

    def close(self) -> None:
        """Close the ports."""
        for listener in self._listeners:
            listener.close()


def prove(sock: socket.socket, secret: bytes, context: object, *, timeout_s: float) -> FrameSigner:
    """Carry out the client's part of the handshake on a connection (blocking).

    Raises AuthenticationError if the server does not hold the secret. ConnectionResetError: it has
    ended the connection, since this side does not hold the secret, or strangers have taken its
    places; connect again. OSError: it does not answer in time.
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

    A method raises an OSError if the connection has ended, or the peer is silent for longer than
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
        connected = partial(socket.create_connection, address, _SOCKET_CONNECT_S)
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
    """Return `connected` after `prove`; again if strangers have taken all places."""
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


class SocketServer(ConnectionOwner):
    """A port whose connections are served by a thread each, once they are authenticated.

    It is opened on the first of these numeric addresses that is this machine's; OSError if none is.
    ``serve`` gets a connection, closed at its end, and the signer. An OSError or ValueError ends
    it, too.
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
        """Accept no more connections; ``cut`` ends those that are served, ``wait`` joins them."""
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

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """Serve an authenticated connection in a thread, which has it from then on."""
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

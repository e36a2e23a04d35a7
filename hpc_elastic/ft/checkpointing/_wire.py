"""How a state is sent: requests and answers as signed frames, bytes between them, and the server.

    {"verb": "layout", "step": 5, "client": .., "wait_s": 60, ..}       the layout (`_layout`)
    {"verb": "data", .., "digest": .., "begin": 0, "end": 8388608}      a range of its bytes
    {"verb": "digests", .., "digest": ..}                               those of its tensors, JSON
    {"verb": "done", "step": 5, "client": ..}                           others gave all of it

Connections and frames are those of `transport.auth`, under the key that the replicas share: nothing
counts that was recorded before, or answers another request. The token in a request is the server's,
drawn when it began. Bytes are not signed; the frame of an answer has the digest of its body. A
range is followed by a frame with a checksum of each block of it (XXH3), which finds damage. An
attacker that changes packets on their way and forges XXH3 is not kept out. Nothing on the wire is
secret.

A state is offered out of the tensors' own memory, from `StateServer.offer` until
`StateServer.withdraw`, which waits for the destinations that were announced. A destination is known
by its name for the fetch; it has come with its first request, and is done when it has closed its
last connection, for whatever reason. So the server does not wait for a peer that has all it wants,
nor for one that has died. A destination that had all from others first sends `done`; that may
arrive before the offer.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
import xxhash

from hpc_elastic.ft.checkpointing import _layout
from hpc_elastic.ft.checkpointing.transport import HealError
from hpc_elastic.transport.auth import AuthenticationError, FrameSigner
from hpc_elastic.transport.connection import SocketServer
from hpc_elastic.transport.messages import Json, read_fields

BLOCK_BYTES = 1 << 20
"""One checksum each. A block fits into a core's cache, where the sum costs little."""
MAX_FRAME_BYTES = 4096
SESSION = "heal"
"""Context of the connections (`transport.auth.session_key`)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealRequest:
    """A replica's request to a peer.

    Attributes:
        verb: The layout, a range of the bytes, the digests of the tensors, or nothing any more.
        client: Names the replica's whole fetch, over all its connections.
        wait_s: How long to wait for a state that is not offered yet.
        digest: Of the layout that the range or the tensors belong to.
    """

    token: str
    verb: Literal["layout", "data", "digests", "done"]
    step: int
    client: str
    wait_s: float = 0.0
    digest: str = ""
    begin: int = 0
    end: int = 0

    def blocks(self) -> list[tuple[int, int]]:
        """Return the range in pieces that have a checksum each."""
        starts = range(self.begin, self.end, BLOCK_BYTES)
        return [(begin, min(begin + BLOCK_BYTES, self.end)) for begin in starts]


class HealConnection:
    """One end of a connection that is authenticated: frames, and bytes between them."""

    def __init__(self, sock: socket.socket, signer: FrameSigner, timeout_s: float) -> None:
        self.sock, self._signer = sock, signer
        signer.max_bytes = MAX_FRAME_BYTES
        prepare(sock, timeout_s)

    def send(self, frame: Json, body: bytes = b"") -> None:
        send(self.sock, [self._signer.seal(frame), body])

    def receive(self) -> Json:
        """Return the next frame, behind which the other side waits, or bytes begin.

        Raises ConnectionError if the connection has ended, TimeoutError if nothing came, and
        AuthenticationError if it is not the peer's.
        """
        line = b""
        while not line.endswith(b"\n"):
            with _timeouts():
                seen = self.sock.recv(MAX_FRAME_BYTES, socket.MSG_PEEK)
            if not seen:
                raise ConnectionResetError("the connection has ended")
            line += self.sock.recv(seen.find(b"\n") + 1 or len(seen))
            if len(line) > MAX_FRAME_BYTES:
                raise AuthenticationError("a frame too long")
        return self._signer.open(line)

    def request_answer(self, request: HealRequest) -> Json:
        """Return the frame of a peer's answer; raise HealError with its reason if it refuses."""
        self.send(vars(request))
        answer = self.receive()
        if "refused" in answer:
            raise HealError(answer["refused"])
        return answer

    def request_body(self, request: HealRequest) -> bytes:
        """Return the body of a peer's answer; errors are as of `request_answer`, `receive`."""
        answer = self.request_answer(request)
        body = receive(self.sock, answer["num_bytes"])
        if _layout.digest(body) != answer["digest"]:
            raise AuthenticationError("bytes were damaged on their way")
        return body


# ---- Blocking sockets that move many bytes: with time-outs, without the interpreter in the way


_BUFFER_BYTES = 1 << 20
_MAX_VIEWS = 512
"""In one call; the system takes 1024."""


class Pieces:
    """Buffers as one stream of bytes."""

    def __init__(self, parts: Sequence[_layout.Part]) -> None:
        self._parts = parts
        self._begins = [begin for begin, _, _ in parts]

    def cut(self, begin: int, end: int) -> Iterator[memoryview]:
        """Give the buffers of a range, in order."""
        at = bisect_right(self._begins, begin) - 1
        while begin < end:
            start, length, of = self._parts[at]
            stop = min(end, start + length)
            yield of(begin - start, stop - start)
            begin, at = stop, at + 1


def prepare(sock: socket.socket, timeout_s: float) -> None:
    """Let a connection block in the kernel, at most ``timeout_s`` without any progress."""
    sock.settimeout(None)
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def close(sock: socket.socket) -> None:
    """End a connection for both sides, even if a forked process has it too; any thread.

    By a reset: a sender that waits with a full window (RFC 9293, 3.8.6.1) would not notice less.
    """
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    cut(sock)
    sock.close()


def cut(sock: socket.socket) -> None:
    """End a connection, and wake the thread that waits in it; that one closes it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def is_gone(sock: socket.socket) -> bool:
    """Return whether the other side, which is waiting for an answer, has disconnected."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly this number of bytes; raises as `receive_into`."""
    raw = bytearray(num_bytes)
    receive_into(sock, [memoryview(raw)])
    return bytes(raw)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill buffers; raise ConnectionError at the connection's end, TimeoutError after its time."""
    _move(views, lambda some: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])


def send(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    _move([memoryview(view) for view in views], sock.sendmsg)


def _move(views: Sequence[memoryview], call: Callable[[list[memoryview]], int]) -> None:
    """Call until all bytes of the buffers are moved; each call returns how many it has moved."""
    remaining = [view for view in views if len(view)]
    while remaining:
        with _timeouts():
            count = call(remaining[:_MAX_VIEWS])
        if not count:
            raise ConnectionResetError("the connection has ended")
        done = 0
        while done < len(remaining) and count >= len(remaining[done]):
            count -= len(remaining[done])
            done += 1
        remaining = remaining[done:]
        if count:
            remaining[0] = remaining[0][count:]


@contextmanager
def _timeouts() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as e:  # SO_RCVTIMEO, SO_SNDTIMEO
        raise TimeoutError("no progress") from e


# ---- the server


ARRIVAL_S = 10.0
"""A destination that has not come by then cannot reach us, and has another source or fails."""
_IDLE_S = 60.0
_LONGEST_WAIT_S = 3600.0
_POLL_S = 0.2


@dataclass
class Offer:
    """A state that is offered, and its clients.

    ``pieces`` are the bytes of each tensor (``raw``) as one stream. Its destinations may take
    ``timeout_s`` without any progress; ``since`` is when it was made, or the last block was sent.
    """

    step: int
    layout: bytes
    raw: Sequence[torch.Tensor]
    pieces: Pieces
    num_clients: int
    timeout_s: float
    since: float = field(default_factory=time.monotonic)
    is_open: bool = True
    clients: dict[str, set[socket.socket]] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        return _layout.digest(self.layout)

    def wait_s(self) -> float:
        """Return for how long clients are still to be waited for, in seconds; 0 if for none."""
        if any(self.clients.values()):
            until = self.timeout_s
        elif len(self.clients) < self.num_clients:
            until = min(self.timeout_s, ARRIVAL_S)
        else:
            return 0.0
        return max(0.0, self.since + until - time.monotonic())


class StateServer:
    """Serves one replica's states with threads of its own, from its creation until `close`."""

    def __init__(self, key: bytes, addresses: Iterable[str]) -> None:
        """Listen on a free port, at the first of these numeric addresses that is this machine's."""
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._num_reading = 0
        self._early: set[tuple[int, str]] = set()
        self._aborted = self._closed = False
        self._server = SocketServer(addresses, key, SESSION, self._serve, name="heal")

    @property
    def url(self) -> str:
        address, port = self._server.address
        host = f"[{address}]" if ":" in address else address
        return f"http://{host}:{port}/{self._token}"

    def offer(self, offer: Offer) -> None:
        """Offer a state in place of the last one; not after `abort`."""
        with self._changed:
            if self._offer:
                self._close_offer(self._offer)
            if not self._aborted:
                self._offer = offer
                offer.clients |= {name: set() for step, name in self._early if step == offer.step}
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Return once no peer reads the state: all have it, are gone, or have had their time."""
        with self._changed:
            offer = self._offer
            while offer and offer.is_open and not self._aborted and (rest_s := offer.wait_s()):
                self._changed.wait(rest_s)
            if offer and offer.is_open and not self._aborted:
                missing = offer.num_clients - len(offer.clients)
                if missing > 0:
                    text = "%d of %d that were to heal from us never came"
                    _log.warning(text, missing, offer.num_clients)
                if any(offer.clients.values()):
                    text = "a replica did not fetch our state within %.3g s"
                    _log.warning(text, offer.timeout_s)
            if offer:
                self._close_offer(offer)
            while self._num_reading:  # their connections are cut
                self._changed.wait()

    def abort(self) -> None:
        """End what is under way, and take no request until `resume`."""
        with self._changed:
            self._aborted = True
            if self._offer:
                self._close_offer(self._offer)
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._aborted = False
            self._early.clear()

    def close(self, *, wait: bool) -> None:
        """End everything. May be repeated."""
        self.abort()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.close(cut=True, wait=wait)

    def _close_offer(self, offer: Offer) -> None:
        offer.is_open = False
        for connections in offer.clients.values():
            for connection in connections:
                cut(connection)
        if self._offer is offer:
            self._offer = None

    def _serve(self, sock: socket.socket, signer: FrameSigner) -> None:
        try:
            connection = HealConnection(sock, signer, _IDLE_S)
            while self._answer_request(connection):
                pass
        finally:
            with self._changed:
                if self._offer:
                    for connections in self._offer.clients.values():
                        connections.discard(sock)
                self._changed.notify_all()

    def _answer_request(self, connection: HealConnection) -> bool:
        """Answer a request; return False if that was the last of its connection."""

        def answer(body: bytes) -> None:
            head = {"num_bytes": len(body), "digest": _layout.digest(body)}
            connection.send(head, body)

        try:
            request = read_fields(HealRequest, connection.receive())
        except (TypeError, KeyError) as e:
            raise ValueError(f"no request of ours: {e}") from e
        if not hmac.compare_digest(request.token.encode(), self._token.encode()):
            why = "it is another process: the one that was asked has ended"
            connection.send({"refused": why})
            return False
        if request.verb == "done":
            with self._changed:
                if self._offer and self._offer.step == request.step:
                    self._offer.clients.setdefault(request.client, set())
                else:
                    self._early.add((request.step, request.client))
                self._changed.notify_all()
            answer(b"")
            return False
        found = self._find_offer(request, connection.sock)
        if isinstance(found, str):
            connection.send({"refused": found})
            return False
        if request.verb == "layout":
            answer(found.layout)
            return True
        if request.verb == "digests":
            with self._reading(found):
                digests = _layout.digest_tensors(found.raw)
            answer(json.dumps(digests).encode())
            return False
        connection.send({})
        with self._reading(found):
            sums = [self._send_block(connection.sock, found, *b) for b in request.blocks()]
        connection.send({"sums": b"".join(sums).hex()})
        return True

    def _find_offer(self, request: HealRequest, connection: socket.socket) -> Offer | str:
        """Return the offer that a request is for, or why there is none; wait for one if it may."""
        until = time.monotonic() + min(request.wait_s, _LONGEST_WAIT_S)
        with self._changed:
            while not self._is_offered(request.step) and (rest_s := until - time.monotonic()) > 0:
                self._changed.wait(min(rest_s, _POLL_S))
                if is_gone(connection):  # it is not to count as one that has come
                    raise ConnectionResetError("the peer did not wait")
            offer = self._offer
            if offer is None:
                return f"it offers no state (step {request.step} is asked for)"
            if offer.step != request.step:
                return f"it offers step {offer.step}, not {request.step}"
            if request.verb != "layout" and offer.digest != request.digest:
                return "its state is not the one whose layout was given"
            offer.clients.setdefault(request.client, set()).add(connection)
            return offer

    def _is_offered(self, step: int) -> bool:
        """Return whether to answer a request now; one for parts may be a step early."""
        offer = self._offer
        is_early = offer is None or (offer.num_clients == 0 and offer.step < step)
        return self._closed or not is_early

    def _send_block(self, to: socket.socket, offer: Offer, begin: int, end: int) -> bytes:
        """Send a block; return its checksum."""
        views = list(offer.pieces.cut(begin, end))
        checksum = xxhash.xxh3_64()
        for view in views:  # first: what is sent next is in the cache then
            checksum.update(view)
        send(to, views)
        offer.since = time.monotonic()
        return checksum.digest()

    @contextmanager
    def _reading(self, offer: Offer) -> Iterator[None]:
        """Read the tensors of an offer, which `withdraw` waits for."""
        with self._changed:
            if not offer.is_open:
                raise ConnectionAbortedError("the offer is over")
            self._num_reading += 1
        try:
            yield
        finally:
            with self._changed:
                offer.since = time.monotonic()
                self._num_reading -= 1
                self._changed.notify_all()

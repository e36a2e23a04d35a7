"""States over HTTP: the requests and answers, signed on both sides, and the server of a replica.

    GET /<token>/layout?step=5&client=..&nonce=..&wait_s=60 HTTP/1.1    the layout (`_layout`)
    GET /<token>/data?...&digest=..&begin=0&end=8388608 HTTP/1.1        a range of its bytes

    GET /<token>/digests?...&digest=.. HTTP/1.1                         those of its tensors, JSON
    GET /<token>/done?step=5&client=..&nonce=.. HTTP/1.1                others gave all of it

The path is signed with the key that the replicas share; the token is the server's, drawn when it
began, and a nonce counts once. An answer's head is signed with the nonce it answers, so no other
process can make or keep one. A range is followed by a checksum of each block of it (XXH3) and a
signature of all of them (HMAC, RFC 2104): the sums find damage, the signature finds a range of
another request. An attacker that changes packets on their way and forges XXH3 is not kept out.
Nothing on the wire is secret.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from hashlib import blake2b
from typing import Literal
from urllib.parse import parse_qsl, urlencode

import torch
import xxhash

from hpc_elastic.ft.checkpointing import _layout
from hpc_elastic.transport.auth import AuthenticationError, is_signed, sign
from hpc_elastic.transport.interface import own_addresses

BLOCK_BYTES = 1 << 20
"""One checksum each. A block fits into a core's cache, where the sum costs little."""
SUM_BYTES = 8
MAC_BYTES = 32
MAX_HEAD_BYTES = 4096
MAX_LAYOUT_BYTES = 1 << 30
END = b"\r\n\r\n"
OK, FORBIDDEN, CONFLICT = 200, 403, 409

Verb = Literal["layout", "data", "digests", "done"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HealRequest:
    """A replica's request to a peer.

    Attributes:
        token: The server's.
        verb: The layout, a range of the bytes, the digests of the tensors, or nothing any more.
        step: Of the state that is wanted.
        client: Names the replica's whole fetch, over all its connections.
        nonce: Never used before.
        wait_s: How long to wait for a state that is not offered yet.
        digest: Of the layout that the range or the tensors belong to.
        begin, end: The range.
    """

    token: str
    verb: Verb
    step: int
    client: str
    nonce: str
    wait_s: float = 0.0
    digest: str = ""
    begin: int = 0
    end: int = 0

    @property
    def num_body_bytes(self) -> int:
        """Of the answer to a request for a range."""
        return self.end - self.begin + SUM_BYTES * len(self.blocks()) + MAC_BYTES

    def blocks(self) -> list[tuple[int, int]]:
        """Return the range in pieces that have a checksum each."""
        starts = range(self.begin, self.end, BLOCK_BYTES)
        return [(begin, min(begin + BLOCK_BYTES, self.end)) for begin in starts]

    def seal(self, key: bytes) -> bytes:
        """Return it as it is sent."""
        query = {k: v for k, v in asdict(self).items() if k not in ("token", "verb")}
        target = f"/{self.token}/{self.verb}?{urlencode(query)}"
        mac = sign(key, f"request|{target}")
        return f"GET {target} HTTP/1.1\r\nHost: peer\r\nX-Mac: {mac}\r\n\r\n".encode()


def open_request(raw: bytes, key: bytes) -> HealRequest:
    """Return the request in a head; raise AuthenticationError if it is none, or of another key."""
    try:
        first, headers = _open_head(raw)
        _, target, _ = first.split(" ")
        if not is_signed(key, f"request|{target}", headers["x-mac"]):
            raise AuthenticationError("signed with another key")
        path, _, query = target.partition("?")
        _, token, verb = path.split("/")
        given = dict(parse_qsl(query, keep_blank_values=True))
        types = {"int": int, "float": float, "str": str}
        known = {f.name: types[str(f.type)](given[f.name]) for f in fields(HealRequest)[2:]}
        return HealRequest(token, verb, **known)  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError) as e:
        raise AuthenticationError(f"no request of ours: {raw[:80]!r}") from e


def answer_head(key: bytes, nonce: str, status: int, num_bytes: int, body: bytes = b"") -> bytes:
    """Return the head of an answer; it signs ``body``, which is empty for a range."""
    mac = sign(key, _signed_text(nonce, status, num_bytes, body))
    reason = {OK: "OK", FORBIDDEN: "Forbidden", CONFLICT: "Conflict"}[status]
    lines = f"HTTP/1.1 {status} {reason}", f"Content-Length: {num_bytes}", f"X-Mac: {mac}"
    return "\r\n".join(lines).encode() + END


@dataclass(frozen=True)
class AnswerHead:
    """The head of an answer; its body has to be there before `check`."""

    status: int
    num_bytes: int
    mac: str

    @classmethod
    def parse(cls, raw: bytes) -> AnswerHead:
        """Return it; raise AuthenticationError if it is none."""
        try:
            first, headers = _open_head(raw)
            length = int(headers["content-length"])
            if not 0 <= length <= MAX_LAYOUT_BYTES:
                raise ValueError(f"a length of {length}")
            return cls(int(first.split(" ")[1]), length, headers["x-mac"])
        except (ValueError, KeyError, IndexError) as e:
            raise AuthenticationError(f"no answer of ours: {raw[:80]!r}") from e

    def check(self, key: bytes, nonce: str, body: bytes = b"") -> None:
        """Raise AuthenticationError if it is not the peer's, or not to this very request."""
        if self.status == FORBIDDEN:
            raise AuthenticationError(
                "it does not know our key, or is another process: outside of a run all nodes need "
                "the same ~/.config/hpc_elastic/key"
            )
        if not is_signed(key, _signed_text(nonce, self.status, self.num_bytes, body), self.mac):
            raise AuthenticationError("the answer is not signed with our key")


def seal_sums(key: bytes, nonce: str, sums: Sequence[bytes]) -> bytes:
    """Return what follows a range: its blocks' checksums, and their signature."""
    joined = b"".join(sums)
    return joined + _mac(key, nonce, joined)


def check_sums(key: bytes, nonce: str, sums: Sequence[bytes], sealed: bytes) -> None:
    """Raise AuthenticationError if a range was damaged on its way, or is not the peer's."""
    joined, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, nonce, joined)):
        raise AuthenticationError("the checksums are not signed with our key")
    if joined != b"".join(sums):
        raise AuthenticationError("bytes were damaged on their way")


def _mac(key: bytes, nonce: str, sums: bytes) -> bytes:
    return hmac.digest(key, f"sums|{nonce}|".encode() + sums, "sha256")


def _signed_text(nonce: str, status: int, num_bytes: int, body: bytes) -> str:
    return f"answer|{nonce}|{status}|{num_bytes}|{blake2b(body).hexdigest()}"


def _open_head(raw: bytes) -> tuple[str, dict[str, str]]:
    first, *rest = raw.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.partition(":") for line in rest)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


# ---- Blocking sockets that move many bytes: with time-outs, without the interpreter in the way


_BUFFER_BYTES = 1 << 20
_MAX_VIEWS = 512
"""In one call; the system takes 1024."""


class Pieces:
    """Buffers as one stream of bytes."""

    def __init__(self, parts: Sequence[_layout.Part]) -> None:
        """Join parts that follow each other."""
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
    """End a connection for both sides, even if a forked process has it too; any thread."""
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


def receive_head(sock: socket.socket) -> bytes:
    """Return all up to an empty line, at which the other side waits or a body begins.

    Raises:
        ConnectionError: The connection has ended.
        TimeoutError: Nothing came.
        AuthenticationError: It is too long.
    """
    head = b""
    while not head.endswith(END):
        with _timeouts():
            seen = sock.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
        if not seen:
            raise ConnectionResetError("the connection has ended")
        if len(head) + len(seen) > MAX_HEAD_BYTES:
            raise AuthenticationError("a head too long")
        at = (head[-3:] + seen).find(END)
        head += sock.recv(len(seen) if at < 0 else at + len(END) - len(head[-3:]))
    return head


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly this number of bytes; raises as `receive_into`."""
    raw = bytearray(num_bytes)
    receive_into(sock, [memoryview(raw)])
    return bytes(raw)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill buffers.

    Raises:
        ConnectionError: The connection has ended.
        TimeoutError: Nothing came for the connection's time.
    """
    _move(views, lambda some: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0])


def send(sock: socket.socket, views: Sequence[memoryview | bytes]) -> None:
    """Send buffers; raises as `receive_into`."""
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
_MAX_CONNECTIONS = 128


@dataclass
class Offer:
    """A state that is offered, and its clients.

    Attributes:
        step: Of the state.
        layout: As it is sent.
        raw: The bytes of each tensor.
        pieces: The same as one stream.
        num_clients: Number of destinations that are announced.
        timeout_s: How long they may take.
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
    nonces: set[str] = field(default_factory=set)

    @cached_property
    def digest(self) -> str:
        """That of the layout."""
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

    def __init__(self, key: bytes) -> None:
        """Listen on a free port, on all interfaces; the key is known to all replicas alone."""
        self._key = key
        self._token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._offer: Offer | None = None
        self._num_reading = 0
        self._early: set[tuple[int, str]] = set()
        self._aborted = self._closed = False
        self._connections: dict[socket.socket, bool] = {}
        self._threads: set[threading.Thread] = set()
        self._socket = _listen()
        self._acceptor = threading.Thread(target=self._accept, name="heal-accept", daemon=True)
        self._acceptor.start()

    @cached_property
    def urls(self) -> str:
        """Where peers reach it: one URL for each of this node's addresses, the best first."""
        port = self._socket.getsockname()[1]
        hosts = (f"[{a}]" if ":" in a else a for a in dict.fromkeys(own_addresses()))
        return ",".join(f"http://{host}:{port}/{self._token}" for host in hosts)

    def offer(self, offer: Offer) -> None:
        """Offer a state in place of the last one; not after `abort`."""
        with self._changed:
            if self._offer:
                self._close_offer(self._offer)
            if not self._aborted:
                self._offer = offer
                offer.clients |= {
                    client: set() for step, client in self._early if step == offer.step
                }
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Return once no peer reads the state: all have it, are gone, or have had their time."""
        with self._changed:
            offer = self._offer
            while offer and offer.is_open and not self._aborted and (rest_s := offer.wait_s()):
                self._changed.wait(rest_s)
            if offer:
                missing = offer.num_clients - len(offer.clients)
                if offer.is_open and not self._aborted and missing > 0:
                    text = "%d of %d that were to heal from us never came"
                    _log.warning(text, missing, offer.num_clients)
                if offer.is_open and not self._aborted and any(offer.clients.values()):
                    text = "a replica did not fetch our state within %.3g s"
                    _log.warning(text, offer.timeout_s)
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
        """Take requests again."""
        with self._changed:
            self._aborted = False
            self._early.clear()

    def close(self, *, wait: bool) -> None:
        """End everything. May be repeated."""
        self.abort()
        with self._changed:
            self._closed = True
            close(self._socket)
            self._changed.notify_all()
            for connection in self._connections:
                cut(connection)
            threads = [self._acceptor, *self._threads]
        for thread in threads if wait else ():
            thread.join()

    def _close_offer(self, offer: Offer) -> None:
        offer.is_open = False
        for connections in offer.clients.values():
            for connection in connections:
                cut(connection)
        if self._offer is offer:
            self._offer = None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as e:
                if self._closed or self._socket.fileno() < 0:
                    return
                _log.warning("no connection can be taken for now: %s", e)
                time.sleep(0.1)  # too many open files
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="heal", daemon=True
            )
            with self._changed:
                if self._closed:
                    close(connection)
                    continue
                if len(self._connections) >= _MAX_CONNECTIONS:
                    # unauthenticated ones first, the oldest of them
                    cut(min(self._connections, key=lambda c: self._connections[c]))
                self._connections[connection] = False
                self._threads.add(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            prepare(connection, _IDLE_S)
            while self._answer_request(connection, receive_head(connection)):
                pass
        except OSError as e:  # the peer is gone, or none of ours
            _log.debug("a connection has ended: %s", e)
        finally:
            with self._changed:
                del self._connections[connection]
                self._threads.discard(threading.current_thread())
                if self._offer:
                    for connections in self._offer.clients.values():
                        connections.discard(connection)
                self._changed.notify_all()
            close(connection)

    def _answer_request(self, connection: socket.socket, head: bytes) -> bool:
        """Answer a request; return False if that was the last of its connection."""

        def answer(status: int, body: bytes) -> None:
            head = answer_head(self._key, request.nonce, status, len(body), body)
            send(connection, [head, body])

        try:
            request = open_request(head, self._key)
            if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                raise AuthenticationError("for another server")
        except AuthenticationError:  # a peer that has the wrong key can report this
            send(connection, [answer_head(b"", "", FORBIDDEN, 0)])
            raise
        with self._changed:
            self._connections[connection] = True
            if request.verb == "done":
                if self._offer and self._offer.step == request.step:
                    self._offer.clients.setdefault(request.client, set())
                else:
                    self._early.add((request.step, request.client))
                self._changed.notify_all()
        if request.verb == "done":
            answer(OK, b"")
            return False
        found = self._find_offer(request, connection)
        if isinstance(found, str):
            answer(CONFLICT, found.encode())
            return False
        if request.verb == "layout":
            answer(OK, found.layout)
            return True
        if request.verb == "digests":
            answer(OK, self._read_digests(found))
            return False
        send(connection, [answer_head(self._key, request.nonce, OK, request.num_body_bytes)])
        sums = [self._send_block(connection, found, begin, end) for begin, end in request.blocks()]
        send(connection, [seal_sums(self._key, request.nonce, sums)])
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
            if request.nonce in offer.nonces:
                raise AuthenticationError("a request that was made before")
            offer.nonces.add(request.nonce)
            offer.clients.setdefault(request.client, set()).add(connection)
            return offer

    def _is_offered(self, step: int) -> bool:
        """Return whether to answer a request now; one for parts may be a step early."""
        offer = self._offer
        is_early = offer is None or (offer.num_clients == 0 and offer.step < step)
        return self._closed or not is_early

    def _read_digests(self, offer: Offer) -> bytes:
        with self._reading(offer):
            return json.dumps(_layout.digest_tensors(offer.raw)).encode()

    def _send_block(self, to: socket.socket, offer: Offer, begin: int, end: int) -> bytes:
        """Send a block; return its checksum."""
        with self._reading(offer):
            views = list(offer.pieces.cut(begin, end))
            checksum = xxhash.xxh3_64()
            for view in views:  # first: what is sent next is in the cache then
                checksum.update(view)
            send(to, views)
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
                self._num_reading -= 1
                self._changed.notify_all()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:  # switched off on this node
            pass
    return socket.create_server(("", 0))

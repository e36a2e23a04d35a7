"""Offers a replica's state to its peers, out of the tensors' own memory, with threads of its own.

A state is offered from `StateServer.offer` until `StateServer.withdraw`, which waits for those
that were announced. A destination is known by its name for the fetch; it has come with its first
request, and is done when it has closed its last connection, for whatever reason. So neither a peer
that has all it wants nor one that has died is waited for. One that had all from others, before it
heard of us, says so; it may do so before our offer.
"""

from __future__ import annotations

import hmac
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import xxhash

from hpc_elastic.ft.checkpointing import _http
from hpc_elastic.ft.checkpointing._http import HealRequest, Pieces
from hpc_elastic.transport.auth import AuthenticationError
from hpc_elastic.transport.interface import own_addresses

ARRIVAL_S = 10.0
"""A destination that has not come by then can not reach us, and has another source or fails."""
_IDLE_S = 60.0
_LONGEST_WAIT_S = 3600.0
_LOOK_S = 0.2
_MAX_CONNECTIONS = 128

_log = logging.getLogger(__name__)


@dataclass
class Offer:
    """A state that is offered, and who fetches it.

    Attributes:
        step: Of the state.
        layout: As it is sent.
        digest: Of the layout.
        pieces: The state's bytes, where they are.
        num_clients: How many are to come.
        timeout_s: How long they may take.
    """

    step: int
    layout: bytes
    digest: str
    pieces: Pieces
    num_clients: int
    timeout_s: float
    since: float = field(default_factory=time.monotonic)
    is_open: bool = True
    clients: dict[str, set[socket.socket]] = field(default_factory=dict)
    nonces: set[str] = field(default_factory=set)

    def wait_s(self) -> float:
        """Return for how long somebody is still to be waited for; 0: for nobody."""
        if any(self.clients.values()):
            until = self.timeout_s
        elif len(self.clients) < self.num_clients:
            until = min(self.timeout_s, ARRIVAL_S)
        else:
            return 0.0
        return max(0.0, self.since + until - time.monotonic())


class StateServer:
    """Listens from its making until `close`."""

    def __init__(self, key: bytes) -> None:
        """Listen on a free port, on all interfaces.

        Args:
            key: What all replicas know and nobody else does.
        """
        self._key = key
        self._token = _http.new_token()
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
                self._end(self._offer)
            if not self._aborted:
                self._offer = offer
                offer.clients |= {
                    client: set() for step, client in self._early if step == offer.step
                }
                self._changed.notify_all()

    def withdraw(self) -> None:
        """Return once nobody reads the state: all have it, are gone, or have had their time."""
        with self._changed:
            offer = self._offer
            while offer and offer.is_open and not self._aborted and (left := offer.wait_s()):
                self._changed.wait(left)
            if offer:
                self._report(offer)
                self._end(offer)
            while self._num_reading:  # their connections are cut
                self._changed.wait()

    def abort(self) -> None:
        """End what is under way, and take no request until `resume`."""
        with self._changed:
            self._aborted = True
            if self._offer:
                self._end(self._offer)
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
            _http.close(self._socket)
            self._changed.notify_all()
            for connection in self._connections:
                _http.cut(connection)
            threads = [self._acceptor, *self._threads]
        for thread in threads if wait else ():
            thread.join()

    def _end(self, offer: Offer) -> None:
        offer.is_open = False
        for connections in offer.clients.values():
            for connection in connections:
                _http.cut(connection)
        if self._offer is offer:
            self._offer = None

    def _report(self, offer: Offer) -> None:
        missing = offer.num_clients - len(offer.clients)
        if offer.is_open and not self._aborted and missing > 0:
            _log.warning(
                "%d of %d that were to heal from us never came", missing, offer.num_clients
            )
        if offer.is_open and any(offer.clients.values()) and not self._aborted:
            _log.warning("a replica did not fetch our state within %.3g s", offer.timeout_s)

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
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._serve, args=(connection,), name="heal", daemon=True)
        with self._changed:
            if self._closed:
                _http.close(connection)
                return
            if len(self._connections) >= _MAX_CONNECTIONS:  # strangers go first, the oldest of them
                _http.cut(min(self._connections, key=lambda c: self._connections[c]))
            self._connections[connection] = False
            self._threads.add(thread)
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _http.prepare(connection, _IDLE_S)
            while self._answer(connection, _http.receive_head(connection)):
                pass
        except OSError as e:  # the peer is gone, or none of ours
            _log.debug("a connection has ended: %s", e)
        finally:
            with self._changed:
                del self._connections[connection]
                self._threads.discard(threading.current_thread())
                self._leave(connection)
            _http.close(connection)

    def _leave(self, connection: socket.socket) -> None:
        if self._offer:
            for connections in self._offer.clients.values():
                connections.discard(connection)
        self._changed.notify_all()

    def _answer(self, connection: socket.socket, head: bytes) -> bool:
        """Answer a request; False if that was the last of its connection."""
        try:
            request = _http.open_request(head, self._key)
            if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                raise AuthenticationError("for another server")
        except AuthenticationError:  # it is told, for the sake of one that has the wrong key
            _http.send(connection, [_http.answer_head(b"", "", _http.FORBIDDEN, 0)])
            raise
        with self._changed:
            self._connections[connection] = True
        if request.verb == "done":
            self._note_done(request)
            self._send(connection, request, _http.OK, b"")
            return False
        found = self._offer_for(request, connection)
        if isinstance(found, str):
            self._send(connection, request, _http.CONFLICT, found.encode())
            return False
        if request.verb == "layout":
            self._send(connection, request, _http.OK, found.layout)
        else:
            self._send_range(connection, request, found)
        return True

    def _note_done(self, request: HealRequest) -> None:
        with self._changed:
            if self._offer and self._offer.step == request.step:
                self._offer.clients.setdefault(request.client, set())
            else:
                self._early.add((request.step, request.client))
            self._changed.notify_all()

    def _offer_for(self, request: HealRequest, connection: socket.socket) -> Offer | str:
        """Return the offer that a request is for, or why there is none; wait for one if it may."""
        until = time.monotonic() + min(request.wait_s, _LONGEST_WAIT_S)
        with self._changed:
            while not self._offer and not self._closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK_S))
                if _http.is_gone(connection):  # it is not to count as one that has come
                    raise ConnectionResetError("the peer did not wait")
            offer = self._offer
            if offer is None:
                return f"it offers no state (step {request.step} is asked for)"
            if offer.step != request.step:
                return f"it offers step {offer.step}, not {request.step}"
            if request.verb == "data" and offer.digest != request.digest:
                return "its state is not the one whose layout was given"
            if request.nonce in offer.nonces:
                raise AuthenticationError("a request that was made before")
            offer.nonces.add(request.nonce)
            offer.clients.setdefault(request.client, set()).add(connection)
            return offer

    def _send(self, to: socket.socket, request: HealRequest, status: int, body: bytes) -> None:
        head = _http.answer_head(self._key, request.nonce, status, len(body), body)
        _http.send(to, [head, body])

    def _send_range(self, to: socket.socket, request: HealRequest, offer: Offer) -> None:
        head = _http.answer_head(self._key, request.nonce, _http.OK, request.num_body_bytes)
        _http.send(to, [head])
        sums = []
        for begin, end in request.blocks():
            with self._reading(offer):
                sums.append(_send_block(to, offer.pieces, begin, end))
        _http.send(to, [_http.seal_sums(self._key, request.nonce, sums)])

    @contextmanager
    def _reading(self, offer: Offer) -> Iterator[None]:
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


def _send_block(to: socket.socket, pieces: Pieces, begin: int, end: int) -> bytes:
    views = list(pieces.cut(begin, end))
    checksum = xxhash.xxh3_64()
    for view in views:  # first: what is sent next is in the cache then
        checksum.update(view)
    _http.send(to, views)
    return checksum.digest()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:  # switched off on this node
            pass
    return socket.create_server(("", 0))

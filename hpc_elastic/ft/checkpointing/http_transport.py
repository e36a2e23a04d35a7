"""The transport that a Manager has by default: from memory to memory, over connections of its own.

    manager = Manager(..., checkpoint_transport=HTTPTransport(timedelta(seconds=60)))

It serves the state where it is, without a copy; takes it from several peers at once; receives into
fresh memory, so that a heal that fails changes nothing; proves on both sides that the other belongs
to the run; and checks every block. See `_http` for what is sent, `_server` and `http_transport`
for how.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import xxhash

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing import _http, _layout
from hpc_elastic.ft.checkpointing._http import AnswerHead, HealRequest, Pieces
from hpc_elastic.ft.checkpointing._layout import PackedState, StateLayout, Target, digest
from hpc_elastic.ft.checkpointing._server import Offer, StateServer
from hpc_elastic.ft.checkpointing.transport import CheckpointTransport, HealError, HealTimeoutError
from hpc_elastic.transport.auth import peers_secret

T = TypeVar("T")

_NUM_CONNECTIONS = 2
"""One thread alone is slower than a network of 25 Gbit/s or the loopback."""

_log = logging.getLogger(__name__)


class HTTPTransport(CheckpointTransport[T]):
    """Serves and fetches states over HTTP, signed with the key that the run's workers share."""

    multi_source = True
    needs_group = False

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        num_chunks: int = 0,
        state_dict: Callable[[], object] | None = None,
        *,
        in_place: bool = False,
        key: bytes | None = None,
    ) -> None:
        """Begin to listen.

        Args:
            timeout: As torchft's; not used, since each call brings its own.
            num_chunks: How many connections to fetch over at least; 0: two, or one to each source.
            state_dict: Returns this replica's present state, of the same form as the peers'.
                Needed if there are DTensors in it, and for ``in_place``.
            in_place: Receive into the tensors of ``state_dict()`` that are on the CPU. Saves the
                memory of a second state; but nothing may use them meanwhile (so only where the
                quorum is not asynchronous), and a heal that fails leaves them half changed.
            key: What all replicas know and nobody else does; None: the run's secret, outside of a
                run the key of this user.

        Raises:
            ConfigError: an argument can not work.
            OSError: no port is free, or the key can not be read.
        """
        if num_chunks < 0:
            raise ConfigError("num_chunks", num_chunks, "give a number of connections, or 0")
        if in_place and state_dict is None:
            raise ConfigError("in_place", in_place, "give state_dict=, which returns the tensors")
        self._num_connections = num_chunks or _NUM_CONNECTIONS
        self._state_dict, self.in_place = state_dict, in_place
        self._key = key if key is not None else peers_secret()
        self._server = StateServer(self._key)
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._aborted = False

    def metadata(self) -> str:
        """Return the URLs of this process, one for each address of its node, the best first."""
        return self._server.urls

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Offer a state to so many peers; returns at once.

        It is read where it is, until `disallow_checkpoint` has returned.

        Raises:
            ConfigError: something in the state can not be sent; the message names its path.
        """
        state = PackedState(state_dict, step)
        layout = state.layout.to_json()
        rows = sorted(zip(state.layout.specs, state.raw, strict=True), key=lambda row: row[0].begin)
        pieces = Pieces(
            [(s.begin, s.num_bytes, _layout.reader(raw)) for s, raw in rows if s.num_bytes]
        )
        self._server.offer(
            Offer(step, layout, digest(layout), pieces, len(dst_ranks), timeout.total_seconds())
        )

    def disallow_checkpoint(self) -> None:
        """Return once the state that was offered may change.

        It waits for the peers that it was offered to, until the time-out of the offer; for those
        that never came at most `server.ARRIVAL_S`; for none after `abort`.
        """
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of peers, as it was offered there.

        Tensors are on the CPU, in memory of their own; DTensors on the device of this replica's.

        Args:
            src_rank: Replica rank of the best source, for messages.
            metadata: What one source's `metadata` returned, or a JSON list of several.
            step: Which step it must be at.
            timeout: For everything.

        Raises:
            HealError: no source gave it; the message says why, source by source.
            HealTimeoutError: none did in time.
        """
        began = time.monotonic()
        sources = json.loads(metadata) if metadata.startswith("[") else [metadata]
        wanted = WantedState(
            sources, self._key, step, timeout.total_seconds(), self._num_connections
        )
        target: list[Target] = []

        def make(layout: StateLayout) -> Pieces:
            target.append(Target(layout, self._state_dict, in_place=self.in_place))
            return Pieces([(at, len(v), _ranges(v)) for at, v in target[0].views()])

        try:
            self._run(Fetch(wanted, make))
        except HealError as e:
            e.add_note(f"the best source is replica {src_rank}")
            raise
        took_s = time.monotonic() - began
        done = target[0].layout.num_bytes / 1e6
        _log.info("step %d: %.1f MB from %d peers in %.3f s", step, done, len(sources), took_s)
        return cast(T, target[0].state())

    def abort(self) -> None:
        """See the base class."""
        with self._lock:
            self._aborted = True
            fetch = self._fetch
        self._server.abort()
        if fetch:
            fetch.abort()

    def resume(self) -> None:
        """See the base class."""
        with self._lock:
            self._aborted = False
        self._server.resume()

    def shutdown(self, wait: bool = True) -> None:
        """See the base class."""
        self.abort()
        self._server.close(wait=wait)

    def _run(self, fetch: Fetch) -> None:
        with self._lock:
            if self._aborted:
                raise HealError("the fetch of the state was aborted: the quorum is broken")
            self._fetch = fetch
        try:
            fetch.run()
        finally:
            with self._lock:
                self._fetch = None


def _ranges(view: memoryview) -> Callable[[int, int], Any]:
    return lambda begin, end: view[begin:end]


# ---- Fetches a state from its sources, over several connections at once, into memory of the caller
# Each connection has a thread: it gets the layout, then one range after the other
# (`http_transport`). What the sources must have in common is the layout, with the step and all
# values in it: that of the best source that answers counts, and others that differ are left out.
# A source that fails or is slow is left out, too, as long as there is another.


_BEST_S = 1.0
"""So much later than another's may the best source's layout come."""
_WORTH_BYTES = 32 << 20
"""A connection more is worth its beginning if there is so much for each."""
_FAILURES = (OSError, HealError)


@dataclass(frozen=True)
class WantedState:
    """What is fetched, and whence.

    Attributes:
        sources: `StateServer.urls` of each, the best first.
        key: What all replicas know.
        step: Of the state.
        timeout_s: For everything.
        num_connections: In all, if there are fewer sources; one to each at least.
    """

    sources: Sequence[str]
    key: bytes
    step: int
    timeout_s: float
    num_connections: int


class Fetch:
    """One fetch: `run` once."""

    def __init__(self, wanted: WantedState, make: Callable[[StateLayout], Pieces]) -> None:
        """Prepare it.

        Args:
            wanted: What and whence.
            make: Called once with the layout; returns the memory to fill.
        """
        self._wanted = wanted
        self._make = make
        self._client = _http.new_token()
        self._until = time.monotonic() + wanted.timeout_s
        self._changed = threading.Condition()
        self._sockets: dict[Fetcher, socket.socket] = {}
        self._live = set(_fetchers(wanted))
        self._layouts: dict[int, tuple[StateLayout, str]] = {}
        self._chosen: int | None = None
        self._answered: set[int] = set()
        self._first_layout_at = float("inf")
        self._failures: dict[int, str] = {}
        self._board: RangeScheduler | None = None
        self._digest = ""
        self._memory = Pieces([])
        self._stopped = False
        self._fatal: BaseException | None = None

    def run(self) -> None:
        """Return once the memory is filled; nothing is written into it after that, or an error.

        Raises:
            HealError: no source could give all of it; the message says why, source by source.
            HealTimeoutError: none did in time.
        """
        threads = [
            threading.Thread(
                target=self._fetch, args=(fetcher, place), name="heal-fetch", daemon=True
            )
            for place, fetcher in enumerate(sorted(self._live, key=lambda w: (w.number, w.source)))
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            while not self._is_over() and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)
            aborted, live = self._stopped, {fetcher.source for fetcher in self._live}
        self.abort()
        for thread in threads:
            thread.join()
        self._raise_unless_complete(aborted=aborted, live=live)
        self._notify_unused_sources()

    def _notify_unused_sources(self) -> None:
        """Send `done` to the sources that have not answered yet, so that they do not wait."""
        for number, urls in enumerate(self._wanted.sources):
            if number not in self._answered:
                note = HealRequest("", "done", self._wanted.step, self._client, "")
                args = urls, self._wanted.key, note
                threading.Thread(
                    target=notify_done, args=args, name="heal-done", daemon=True
                ).start()

    def abort(self) -> None:
        """End it, at once (any thread)."""
        with self._changed:
            self._stopped = True
            for connection in self._sockets.values():
                _http.cut(connection)
            self._changed.notify_all()

    def _is_over(self) -> bool:
        complete = self._board is not None and self._board.is_complete
        return complete or self._stopped or not self._live or self._fatal is not None

    def _raise_unless_complete(self, *, aborted: bool, live: set[int]) -> None:
        if self._fatal:
            raise self._fatal
        if self._board and self._board.is_complete:
            return
        if aborted:
            raise HealError("the fetch of the state was aborted: the quorum is broken")
        for source in live:
            late = "has not sent all" if source in self._layouts else "has not offered its state"
            self._failures.setdefault(source, f"{late} in time")
        text = "; ".join(f"{self._name(i)}: {why}" for i, why in sorted(self._failures.items()))
        text = f"the state of step {self._wanted.step} could not be fetched: {text}"
        raise (
            HealTimeoutError(f"{text} ({self._wanted.timeout_s:.3g} s)")
            if live
            else HealError(text)
        )

    def _name(self, source: int) -> str:
        return re.sub(r"/[0-9a-f]*(?=,|$)", "", self._wanted.sources[source])

    def _fetch(self, fetcher: Fetcher, place: int) -> None:
        try:
            if self._is_needed(fetcher, place):
                self._work(fetcher, self._connect(fetcher))
        except _FAILURES as e:
            self._fail(fetcher, str(e) or type(e).__name__)
        except BaseException as e:  # a state of ours that does not fit, or a bug
            with self._changed:
                self._fatal = self._fatal or e
        finally:
            with self._changed:
                self._live.discard(fetcher)
                connection = self._sockets.pop(fetcher, None)
                self._changed.notify_all()
            if connection:
                _http.close(connection)

    def _is_needed(self, fetcher: Fetcher, place: int) -> bool:
        """Wait until a connection is wanted, by its place in the line; False if it never is.

        The first begins at once, the others where there is enough to fetch, or if another source
        is in trouble.
        """
        patience = time.monotonic() + _BEST_S
        with self._changed:
            while place and not self._is_over():
                is_worth_it = self._board and self._board.num_bytes >= place * _WORTH_BYTES
                left = patience - time.monotonic()
                if is_worth_it or self._failures or left <= 0:
                    break
                self._changed.wait(left)
            return fetcher.source not in self._failures and not self._is_over()

    def _fail(self, fetcher: Fetcher, why: str) -> None:
        with self._changed:
            if self._stopped:
                return
            self._live.discard(fetcher)
            known = self._failures.setdefault(fetcher.source, why) is not why
            if self._live and not known:
                _log.warning("healing goes on without %s: %s", self._name(fetcher.source), why)
            if self._board:
                self._board.put_back(fetcher)
            if any(w.source != fetcher.source for w in self._live):
                self._drop_source(fetcher.source)

    def _drop_source(self, source: int) -> None:
        """End all connections to a source; those that fetch from it `_fail`, too, once they see."""
        for other in [w for w in self._live if w.source == source]:
            if other in self._sockets:
                _http.cut(self._sockets[other])
            if not (self._board and self._board.is_fetching(other)):
                self._live.discard(other)
        live = {w.source for w in self._live}
        if source in live:
            return
        if not self._board:
            self._layouts.pop(source, None)
        elif self._board.owner == source:
            self._board.set_owner(min(live))

    def _connect(self, fetcher: Fetcher) -> socket.socket:
        """Connect to the first of the source's addresses that answers as ours."""
        failure: Exception = HealError("it has no address")
        for url in self._wanted.sources[fetcher.source].split(","):
            try:
                return self._introduce(fetcher, url)
            except OSError as e:
                failure = e
                if self._stopped:
                    break
        raise failure

    def _introduce(self, fetcher: Fetcher, url: str) -> socket.socket:
        place = Address.of(url)
        connection = socket.socket(place.family, socket.SOCK_STREAM)
        with self._changed:
            if old := self._sockets.get(fetcher):
                _http.close(old)
            self._sockets[fetcher] = connection
            if self._stopped:
                raise ConnectionAbortedError("aborted")
        until_cut = self._left() + 1.0  # `run` cuts it off when time is up, and says why
        connection.settimeout(min(CONNECT_TIMEOUT_S, until_cut))
        connection.connect(place.where)
        _http.prepare(connection, until_cut)
        request = self._request(place.token, "layout")
        self._take_layout(fetcher, request_body(connection, self._wanted.key, request))
        return connection

    def _left(self) -> float:
        return max(0.001, self._until - time.monotonic())

    def _request(
        self, token: str, verb: _http.Verb, piece: FetchedPiece | None = None
    ) -> HealRequest:
        begin, end = (piece.begin, piece.end) if piece else (0, 0)
        return HealRequest(
            token, verb, self._wanted.step, self._client, _http.new_token(),
            self._left() + 1.0, self._digest if piece else "", begin, end,
        )  # fmt: skip

    def _take_layout(self, fetcher: Fetcher, raw: bytes) -> None:
        """Take a source's layout, and wait until there is memory for the layout that is fetched."""
        layout = StateLayout.from_json(raw)
        with self._changed:
            if fetcher not in self._live:
                raise HealError("its source is left out")
            self._first_layout_at = min(self._first_layout_at, time.monotonic())
            self._layouts[fetcher.source] = layout, digest(raw)
            self._answered.add(fetcher.source)
            self._changed.notify_all()
            while self._chosen is None and not self._stopped:
                left = self._first_layout_at + _BEST_S - time.monotonic()
                best = min(self._layouts)
                if left <= 0 or not any(w.source < best for w in self._live):
                    self._chosen = best
                else:
                    self._changed.wait(left)
            chosen = None if self._digest else self._chosen
            if chosen is not None:
                layout, self._digest = self._layouts[chosen]
        if chosen is not None:
            self._begin(layout, chosen)
        with self._changed:
            while not self._board and not self._is_over():
                self._changed.wait()
            if self._digest != digest(raw):
                raise HealError("its state is not that of the best source")

    def _begin(self, layout: StateLayout, chosen: int) -> None:
        memory = self._make(layout)  # outside of the lock, for `abort`
        with self._changed:
            live = {w.source for w in self._live}
            owner = chosen if chosen in live else min(live)
            self._memory = memory
            self._board = RangeScheduler(layout.small_bytes, layout.num_bytes, owner)
            self._changed.notify_all()

    def _work(self, fetcher: Fetcher, connection: socket.socket) -> None:
        token = Address.of(self._wanted.sources[fetcher.source].split(",")[0]).token
        while (piece := self._next(fetcher)) is not None:
            self._receive(connection, self._request(token, "data", piece))
            with self._changed:
                assert self._board
                self._board.finish(fetcher, time.monotonic())
                self._changed.notify_all()

    def _next(self, fetcher: Fetcher) -> FetchedPiece | None:
        """Return what to fetch next; None if all is done or the fetch is over."""
        with self._changed:
            while self._board and not self._is_over() and fetcher in self._live:
                now = time.monotonic()
                if piece := self._board.take(fetcher, now):
                    return piece
                slow, left = self._board.slowest(fetcher, now)
                if slow and slow in self._sockets:
                    _http.cut(self._sockets[slow])
                self._changed.wait(left or 1.0)
            return None

    def _receive(self, connection: socket.socket, request: HealRequest) -> None:
        key, sums = self._wanted.key, []
        _http.send(connection, [request.seal(key)])
        head = AnswerHead.parse(_http.receive_head(connection))
        if head.status != _http.OK or head.num_bytes != request.num_body_bytes:
            body = _http.receive(connection, min(head.num_bytes, _http.MAX_HEAD_BYTES))
            head.check(key, request.nonce, body)
            raise HealError(body.decode(errors="replace"))
        head.check(key, request.nonce)
        for begin, end in request.blocks():
            sums.append(self._receive_block(connection, begin, end))
        rest = head.num_bytes - (request.end - request.begin)
        _http.check_sums(key, request.nonce, sums, _http.receive(connection, rest))

    def _receive_block(self, connection: socket.socket, begin: int, end: int) -> bytes:
        views = list(self._memory.cut(begin, end))
        _http.receive_into(connection, views)
        checksum = xxhash.xxh3_64()
        for view in views:
            checksum.update(view)
        return checksum.digest()


def _fetchers(wanted: WantedState) -> list[Fetcher]:
    sources = len(wanted.sources)
    each = max(1, -(-wanted.num_connections // sources))
    return [Fetcher(source, number) for source in range(sources) for number in range(each)]


# ---- Which range of a state is fetched from which source (pure)
# A fetcher that is free takes the next range, so a fast source gives more. Small tensors come from
# one source, the *owner*; if it fails, all of them are taken again from the next. Where nothing is
# left to take, a free fetcher has the slowest of the others cut off, if that takes much longer than
# any before.


PIECE_BYTES = 8 << 20
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 0.25


@dataclass(frozen=True)
class FetchedPiece:
    """A range; ``is_small``: for the owner only."""

    begin: int
    end: int
    is_small: bool


@dataclass(frozen=True)
class Fetcher:
    """One connection to a source; both are numbered from 0, the best source first."""

    source: int
    number: int


@dataclass
class RangeScheduler:
    """The ranges of one state.

    Attributes:
        small_bytes: So many at the beginning are the owner's.
        num_bytes: Of the state.
        owner: A source.
    """

    small_bytes: int
    num_bytes: int
    owner: int
    _todo: list[FetchedPiece] = field(init=False)
    _small: list[FetchedPiece] = field(init=False)
    _under_way: dict[Fetcher, tuple[FetchedPiece, float]] = field(default_factory=dict)
    _num_done: int = 0
    _slowest_s: float = 0.0

    def __post_init__(self) -> None:
        self._small = _cut(0, self.small_bytes, is_small=True)
        self._todo = _cut(self.small_bytes, self.num_bytes, is_small=False)[::-1]
        self._num_pieces = len(self._small) + len(self._todo)
        self._smalls = tuple(self._small)

    @property
    def is_complete(self) -> bool:
        """Whether everything is there."""
        return self._num_done == self._num_pieces

    def take(self, fetcher: Fetcher, now: float) -> FetchedPiece | None:
        """Return what a connection is to fetch next; None if there is nothing for it now."""
        if fetcher.source == self.owner and self._small:
            piece = self._small.pop()
        elif self._todo:
            piece = self._todo.pop()
        else:
            return None
        self._under_way[fetcher] = piece, now
        return piece

    def is_fetching(self, fetcher: Fetcher) -> bool:
        """Tell whether a connection has taken a piece that is not finished."""
        return fetcher in self._under_way

    def finish(self, fetcher: Fetcher, now: float) -> None:
        """Note that a connection has fetched what it took."""
        _, since = self._under_way.pop(fetcher)
        self._slowest_s = max(self._slowest_s, now - since)
        self._num_done += 1

    def put_back(self, fetcher: Fetcher) -> None:
        """Note that a connection has failed: others take what it had."""
        if fetcher not in self._under_way:
            return
        piece, _ = self._under_way.pop(fetcher)
        (self._small if piece.is_small else self._todo).append(piece)

    def set_owner(self, source: int) -> None:
        """Make another source the owner: all small tensors are fetched again, from it.

        Nothing of the last one is under way any more.
        """
        self._num_done -= len(self._smalls) - len(self._small)
        self._small = list(self._smalls)
        self.owner = source

    def slowest(self, than: Fetcher, now: float) -> tuple[Fetcher | None, float]:
        """Return the fetcher to cut off for one that has nothing to do, or when to call again.

        Returns:
            A connection to another source and 0, or None and seconds.
        """
        patience = max(_LEAST_PATIENCE_S, _PATIENCE * self._slowest_s)
        others = [
            (since, w) for w, (_, since) in self._under_way.items() if w.source != than.source
        ]
        if not others:
            return None, patience
        since, fetcher = min(others, key=lambda pair: pair[0])
        left = since + patience - now
        return (fetcher, 0.0) if left <= 0 else (None, left)


def _cut(begin: int, end: int, *, is_small: bool) -> list[FetchedPiece]:
    starts = range(begin, end, PIECE_BYTES)
    return [FetchedPiece(at, min(at + PIECE_BYTES, end), is_small) for at in starts]


# ---- One request to a peer's server: its address, and an answer that is proved to be the peer's


CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the token that it wants."""

    family: int
    where: Any
    token: str

    @classmethod
    def of(cls, url: str) -> Address:
        """Return one of `StateServer.urls`, taken apart.

        Raises:
            OSError: its host is unknown.
        """
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 0
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return cls(family, where, parts.path.strip("/"))


def request_body(connection: socket.socket, key: bytes, request: HealRequest) -> bytes:
    """Return the body of a peer's answer.

    Raises:
        HealError: the peer refuses, and says why.
        AuthenticationError: it is none of ours.
        OSError: the connection has ended, or nothing came in time.
    """
    _http.send(connection, [request.seal(key)])
    head = AnswerHead.parse(_http.receive_head(connection))
    body = _http.receive(connection, head.num_bytes)
    head.check(key, request.nonce, body)
    if head.status != _http.OK:
        raise HealError(body.decode(errors="replace"))
    return body


def notify_done(urls: str, key: bytes, note: HealRequest) -> None:
    """Send `done` to the first address of a peer that answers.

    Args:
        urls: `StateServer.urls`.
        key: What all replicas know.
        note: The request, but for its token and nonce.
    """
    for url in urls.split(","):
        try:
            place = Address.of(url)
            with socket.socket(place.family, socket.SOCK_STREAM) as connection:
                connection.settimeout(CONNECT_TIMEOUT_S)
                connection.connect(place.where)
                _http.prepare(connection, CONNECT_TIMEOUT_S)
                request_body(
                    connection, key, replace(note, token=place.token, nonce=_http.new_token())
                )
                return
        except _FAILURES as e:
            _log.debug("%s did not get `done`: %s", url, e)

"""The transport that a Manager has by default: from memory to memory, over connections of its own.

    manager = Manager(..., checkpoint_transport=HTTPTransport(timedelta(seconds=60)))

It serves the state where it is, without a copy; takes it from several peers at once; receives into
fresh memory, so that a heal that fails changes nothing; proves on both sides that the other belongs
to the run; and checks every block. `_wire` has the messages and the server.
"""

# ruff: noqa: D102  (some names say it all)

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import xxhash

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing import _layout, _wire
from hpc_elastic.ft.checkpointing._wire import (
    HealConnection,
    HealRequest,
    Offer,
    Pieces,
    StateServer,
)
from hpc_elastic.ft.checkpointing.transport import (
    CheckpointTransport,
    HealError,
    HealTimeoutError,
    UnusableStateError,
)
from hpc_elastic.transport.auth import AuthenticationError, peers_secret
from hpc_elastic.transport.connection import connect_and_prove
from hpc_elastic.transport.interface import own_addresses

T = TypeVar("T")

Range = tuple[int, int]
"""Begin and end in the stream of a state's bytes."""
_NUM_CONNECTIONS = 2
"""One thread alone is slower than a network of 25 Gbit/s or the loopback."""

_ABORTED = "the fetch of the state was aborted: the quorum is broken"

_log = logging.getLogger(__name__)


class HTTPTransport(CheckpointTransport[T]):
    """Serves and fetches states, over connections signed with the key that the workers share."""

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
            num_chunks: Least number of connections to fetch over; 0: two, or one to each source.
            state_dict: Returns this replica's present state; None: the Manager's. Needed if there
                are DTensors in it, and for ``in_place``.
            in_place: Receive into the tensors of ``state_dict()`` that are on the CPU. Saves the
                memory of a second state; but nothing may use them meanwhile (so only where the
                quorum is not asynchronous), and a heal that fails leaves them half changed.
            key: Known to all replicas, and to no other process; None: the run's secret, outside of
                a run the key of this user.

        Raises:
            ConfigError: An argument cannot work.
            OSError: No port is free, or the key cannot be read.
        """
        if num_chunks < 0:
            raise ConfigError("num_chunks", num_chunks, "give a number of connections, or 0")
        if in_place and state_dict is None:
            raise ConfigError("in_place", in_place, "give state_dict=, which returns the tensors")
        self._num_connections = num_chunks or _NUM_CONNECTIONS
        self.state_dict, self.in_place = state_dict, in_place
        self._key = key if key is not None else peers_secret()
        self._server = StateServer(self._key, own_addresses())
        self._lock = threading.Lock()
        self._fetch: Fetch | None = None
        self._asking: socket.socket | None = None
        self._aborted = False

    def metadata(self) -> str:
        """Return the URL of this process."""
        return self._server.url

    def address(self) -> str:
        """Return what `metadata` does (torchft's name)."""
        return self.metadata()

    def allow_checkpoint(self, step: int) -> None:
        """Refuse: a state is offered together with its step.

        Raises:
            NotImplementedError: Always; call `send_checkpoint`.
        """
        raise NotImplementedError(
            f"allow_checkpoint({step}) offers no state: call send_checkpoint instead"
        )

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Offer a state to these peers; returns at once.

        It is read where it is, until `disallow_checkpoint` has returned.

        Raises:
            ConfigError: Something in the state cannot be sent; the message names its path.
        """
        self._offer(len(dst_ranks), step, state_dict, timeout)

    def offer_parts(self, step: int, state_dict: T, timeout: timedelta) -> None:
        """Offer a state to peers that fetch parts of it; returns at once.

        `disallow_checkpoint` waits only for peers that are fetching then.

        Raises:
            ConfigError: As `send_checkpoint`.
        """
        self._offer(0, step, state_dict, timeout)

    def refuse_checkpoint(
        self, dst_ranks: list[int], step: int, reason: str, timeout: timedelta
    ) -> None:
        """See the base class."""
        layout, timeout_s = _layout.encode_refusal(step, reason), timeout.total_seconds()
        self._server.offer(Offer(step, layout, (), Pieces([]), len(dst_ranks), timeout_s))

    def _offer(self, num_clients: int, step: int, state_dict: T, timeout: timedelta) -> None:
        state = _layout.PackedState(state_dict, step)
        pieces = Pieces(_layout.stream_parts(state.layout, state.raw))
        layout, timeout_s = state.layout.to_json(), timeout.total_seconds()
        self._server.offer(Offer(step, layout, state.raw, pieces, num_clients, timeout_s))

    def disallow_checkpoint(self) -> None:
        """Return once the state that was offered may change.

        It waits for the peers that it was offered to, until the time-out of the offer; for those
        that never came at most `_wire.ARRIVAL_S`; for none after `abort`.
        """
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of peers, as it was offered there.

        Tensors are on the CPU, in memory of their own; DTensors on the device of this replica's.

        Args:
            src_rank: Replica rank of the best source, for messages.
            metadata: What one source's `metadata` returned, or a JSON list of several.
            step: Which step it must be at.
            timeout: For the first byte, and then without any progress.

        Raises:
            HealError: No source gave it; the message has the reason of each.
            UnusableStateError: It cannot be sent, or does not fit here.
            HealTimeoutError: None did in time.
        """
        began = time.monotonic()
        sources = json.loads(metadata) if metadata.startswith("[") else [metadata]
        target: list[_layout.Target] = []

        def plan(layout: _layout.StateLayout) -> FetchPlan:
            target.append(_layout.Target(layout, self.state_dict, in_place=self.in_place))
            memory = Pieces(_layout.stream_parts(layout, target[0].raw))
            small, end = layout.small_bytes, layout.num_bytes
            return FetchPlan(memory, [(0, small)], [(small, end)])

        try:
            self.fetch_parts(sources, step, plan, timeout, lambda _: False)
        except HealError as e:
            e.add_note(f"the best source is replica {src_rank}")
            raise
        took_s = time.monotonic() - began
        done = target[0].layout.num_bytes / 1e6
        _log.info("step %d: %.1f MB from %d peers in %.3f s", step, done, len(sources), took_s)
        return cast(T, target[0].state())

    def fetch_parts(
        self,
        sources: Sequence[str],
        step: int,
        plan: Callable[[_layout.StateLayout], FetchPlan],
        timeout: timedelta,
        is_enough: Callable[[set[Range]], bool],
    ) -> set[Range]:
        """Fetch parts of the state of peers; return the ranges that have come.

        Until all that was planned is there, or the ranges are enough, which is asked often.
        ``plan`` is called once with the layout, on a thread of this call; its ranges are cut at
        `PIECE_BYTES`. Other planned memory may have changed, too. ``sources``, the time-out and
        errors are as those of `recv_checkpoint`.
        """
        timeout_s, num = timeout.total_seconds(), self._num_connections
        fetch = Fetch(sources, self._key, step, timeout_s, num, plan, is_enough)
        try:
            with self._lock:
                if self._aborted:
                    raise HealError(_ABORTED)
                self._fetch = fetch
            return fetch.run()
        finally:
            with self._lock:
                self._fetch = None

    def fetch_digests(
        self, source: str, step: int, layout: _layout.StateLayout, timeout: timedelta
    ) -> list[int]:
        """Return the digests (`_layout.digest_tensor`) of a peer's tensors, by their number.

        Its state must be at this step and have this layout. Raises HealError if it does not give
        them, and OSError if it cannot be reached, or `abort` was called.
        """
        digest, timeout_s = _layout.digest(layout.to_json()), timeout.total_seconds()
        client = secrets.token_hex(16)
        request = HealRequest("", "digests", step, client, timeout_s, digest)
        answer = json.loads(send_request(source, self._key, request, timeout_s, self._hold))
        if not isinstance(answer, list) or len(answer) != len(layout.specs):
            raise HealError(f"no digests of {len(layout.specs)} tensors: {str(answer)[:80]}")
        return [int(digest) for digest in answer]

    def _hold(self, connection: socket.socket | None) -> None:
        with self._lock:
            self._asking = connection
            if self._aborted and connection:
                _wire.cut(connection)

    def look_again(self) -> None:
        """Let `fetch_parts` ask at once whether it has enough (any thread)."""
        with self._lock:
            fetch = self._fetch
        if fetch:
            fetch.look_again()

    def abort(self) -> None:
        """See the base class."""
        with self._lock:
            self._aborted = True
            fetch = self._fetch
            if self._asking:
                _wire.cut(self._asking)
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


CONNECT_TIMEOUT_S = 5.0
_BEST_S = 1.0
"""The layout of the best source may come this much later than another's."""
_WORTH_BYTES = 32 << 20
"""A further connection is worth its start if there are as many bytes for each."""
_FAILURES = (OSError, HealError)


@dataclass(frozen=True)
class FetchPlan:
    """What to fetch of a state, and where to; nothing is written outside of the ranges.

    The ranges of ``small`` have to come from one source; the others are fetched in their order.
    """

    memory: Pieces
    small: Sequence[Range]
    rest: Sequence[Range]


class Fetch:
    """One fetch of a state: `run` once.

    Each connection has a thread: it gets the layout, then one range after the other. What the
    sources must have in common is the layout, with the step and all values in it: that of the best
    source that answers counts, and others that differ are left out. A source that fails or is slow
    is left out, too, as long as there is another.
    """

    def __init__(
        self,
        sources: Sequence[str],
        key: bytes,
        step: int,
        timeout_s: float,
        num_connections: int,
        plan: Callable[[_layout.StateLayout], FetchPlan],
        is_enough: Callable[[set[Range]], bool],
    ) -> None:
        """Prepare it; see `HTTPTransport.fetch_parts`.

        ``sources`` are `StateServer.url` of each, the best first; each gets at least one
        connection. The time-out is until the first block, and from each to the next, of any source.
        """
        self._sources = sources
        self._key = key
        self._step = step
        self._timeout_s = timeout_s
        self._plan, self._is_enough = plan, is_enough
        self._client = secrets.token_hex(16)
        self._until = time.monotonic() + timeout_s
        self._changed = threading.Condition()
        self._sockets: dict[Fetcher, socket.socket] = {}
        each = max(1, -(-num_connections // len(sources)))
        self._live = {Fetcher(s, n) for s in range(len(sources)) for n in range(each)}
        self._layouts: dict[int, tuple[_layout.StateLayout, str]] = {}
        self._chosen: int | None = None
        self._answered: set[int] = set()
        self._first_layout_at = float("inf")
        self._failures: dict[int, str] = {}
        self._ranges: RangeScheduler | None = None
        self._digest = ""
        self._memory = Pieces([])
        self._stopped = False
        self._fatal: BaseException | None = None

    def run(self) -> set[Range]:
        """Return the ranges that have come, once they are enough, or all.

        Nothing is written into the memory after that, or after an error. Raises HealError, with the
        reason of each, if no source could give all of it, and HealTimeoutError if none did in time.
        """
        threads = [
            threading.Thread(target=self._fetch, args=(f, i), name="heal-fetch", daemon=True)
            for i, f in enumerate(sorted(self._live, key=lambda f: (f.number, f.source)))
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            while not self._is_over() and (rest_s := self._until - time.monotonic()) > 0:
                self._changed.wait(rest_s)
            aborted, live = self._stopped, {fetcher.source for fetcher in self._live}
            has_enough = self._has_enough()
        self.abort()
        for thread in threads:
            thread.join()
        if self._fatal:
            raise self._fatal
        if has_enough:
            return self._ranges.finished if self._ranges else set()
        if not (self._ranges and self._ranges.is_complete):
            if aborted:
                raise HealError(_ABORTED)
            for source in live:
                late = "sent all" if source in self._layouts else "offered its state"
                self._failures.setdefault(source, f"has not {late} in time")
            reasons = (f"{self._name(i)}: {why}" for i, why in sorted(self._failures.items()))
            text = f"the state of step {self._step} could not be fetched: {'; '.join(reasons)}"
            raise HealTimeoutError(f"{text} ({self._timeout_s:.3g} s)") if live else HealError(text)
        for number, url in enumerate(self._sources):
            if number not in self._answered:  # it shall not wait
                threading.Thread(
                    target=self._send_done, args=(url,), name="heal-done", daemon=True
                ).start()
        return self._ranges.finished

    def _send_done(self, url: str) -> None:
        done = HealRequest("", "done", self._step, self._client)
        try:
            send_request(url, self._key, done, CONNECT_TIMEOUT_S)
        except _FAILURES as e:
            _log.debug("%s did not get `done`: %s", url, e)

    def look_again(self) -> None:
        """Ask at once whether there is enough (any thread)."""
        with self._changed:
            self._changed.notify_all()

    def abort(self) -> None:
        """End it, at once (any thread)."""
        with self._changed:
            self._stopped = True
            for connection in self._sockets.values():
                _wire.cut(connection)
            self._changed.notify_all()

    def _is_over(self) -> bool:
        complete = self._ranges is not None and self._ranges.is_complete
        is_ended = self._stopped or not self._live or self._fatal is not None
        return complete or is_ended or self._has_enough()

    def _has_enough(self) -> bool:
        return self._is_enough(self._ranges.finished if self._ranges else set())

    def _name(self, source: int) -> str:
        return self._sources[source].rpartition("/")[0]  # without its token

    def _fetch(self, fetcher: Fetcher, place: int) -> None:
        try:
            if self._is_needed(fetcher, place):
                connection = self._connect(fetcher)
                token = _token(self._sources[fetcher.source])
                while (piece := self._next_piece(fetcher)) is not None:
                    self._receive_piece(connection, self._request(token, piece))
                    with self._changed:
                        assert self._ranges
                        self._ranges.finish(fetcher, time.monotonic())
                        self._changed.notify_all()
        except BaseException as e:
            if isinstance(e, _FAILURES) and not isinstance(e, UnusableStateError):
                self._handle_failure(fetcher, str(e) or type(e).__name__)
            else:  # the peers' states are alike, so another source is no help; or a bug
                with self._changed:
                    self._fatal = self._fatal or e
        finally:
            with self._changed:
                self._live.discard(fetcher)
                last = self._sockets.pop(fetcher, None)
                self._changed.notify_all()
            if last:
                _wire.close(last)

    def _is_needed(self, fetcher: Fetcher, place: int) -> bool:
        """Wait until a connection is wanted, by its place in the line; return False if it never is.

        The first begins at once, the others where there is enough to fetch, or if another source
        is in trouble.
        """
        until = time.monotonic() + _BEST_S
        with self._changed:
            while place and not self._is_over():
                is_worth_it = self._ranges and self._ranges.num_bytes >= place * _WORTH_BYTES
                rest_s = until - time.monotonic()
                if is_worth_it or self._failures or rest_s <= 0:
                    break
                self._changed.wait(rest_s)
            return fetcher.source not in self._failures and not self._is_over()

    def _handle_failure(self, fetcher: Fetcher, why: str) -> None:
        """Go on without a source, if there is another; cut its connections."""
        with self._changed:
            if self._stopped:
                return
            failed, live = fetcher.source, self._live
            live.discard(fetcher)
            known = self._failures.setdefault(failed, why) is not why
            if live and not known:
                _log.warning("healing goes on without %s: %s", self._name(failed), why)
            if self._ranges:
                self._ranges.put_back(fetcher)
            if all(f.source == failed for f in live):
                return
            for other in [f for f in live if f.source == failed]:
                if other in self._sockets:
                    _wire.cut(self._sockets[other])
                if not (self._ranges and self._ranges.is_fetching(other)):
                    live.discard(other)
            sources = {f.source for f in live}
            if failed in sources:
                return
            if not self._ranges:
                self._layouts.pop(failed, None)
            elif self._ranges.owner == failed:
                self._ranges.set_owner(min(sources))

    def _connect(self, fetcher: Fetcher) -> HealConnection:
        """Return a connection to the source, once its layout has been taken."""

        def hold(connection: socket.socket) -> None:
            with self._changed:
                self._sockets[fetcher] = connection
                if self._stopped:
                    raise ConnectionAbortedError("aborted")

        # `run` cuts it off when time is up, with a message of its own
        until_cut_s = max(0.001, self._until - time.monotonic()) + 1.0
        url = self._sources[fetcher.source]
        connection = _connect(url, self._key, until_cut_s, hold)
        self._add_layout(fetcher, connection.request_body(self._request(_token(url))))
        return connection

    def _request(self, token: str, piece: Range | None = None) -> HealRequest:
        """Return the request for the layout, or for a piece."""
        wait_s = max(0.001, self._until - time.monotonic()) + 1.0
        of = self._step, self._client, wait_s
        if piece is None:
            return HealRequest(token, "layout", *of)
        return HealRequest(token, "data", *of, self._digest, *piece)

    def _add_layout(self, fetcher: Fetcher, raw: bytes) -> None:
        """Add a source's layout, and wait until there is memory for the layout that is fetched."""
        layout = _layout.StateLayout.from_json(raw)
        with self._changed:
            if fetcher not in self._live:
                raise HealError("its source is left out")
            self._first_layout_at = min(self._first_layout_at, time.monotonic())
            self._layouts[fetcher.source] = layout, _layout.digest(raw)
            self._answered.add(fetcher.source)
            self._changed.notify_all()
            while self._chosen is None and not self._stopped:
                rest_s = self._first_layout_at + _BEST_S - time.monotonic()
                best = min(self._layouts)
                if rest_s <= 0 or not any(f.source < best for f in self._live):
                    self._chosen = best
                else:
                    self._changed.wait(rest_s)
            chosen = None if self._digest else self._chosen
            if chosen is not None:
                layout, self._digest = self._layouts[chosen]
        if chosen is not None:
            plan = self._plan(layout)  # outside of the lock, for `abort`
            with self._changed:
                live = {f.source for f in self._live}
                owner = chosen if chosen in live else min(live)
                self._memory = plan.memory
                self._ranges = RangeScheduler(plan.small, plan.rest, owner)
                self._changed.notify_all()
        with self._changed:
            while not self._ranges and not self._is_over():
                self._changed.wait()
            if self._digest != _layout.digest(raw):
                raise HealError("its state is not that of the best source")

    def _next_piece(self, fetcher: Fetcher) -> Range | None:
        """Return what to fetch next; None if all is done or the fetch is over."""
        with self._changed:
            while self._ranges and not self._is_over() and fetcher in self._live:
                now = time.monotonic()
                if piece := self._ranges.take_piece(fetcher, now):
                    return piece
                slow, rest_s = self._ranges.find_slow(fetcher, now)
                if slow and slow in self._sockets:
                    _wire.cut(self._sockets[slow])
                self._changed.wait(rest_s or 1.0)
            return None

    def _receive_piece(self, connection: HealConnection, request: HealRequest) -> None:
        connection.request_answer(request)
        sums = b""
        for begin, end in request.blocks():
            views = list(self._memory.cut(begin, end))
            _wire.receive_into(connection.sock, views)
            checksum = xxhash.xxh3_64()
            for view in views:
                checksum.update(view)
            sums += checksum.digest()
            self._until = time.monotonic() + self._timeout_s
        if connection.receive().get("sums") != sums.hex():
            raise AuthenticationError("bytes were damaged on their way")


PIECE_BYTES = 8 << 20
_SLOW_FACTOR = 4.0
_LEAST_SLOW_S = 0.25
"""A connection is slow after this factor of the longest fetch of a range, and these seconds."""


class Fetcher(NamedTuple):
    """One connection to a source; both are numbered from 0, the best source first."""

    source: int
    number: int


class RangeScheduler:
    """The ranges of one state: ``small`` ones, which are the owner's, and others in their order.

    A fetcher that is free takes the next range, so a fast source gives more. Small tensors come
    from one source, the *owner*; if it fails, all of them are taken again from the next. Where
    nothing is left to take, a free fetcher has the slowest of the others cut off, if that takes
    much longer than any range before.
    """

    def __init__(self, small: Sequence[Range], rest: Sequence[Range], owner: int) -> None:
        self.num_bytes = sum(end - begin for begin, end in (*small, *rest))
        self.owner = owner
        self.finished: set[Range] = set()
        self._smalls = frozenset(piece for whole in small for piece in cut_range(whole))
        self._small = list(self._smalls)
        self._todo = [piece for whole in rest for piece in cut_range(whole)][::-1]
        self._num_pieces = len(self._small) + len(self._todo)
        self._under_way: dict[Fetcher, tuple[Range, float]] = {}
        self._slowest_s = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self._num_pieces

    def take_piece(self, fetcher: Fetcher, now: float) -> Range | None:
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
        return fetcher in self._under_way

    def finish(self, fetcher: Fetcher, now: float) -> None:
        piece, since = self._under_way.pop(fetcher)
        self._slowest_s = max(self._slowest_s, now - since)
        self.finished.add(piece)

    def put_back(self, fetcher: Fetcher) -> None:
        """Note that a connection has failed: others take what it had."""
        if fetcher in self._under_way:
            piece, _ = self._under_way.pop(fetcher)
            (self._small if piece in self._smalls else self._todo).append(piece)

    def set_owner(self, source: int) -> None:
        """Make another source the owner: all small tensors are fetched again, from it.

        Nothing of the last one is under way any more.
        """
        self.finished -= self._smalls
        self._small = list(self._smalls)
        self.owner = source

    def find_slow(self, free: Fetcher, now: float) -> tuple[Fetcher | None, float]:
        """Return a connection to cut off for a free one, and 0; or None, and when to call again."""
        limit_s = max(_LEAST_SLOW_S, _SLOW_FACTOR * self._slowest_s)
        taken = [(at, f) for f, (_, at) in self._under_way.items() if f.source != free.source]
        if not taken:
            return None, limit_s
        since, fetcher = min(taken, key=lambda pair: pair[0])
        rest_s = since + limit_s - now
        return (fetcher, 0.0) if rest_s <= 0 else (None, rest_s)


def cut_range(whole: Range) -> list[Range]:
    """Return the pieces of a range, of `PIECE_BYTES` each but the last; none if it is empty."""
    begin, end = whole
    return [(at, min(at + PIECE_BYTES, end)) for at in range(begin, end, PIECE_BYTES)]


# ---- one request to a peer's server


def _token(url: str) -> str:
    return url.rpartition("/")[2]


def _connect(
    url: str, key: bytes, timeout_s: float, hold: Callable[[socket.socket], None]
) -> HealConnection:
    """Return a connection to a peer's server.

    The time-out is for the handshake, and for silence later. ``hold`` is called with each
    connection that is begun; it may be cut from then on. Raises AuthenticationError if the peer has
    another key, and OSError if it is not reached.
    """
    parts = urlsplit(url)

    def connected() -> socket.socket:
        host, port = parts.hostname or "", parts.port or 0
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            hold(connection)
            connection.settimeout(min(CONNECT_TIMEOUT_S, timeout_s))
            connection.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    try:
        sock, signer = connect_and_prove(connected, key, _wire.SESSION, timeout_s=timeout_s)
    except AuthenticationError as e:
        remedy = "outside of a run all nodes need the same ~/.config/hpc_elastic/key"
        raise AuthenticationError(
            f"it does not know our key, or is another process: {remedy}"
        ) from e
    return HealConnection(sock, signer, timeout_s)


def send_request(
    url: str,
    key: bytes,
    request: HealRequest,
    timeout_s: float,
    hold: Callable[[socket.socket | None], None] = lambda _: None,
) -> bytes:
    """Return a peer's answer; `hold` as in `_connect`, and with None at the end."""
    try:
        connection = _connect(url, key, timeout_s, hold)
        with connection.sock:
            return connection.request_body(replace(request, token=_token(url)))
    finally:
        hold(None)

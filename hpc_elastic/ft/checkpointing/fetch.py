"""Fetches a state from its sources, over several connections at once, into memory of the caller.

Each connection has a thread: it gets the layout, then one range after the other (`board`). What the
sources must have in common is the layout, with the step and all values in it: that of the best
source that answers counts, and others that differ are left out. A source that fails or is slow is
left out, too, as long as there is another.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from hpc_elastic.ft.checkpointing import messages, sockets
from hpc_elastic.ft.checkpointing.asking import CONNECT_TIMEOUT_S, Address, ask, tell
from hpc_elastic.ft.checkpointing.board import Board, Fetcher, Piece
from hpc_elastic.ft.checkpointing.layout import Layout, digest
from hpc_elastic.ft.checkpointing.messages import AnswerHead, Request, StrangerError
from hpc_elastic.ft.checkpointing.sockets import Pieces
from hpc_elastic.ft.checkpointing.transport import HealError, HealTimeoutError

_BEST_S = 1.0
"""So much later than another's may the best source's layout come."""
_WORTH_BYTES = 32 << 20
"""A connection more is worth its beginning if there is so much for each."""
_FAILURES = (OSError, StrangerError, HealError)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """What is fetched, and whence.

    Attributes:
        sources: `Server.urls` of each, the best first.
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

    def __init__(self, wanted: Wanted, make: Callable[[Layout], Pieces]) -> None:
        """Prepare it.

        Args:
            wanted: What and whence.
            make: Called once with the layout; returns the memory to fill.
        """
        self._wanted = wanted
        self._make = make
        self._client = messages.new_token()
        self._until = time.monotonic() + wanted.timeout_s
        self._changed = threading.Condition()
        self._sockets: dict[Fetcher, socket.socket] = {}
        self._live = set(_fetchers(wanted))
        self._layouts: dict[int, tuple[Layout, str]] = {}
        self._chosen: int | None = None
        self._heard: set[int] = set()
        self._first_layout_at = float("inf")
        self._failures: dict[int, str] = {}
        self._board: Board | None = None
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
            threading.Thread(target=self._fetch, args=(who, place), name="heal-fetch", daemon=True)
            for place, who in enumerate(sorted(self._live, key=lambda w: (w.number, w.source)))
        ]
        for thread in threads:
            thread.start()
        with self._changed:
            while not self._is_over() and (left := self._until - time.monotonic()) > 0:
                self._changed.wait(left)
            aborted, live = self._stopped, {who.source for who in self._live}
        self.abort()
        for thread in threads:
            thread.join()
        self._raise_unless_complete(aborted=aborted, live=live)
        self._tell_the_others()

    def _tell_the_others(self) -> None:
        """Tell the sources that have not been heard of yet that they need not wait for us."""
        for number, urls in enumerate(self._wanted.sources):
            if number not in self._heard:
                note = Request("", "done", self._wanted.step, self._client, "")
                args = urls, self._wanted.key, note
                threading.Thread(target=tell, args=args, name="heal-done", daemon=True).start()

    def abort(self) -> None:
        """End it, at once (any thread)."""
        with self._changed:
            self._stopped = True
            for connection in self._sockets.values():
                sockets.cut(connection)
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

    def _fetch(self, who: Fetcher, place: int) -> None:
        try:
            if self._is_needed(who, place):
                self._work(who, self._connect(who))
        except _FAILURES as e:
            self._fail(who, str(e) or type(e).__name__)
        except BaseException as e:  # a state of ours that does not fit, or a bug
            with self._changed:
                self._fatal = self._fatal or e
        finally:
            with self._changed:
                self._live.discard(who)
                connection = self._sockets.pop(who, None)
                self._changed.notify_all()
            if connection:
                sockets.close(connection)

    def _is_needed(self, who: Fetcher, place: int) -> bool:
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
            return who.source not in self._failures and not self._is_over()

    def _fail(self, who: Fetcher, why: str) -> None:
        with self._changed:
            if self._stopped:
                return
            self._live.discard(who)
            known = self._failures.setdefault(who.source, why) is not why
            if self._live and not known:
                _log.warning("healing goes on without %s: %s", self._name(who.source), why)
            if self._board:
                self._board.give_back(who)
            if any(w.source != who.source for w in self._live):
                self._leave_out(who.source)

    def _leave_out(self, source: int) -> None:
        """End all connections to a source; those that fetch from it `_fail`, too, once they see."""
        for other in [w for w in self._live if w.source == source]:
            if other in self._sockets:
                sockets.cut(self._sockets[other])
            if not (self._board and self._board.is_fetching(other)):
                self._live.discard(other)
        live = {w.source for w in self._live}
        if source in live:
            return
        if not self._board:
            self._layouts.pop(source, None)
        elif self._board.owner == source:
            self._board.own(min(live))

    def _connect(self, who: Fetcher) -> socket.socket:
        """Connect to the first of the source's addresses that answers as ours."""
        failure: Exception = HealError("it has no address")
        for url in self._wanted.sources[who.source].split(","):
            try:
                return self._introduce(who, url)
            except (OSError, StrangerError) as e:
                failure = e
                if self._stopped:
                    break
        raise failure

    def _introduce(self, who: Fetcher, url: str) -> socket.socket:
        place = Address.of(url)
        connection = socket.socket(place.family, socket.SOCK_STREAM)
        with self._changed:
            if old := self._sockets.get(who):
                sockets.close(old)
            self._sockets[who] = connection
            if self._stopped:
                raise ConnectionAbortedError("aborted")
        until_cut = self._left() + 1.0  # `run` cuts it off when time is up, and says why
        connection.settimeout(min(CONNECT_TIMEOUT_S, until_cut))
        connection.connect(place.where)
        sockets.prepare(connection, until_cut)
        request = self._request(place.token, "layout")
        self._announce(who, ask(connection, self._wanted.key, request))
        return connection

    def _left(self) -> float:
        return max(0.001, self._until - time.monotonic())

    def _request(self, token: str, verb: messages.Verb, piece: Piece | None = None) -> Request:
        begin, end = (piece.begin, piece.end) if piece else (0, 0)
        return Request(
            token, verb, self._wanted.step, self._client, messages.new_token(),
            self._left() + 1.0, self._digest if piece else "", begin, end,
        )  # fmt: skip

    def _announce(self, who: Fetcher, raw: bytes) -> None:
        """Take a source's layout, and wait until there is memory for that which counts."""
        layout = Layout.from_json(raw)
        with self._changed:
            if who not in self._live:
                raise HealError("its source is left out")
            self._first_layout_at = min(self._first_layout_at, time.monotonic())
            self._layouts[who.source] = layout, digest(raw)
            self._heard.add(who.source)
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

    def _begin(self, layout: Layout, chosen: int) -> None:
        memory = self._make(layout)  # outside of the lock, for `abort`
        with self._changed:
            live = {w.source for w in self._live}
            owner = chosen if chosen in live else min(live)
            self._memory = memory
            self._board = Board(layout.small_bytes, layout.num_bytes, owner)
            self._changed.notify_all()

    def _work(self, who: Fetcher, connection: socket.socket) -> None:
        token = Address.of(self._wanted.sources[who.source].split(",")[0]).token
        while (piece := self._next(who)) is not None:
            self._receive(connection, self._request(token, "data", piece))
            with self._changed:
                assert self._board
                self._board.finish(who, time.monotonic())
                self._changed.notify_all()

    def _next(self, who: Fetcher) -> Piece | None:
        """Return what to fetch next; None if all is done or the fetch is over."""
        with self._changed:
            while self._board and not self._is_over() and who in self._live:
                now = time.monotonic()
                if piece := self._board.take(who, now):
                    return piece
                slow, left = self._board.latest(who, now)
                if slow and slow in self._sockets:
                    sockets.cut(self._sockets[slow])
                self._changed.wait(left or 1.0)
            return None

    def _receive(self, connection: socket.socket, request: Request) -> None:
        key, sums = self._wanted.key, []
        sockets.send(connection, [request.seal(key)])
        head = AnswerHead.parse(sockets.receive_head(connection))
        if head.status != messages.OK or head.num_bytes != request.num_body_bytes:
            body = sockets.receive(connection, min(head.num_bytes, messages.MAX_HEAD_BYTES))
            head.check(key, request.nonce, body)
            raise HealError(body.decode(errors="replace"))
        head.check(key, request.nonce)
        for begin, end in request.blocks():
            sums.append(self._receive_block(connection, begin, end))
        rest = head.num_bytes - (request.end - request.begin)
        messages.check_sums(key, request.nonce, sums, sockets.receive(connection, rest))

    def _receive_block(self, connection: socket.socket, begin: int, end: int) -> bytes:
        views = list(self._memory.cut(begin, end))
        sockets.receive_into(connection, views)
        checksum = xxhash.xxh3_64()
        for view in views:
            checksum.update(view)
        return checksum.digest()


def _fetchers(wanted: Wanted) -> list[Fetcher]:
    sources = len(wanted.sources)
    each = max(1, -(-wanted.num_connections // sources))
    return [Fetcher(source, number) for source in range(sources) for number in range(each)]

"""The transport that a Manager has by default: from memory to memory, over connections of its own.

    manager = Manager(..., checkpoint_transport=HTTPTransport(timedelta(seconds=60)))

It serves the state where it is, without a copy; takes it from several peers at once; receives into
fresh memory, so that a heal that fails changes nothing; proves on both sides that the other belongs
to the run; and checks every block. See `messages` for what is sent, `server` and `fetch` for how.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.checkpointing import memory
from hpc_elastic.ft.checkpointing.fetch import Fetch, Wanted
from hpc_elastic.ft.checkpointing.layout import Layout, State, Target, digest
from hpc_elastic.ft.checkpointing.server import Offer, Server
from hpc_elastic.ft.checkpointing.sockets import Pieces
from hpc_elastic.ft.checkpointing.transport import CheckpointTransport, HealError
from hpc_elastic.net.keys import peers_secret

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
        self._server = Server(self._key)
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
        state = State(state_dict, step)
        layout = state.layout.to_json()
        rows = sorted(zip(state.layout.specs, state.raw, strict=True), key=lambda row: row[0].begin)
        pieces = Pieces(
            [(s.begin, s.num_bytes, memory.reader(raw)) for s, raw in rows if s.num_bytes]
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
        wanted = Wanted(sources, self._key, step, timeout.total_seconds(), self._num_connections)
        target: list[Target] = []

        def make(layout: Layout) -> Pieces:
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

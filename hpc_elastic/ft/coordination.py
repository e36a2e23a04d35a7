"""The coordinator of training jobs that no launcher started: torchft's `LighthouseServer`.

    lighthouse = LighthouseServer(bind="[::]:29510", min_replicas=2)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

or ``hpc-elastic lighthouse``. One that is killed may be started again at the same address: replicas
go on without it, and come back to it. In a run (``launcher=slurm ft=true``) the leader does this.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.messages import PURPOSE, SESSION_EPOCH, frame, parse_address, unpack
from hpc_elastic.transport.addresses import own_addresses
from hpc_elastic.transport.auth import user_secret
from hpc_elastic.transport.connection import BUFFER_BYTES, Listener, ServerConnection

_MAX_TICK_S = 0.1
_TICKS_A_JOIN = 4


@dataclass(frozen=True)
class LighthouseOptions:
    """How a lighthouse decides.

    Attributes:
        min_replicas: A quorum has at least as many members, from 1.
        join_timeout_ms: How long it waits for replicas that are connected and do not ask yet.
        quorum_tick_ms: How often it looks at its time-outs, at most 100.
        heartbeat_timeout_ms: A replica that is silent for longer is lost.
    """

    min_replicas: int
    join_timeout_ms: int = 100
    quorum_tick_ms: int = 100
    heartbeat_timeout_ms: int = 5000

    def __post_init__(self) -> None:
        """Check.

        Raises:
            ConfigError: a number is out of range.
        """
        ranges = (("min_replicas", 1), ("join_timeout_ms", 0), ("quorum_tick_ms", 1),
                  ("heartbeat_timeout_ms", 100))  # fmt: skip
        for key, least in ranges:
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"at least {least}")

    @property
    def terms(self) -> LighthouseTerms:
        """What goes for its connections."""
        tick_s = self.quorum_tick_ms / 1000
        if self.join_timeout_ms:
            tick_s = min(tick_s, self.join_timeout_ms / 1000 / _TICKS_A_JOIN)
        return LighthouseTerms(min(tick_s, _MAX_TICK_S), self.heartbeat_timeout_ms / 1000)


class LighthouseServer:
    """A lighthouse on a thread of this process."""

    def __init__(
        self,
        bind: str = "[::]:0",
        min_replicas: int = 1,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,
        heartbeat_timeout_ms: int = 5000,
    ) -> None:
        """Open the port and serve.

        Args:
            bind: ``address:port``; port 0 is any free one, ``[::]`` and ``0.0.0.0`` all addresses.
            min_replicas: See `LighthouseOptions`, as for the others.
            join_timeout_ms: The same.
            quorum_tick_ms: The same.
            heartbeat_timeout_ms: The same.

        Raises:
            ConfigError: an argument can not work.
            OSError: the address is not this host's, or the port is taken.
        """
        options = LighthouseOptions(
            min_replicas, join_timeout_ms, quorum_tick_ms, heartbeat_timeout_ms
        )
        self._listener, self._address = open_port(bind)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(options, started.set)),
            name="lighthouse",
            daemon=True,
        )
        self._thread.start()
        started.wait()

    def address(self) -> str:
        """Return what to give to a Manager as its ``lighthouse_addr``: ``http://host:port``."""
        return self._address

    def shutdown(self) -> None:
        """Stop serving. May be repeated."""
        if self._loop is not None and self._serving is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    async def _serve(self, options: LighthouseOptions, started: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._serving = asyncio.create_task(serve(self._listener, options))
        started()
        with suppress(asyncio.CancelledError):
            await self._serving


async def serve(listener: Listener, options: LighthouseOptions) -> None:
    """Be a lighthouse until cancelled.

    Its quorum ids rise from run to run with the clock of this host, and past all that replicas tell
    it of.
    """
    keeper = LighthouseState(
        time.time_ns() // 1_000_000,
        min_replicas=options.min_replicas,
        join_timeout_s=options.join_timeout_ms / 1000,
    )
    await Lighthouse(listener, keeper, options.terms, user_secret(PURPOSE)).serve()


def open_port(bind: str) -> tuple[Listener, str]:
    """Return the open port, and the address at which other hosts reach it.

    Raises:
        ConfigError: ``bind`` is no ``address:port``.
        OSError: the address is not this host's, or the port is taken.
    """
    try:
        host, port = parse_address(bind)
    except ConfigError as e:
        raise ConfigError("bind", bind, "give it as address:port, such as 0.0.0.0:29510") from e
    listener = Listener(host, port)
    shown = _reachable(host)
    return listener, f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.port}"


def _reachable(host: str) -> str:
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
    except ValueError:  # a name
        return host
    known = next(address for address in own_addresses())
    if not ipaddress.ip_address(known).is_loopback:
        return known
    with suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return known


# ---- A keeper of the quorum with a port of its own; `coordination` says what is heard there
# Runs that Slurm started have no lighthouse: their leader keeps the quorum.


_MAX_STRANGERS = 512
_MAX_ID = 256
_STILL_S = 0.3
"""A lighthouse that has not looked at its clock for so long stood still: its process was stopped,
or the thread of a script that it is held the interpreter lock."""
_EXCUSED_S = 1.0
"""Whose connection has ended meanwhile may take so long to come back."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LighthouseTerms:
    """What a lighthouse goes by.

    Attributes:
        tick_s: How often it looks at its time-outs; whatever happens is acted on at once.
        silence_s: A replica that says nothing for longer is lost.
    """

    tick_s: float
    silence_s: float


class Lighthouse:
    """Serves a keeper to attendants, in one event loop."""

    def __init__(
        self, listener: Listener, keeper: LighthouseState, terms: LighthouseTerms, secret: bytes
    ) -> None:
        self._listener = listener
        self._keeper = keeper
        self._terms = terms
        self._secret = secret
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._replicas: dict[str, ServerConnection] = {}
        self._names: dict[ServerConnection, str] = {}
        self._heard: dict[ServerConnection, float] = {}
        self._strangers: dict[ServerConnection, None] = {}
        """Who has not proved yet that it knows the secret, the longest first."""
        self._arrivals: set[asyncio.Task[None]] = set()
        self._awaited: dict[str, asyncio.TimerHandle] = {}
        """Who went while this process stood still, and may come back."""
        self._ticked = self._excused_until = 0.0
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until cancelled; then close all connections."""
        self._listener.serve(self._take)
        self._ticked = self._loop.time()
        try:
            while True:
                await asyncio.sleep(self._terms.tick_s)
                self._look_at_clock()
                self._ticked = self._loop.time()
                self._drop_silent()
                self._carry_out(self._keeper.tick(self._loop.time()))
        finally:
            self._listener.close()
            for timer in self._awaited.values():
                timer.cancel()
            for visitor in [*self._names, *self._strangers]:
                visitor.close()

    def _take(self, connection: socket.socket) -> None:
        visitor = ServerConnection(self._secret, SESSION_EPOCH, self, self._buffer)
        self._strangers[visitor] = None
        if len(self._strangers) > _MAX_STRANGERS:
            next(iter(self._strangers)).abort("too many have not proved who they are")
        task = asyncio.create_task(self._let_in(visitor, connection))
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def _let_in(self, visitor: ServerConnection, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: visitor, connection)
        except OSError as e:
            connection.close()
            self.left(visitor, f"it ended as soon as it came: {e}")

    # ---- what connections report (`transport.connection.ConnectionOwner`)
    # ------------------------------------

    def arrived(self, visitor: ServerConnection, hello: dict[str, Any]) -> None:
        """Let a replica in; the one of the same name before it is no more."""
        name = hello["replica"]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID:
            raise ValueError("no replica id")
        self._strangers.pop(visitor, None)
        before = self._replicas.pop(name, None)
        if before is not None:
            self._forget(before)
            before.abort("it has come back on another connection")
        if name in self._awaited:
            self._awaited.pop(name).cancel()
        self._replicas[name] = visitor
        self._names[visitor] = name
        self._heard[visitor] = self._loop.time()
        visitor.send({"type": "terms", "silence_s": self._terms.silence_s})
        self._carry_out(self._keeper.arrived(name, self._loop.time()))

    def said(self, visitor: ServerConnection, message: dict[str, Any]) -> None:
        """Hand a message to the keeper."""
        name = self._names.get(visitor)
        if name is None:
            return
        now = self._heard[visitor] = self._loop.time()
        if message["type"] == "ft":
            self._carry_out(self._keeper.said(name, unpack(message["message"]), now))
        else:
            visitor.send({"type": "beat"})

    def left(self, visitor: ServerConnection, why: str) -> None:
        """Tell the keeper who is lost."""
        self._strangers.pop(visitor, None)
        name = self._names.get(visitor)
        self._forget(visitor)
        if name is not None:
            del self._replicas[name]
            self._look_at_clock()
            if self._loop.time() < self._excused_until:
                later = self._loop.call_later
                self._awaited[name] = later(_EXCUSED_S, self._lose, name, why)
            else:
                self._lose(name, why)

    def _lose(self, name: str, why: str) -> None:
        self._awaited.pop(name, None)
        _log.info("the connection of %s ended: %s", name, why)
        self._carry_out(self._keeper.left(name, why, self._loop.time()))

    def _look_at_clock(self) -> None:
        """Notice that this process has stood still: replicas gave it up, and will be back."""
        now = self._loop.time()
        if now - self._ticked > self._terms.tick_s + _STILL_S:
            self._excused_until = now + _EXCUSED_S
            self._heard = dict.fromkeys(self._heard, now)

    def _forget(self, visitor: ServerConnection) -> None:
        self._names.pop(visitor, None)
        self._heard.pop(visitor, None)

    def _drop_silent(self) -> None:
        since = self._loop.time() - self._terms.silence_s
        for visitor in [v for v, heard in self._heard.items() if heard < since]:
            visitor.abort(f"silent for {self._terms.silence_s:g} s")

    def _carry_out(self, sends: Iterable[ReplicaMessage]) -> None:
        for send in sends:
            visitor = self._replicas.get(send.replica)
            if visitor is not None:
                visitor.send(frame(send.message))

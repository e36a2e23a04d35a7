"""Standalone lighthouse: torchft's `LighthouseServer`, for jobs that no launcher started.

    lighthouse = LighthouseServer(bind="[::]:29510", min_replicas=2)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

or ``hpc-elastic lighthouse``. One that is killed may be started again at the same address: replicas
go on without it, and reconnect. In a run (``launcher=slurm ft=true``) the leader is the lighthouse.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft import _unavailable, messages
from hpc_elastic.ft.lighthouse_state import LighthouseState, ReplicaMessage
from hpc_elastic.ft.quorum import QuorumRules
from hpc_elastic.transport import interface
from hpc_elastic.transport.auth import user_secret
from hpc_elastic.transport.connection import Listener, ServerConnection

_MAX_TICK_S = 0.1
_TICKS_PER_JOIN = 4
_MAX_REPLICA_ID = 256
_STALL_S = 0.3
"""A lighthouse stalled if it has not ticked for longer: its process was stopped, or the script that
it is a thread of held the interpreter lock."""
_RECONNECT_S = 1.0
"""Time of replicas to reconnect whose connections ended during a stall."""

_log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    """Return what stands for torchft's other names."""
    return _unavailable.find_name(__name__, name)


@dataclass(frozen=True)
class LighthouseOptions:
    """The options of a lighthouse.

    Attributes:
        join_timeout_ms: Wait for replicas that are connected and do not request a quorum yet.
        quorum_tick_ms: Time-outs are checked at this interval; 100 ms if it is longer.
    """

    min_replicas: int
    join_timeout_ms: int = 100
    quorum_tick_ms: int = 100
    heartbeat_timeout_ms: int = 5000

    def __post_init__(self) -> None:
        """Raise ConfigError if a number is out of range."""
        ranges = (("min_replicas", 1), ("join_timeout_ms", 0), ("quorum_tick_ms", 1),
                  ("heartbeat_timeout_ms", 100))  # fmt: skip
        for key, least in ranges:
            if getattr(self, key) < least:
                raise ConfigError(key, getattr(self, key), f"at least {least}")


class LighthouseServer:
    """A lighthouse on a thread of this process.

    Args:
        bind: ``address:port``; port 0 is any free one, ``[::]`` and ``0.0.0.0`` all addresses.
            None: any free port of the address by which other nodes reach this one.
        min_replicas: See `LighthouseOptions`, as for the others.
        join_timeout_ms: The same.
        quorum_tick_ms: The same.
        heartbeat_timeout_ms: The same.
    """

    def __init__(
        self,
        bind: str | None = None,
        min_replicas: int = 1,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,
        heartbeat_timeout_ms: int = 5000,
    ) -> None:
        """Open the port and serve.

        Raises:
            ConfigError: An argument is out of range.
            OSError: The address is not this host's, or the port is taken.
        """
        options = LighthouseOptions(
            min_replicas, join_timeout_ms, quorum_tick_ms, heartbeat_timeout_ms
        )
        self._listener, self._address = open_port(bind)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        started = threading.Event()

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self._serving = asyncio.create_task(serve(self._listener, options))
            started.set()
            with suppress(asyncio.CancelledError):
                await self._serving

        self._thread = threading.Thread(
            target=lambda: asyncio.run(run()), name="lighthouse", daemon=True
        )
        self._thread.start()
        started.wait()

    def address(self) -> str:
        """Return the ``lighthouse_addr`` of a Manager: ``http://host:port``."""
        return self._address

    def shutdown(self) -> None:
        """Stop serving. May be repeated."""
        if self._loop is not None and self._serving is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()


async def serve(listener: Listener, options: LighthouseOptions) -> None:
    """Serve a lighthouse until cancelled.

    Its quorum ids rise from one start to the next with this host's clock, and above all reported
    ids.
    """
    state = LighthouseState(
        time.time_ns() // 1_000_000,
        QuorumRules(options.min_replicas, options.join_timeout_ms / 1000),
    )
    await Lighthouse(listener, state, options, user_secret(messages.LIGHTHOUSE_PURPOSE)).serve()


def open_port(bind: str | None, default_port: int = 0) -> tuple[Listener, str]:
    """Return the open port, and the address at which other hosts reach it.

    ``bind`` is ``address:port``; None is ``default_port`` at the address of this host. Raises
    ConfigError for another form, and OSError if it is not this host's address or the port is taken.
    """
    if bind is None:
        host, port = _host_address(), default_port
    else:
        try:
            host, port = messages.parse_address(bind)
        except ConfigError as e:
            remedy = "give it as address:port, such as 0.0.0.0:29510"
            raise ConfigError("bind", bind, remedy) from e
    listener = Listener(host, port)
    shown = host
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(host).is_unspecified:
            shown = _host_address()
    return listener, f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.port}"


def _host_address() -> str:
    """Return the address by which other hosts reach this one; loopback if it has no other."""
    try:
        return interface.find(socket.gethostname(), None, lambda: None).address
    except ConfigError:
        return interface.LOOPBACK.address


class Lighthouse:
    """Connects a `LighthouseState` with manager servers, in one event loop."""

    def __init__(
        self, listener: Listener, state: LighthouseState, options: LighthouseOptions, secret: bytes
    ) -> None:
        self._listener = listener
        self._state = state
        self._tick_s = min(_MAX_TICK_S, options.quorum_tick_ms / 1000)
        if options.join_timeout_ms:
            self._tick_s = min(self._tick_s, options.join_timeout_ms / 1000 / _TICKS_PER_JOIN)
        self._silence_s = options.heartbeat_timeout_ms / 1000
        self._secret = secret
        self._connections: dict[str, ServerConnection] = {}
        self._names: dict[ServerConnection, str] = {}
        self._received_at: dict[ServerConnection, float] = {}
        self._reconnecting: dict[str, asyncio.TimerHandle] = {}
        """Replicas whose connections ended during a stall."""
        self._ticked_at = self._stalled_until = 0.0
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until cancelled; then close all connections."""
        self._listener.serve(self._secret, messages.LIGHTHOUSE_SESSION, self)
        self._ticked_at = self._loop.time()
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                self._check_for_stall()
                self._ticked_at = self._loop.time()
                since = self._loop.time() - self._silence_s
                for connection in [c for c, at in self._received_at.items() if at < since]:
                    connection.abort(f"silent for {self._silence_s:g} s")
                self._send_all(self._state.on_tick(self._loop.time()))
        finally:
            self._listener.close()
            for timer in self._reconnecting.values():
                timer.cancel()

    # ---- events of connections (`transport.connection.ConnectionOwner`) ------------------

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """Add a replica; an earlier connection of the same name ends."""
        name = hello["replica"]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_REPLICA_ID:
            raise ValueError("no replica id")
        if (before := self._connections.pop(name, None)) is not None:
            del self._names[before], self._received_at[before]
            before.abort("it has reconnected")
        if name in self._reconnecting:
            self._reconnecting.pop(name).cancel()
        self._connections[name] = connection
        self._names[connection] = name
        self._received_at[connection] = self._loop.time()
        connection.send({"type": "terms", "silence_s": self._silence_s})
        self._send_all(self._state.on_connect(name, self._loop.time()))

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """Handle a message of a replica."""
        name = self._names.get(connection)
        if name is None:
            return
        now = self._received_at[connection] = self._loop.time()
        if message["type"] == "ft":
            self._send_all(self._state.on_message(name, messages.unpack(message["message"]), now))
        else:
            connection.send({"type": "heartbeat"})

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """Handle the end of a connection."""
        name = self._names.pop(connection, None)
        if name is None:
            return
        del self._connections[name], self._received_at[connection]
        self._check_for_stall()
        if self._loop.time() < self._stalled_until:
            later = self._loop.call_later
            self._reconnecting[name] = later(_RECONNECT_S, self._lose_replica, name, reason)
        else:
            self._lose_replica(name, reason)

    def _lose_replica(self, name: str, reason: str) -> None:
        self._reconnecting.pop(name, None)
        _log.info("the connection of %s ended: %s", name, reason)
        self._send_all(self._state.on_disconnect(name, reason, self._loop.time()))

    def _check_for_stall(self) -> None:
        """Excuse silence and lost connections if this process has stalled: replicas reconnect."""
        now = self._loop.time()
        if now - self._ticked_at > self._tick_s + _STALL_S:
            self._stalled_until = now + _RECONNECT_S
            self._received_at = dict.fromkeys(self._received_at, now)

    def _send_all(self, sends: Iterable[ReplicaMessage]) -> None:
        for send in sends:
            connection = self._connections.get(send.replica)
            if connection is not None:
                connection.send(messages.to_frame(send.message))

"""The coordinator of training jobs that no launcher started: torchft's `LighthouseServer`.

    lighthouse = LighthouseServer(bind="[::]:29510", min_replicas=2)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()

or ``hpc-elastic lighthouse``. One that is killed may be started again at the same address: replicas
go on without it, and come back to it. In a run (``launcher=slurm ft=true``) the leader does this.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hpc_elastic.errors import ConfigError
from hpc_elastic.ft.keeper import Keeper
from hpc_elastic.ft.lighthouse import Lighthouse, Terms
from hpc_elastic.ft.lighthouse_frames import PURPOSE, parse_address
from hpc_elastic.net.addresses import own_addresses
from hpc_elastic.net.keys import user_secret
from hpc_elastic.net.listener import Listener

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
    def terms(self) -> Terms:
        """What goes for its connections."""
        tick_s = self.quorum_tick_ms / 1000
        if self.join_timeout_ms:
            tick_s = min(tick_s, self.join_timeout_ms / 1000 / _TICKS_A_JOIN)
        return Terms(min(tick_s, _MAX_TICK_S), self.heartbeat_timeout_ms / 1000)


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
    keeper = Keeper(
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

"""Probes: whether peers reach this node, and it reaches them, by handshakes in both directions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from hpc_elastic.transport.connection import Listener, ServerConnection, connect

_log = logging.getLogger(__name__)

_TERM = 0
"""Context of the handshake: the terms of leaders begin with 1."""
_ATTEMPT_S, _NEXT_ATTEMPT_S = 1.5, 0.5


async def reaches(address: str, port: int, secret: bytes, within_s: float) -> bool:
    """Return whether a peer's `ProbePorts` can be reached, with messages in both directions.

    Another attempt begins every half a second, beside the last ones: one lost packet of a handshake
    delays it by a second.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    attempts: set[asyncio.Task[None]] = set()
    try:
        while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
            attempts.add(asyncio.create_task(_exchange(address, port, secret)))
            ended, attempts = await asyncio.wait(
                attempts,
                timeout=min(left_s, _NEXT_ATTEMPT_S),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if any(attempt.exception() is None for attempt in ended):
                return True
            if ended:  # refused, for one
                await asyncio.sleep(min(left_s, _NEXT_ATTEMPT_S))
        return False
    finally:
        for attempt in attempts:
            attempt.cancel()
        await asyncio.gather(*attempts, return_exceptions=True)


async def _exchange(address: str, port: int, secret: bytes) -> None:
    async with asyncio.timeout(_ATTEMPT_S):
        (await connect(address, port, secret, _TERM, {})).abort()


class ProbePorts:
    """Open ports that accept probes of peers; they carry no other message.

    Args:
        addresses: Of this node; one that is not its own is left out.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self._listeners: list[Listener] = []
        self.where: list[tuple[str, int]] = []
        """Address and number of each port."""
        for address in dict.fromkeys(addresses):
            try:
                listener = Listener(address)
            except OSError as e:
                _log.warning("no port for probes at %s: %s", address, e)
                continue
            self._listeners.append(listener)
            self.where.append((address, listener.port))

    def serve(self, secret: bytes) -> None:
        """Accept probes from now on, in the running event loop."""
        for listener in self._listeners:
            listener.serve(secret, _TERM, self)

    def close(self) -> None:
        """Close the ports."""
        for listener in self._listeners:
            listener.close()

    def on_connect(self, connection: ServerConnection, hello: dict[str, Any]) -> None:
        """See `ConnectionOwner`: a peer has reached this node, and ends the connection."""

    def on_message(self, connection: ServerConnection, message: dict[str, Any]) -> None:
        """See `ConnectionOwner`."""

    def on_disconnect(self, connection: ServerConnection, reason: str) -> None:
        """See `ConnectionOwner`."""
